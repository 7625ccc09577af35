/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * Bytes and operations of each process on pipes and fifos, POSIX and System V message queues and System V semaphores. The
 * kernel has no events of its own for these, so every system call of the machine is looked at when it returns: off unless
 * asked for. What io_uring does is not seen. CO-RE only.
 */
#include "files.h"

enum { PIPE = 1, POSIX_QUEUE = 2, SYSV_QUEUE = 3, SYSV_SEMAPHORE = 4 };

struct ipc_namespace {
	struct ns_common ns;
} GF_KERNEL_TYPE;

struct nsproxy {
	struct ipc_namespace *ipc_ns;
} GF_KERNEL_TYPE;

struct ipc_key {
	__u64 object; /* inode, or id of System V IPC */
	__u32 scope; /* of an inode its device (0: no fifo, but a pipe), of an id its ipc namespace */
	__u32 kind;
	__u32 tgid; /* as the first pid namespace numbers it */
	__u32 pad;
};

struct ipc_row {
	__u64 process_start_ns;
	__u64 read_bytes;
	__u64 reads;
	__u64 written_bytes;
	__u64 writes;
	__u32 pid; /* in gpuflight's pid namespace */
	__u32 pad;
};

enum { LOST_ROWS = 0 };
enum { PIPEFS_MAGIC = 0x50495045 };

GF_HASH(ipc, struct ipc_key, struct ipc_row, 16384);

gf_inline struct ipc_row *row_of(struct task_struct *task, struct ipc_key *key)
{
	struct ipc_row *row, new = {};

	key->tgid = task->tgid;
	row = gf_lookup(ipc, key);
	if (row && row->process_start_ns == task->group_leader->start_boottime)
		return row;
	new.process_start_ns = task->group_leader->start_boottime;
	new.pid = gf_tgid(task);
	gf_renew(ipc, key, &new, row);
	row = gf_lookup(ipc, key);
	if (!row)
		gf_loss(LOST_ROWS);
	return row;
}

gf_inline void add(struct task_struct *task, struct ipc_key *key, bool written, __u64 bytes)
{
	struct ipc_row *row = row_of(task, key);

	if (!row)
		return;
	if (written) {
		gf_add(&row->writes, 1);
		gf_add(&row->written_bytes, bytes);
	} else {
		gf_add(&row->reads, 1);
		gf_add(&row->read_bytes, bytes);
	}
}

gf_inline bool is_pipe(struct task_struct *task, __u64 fd, struct ipc_key *key, unsigned int *mode)
{
	struct file *file = gf_file(task, fd);
	struct super_block *super;
	struct inode *inode;

	if (!file)
		return false;
	inode = gf_read(file->f_inode);
	if ((gf_read(inode->i_mode) & S_IFMT) != S_IFIFO)
		return false;
	super = gf_read(inode->i_sb);
	key->kind = PIPE;
	key->object = gf_read(inode->i_ino);
	key->scope = gf_read(super->s_magic) == PIPEFS_MAGIC ? 0 : gf_read(super->s_dev);
	if (mode)
		*mode = gf_read(file->f_mode);
	return true;
}

gf_inline void add_pipe(struct task_struct *task, __u64 fd, bool written, __u64 bytes)
{
	struct ipc_key key = {};

	if (is_pipe(task, fd, &key, NULL))
		add(task, &key, written, bytes);
}

gf_inline void add_posix_queue(struct task_struct *task, __u64 fd, bool written, __u64 bytes)
{
	struct file *file = gf_file(task, fd);
	struct ipc_key key = { .kind = POSIX_QUEUE };
	struct super_block *super;
	struct inode *inode;

	if (!file)
		return;
	inode = gf_read(file->f_inode);
	key.object = gf_read(inode->i_ino);
	super = gf_read(inode->i_sb);
	key.scope = gf_read(super->s_dev);
	add(task, &key, written, bytes);
}

gf_inline void add_sysv(struct task_struct *task, __u32 kind, __u64 id, bool written, __u64 bytes)
{
	struct ipc_key key = { .kind = kind, .object = (__u32)id };

	key.scope = task->nsproxy->ipc_ns->ns.inum;
	add(task, &key, written, bytes);
}

GF_TP_BTF(on_return, sys_exit)
{
	struct pt_regs *regs = (struct pt_regs *)ctx[0];
	long number = GF_SYSCALL_NUMBER(regs), result = (long)ctx[1];
	struct task_struct *task;
	struct ipc_key key = {};
	unsigned int mode = 0;

	if (result < 0)
		return 0;
	task = bpf_get_current_task_btf();
	switch (number) {
	case GF_SYS_read:
	case GF_SYS_readv:
	case GF_SYS_write:
	case GF_SYS_writev:
	case GF_SYS_splice:
	case GF_SYS_tee:
	case GF_SYS_vmsplice:
	case GF_SYS_sendfile:
	case GF_SYS_mq_timedsend:
	case GF_SYS_mq_timedreceive:
	case GF_SYS_msgsnd:
	case GF_SYS_msgrcv:
	case GF_SYS_semop:
	case GF_SYS_semtimedop:
		if (gf_is_compat(task))
			return 0;
		break;
	default:
		return 0;
	}
	switch (number) {
	case GF_SYS_read:
	case GF_SYS_readv:
		add_pipe(task, GF_SYSCALL_ARG1(regs), false, result);
		break;
	case GF_SYS_write:
	case GF_SYS_writev:
		add_pipe(task, GF_SYSCALL_ARG1(regs), true, result);
		break;
	case GF_SYS_splice:
		add_pipe(task, GF_SYSCALL_ARG1(regs), false, result);
		add_pipe(task, GF_SYSCALL_ARG3(regs), true, result);
		break;
	case GF_SYS_tee: /* takes nothing out of the first pipe */
		add_pipe(task, GF_SYSCALL_ARG2(regs), true, result);
		break;
	case GF_SYS_sendfile:
		add_pipe(task, GF_SYSCALL_ARG1(regs), true, result);
		break;
	case GF_SYS_vmsplice:
		if (is_pipe(task, GF_SYSCALL_ARG1(regs), &key, &mode))
			add(task, &key, mode & FMODE_WRITE, result);
		break;
	case GF_SYS_mq_timedsend:
		add_posix_queue(task, GF_SYSCALL_ARG1(regs), true, GF_SYSCALL_ARG3(regs));
		break;
	case GF_SYS_mq_timedreceive:
		add_posix_queue(task, GF_SYSCALL_ARG1(regs), false, result);
		break;
	case GF_SYS_msgsnd:
		add_sysv(task, SYSV_QUEUE, GF_SYSCALL_ARG1(regs), true, GF_SYSCALL_ARG3(regs));
		break;
	case GF_SYS_msgrcv:
		add_sysv(task, SYSV_QUEUE, GF_SYSCALL_ARG1(regs), false, result);
		break;
	default:
		add_sysv(task, SYSV_SEMAPHORE, GF_SYSCALL_ARG1(regs), true, 0);
	}
	return 0;
}

/* The yardstick of the benchmark. */
GF_TP_BTF(on_return_empty, sys_exit)
{
	return 0;
}
