"""The kinds of entity, one class each: what identifies it, which attributes and metrics it carries.

Identity fields are required keyword arguments; everything else goes into ``attributes`` (rarely changing facts) and
``metrics`` (numbers with their unit in the name). The lists below name what the collectors of this package fill; an
entity may carry less (see ``unknown``) or more (plugins).
"""

from __future__ import annotations

from gpuflight.graph.element import Entity


class Host(Entity, tag="Host", gc=False, kw_only=True):
    """A machine. attributes: name, machine_id, boot_id, kernel, architecture, virtualisation.
    metrics: cpus_count, memory_total_bytes, memory_available_bytes, swap_total_bytes, swap_used_bytes, load_1min,
    cpu_busy_pct, cpu_iowait_pct, cpu_steal_pct, context_switches_per_s, processes_count, kernel_threads_count,
    cpu_pressure_some_pct, memory_pressure_full_pct, io_pressure_full_pct; counted by the kernel for the whole host
    tcp_{listen_overflows,listen_drops,connect_failures,resets,retransmits,segments_sent}_per_s,
    softnet_{drops,squeezed}_per_s, oom_kills_count, files_open_count, files_limit_count, clock_offset_ms,
    clock_max_error_ms (with the attribute clock_synchronised)."""

    hostname: str

    def _identity(self) -> str:
        return self.hostname


class Process(Entity, tag="Process", gc=False, kw_only=True):
    """A process: its pid *and* start time (clock ticks since boot), so that a reused pid is a new entity.

    attributes: name (comm), cmdline (redacted), exe, state, ppid, uid, user, cgroup, nspids, netns, cpus_allowed,
    top_cpu (rank), common_parent_of (count), seeded (asked for by pid); of ranks of a job (docs/jobs.md) also rank,
    world_size, local_rank, job, job_launcher, nccl_ras (what NCCL's RAS says of it: healthy, answers where others have
    troubles, or its own, such as "does not answer" or "is behind (AllReduce 41 of 42)"), nccl_ras_version,
    nccl_ras_communicators (its ranks in them, and what it launched), nccl_ras_troubles (of its whole job); metric
    nccl_ras_age_s.
    metrics: cpu_pct (of one core, over the round), rss_bytes, threads_count,
    fds_count (of many, 256 and more, also fds_limit_count), major_faults_per_s, minor_faults_per_s;
    of those that use CPU or a GPU also context_switches_voluntary_per_s, context_switches_involuntary_per_s,
    io_read_bytes_per_s, io_write_bytes_per_s.

    Of those whose CPU counters are read (collector perf_counters, off by default), metrics: llc_miss_pct (of the reads
    that reached the last-level cache), llc_misses_per_s, instructions_per_cycle, perf_running_pct (how much of its
    running time it had the counters; figures are scaled by it), perf_threads_count (counted by name; threads that these
    start are counted with them). attributes: perf_events (which events stand for the cache), perf_scope (user: without
    what the kernel does for it; all), perf_partial (True: some of its threads are not counted).

    Of those with CUDA (docs/cuda-probes.md), since the probe was attached, attributes: cuda_layers (runtime, driver,
    nccl), cuda_libraries, cuda_errors, cuda_allocations (largest groups, with who allocated), cuda_wait_ns_log2
    (histogram), cuda_watched_late, cuda_estimated, cuda_exit_code, nccl_operations, nccl_communicators. metrics:
    cuda_launches_count and _per_s, cuda_launches_estimated_count, cuda_launches_lost_{count,pct}, cuda_kernels_count,
    cuda_streams_count, cuda_waits_count, cuda_wait_{ms,pct,p50_us,p99_us,max_us} (calls that wait for a GPU; pct of one
    thread), cuda_copies_count, cuda_copied_<direction>_bytes, cuda_copy_<direction>_bytes_per_s, cuda_memsets_count,
    cuda_allocations_count, cuda_frees_unmatched_count, cuda_held_bytes, cuda_alloc_peak_bytes, cuda_pinned_held_bytes,
    cuda_leaked_bytes and cuda_leaks_count (of one that ended), cuda_errors_count and _per_s, cuda_watched_pct (of the
    time, if not all), nccl_calls_count and _per_s, nccl_bytes and _per_s, nccl_host_ms, nccl_errors_count,
    nccl_small_calls_count (below 1 MB), nccl_bus_bytes (what links carry for them, counted as nccl-tests do)."""

    pid: int
    start: int

    def __post_init__(self) -> None:  # the base's, written out: a host has thousands of these each round
        if not self.id:
            self.id = f"Process(pid={self.pid},start={self.start})" if not self.ns else self._render_id()

    def _identity(self) -> str:
        return f"pid={self.pid},start={self.start}"


