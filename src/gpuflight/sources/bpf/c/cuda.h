/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * Layouts of the maps of cuda.bpf.c. sources/cuda_probe/layouts.py reads them: change both together (a test compares them
 * with the BTF of the object). Every key is padded by name, as the kernel compares keys byte by byte.
 */
#ifndef CUDA_H
#define CUDA_H

/* What a cookie says of the function it is for (sources/cuda_probe/cookies.py): numbers of arguments count from 1. */
#define API(cookie) ((__u32)((cookie) & 0x3ff))
#define CLASS(cookie) ((__u32)((cookie) >> 10 & 0x3f))
#define PER_THREAD(cookie) ((cookie) >> 16 & 1) /* stream 0 is that of the thread (_ptsz, _ptds) */
#define DRIVER(cookie) ((cookie) >> 17 & 1)
#define BLOCKS(cookie) ((cookie) >> 18 & 1) /* a copy that returns when all before it in its stream is done */
#define USES_STACK(cookie) ((cookie) >> 19 & 1)
#define ARG_A(cookie) ((__u32)((cookie) >> 20 & 0xf)) /* size */
#define ARG_B(cookie) ((__u32)((cookie) >> 24 & 0xf)) /* second factor of the size, flags, name */
#define ARG_STREAM(cookie) ((__u32)((cookie) >> 28 & 0xf))
#define ARG_D(cookie) ((__u32)((cookie) >> 32 & 0xf)) /* direction of a copy, reduction of a collective */
#define SHIFT(cookie) ((__u32)((cookie) >> 36 & 0xf)) /* log2 of the size of an element */
#define DETAIL(cookie) ((__u32)((cookie) >> 40 & 0xf)) /* kind of memory, direction of a copy */
#define FILE_NUMBER(cookie) ((__u32)((cookie) >> 48 & 0x3ff))

enum call_class {
	CLASS_PLAIN = 1,
	CLASS_SYNC_DEVICE,
	CLASS_SYNC_STREAM,
	CLASS_SYNC_EVENT,
	CLASS_STREAM_CREATE,
	CLASS_STREAM_DESTROY,
	CLASS_EVENT_CREATE,
	CLASS_EVENT_DESTROY,
	CLASS_EVENT_RECORD,
	CLASS_SET_DEVICE,
	CLASS_RESET_DEVICE,
	CLASS_ALLOC,
	CLASS_ALLOC_PITCH,
	CLASS_ALLOC_3D,
	CLASS_FREE,
	CLASS_COPY,
	CLASS_COPY_3D,
	CLASS_COPY_3D_PEER,
	CLASS_COPY_BATCH,
	CLASS_COPY_DRIVER_2D,
	CLASS_COPY_DRIVER_3D,
	CLASS_MEMSET,
	CLASS_MEMSET_3D,
	CLASS_HANDLE_OF,
	CLASS_NAME_OF,
	CLASS_CAPTURE_BEGIN,
	CLASS_CAPTURE_END,
	CLASS_WAIT_EVENT,
	CLASS_CONTEXT_CREATE,
	CLASS_CONTEXT_SET,
	CLASS_COLLECTIVE,
	CLASS_COMM_CREATE,
	CLASS_COMM_CREATE_ALL,
	CLASS_COMM_SPLIT,
	CLASS_COMM_DESTROY,
	CLASS_NCCL_PLAIN,
	CLASS_LAUNCH = 40,
	CLASS_LAUNCH_CONFIG,
	CLASS_LAUNCH_GRAPH,
	CLASS_REGISTER,
	CLASS_ENVIRONMENT,
};

/* Places of the map of settings. */
enum setting {
	SETTING_DRIVER, /* 1 while launches of libcuda are hooked too, so that launches of libcudart have to leave a mark */
	SETTING_DETACHED, /* when a file was unhooked last: calls begun before may have returned unseen */
	SETTINGS,
};

#define LONGEST_CALL_NS (60ull * 1000000000) /* a call that lasts longer has no inner calls any more, or was left unseen */

enum launch_kind { LAUNCH_RUNTIME = 0, LAUNCH_DRIVER = 1, LAUNCH_GRAPH = 2 };

enum memory_kind { MEMORY_DEVICE = 0, MEMORY_ASYNC, MEMORY_MANAGED, MEMORY_HOST, MEMORY_REGISTERED };

/* 0..4 as cudaMemcpyKind. */
enum direction { COPY_HTOH = 0, COPY_HTOD, COPY_DTOH, COPY_DTOD, COPY_DEFAULT, COPY_PTOP, COPY_MEMSET };

enum loss {
	LOSS_PROCESSES = 0,
	LOSS_THREADS,
	LOSS_LAUNCHES,
	LOSS_STREAMS,
	LOSS_DEVICES,
	LOSS_OPEN_STREAMS,
	LOSS_EVENTS,
	LOSS_ALLOCATIONS,
	LOSS_MEMORY,
	LOSS_COPIES,
	LOSS_CALLS,
	LOSS_ERRORS,
	LOSS_COLLECTIVES,
	LOSS_COMMUNICATORS,
	LOSS_NAMES,
	LOSS_REGISTERED,
	LOSS_RETURNS,
	LOSS_STACKS,
	LOSS_ARGUMENTS,
	LOSS_BATCHES,
	LOSS_CONTEXTS,
};

enum event_kind { EVENT_FORK = 1, EVENT_EXEC, EVENT_EXIT, EVENT_SETENV, EVENT_UNSETENV, EVENT_ALIAS };

