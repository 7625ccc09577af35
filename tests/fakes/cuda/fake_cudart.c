/* libcudart.so.12 that needs no GPU (see fake.h). One lock around everything: correctness before speed, but for launches
 * that nobody logs, which cost a benchmark next to nothing. */
#include "fake.h"
#include <dlfcn.h>

typedef struct { unsigned x, y, z; } dim3;
struct stream { u64 handle, end; int device, flags, used; u64 capture; };
struct event { u64 handle, end, stream; int used; u64 capture; };
struct pitched { u64 ptr, pitch, xsize, ysize; };
struct extent { u64 width, height, depth; };

enum { OK = 0, INVALID_VALUE = 1, NO_MEMORY = 2, BAD_SHAPE = 9, BAD_DIRECTION = 21, BAD_DEVICE = 101, BAD_HANDLE = 400,
       NOT_READY = 600 };
enum { STREAMS = 256, EVENTS = 4096, FREED = 4096, LIVE = 4096 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct stream streams[STREAMS];
static struct event events[EVENTS];
static u64 next_handle = 0x7e0000001000, next_address = 0x7f0000000000, capturing, captures;
static u64 freed[FREED];
static struct { u64 address; int device; } live[LIVE];
static int freed_count;
static _Thread_local int current;

static int (*driver_launch)(u64, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
static int (*driver_alloc)(u64 *, size_t);
static int (*driver_graph)(void *, void *);

__attribute__((constructor)) static void find_driver(void)
{
	const char *path = getenv("FAKE_DRIVER");
	void *driver = path ? dlopen(path, RTLD_NOW) : NULL;

	if (driver) {
		*(void **)&driver_launch = dlsym(driver, "cuLaunchKernel");
		*(void **)&driver_alloc = dlsym(driver, "cuMemAlloc_v2");
		*(void **)&driver_graph = dlsym(driver, "cuGraphLaunch");
	}
}

static int devices(void) { return (int)setting("FAKE_DEVICES", 8); }

/* 0 and 1: the legacy default stream of the device; 2: that of the thread. */
static struct stream *stream_of(u64 handle, int per_thread)
{
	struct stream *unused = NULL;
	int device = current;

	if (handle == 2 || (handle == 0 && per_thread))
		handle = (u64)syscall(SYS_gettid) << 32 | 2;
	else if (handle == 0)
		handle = 1;
	for (int i = 0; i < STREAMS; i++) {
		if (streams[i].used && streams[i].handle == handle && (handle > 2 && (handle & 7) != 2 || streams[i].device == device))
			return &streams[i];
		if (!streams[i].used && !unused)
			unused = &streams[i];
	}
	if ((handle != 1 && (handle & 7) != 2) || !unused)
		return NULL;
	*unused = (struct stream){ .handle = handle, .device = device, .used = 1 };
	return unused;
}

static int enqueue(struct stream *stream, u64 duration)
{
	u64 at = now_ns();

	if (!stream)
		return BAD_HANDLE;
	if (stream->capture && stream->capture == capturing)
		return OK;
	if (!(stream->flags & 1)) /* blocking streams and the legacy one wait for each other */
		for (int i = 0; i < STREAMS; i++)
			if (streams[i].used && streams[i].device == stream->device && !(streams[i].flags & 1) &&
			    (streams[i].handle == 1 || stream->handle == 1) && streams[i].end > at)
				at = streams[i].end;
	if (stream->end > at)
		at = stream->end;
	stream->end = at + duration;
	return OK;
}

/* When everything that a wait for this stream covers is done. */
static u64 end_of(struct stream *stream)
{
	u64 end = stream->end;

	if (stream->handle == 1)
		for (int i = 0; i < STREAMS; i++)
			if (streams[i].used && streams[i].device == stream->device && !(streams[i].flags & 1) && streams[i].end > end)
				end = streams[i].end;
	return end;
}

static u64 kernel_ns(void)
{
	static u64 ns = ~0ull;
	if (ns == ~0ull)
		ns = setting("FAKE_KERNEL_US", 50) * 1000;
	return ns;
}

static int launch(u64 f, dim3 g, dim3 b, size_t shared, u64 s, int per_thread, const char *name, u64 begin)
{
	int result = OK;

	if (driver_launch)
		driver_launch(f, g.x, g.y, g.z, b.x, b.y, b.z, shared, (void *)s, NULL, NULL);
	if (begin || kernel_ns()) {
		pthread_mutex_lock(&lock);
		if (b.x * b.y * b.z > 1024 || !b.x || !g.x)
			result = BAD_SHAPE;
		else
			result = enqueue(stream_of(s, per_thread), kernel_ns());
		pthread_mutex_unlock(&lock);
	}
	return done(begin, name, result, " %llu %u %u %u %u %u %u %llu %llu %d", LL(f), g.x, g.y, g.z, b.x, b.y, b.z, LL(shared),
		    LL(s), current);
}

#define LAUNCH(name, per_thread)                                                                                       \
	int name(const void *f, dim3 g, dim3 b, void **a, size_t shared, void *s)                                      \
	{                                                                                                              \
		BEGIN;                                                                                                 \
		return launch((u64)f, g, b, shared, (u64)s, per_thread, #name, begin);                                \
	}
LAUNCH(cudaLaunchKernel, 0)
LAUNCH(cudaLaunchKernel_ptsz, 1)
LAUNCH(cudaLaunchCooperativeKernel, 0)
/* As in the real library, a function that only jumps. */
__attribute__((optimize("O2,optimize-sibling-calls"))) int __cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t shared, void *s)
{
	return cudaLaunchKernel(f, g, b, a, shared, s);
}

struct config { dim3 grid, block; size_t shared; void *stream, *attributes; unsigned count; };

#define LAUNCH_CONFIG(name, per_thread)                                                                                \
	int name(const struct config *c, const void *f, void **a)                                                      \
	{                                                                                                              \
		BEGIN;                                                                                                 \
		return launch((u64)f, c->grid, c->block, c->shared, (u64)c->stream, per_thread, #name, begin);        \
	}
LAUNCH_CONFIG(cudaLaunchKernelExC, 0)
LAUNCH_CONFIG(cudaLaunchKernelExC_ptsz, 1)

static int graph_launch(void *graph, void *s, int per_thread, const char *name, u64 begin)
{
	int result;

	if (driver_graph)
		driver_graph(graph, s);
	pthread_mutex_lock(&lock);
	result = enqueue(stream_of((u64)s, per_thread), 3 * kernel_ns());
	pthread_mutex_unlock(&lock);
	return done(begin, name, result, " %llu %llu %d", LL(graph), LL(s), current);
}
int cudaGraphLaunch(void *graph, void *s) { BEGIN; return graph_launch(graph, s, 0, "cudaGraphLaunch", begin); }
int cudaGraphLaunch_ptsz(void *graph, void *s) { BEGIN; return graph_launch(graph, s, 1, "cudaGraphLaunch_ptsz", begin); }

static int wait_stream(u64 handle, int per_thread, int query, const char *name, u64 begin)
{
	struct stream *stream;
	int result = OK;
	u64 end = 0;

	pthread_mutex_lock(&lock);
	stream = stream_of(handle, per_thread);
	if (stream)
		end = end_of(stream);
	else
		result = BAD_HANDLE;
	pthread_mutex_unlock(&lock);
	if (query && end > now_ns())
		result = NOT_READY;
	else
		sleep_until(end);
	return done(begin, name, result, " %llu %d", LL(handle), current);
}
int cudaStreamSynchronize(void *s) { BEGIN; return wait_stream((u64)s, 0, 0, "cudaStreamSynchronize", begin); }
int cudaStreamSynchronize_ptsz(void *s) { BEGIN; return wait_stream((u64)s, 1, 0, "cudaStreamSynchronize_ptsz", begin); }
int cudaStreamQuery(void *s) { BEGIN; return wait_stream((u64)s, 0, 1, "cudaStreamQuery", begin); }

static void wait_device(void)
{
	u64 end = 0;

	pthread_mutex_lock(&lock);
	for (int i = 0; i < STREAMS; i++)
		if (streams[i].used && streams[i].device == current && streams[i].end > end)
			end = streams[i].end;
	pthread_mutex_unlock(&lock);
	sleep_until(end);
}
int cudaDeviceSynchronize(void) { BEGIN; wait_device(); return done(begin, "cudaDeviceSynchronize", OK, " %d", current); }
int cudaDeviceReset(void)
{
	BEGIN;
	wait_device();
	pthread_mutex_lock(&lock);
	for (int i = 0; i < STREAMS; i++)
		if (streams[i].device == current)
			streams[i].used = 0;
	for (int i = 0; i < LIVE; i++)
		if (live[i].address && live[i].device == current) {
			if (freed_count < FREED)
				freed[freed_count++] = live[i].address;
			live[i].address = 0;
		}
	pthread_mutex_unlock(&lock);
	return done(begin, "cudaDeviceReset", OK, " %d", current);
}

static int make_stream(void **s, unsigned flags, const char *name, u64 begin)
{
	int result = NO_MEMORY;

	pthread_mutex_lock(&lock);
	for (int i = 0; i < STREAMS && result; i++)
		if (!streams[i].used) {
			streams[i] = (struct stream){ .handle = next_handle += 16, .device = current, .flags = flags & 1, .used = 1 };
			*s = (void *)streams[i].handle;
			result = OK;
		}
	pthread_mutex_unlock(&lock);
	return done(begin, name, result, " %llu %u %d", LL(*s), flags, current);
}
int cudaStreamCreate(void **s) { BEGIN; return make_stream(s, 0, "cudaStreamCreate", begin); }
int cudaStreamCreateWithFlags(void **s, unsigned flags) { BEGIN; return make_stream(s, flags, "cudaStreamCreateWithFlags", begin); }
int cudaStreamCreateWithPriority(void **s, unsigned flags, int priority)
{
	BEGIN;
	return make_stream(s, flags, "cudaStreamCreateWithPriority", begin);
}
int cudaStreamDestroy(void *s)
{
	BEGIN;
	struct stream *stream;

	pthread_mutex_lock(&lock);
	stream = (u64)s > 2 ? stream_of((u64)s, 0) : NULL;
	if (stream)
		stream->used = 0;
	pthread_mutex_unlock(&lock);
	return done(begin, "cudaStreamDestroy", stream ? OK : BAD_HANDLE, " %llu %d", LL(s), current);
}

static struct event *event_of(u64 handle)
{
	for (int i = 0; i < EVENTS; i++)
		if (events[i].used && events[i].handle == handle)
			return &events[i];
	return NULL;
}
int cudaEventCreateWithFlags(void **e, unsigned flags)
{
	BEGIN;
	int result = NO_MEMORY;

	pthread_mutex_lock(&lock);
	for (int i = 0; i < EVENTS && result; i++)
		if (!events[i].used) {
			events[i] = (struct event){ .handle = next_handle += 16, .used = 1 };
			*e = (void *)events[i].handle;
			result = OK;
		}
	pthread_mutex_unlock(&lock);
	return done(begin, "cudaEventCreateWithFlags", result, " %llu", LL(*e));
}
int cudaEventDestroy(void *e)
{
	BEGIN;
	struct event *event;

	pthread_mutex_lock(&lock);
	event = event_of((u64)e);
	if (event)
		event->used = 0;
	pthread_mutex_unlock(&lock);
	return done(begin, "cudaEventDestroy", event ? OK : BAD_HANDLE, " %llu", LL(e));
}
static int record(void *e, void *s, int per_thread, const char *name, u64 begin)
{
	struct stream *stream;
	struct event *event;

	pthread_mutex_lock(&lock);
	event = event_of((u64)e);
	stream = stream_of((u64)s, per_thread);
	if (event && stream) {
		event->end = end_of(stream);
		event->capture = stream->capture == capturing ? capturing : 0;
	}
	pthread_mutex_unlock(&lock);
	return done(begin, name, event && stream ? OK : BAD_HANDLE, " %llu %llu %d", LL(e), LL(s), current);
}
int cudaEventRecord(void *e, void *s) { BEGIN; return record(e, s, 0, "cudaEventRecord", begin); }
int cudaEventRecord_ptsz(void *e, void *s) { BEGIN; return record(e, s, 1, "cudaEventRecord_ptsz", begin); }
static int wait_event(void *e, int query, const char *name, u64 begin)
{
	struct event *event;
	u64 end = 0;
	int result = BAD_HANDLE;

	pthread_mutex_lock(&lock);
	event = event_of((u64)e);
	if (event) {
		end = event->end;
		result = OK;
	}
	pthread_mutex_unlock(&lock);
	if (query && end > now_ns())
		result = NOT_READY;
	else
		sleep_until(end);
	return done(begin, name, result, " %llu", LL(e));
}
int cudaEventSynchronize(void *e) { BEGIN; return wait_event(e, 0, "cudaEventSynchronize", begin); }
int cudaEventQuery(void *e) { BEGIN; return wait_event(e, 1, "cudaEventQuery", begin); }
int cudaStreamWaitEvent(void *s, void *e, unsigned flags)
{
	BEGIN;
	struct stream *stream;
	struct event *event;

	pthread_mutex_lock(&lock);
	stream = stream_of((u64)s, 0);
	event = event_of((u64)e);
	if (stream && event && event->capture && event->capture == capturing)
		stream->capture = capturing;
	pthread_mutex_unlock(&lock);
	return done(begin, "cudaStreamWaitEvent", stream && event ? OK : BAD_HANDLE, " %llu %llu", LL(s), LL(e));
}
int cudaStreamBeginCapture(void *s, int mode)
{
	BEGIN;
	struct stream *stream;

	pthread_mutex_lock(&lock);
	stream = stream_of((u64)s, 0);
	if (stream)
		stream->capture = capturing = ++captures;
	pthread_mutex_unlock(&lock);
	return done(begin, "cudaStreamBeginCapture", stream ? OK : BAD_HANDLE, " %llu", LL(s));
}
int cudaStreamEndCapture(void *s, void **graph)
{
	BEGIN;
	capturing = 0;
	*graph = (void *)(next_handle += 16);
	return done(begin, "cudaStreamEndCapture", OK, " %llu", LL(s));
}
int cudaGraphInstantiate(void **exec, void *graph, u64 flags)
{
	BEGIN;
	*exec = (void *)(next_handle += 16);
	return done(begin, "cudaGraphInstantiate", OK, " %llu", LL(*exec));
}

int cudaGetDeviceCount(int *count) { BEGIN; *count = devices(); return done(begin, "cudaGetDeviceCount", OK, ""); }
int cudaGetDevice(int *device) { *device = current; return OK; }
int cudaSetDevice(int device)
{
	BEGIN;
	int result = device >= 0 && device < devices() ? OK : BAD_DEVICE;

	if (!result)
		current = device;
	return done(begin, "cudaSetDevice", result, " %d", device);
}

static void now_live(u64 address)
{
	for (int i = 0; i < LIVE; i++)
		if (!live[i].address) {
			live[i].address = address;
			live[i].device = current;
			return;
		}
	abort();
}
static int no_longer_live(u64 address)
{
	for (int i = 0; i < LIVE; i++)
		if (live[i].address == address) {
			live[i].address = 0;
			return 1;
		}
	return 0;
}

/* Addresses that were freed last come first, so that they are used again. */
static int allocate(void **pointer, u64 size, const char *name, u64 begin)
{
	int result = OK;

	if (driver_alloc) {
		u64 unused;
		driver_alloc(&unused, size);
	}
	pthread_mutex_lock(&lock);
	if (size > setting("FAKE_MEMORY", 80ull << 30)) {
		result = NO_MEMORY;
	} else if (!size) {
		*pointer = NULL;
	} else if (freed_count) {
		*pointer = (void *)freed[--freed_count];
	} else {
		*pointer = (void *)next_address;
		next_address += 1ull << 36;
	}
	if (!result && size)
		now_live((u64)*pointer);
	pthread_mutex_unlock(&lock);
	return done(begin, name, result, " %llu %llu %d", result ? 0 : LL(*pointer), LL(size), current);
}
static int release(void *pointer, const char *name, u64 begin)
{
	int result = OK;

	pthread_mutex_lock(&lock);
	if (pointer && !no_longer_live((u64)pointer))
		result = INVALID_VALUE;
	else if (pointer && freed_count < FREED)
		freed[freed_count++] = (u64)pointer;
	pthread_mutex_unlock(&lock);
	return done(begin, name, result, " %llu %d", LL(pointer), current);
}
int cudaMalloc(void **p, size_t n) { BEGIN; return allocate(p, n, "cudaMalloc", begin); }
int cudaMallocAsync(void **p, size_t n, void *s) { BEGIN; return allocate(p, n, "cudaMallocAsync", begin); }
int cudaMallocManaged(void **p, size_t n, unsigned flags) { BEGIN; return allocate(p, n, "cudaMallocManaged", begin); }
int cudaMallocHost(void **p, size_t n) { BEGIN; return allocate(p, n, "cudaMallocHost", begin); }
int cudaHostAlloc(void **p, size_t n, unsigned flags) { BEGIN; return allocate(p, n, "cudaHostAlloc", begin); }
int cudaMallocPitch(void **p, size_t *pitch, size_t width, size_t height)
{
	BEGIN;
	*pitch = (width + 511) / 512 * 512;
	return allocate(p, *pitch * height, "cudaMallocPitch", begin);
}
int cudaMalloc3D(struct pitched *out, struct extent size)
{
	BEGIN;
	void *pointer = NULL;
	int result;

	out->pitch = (size.width + 511) / 512 * 512;
	result = allocate(&pointer, out->pitch * size.height * size.depth, "cudaMalloc3D", begin);
	out->ptr = (u64)pointer;
	return result;
}
int cudaFree(void *p) { BEGIN; return release(p, "cudaFree", begin); }
int cudaFreeAsync(void *p, void *s) { BEGIN; return release(p, "cudaFreeAsync", begin); }
int cudaFreeHost(void *p) { BEGIN; return release(p, "cudaFreeHost", begin); }
int cudaHostRegister(void *p, size_t n, unsigned flags)
{
	BEGIN;
	int result = OK;

	pthread_mutex_lock(&lock);
	if (no_longer_live((u64)p))
		result = 712;
	now_live((u64)p);
	pthread_mutex_unlock(&lock);
	return done(begin, "cudaHostRegister", result, " %llu %llu %d", LL(p), LL(n), current);
}
int cudaHostUnregister(void *p)
{
	BEGIN;
	int result;

	pthread_mutex_lock(&lock);
	result = p && no_longer_live((u64)p) ? OK : 713;
	pthread_mutex_unlock(&lock);
	return done(begin, "cudaHostUnregister", result, " %llu %d", LL(p), current);
}

static int copy(u64 bytes, int kind, u64 handle, int per_thread, int blocks, const char *name, u64 begin)
{
	struct stream *stream;
	int result = kind > 4 && kind != 6 ? BAD_DIRECTION : OK;
	u64 end = 0;

	pthread_mutex_lock(&lock);
	stream = stream_of(handle, per_thread);
	if (!result)
		result = enqueue(stream, bytes / 25);
	if (!result && blocks)
		end = end_of(stream);
	pthread_mutex_unlock(&lock);
	sleep_until(end);
	return done(begin, name, result, " %llu %d %llu %d", LL(bytes), kind, LL(handle), current);
}
int cudaMemcpy(void *d, const void *s, size_t n, int kind) { BEGIN; return copy(n, kind, 0, 0, 1, "cudaMemcpy", begin); }
int cudaMemcpyAsync(void *d, const void *s, size_t n, int kind, void *st)
{
	BEGIN;
	return copy(n, kind, (u64)st, 0, 0, "cudaMemcpyAsync", begin);
}
int cudaMemcpy2D(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, int kind)
{
	BEGIN;
	return copy(w * h, kind, 0, 0, 1, "cudaMemcpy2D", begin);
}
int cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, int kind, void *st)
{
	BEGIN;
	return copy(w * h, kind, (u64)st, 0, 0, "cudaMemcpy2DAsync", begin);
}
struct parameters { u64 a[16]; struct extent extent; int kind; };
int cudaMemcpy3D(const struct parameters *p)
{
	BEGIN;
	return copy(p->extent.width * p->extent.height * p->extent.depth, p->kind, 0, 0, 1, "cudaMemcpy3D", begin);
}
int cudaMemcpyBatchAsync(void **d, void **s, size_t *sizes, size_t count, void *a, size_t *ai, size_t an, void *st)
{
	BEGIN;
	u64 sum = 0;

	for (size_t i = 0; i < count; i++)
		sum += sizes[i];
	return copy(sum, 4, (u64)st, 0, 0, "cudaMemcpyBatchAsync", begin);
}
int cudaMemset(void *p, int value, size_t n) { BEGIN; return copy(n, 6, 0, 0, 0, "cudaMemset", begin); }
int cudaMemsetAsync(void *p, int value, size_t n, void *s) { BEGIN; return copy(n, 6, (u64)s, 0, 0, "cudaMemsetAsync", begin); }
int cudaMemset3D(struct pitched p, int value, struct extent e)
{
	BEGIN;
	return copy(e.width * e.height * e.depth, 6, 0, 0, 0, "cudaMemset3D", begin);
}

void __cudaRegisterFunction(void **fat, const char *host, char *device, const char *name, int limit, void *a, void *b, void *c,
			    void *d, int *e)
{
	BEGIN;
	done(begin, "__cudaRegisterFunction", 0, " %llu %s", LL(host), name);
}
int __cudaGetKernel(void **kernel, const void *host)
{
	BEGIN;
	*kernel = (void *)((u64)host ^ 0x5000000000000000);
	return done(begin, "__cudaGetKernel", OK, " %llu %llu", LL(*kernel), LL(host));
}
int cudaGetLastError(void) { return OK; }
