/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * Open files of a task, and system calls as they return: sys_exit still has the number and the arguments of the call, so that
 * nothing is done when one begins. CO-RE only.
 */
#ifndef GF_FILES_H
#define GF_FILES_H

#include "kernel.h"

struct super_block {
	__u32 s_dev;
	unsigned long s_magic;
} GF_KERNEL_TYPE;

struct inode {
	__u16 i_mode;
	unsigned long i_ino;
	struct super_block *i_sb;
} GF_KERNEL_TYPE;

struct file {
	unsigned int f_mode;
	struct inode *f_inode;
	void *private_data;
} GF_KERNEL_TYPE;

struct fdtable {
	unsigned int max_fds;
	struct file **fd;
} GF_KERNEL_TYPE;

struct files_struct {
	struct fdtable *fdt;
} GF_KERNEL_TYPE;

enum { FMODE_READ = 1, FMODE_WRITE = 2 };
enum { S_IFMT = 0170000, S_IFIFO = 0010000 };

/* NULL if it was closed meanwhile. What is behind a pointer that was read may only be read again. */
gf_inline struct file *gf_file(struct task_struct *task, __u64 fd)
{
	struct fdtable *table = task->files->fdt;
	struct file **files = gf_read(table->fd), *file = NULL;

	if (fd < gf_read(table->max_fds))
		bpf_probe_read_kernel(&file, sizeof(file), files + fd);
	return file;
}

#if defined(__TARGET_ARCH_x86)
#define GF_SYSCALL_NUMBER(regs) ((long)(regs)->orig_ax)
#define GF_SYSCALL_ARG1(regs) ((__u64)(regs)->di)
#define GF_SYSCALL_ARG2(regs) ((__u64)(regs)->si)
#define GF_SYSCALL_ARG3(regs) ((__u64)(regs)->dx)
#define TS_COMPAT 2
/* Calls of 32-bit programs have other numbers. */
#define gf_is_compat(task) ((task)->thread_info.status & TS_COMPAT)
enum {
	GF_SYS_read = 0, GF_SYS_write = 1, GF_SYS_readv = 19, GF_SYS_writev = 20, GF_SYS_sendfile = 40, GF_SYS_accept = 43,
	GF_SYS_semop = 65, GF_SYS_msgsnd = 69, GF_SYS_msgrcv = 70, GF_SYS_semtimedop = 220, GF_SYS_mq_timedsend = 242,
	GF_SYS_mq_timedreceive = 243, GF_SYS_splice = 275, GF_SYS_tee = 276, GF_SYS_vmsplice = 278, GF_SYS_accept4 = 288,
};
#else
struct gf_arm64_regs {
	__u64 regs[31];
	__u64 sp;
	__u64 pc;
	__u64 pstate;
	__u64 orig_x0;
	__s32 syscallno;
};
#define GF_ARM64(regs) ((struct gf_arm64_regs *)(regs))
#define GF_SYSCALL_NUMBER(regs) ((long)GF_ARM64(regs)->syscallno)
#define GF_SYSCALL_ARG1(regs) (GF_ARM64(regs)->orig_x0) /* x0 has the result by now */
#define GF_SYSCALL_ARG2(regs) (GF_ARM64(regs)->regs[1])
#define GF_SYSCALL_ARG3(regs) (GF_ARM64(regs)->regs[2])
#define gf_is_compat(task) (GF_ARM64_COMPAT(task))
#define GF_ARM64_COMPAT(task) ((task)->thread_info.flags >> 22 & 1) /* TIF_32BIT */
enum {
	GF_SYS_read = 63, GF_SYS_write = 64, GF_SYS_readv = 65, GF_SYS_writev = 66, GF_SYS_sendfile = 71, GF_SYS_vmsplice = 75,
	GF_SYS_splice = 76, GF_SYS_tee = 77, GF_SYS_mq_timedsend = 182, GF_SYS_mq_timedreceive = 183, GF_SYS_msgrcv = 188,
	GF_SYS_msgsnd = 189, GF_SYS_semtimedop = 192, GF_SYS_semop = 193, GF_SYS_accept = 202, GF_SYS_accept4 = 242,
};
#endif

#endif