#define OPEN_STREAMS 64
#define BUCKETS 40
#define NAME_BYTES 512
#define VALUE_BYTES 256
#define ARGUMENTS 14

#define PROCESS_MANY_DEVICES 1 /* a thread chose another device than 0: launches look at their thread */
#define PROCESS_RUNTIME 2
#define PROCESS_DRIVER 4
#define PROCESS_REGISTERED 8

struct process {
	__u64 first_ns;
	__u64 generation; /* never 0; changes whenever a stream may have become idle: launches of an older one look at their stream */
	__u64 launches_lost;
	__u64 launches_inner;
	__u64 set_device_calls;
	__u64 event_records;
	__u64 streams_created;
	__u64 streams_destroyed;
	__u64 events_created;
	__u64 events_destroyed;
	__u32 parent;
	__u32 names_of; /* process whose registered functions it inherited by fork; 0: none */
	__u32 flags;
	__u32 capture; /* number of the graph capture going on; 0: none */
	__u32 captures;
	__u32 pad;
};

struct call {
	__u64 cookie; /* 0: no call going on */
	__u64 sp;
	__u64 entry_ns;
	__u64 arguments[ARGUMENTS];
	__u64 caller;
	__s64 stack_id;
};

struct thread {
	struct call call;
	struct call nccl;
	__u64 mark_sp; /* runtime launch whose driver launch is not to be counted; 0: none */
	__u64 mark_shape;
	__u32 device;
	__u32 device_seen;
	__u64 context_pushed; /* device below the current one on the stack of contexts, + 1 */
};

struct launch_key {
	__u32 tgid;
	__u16 device;
	__u8 kind;
	__u8 pad;
	__u64 function;
	__u64 stream;
};

struct launch {
	__u64 count;
	__u64 threads;
	__u64 blocks;
	__u64 captured;
	__u64 threads_max;
	__u64 first_ns;
	__u64 looked_ns; /* last launch that looked at its stream, in both clocks */
	__u64 looked_jiffies;
	__u64 last_jiffies;
	__u64 generation;
	__u32 block_max;
	__u32 shared_max;
	__u32 grid[3];
	__u32 block[3];
	__u32 named;
	__u32 assumed; /* a thread whose choice of a device was not seen launched it: CUDA takes device 0 */
};

struct device_key {
	__u32 tgid;
	__u32 device;
};

struct device {
	__u64 busy_ns;
	__u64 open_since;
	__u64 spans;
	__u64 reset_ns;
	__u64 open[OPEN_STREAMS]; /* streams with a span open; 0: free place */
};

#define ANY_DEVICE (~0u)

struct stream_key {
	__u32 tgid;
	__u32 device; /* of default streams; ANY_DEVICE for a handle, which says all */
	__u64 stream;
};

#define STREAM_NONBLOCKING 1
#define STREAM_MAKING_SEEN 2
#define STREAM_DESTROYED 4

struct stream {
	__u64 busy_ns;
	__u64 open_since;
	__u64 spans;
	__u64 looked_ns; /* last launch that looked at it: the first of its generation, or later */
	__u64 created_ns;
	__u32 flags;
	__u32 capture; /* capture that its launches go to; counts only while it is that of the process */
	__u32 device;
	__u32 pad;
};

struct handle_key { /* events, allocations, registered functions, names, communicators, contexts */
	__u32 tgid;
	__u32 pad;
	__u64 handle;
};

struct event {
	__u64 recorded_ns;
	__u64 stream;
	__u32 device;
	__u32 capture;
};

struct allocation {
	__u64 size;
	__u64 time_ns;
	__u64 caller;
	__s32 stack_id;
	__u32 tid;
	__u16 device;
	__u16 kind;
	__u32 api;
};

struct memory_key {
	__u32 tgid;
	__u16 device;
	__u16 kind;
};

struct memory {
	__u64 current;
	__u64 peak;
	__u64 allocated;
	__u64 allocations;
	__u64 frees;
	__u64 unknown_frees;
};

struct copy_key {
	__u32 tgid;
	__u16 device;
	__u8 direction;
	__u8 asynchronous;
};

struct copy {
	__u64 count;
	__u64 bytes;
	__u64 bytes_max;
	__u64 last_ns;
};

struct api_key {
	__u32 tgid;
	__u32 api;
};

struct duration {
	__u64 count;
	__u64 total_ns;
	__u64 max_ns;
	__u32 buckets[BUCKETS];
};

struct error_key {
	__u32 tgid;
	__u32 api;
	__u32 code;
	__u32 pad;
};

struct error {
	__u64 count;
	__u64 last_ns;
};

struct collective_key {
	__u32 tgid;
	__u16 api;
	__u16 pad;
	__u32 datatype;
	__u32 reduction; /* ~0: none */
	__u64 communicator;
};

struct collective {
	__u64 count;
	__u64 elements;
	__u64 host_ns;
	__u64 host_ns_max;
	__u64 errors;
	__u64 last_ns;
	__u64 small; /* calls of less than SMALL_COLLECTIVE bytes, where the size of the datatype is known */
};

struct communicator {
	__u64 created_ns;
	__u32 ranks;
	__s32 rank;
	__u32 device;
	__u32 destroyed;
};

struct name {
	__u64 length; /* with the closing zero byte; NAME_BYTES: cut */
	char text[NAME_BYTES];
};

struct life {
	__u64 time_ns;
	__u32 kind;
	__u32 tgid;
	__u64 a; /* child, exit code, alias, 1 + which variable */
	__u64 b; /* what the alias is of, overwrite */
};

struct environment {
	struct life life;
	char value[VALUE_BYTES];
};

#endif
