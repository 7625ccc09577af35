/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * The bcc side of gf.h. bcc is used as a compiler only (bcc_compiler.py): maps are made, programs loaded and attached by the
 * same calls as on the libbpf side. bcc's own way to declare and call maps works by rewriting the text and not inside
 * macros, so none of it is used. Instead a map is a number, which our loader replaces by a descriptor, and a
 * function that nobody runs tells what it is: loads of 64-bit constants, told apart by a source register that the kernel
 * does not know.
 *
 *   register 1   the map of this number (as for the kernel: BPF_PSEUDO_MAP_FD)
 *   register 7   the cookie, where the kernel has no helper for it (GF_COOKIE_IN_PROGRAM): one program per cookie
 *   register 8   a map's number, 9 its type, 10 and 11 bytes of key and value, 12 its entries
 */
#ifndef GF_BCC_H
#define GF_BCC_H

#include <uapi/linux/ptrace.h>

#define SEC(name) __attribute__((used))

enum {
	GF_MAP_HASH = 1,
	GF_MAP_ARRAY = 2,
	GF_MAP_PERCPU_HASH = 5,
	GF_MAP_PERCPU_ARRAY = 6,
	GF_MAP_STACK_TRACE = 7,
	GF_MAP_LRU_HASH = 9,
	GF_MAP_LRU_PERCPU_HASH = 10,
	GF_MAP_RINGBUF = 27,
};

/* A name of our own for each helper: bcc looks at the names of those it knows. */
static void *(*gf_helper_lookup)(__u64 map, const void *key) = (void *)1;
static long (*gf_helper_update)(__u64 map, const void *key, const void *value, __u64 flags) = (void *)2;
static long (*gf_helper_delete)(__u64 map, const void *key) = (void *)3;
static long (*gf_helper_stackid)(void *ctx, __u64 map, __u64 flags) = (void *)27;
static long (*gf_helper_ringbuf)(__u64 ring, void *data, __u64 size, __u64 flags) = (void *)130;
static __u64 (*gf_helper_cookie)(void *ctx) = (void *)174;

#define GF_FIRST_MAP 0x47460000
#define GF_TOLD(name) __attribute__((section(".bpf.fn." #name), used))

#define GF_SIZED_MAP(name, kind, key_bytes, value_bytes, entries)                                                      \
	enum { gf_number_of_##name = GF_FIRST_MAP + __COUNTER__ };                                                     \
	GF_TOLD(gf_map__##name) __u64 gf_map__##name(void)                                                             \
	{                                                                                                              \
		return bpf_pseudo_fd(8, gf_number_of_##name) + bpf_pseudo_fd(9, kind) +                                \
		       bpf_pseudo_fd(10, key_bytes) + bpf_pseudo_fd(11, value_bytes) + bpf_pseudo_fd(12, entries);     \
	}                                                                                                              \
	struct gf_map_##name
#define GF_MAP(name, kind, key_t, value_t, entries) GF_SIZED_MAP(name, kind, sizeof(key_t), sizeof(value_t), entries)

#define GF_HASH(name, key_t, value_t, entries) GF_MAP(name, GF_MAP_HASH, key_t, value_t, entries)
#define GF_LRU_HASH(name, key_t, value_t, entries) GF_MAP(name, GF_MAP_LRU_HASH, key_t, value_t, entries)
#define GF_PERCPU_HASH(name, key_t, value_t, entries) GF_MAP(name, GF_MAP_PERCPU_HASH, key_t, value_t, entries)
#define GF_PERCPU_LRU_HASH(name, key_t, value_t, entries) GF_MAP(name, GF_MAP_LRU_PERCPU_HASH, key_t, value_t, entries)
#define GF_ARRAY(name, value_t, entries) GF_MAP(name, GF_MAP_ARRAY, __u32, value_t, entries)
#define GF_PERCPU_ARRAY(name, value_t, entries) GF_MAP(name, GF_MAP_PERCPU_ARRAY, __u32, value_t, entries)
#define GF_STACKS(name, entries) GF_SIZED_MAP(name, GF_MAP_STACK_TRACE, 4, 8 * GF_STACK_DEPTH, entries)
#define GF_RINGBUF(name, bytes)                                                                                        \
	GF_SIZED_MAP(name, GF_MAP_RINGBUF, 0, 0, bytes);                                                               \
	GF_PERCPU_ARRAY(name##_lost, __u64, 1)

#define gf_fd(map) bpf_pseudo_fd(1, gf_number_of_##map)
#define gf_lookup(map, key) gf_helper_lookup(gf_fd(map), key)
#define gf_insert(map, key, value) gf_helper_update(gf_fd(map), key, value, BPF_NOEXIST)
#define gf_update(map, key, value) gf_helper_update(gf_fd(map), key, value, BPF_ANY)
#define gf_delete(map, key) gf_helper_delete(gf_fd(map), key)
#define gf_stack_id(map, ctx, flags) gf_helper_stackid(ctx, gf_fd(map), flags)
/* As gf_core.h does it. A macro, since the number of a map has to be a constant where it is used. */
#define gf_ring_output(map, data, size)                                                                                \
	({                                                                                                             \
		long gf_error = gf_helper_ringbuf(gf_fd(map), data, size, BPF_RB_NO_WAKEUP);                           \
		if (gf_error) {                                                                                        \
			__u32 gf_zero = 0;                                                                             \
			__u64 *gf_count = gf_lookup(map##_lost, &gf_zero);                                             \
			if (gf_count)                                                                                  \
				__sync_fetch_and_add(gf_count, 1);                                                     \
		}                                                                                                      \
		gf_error;                                                                                              \
	})

/* Where a program is attached by its section: the loader reads it from the name. */
#define GF_PROGRAM(name, where, context)                                                                               \
	GF_TOLD(gf_at__##name##__##where) __u64 gf_at__##name##__##where(void)                                         \
	{                                                                                                              \
		return 0;                                                                                              \
	}                                                                                                              \
	GF_TOLD(name) int name(context)

#define GF_UPROBE(name) GF_PROGRAM(name, uprobe, struct pt_regs *ctx)
#define GF_URETPROBE(name) GF_PROGRAM(name, uretprobe, struct pt_regs *ctx)
#define GF_RAW_TP(name, event) GF_PROGRAM(name, raw_tp__##event, __u64 *ctx)
#define GF_TRACEPOINT(name, group, event) GF_PROGRAM(name, tracepoint__##group##__##event, void *ctx)

#ifdef GF_COOKIE_IN_PROGRAM
#define gf_cookie(ctx) bpf_pseudo_fd(7, 0)
#else
#define gf_cookie(ctx) gf_helper_cookie(ctx)
#endif

/* The loader gives another value by -DGF_VALUE_name=_,VALUE: then it comes second, else the one written here does. */
#define GF_CONSTANT(type, name, value) static const type name = GF_GIVEN_OR(GF_VALUE_##name, value)
#define GF_GIVEN_OR(given, value) GF_SECOND_OF(given, value, )
#define GF_SECOND_OF(first, second, ...) second

#endif
