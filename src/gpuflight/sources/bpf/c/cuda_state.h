/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * Processes, threads, streams and devices: which streams have work that nobody has waited for.
 *
 * A span of a stream is open from the first launch until a call returns that waited for all of it. A device is busy while
 * one of its streams has a span open; their handles stand in device.open, which is all that a device-wide wait looks at.
 * Launches come 100 times more often than waits: a launch whose table entry carries the generation of its process knows
 * that its span is open, and looks no further. Each wait changes the generation when it begins and when it ends.
 */
#ifndef CUDA_STATE_H
#define CUDA_STATE_H

#include "cuda_maps.h"

#ifndef GF_BCC
static __u64 (*bpf_jiffies64)(void) = (void *)118; /* Linux 5.5 */
#endif

#define LEGACY_STREAM 1
#define IS_THREAD_STREAM(stream) (((stream) & 7) == 2)

/* bpf_ktime_get_ns may step back by some µs when the kernel trims its clock. */
gf_inline __u64 since(__u64 then, __u64 now)
{
	return now > then ? now - then : 0;
}

gf_inline __u64 normal_stream(__u64 raw, __u64 cookie, __u64 id)
{
	if (raw == 2 || (raw == 0 && PER_THREAD(cookie)))
		return id << 32 | 2;
	return raw == 0 ? LEGACY_STREAM : raw;
}

gf_inline void hit(__u64 cookie)
{
	__u32 number = FILE_NUMBER(cookie);
	__u64 *count = gf_lookup(hits, &number);

	if (count)
		gf_add(count, 1);
}

gf_inline struct process *process_of(__u32 tgid, __u64 now)
{
	struct process *process = gf_lookup(processes, &tgid);

	if (!process) {
		struct process fresh = {};

		fresh.first_ns = now;
		fresh.generation = now;
		gf_insert(processes, &tgid, &fresh);
		process = gf_lookup(processes, &tgid);
		if (!process)
			gf_loss(LOSS_PROCESSES);
	}
	return process;
}

gf_inline struct thread *thread_of(__u64 id)
{
	struct thread *thread = gf_lookup(threads, &id);

	if (!thread) {
		__u32 zero = 0;
		struct zero_bytes *zeros_ = gf_lookup(zeros, &zero);

		if (!zeros_)
			return NULL;
		gf_insert(threads, &id, (struct thread *)zeros_);
		thread = gf_lookup(threads, &id);
		if (!thread)
			gf_loss(LOSS_THREADS);
	}
	return thread;
}

gf_inline struct device *device_of(__u32 tgid, __u32 number)
{
	struct device_key key = {};
	struct device *device;

	key.tgid = tgid;
	key.device = number;
	device = gf_lookup(devices, &key);
	if (!device) {
		__u32 zero = 0;
		struct zero_bytes *zeros_ = gf_lookup(zeros, &zero);

		if (!zeros_)
			return NULL;
		gf_insert(devices, &key, (struct device *)zeros_);
		device = gf_lookup(devices, &key);
		if (!device)
			gf_loss(LOSS_DEVICES);
	}
	return device;
}

gf_inline void stream_key_of(struct stream_key *key, __u32 tgid, __u32 device, __u64 stream)
{
	key->tgid = tgid;
	key->device = stream == LEGACY_STREAM || IS_THREAD_STREAM(stream) ? device : ANY_DEVICE;
	key->stream = stream;
}

gf_inline struct stream *stream_of(__u32 tgid, __u32 device, __u64 stream)
{
	struct stream_key key = {};
	struct stream *found;

	stream_key_of(&key, tgid, device, stream);
	found = gf_lookup(streams, &key);
	if (!found) {
		struct stream fresh = {};

		fresh.device = device;
		gf_insert(streams, &key, &fresh);
		found = gf_lookup(streams, &key);
		if (!found)
			gf_loss(LOSS_STREAMS);
	}
	return found;
}