class Thread(Entity, tag="Thread", gc=False, kw_only=True):
    """A thread of a process. attributes: name, state, processor, cpus_allowed. metrics: cpu_pct, run_delay_pct;
    of kernel probes also off_cpu_pct, context switches and faults."""

    tid: int
    start: int

    def _identity(self) -> str:
        return f"tid={self.tid},start={self.start}"


class Container(Entity, tag="Container", gc=False, kw_only=True):
    """A container by its full id. attributes: name, runtime, image, pod_uid, cgroup.
    metrics: cpu_pct (of one core), cpu_quota_cores, throttled_pct (of the enforcement periods),
    enforcement_periods_count (in the round; none pass while it wants no CPU), memory_used_bytes,
    memory_limit_bytes, oom_kills_count, pids_count, pids_limit_count; no limit metric where no limit is set. Of its
    processes' CUDA: gpu_used_cores, gpu_held_bytes (as the edges Access say)."""

    container_id: str

    def _identity(self) -> str:
        return self.container_id


class Pod(Entity, tag="Pod", gc=False, kw_only=True):
    """A Kubernetes or Podman pod by its uid. attributes: name, namespace, qos, runtime, cgroup.
    metrics: as Container."""

    uid: str

    def _identity(self) -> str:
        return self.uid


class Unit(Entity, tag="Unit", gc=False, kw_only=True):
    """A systemd unit (service, scope or slice) by its cgroup path. attributes: name, cgroup. metrics: as Container."""

    path: str

    def _identity(self) -> str:
        return self.path


class Socket(Entity, tag="Socket", gc=False, kw_only=True):
    """One end of an internet socket: protocol and local address. ``netns`` is 0 in the host's network namespace.

    attributes: state (LISTEN, ESTABLISHED …), inode, uid, remote (True for an end that is not on this host), listener
    (id of the endpoint that listens on every address, of one that it accepted connections on).
    metrics: recv_queue_bytes, send_queue_bytes, connections_count, backlog_count, backlog_max_count, drops_count."""

    protocol: str
    address: str
    netns: int = 0

    def _identity(self) -> str:
        return f"{self.protocol},{self.address}" + (f",netns={self.netns}" if self.netns else "")


class UnixSocket(Entity, tag="UnixSocket", gc=False, kw_only=True):
    """A unix-domain socket by inode. attributes: path (abstract names begin with @), type, state.
    metrics: recv_queue_bytes, send_queue_bytes."""

    inode: int

    def _identity(self) -> str:
        return f"ino={self.inode}"


class Pipe(Entity, tag="Pipe", gc=False, kw_only=True):
    """A pipe or a named fifo, by device and inode (device 0: the pipe file system). attributes: path (fifo)."""

    inode: int
    device: int = 0

    def _identity(self) -> str:
        return f"ino={self.inode}" + (f",dev={self.device}" if self.device else "")


class SharedMemory(Entity, tag="SharedMemory", gc=False, kw_only=True):
    """A shared memory segment: mechanism ``posix``, ``sysv``, ``memfd``, ``anonymous`` or ``file``, and its key (the
    shmid for sysv, else inode and device).

    attributes: name, path, sysv_key, owner_uid, creator_pid, deleted.
    metrics: size_bytes (or, while that is unknown, mapped_bytes), resident_bytes, attached_count."""

    mechanism: str
    key: str

    def _identity(self) -> str:
        return f"{self.mechanism},{self.key}"


class MessageQueue(Entity, tag="MessageQueue", gc=False, kw_only=True):
    """A message queue: mechanism ``posix`` or ``sysv``, and its key.
    metrics: queued_bytes, messages_count, waiting_count, limit_bytes (System V: kernel.msgmnb, unless its maker chose
    otherwise)."""

    mechanism: str
    key: str

    def _identity(self) -> str:
        return f"{self.mechanism},{self.key}"


class Semaphore(Entity, tag="Semaphore", gc=False, kw_only=True):
    """A semaphore (set): mechanism ``posix`` or ``sysv``, and its key. attributes: name, deleted, sysv_key, owner_uid.
    metrics: semaphores_count, value_count, waiting_count (threads or processes blocked on it)."""

    mechanism: str
    key: str

    def _identity(self) -> str:
        return f"{self.mechanism},{self.key}"


class CpuPackage(Entity, tag="CpuPackage", gc=False, kw_only=True):
    """A CPU socket. attributes: name (model), cpus. metrics: cores_count, cpus_count."""

    index: int

    def _identity(self) -> str:
        return str(self.index)


