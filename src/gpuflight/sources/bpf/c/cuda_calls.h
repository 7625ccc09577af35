/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * All calls but launches: entry keeps the arguments with the thread, return knows how it went. The outermost call of a
 * thread is the one that counts: cudaMalloc calls cuMemAlloc, which may be hooked too. Outer and inner are told apart by the
 * stack pointer, which also finds the return that belongs to an entry.
 */
#ifndef CUDA_CALLS_H
#define CUDA_CALLS_H

#include "cuda_launch.h"
#include "cuda_tables.h"

#define SP_AT_RETURN(sp) ((sp) + 8 * GF_STACK_WORDS_BELOW)

gf_inline __u64 argument(const struct call *call, __u32 number)
{
	number--;
	return number < ARGUMENTS ? call->arguments[number] : 0;
}

gf_inline __u64 user_word(__u64 address)
{
	__u64 word = 0;

	if (bpf_probe_read_user(&word, sizeof(word), (void *)address) < 0)
		gf_loss(LOSS_ARGUMENTS);
	return word;
}

gf_inline void keep_call(struct pt_regs *ctx, struct call *call, __u64 cookie, __u64 now)
{
	call->sp = GF_SP(ctx);
	call->entry_ns = now;
	call->arguments[0] = GF_ARG1(ctx);
	call->arguments[1] = GF_ARG2(ctx);
	call->arguments[2] = GF_ARG3(ctx);
	call->arguments[3] = GF_ARG4(ctx);
	call->arguments[4] = GF_ARG5(ctx);
	call->arguments[5] = GF_ARG6(ctx);
	call->stack_id = -1;
#if defined(__TARGET_ARCH_x86)
	if (USES_STACK(cookie) && bpf_probe_read_user(&call->arguments[6], 64, (void *)(GF_SP(ctx) + 8)) < 0)
		gf_loss(LOSS_ARGUMENTS);
	if (CLASS(cookie) >= CLASS_ALLOC && CLASS(cookie) <= CLASS_ALLOC_3D)
		call->caller = user_word(GF_SP(ctx));
#else
	call->arguments[6] = GF_ARG7(ctx);
	call->arguments[7] = GF_ARG8(ctx);
	if (USES_STACK(cookie) && bpf_probe_read_user(&call->arguments[8], 48, (void *)GF_SP(ctx)) < 0)
		gf_loss(LOSS_ARGUMENTS);
	call->caller = ((const volatile struct user_pt_regs *)ctx)->regs[30];
#endif
	call->cookie = cookie;
}

/* True if this call is part of another one of its thread. */
gf_inline int is_inner_call(struct pt_regs *ctx, const struct call *outer, __u64 cookie, __u64 now)
{
	__u32 at = SETTING_DETACHED;
	__u64 *detached;

	if (!outer->cookie)
		return 0;
	detached = gf_lookup(settings, &at);
	if (!detached || outer->entry_ns < *detached)
		return 0;
	if (GF_SP(ctx) < outer->sp && since(outer->entry_ns, now) < LONGEST_CALL_NS)
		return 1;
	if (GF_SP(ctx) != outer->sp || API(outer->cookie) == API(cookie))
		gf_loss(LOSS_RETURNS); /* the outer one is over, though we saw no return; an equal sp is a tail call */
	return 0;
}

GF_UPROBE(cuda_call)
{
	__u64 cookie = gf_cookie(ctx), id = bpf_get_current_pid_tgid(), now = bpf_ktime_get_ns();
	struct process *process = process_of(id >> 32, now);
	__u32 class = CLASS(cookie);
	struct thread *thread;

	hit(cookie);
	if (!process)
		return 0;
	if (class == CLASS_REGISTER) {
		register_function(ctx, process, id >> 32);
		return 0;
	}
	thread = thread_of(id);
	if (!thread || is_inner_call(ctx, &thread->call, cookie, now))
		return 0;
	process->flags |= DRIVER(cookie) ? PROCESS_DRIVER : PROCESS_RUNTIME;
	keep_call(ctx, &thread->call, cookie, now);
	if ((class >= CLASS_SYNC_DEVICE && class <= CLASS_SYNC_EVENT) || class == CLASS_EVENT_RECORD ||
	    class == CLASS_RESET_DEVICE || BLOCKS(cookie))
		gf_add(&process->generation, 1); /* launches from now on are not what this waits for */
	if (class >= CLASS_ALLOC && class <= CLASS_ALLOC_3D) {
		thread->call.stack_id = gf_stack_id(stacks, ctx, BPF_F_USER_STACK);
		if (thread->call.stack_id < 0)
			gf_loss(LOSS_STACKS);
	}
	return 0;
}

