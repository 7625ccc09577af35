/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * How long storage takes to answer, by process, device and direction. Requests that the kernel makes on its own account
 * (write-back of the page cache) count to the kernel thread that makes them. CO-RE only.
 *
 * A request begins where it is accounted for (block_io_start, in the process that asks) and includes its wait in the queue of
 * the I/O scheduler; where the kernel has no such event (before 6.5) it begins when the device gets it.
 */
#include "kernel.h"

struct gendisk {
	int major;
	int first_minor;
	char disk_name[32];
} GF_KERNEL_TYPE;

struct request_queue {
	struct gendisk *disk;
} GF_KERNEL_TYPE;

struct request {
	struct request_queue *q;
	unsigned int cmd_flags;
	unsigned int __data_len;
} GF_KERNEL_TYPE;

struct io_key {
	__u32 pid; /* 0: not visible in gpuflight's pid namespace */
	__u32 operation;
	char disk[32];
};

struct io_row {
	__u64 process_start_ns;
	__u64 bytes;
	struct gf_histogram us;
};

struct pending {
	__u64 started_ns;
	__u64 process_start_ns;
	__u32 pid;
	__u32 bytes;
};

enum { LOST_REQUESTS = 0, LOST_ROWS = 1 };
enum { REQ_OP_READ = 0, REQ_OP_WRITE = 1, REQ_OP_FLUSH = 2, REQ_OP_DISCARD = 3, REQ_OP_MASK = 0xff };
enum { READ = 0, WRITE = 1, FLUSH = 2, OTHER = 3 };

GF_HASH(requests, __u64, struct pending, 16384);
GF_HASH(io, struct io_key, struct io_row, 8192);
GF_PERCPU_ARRAY(new_io, struct io_row, 1);

gf_inline int begin(struct request *request)
{
	struct task_struct *task = bpf_get_current_task_btf();
	__u64 key = (__u64)request;
	struct pending pending = {};

	pending.started_ns = bpf_ktime_get_ns();
	pending.pid = gf_tgid(task);
	pending.process_start_ns = gf_process_start(task);
	pending.bytes = request->__data_len;
	if (gf_update(requests, &key, &pending))
		gf_loss(LOST_REQUESTS);
	return 0;
}

gf_inline int end(struct request *request)
{
	__u64 key = (__u64)request;
	struct pending *pending = gf_lookup(requests, &key);
	struct io_key io_key = {};
	struct io_row *row;
	__u32 operation, zero = 0;

	if (!pending)
		return 0; /* begun before we came */
	operation = request->cmd_flags & REQ_OP_MASK;
	io_key.pid = pending->pid;
	io_key.operation = operation <= REQ_OP_FLUSH ? operation : OTHER;
	bpf_probe_read_kernel_str(io_key.disk, sizeof(io_key.disk),
				  __builtin_preserve_access_index(&request->q->disk->disk_name));
	row = gf_lookup(io, &io_key);
	if (!row || row->process_start_ns != pending->process_start_ns) {
		struct io_row *new = gf_lookup(new_io, &zero);

		if (new) {
			new->process_start_ns = pending->process_start_ns; /* the rest of it is 0 and stays so */
			gf_renew(io, &io_key, new, row);
		}
		row = gf_lookup(io, &io_key);
	}
	if (row) {
		gf_add(&row->bytes, pending->bytes);
		gf_observe(&row->us, bpf_ktime_get_ns() - pending->started_ns);
	} else {
		gf_loss(LOST_ROWS);
	}
	gf_delete(requests, &key);
	return 0;
}

GF_TP_BTF(on_io_start, block_io_start)
{
	return begin((struct request *)ctx[0]);
}

/* Until the device gets it a request grows: neighbours are merged into it. */
GF_TP_BTF(on_io_sent, block_rq_issue)
{
	struct request *request = (struct request *)ctx[0];
	__u64 key = (__u64)request;
	struct pending *pending = gf_lookup(requests, &key);

	if (pending)
		pending->bytes = request->__data_len;
	return 0;
}

GF_TP_BTF(on_io_done, block_io_done)
{
	return end((struct request *)ctx[0]);
}

GF_TP_BTF(on_issue, block_rq_issue)
{
	return begin((struct request *)ctx[0]);
}

/* A request may be completed in parts. */
GF_TP_BTF(on_complete, block_rq_complete)
{
	struct request *request = (struct request *)ctx[0];

	if ((unsigned int)ctx[2] < request->__data_len)
		return 0;
	return end(request);
}