class Numa(Entity, tag="Numa", gc=False, kw_only=True):
    """A NUMA node. attributes: cpus (list format), has_cpus, has_memory.
    metrics: memory_total_bytes, memory_free_bytes, memory_used_bytes, numa_miss_per_s, numa_foreign_per_s."""

    index: int

    def _identity(self) -> str:
        return str(self.index)


class NumaSet(Entity, tag="NumaSet", gc=False, kw_only=True):
    """A set of NUMA nodes as one hyper-node; ``nodes`` in list format, e.g. ``0,2-4``."""

    nodes: str

    def _identity(self) -> str:
        return self.nodes


class GPU(Entity, tag="GPU", gc=False, kw_only=True):
    """A GPU by UUID. attributes: name, index, minor, pci_address, serial, driver, cuda_driver, compute_capability,
    state (``ok`` | ``lost`` | ``unreachable``) with state_reason, mig_mode, persistence, compute_mode, ecc_mode,
    clock_event_reasons, fabric_state, numa_node (or numa_nodes), cpus (local CPUs), nvlink_version, nvlinks_down,
    foreign_pidns, stale_reason, on_pci_bus, events (of this round), last_xid and last_xid_time …

    metrics: sm_util_pct, memory_util_pct, by GPM (Hopper and later, means over the round) sm_active_pct,
    sm_occupancy_pct, tensor_active_pct, dram_active_pct; memory_total_bytes, memory_used_bytes, memory_reserved_bytes,
    memory_unattributed_bytes (in use by no process that NVML lists), memory_unmatched_bytes (of processes that NVML
    lists but /proc does not show), processes_count, sm_clock_hz, memory_clock_hz, sm_clock_max_hz, power_watts,
    power_limit_watts, temperature_celsius, pcie_gen, pcie_gen_max, pcie_width, pcie_width_max, pcie_rx_bytes_per_s,
    pcie_tx_bytes_per_s, pcie_replays_count, ecc_{corrected,uncorrected}_{volatile,aggregate}_count,
    rows_remapped_{corrected,uncorrected}_count, row_remap_pending, row_remap_failed, throttled_{power,thermal}_pct,
    nvlink_count, nvlink_active_count, nvlink_{rx,tx}_bytes_per_s, nvlink_errors_count, xid_events_count, age_s …"""

    uuid: str

    def _identity(self) -> str:
        return f"uuid={self.uuid}"


class MigInstance(Entity, tag="MigInstance", gc=False, kw_only=True):
    """A MIG device by UUID. attributes: name, profile, gpu_instance, compute_instance.
    metrics: memory_total_bytes, memory_used_bytes, by GPM sm_util_pct, sm_active_pct, sm_occupancy_pct,
    tensor_active_pct, dram_active_pct (before Hopper NVML reports no utilisation on MIG: unknown, not 0)."""

    uuid: str

    def _identity(self) -> str:
        return f"uuid={self.uuid}"


class NvSwitch(Entity, tag="NvSwitch", gc=False, kw_only=True):
    """An NVSwitch, as seen from the GPUs' links, by PCI address."""

    address: str

    def _identity(self) -> str:
        return self.address


class NPU(Entity, tag="NPU", gc=False, kw_only=True):
    """An NPU by index. attributes: name, pci_address, health, cpus.
    metrics: util_pct, memory_used_bytes, temperature_celsius …"""

    index: int

    def _identity(self) -> str:
        return str(self.index)


class PciDevice(Entity, tag="PciDevice", gc=False, kw_only=True):
    """A PCI function by address ``dddd:bb:dd.f`` (lower case). attributes: class_code, class_name, vendor_id,
    device_id, driver, numa_node, cpus, port_type.
    metrics: link_speed_gt_per_s, link_width, link_speed_max_gt_per_s, link_width_max."""

    address: str

    def _identity(self) -> str:
        return self.address


class Nic(Entity, tag="Nic", gc=False, kw_only=True):
    """A network interface. attributes: mac, operstate, driver, pci_address, numa_node, mtu, addresses.
    metrics: speed_bits_per_s, rx_bytes_per_s, tx_bytes_per_s, rx_drops_per_s, tx_drops_per_s, rx_errors_per_s …"""

    name: str
    netns: int = 0

    def _identity(self) -> str:
        return self.name + (f",netns={self.netns}" if self.netns else "")

    @property
    def label(self) -> str:
        return self.name


