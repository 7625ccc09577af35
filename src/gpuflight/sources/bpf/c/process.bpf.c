/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * Programs that are started and processes that end, one record each, so that those that live between two looks at /proc are
 * seen too. CO-RE only.
 */
#include "kernel.h"

#define ARGUMENTS_BYTES 1024

struct exec_row {
	__u32 kind; /* 1 */
	__u32 pid;
	__u32 parent_pid;
	__u32 uid;
	__u64 start_ns;
	__u64 parent_start_ns;
	__u64 time_ns; /* since boot */
	char comm[16];
	__u32 arguments_length; /* may be longer than what is here */
	__u32 pad;
	char arguments[ARGUMENTS_BYTES]; /* NUL after each; the record ends where they do */
};

struct exit_row {
	__u32 kind; /* 2 */
	__u32 pid;
	__u32 parent_pid;
	__u32 uid;
	__u64 start_ns;
	__u64 parent_start_ns;
	__u64 time_ns;
	char comm[16];
	__u32 status; /* as wait(2) tells it */
	__u32 pad;
	__u64 run_ns; /* of all its threads */
	__u64 minor_faults;
	__u64 major_faults;
	__u64 read_bytes; /* from storage */
	__u64 written_bytes;
};

#define SIGNAL_GROUP_EXIT 4

GF_RINGBUF(events, 1048576);
GF_PERCPU_ARRAY(scratch, struct exec_row, 1);

GF_TP_BTF(on_exec, sched_process_exec)
{
	struct task_struct *task = (struct task_struct *)ctx[0], *parent = task->real_parent;
	__u32 zero = 0;
	struct exec_row *row = gf_lookup(scratch, &zero);
	__u64 length;

	if (!row)
		return 0;
	row->kind = 1;
	row->pid = gf_tgid(task);
	if (!row->pid)
		return 0;
	row->parent_pid = gf_tgid(parent);
	row->uid = task->cred->euid.val;
	row->start_ns = task->group_leader->start_boottime;
	row->parent_start_ns = gf_process_start(parent);
	row->time_ns = bpf_ktime_get_boot_ns();
	bpf_probe_read_kernel(row->comm, sizeof(row->comm), __builtin_preserve_access_index(&task->comm));
	length = task->mm->arg_end - task->mm->arg_start;
	row->arguments_length = length;
	if (length > ARGUMENTS_BYTES)
		length = ARGUMENTS_BYTES;
	/* The page was written a moment ago by this very exec, so it is there. */
	asm volatile("" : "+r"(length));
	length &= 2 * ARGUMENTS_BYTES - 1;
	if (length > ARGUMENTS_BYTES || bpf_probe_read_user(row->arguments, length, (void *)task->mm->arg_start))
		length = 0;
	gf_ring_output(events, row, __builtin_offsetof(struct exec_row, arguments) + length);
	return 0;
}

GF_TP_BTF(on_exit, sched_process_exit)
{
	struct task_struct *task = (struct task_struct *)ctx[0], *leader = task->group_leader, *parent = leader->real_parent;
	struct signal_struct *signal = task->signal;
	struct exit_row row = {};

	if (signal->live.counter)
		return 0; /* other threads of it are left; of two that go together both may get past this */
	row.kind = 2;
	row.pid = gf_tgid(task);
	if (!row.pid || leader->flags & PF_KTHREAD)
		return 0;
	row.parent_pid = gf_tgid(parent);
	row.uid = leader->cred->euid.val;
	row.start_ns = leader->start_boottime;
	row.parent_start_ns = gf_process_start(parent);
	row.time_ns = bpf_ktime_get_boot_ns();
	bpf_probe_read_kernel(row.comm, sizeof(row.comm), __builtin_preserve_access_index(&leader->comm));
	row.status = signal->flags & SIGNAL_GROUP_EXIT ? signal->group_exit_code : leader->exit_code;
	/* What threads that ended before left with the process, and what these two still have. */
	row.run_ns = signal->sum_sched_runtime + task->se.sum_exec_runtime;
	row.minor_faults = signal->min_flt + task->min_flt;
	row.major_faults = signal->maj_flt + task->maj_flt;
	row.read_bytes = row.written_bytes = GF_UNKNOWN;
	if (gf_field_exists(task->ioac.read_bytes)) {
		row.read_bytes = signal->ioac.read_bytes + task->ioac.read_bytes;
		row.written_bytes = signal->ioac.write_bytes + task->ioac.write_bytes;
	}
	if (leader != task) {
		row.run_ns += leader->se.sum_exec_runtime;
		row.minor_faults += leader->min_flt;
		row.major_faults += leader->maj_flt;
		if (gf_field_exists(task->ioac.read_bytes)) {
			row.read_bytes += leader->ioac.read_bytes;
			row.written_bytes += leader->ioac.write_bytes;
		}
	}
	gf_ring_output(events, &row, sizeof(row));
	return 0;
}
