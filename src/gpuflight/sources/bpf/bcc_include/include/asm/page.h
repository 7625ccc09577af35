/* The page that sizes of bcc's own ring buffers count in, not necessarily the machine's. */
#ifndef GF_ASM_PAGE_H
#define GF_ASM_PAGE_H
#define PAGE_SHIFT 12
#define PAGE_SIZE (1UL << PAGE_SHIFT)
#endif
