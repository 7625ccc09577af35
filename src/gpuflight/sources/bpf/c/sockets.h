/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * Sockets by cookie: addresses, who opened them, their times and, of a TCP connection that ended, its totals.
 */
#ifndef GF_SOCKETS_H
#define GF_SOCKETS_H

#include "files.h"

enum { AF_UNIX = 1, AF_INET = 2, AF_INET6 = 10 };
enum { IPPROTO_TCP = 6, IPPROTO_UDP = 17, IPPROTO_UDPLITE = 136 };
enum { TCP_ESTABLISHED = 1, TCP_SYN_SENT = 2, TCP_SYN_RECV = 3, TCP_CLOSE = 7, TCP_LISTEN = 10 };
enum { MSG_PEEK = 2 };

static __u64 (*bpf_get_socket_cookie)(void *sk) = (void *)46;

struct in6_addr {
	union {
		__u8 u6_addr8[16];
	} in6_u;
} GF_KERNEL_TYPE;

struct net {
	struct ns_common ns;
} GF_KERNEL_TYPE;

typedef struct {
	struct net *net;
} possible_net_t;

typedef struct {
	__s64 counter;
} atomic64_t;

struct sock_common {
	__be32 skc_daddr;
	__be32 skc_rcv_saddr;
	__be16 skc_dport;
	__u16 skc_num;
	unsigned short skc_family;
	volatile unsigned char skc_state;
	possible_net_t skc_net;
	unsigned long skc_flags;
	struct in6_addr skc_v6_daddr;
	struct in6_addr skc_v6_rcv_saddr;
	atomic64_t skc_cookie;
} GF_KERNEL_TYPE;

struct socket;

struct sock {
	struct sock_common __sk_common;
	__u16 sk_type;
	__u16 sk_protocol;
	struct socket *sk_socket;
} GF_KERNEL_TYPE;

struct socket {
	struct file *file;
	struct sock *sk;
} GF_KERNEL_TYPE;

struct unix_sock {
	struct sock *peer;
} GF_KERNEL_TYPE;

struct tcp_sock {
	__u64 bytes_received;
	__u64 bytes_sent;
	__u64 bytes_retrans;
	__u32 total_retrans;
	__u32 segs_out;
	__u32 segs_in;
	__u32 srtt_us;
} GF_KERNEL_TYPE;

enum { ROLE_UNKNOWN = 0, ROLE_CLIENT = 1, ROLE_SERVER = 2 };

struct socket_row {
	__u64 opened_ns; /* CLOCK_MONOTONIC: SYN sent, or first seen */
	__u64 established_ns; /* 0: not seen */
	__u64 accepted_ns; /* 0: not seen */
	__u64 ended_ns; /* 0: it lives */
	__u64 sent_bytes; /* of an ended TCP connection: payload, each byte once */
	__u64 received_bytes;
	__u64 inode;
	__u64 peer_inode; /* of a unix socket */
	__u64 process_start_ns; /* of the process that opened it; of a client only */
	__u32 pid;
	__u32 netns;
	__u32 retransmits;
	__u32 segments_sent;
	__u32 segments_received;
	__u32 rtt_us;
	__u8 local[16]; /* IPv4: the first 4 bytes */
	__u8 remote[16];
	__u16 local_port;
	__u16 remote_port;
	__u16 family;
	__u8 protocol;
	__u8 role;
};

GF_HASH(sockets, __u64, struct socket_row, 16384);

enum { WAIT_CONNECT = 0, WAIT_ACCEPT = 1 };

struct wait_key {
	__u32 pid;
	__u32 kind;
};

struct wait_row {
	__u64 process_start_ns;
	struct gf_histogram us;
};

GF_HASH(waits, struct wait_key, struct wait_row, 4096);

GF_PERCPU_ARRAY(new_wait, struct wait_row, 1); /* too large for the stack */