gf_inline void create_stream(struct process *process, struct call *call, __u32 tgid, __u32 device, __u64 now)
{
	__u64 handle = user_word(call->arguments[0]), flags = argument(call, ARG_B(call->cookie));
	struct stream *stream;

	gf_add(&process->streams_created, 1);
	if (!handle)
		return;
	stream = stream_of(tgid, device, handle);
	if (!stream)
		return;
	stream->created_ns = now;
	stream->device = device;
	stream->capture = 0;
	stream->flags = STREAM_MAKING_SEEN | (flags & 1 ? STREAM_NONBLOCKING : 0);
}

gf_inline void destroy_stream(struct process *process, struct call *call, __u32 tgid, __u32 device)
{
	struct stream_key key = {};
	struct stream *stream;

	gf_add(&process->streams_destroyed, 1);
	stream_key_of(&key, tgid, device, call->arguments[0]);
	stream = gf_lookup(streams, &key);
	if (stream)
		stream->flags |= STREAM_DESTROYED; /* its work goes on: a span still open waits for a wait */
}

gf_inline void record_event(struct process *process, struct call *call, __u32 tgid, __u32 device, __u64 id)
{
	struct handle_key key = {};
	struct event event = {};
	struct stream_key at = {};
	struct stream *stream;

	gf_add(&process->event_records, 1);
	key.tgid = tgid;
	key.handle = call->arguments[0];
	event.recorded_ns = call->entry_ns;
	event.stream = normal_stream(argument(call, ARG_STREAM(call->cookie)), call->cookie, id);
	event.device = device;
	stream_key_of(&at, tgid, device, event.stream);
	stream = gf_lookup(streams, &at);
	if (stream) {
		event.device = stream->device;
		if (stream->capture == process->capture)
			event.capture = stream->capture;
	}
	if (gf_update(events, &key, &event))
		gf_loss(LOSS_EVENTS);
}

gf_inline void wait_for_event(__u32 tgid, struct call *call, __u64 now)
{
	struct handle_key key = {};
	struct event *event;

	key.tgid = tgid;
	key.handle = call->arguments[0];
	event = gf_lookup(events, &key);
	if (event)
		waited_for(tgid, event->device, event->stream, event->recorded_ns, now);
}

/* Graph capture spreads from stream to stream by events: what waits for an event of a captured stream is captured too. */
gf_inline void capture(struct process *process, struct call *call, __u32 tgid, __u32 device, __u64 id)
{
	__u64 handle = normal_stream(call->arguments[0], call->cookie, id);
	__u32 class = CLASS(call->cookie);
	struct stream *stream;

	if (class == CLASS_CAPTURE_END) {
		process->capture = 0;
	} else {
		if (class == CLASS_WAIT_EVENT) {
			struct handle_key key = {};
			struct event *event;

			key.tgid = tgid;
			key.handle = call->arguments[1];
			event = gf_lookup(events, &key);
			if (!event || !event->capture || event->capture != process->capture)
				return;
		} else {
			process->captures++;
			process->capture = process->captures;
		}
		stream = stream_of(tgid, device, handle);
		if (stream)
			stream->capture = process->capture;
	}
	gf_add(&process->generation, 1);
}

/* A handle of a function that has another address or handle: both have one name. */
gf_inline void alias(struct process *process, struct call *call, __u32 tgid, __u64 now)
{
	__u64 handle = user_word(call->arguments[0]), of = argument(call, ARG_A(call->cookie)), *known, text;
	struct handle_key key = {};

	if (!handle || handle == of)
		return;
	key.tgid = tgid;
	key.handle = of;
	known = gf_lookup(registered, &key);
	if (!known && process->names_of) {
		key.tgid = process->names_of;
		known = gf_lookup(registered, &key);
	}
	if (known) {
		text = *known;
		key.tgid = tgid;
		key.handle = handle;
		if (gf_update(registered, &key, &text))
			gf_loss(LOSS_REGISTERED);
	} else {
		struct life event = {};

		event.time_ns = now;
		event.kind = EVENT_ALIAS;
		event.tgid = tgid;
		event.a = handle;
		event.b = of;
		gf_ring_output(life, &event, sizeof(event));
	}
}

