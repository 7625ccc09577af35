/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * What every probe of gpuflight is written in. One .bpf.c compiles for libbpf (CO-RE: gf_core.h, no header of the system)
 * and, with -DGF_BCC, for bcc (gf_bcc.h). Programs that read structures of the kernel are CO-RE only and say so.
 *
 *   GF_HASH(name, key, value, entries)           GF_PERCPU_HASH, GF_LRU_HASH, GF_PERCPU_LRU_HASH alike
 *   GF_ARRAY(name, value, entries)               GF_PERCPU_ARRAY alike; keys are __u32
 *   GF_RINGBUF(name, bytes)                      with a counter of what found no room (ProbeObject.lost)
 *   GF_STACKS(name, entries)                     user or kernel stacks, GF_STACK_DEPTH addresses each
 *
 *   gf_lookup(map, &key)  gf_insert(map, &key, &value) (fails if it is there)  gf_update  gf_delete
 *   gf_ring_output(map, pointer, size)           gf_stack_id(map, ctx, flags)
 *
 * The first argument of these is the bare name of a map, never a pointer to one: gf_bcc.h makes a number of it.
 *
 *   GF_UPROBE(name) { ... }  GF_URETPROBE(name)  bodies with `struct pt_regs *ctx`; they return int
 *   gf_cookie(ctx)                               the cookie of the probe that fired: only inside such a body
 *   GF_ARG1..6(ctx), GF_RET(ctx)                 words as the calling convention of the machine passes them
 *   GF_ARG7(ctx), GF_ARG8(ctx)                   in registers on arm64, on the stack on x86-64
 *   gf_stack_arg(ctx, n)                         word n (from 0) of the arguments on the stack; at entry only
 *   gf_loss(id)                                  counts a loss of this program, id < GF_LOSSES (ProbeObject.losses)
 */
#ifndef GF_H
#define GF_H

#define GF_LOSSES 32
#define GF_STACK_DEPTH 64

#ifdef GF_BCC
#include "gf_bcc.h"
#else
#include "gf_core.h"
#endif

#define gf_inline static inline __attribute__((always_inline))

/* Whoever holds the data of one CPU only still has to add atomically: a program may be interrupted by another. */
#define gf_add(pointer, amount) __sync_fetch_and_add((pointer), (amount))

GF_PERCPU_ARRAY(gf_losses, __u64, GF_LOSSES);

gf_inline void gf_loss(__u32 id)
{
	__u64 *count = gf_lookup(gf_losses, &id);
	if (count)
		gf_add(count, 1);
}

#include "gf_args.h"

#endif
