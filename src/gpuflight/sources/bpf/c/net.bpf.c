/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * Who moves how much through which socket: bytes and calls per (thread, socket), internet and unix; the life of each TCP
 * connection, however short, with the totals that the kernel has at its end; how long connects take. CO-RE only.
 *
 * Sockets are known by their cookie, as netlink knows them. Only calls of this very thread touch its row of `traffic`, so
 * that needs no atomic additions. Rows stay until the reader deletes them.
 */
#include "sockets.h"

struct traffic_key {
	__u64 cookie;
	__u64 pid_tgid; /* as the first pid namespace numbers them */
};

struct traffic {
	__u64 sent_bytes;
	__u64 sends;
	__u64 received_bytes;
	__u64 receives;
	__u64 failures;
	__u64 process_start_ns;
	__u64 thread_start_ns;
	__u32 pid; /* in gpuflight's pid namespace, 0: not visible there */
	__u32 tid;
};

enum { LOST_TRAFFIC = 0, LOST_SOCKETS = 1, LOST_WAITS = 2 };

GF_HASH(traffic, struct traffic_key, struct traffic, 32768);

gf_inline struct traffic *first_call(struct sock *sk, const struct traffic_key *key)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct traffic new = {};

	new.process_start_ns = gf_process_start(task);
	new.thread_start_ns = task->start_boottime;
	new.pid = gf_tgid(task);
	new.tid = gf_tid(task);
	if (gf_insert(traffic, key, &new)) {
		gf_loss(LOST_TRAFFIC);
		return NULL;
	}
	if (!gf_lookup(sockets, &key->cookie) && remember(sk, key->cookie, ROLE_UNKNOWN))
		gf_loss(LOST_SOCKETS);
	return gf_lookup(traffic, key);
}

gf_inline struct traffic *row_of(struct sock *sk)
{
	struct traffic_key key;
	struct traffic *row;

	if (!is_wanted(sk))
		return NULL;
	key.cookie = bpf_get_socket_cookie(sk);
	key.pid_tgid = bpf_get_current_pid_tgid();
	row = gf_lookup(traffic, &key);
	return row ? row : first_call(sk, &key);
}

GF_TP_BTF(on_send, sock_send_length)
{
	struct traffic *row = row_of((struct sock *)ctx[0]);
	int bytes = (int)ctx[1];

	if (!row)
		return 0;
	if (bytes >= 0) {
		row->sends += 1;
		row->sent_bytes += bytes;
	} else {
		row->failures += 1;
	}
	return 0;
}

GF_TP_BTF(on_receive, sock_recv_length)
{
	struct traffic *row;
	int bytes = (int)ctx[1];

	if (ctx[2] & MSG_PEEK) /* what was only looked at is received later */
		return 0;
	row = row_of((struct sock *)ctx[0]);
	if (!row)
		return 0;
	if (bytes >= 0) {
		row->receives += 1;
		row->received_bytes += bytes;
	} else {
		row->failures += 1;
	}
	return 0;
}

gf_inline void observe_connect(struct socket_row *row)
{
	struct wait_key key = { .pid = row->pid, .kind = WAIT_CONNECT };

	if (!observe_wait(&key, row->process_start_ns, row->established_ns - row->opened_ns))
		gf_loss(LOST_WAITS);
}

GF_TP_BTF(on_state, inet_sock_set_state)
{
	struct sock *sk = (struct sock *)ctx[0];
	int before = (int)ctx[1], now = (int)ctx[2];
	struct socket_row *row;
	__u64 cookie;

	if (sk->sk_protocol != IPPROTO_TCP)
		return 0;
	if (now == TCP_SYN_SENT) {
		if (remember(sk, bpf_get_socket_cookie(sk), ROLE_CLIENT))
			gf_loss(LOST_SOCKETS);
		return 0;
	}
	if (now == TCP_ESTABLISHED && before == TCP_SYN_RECV) {
		if (remember(sk, bpf_get_socket_cookie(sk), ROLE_SERVER))
			gf_loss(LOST_SOCKETS);
		return 0;
	}
	if (now != TCP_ESTABLISHED && now != TCP_CLOSE)
		return 0;
	cookie = bpf_get_socket_cookie(sk);
	row = gf_lookup(sockets, &cookie);
	if (now == TCP_ESTABLISHED) {
		if (!row)
			return 0;
		row->established_ns = bpf_ktime_get_ns();
		copy_addresses(row, sk); /* the local one was chosen meanwhile */
		observe_connect(row);
		return 0;
	}
	if (!row) {
		if (before == TCP_LISTEN || !sk->__sk_common.skc_dport)
			return 0;
		if (remember(sk, cookie, ROLE_UNKNOWN)) {
			gf_loss(LOST_SOCKETS);
			return 0;
		}
		row = gf_lookup(sockets, &cookie);
		if (!row)
			return 0;
	}
	if (!row->established_ns && row->role == ROLE_CLIENT)
		copy_addresses(row, sk);
	copy_totals(row, sk);
	row->ended_ns = bpf_ktime_get_ns();
	return 0;
}

/* How long a connection waited for accept(2). There is no event for it, so this sees every system call of the machine. */
GF_TP_BTF(on_accept, sys_exit)
{
	struct pt_regs *regs = (struct pt_regs *)ctx[0];
	long number = GF_SYSCALL_NUMBER(regs), fd = (long)ctx[1];
	struct task_struct *task;
	struct wait_key key = { .kind = WAIT_ACCEPT };
	struct socket_row *row;
	struct socket *socket;
	struct file *file;
	struct sock *sk;
	__u64 cookie;

	if ((number != GF_SYS_accept && number != GF_SYS_accept4) || fd < 0)
		return 0;
	task = bpf_get_current_task_btf();
	if (gf_is_compat(task))
		return 0;
	file = gf_file(task, fd);
	if (!file)
		return 0;
	socket = gf_read(file->private_data);
	sk = gf_read(socket->sk);
	cookie = gf_read(sk->__sk_common.skc_cookie.counter);
	row = gf_lookup(sockets, &cookie);
	if (!row || row->accepted_ns || row->role != ROLE_SERVER)
		return 0;
	row->accepted_ns = bpf_ktime_get_ns();
	row->inode = inode_of(sk);
	row->pid = key.pid = gf_tgid(task);
	row->process_start_ns = gf_process_start(task);
	if (!observe_wait(&key, row->process_start_ns, row->accepted_ns - row->established_ns))
		gf_loss(LOST_WAITS);
	return 0;
}

/* Yardsticks of the benchmarks: the same events, and nothing done. */
GF_TP_BTF(on_send_empty, sock_send_length)
{
	return 0;
}

GF_TP_BTF(on_receive_empty, sock_recv_length)
{
	return 0;
}
