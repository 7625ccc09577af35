/* libnccl.so.2 that needs no GPU: collectives launch one kernel each through the fake libcudart, as the real one does. */
#include "fake.h"

typedef struct { char internal[128]; } ncclUniqueId;
struct config { unsigned g[3], b[3]; size_t shared; void *stream, *attributes; unsigned count; };
int cudaLaunchKernelExC(const struct config *c, const void *f, void **a);

void ncclDevKernel_AllReduce_Sum_f32_RING_LL(void) {}

static int launch(void *stream)
{
	struct config c = { { 2, 1, 1 }, { 256, 1, 1 }, 0, stream, NULL, 0 };
	return cudaLaunchKernelExC(&c, ncclDevKernel_AllReduce_Sum_f32_RING_LL, NULL);
}
#define LOG(name, count, type, op, comm) done(begin, name, 0, " %llu %d %d %llu", LL(count), type, op, LL(comm))

int ncclAllReduce(const void *s, void *r, size_t n, int type, int op, void *comm, void *st)
{
	BEGIN;
	if (n == 13) /* our bad luck */
		return done(begin, "ncclAllReduce", 5, " %llu %d %d %llu", LL(n), type, op, LL(comm));
	launch(st);
	return LOG("ncclAllReduce", n, type, op, comm);
}
int ncclReduce(const void *s, void *r, size_t n, int type, int op, int root, void *comm, void *st)
{
	BEGIN;
	launch(st);
	return LOG("ncclReduce", n, type, op, comm);
}
int ncclBroadcast(const void *s, void *r, size_t n, int type, int root, void *comm, void *st)
{
	BEGIN;
	launch(st);
	return LOG("ncclBroadcast", n, type, -1, comm);
}
int ncclBcast(void *b, size_t n, int type, int root, void *comm, void *st) { return ncclBroadcast(b, b, n, type, root, comm, st) + 0; }
int ncclAllGather(const void *s, void *r, size_t n, int type, void *comm, void *st)
{
	BEGIN;
	launch(st);
	return LOG("ncclAllGather", n, type, -1, comm);
}
int ncclReduceScatter(const void *s, void *r, size_t n, int type, int op, void *comm, void *st)
{
	BEGIN;
	launch(st);
	return LOG("ncclReduceScatter", n, type, op, comm);
}
int ncclSend(const void *s, size_t n, int type, int peer, void *comm, void *st) { BEGIN; return LOG("ncclSend", n, type, -1, comm); }
int ncclRecv(void *r, size_t n, int type, int peer, void *comm, void *st) { BEGIN; return LOG("ncclRecv", n, type, -1, comm); }
int ncclCommInitRank(void **comm, int ranks, ncclUniqueId id, int rank) { *comm = (void *)(0x7c0000000000ull + 64 * rank); return 0; }
int ncclCommInitAll(void **comms, int count, const int *devices)
{
	for (int i = 0; i < count; i++)
		comms[i] = (void *)(0x7c1000000000ull + 64 * i);
	return 0;
}
int ncclCommDestroy(void *comm) { return 0; }
int ncclGroupEnd(void) { return 0; }