/* A function found by its name: the text may be gone soon, so it is read now. */
gf_inline void name_handle(struct call *call, __u32 tgid)
{
	struct handle_key key = {};
	struct zero_bytes *zeros_;
	struct name *name;
	__u32 zero = 0;
	long length;

	key.tgid = tgid;
	key.handle = user_word(call->arguments[0]);
	zeros_ = gf_lookup(zeros, &zero);
	if (!zeros_ || !key.handle)
		return;
	gf_insert(names, &key, (struct name *)zeros_);
	name = gf_lookup(names, &key);
	if (!name) {
		gf_loss(LOSS_NAMES);
		return;
	}
	length = bpf_probe_read_user_str(name->text, NAME_BYTES, (void *)argument(call, ARG_B(call->cookie)));
	if (length > 0) {
		name->length = length;
	} else {
		gf_delete(names, &key);
		gf_loss(LOSS_ARGUMENTS);
	}
}

/* Contexts of the driver API belong to one device each; the current one of a thread decides. */
gf_inline void choose_context(struct process *process, struct thread *thread, struct call *call, __u32 tgid)
{
	struct handle_key key = {};
	__u64 device, *known;

	key.tgid = tgid;
	if (CLASS(call->cookie) == CLASS_CONTEXT_CREATE) {
		key.handle = user_word(call->arguments[0]);
		device = argument(call, ARG_A(call->cookie));
		if (gf_update(contexts, &key, &device))
			gf_loss(LOSS_CONTEXTS);
		if (!DETAIL(call->cookie)) /* retained only */
			return;
	} else if (DETAIL(call->cookie) == 2) { /* popped */
		if (!thread->context_pushed)
			return;
		device = thread->context_pushed - 1;
		thread->context_pushed = 0;
	} else {
		key.handle = call->arguments[0];
		known = gf_lookup(contexts, &key);
		if (!known)
			return;
		device = *known;
		if (DETAIL(call->cookie) == 1) /* pushed */
			thread->context_pushed = thread->device + 1;
	}
	thread->device = device;
	thread->device_seen = 1;
	gf_add(&process->set_device_calls, 1);
	if (device)
		process->flags |= PROCESS_MANY_DEVICES;
}

#include "cuda_copies.h"

