/* A CUDA without a GPU: calls succeed, streams are in-order queues of simulated work, and every call is written down.
 *
 * FAKE_CUDA_LOG: file that each call is appended to, one line: thread, begin and end (ns, CLOCK_MONOTONIC), name, result,
 * arguments. FAKE_KERNEL_US: how long a kernel takes (default 50). FAKE_DEVICES (default 8). FAKE_DRIVER: path of a fake
 * libcuda.so.1 that the runtime passes its calls on to, as the real one does.
 */
#ifndef FAKE_H
#define FAKE_H
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t u64;

static u64 now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static int log_fd = -2;

static int logging(void)
{
	if (log_fd == -2) {
		const char *path = getenv("FAKE_CUDA_LOG");
		log_fd = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
	}
	return log_fd >= 0;
}

/* The end of a call: `begin` is 0 if nobody wants to know. */
static int done(u64 begin, const char *name, int result, const char *format, ...)
{
	char line[512];
	int length;
	va_list values;

	if (!begin)
		return result;
	length = snprintf(line, sizeof line, "%d %ld %llu %llu %s %d", getpid(), (long)syscall(SYS_gettid),
			  (unsigned long long)begin, (unsigned long long)now_ns(), name, result);
	va_start(values, format);
	length += vsnprintf(line + length, sizeof line - length - 1, format, values);
	va_end(values);
	line[length++] = '\n';
	if (write(log_fd, line, length) != length)
		abort();
	return result;
}

#define BEGIN u64 begin = logging() ? now_ns() : 0
#define LL(x) ((unsigned long long)(x))

static u64 setting(const char *name, u64 otherwise)
{
	const char *text = getenv(name);
	return text ? strtoull(text, NULL, 0) : otherwise;
}

static void sleep_until(u64 when)
{
	u64 now = now_ns();
	if (when > now) {
		struct timespec t = { (when - now) / 1000000000, (when - now) % 1000000000 };
		nanosleep(&t, NULL);
	}
}

#endif