class Disk(Entity, tag="Disk", gc=False, kw_only=True):
    """A block device. attributes: model, rotational, pci_address, numa_node, parent.
    metrics: size_bytes, read_bytes_per_s, write_bytes_per_s, io_time_pct, in_flight_count."""

    name: str

    def _identity(self) -> str:
        return self.name

    @property
    def label(self) -> str:
        return self.name


class Mount(Entity, tag="Mount", gc=False, kw_only=True):
    """A mounted file system by mount point. attributes: source, fstype, options (secrets redacted), server (NFS).
    metrics: size_bytes, used_bytes, free_bytes, used_pct, inodes_used_pct; NFS: rtt_ms, retransmits_per_s …"""

    path: str

    def _identity(self) -> str:
        return self.path


class RdmaDevice(Entity, tag="RdmaDevice", gc=False, kw_only=True):
    """An RDMA device. attributes: node_type, firmware, node_guid, pci_address, numa_node, netdevs."""

    name: str

    def _identity(self) -> str:
        return self.name

    @property
    def label(self) -> str:
        return self.name


class RdmaPort(Entity, tag="RdmaPort", gc=False, kw_only=True):
    """A port of an RDMA device. attributes: state, physical_state, link_layer, lid. metrics: speed_bits_per_s, every
    counter as ``<name>_count`` and its rate as ``<name>_per_s``."""

    device: str
    port: int

    def _identity(self) -> str:
        return f"{self.device}/{self.port}"


class RdmaQueuePair(Entity, tag="RdmaQueuePair", gc=False, kw_only=True):
    """A local RDMA queue pair. attributes: type, state, pid, remote_qpn, path_mig_state."""

    device: str
    qpn: int

    def _identity(self) -> str:
        return f"{self.device},qpn={self.qpn}"


class RdmaQueuePairEndpoint(Entity, tag="RdmaQueuePairEndpoint", gc=False, kw_only=True):
    """The far end of a connected queue pair: its address (GID or LID) and number."""

    address: str
    qpn: int

    def _identity(self) -> str:
        return f"{self.address},qpn={self.qpn}"


class RdmaProtectionDomain(Entity, tag="RdmaProtectionDomain", gc=False, kw_only=True):
    """A protection domain of an RDMA device."""

    device: str
    pdn: int

    def _identity(self) -> str:
        return f"{self.device},pdn={self.pdn}"


class RdmaMemoryRegion(Entity, tag="RdmaMemoryRegion", gc=False, kw_only=True):
    """A registered memory region. metrics: length_bytes."""

    device: str
    mrn: int

    def _identity(self) -> str:
        return f"{self.device},mrn={self.mrn}"


class Device(Entity, tag="Device", gc=False, kw_only=True):
    """Any other device, by name."""

    name: str

    def _identity(self) -> str:
        return self.name

    @property
    def label(self) -> str:
        return self.name


class Session(Entity, tag="Session", gc=False, kw_only=True):
    """A recorded GPU session (GPU Flight log) by its id.

    attributes: name (app), state (``live``, ``ended: shutdown`` | ``launcher`` | ``process gone`` | ``writer gone`` |
    ``silent``), app, hostname and pid as the program sees them, session_kind, engine, run_id, segment, folder, gpus
    (UUIDs), started, ended, last_event, kernel_times (of the GPU, or synthetic), partial, recorder (what our recorder
    says it does: recording, waiting, waiting for CUDA, paused, off), recorder_why (why it records nothing), step_scope
    (name of its steps), top_kernel, stall_top (what most stalled instructions wait for), communication_unclassified
    (kernels of NCCL whose names fit no known scheme), collective_marks (``number:operation:begin:end`` of some of the
    last collectives, UNIX ns of its host), and those of the rank that its process is.

    metrics: recorder_lost_count (records that it lost), events_count, losses_count, lag_bytes (written and not read
    yet), duration_s, launches_count, launches_per_s, kernels_count, kernels_unnamed_count, gpu_time_ms (of all
    kernels), busy_pct (some kernel ran),
    other_{kernels,launches}_count and other_gpu_time_ms (of kernels that are no entities), copies_count,
    copied_<direction>_bytes and copy_<direction>_bytes_per_s (htod, dtoh, dtod, ptop, other), memsets_count,
    graph_launches_count, syncs_count, sync_wait_ms, sync_wait_pct (of one thread), allocations_count,
    frees_unmatched_count, held_bytes, alloc_peak_bytes, pinned_held_bytes, pinned_peak_bytes, scopes_count.

    For rules, sums since its beginning (docs/rules): gpu_timeline_ms (from the first to the last work on each GPU,
    over all gpus_worked_count that its kernels name), gpu_active_ms (kernels, copies or fills ran), kernels_active_ms,
    gpu_gaps_{count,long_count,long_ms} (long: over 500 ms), gpu_gap_max_ms, gpu_gaps_known_ms (those that
    ended with work whose call is known), host_wait_ms (of them,
    where it was called only after the work before had ended), idle_launches_count and delayed_launches_count (kernels
    called while the GPU was idle, and those that began more than 100 us after the call), launch_calls_count,
    slow_launch_calls_{count,ms} (over 50 us), short_launches_count (kernels below 10 us), graph_kernels_count,
    invalid_records_count, copy_time_ms, memset_time_ms, allocation_time_ms, htod_copies_count, htod_small_copies_count
    (below 64 KiB), pageable_copies_{count,ms}, pageable_copied_bytes, pageable_big_copies_count (over 1 MiB),
    copy_calls_count, blocking_copies_{count,ms} (copies and fills whose call came back when they were over),
    host_syncs_count and host_sync_wait_ms (waits of the host only), steps_count, steps_ms, step_p50_ms, step_max_ms,
    steps_judged_count and step_outliers_count (of the latest 4096), first_step_s and first_work_s (since its
    beginning), loader_ms, gc_pauses_{count,ms}, gc_long_pauses_count, gc_pause_max_ms, top_kernel_pct,
    stall_samples_count, stall_top_pct, thread_efficiency_pct with instructions_count, means of hardware counters
    sm_active_pct, dram_active_pct, tensor_active_pct; communication_{kernels_count,ms}, communication_active_ms (a
    kernel of NCCL ran), communication_overlapped_ms (another kernel, too), communication_unclassified_pct,
    communication_own_streams_count, sync_batch_norms_count. ``gpuflight doctor --from FOLDER`` adds
    ``events.facts``."""

    session_id: str

    def _identity(self) -> str:
        return self.session_id