/* Streams are spread over the places by their handle, so that two CPUs rarely look at the same one. */
gf_inline __u32 first_place(__u64 stream)
{
	return (__u32)((stream * 0x9E3779B97F4A7C15ull) >> 58);
}

/* A launch on this stream. False if it goes into a graph being captured instead of to the GPU. */
gf_inline int open_stream(struct process *process, __u32 tgid, __u32 number, __u64 handle, __u64 now)
{
	struct stream *stream = stream_of(tgid, number, handle);
	struct device *device;
	__u32 at = first_place(handle);

	if (!stream)
		return 1;
	if (stream->capture && stream->capture == process->capture)
		return 0;
	stream->looked_ns = now;
	if (stream->open_since)
		return 1;
	device = device_of(tgid, stream->device);
	if (!device)
		return 1;
	for (int i = 0; i < OPEN_STREAMS; i++) {
		__u64 *place = &device->open[(at + i) & (OPEN_STREAMS - 1)];

		if (!*place || *place == handle) {
			*place = handle;
			stream->open_since = now;
			if (!device->open_since)
				device->open_since = now;
			return 1;
		}
	}
	gf_loss(LOSS_OPEN_STREAMS);
	return 1;
}

gf_inline void close_device_if_idle(struct device *device, __u64 now)
{
	__u64 any = 0;

	for (int i = 0; i < OPEN_STREAMS; i++)
		any |= device->open[i];
	if (!any && device->open_since) {
		device->busy_ns += since(device->open_since, now);
		device->spans++;
		device->open_since = 0;
	}
}

/* All work that was launched on this stream before `before` is done. True if that was all of its work. */
gf_inline int close_span(struct stream *stream, __u64 before, __u64 now)
{
	if (!stream->open_since || stream->looked_ns > before)
		return 0;
	stream->busy_ns += since(stream->open_since, now);
	stream->spans++;
	stream->open_since = 0;
	return 1;
}

gf_inline void close_stream(__u32 tgid, __u32 number, __u64 handle, __u64 before, __u64 now)
{
	struct stream_key key = {};
	struct stream *stream;
	struct device *device;
	__u32 at = first_place(handle);

	stream_key_of(&key, tgid, number, handle);
	stream = gf_lookup(streams, &key);
	if (!stream || !close_span(stream, before, now))
		return;
	device = device_of(tgid, stream->device);
	if (!device)
		return;
	for (int i = 0; i < OPEN_STREAMS; i++) {
		__u64 *place = &device->open[(at + i) & (OPEN_STREAMS - 1)];

		if (*place == handle) {
			*place = 0;
			break;
		}
	}
	close_device_if_idle(device, now);
}

/* A wait for the whole device, or for its legacy default stream, which all blocking streams wait for. */
gf_inline void close_streams(__u32 tgid, __u32 number, int only_blocking, __u64 before, __u64 now)
{
	struct device_key key = {};
	struct device *device;

	key.tgid = tgid;
	key.device = number;
	device = gf_lookup(devices, &key);
	if (!device || !device->open_since)
		return;
	for (int i = 0; i < OPEN_STREAMS; i++) {
		__u64 handle = device->open[i];
		struct stream_key at = {};
		struct stream *stream;

		if (!handle)
			continue;
		stream_key_of(&at, tgid, number, handle);
		stream = gf_lookup(streams, &at);
		if (!stream) {
			device->open[i] = 0;
			continue;
		}
		if (only_blocking && stream->flags & STREAM_NONBLOCKING)
			continue;
		if (close_span(stream, before, now))
			device->open[i] = 0;
	}
	close_device_if_idle(device, now);
}

gf_inline void waited_for(__u32 tgid, __u32 number, __u64 handle, __u64 before, __u64 now)
{
	if (handle == LEGACY_STREAM)
		close_streams(tgid, number, 1, before, now);
	else
		close_stream(tgid, number, handle, before, now);
}

#endif