gf_inline bool is_wanted(struct sock *sk)
{
	__u16 family = sk->__sk_common.skc_family;
	__u16 protocol;

	if (family == AF_UNIX)
		return true;
	if (family != AF_INET && family != AF_INET6)
		return false;
	protocol = sk->sk_protocol;
	return protocol == IPPROTO_TCP || protocol == IPPROTO_UDP || protocol == IPPROTO_UDPLITE;
}

gf_inline __u64 inode_of(struct sock *sk)
{
	struct socket *socket = gf_read(sk->sk_socket);
	struct file *file = gf_read(socket->file);
	struct inode *inode = gf_read(file->f_inode);

	return gf_read(inode->i_ino);
}

gf_inline void copy_addresses(struct socket_row *row, struct sock *sk)
{
	if (row->family == AF_INET) {
		*(__u32 *)row->local = sk->__sk_common.skc_rcv_saddr;
		*(__u32 *)row->remote = sk->__sk_common.skc_daddr;
	} else if (gf_field_exists(sk->__sk_common.skc_v6_daddr)) { /* a kernel without IPv6 has none of it */
		bpf_probe_read_kernel(row->local, 16, __builtin_preserve_access_index(&sk->__sk_common.skc_v6_rcv_saddr));
		bpf_probe_read_kernel(row->remote, 16, __builtin_preserve_access_index(&sk->__sk_common.skc_v6_daddr));
	}
	row->local_port = sk->__sk_common.skc_num;
	row->remote_port = __builtin_bswap16(sk->__sk_common.skc_dport);
}

/* The kernel counts a FIN that arrived as one byte received; it marks the socket then. */
enum { SOCK_DONE = 1 };

gf_inline void copy_totals(struct socket_row *row, struct sock *sk)
{
	struct tcp_sock *tcp = (struct tcp_sock *)sk;

	row->sent_bytes = gf_read(tcp->bytes_sent) - gf_read(tcp->bytes_retrans);
	row->received_bytes = gf_read(tcp->bytes_received);
	if (row->received_bytes && sk->__sk_common.skc_flags >> SOCK_DONE & 1)
		row->received_bytes -= 1;
	row->retransmits = gf_read(tcp->total_retrans);
	row->segments_sent = gf_read(tcp->segs_out);
	row->segments_received = gf_read(tcp->segs_in);
	row->rtt_us = gf_read(tcp->srtt_us) >> 3; /* kept in eighths */
}

/* Nonzero if there was no room. */
gf_inline long remember(struct sock *sk, __u64 cookie, __u8 role)
{
	struct socket_row row = {};
	struct sock *peer;

	row.opened_ns = bpf_ktime_get_ns();
	row.family = sk->__sk_common.skc_family;
	row.protocol = sk->sk_protocol;
	row.role = role;
	row.netns = sk->__sk_common.skc_net.net->ns.inum;
	row.inode = inode_of(sk);
	if (row.family == AF_UNIX) {
		peer = gf_read(((struct unix_sock *)sk)->peer);
		row.peer_inode = peer ? inode_of(peer) : 0;
	} else {
		copy_addresses(&row, sk);
	}
	if (role == ROLE_CLIENT) { /* connect(2): in the process that wants it */
		struct task_struct *task = bpf_get_current_task_btf();

		row.pid = gf_tgid(task);
		row.process_start_ns = gf_process_start(task);
	} else if (role == ROLE_SERVER) {
		row.established_ns = row.opened_ns;
	}
	return gf_update(sockets, &cookie, &row);
}

/* False if there was no room. */
gf_inline bool observe_wait(const struct wait_key *key, __u64 process_start_ns, __u64 ns)
{
	struct wait_row *row = gf_lookup(waits, key);
	__u32 zero = 0;

	if (!row || row->process_start_ns != process_start_ns) { /* the pid is another process's by now */
		struct wait_row *new = gf_lookup(new_wait, &zero);

		if (!new)
			return false;
		__builtin_memset(new, 0, sizeof(*new));
		new->process_start_ns = process_start_ns;
		gf_renew(waits, key, new, row);
		row = gf_lookup(waits, key);
		if (!row)
			return false;
	}
	gf_observe(&row->us, ns);
	return true;
}

#endif
