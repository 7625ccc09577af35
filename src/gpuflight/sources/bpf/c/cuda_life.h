/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * The life of processes that use CUDA: fork, exec, exit, and changes of the variables that choose devices.
 */
#ifndef CUDA_LIFE_H
#define CUDA_LIFE_H

#include "cuda_state.h"

/* DETAIL of the cookie */
#define CALL_SETENV 1
#define CALL_UNSETENV 2
#define CALL_PUTENV 3

/* Eight characters as a word of a little-endian machine. */
#define WORD(a, b, c, d, e, f, g, h)                                                                                   \
	((__u64)(a) | (__u64)(b) << 8 | (__u64)(c) << 16 | (__u64)(d) << 24 | (__u64)(e) << 32 | (__u64)(f) << 40 |    \
	 (__u64)(g) << 48 | (__u64)(h) << 56)
#define VISIBLE_DEVICES 20 /* length of CUDA_VISIBLE_DEVICES */
#define DEVICE_ORDER 17

/* Length of the name of one of our variables at the begin of a text, 0 for all others; `next` is the character after it. */
gf_inline __u32 our_variable(const __u64 text[3], __u8 *next)
{
	if (text[0] == WORD('C', 'U', 'D', 'A', '_', 'V', 'I', 'S') && text[1] == WORD('I', 'B', 'L', 'E', '_', 'D', 'E', 'V') &&
	    (__u32)text[2] == (__u32)WORD('I', 'C', 'E', 'S', 0, 0, 0, 0)) {
		*next = text[2] >> 32;
		return VISIBLE_DEVICES;
	}
	if (text[0] == WORD('C', 'U', 'D', 'A', '_', 'D', 'E', 'V') && text[1] == WORD('I', 'C', 'E', '_', 'O', 'R', 'D', 'E') &&
	    (text[2] & 0xff) == 'R') {
		*next = text[2] >> 8;
		return DEVICE_ORDER;
	}
	return 0;
}

/* setenv(name, value, overwrite), unsetenv(name), putenv("name=value" or "name"). */
GF_UPROBE(cuda_environment)
{
	__u64 cookie = gf_cookie(ctx), name_at = GF_ARG1(ctx), value_at = GF_ARG2(ctx), now;
	struct environment event = {};
	__u32 length, tgid, kind = DETAIL(cookie);
	__u64 name[3] = {};
	__u8 next = 0;

	hit(cookie);
	if (bpf_probe_read_user_str(name, sizeof(name), (void *)name_at) < 0)
		return 0;
	length = our_variable(name, &next);
	if (!length)
		return 0;
	if (kind == CALL_PUTENV) {
		if (next == '=')
			value_at = name_at + length + 1;
		else if (!next)
			kind = CALL_UNSETENV;
		else
			return 0;
	} else if (next) {
		return 0;
	}
	now = bpf_ktime_get_ns();
	tgid = bpf_get_current_pid_tgid() >> 32;
	process_of(tgid, now); /* from here on its forks matter */
	event.life.time_ns = now;
	event.life.kind = kind == CALL_UNSETENV ? EVENT_UNSETENV : EVENT_SETENV;
	event.life.tgid = tgid;
	event.life.a = length == VISIBLE_DEVICES ? 1 : 2;
	event.life.b = kind == CALL_PUTENV || (__u32)GF_ARG3(ctx);
	if (kind != CALL_UNSETENV && bpf_probe_read_user_str(event.value, VALUE_BYTES, (void *)value_at) < 0) {
		gf_loss(LOSS_ARGUMENTS);
		return 0;
	}
	gf_ring_output(life, &event, sizeof(event));
	return 0;
}

/* Hooks on structures of the kernel are for CO-RE. Without them the collector finds exits in /proc. */
#ifndef GF_BCC
typedef struct {
	int counter;
} atomic_t;

struct signal_struct {
	atomic_t live;
} GF_KERNEL_TYPE;

struct task_struct {
	int pid;
	int tgid;
	int exit_code;
	struct signal_struct *signal;
} GF_KERNEL_TYPE;

gf_inline void tell_life(__u32 kind, __u32 tgid, __u64 a, __u64 now)
{
	struct life event = {};

	event.time_ns = now;
	event.kind = kind;
	event.tgid = tgid;
	event.a = a;
	gf_ring_output(life, &event, sizeof(event));
}

GF_TP_BTF(cuda_fork, sched_process_fork)
{
	struct task_struct *parent = (void *)ctx[0], *child = (void *)ctx[1];
	__u32 parent_tgid = parent->tgid, child_tgid = child->tgid;
	struct process *process, fresh = {};
	__u64 now;

	if (parent_tgid == child_tgid) /* a thread */
		return 0;
	process = gf_lookup(processes, &parent_tgid);
	if (!process)
		return 0;
	now = bpf_ktime_get_ns();
	fresh.first_ns = now;
	fresh.generation = now;
	fresh.parent = parent_tgid;
	fresh.names_of = process->names_of ? process->names_of : parent_tgid;
	if (gf_update(processes, &child_tgid, &fresh))
		gf_loss(LOSS_PROCESSES);
	tell_life(EVENT_FORK, parent_tgid, child_tgid, now);
	return 0;
}

GF_TP_BTF(cuda_exec, sched_process_exec)
{
	__u64 id = bpf_get_current_pid_tgid();
	__u32 tgid = id >> 32;

	if (!gf_lookup(processes, &tgid))
		return 0;
	gf_delete(processes, &tgid); /* what it calls next, it calls as another program */
	gf_delete(threads, &id);
	tell_life(EVENT_EXEC, tgid, 0, bpf_ktime_get_ns());
	return 0;
}

GF_TP_BTF(cuda_exit, sched_process_exit)
{
	struct task_struct *task = (void *)ctx[0];
	__u64 id = bpf_get_current_pid_tgid();
	__u32 tgid = id >> 32;

	if (!gf_lookup(processes, &tgid))
		return 0;
	gf_delete(threads, &id);
	if (!task->signal->live.counter)
		tell_life(EVENT_EXIT, tgid, (__u32)task->exit_code, bpf_ktime_get_ns());
	return 0;
}
#endif

#endif
