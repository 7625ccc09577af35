/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * Launches: the only calls that come in millions. Entry only, one table entry per (function, stream), no event.
 */
#ifndef CUDA_LAUNCH_H
#define CUDA_LAUNCH_H

#include "cuda_state.h"

struct shape {
	__u32 grid[3];
	__u32 block[3];
	__u32 shared;
	__u32 pad;
	__u64 stream; /* as passed */
};

/* As cudaLaunchConfig_t and CUlaunchConfig begin (little endian: the low half of cudart's size_t is enough). */
struct launch_config {
	__u32 grid[3];
	__u32 block[3];
	__u32 shared;
	__u32 pad;
	__u64 stream;
};

/* The name of a function that is launched the first time, if it was registered before our eyes. True if it is told. */
gf_inline int tell_name(struct process *process, __u32 tgid, __u64 function)
{
	struct handle_key key = {};
	__u32 zero = 0;
	__u64 *registered_at, text;
	struct zero_bytes *zeros_;
	struct name *name;
	long length;

	key.tgid = tgid;
	key.handle = function;
	registered_at = gf_lookup(registered, &key);
	if (!registered_at && process->names_of) {
		key.tgid = process->names_of;
		registered_at = gf_lookup(registered, &key);
	}
	if (!registered_at)
		return 1; /* nobody will ever know */
	text = *registered_at;
	key.tgid = tgid;
	zeros_ = gf_lookup(zeros, &zero);
	if (!zeros_)
		return 0;
	gf_insert(names, &key, (struct name *)zeros_);
	name = gf_lookup(names, &key);
	if (!name) {
		gf_loss(LOSS_NAMES);
		return 0;
	}
	length = bpf_probe_read_user_str(name->text, NAME_BYTES, (void *)text);
	if (length <= 0) {
		gf_delete(names, &key);
		gf_loss(LOSS_ARGUMENTS);
		return 1;
	}
	name->length = length;
	return 1;
}

gf_inline __u64 mark_of(const struct shape *shape)
{
	__u64 mark = shape->grid[0];

	mark = mark * 0x9E3779B1 + shape->grid[1];
	mark = mark * 0x9E3779B1 + shape->grid[2];
	mark = mark * 0x9E3779B1 + shape->block[0];
	mark = mark * 0x9E3779B1 + shape->block[1];
	return mark * 0x9E3779B1 + shape->block[2];
}

/* A launch of libcuda that is part of a launch of libcudart by the same thread, or of another call of it: told by the stack
 * pointer (deeper than the outer call's) and by the shape. */
gf_inline int is_inner_launch(struct thread *thread, __u64 sp, __u64 mark)
{
	if (thread->call.cookie && sp < thread->call.sp)
		return 1;
	if (thread->mark_sp && sp < thread->mark_sp && thread->mark_shape == mark) {
		thread->mark_sp = 0;
		return 1;
	}
	return 0;
}

gf_inline int count_launch(struct pt_regs *ctx, __u64 cookie, __u64 function, __u32 kind, const struct shape *shape)
{
	__u64 id = bpf_get_current_pid_tgid();
	__u32 tgid = id >> 32, zero = 0;
	struct process *process = gf_lookup(processes, &tgid);
	struct launch_key key = {};
	struct thread *thread = NULL;
	struct launch *launch;
	__u64 *driver_hooked, blocks, threads_;
	__u32 block, assumed = 0;

	if (!process) {
		process = process_of(tgid, bpf_ktime_get_ns());
		if (!process)
			return 0;
	}
	driver_hooked = gf_lookup(settings, &zero);
	if (driver_hooked && *driver_hooked) {
		__u64 mark = kind == LAUNCH_GRAPH ? function : mark_of(shape);

		thread = thread_of(id);
		if (thread && DRIVER(cookie)) {
			if (is_inner_launch(thread, GF_SP(ctx), mark)) {
				gf_add(&process->launches_inner, 1);
				return 0;
			}
		} else if (thread) {
			thread->mark_sp = GF_SP(ctx);
			thread->mark_shape = mark;
		}
	}
	key.tgid = tgid;
	key.kind = kind;
	key.function = function;
	key.stream = normal_stream(shape->stream, cookie, id);
	if (process->flags & PROCESS_MANY_DEVICES) {
		if (!thread)
			thread = gf_lookup(threads, &id);
		if (thread && thread->device_seen)
			key.device = thread->device;
		else
			assumed = 1;
	}
	launch = gf_lookup(launches, &key);
	if (!launch) {
		struct launch fresh = {};

		fresh.first_ns = bpf_ktime_get_ns();
		gf_insert(launches, &key, &fresh);
		launch = gf_lookup(launches, &key);
		process->flags |= DRIVER(cookie) ? PROCESS_DRIVER : PROCESS_RUNTIME;
		if (!launch) {
			gf_loss(LOSS_LAUNCHES);
			gf_add(&process->launches_lost, 1);
			open_stream(process, tgid, key.device, key.stream, bpf_ktime_get_ns());
			return 0;
		}
	}
	if (launch->generation != process->generation) {
		__u64 generation = process->generation, now = bpf_ktime_get_ns();

		hit(cookie);
		launch->looked_ns = now;
		launch->looked_jiffies = bpf_jiffies64();
		if (open_stream(process, tgid, key.device, key.stream, now))
			launch->generation = generation;
		else
			gf_add(&launch->captured, 1);
		if (!launch->named && kind != LAUNCH_GRAPH)
			launch->named = tell_name(process, tgid, function);
	}
	launch->last_jiffies = bpf_jiffies64(); /* a load, where bpf_ktime_get_ns is 15 ns */
	if (assumed)
		launch->assumed = 1;
	gf_add(&launch->count, 1);
	if (kind == LAUNCH_GRAPH)
		return 0;
	blocks = (__u64)shape->grid[0] * shape->grid[1] * shape->grid[2];
	block = shape->block[0] * shape->block[1] * shape->block[2];
	threads_ = blocks * block;
	gf_add(&launch->threads, threads_);
	gf_add(&launch->blocks, blocks);
	if (threads_ > launch->threads_max)
		launch->threads_max = threads_;
	if (block > launch->block_max)
		launch->block_max = block;
	if (shape->shared > launch->shared_max)
		launch->shared_max = shape->shared;
	launch->grid[0] = shape->grid[0];
	launch->grid[1] = shape->grid[1];
	launch->grid[2] = shape->grid[2];
	launch->block[0] = shape->block[0];
	launch->block[1] = shape->block[1];
	launch->block[2] = shape->block[2];
	return 0;
}