class Application(Entity, tag="Application", gc=False, kw_only=True):
    """An application as its sessions name it."""

    name: str

    def _identity(self) -> str:
        return self.name

    @property
    def label(self) -> str:
        return self.name


class Scope(Entity, tag="Scope", gc=False, kw_only=True):
    """A named scope of a session (a step, a phase), by its place in the tree: names from outside in, joined by ``|``.

    attributes: name, depth. metrics: runs_count (ended), open_count, time_ms, mean_ms, max_ms."""

    session_id: str
    path: str

    def _identity(self) -> str:
        return f"{self.session_id},{self.path}"


class Kernel(Entity, tag="Kernel", gc=False, kw_only=True):
    """A GPU kernel as launched by one process: aggregates only, never single launches.

    attributes: synthetic (times are those of launches), grid, block (of the last launch that probes saw),
    occupancy_limiter (of most launches). metrics: session_share_pct (of the time of all kernels), registers_count,
    reg_occupancy_pct (what registers allow), thread_local_bytes, waves_count (grid over what all SMs run at once),
    launches_count (the samples of the times), launches_per_s, gpu_time_ms, gpu_time_pct (more than 100 on several
    streams), mean_us, min_us, max_us, p50_us and p99_us (within 0.8 %), occupancy_pct (theoretical) with
    occupancy_samples_count; by probes threads_mean_count, threads_max_count, block_threads_max_count, shared_max_bytes,
    captured_count (into graphs, not launched)."""

    process: str
    name: str

    def _identity(self) -> str:
        return f"{self.process},{self.name}"

    @property
    def label(self) -> str:
        return self.name


class Stream(Entity, tag="Stream", gc=False, kw_only=True):
    """A CUDA stream of a process, by the number that a recorder gives it or by its handle. attributes: name, blocking.
    metrics: launches_count, gpu_time_ms, copies_count, copied_bytes; by probes work_ms and work_pct: the time from a
    first launch until a call waited for all of its work, so at least that in which kernels ran."""

    process: str
    stream: int

    def _identity(self) -> str:
        return f"{self.process},{self.stream}"


AnyNode = (
    Host | Process | Thread | Container | Pod | Unit | Socket | UnixSocket | Pipe | SharedMemory | MessageQueue
    | Semaphore | CpuPackage | Numa | NumaSet | GPU | MigInstance | NvSwitch | NPU | PciDevice | Nic | Disk | Mount
    | RdmaDevice | RdmaPort | RdmaQueuePair | RdmaQueuePairEndpoint | RdmaProtectionDomain | RdmaMemoryRegion | Device
    | Session | Application | Scope | Kernel | Stream
)  # fmt: skip
"""Every kind of entity, as the JSON decoder's tagged union."""

NODE_KINDS: dict[str, type[Entity]] = {cls.__struct_config__.tag: cls for cls in AnyNode.__args__}
