"""The catalogue of rules: id → name. Each is a rule, or stands in ``NOT_HERE`` with the reason why it cannot be."""

from __future__ import annotations

_NAMES = {
    "G": "gpu_idle_gaps host_bound_idle launch_bound launch_delay data_loader_starvation loader_workers pageable_copies"
    " small_copies blocking_copies sync_heavy low_occupancy register_pressure local_memory_spill dominant_stall"
    " thread_inefficiency tail_effect few_kernels_dominate memory_bandwidth_bound tensor_cores_unused"
    " utilisation_misleads memory_operations_heavy gc_pause step_outliers slow_start",
    "C": "communication_share exposed_communication straggler_rank arrival_skew collective_hang slow_collective"
    " small_packets nic_too_far no_p2p asymmetric_nvlink fail_slow sync_batch_norm",
    "H": "pcie_degraded pcie_replays nvlink_errors xid memory_errors thermal_slowdown power_capped clocks_capped"
    " throttled_but_busy gpu_not_ready gpu_lost gpu_memory_near_full memory_fragmentation zombie_memory mig_imbalance"
    " gpu_load_imbalance idle_reserved_gpu",
    "S": "cpu_throttled run_queue_delay cpu_bound_idle_gpu io_bound_idle_gpu few_cpus gil_bound remote_numa"
    " major_faults memory_stall memory_pressure slow_storage disk_fills memory_leak descriptor_leak task_limit"
    " stuck_process shm_nearly_full context_switch_storm cache_misses ipc_exhaustion clock_unsynchronised",
    "N": "send_queue_pressure retransmits slow_round_trip accept_queue_overflow failed_connects packet_drops"
    " nic_saturated rdma_fatal rdma_degraded rdma_congestion rdma_flapping rdma_contention gpudirect_unused",
    "M": "collector_over_budget records_dropped invalid_records subscriber_backlog stale_remote incomplete_round"
    " profiler_overhead",
}

CATALOGUE: dict[str, str] = {
    f"{letter}{number:02}": name for letter, names in _NAMES.items() for number, name in enumerate(names.split(), 1)
}
"""All 94: ``H01`` → ``pcie_degraded``."""

NOT_HERE: dict[str, str] = {
    "N12": "it compares single RDMA operations with what they should take; only Ascend's profiler (msprof) tells these",
}
"""Those whose evidence cannot exist on Linux with the sources there are, and why."""
