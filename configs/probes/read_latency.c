/* How often each process calls read(), what it gets, and how long it waits for it.
 *
 * gf.h is gpuflight's: maps, probes and registers in words that bcc and clang both understand (docs/user-probes.md).
 */
#include "gf.h"

struct call {
	__u64 began_ns;
};

struct reads {
	__u64 calls;
	__u64 errors;
	__u64 bytes;
	__u64 time_ns;
	__u64 slots[32]; /* slot n: calls that took 2^n to 2^(n+1) ns, the last one all that took longer */
};

GF_HASH(began, __u64, struct call, 10240);     /* by thread */
GF_HASH(reads, __u32, struct reads, 4096);     /* by process */

gf_inline __u32 log2_of(__u64 value)
{
	__u32 slot = 0;

	for (int step = 16; step; step >>= 1) {
		if (value >> step) {
			value >>= step;
			slot += step;
		}
	}
	return slot;
}

GF_UPROBE(on_read)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct call call = {.began_ns = bpf_ktime_get_ns()};

	if (gf_update(began, &thread, &call))
		gf_loss(0);
	return 0;
}

GF_URETPROBE(on_read_end)
{
	__u64 thread = bpf_get_current_pid_tgid();
	__u32 pid = thread >> 32;
	struct call *call = gf_lookup(began, &thread);
	struct reads *sums;
	__s64 result = GF_RET(ctx);
	__u64 took_ns;
	__u32 slot;

	if (!call)
		return 0; /* it began before the probe did */
	took_ns = bpf_ktime_get_ns() - call->began_ns;
	gf_delete(began, &thread);
	sums = gf_lookup(reads, &pid);
	if (!sums) {
		struct reads none = {};
		gf_insert(reads, &pid, &none);
		sums = gf_lookup(reads, &pid);
		if (!sums) {
			gf_loss(1);
			return 0;
		}
	}
	gf_add(&sums->calls, 1);
	gf_add(&sums->time_ns, took_ns);
	if (result < 0)
		gf_add(&sums->errors, 1);
	else
		gf_add(&sums->bytes, result);
	slot = log2_of(took_ns);
	if (slot > 31)
		slot = 31;
	gf_add(&sums->slots[slot], 1);
	return 0;
}