/* cudaLaunchKernel(func, grid, block, args, shared, stream): a dim3 by value is two words, xy and z. */
gf_inline void runtime_shape(struct pt_regs *ctx, struct shape *shape)
{
	__u64 xy = GF_ARG2(ctx), block_xy = GF_ARG4(ctx);
#if defined(__TARGET_ARCH_x86)
	__u64 words[2] = {};

	if (bpf_probe_read_user(words, sizeof(words), (void *)(GF_SP(ctx) + 8)) < 0)
		gf_loss(LOSS_ARGUMENTS);
	shape->shared = words[0];
	shape->stream = words[1];
#else
	shape->shared = GF_ARG7(ctx);
	shape->stream = GF_ARG8(ctx);
#endif
	shape->grid[0] = xy;
	shape->grid[1] = xy >> 32;
	shape->grid[2] = GF_ARG3(ctx);
	shape->block[0] = block_xy;
	shape->block[1] = block_xy >> 32;
	shape->block[2] = GF_ARG5(ctx);
}

/* cuLaunchKernel(function, grid x y z, block x y z, shared, stream, …). */
gf_inline void driver_shape(struct pt_regs *ctx, struct shape *shape)
{
	shape->grid[0] = GF_ARG2(ctx);
	shape->grid[1] = GF_ARG3(ctx);
	shape->grid[2] = GF_ARG4(ctx);
	shape->block[0] = GF_ARG5(ctx);
	shape->block[1] = GF_ARG6(ctx);
	shape->block[2] = GF_ARG7(ctx);
	shape->shared = GF_ARG8(ctx);
#if defined(__TARGET_ARCH_x86)
	shape->stream = gf_stack_arg(ctx, 2);
#else
	shape->stream = gf_stack_arg(ctx, 0);
#endif
}

/* cudaLaunchKernelExC and cuLaunchKernelEx(config, function, …). */
gf_inline void config_shape(struct pt_regs *ctx, struct shape *shape)
{
	struct launch_config config = {};

	if (bpf_probe_read_user(&config, sizeof(config), (void *)GF_ARG1(ctx)) < 0)
		gf_loss(LOSS_ARGUMENTS);
	for (int i = 0; i < 3; i++) {
		shape->grid[i] = config.grid[i];
		shape->block[i] = config.block[i];
	}
	shape->shared = config.shared;
	shape->stream = config.stream;
}

GF_UPROBE(cuda_launch)
{
	__u64 cookie = gf_cookie(ctx), function = GF_ARG1(ctx);
	__u32 kind = DRIVER(cookie) ? LAUNCH_DRIVER : LAUNCH_RUNTIME;
	struct shape shape = {};

	if (CLASS(cookie) == CLASS_LAUNCH) {
		if (kind == LAUNCH_RUNTIME)
			runtime_shape(ctx, &shape);
		else
			driver_shape(ctx, &shape);
	} else if (CLASS(cookie) == CLASS_LAUNCH_CONFIG) {
		function = GF_ARG2(ctx);
		config_shape(ctx, &shape);
	} else { /* cudaGraphLaunch and cuGraphLaunch(executable graph, stream) */
		kind = LAUNCH_GRAPH;
		shape.stream = GF_ARG2(ctx);
	}
	return count_launch(ctx, cookie, function, kind, &shape);
}

/* __cudaRegisterFunction(fat binary, host function, device function, device name, …): once per kernel when a program starts
 * (tens of thousands with PyTorch), so only the address of the name is kept, and the name read when it is launched. */
gf_inline void register_function(struct pt_regs *ctx, struct process *process, __u32 tgid)
{
	struct handle_key key = {};
	__u64 text = GF_ARG4(ctx);

	key.tgid = tgid;
	key.handle = GF_ARG2(ctx);
	process->flags |= PROCESS_REGISTERED;
	if (gf_update(registered, &key, &text))
		gf_loss(LOSS_REGISTERED);
}

#endif
