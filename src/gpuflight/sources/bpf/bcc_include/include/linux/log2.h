/* bcc rounds the sizes of its own maps with this. */
#ifndef GF_LINUX_LOG2_H
#define GF_LINUX_LOG2_H
#define roundup_pow_of_two(n) ((n) <= 1 ? 1UL : 1UL << (64 - __builtin_clzl((unsigned long)(n) - 1)))
#endif
