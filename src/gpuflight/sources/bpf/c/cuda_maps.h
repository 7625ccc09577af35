/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * The maps of the CUDA probe. None forgets by itself: what finds no room is counted (enum loss), the reader takes out what
 * is over. Sizes are for about 100 busy processes on a host; the loader may ask for others.
 */
#ifndef CUDA_MAPS_H
#define CUDA_MAPS_H

#include "cuda.h"

GF_ARRAY(settings, __u64, SETTINGS); /* enum setting */
GF_PERCPU_ARRAY(hits, __u64, 1024); /* calls by FILE_NUMBER */
GF_HASH(processes, __u32, struct process, 4096);
GF_HASH(threads, __u64, struct thread, 8192);
GF_HASH(launches, struct launch_key, struct launch, 32768);
GF_HASH(devices, struct device_key, struct device, 2048);
GF_HASH(streams, struct stream_key, struct stream, 16384);
GF_HASH(events, struct handle_key, struct event, 32768);
GF_HASH(allocations, struct handle_key, struct allocation, 65536);
GF_HASH(memory, struct memory_key, struct memory, 4096);
GF_HASH(copies, struct copy_key, struct copy, 8192);
GF_HASH(durations, struct api_key, struct duration, 8192);
GF_HASH(errors, struct error_key, struct error, 4096);
GF_HASH(collectives, struct collective_key, struct collective, 8192);
GF_HASH(communicators, struct handle_key, struct communicator, 4096);
GF_HASH(contexts, struct handle_key, __u64, 1024);
GF_HASH(registered, struct handle_key, __u64, 131072); /* address of the name of a function */
GF_HASH(names, struct handle_key, struct name, 4096); /* until the reader takes them */
GF_STACKS(stacks, 8192);
GF_RINGBUF(life, 262144);

/* What a new entry of a big map is made of: too large for the stack of a program. Nobody writes to it. */
struct zero_bytes {
	__u64 words[128];
};
GF_ARRAY(zeros, struct zero_bytes, 1);

#endif
