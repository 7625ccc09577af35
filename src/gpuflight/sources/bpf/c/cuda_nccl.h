/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * NCCL: collectives as they are called, on the host. They launch kernels by CUDA calls, which count as such; so calls of
 * NCCL have a place of their own in the thread.
 */
#ifndef CUDA_NCCL_H
#define CUDA_NCCL_H

#include "cuda_calls.h"

#define MOST_RANKS_HERE 16 /* GPUs of one process, for ncclCommInitAll */
#define SMALL_COLLECTIVE 1000000 /* bytes */
#define DATATYPES 12 /* of ncclDataType_t, nccl.h 2.28 */
#define DATATYPE_SHIFTS 0x001321332200ULL /* log2 of the bytes of each, four bits, int8 the lowest to float8e5m2 */

GF_UPROBE(nccl_call)
{
	__u64 cookie = gf_cookie(ctx), id = bpf_get_current_pid_tgid(), now = bpf_ktime_get_ns();
	struct process *process = process_of(id >> 32, now);
	struct thread *thread = thread_of(id);

	hit(cookie);
	if (process && thread && !is_inner_call(ctx, &thread->nccl, cookie, now))
		keep_call(ctx, &thread->nccl, cookie, now);
	return 0;
}

gf_inline void add_collective(const struct call *call, __u32 tgid, __u32 code, __u64 now)
{
	__u64 cookie = call->cookie, duration_ns = since(call->entry_ns, now), elements;
	struct collective_key key = {};
	struct collective *sums;

	key.tgid = tgid;
	key.api = API(cookie);
	key.datatype = argument(call, ARG_B(cookie));
	key.reduction = ARG_D(cookie) ? (__u32)argument(call, ARG_D(cookie)) : ~0u;
	key.communicator = argument(call, ARG_STREAM(cookie));
	sums = gf_lookup(collectives, &key);
	if (!sums) {
		struct collective fresh = {};

		gf_insert(collectives, &key, &fresh);
		sums = gf_lookup(collectives, &key);
		if (!sums) {
			gf_loss(LOSS_COLLECTIVES);
			return;
		}
	}
	gf_add(&sums->count, 1);
	sums->last_ns = now;
	if (code) {
		gf_add(&sums->errors, 1);
		return;
	}
	elements = argument(call, ARG_A(cookie));
	gf_add(&sums->elements, elements);
	if (key.datatype < DATATYPES && elements < SMALL_COLLECTIVE &&
	    elements << (DATATYPE_SHIFTS >> 4 * key.datatype & 0xf) < SMALL_COLLECTIVE)
		gf_add(&sums->small, 1);
	gf_add(&sums->host_ns, duration_ns);
	if (duration_ns > sums->host_ns_max)
		sums->host_ns_max = duration_ns;
}

gf_inline void add_communicator(__u32 tgid, __u64 handle, __u32 ranks, __s32 rank, __u32 device, __u64 now)
{
	struct communicator made = {};
	struct handle_key key = {};

	if (!handle)
		return;
	key.tgid = tgid;
	key.handle = handle;
	made.created_ns = now;
	made.ranks = ranks;
	made.rank = rank;
	made.device = device;
	if (gf_update(communicators, &key, &made))
		gf_loss(LOSS_COMMUNICATORS);
}

GF_URETPROBE(nccl_return)
{
	__u64 cookie = gf_cookie(ctx), id = bpf_get_current_pid_tgid(), now = bpf_ktime_get_ns();
	struct thread *thread = gf_lookup(threads, &id);
	__u32 code = GF_RET(ctx), tgid = id >> 32;
	struct call *call;

	if (!thread || thread->nccl.cookie != cookie || SP_AT_RETURN(thread->nccl.sp) != GF_SP(ctx))
		return 0;
	call = &thread->nccl;
	add_duration(tgid, API(cookie), since(call->entry_ns, now));
	if (code)
		add_error(tgid, API(cookie), code, now);
	switch (CLASS(cookie)) {
	case CLASS_COLLECTIVE:
		add_collective(call, tgid, code, now);
		break;
	case CLASS_COMM_CREATE: /* (*communicator, ranks, 128 bytes by value, rank): those bytes lie on the stack, or at x2 */
		if (!code)
#if defined(__TARGET_ARCH_x86)
			add_communicator(tgid, user_word(call->arguments[0]), call->arguments[1], call->arguments[2],
					 thread->device, now);
#else
			add_communicator(tgid, user_word(call->arguments[0]), call->arguments[1], call->arguments[3],
					 thread->device, now);
#endif
		break;
	case CLASS_COMM_CREATE_ALL: /* (communicators, count, devices or null) */
		if (code)
			break;
		for (int i = 0; i < MOST_RANKS_HERE; i++) {
			__u32 device = i;

			if (i >= (__u32)call->arguments[1])
				break;
			if (call->arguments[2] &&
			    bpf_probe_read_user(&device, sizeof(device), (void *)(call->arguments[2] + 4 * i)) < 0)
				gf_loss(LOSS_ARGUMENTS);
			add_communicator(tgid, user_word(call->arguments[0] + 8 * i), call->arguments[1], i, device, now);
		}
		if ((__u32)call->arguments[1] > MOST_RANKS_HERE)
			gf_loss(LOSS_COMMUNICATORS);
		break;
	case CLASS_COMM_SPLIT: /* (communicator, color, key, *new communicator, …) */
		if (!code)
			add_communicator(tgid, user_word(call->arguments[3]), 0, -1, thread->device, now);
		break;
	case CLASS_COMM_DESTROY: {
		struct handle_key key = {};
		struct communicator *gone;

		key.tgid = tgid;
		key.handle = call->arguments[0];
		gone = gf_lookup(communicators, &key);
		if (gone && !code)
			gone->destroyed = 1;
		break;
	}
	default:
		break;
	}
	thread->nccl.cookie = 0;
	return 0;
}

#endif
