/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * What calls add up to: durations and errors by function, memory, copies.
 */
#ifndef CUDA_TABLES_H
#define CUDA_TABLES_H

#include "cuda_state.h"

#define NOT_READY 600 /* cudaErrorNotReady, CUDA_ERROR_NOT_READY: an answer */

gf_inline __u32 log2_of(__u64 value)
{
	__u32 bits = 0;

	if (value >> 32) {
		bits += 32;
		value >>= 32;
	}
	if (value >> 16) {
		bits += 16;
		value >>= 16;
	}
	if (value >> 8) {
		bits += 8;
		value >>= 8;
	}
	if (value >> 4) {
		bits += 4;
		value >>= 4;
	}
	if (value >> 2) {
		bits += 2;
		value >>= 2;
	}
	return bits + (value >> 1);
}

gf_inline void add_duration(__u32 tgid, __u32 api, __u64 duration_ns)
{
	struct api_key key = {};
	struct duration *sums;
	__u32 bucket = log2_of(duration_ns);

	key.tgid = tgid;
	key.api = api;
	sums = gf_lookup(durations, &key);
	if (!sums) {
		__u32 zero = 0;
		struct zero_bytes *zeros_ = gf_lookup(zeros, &zero);

		if (!zeros_)
			return;
		gf_insert(durations, &key, (struct duration *)zeros_);
		sums = gf_lookup(durations, &key);
		if (!sums) {
			gf_loss(LOSS_CALLS);
			return;
		}
	}
	if (bucket >= BUCKETS)
		bucket = BUCKETS - 1;
	gf_add(&sums->count, 1);
	gf_add(&sums->total_ns, duration_ns);
	if (duration_ns > sums->max_ns)
		sums->max_ns = duration_ns;
	gf_add(&sums->buckets[bucket], 1);
}

gf_inline void add_error(__u32 tgid, __u32 api, __u32 code, __u64 now)
{
	struct error_key key = {};
	struct error *sums;

	key.tgid = tgid;
	key.api = api;
	key.code = code;
	sums = gf_lookup(errors, &key);
	if (!sums) {
		struct error fresh = {};

		gf_insert(errors, &key, &fresh);
		sums = gf_lookup(errors, &key);
		if (!sums) {
			gf_loss(LOSS_ERRORS);
			return;
		}
	}
	gf_add(&sums->count, 1);
	sums->last_ns = now;
}

gf_inline struct memory *memory_of(__u32 tgid, __u32 device, __u32 kind)
{
	struct memory_key key = {};
	struct memory *sums;

	key.tgid = tgid;
	key.device = device;
	key.kind = kind;
	sums = gf_lookup(memory, &key);
	if (!sums) {
		struct memory fresh = {};

		gf_insert(memory, &key, &fresh);
		sums = gf_lookup(memory, &key);
		if (!sums)
			gf_loss(LOSS_MEMORY);
	}
	return sums;
}

gf_inline void forget_allocation(struct handle_key *key, const struct allocation *allocation)
{
	struct device_key at = {};
	struct device *device;

	at.tgid = key->tgid;
	at.device = allocation->device;
	device = gf_lookup(devices, &at);
	if (!device || allocation->time_ns > device->reset_ns) { /* else it went with the reset */
		struct memory *sums = memory_of(key->tgid, allocation->device, allocation->kind);

		if (sums) {
			gf_add(&sums->current, -allocation->size);
			gf_add(&sums->frees, 1);
		}
	}
	gf_delete(allocations, key);
}

/* cudaDeviceReset frees all memory of a device. */
gf_inline void reset_memory(__u32 tgid, __u32 device)
{
	for (__u16 kind = MEMORY_DEVICE; kind <= MEMORY_REGISTERED; kind++) {
		struct memory_key key = {};
		struct memory *sums;

		key.tgid = tgid;
		key.device = device;
		key.kind = kind;
		sums = gf_lookup(memory, &key);
		if (sums)
			sums->current = 0;
	}
}

gf_inline void add_allocation(__u32 tgid, __u32 tid, __u32 device, __u64 address, __u64 size, const struct call *call,
			      __u64 now)
{
	struct allocation fresh = {};
	struct handle_key key = {};
	struct allocation *old;
	struct memory *sums;

	if (!address || !size)
		return;
	key.tgid = tgid;
	key.handle = address;
	old = gf_lookup(allocations, &key);
	if (old) /* its free was not seen, or the memory of a device was reset */
		forget_allocation(&key, old);
	fresh.size = size;
	fresh.time_ns = now;
	fresh.caller = call->caller;
	fresh.stack_id = call->stack_id;
	fresh.tid = tid;
	fresh.device = device;
	fresh.kind = DETAIL(call->cookie);
	fresh.api = API(call->cookie);
	if (gf_insert(allocations, &key, &fresh)) {
		gf_loss(LOSS_ALLOCATIONS); /* not in current either: its free could not be taken off */
		return;
	}
	sums = memory_of(tgid, device, fresh.kind);
	if (!sums)
		return;
	gf_add(&sums->current, size);
	gf_add(&sums->allocated, size);
	gf_add(&sums->allocations, 1);
	if ((__s64)sums->current > (__s64)sums->peak)
		sums->peak = sums->current;
}

gf_inline void free_allocation(__u32 tgid, __u32 device, __u64 address, __u32 kind)
{
	struct handle_key key = {};
	struct allocation *allocation;

	if (!address)
		return;
	key.tgid = tgid;
	key.handle = address;
	allocation = gf_lookup(allocations, &key);
	if (allocation) {
		forget_allocation(&key, allocation);
	} else {
		struct memory *sums = memory_of(tgid, device, kind);

		if (sums)
			gf_add(&sums->unknown_frees, 1);
	}
}

gf_inline void add_copy(__u32 tgid, __u32 device, __u32 direction, __u32 asynchronous, __u64 bytes, __u64 now)
{
	struct copy_key key = {};
	struct copy *sums;

	key.tgid = tgid;
	key.device = device;
	key.direction = direction;
	key.asynchronous = asynchronous;
	sums = gf_lookup(copies, &key);
	if (!sums) {
		struct copy fresh = {};

		gf_insert(copies, &key, &fresh);
		sums = gf_lookup(copies, &key);
		if (!sums) {
			gf_loss(LOSS_COPIES);
			return;
		}
	}
	gf_add(&sums->count, 1);
	gf_add(&sums->bytes, bytes);
	if (bytes > sums->bytes_max)
		sums->bytes_max = bytes;
	sums->last_ns = now;
}

#endif