gf_inline void account_success(struct process *process, struct thread *thread, __u32 device, __u64 id, __u64 now)
{
	struct call *call = &thread->call;
	__u64 cookie = call->cookie;
	__u32 tgid = id >> 32;

	switch (CLASS(cookie)) {
	case CLASS_STREAM_CREATE:
		create_stream(process, call, tgid, device, now);
		break;
	case CLASS_STREAM_DESTROY:
		destroy_stream(process, call, tgid, device);
		break;
	case CLASS_EVENT_CREATE:
		gf_add(&process->events_created, 1);
		break;
	case CLASS_EVENT_DESTROY: {
		struct handle_key key = {};

		gf_add(&process->events_destroyed, 1);
		key.tgid = tgid;
		key.handle = call->arguments[0];
		gf_delete(events, &key);
		break;
	}
	case CLASS_EVENT_RECORD:
		record_event(process, call, tgid, device, id);
		break;
	case CLASS_SET_DEVICE:
		gf_add(&process->set_device_calls, 1);
		thread->device = call->arguments[0];
		thread->device_seen = 1;
		if (thread->device)
			process->flags |= PROCESS_MANY_DEVICES;
		break;
	case CLASS_RESET_DEVICE: {
		struct device *state;

		close_streams(tgid, device, 0, call->entry_ns, now);
		state = device_of(tgid, device);
		if (state)
			state->reset_ns = now;
		reset_memory(tgid, device);
		break;
	}
	case CLASS_ALLOC: {
		__u64 size = argument(call, ARG_A(cookie));

		if (ARG_B(cookie))
			size *= argument(call, ARG_B(cookie));
		add_allocation(tgid, id, device,
			       DETAIL(cookie) == MEMORY_REGISTERED ? call->arguments[0] : user_word(call->arguments[0]), size,
			       call, now);
		break;
	}
	case CLASS_ALLOC_PITCH: /* (**pointer, *pitch, width, height) */
		add_allocation(tgid, id, device, user_word(call->arguments[0]),
			       user_word(call->arguments[1]) * call->arguments[3], call, now);
		break;
	case CLASS_ALLOC_3D: { /* (cudaPitchedPtr *, extent): pitch × height × depth */
		__u64 out[2] = {}, extent[3] = {};

		if (bpf_probe_read_user(out, sizeof(out), (void *)call->arguments[0]) < 0)
			gf_loss(LOSS_ARGUMENTS);
#if defined(__TARGET_ARCH_x86)
		extent[1] = call->arguments[7];
		extent[2] = call->arguments[8];
#else
		if (bpf_probe_read_user(extent, sizeof(extent), (void *)call->arguments[1]) < 0)
			gf_loss(LOSS_ARGUMENTS);
#endif
		add_allocation(tgid, id, device, out[0], out[1] * extent[1] * extent[2], call, now);
		break;
	}
	case CLASS_FREE:
		free_allocation(tgid, device, call->arguments[0], DETAIL(cookie));
		break;
	case CLASS_HANDLE_OF:
		alias(process, call, tgid, now);
		break;
	case CLASS_NAME_OF:
		name_handle(call, tgid);
		break;
	case CLASS_CAPTURE_BEGIN:
	case CLASS_CAPTURE_END:
	case CLASS_WAIT_EVENT:
		capture(process, call, tgid, device, id);
		break;
	case CLASS_CONTEXT_CREATE:
	case CLASS_CONTEXT_SET:
		choose_context(process, thread, call, tgid);
		break;
	default:
		account_copy(call, tgid, device, id, now);
	}
}

GF_URETPROBE(cuda_return)
{
	__u64 cookie = gf_cookie(ctx), id = bpf_get_current_pid_tgid(), now = bpf_ktime_get_ns();
	struct thread *thread = gf_lookup(threads, &id);
	__u32 code = GF_RET(ctx), tgid = id >> 32, device, class = CLASS(cookie);
	struct process *process;

	if (!thread || thread->call.cookie != cookie || SP_AT_RETURN(thread->call.sp) != GF_SP(ctx))
		return 0;
	process = gf_lookup(processes, &tgid);
	if (!process) {
		thread->call.cookie = 0;
		return 0;
	}
	add_duration(tgid, API(cookie), since(thread->call.entry_ns, now));
	if (code && code != NOT_READY)
		add_error(tgid, API(cookie), code, now);
	device = thread->device; /* 0 until the thread chose */
	if (class >= CLASS_SYNC_DEVICE && class <= CLASS_SYNC_EVENT) {
		/* An error ends spans too: it is that of the work, or there is no device to work. */
		if (code == NOT_READY) {
		} else if (class == CLASS_SYNC_DEVICE) {
			close_streams(tgid, device, 0, thread->call.entry_ns, now);
		} else if (class == CLASS_SYNC_STREAM) {
			waited_for(tgid, device, normal_stream(thread->call.arguments[0], cookie, id), thread->call.entry_ns,
				   now);
		} else {
			wait_for_event(tgid, &thread->call, now);
		}
		gf_add(&process->generation, 1);
	} else if (!code) {
		account_success(process, thread, device, id, now);
		if (BLOCKS(cookie) || class == CLASS_RESET_DEVICE)
			gf_add(&process->generation, 1);
	}
	thread->call.cookie = 0;
	return 0;
}

/* Codes of launches, for who wants them at the cost of a second trap per launch. */
GF_URETPROBE(cuda_launch_return)
{
	__u32 code = GF_RET(ctx);

	if (code)
		add_error(bpf_get_current_pid_tgid() >> 32, API(gf_cookie(ctx)), code, bpf_ktime_get_ns());
	return 0;
}

#endif
