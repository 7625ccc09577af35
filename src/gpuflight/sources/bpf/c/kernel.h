/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * What the programs that watch the kernel itself have in common: tasks, their pids as gpuflight sees them, histograms.
 * CO-RE only: every field of a kernel structure is relocated to the running kernel's layout when a program is loaded.
 */
#ifndef GF_KERNEL_H
#define GF_KERNEL_H

#include "gf.h"

/* A row for a key that has none, or (`old`) one of a process that had the pid before. Of two processors that make it at
 * the same time the first one's stays: what it has counted by then is not lost. Look for the row afterwards. */
#define gf_renew(map, key, value, old) ((old) ? gf_update(map, key, value) : gf_insert(map, key, value))

struct ns_common {
	unsigned int inum;
} GF_KERNEL_TYPE;

struct pid_namespace {
	struct ns_common ns;
} GF_KERNEL_TYPE;

struct upid {
	int nr;
	struct pid_namespace *ns;
} GF_KERNEL_TYPE;

struct pid {
	unsigned int level;
	struct upid numbers[1];
} GF_KERNEL_TYPE;

typedef struct {
	unsigned int val;
} kuid_t;

struct cred {
	kuid_t euid;
} GF_KERNEL_TYPE;

struct sched_info {
	unsigned long long run_delay;
} GF_KERNEL_TYPE;

struct sched_entity {
	__u64 sum_exec_runtime;
} GF_KERNEL_TYPE;

struct mm_struct {
	unsigned long total_vm;
	unsigned long arg_start;
	unsigned long arg_end;
} GF_KERNEL_TYPE;

struct task_io_accounting {
	__u64 read_bytes;
	__u64 write_bytes;
} GF_KERNEL_TYPE;

typedef struct {
	int counter;
} atomic_t;

struct signal_struct {
	atomic_t live;
	int nr_threads;
	struct pid *pids[4];
	unsigned int flags;
	int group_exit_code;
	unsigned long min_flt;
	unsigned long maj_flt;
	unsigned long long sum_sched_runtime;
	struct task_io_accounting ioac;
} GF_KERNEL_TYPE;

struct files_struct;
struct nsproxy;

struct thread_info {
	unsigned long flags;
	__u32 status;
} GF_KERNEL_TYPE;

struct task_struct {
	unsigned int flags;
	int pid;
	int tgid;
	int exit_state;
	int exit_code;
	char comm[16];
	__u64 start_boottime;
	unsigned long nvcsw;
	unsigned long nivcsw;
	unsigned long min_flt;
	unsigned long maj_flt;
	struct sched_entity se;
	struct sched_info sched_info;
	struct task_io_accounting ioac;
	struct task_struct *group_leader;
	struct task_struct *real_parent;
	struct signal_struct *signal;
	struct mm_struct *mm;
	struct pid *thread_pid;
	const struct cred *cred;
	struct files_struct *files;
	struct nsproxy *nsproxy;
	struct thread_info thread_info;
} GF_KERNEL_TYPE;

/* What this kernel keeps no account of. */
#define GF_UNKNOWN (~0ull)

#define PF_KTHREAD 0x00200000

#define GF_PID_LEVELS 8

/* Inode of the pid namespace that gpuflight is in; 0: the host's first one, where a task's own numbers are right. */
GF_CONSTANT(__u32, pid_namespace, 0);

/* The number of a task in gpuflight's pid namespace, 0 if it is not visible there. */
gf_inline __u32 gf_pid_in_namespace(struct task_struct *task)
{
	struct pid *pid = gf_read(task->thread_pid);
	__u32 level = gf_read(pid->level);

	for (__u32 i = 0; i < GF_PID_LEVELS && i <= level; i++) {
		struct upid *number = &pid->numbers[i];
		struct pid_namespace *ns = gf_read(number->ns);

		if (gf_read(ns->ns.inum) == pid_namespace)
			return gf_read(number->nr);
	}
	return 0;
}

gf_inline __u32 gf_tid(struct task_struct *task)
{
	return pid_namespace ? gf_pid_in_namespace(task) : (__u32)gf_read(task->pid);
}

gf_inline __u32 gf_tgid(struct task_struct *task)
{
	return pid_namespace ? gf_pid_in_namespace(gf_read(task->group_leader)) : (__u32)gf_read(task->tgid);
}

/* ns since boot; what /proc tells in clock ticks, and half of a process's identity. */
gf_inline __u64 gf_process_start(struct task_struct *task)
{
	struct task_struct *leader = gf_read(task->group_leader);

	return gf_read(leader->start_boottime);
}

/* A log2 histogram of µs: slot 0 counts 0 µs, slot n what lies in [2^(n-1), 2^n), the last one all that is longer. */
#define GF_SLOTS 32

struct gf_histogram {
	__u64 count;
	__u64 sum_us;
	__u64 max_us;
	__u64 slots[GF_SLOTS];
};

gf_inline __u32 gf_slot(__u64 us)
{
	__u32 slot = 0;

	if (us >> (GF_SLOTS - 1))
		return GF_SLOTS - 1;
	if (us >= 1 << 16) {
		us >>= 16;
		slot += 16;
	}
	if (us >= 1 << 8) {
		us >>= 8;
		slot += 8;
	}
	if (us >= 1 << 4) {
		us >>= 4;
		slot += 4;
	}
	if (us >= 1 << 2) {
		us >>= 2;
		slot += 2;
	}
	if (us >= 1 << 1) {
		us >>= 1;
		slot += 1;
	}
	return slot + us;
}

/* Of several processors at once: sums are exact, the maximum may miss one of two that end together. */
gf_inline void gf_observe(struct gf_histogram *histogram, __u64 ns)
{
	__u64 us = ns / 1000;
	__u32 slot = gf_slot(us);

	/* It is below GF_SLOTS anyway; the verifier wants to see it, and the compiler must not know that we know. */
	asm volatile("" : "+r"(slot));
	gf_add(&histogram->count, 1);
	gf_add(&histogram->sum_us, us);
	if (us > histogram->max_us)
		histogram->max_us = us;
	gf_add(&histogram->slots[slot & (GF_SLOTS - 1)], 1);
}

#endif
