/* Integer types of the kernel. */
#ifndef GF_LINUX_TYPES_H
#define GF_LINUX_TYPES_H

#define GF_INTEGER(bits, type)          \
	typedef signed type __s##bits;      \
	typedef unsigned type __u##bits;    \
	typedef __s##bits s##bits;          \
	typedef __u##bits u##bits;          \
	typedef __u##bits uint##bits##_t;   \
	typedef __s##bits int##bits##_t;
GF_INTEGER(8, char)
GF_INTEGER(16, short)
GF_INTEGER(32, int)
GF_INTEGER(64, long long)
#undef GF_INTEGER

typedef __u16 __le16;
typedef __u32 __le32;
typedef __u64 __le64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u64 __be64;
typedef __u16 __sum16;
typedef __u32 __wsum;
typedef __u64 __attribute__((aligned(8))) __aligned_u64;
typedef __u64 __attribute__((aligned(8))) aligned_u64;
typedef __be64 __attribute__((aligned(8))) __aligned_be64;

typedef unsigned long size_t;
typedef long ssize_t;
typedef unsigned long uintptr_t;
typedef long long loff_t;
typedef int pid_t;
typedef unsigned int uid_t;
typedef unsigned int gid_t;
typedef unsigned int dev_t;
typedef unsigned short umode_t;
typedef unsigned int gfp_t;
typedef __u64 sector_t;
typedef __u64 dma_addr_t;

typedef _Bool bool;
enum { false = 0, true = 1 };
#define NULL ((void *)0)

#define __bitwise
#define __user
#define __kernel
#define __force
#define noinline __attribute__((__noinline__))
#ifndef __always_inline
#define __always_inline inline __attribute__((__always_inline__))
#endif
#define TASK_COMM_LEN 16
#endif
