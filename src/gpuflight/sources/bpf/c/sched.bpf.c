/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * How long threads wait for a CPU, and how long they sleep, as histograms per process. It runs at every switch and wakeup of
 * the machine, the hottest path there is, so it is off unless asked for; the sums that tasks.bpf.c reads cost nothing.
 * CO-RE only.
 */
#include "kernel.h"

/* 0: it was not seen since. */
struct thread_times {
	__u64 left_ns; /* when it went off the CPU to sleep */
	__u64 queued_ns; /* when it became runnable */
};

struct process_waits {
	__u64 start_ns;
	struct gf_histogram run_queue;
	struct gf_histogram asleep;
};

enum { LOST_PROCESSES = 0, LOST_THREADS = 1 };

enum { GF_MAP_TASK_STORAGE = 29, BPF_F_NO_PREALLOC = 1, BPF_LOCAL_STORAGE_GET_F_CREATE = 1 };
static void *(*bpf_task_storage_get)(void *map, struct task_struct *task, void *value, __u64 flags) = (void *)156;

/* Kept with the task itself: found without hashing, gone with it. */
struct {
	GF_NUMBER(type, GF_MAP_TASK_STORAGE);
	GF_NUMBER(map_flags, BPF_F_NO_PREALLOC);
	GF_TYPE(key, int);
	GF_TYPE(value, struct thread_times);
} times SEC(".maps");

GF_HASH(waits, __u32, struct process_waits, 8192);
GF_PERCPU_ARRAY(new_waits, struct process_waits, 1); /* too large for the stack */

gf_inline struct process_waits *waits_of(struct task_struct *task)
{
	__u32 pid = pid_namespace ? gf_tgid(task) : (__u32)task->tgid, zero = 0;
	__u64 start_ns = task->group_leader->start_boottime;
	struct process_waits *row = gf_lookup(waits, &pid), *new;

	if (row && row->start_ns == start_ns)
		return row;
	if (!pid)
		return NULL;
	new = gf_lookup(new_waits, &zero);
	if (!new)
		return NULL;
	new->start_ns = start_ns; /* the rest of it is 0 and stays so */
	gf_renew(waits, &pid, new, row);
	row = gf_lookup(waits, &pid);
	if (!row)
		gf_loss(LOST_PROCESSES);
	return row;
}

gf_inline void queued(struct task_struct *task, __u64 now_ns)
{
	struct thread_times *times_of = bpf_task_storage_get(&times, task, NULL, BPF_LOCAL_STORAGE_GET_F_CREATE);

	if (times_of)
		times_of->queued_ns = now_ns;
	else
		gf_loss(LOST_THREADS);
}

GF_TP_BTF(on_wakeup, sched_wakeup)
{
	queued((struct task_struct *)ctx[0], bpf_ktime_get_ns());
	return 0;
}

GF_TP_BTF(on_wakeup_new, sched_wakeup_new)
{
	queued((struct task_struct *)ctx[0], bpf_ktime_get_ns());
	return 0;
}

GF_TP_BTF(on_switch, sched_switch)
{
	struct task_struct *prev = (struct task_struct *)ctx[1], *next = (struct task_struct *)ctx[2];
	__u64 now_ns = bpf_ktime_get_ns();
	struct thread_times *times_of;
	struct process_waits *row;

	if (prev->pid) { /* else the idle task, which waits for nothing */
		times_of = bpf_task_storage_get(&times, prev, NULL, BPF_LOCAL_STORAGE_GET_F_CREATE);
		if (!times_of) {
			gf_loss(LOST_THREADS);
		} else if (ctx[0] || !ctx[3]) { /* preempted, or gave way: it is still runnable */
			times_of->queued_ns = now_ns;
			times_of->left_ns = 0;
		} else {
			times_of->left_ns = now_ns;
			times_of->queued_ns = 0;
		}
	}
	if (!next->pid)
		return 0;
	times_of = bpf_task_storage_get(&times, next, NULL, 0);
	if (!times_of || !times_of->queued_ns || times_of->queued_ns > now_ns)
		return 0;
	row = waits_of(next);
	if (row) {
		gf_observe(&row->run_queue, now_ns - times_of->queued_ns);
		if (times_of->left_ns && times_of->left_ns <= times_of->queued_ns)
			gf_observe(&row->asleep, times_of->queued_ns - times_of->left_ns);
	}
	times_of->queued_ns = times_of->left_ns = 0;
	return 0;
}

/* The yardstick of the benchmark. */
GF_TP_BTF(on_switch_empty, sched_switch)
{
	return 0;
}
