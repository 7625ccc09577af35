/* bcc includes this before everything else and refuses to go on without CONFIG_BPF_SYSCALL. */
#define CONFIG_64BIT 1
#define CONFIG_BPF 1
#define CONFIG_BPF_SYSCALL 1
#define CONFIG_CC_IS_CLANG 1
#define CONFIG_SMP 1
#if defined(__TARGET_ARCH_arm64)
#define CONFIG_ARM64 1
#else
#define CONFIG_X86_64 1
#endif
