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
	if (gf_field_exists(task->sched_info.run_delay))
		row.delay_ns = task->sched_info.run_delay;
	row.switches_voluntary = task->nvcsw;
	row.switches_involuntary = task->nivcsw;
	row.minor_faults = task->min_flt;
	row.major_faults = task->maj_flt;
	row.pid = pid_namespace ? gf_tgid(task) : (__u32)task->tgid;
	row.tid = pid_namespace ? gf_tid(task) : (__u32)task->pid;
	bpf_seq_write(ctx->meta->seq, &row, sizeof(row));
	return 0;
}
