/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * The engine's own check: one of everything it offers. `gpuflight env` and the tests load it.
 */
#include "gf.h"

struct gf_call_key {
	__u32 tgid;
	__u32 cookie;
};

struct gf_call {
	__u64 tgid;
	__u64 cookie;
	__u64 args[8];
};

GF_CONSTANT(__u32, only_tgid, 0); /* 0: every process */
GF_CONSTANT(__u64, ring_above, ~0ull); /* first argument from which on a call goes to the ring buffer */

GF_HASH(calls, struct gf_call_key, __u64, 4096);
GF_PERCPU_HASH(calls_percpu, struct gf_call_key, __u64, 4096);
GF_LRU_HASH(last_return, struct gf_call_key, __u64, 4096);
GF_ARRAY(slots, __u64, 4);
GF_RINGBUF(ring, 65536);
GF_STACKS(stacks, 64);

gf_inline int gf_wanted(void)
{
	return !only_tgid || bpf_get_current_pid_tgid() >> 32 == only_tgid;
}

GF_UPROBE(on_entry)
{
	struct gf_call_key key = {};
	__u64 one = 1, *count;

	if (!gf_wanted())
		return 0;
	key.tgid = bpf_get_current_pid_tgid() >> 32;
	key.cookie = gf_cookie(ctx);
	count = gf_lookup(calls, &key);
	if (count)
		gf_add(count, 1);
	else if (gf_insert(calls, &key, &one))
		gf_loss(0);
	count = gf_lookup(calls_percpu, &key);
	if (count)
		gf_add(count, 1);
	else if (gf_insert(calls_percpu, &key, &one))
		gf_loss(1);
	if (GF_ARG1(ctx) >= ring_above) {
		struct gf_call call = {};
		call.tgid = key.tgid;
		call.cookie = key.cookie;
		call.args[0] = GF_ARG1(ctx);
		call.args[1] = GF_ARG2(ctx);
		call.args[2] = GF_ARG3(ctx);
		call.args[3] = GF_ARG4(ctx);
		call.args[4] = GF_ARG5(ctx);
		call.args[5] = GF_ARG6(ctx);
		call.args[6] = GF_ARG7(ctx);
		call.args[7] = GF_ARG8(ctx);
		gf_ring_output(ring, &call, sizeof(call));
		gf_stack_id(stacks, ctx, BPF_F_USER_STACK);
	}
	return 0;
}

GF_URETPROBE(on_return)
{
	struct gf_call_key key = {};
	__u64 value = GF_RET(ctx);

	if (!gf_wanted())
		return 0;
	key.tgid = bpf_get_current_pid_tgid() >> 32;
	key.cookie = gf_cookie(ctx);
	gf_update(last_return, &key, &value);
	return 0;
}

/* What a trap costs before a program does anything: the yardstick of the benchmarks. */
GF_UPROBE(on_nothing)
{
	return 0;
}

#ifndef GF_BCC
struct task_struct {
	int pid;
	int tgid;
	char comm[16];
} GF_KERNEL_TYPE;

struct bpf_iter_meta {
	void *seq;
	__u64 session_id;
	__u64 seq_num;
} GF_KERNEL_TYPE;

struct bpf_iter__task {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
} GF_KERNEL_TYPE;

gf_inline void gf_count_slot(__u32 slot)
{
	__u64 *count = gf_lookup(slots, &slot);
	if (count)
		gf_add(count, 1);
}

GF_TP_BTF(on_exec, sched_process_exec)
{
	struct task_struct *task = (void *)ctx[0];

	if (!only_tgid || task->tgid == only_tgid)
		gf_count_slot(0);
	return 0;
}

GF_RAW_TP(on_exit, sched_process_exit)
{
	struct task_struct *task = (void *)ctx[0];

	if (!only_tgid || gf_read(task->tgid) == only_tgid)
		gf_count_slot(1);
	return 0;
}

GF_TRACEPOINT(on_fork, sched, sched_process_fork)
{
	if (gf_wanted())
		gf_count_slot(2);
	return 0;
}

struct gf_task {
	__u32 pid;
	__u32 tgid;
};

GF_ITER(each_task, task, struct bpf_iter__task)
{
	struct task_struct *task = ctx->task;
	struct gf_task found;

	if (!task)
		return 0;
	found.pid = task->pid;
	found.tgid = task->tgid;
	bpf_seq_write(ctx->meta->seq, &found, sizeof(found));
	return 0;
}
#endif
