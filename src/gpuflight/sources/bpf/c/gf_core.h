/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * The libbpf side of gf.h: types, maps, helpers and sections, written out here so that the objects come out the same
 * whatever headers a build machine has. Numbers of helpers: include/uapi/linux/bpf.h, stable for ever.
 */
#ifndef GF_CORE_H
#define GF_CORE_H

typedef unsigned char __u8;
typedef signed char __s8;
typedef unsigned short __u16;
typedef short __s16;
typedef unsigned int __u32;
typedef int __s32;
typedef unsigned long long __u64;
typedef long long __s64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u8 u8;
typedef __u16 u16;
typedef __u32 u32;
typedef __u64 u64;
typedef __s32 s32;
typedef __s64 s64;
typedef _Bool bool;
#define true 1
#define false 0
#define NULL ((void *)0)

#define SEC(name) __attribute__((section(name), used))
#define GF_KERNEL_TYPE __attribute__((preserve_access_index))

/* Programs call helpers that the kernel gives to GPL-compatible programs only. */
char LICENSE[] SEC("license") = "GPL";

struct pt_regs {
	unsigned long r15, r14, r13, r12, bp, bx, r11, r10, r9, r8, ax, cx, dx, si, di, orig_ax, ip, cs, flags, sp, ss;
};

struct user_pt_regs {
	__u64 regs[31];
	__u64 sp;
	__u64 pc;
	__u64 pstate;
};

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

enum { BPF_ANY = 0, BPF_NOEXIST = 1, BPF_EXIST = 2 };
enum { BPF_F_USER_STACK = 1 << 8, BPF_F_FAST_STACK_CMP = 1 << 9, BPF_F_REUSE_STACKID = 1 << 10 };
enum { BPF_RB_NO_WAKEUP = 1, BPF_RB_FORCE_WAKEUP = 2 };

