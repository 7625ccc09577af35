/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * The peer of bench_cuda_probe.py: what other probes do, one event of 64 bytes per launch for a reader to add up.
 */
#include "gf.h"

struct launch_event {
	__u64 time_ns, function, stream;
	__u32 tgid, tid, grid[3], block[3], shared, pad;
};

GF_RINGBUF(ring, 33554432); /* room for a whole run: what is lost costs nobody anything */

GF_UPROBE(on_launch)
{
	struct launch_event event = {};
	__u64 id = bpf_get_current_pid_tgid();

	event.time_ns = bpf_ktime_get_ns();
	event.function = GF_ARG1(ctx);
	event.stream = GF_ARG8(ctx);
	event.tgid = id >> 32;
	event.tid = id;
	event.grid[0] = GF_ARG2(ctx);
	event.grid[1] = GF_ARG2(ctx) >> 32;
	event.grid[2] = GF_ARG3(ctx);
	event.block[0] = GF_ARG4(ctx);
	event.block[1] = GF_ARG4(ctx) >> 32;
	event.block[2] = GF_ARG5(ctx);
	event.shared = GF_ARG7(ctx);
	gf_ring_output(ring, &event, sizeof(event));
	return 0;
}
