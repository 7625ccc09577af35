/* The version is that of the running kernel; our compiler passes it (GF_KERNEL_VERSION, as uname gives it). */
#ifndef GF_LINUX_VERSION_H
#define GF_LINUX_VERSION_H
#define KERNEL_VERSION(major, minor, patch) (((major) << 16) + ((minor) << 8) + ((patch) > 255 ? 255 : (patch)))
#ifdef GF_KERNEL_VERSION
#define LINUX_VERSION_CODE GF_KERNEL_VERSION
#else
#define LINUX_VERSION_CODE KERNEL_VERSION(5, 4, 0)
#endif
#endif
