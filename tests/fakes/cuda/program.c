/* A CUDA program that does what a script says, one call per line: "THREAD CALL ARGUMENTS". Thread 0 is the main one; calls
 * follow each other whatever thread makes them, so that the log of the fake runtime is one sequence.
 *
 * Streams are written 0, 1, 2 (as in CUDA) or sN; functions fN (host functions) or hN (handles of __cudaGetKernel); events,
 * memory and graphs by their number. `pause` says so on standard output and waits for a line on standard input.
 * Compiled with -DUSE_DLOPEN, the runtime is FAKE_CUDART, loaded at the first `load`.
 */
#include "fake.h"
#include <dlfcn.h>
#include <sys/wait.h>

typedef struct { unsigned x, y, z; } dim3;
struct config { dim3 grid, block; size_t shared; void *stream, *attributes; unsigned count; };
struct pitched { u64 ptr, pitch, xsize, ysize; };
struct extent { u64 width, height, depth; };
struct parameters { u64 a[16]; struct extent extent; int kind; };
typedef struct { char internal[128]; } ncclUniqueId;
struct copy2d { u64 sx, sy; unsigned stype; u64 shost, sdevice, sarray, spitch, dx, dy; unsigned dtype; u64 dhost, ddevice, darray,
		dpitch, width, height; };

#define RUNTIME(X)                                                                                                     \
	X(int, cudaLaunchKernel, (const void *, dim3, dim3, void **, size_t, void *))                                  \
	X(int, cudaLaunchKernel_ptsz, (const void *, dim3, dim3, void **, size_t, void *))                             \
	X(int, cudaLaunchCooperativeKernel, (const void *, dim3, dim3, void **, size_t, void *))                       \
	X(int, __cudaLaunchKernel, (const void *, dim3, dim3, void **, size_t, void *))                                \
	X(int, cudaLaunchKernelExC, (const struct config *, const void *, void **))                                    \
	X(int, cudaGraphLaunch, (void *, void *))                                                                      \
	X(int, cudaStreamSynchronize, (void *))                                                                        \
	X(int, cudaStreamSynchronize_ptsz, (void *))                                                                   \
	X(int, cudaStreamQuery, (void *))                                                                              \
	X(int, cudaDeviceSynchronize, (void))                                                                          \
	X(int, cudaDeviceReset, (void))                                                                                \
	X(int, cudaStreamCreateWithFlags, (void **, unsigned))                                                         \
	X(int, cudaStreamDestroy, (void *))                                                                            \
	X(int, cudaStreamWaitEvent, (void *, void *, unsigned))                                                        \
	X(int, cudaStreamBeginCapture, (void *, int))                                                                  \
	X(int, cudaStreamEndCapture, (void *, void **))                                                                \
	X(int, cudaGraphInstantiate, (void **, void *, u64))                                                           \
	X(int, cudaEventCreateWithFlags, (void **, unsigned))                                                          \
	X(int, cudaEventDestroy, (void *))                                                                             \
	X(int, cudaEventRecord, (void *, void *))                                                                      \
	X(int, cudaEventRecord_ptsz, (void *, void *))                                                                 \
	X(int, cudaEventSynchronize, (void *))                                                                         \
	X(int, cudaEventQuery, (void *))                                                                               \
	X(int, cudaSetDevice, (int))                                                                                   \
	X(int, cudaMalloc, (void **, size_t))                                                                          \
	X(int, cudaMallocAsync, (void **, size_t, void *))                                                             \
	X(int, cudaMallocManaged, (void **, size_t, unsigned))                                                         \
	X(int, cudaMallocHost, (void **, size_t))                                                                      \
	X(int, cudaMallocPitch, (void **, size_t *, size_t, size_t))                                                   \
	X(int, cudaMalloc3D, (struct pitched *, struct extent))                                                        \
	X(int, cudaFree, (void *))                                                                                     \
	X(int, cudaFreeAsync, (void *, void *))                                                                        \
	X(int, cudaFreeHost, (void *))                                                                                 \
	X(int, cudaHostRegister, (void *, size_t, unsigned))                                                           \
	X(int, cudaHostUnregister, (void *))                                                                           \
	X(int, cudaMemcpy, (void *, const void *, size_t, int))                                                        \
	X(int, cudaMemcpyAsync, (void *, const void *, size_t, int, void *))                                           \
	X(int, cudaMemcpy2D, (void *, size_t, const void *, size_t, size_t, size_t, int))                              \
	X(int, cudaMemcpy2DAsync, (void *, size_t, const void *, size_t, size_t, size_t, int, void *))                 \
	X(int, cudaMemcpy3D, (const struct parameters *))                                                              \
	X(int, cudaMemcpyBatchAsync, (void **, void **, size_t *, size_t, void *, size_t *, size_t, void *))           \
	X(int, cudaMemset, (void *, int, size_t))                                                                      \
	X(int, cudaMemsetAsync, (void *, int, size_t, void *))                                                         \
	X(int, cudaMemset3D, (struct pitched, int, struct extent))                                                     \
	X(void, __cudaRegisterFunction, (void **, const char *, char *, const char *, int, void *, void *, void *, void *, int *)) \
	X(int, __cudaGetKernel, (void **, const void *))

