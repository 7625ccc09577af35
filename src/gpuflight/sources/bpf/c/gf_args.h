/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * Arguments of a probed function. x86-64: di si dx cx r8 r9, then the stack above the return address (System V psABI,
 * 3.2.3). arm64: x0..x7, then the stack (AAPCS64, 6.8.2). gf_stack_arg(ctx, 0) is the first word that is not in a register.
 */
#ifndef GF_ARGS_H
#define GF_ARGS_H

#if defined(__TARGET_ARCH_x86)
#define GF_ARG1(ctx) ((__u64)(ctx)->di)
#define GF_ARG2(ctx) ((__u64)(ctx)->si)
#define GF_ARG3(ctx) ((__u64)(ctx)->dx)
#define GF_ARG4(ctx) ((__u64)(ctx)->cx)
#define GF_ARG5(ctx) ((__u64)(ctx)->r8)
#define GF_ARG6(ctx) ((__u64)(ctx)->r9)
#define GF_ARG7(ctx) gf_stack_arg(ctx, 0)
#define GF_ARG8(ctx) gf_stack_arg(ctx, 1)
#define GF_RET(ctx) ((__u64)(ctx)->ax)
#define GF_IP(ctx) ((__u64)(ctx)->ip)
#define GF_SP(ctx) ((__u64)(ctx)->sp)
#define GF_STACK_WORDS_BELOW 1 /* the return address */
#elif defined(__TARGET_ARCH_arm64)
#define GF_ARG1(ctx) (((const volatile struct user_pt_regs *)(ctx))->regs[0])
#define GF_ARG2(ctx) (((const volatile struct user_pt_regs *)(ctx))->regs[1])
#define GF_ARG3(ctx) (((const volatile struct user_pt_regs *)(ctx))->regs[2])
#define GF_ARG4(ctx) (((const volatile struct user_pt_regs *)(ctx))->regs[3])
#define GF_ARG5(ctx) (((const volatile struct user_pt_regs *)(ctx))->regs[4])
#define GF_ARG6(ctx) (((const volatile struct user_pt_regs *)(ctx))->regs[5])
#define GF_ARG7(ctx) (((const volatile struct user_pt_regs *)(ctx))->regs[6])
#define GF_ARG8(ctx) (((const volatile struct user_pt_regs *)(ctx))->regs[7])
#define GF_RET(ctx) (((const volatile struct user_pt_regs *)(ctx))->regs[0])
#define GF_IP(ctx) (((const volatile struct user_pt_regs *)(ctx))->pc)
#define GF_SP(ctx) (((const volatile struct user_pt_regs *)(ctx))->sp)
#define GF_STACK_WORDS_BELOW 0
#else
#error "compile with -D__TARGET_ARCH_x86 or -D__TARGET_ARCH_arm64"
#endif

/* 0 if the page is not in memory: an argument that cannot be read is no reason to lose the call. */
gf_inline __u64 gf_stack_arg(struct pt_regs *ctx, __u32 n)
{
	__u64 word = 0;
	const void *at = (const void *)(GF_SP(ctx) + 8ull * (GF_STACK_WORDS_BELOW + n));

	if (bpf_probe_read_user(&word, sizeof(word), at) < 0)
		return 0;
	return word;
}

#endif
