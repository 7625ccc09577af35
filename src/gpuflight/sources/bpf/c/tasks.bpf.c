/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * What the scheduler and the memory manager keep about every thread anyway, read once a round by an iterator: it costs the
 * threads nothing while they run. CO-RE only.
 */
#include "kernel.h"

struct bpf_iter_meta {
	void *seq;
} GF_KERNEL_TYPE;

struct bpf_iter__task {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
} GF_KERNEL_TYPE;

struct thread_row {
	__u64 process_start_ns;
	__u64 start_ns;
	__u64 run_ns; /* on a CPU */
	__u64 delay_ns; /* runnable and waiting for one */
	__u64 switches_voluntary;
	__u64 switches_involuntary;
	__u64 minor_faults;
	__u64 major_faults;
	__u32 pid;
	__u32 tid;
};

GF_CONSTANT(__u32, kernel_threads, 0); /* the kernel's own too */

/* Whoever opens the iterator sees the tasks of his pid namespace. */
GF_ITER(each_thread, task, struct bpf_iter__task)
{
	struct task_struct *task = ctx->task;
	struct thread_row row = {};

	if (!task || (!kernel_threads && task->flags & PF_KTHREAD))
		return 0;
	row.process_start_ns = task->group_leader->start_boottime;
	row.start_ns = task->start_boottime;
	row.run_ns = task->se.sum_exec_runtime;
	row.delay_ns = gf_field_exists(task->sched_info.run_delay) ? task->sched_info.run_delay : GF_UNKNOWN;
	row.switches_voluntary = task->nvcsw;
	row.switches_involuntary = task->nivcsw;
	row.minor_faults = task->min_flt;
	row.major_faults = task->maj_flt;
	row.pid = pid_namespace ? gf_tgid(task) : (__u32)task->tgid;
	row.tid = pid_namespace ? gf_tid(task) : (__u32)task->pid;
	bpf_seq_write(ctx->meta->seq, &row, sizeof(row));
	return 0;
}

/* Of everything that /proc/PID/stat tells: if a row is what it was, so is what the thread has part in there. */
struct mark_row {
	__u64 mark;
	__u32 pid;
	__u32 tid;
};

struct task_struct___new {
	unsigned int __state;
} GF_KERNEL_TYPE;

struct task_struct___old {
	long state;
} GF_KERNEL_TYPE;

struct percpu_counter {
	__s64 count;
} GF_KERNEL_TYPE;

struct mm_struct___percpu { /* since Linux 6.2 */
	struct percpu_counter rss_stat[4];
} GF_KERNEL_TYPE;

struct gf_atomic_long {
	long counter;
} GF_KERNEL_TYPE;

struct mm_rss_stat___atomic {
	struct gf_atomic_long count[4];
} GF_KERNEL_TYPE;

struct mm_struct___atomic {
	struct mm_rss_stat___atomic rss_stat;
} GF_KERNEL_TYPE;

enum { FILE_PAGES = 0, ANON_PAGES = 1, SHMEM_PAGES = 3 };
enum { GROUP = 2, SESSION = 3 }; /* enum pid_type */

gf_inline void mix(__u64 *mark, __u64 value)
{
	__u64 mixed = (*mark ^ value) * 0x9e3779b97f4a7c15ull; /* 2^64 by the golden ratio */

	*mark = mixed ^ mixed >> 29;
}

gf_inline void mix_memory(__u64 *mark, struct mm_struct *mm)
{
	struct mm_struct___percpu *new = (void *)mm;
	struct mm_struct___atomic *old = (void *)mm;

	mix(mark, gf_read(mm->total_vm));
	if (gf_field_exists(new->rss_stat[0].count)) {
		mix(mark, gf_read(new->rss_stat[FILE_PAGES].count));
		mix(mark, gf_read(new->rss_stat[ANON_PAGES].count));
		mix(mark, gf_read(new->rss_stat[SHMEM_PAGES].count));
	} else if (gf_field_exists(old->rss_stat.count[0].counter)) {
		mix(mark, gf_read(old->rss_stat.count[FILE_PAGES].counter));
		mix(mark, gf_read(old->rss_stat.count[ANON_PAGES].counter));
		mix(mark, gf_read(old->rss_stat.count[SHMEM_PAGES].counter));
	} else { /* unknown: then nothing is ever taken as unchanged */
		mix(mark, bpf_ktime_get_ns());
	}
}

GF_ITER(each_mark, task, struct bpf_iter__task)
{
	struct task_struct *task = ctx->task;
	struct mark_row row = {};
	__u64 state, comm[2] = {};

	if (!task)
		return 0;
	if (gf_field_exists(((struct task_struct___new *)task)->__state))
		state = gf_read(((struct task_struct___new *)task)->__state);
	else
		state = gf_read(((struct task_struct___old *)task)->state);
	mix(&row.mark, state);
	if (!state) /* it runs, or is about to: whatever else may be changing */
		mix(&row.mark, bpf_ktime_get_ns());
	mix(&row.mark, task->exit_state);
	mix(&row.mark, task->start_boottime);
	mix(&row.mark, task->se.sum_exec_runtime);
	mix(&row.mark, task->nvcsw);
	mix(&row.mark, task->nivcsw);
	mix(&row.mark, task->min_flt);
	mix(&row.mark, task->maj_flt);
	mix(&row.mark, task->flags);
	bpf_probe_read_kernel(comm, sizeof(comm), __builtin_preserve_access_index(&task->comm));
	mix(&row.mark, comm[0]);
	mix(&row.mark, comm[1]);
	if (task->pid == task->tgid) {
		struct signal_struct *signal = task->signal;

		mix(&row.mark, gf_tgid(task->real_parent));
		mix(&row.mark, signal->nr_threads);
		mix(&row.mark, signal->min_flt);
		mix(&row.mark, signal->maj_flt);
		mix(&row.mark, signal->sum_sched_runtime);
		mix(&row.mark, (__u64)gf_read(signal->pids[GROUP]));
		mix(&row.mark, (__u64)gf_read(signal->pids[SESSION]));
		mix_memory(&row.mark, task->mm);
	}
	row.pid = pid_namespace ? gf_tgid(task) : (__u32)task->tgid;
	row.tid = pid_namespace ? gf_tid(task) : (__u32)task->pid;
	bpf_seq_write(ctx->meta->seq, &row, sizeof(row));
	return 0;
}
