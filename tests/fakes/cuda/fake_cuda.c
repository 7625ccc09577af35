/* libcuda.so.1 that needs no GPU (see fake.h): launches, memory and names of functions. */
#include "fake.h"

static u64 next = 0x7d0000001000;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static u64 fresh(void)
{
	u64 handle;

	pthread_mutex_lock(&lock);
	handle = next += 0x1000;
	pthread_mutex_unlock(&lock);
	return handle;
}

int cuInit(unsigned flags) { return 0; }
int cuLaunchKernel(u64 f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *s,
		   void **params, void **extra)
{
	BEGIN;
	return done(begin, "cuLaunchKernel", 0, " %llu %u %u %u %u %u %u %u %llu", LL(f), gx, gy, gz, bx, by, bz, shared, LL(s));
}
struct config { unsigned g[3], b[3], shared; void *stream; void *attributes; unsigned count; };
int cuLaunchKernelEx(const struct config *c, u64 f, void **params, void **extra)
{
	BEGIN;
	return done(begin, "cuLaunchKernelEx", 0, " %llu %u %u %u %u %u %u %u %llu", LL(f), c->g[0], c->g[1], c->g[2], c->b[0],
		    c->b[1], c->b[2], c->shared, LL(c->stream));
}
int cuGraphLaunch(void *graph, void *s) { BEGIN; return done(begin, "cuGraphLaunch", 0, " %llu %llu", LL(graph), LL(s)); }
int cuMemAlloc_v2(u64 *p, size_t n) { BEGIN; *p = fresh(); return done(begin, "cuMemAlloc_v2", 0, " %llu %llu", LL(*p), LL(n)); }
int cuMemFree_v2(u64 p) { BEGIN; return done(begin, "cuMemFree_v2", 0, " %llu", LL(p)); }
int cuMemcpyHtoD_v2(u64 d, const void *s, size_t n) { BEGIN; return done(begin, "cuMemcpyHtoD_v2", 0, " %llu", LL(n)); }
int cuMemcpyDtoHAsync_v2(void *d, u64 s, size_t n, void *st) { BEGIN; return done(begin, "cuMemcpyDtoHAsync_v2", 0, " %llu", LL(n)); }
int cuMemsetD32Async(u64 d, unsigned v, size_t n, void *s) { BEGIN; return done(begin, "cuMemsetD32Async", 0, " %llu", LL(n)); }
struct copy2d { u64 sx, sy; unsigned stype; u64 shost, sdevice, sarray, spitch, dx, dy; unsigned dtype; u64 dhost, ddevice, darray,
		dpitch, width, height; };
int cuMemcpy2D_v2(const struct copy2d *c) { BEGIN; return done(begin, "cuMemcpy2D_v2", 0, " %llu", LL(c->width * c->height)); }
int cuCtxSynchronize(void) { BEGIN; return done(begin, "cuCtxSynchronize", 0, ""); }
int cuStreamSynchronize(void *s) { BEGIN; return done(begin, "cuStreamSynchronize", 0, " %llu", LL(s)); }
int cuDevicePrimaryCtxRetain(void **ctx, int device) { *ctx = (void *)(0x6000ull + device * 16); return 0; }
int cuCtxCreate_v2(void **ctx, unsigned flags, int device) { *ctx = (void *)(0x7000ull + device * 16); return 0; }
int cuCtxSetCurrent(void *ctx) { return 0; }
int cuCtxPushCurrent_v2(void *ctx) { return 0; }
int cuCtxPopCurrent_v2(void **ctx) { return 0; }
int cuModuleGetFunction(u64 *f, void *module, const char *name)
{
	*f = fresh();
	return 0;
}