static void *(*bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static long (*bpf_map_update_elem)(void *map, const void *key, const void *value, __u64 flags) = (void *)2;
static long (*bpf_map_delete_elem)(void *map, const void *key) = (void *)3;
static __u64 (*bpf_ktime_get_ns)(void) = (void *)5;
static __u32 (*bpf_get_prandom_u32)(void) = (void *)7;
static __u32 (*bpf_get_smp_processor_id)(void) = (void *)8;
static __u64 (*bpf_get_current_pid_tgid)(void) = (void *)14;
static __u64 (*bpf_get_current_uid_gid)(void) = (void *)15;
static long (*bpf_get_current_comm)(void *buffer, __u32 size) = (void *)16;
static long (*bpf_get_stackid)(void *ctx, void *map, __u64 flags) = (void *)27;
static __u64 (*bpf_get_current_task)(void) = (void *)35;
static __u64 (*bpf_get_current_cgroup_id)(void) = (void *)80;
static long (*bpf_probe_read_user)(void *to, __u32 size, const void *from) = (void *)112;
static long (*bpf_probe_read_kernel)(void *to, __u32 size, const void *from) = (void *)113;
static long (*bpf_probe_read_user_str)(void *to, __u32 size, const void *from) = (void *)114;
static long (*bpf_probe_read_kernel_str)(void *to, __u32 size, const void *from) = (void *)115;
static __u64 (*bpf_ktime_get_boot_ns)(void) = (void *)125;
static long (*bpf_seq_write)(void *seq, const void *data, __u32 size) = (void *)127;
static long (*bpf_ringbuf_output)(void *ring, void *data, __u64 size, __u64 flags) = (void *)130;
static void *(*bpf_ringbuf_reserve)(void *ring, __u64 size, __u64 flags) = (void *)131;
static void (*bpf_ringbuf_submit)(void *data, __u64 flags) = (void *)132;
static void (*bpf_ringbuf_discard)(void *data, __u64 flags) = (void *)133;
static void *(*bpf_get_current_task_btf)(void) = (void *)158;
static __u64 (*bpf_get_attach_cookie)(void *ctx) = (void *)174;

/* Maps as libbpf reads them from BTF: a number is the length of an array, a type that of a pointer. */
#define GF_NUMBER(name, value) int (*name)[value]
#define GF_TYPE(name, type) type *name
#define GF_MAP(name, kind, key_t, value_t, entries)                                                                    \
	struct {                                                                                                       \
		GF_NUMBER(type, kind);                                                                                 \
		GF_NUMBER(max_entries, entries);                                                                       \
		GF_TYPE(key, key_t);                                                                                   \
		GF_TYPE(value, value_t);                                                                               \
	} name SEC(".maps")

#define GF_HASH(name, key_t, value_t, entries) GF_MAP(name, GF_MAP_HASH, key_t, value_t, entries)
#define GF_LRU_HASH(name, key_t, value_t, entries) GF_MAP(name, GF_MAP_LRU_HASH, key_t, value_t, entries)
#define GF_PERCPU_HASH(name, key_t, value_t, entries) GF_MAP(name, GF_MAP_PERCPU_HASH, key_t, value_t, entries)
#define GF_PERCPU_LRU_HASH(name, key_t, value_t, entries) GF_MAP(name, GF_MAP_LRU_PERCPU_HASH, key_t, value_t, entries)
#define GF_ARRAY(name, value_t, entries) GF_MAP(name, GF_MAP_ARRAY, __u32, value_t, entries)
#define GF_PERCPU_ARRAY(name, value_t, entries) GF_MAP(name, GF_MAP_PERCPU_ARRAY, __u32, value_t, entries)
#define GF_STACKS(name, entries)                                                                                       \
	struct {                                                                                                       \
		GF_NUMBER(type, GF_MAP_STACK_TRACE);                                                                   \
		GF_NUMBER(max_entries, entries);                                                                       \
		GF_NUMBER(key_size, 4);                                                                                \
		GF_NUMBER(value_size, 8 * GF_STACK_DEPTH);                                                             \
	} name SEC(".maps")
#define GF_RINGBUF(name, bytes)                                                                                        \
	struct {                                                                                                       \
		GF_NUMBER(type, GF_MAP_RINGBUF);                                                                       \
		GF_NUMBER(max_entries, bytes);                                                                         \
	} name SEC(".maps");                                                                                           \
	GF_PERCPU_ARRAY(name##_lost, __u64, 1)

#define gf_lookup(map, key) bpf_map_lookup_elem(&map, key)
#define gf_insert(map, key, value) bpf_map_update_elem(&map, key, value, BPF_NOEXIST)
#define gf_update(map, key, value) bpf_map_update_elem(&map, key, value, BPF_ANY)
#define gf_delete(map, key) bpf_map_delete_elem(&map, key)
#define gf_stack_id(map, ctx, flags) bpf_get_stackid(ctx, &map, flags)
#define gf_ring_output(map, data, size) gf_ring_put(&map, &map##_lost, data, size)

/* Nobody is woken: the reader comes once a round. */
static inline __attribute__((always_inline)) long gf_ring_put(void *ring, void *lost, void *data, __u64 size)
{
	long error = bpf_ringbuf_output(ring, data, size, BPF_RB_NO_WAKEUP);

	if (error) {
		__u32 zero = 0;
		__u64 *count = bpf_map_lookup_elem(lost, &zero);
		if (count)
			__sync_fetch_and_add(count, 1);
	}
	return error;
}

#define GF_UPROBE(name) SEC("uprobe") int name(struct pt_regs *ctx)
#define GF_URETPROBE(name) SEC("uretprobe") int name(struct pt_regs *ctx)
#define gf_cookie(ctx) bpf_get_attach_cookie(ctx)

/* CO-RE only. Arguments of tp_btf, raw_tp and iterators are words: `struct task_struct *p = (void *)ctx[0];`
 * In tp_btf a pointer of such an argument may be followed directly; elsewhere by gf_read. */
#define GF_TP_BTF(name, event) SEC("tp_btf/" #event) int name(__u64 *ctx)
#define GF_RAW_TP(name, event) SEC("raw_tp/" #event) int name(__u64 *ctx)
#define GF_TRACEPOINT(name, group, event) SEC("tracepoint/" #group "/" #event) int name(void *ctx)
#define GF_ITER(name, kind, context_t) SEC("iter/" #kind) int name(context_t *ctx)

/* The value of an expression like `task->mm` from memory of the kernel, relocated to the running one; 0 if unreadable. */
#define gf_read(expression)                                                                                            \
	({                                                                                                             \
		__typeof__(expression) gf_value = (__typeof__(expression))0;                                           \
		bpf_probe_read_kernel(&gf_value, sizeof(gf_value), __builtin_preserve_access_index(&(expression)));    \
		gf_value;                                                                                              \
	})
#define gf_field_exists(expression) __builtin_preserve_field_info(expression, 2)

/* A setting that the loader may overwrite (ProbeBackend.load(constants=)). */
#define GF_CONSTANT(type, name, value) const volatile type name = value

#endif
