/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * Copies and fills: bytes and direction from the arguments of every form of the call. Included by cuda_calls.h.
 */
#ifndef CUDA_COPIES_H
#define CUDA_COPIES_H

#define BATCH_MOST 64 /* copies of one cudaMemcpyBatchAsync whose sizes are read */

/* CUmemorytype 1 host, 2 device, 3 array (on the device), 4 unified. */
gf_inline __u32 driver_direction(__u32 from, __u32 to)
{
	if (from == 4 || to == 4)
		return COPY_DEFAULT;
	if (from == 1)
		return to == 1 ? COPY_HTOH : COPY_HTOD;
	return to == 1 ? COPY_DTOH : COPY_DTOD;
}

gf_inline __u64 batch_bytes(const struct call *call)
{
	__u64 sum = 0, at = call->arguments[2], count = call->arguments[3];

	for (int i = 0; i < BATCH_MOST; i++) {
		__u64 size = 0;

		if (i >= count)
			break;
		if (bpf_probe_read_user(&size, sizeof(size), (void *)(at + 8 * i)) < 0)
			gf_loss(LOSS_ARGUMENTS);
		sum += size;
	}
	if (count > BATCH_MOST)
		gf_loss(LOSS_BATCHES);
	return sum;
}

gf_inline void account_copy(struct call *call, __u32 tgid, __u32 device, __u64 id, __u64 now)
{
	__u64 cookie = call->cookie, bytes = 0, words[4] = {};
	__u32 direction = DETAIL(cookie), from = 0, to = 0;

	switch (CLASS(cookie)) {
	case CLASS_COPY:
	case CLASS_MEMSET:
		bytes = argument(call, ARG_A(cookie));
		if (ARG_B(cookie))
			bytes *= argument(call, ARG_B(cookie));
		bytes <<= SHIFT(cookie);
		if (ARG_D(cookie))
			direction = argument(call, ARG_D(cookie));
		if (direction > COPY_MEMSET)
			direction = COPY_DEFAULT;
		break;
	case CLASS_COPY_3D: /* cudaMemcpy3DParms: extent at 128, kind at 152 */
		if (bpf_probe_read_user(words, 32, (void *)(call->arguments[0] + 128)) < 0)
			gf_loss(LOSS_ARGUMENTS);
		bytes = words[0] * words[1] * words[2];
		direction = (__u32)words[3] > COPY_DEFAULT ? COPY_DEFAULT : (__u32)words[3];
		break;
	case CLASS_COPY_3D_PEER: /* cudaMemcpy3DPeerParms: extent at 144 */
		if (bpf_probe_read_user(words, 24, (void *)(call->arguments[0] + 144)) < 0)
			gf_loss(LOSS_ARGUMENTS);
		bytes = words[0] * words[1] * words[2];
		break;
	case CLASS_COPY_BATCH:
		bytes = batch_bytes(call);
		break;
	case CLASS_COPY_DRIVER_2D: /* CUDA_MEMCPY2D: memory types at 16 and 72, width and height at 112 */
		bpf_probe_read_user(&from, 4, (void *)(call->arguments[0] + 16));
		bpf_probe_read_user(&to, 4, (void *)(call->arguments[0] + 72));
		if (bpf_probe_read_user(words, 16, (void *)(call->arguments[0] + 112)) < 0)
			gf_loss(LOSS_ARGUMENTS);
		bytes = words[0] * words[1];
		direction = driver_direction(from, to);
		break;
	case CLASS_COPY_DRIVER_3D: /* CUDA_MEMCPY3D: memory types at 32 and 120, width, height, depth at 176 */
		bpf_probe_read_user(&from, 4, (void *)(call->arguments[0] + 32));
		bpf_probe_read_user(&to, 4, (void *)(call->arguments[0] + 120));
		if (bpf_probe_read_user(words, 24, (void *)(call->arguments[0] + 176)) < 0)
			gf_loss(LOSS_ARGUMENTS);
		bytes = words[0] * words[1] * words[2];
		direction = driver_direction(from, to);
		break;
	case CLASS_MEMSET_3D: /* (cudaPitchedPtr, value, extent) */
#if defined(__TARGET_ARCH_x86)
		bytes = call->arguments[10] * call->arguments[11] * call->arguments[12];
#else
		if (bpf_probe_read_user(words, 24, (void *)call->arguments[2]) < 0)
			gf_loss(LOSS_ARGUMENTS);
		bytes = words[0] * words[1] * words[2];
#endif
		break;
	default:
		return;
	}
	add_copy(tgid, device, direction, !BLOCKS(cookie), bytes, now);
	/* Within a device, or from host to host, the call may return before the copy is done. */
	if (BLOCKS(cookie) && direction != COPY_DTOD && direction != COPY_MEMSET && direction != COPY_PTOP)
		waited_for(tgid, device, normal_stream(argument(call, ARG_STREAM(cookie)), cookie, id), call->entry_ns, now);
}

#endif