#ifdef USE_DLOPEN
#define X(result, name, arguments) static result(*name) arguments;
RUNTIME(X)
#undef X
static void load(void)
{
	void *runtime = dlopen(getenv("FAKE_CUDART"), RTLD_NOW);
	if (!runtime) {
		fprintf(stderr, "%s\n", dlerror());
		exit(3);
	}
#define X(result, name, arguments) *(void **)&name = dlsym(runtime, #name);
	RUNTIME(X)
#undef X
}
#else
#define X(result, name, arguments) result name arguments;
RUNTIME(X)
#undef X
static void load(void) {}
#endif

/* Named as nvcc names kernels, so that the symbol table says what was launched. */
#define KERNEL(n) void _Z8kernel_##n##Pf(void) { __asm__ volatile("" ::"i"(n)); }
KERNEL(0) KERNEL(1) KERNEL(2) KERNEL(3)
static void (*const kernels[])(void) = { _Z8kernel_0Pf, _Z8kernel_1Pf, _Z8kernel_2Pf, _Z8kernel_3Pf };
static const char *const kernel_names[] = { "_Z8kernel_0Pf", "_Z8kernel_1Pf", "_Z8kernel_2Pf", "_Z8kernel_3Pf" };

static void *streams[64], *events[64], *memory[256], *graphs[16], *handles[4], *executables[16];

static char *word(char **rest)
{
	char *found = strtok_r(NULL, " \n", rest);
	return found ? found : "";
}
static u64 number(char **rest) { return strtoull(word(rest), NULL, 0); }
static void *stream(char **rest)
{
	char *text = word(rest);
	return *text == 's' ? streams[atoi(text + 1)] : (void *)strtoull(text, NULL, 0);
}
static const void *function(char **rest)
{
	char *text = word(rest);
	return *text == 'h' ? handles[atoi(text + 1)] : (const void *)kernels[atoi(text + 1)];
}
static dim3 three(char **rest)
{
	unsigned x = number(rest), y = number(rest), z = number(rest);
	return (dim3){ x, y, z };
}
static void *from(const char *library_variable, const char *name)
{
	void *library = dlopen(getenv(library_variable), RTLD_NOW), *found = library ? dlsym(library, name) : NULL;
	if (!found) {
		fprintf(stderr, "no %s: %s\n", name, dlerror());
		exit(3);
	}
	return found;
}

typedef int launch_call(const void *, dim3, dim3, void **, size_t, void *);
static void launch(launch_call *call, char **rest)
{
	const void *f = function(rest);
	dim3 grid = three(rest), block = three(rest);
	size_t shared = number(rest);
	call(f, grid, block, NULL, shared, stream(rest));
}

static void other_library(const char *call, char **rest)
{
	if (!strcmp(call, "culaunch")) {
		int (*cu)(u64, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **) =
			from("FAKE_DRIVER", "cuLaunchKernel");
		u64 f = number(rest);
		dim3 g = three(rest), b = three(rest);
		unsigned shared = number(rest);
		cu(f, g.x, g.y, g.z, b.x, b.y, b.z, shared, stream(rest), NULL, NULL);
	} else if (!strcmp(call, "culaunchex")) {
		struct { unsigned g[3], b[3], shared; void *stream, *attributes; unsigned count; } c = { 0 };
		int (*cu)(const void *, u64, void **, void **) = from("FAKE_DRIVER", "cuLaunchKernelEx");
		u64 f = number(rest);
		dim3 g = three(rest), b = three(rest);
		memcpy(c.g, &g, 12);
		memcpy(c.b, &b, 12);
		c.shared = number(rest);
		c.stream = stream(rest);
		cu(&c, f, NULL, NULL);
	} else if (!strcmp(call, "cumalloc")) {
		u64 pointer;
		((int (*)(u64 *, size_t))from("FAKE_DRIVER", "cuMemAlloc_v2"))(&pointer, number(rest));
	} else if (!strcmp(call, "cumemcpyhtod")) {
		((int (*)(u64, const void *, size_t))from("FAKE_DRIVER", "cuMemcpyHtoD_v2"))(0, NULL, number(rest));
	} else if (!strcmp(call, "cumemcpydtohasync")) {
		((int (*)(void *, u64, size_t, void *))from("FAKE_DRIVER", "cuMemcpyDtoHAsync_v2"))(NULL, 0, number(rest), NULL);
	} else if (!strcmp(call, "cumemset32")) {
		((int (*)(u64, unsigned, size_t, void *))from("FAKE_DRIVER", "cuMemsetD32Async"))(0, 0, number(rest), NULL);
	} else if (!strcmp(call, "cumemcpy2d")) {
		struct copy2d c = { 0 };
		c.stype = number(rest);
		c.dtype = number(rest);
		c.width = number(rest);
		c.height = number(rest);
		((int (*)(const struct copy2d *))from("FAKE_DRIVER", "cuMemcpy2D_v2"))(&c);
	} else if (!strcmp(call, "cusync")) {
		((int (*)(void))from("FAKE_DRIVER", "cuCtxSynchronize"))();
	} else if (!strcmp(call, "cucontext")) { /* the context of a device made current */
		void *context;
		((int (*)(void **, int))from("FAKE_DRIVER", "cuDevicePrimaryCtxRetain"))(&context, number(rest));
		((int (*)(void *))from("FAKE_DRIVER", "cuCtxSetCurrent"))(context);
	} else if (!strcmp(call, "cufunction")) { /* by a name that is gone after the call */
		char name[64];
		u64 f;
		snprintf(name, sizeof name, "%s", word(rest));
		((int (*)(u64 *, void *, const char *))from("FAKE_DRIVER", "cuModuleGetFunction"))(&f, NULL, name);
		memset(name, 'x', sizeof name);
		((int (*)(u64, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **))from(
			"FAKE_DRIVER", "cuLaunchKernel"))(f, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
	} else if (!strcmp(call, "allreduce")) {
		size_t n = number(rest);
		int type = number(rest), op = number(rest);
		u64 comm = number(rest);
		((int (*)(const void *, void *, size_t, int, int, void *, void *))from("FAKE_NCCL", "ncclAllReduce"))(
			NULL, NULL, n, type, op, (void *)comm, stream(rest));
	} else if (!strcmp(call, "reduce")) {
		size_t n = number(rest);
		int type = number(rest), op = number(rest);
		u64 comm = number(rest);
		((int (*)(const void *, void *, size_t, int, int, int, void *, void *))from("FAKE_NCCL", "ncclReduce"))(
			NULL, NULL, n, type, op, 0, (void *)comm, stream(rest));
	} else if (!strcmp(call, "broadcast") || !strcmp(call, "bcast")) {
		size_t n = number(rest);
		int type = number(rest);
		u64 comm = number(rest);
		if (*call == 'b' && call[1] == 'r')
			((int (*)(const void *, void *, size_t, int, int, void *, void *))from("FAKE_NCCL", "ncclBroadcast"))(
				NULL, NULL, n, type, 0, (void *)comm, stream(rest));
		else
			((int (*)(void *, size_t, int, int, void *, void *))from("FAKE_NCCL", "ncclBcast"))(
				NULL, n, type, 0, (void *)comm, stream(rest));
	} else if (!strcmp(call, "allgather") || !strcmp(call, "send")) {
		size_t n = number(rest);
		int type = number(rest);
		u64 comm = number(rest);
		if (*call == 'a')
			((int (*)(const void *, void *, size_t, int, void *, void *))from("FAKE_NCCL", "ncclAllGather"))(
				NULL, NULL, n, type, (void *)comm, stream(rest));
		else
			((int (*)(const void *, size_t, int, int, void *, void *))from("FAKE_NCCL", "ncclSend"))(
				NULL, n, type, 1, (void *)comm, stream(rest));
	} else if (!strcmp(call, "comm")) {
		ncclUniqueId id = { { 0 } };
		void *comm;
		int ranks = number(rest);
		((int (*)(void **, int, ncclUniqueId, int))from("FAKE_NCCL", "ncclCommInitRank"))(&comm, ranks, id, number(rest));
	} else if (!strcmp(call, "commall")) {
		void *comms[16];
		int devices[16], count = number(rest);
		for (int i = 0; i < count; i++)
			devices[i] = count - 1 - i;
		((int (*)(void **, int, const int *))from("FAKE_NCCL", "ncclCommInitAll"))(comms, count, devices);
	} else if (!strcmp(call, "commdestroy")) {
		((int (*)(void *))from("FAKE_NCCL", "ncclCommDestroy"))((void *)number(rest));
	} else {
		fprintf(stderr, "what is %s?\n", call);
		exit(3);
	}
}

static void run(const char *call, char **rest)
{
	u64 i, n, w, h;
	size_t unused;

	if (!strcmp(call, "load")) {
		load();
	} else if (!strcmp(call, "register")) {
		i = number(rest);
		__cudaRegisterFunction(NULL, (const char *)kernels[i], "", kernel_names[i], -1, NULL, NULL, NULL, NULL, NULL);
	} else if (!strcmp(call, "getkernel")) {
		i = number(rest);
		__cudaGetKernel(&handles[i], (const void *)kernels[i]);
	} else if (!strcmp(call, "launch")) {
		launch(cudaLaunchKernel, rest);
	} else if (!strcmp(call, "launches")) { /* as fast as it goes */
		const void *f;
		n = number(rest);
		f = function(rest);
		for (i = 0; i < n; i++)
			cudaLaunchKernel(f, (dim3){ 1, 1, 1 }, (dim3){ 32, 1, 1 }, NULL, 0, NULL);
	} else if (!strcmp(call, "launchptsz")) {
		launch(cudaLaunchKernel_ptsz, rest);
	} else if (!strcmp(call, "launchcoop")) {
		launch(cudaLaunchCooperativeKernel, rest);
	} else if (!strcmp(call, "launch__")) {
		launch(__cudaLaunchKernel, rest);
	} else if (!strcmp(call, "launchex")) {
		struct config c = { 0 };
		const void *f = function(rest);
		c.grid = three(rest);
		c.block = three(rest);
		c.shared = number(rest);
		c.stream = stream(rest);
		cudaLaunchKernelExC(&c, f, NULL);
	} else if (!strcmp(call, "graphlaunch")) {
		i = number(rest);
		cudaGraphLaunch(executables[i], stream(rest));
	} else if (!strcmp(call, "sync")) {
		cudaDeviceSynchronize();
	} else if (!strcmp(call, "reset")) {
		cudaDeviceReset();
	} else if (!strcmp(call, "ssync")) {
		cudaStreamSynchronize(stream(rest));
	} else if (!strcmp(call, "ssyncptsz")) {
		cudaStreamSynchronize_ptsz(stream(rest));
	} else if (!strcmp(call, "squery")) {
		cudaStreamQuery(stream(rest));
	} else if (!strcmp(call, "screate")) {
		i = number(rest);
		cudaStreamCreateWithFlags(&streams[i], number(rest));
	} else if (!strcmp(call, "sdestroy")) {
		cudaStreamDestroy(streams[number(rest)]);
	} else if (!strcmp(call, "ecreate")) {
		cudaEventCreateWithFlags(&events[number(rest)], 2);
	} else if (!strcmp(call, "edestroy")) {
		cudaEventDestroy(events[number(rest)]);
	} else if (!strcmp(call, "erecord")) {
		i = number(rest);
		cudaEventRecord(events[i], stream(rest));
	} else if (!strcmp(call, "erecordptsz")) {
		i = number(rest);
		cudaEventRecord_ptsz(events[i], stream(rest));
	} else if (!strcmp(call, "esync")) {
		cudaEventSynchronize(events[number(rest)]);
	} else if (!strcmp(call, "equery")) {
		cudaEventQuery(events[number(rest)]);
	} else if (!strcmp(call, "swait")) {
		void *s = stream(rest);
		cudaStreamWaitEvent(s, events[number(rest)], 0);
	} else if (!strcmp(call, "begincapture")) {
		cudaStreamBeginCapture(stream(rest), 0);
	} else if (!strcmp(call, "endcapture")) {
		void *s = stream(rest);
		i = number(rest);
		cudaStreamEndCapture(s, &graphs[i]);
		cudaGraphInstantiate(&executables[i], graphs[i], 0);
	} else if (!strcmp(call, "setdevice")) {
		cudaSetDevice(number(rest));
	} else if (!strcmp(call, "malloc")) {
		i = number(rest);
		cudaMalloc(&memory[i], number(rest));
	} else if (!strcmp(call, "mallocasync")) {
		i = number(rest);
		n = number(rest);
		cudaMallocAsync(&memory[i], n, stream(rest));
	} else if (!strcmp(call, "managed")) {
		i = number(rest);
		cudaMallocManaged(&memory[i], number(rest), 1);
	} else if (!strcmp(call, "mallochost")) {
		i = number(rest);
		cudaMallocHost(&memory[i], number(rest));
	} else if (!strcmp(call, "pitch")) {
		i = number(rest);
		w = number(rest);
		cudaMallocPitch(&memory[i], &unused, w, number(rest));
	} else if (!strcmp(call, "malloc3d")) {
		struct pitched out = { 0 };
		struct extent size;
		i = number(rest);
		size.width = number(rest);
		size.height = number(rest);
		size.depth = number(rest);
		cudaMalloc3D(&out, size);
		memory[i] = (void *)out.ptr;
	} else if (!strcmp(call, "hostregister")) {
		i = number(rest);
		memory[i] = (void *)(0x7b0000000000ull + (i << 20));
		cudaHostRegister(memory[i], number(rest), 0);
	} else if (!strcmp(call, "free")) {
		cudaFree(memory[number(rest)]);
	} else if (!strcmp(call, "freeasync")) {
		i = number(rest);
		cudaFreeAsync(memory[i], stream(rest));
	} else if (!strcmp(call, "freehost")) {
		cudaFreeHost(memory[number(rest)]);
	} else if (!strcmp(call, "hostunregister")) {
		cudaHostUnregister(memory[number(rest)]);
	} else if (!strcmp(call, "memcpy")) {
		n = number(rest);
		cudaMemcpy(NULL, NULL, n, number(rest));
	} else if (!strcmp(call, "memcpyasync")) {
		n = number(rest);
		i = number(rest);
		cudaMemcpyAsync(NULL, NULL, n, i, stream(rest));
	} else if (!strcmp(call, "memcpy2d")) {
		w = number(rest);
		h = number(rest);
		cudaMemcpy2D(NULL, w, NULL, w, w, h, number(rest));
	} else if (!strcmp(call, "memcpy2dasync")) {
		w = number(rest);
		h = number(rest);
		i = number(rest);
		cudaMemcpy2DAsync(NULL, w, NULL, w, w, h, i, stream(rest));
	} else if (!strcmp(call, "memcpy3d")) {
		struct parameters p = { { 0 } };
		p.extent.width = number(rest);
		p.extent.height = number(rest);
		p.extent.depth = number(rest);
		p.kind = number(rest);
		cudaMemcpy3D(&p);
	} else if (!strcmp(call, "batch")) {
		void *s = stream(rest);
		size_t sizes[100], count = number(rest), size = number(rest);
		for (i = 0; i < count; i++)
			sizes[i] = size + i;
		cudaMemcpyBatchAsync(NULL, NULL, sizes, count, NULL, NULL, 0, s);
	} else if (!strcmp(call, "memset")) {
		cudaMemset(NULL, 0, number(rest));
	} else if (!strcmp(call, "memsetasync")) {
		n = number(rest);
		cudaMemsetAsync(NULL, 0, n, stream(rest));
	} else if (!strcmp(call, "memset3d")) {
		struct pitched p = { 1, 2, 3, 4 };
		struct extent size;
		size.width = number(rest);
		size.height = number(rest);
		size.depth = number(rest);
		cudaMemset3D(p, 0, size);
	} else if (!strcmp(call, "setenv")) {
		char *name = word(rest);
		setenv(name, word(rest), 1);
	} else if (!strcmp(call, "unsetenv")) {
		unsetenv(word(rest));
	} else if (!strcmp(call, "putenv")) {
		putenv(strdup(word(rest)));
	} else if (!strcmp(call, "usleep")) {
		usleep(number(rest));
	} else if (!strcmp(call, "pause")) {
		char line[8];
		puts("paused");
		fflush(stdout);
		if (!fgets(line, sizeof line, stdin))
			exit(4);
	} else {
		other_library(call, rest);
	}
}

static struct worker { pthread_t thread; int started, waiting; char *line; pthread_mutex_t lock; pthread_cond_t changed; } workers[8];

static void *work(void *argument)
{
	struct worker *worker = argument;

	pthread_mutex_lock(&worker->lock);
	for (;;) {
		char *rest;

		while (!worker->line)
			pthread_cond_wait(&worker->changed, &worker->lock);
		strtok_r(worker->line, " \n", &rest);
		run(word(&rest), &rest);
		worker->line = NULL;
		pthread_cond_broadcast(&worker->changed);
	}
	return NULL;
}

static void run_by(int index, char *line)
{
	struct worker *worker = &workers[index];
	char *rest;

	if (!index) {
		strtok_r(line, " \n", &rest);
		run(word(&rest), &rest);
		return;
	}
	if (!worker->started) {
		pthread_mutex_init(&worker->lock, NULL);
		pthread_cond_init(&worker->changed, NULL);
		worker->started = 1;
		if (pthread_create(&worker->thread, NULL, work, worker))
			abort();
	}
	pthread_mutex_lock(&worker->lock);
	worker->line = line;
	pthread_cond_broadcast(&worker->changed);
	while (worker->line)
		pthread_cond_wait(&worker->changed, &worker->lock);
	pthread_mutex_unlock(&worker->lock);
}

int main(int count, char **arguments)
{
	FILE *script = fopen(arguments[1], "re");
	char line[512];
	int depth = 0;

	if (!script)
		return 2;
#ifndef USE_DLOPEN
	load();
#endif
	while (fgets(line, sizeof line, script)) {
		if (line[0] == 'f') { /* fork: the child goes on here, the parent at join */
			pid_t child;

			fflush(stdout);
			child = fork();
			if (child) {
				int status;

				waitpid(child, &status, 0);
				while (fgets(line, sizeof line, script) && line[0] != 'j')
					;
			} else {
				depth++;
			}
		} else if (line[0] == 'j') {
			if (depth)
				_exit(7);
		} else if (line[0] == 'e') { /* exec: this program again, with another script */
			char *rest, *path = strtok_r(line + 5, " \n", &rest);

			execl("/proc/self/exe", arguments[0], path, NULL);
			return 5;
		} else if (line[0] >= '0' && line[0] <= '7') {
			run_by(line[0] - '0', line);
		}
	}
	return 0;
}
