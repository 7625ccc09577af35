"""Every table of GPU events: its columns with their kinds, and what they mean.

Kinds: ``i64``, ``u64``, ``f64`` (numpy arrays), ``text`` (list of str), ``json`` (list of str, each a JSON document).
Units are in the names; ``*_id`` of a dictionary (second element) is an id of the table ``name``; codes are those of
CUPTI and of the log format (``codes``). The session is a field of the batch, not a column.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["i64", "u64", "f64", "text", "json"]


class Column(NamedTuple):
    """``dictionary``: where the text of an id is looked up, empty if it is no such id."""

    name: str
    kind: Kind = "i64"
    dictionary: str = ""


class Table(NamedTuple):
    """``time``: the column that places a row on the timeline (UNIX ns), empty if it has none.

    ``key``: columns that identify a row inside its session where it may come more than once (take it as an upsert).
    ``frequent``: grows with the work done, not with the session's set-up.
    """

    name: str
    doc: str
    columns: tuple[Column, ...]
    time: str = ""
    key: tuple[str, ...] = ()
    frequent: bool = False

    def column(self, name: str) -> Column:
        return next(c for c in self.columns if c.name == name)


def _columns(text: str) -> tuple[Column, ...]:
    """``name[:kind[:dictionary]]`` separated by blanks."""
    columns = []
    for word in text.split():
        name, _, rest = word.partition(":")
        kind, _, dictionary = rest.partition(":")
        columns.append(Column(name, kind or "i64", dictionary))  # type: ignore[arg-type]
    return tuple(columns)


def _table(
    name: str, doc: str, columns: str, time: str = "", key: tuple[str, ...] = (), frequent: bool = False
) -> Table:
    return Table(name, doc, _columns(columns), time, key, frequent)


_SIX = (
    "sm_throughput_pct:f64 l1_hit_rate_pct:f64 l2_hit_rate_pct:f64 dram_read_bytes dram_write_bytes "
    "tensor_active_pct:f64"
)
_WHO = "pid app:text"
_SCOPED = "scope_id:i64:user_scope scope_depth stack_id:i64:stack"
_API = "api_start_ns api_exit_ns"

_ALL = (
    _table(
        "session_start",
        "A session begins: the program, the host, the kind of capture. Once per session.",
        f"time_ns {_WHO} version log_path:text hostname:text ip_addr:text session_kind:text profiling_engine:text "
        "analysis_id:text pass_index pass_count run_id:text segment_index roll_chain_id:text part_index "
        "previous_run_id:text sample_interval_ms rank world_size local_rank job:text job_launcher:text",
        "time_ns",
        ("time_ns",),
    ),
    _table(
        "session_end",
        "A session ends. ``synthetic``: written by the launcher after the program died.",
        f"time_ns {_WHO} synthetic exit_code signaled signal window_stopped crashed",
        "time_ns",
        ("time_ns",),
    ),
    _table(
        "segment_start",
        "A segment of a run begins (each segment is a session).",
        "time_ns run_id:text segment_index actual_start_ns previous_session_id:text requested_boundary_ns "
        "boundary_delay_ns deferred_by:text",
        "time_ns",
        ("run_id", "segment_index"),
    ),
    _table(
        "segment_end",
        "A segment of a run ends.",
        "time_ns run_id:text segment_index actual_end_ns requested_boundary_ns boundary_delay_ns end_reason:text "
        "deferred_by:text records_outside_segment_window",
        "time_ns",
        ("run_id", "segment_index"),
    ),
    _table(
        "run_end",
        "A segmented run ends.",
        "time_ns run_id:text final_segment_index ended_ns end_reason:text rollover_reason:text requested_rollover_ns "
        "actual_rollover_ns synthetic",
        "time_ns",
        ("run_id",),
    ),
    _table(
        "capability",
        "What of the capture was asked for and what came of it. kernel_events with mode launch_callbacks_synthetic: "
        "the session's kernels are synthetic (start of the API call, gap to the next launch).",
        "time_ns requested_engine:text selected_engine:text feature:text requested status:text mode:text "
        "reason_code:text message:text",
        "time_ns",
        ("feature",),
    ),
    _table(
        "device",
        "A GPU of the session; batches with different columns complete each other.",
        "device_id name:text uuid:text vendor:text architecture:text pci_bus total_mib compute_major compute_minor "
        "l2_cache_size_bytes shared_mem_per_block_bytes regs_per_block multi_processor_count warp_size",
        key=("device_id",),
    ),
    _table(
        "name",
        "A text of one of the session's dictionaries.",
        "dictionary:text id text:text",
        key=("dictionary", "id"),
    ),
    _table(
        "kernel",
        "A kernel on the GPU. device_id only from single-event lines; batches have none.",
        f"start_ns duration_ns kernel_id:i64:kernel stream_id device_id corr_id dyn_shared_bytes num_regs has_details "
        f"external_kind external_id:u64 {_API} {_SCOPED}",
        "start_ns",
        frequent=True,
    ),
    _table(
        "kernel_detail",
        "How a kernel was launched; joins ``kernel`` by corr_id within the session.",
        "corr_id shape_id scope_id:i64:user_scope stack_id:i64:stack",
        frequent=True,
    ),
    _table(
        "kernel_shape",
        "A launch configuration with its occupancies (0-1), shared by many kernels; shape_id is a hash of the content.",
        "shape_id grid_x grid_y grid_z block_x block_y block_z static_shared_bytes local_bytes const_bytes "
        "occupancy:f64 reg_occupancy:f64 smem_occupancy:f64 warp_occupancy:f64 block_occupancy:f64 "
        "limiting_resource:text max_active_blocks local_mem_total_bytes local_mem_per_thread_bytes "
        "cache_config_requested cache_config_executed shared_mem_executed_bytes",
        key=("shape_id",),
    ),
    _table(
        "kernel_start",
        "Launch of a kernel, in the oldest lines.",
        "time_ns corr_id kernel_id:i64:kernel shape_id num_regs has_details",
        "time_ns",
        frequent=True,
    ),
    _table(
        "kernel_end",
        "End of a kernel, in the oldest lines.",
        "time_ns corr_id cuda_error:text",
        "time_ns",
        frequent=True,
    ),
    _table(
        "memcpy",
        "A copy. copy_kind: 1 HtoD 2 DtoH 3 HtoA 4 AtoH 5 AtoA 6 AtoD 7 DtoA 8 DtoD 9 HtoH 10 PtoP.",
        f"start_ns duration_ns bytes copy_kind stream_id device_id corr_id {_API} {_SCOPED} src_kind:text "
        "dst_kind:text",
        "start_ns",
        frequent=True,
    ),
    _table(
        "memset",
        "A fill of device memory.",
        f"start_ns duration_ns bytes stream_id device_id corr_id {_API} {_SCOPED}",
        "start_ns",
        frequent=True,
    ),
    _table(
        "sync",
        "A wait of the host. sync_type: 0 unknown 1 event 2 stream-wait-event 3 stream 4 context.",
        "start_ns duration_ns sync_type stream_id event_id context_id corr_id function_id:i64:function device_id "
        "stack_id:i64:stack scope_id:i64:user_scope",
        "start_ns",
        frequent=True,
    ),
    _table(
        "allocation",
        "Memory taken or given back. memory_op: 1 alloc 2 free. memory_kind: 0 unknown 1 pageable 2 pinned 3 device "
        "4 array 5 managed 6 device-static 7 managed-static.",
        "start_ns duration_ns memory_op memory_kind address:u64 bytes device_id stream_id corr_id "
        "stack_id:i64:stack scope_id:i64:user_scope",
        "start_ns",
        frequent=True,
    ),
    _table(
        "scope",
        "A scope of the program begins or ends. event_type: 0 begin 1 end 2 continuation-open 3 continuation-close. "
        "repeat and warmup: on begin rows.",
        "time_ns scope_instance_id name_id:i64:scope event_type depth repeat warmup original_start_ns "
        "scope_id:i64:user_scope tag:text",
        "time_ns",
        frequent=True,
    ),
    _table(
        "profile_sample",
        "A sample of a function's instruction. sample_kind: 0 PC sampling (metric_value = samples, the metric names "
        "the stall) 1 SASS metric 2 ISA source map.",
        "time_ns corr_id device_id function_id:i64:function pc_offset metric_id:i64:metric metric_value stall_reason "
        "sample_kind scope_name_id:i64:scope source_file_id:i64:source_file source_line",
        "time_ns",
        frequent=True,
    ),
    _table(
        "pm_sample",
        "A value of a hardware counter in time, as printed with 6 significant digits.",
        "time_ns sample_index device_id metric_id:i64:metric value:f64 scope_name_id:i64:scope",
        "time_ns",
        frequent=True,
    ),
    _table(
        "device_metric",
        "A GPU's telemetry. pcie_bytes_per_s: both directions. energy_uj: cumulative.",
        "time_ns device_id gpu_util_pct mem_util_pct temp_c power_mw used_mib free_mib total_mib clock_sm_mhz "
        "clock_mem_mhz clock_gfx_mhz fan_speed_pct temp_mem_c temp_junction_c voltage_mv energy_uj:u64 "
        "pcie_bytes_per_s pcie_rx_bytes_per_s pcie_tx_bytes_per_s ecc_corrected ecc_uncorrected "
        "throttle_power throttle_thermal",
        "time_ns",
        frequent=True,
    ),
    _table(
        "host_metric",
        "The host's telemetry.",
        "time_ns cpu_pct:f64 ram_used_mib ram_total_mib",
        "time_ns",
        frequent=True,
    ),
    _table(
        "nvtx",
        "An NVTX range.",
        f"start_ns end_ns duration_ns name_id:i64:marker domain:text marker_id {_WHO}",
        "start_ns",
        frequent=True,
    ),
    _table(
        "graph_launch",
        "A launch of a CUDA graph. graph_exec_key joins ``graph_node``.",
        f"start_ns end_ns duration_ns graph_id device_id stream_id corr_id graph_exec_key:text {_WHO}",
        "start_ns",
        frequent=True,
    ),
    _table(
        "graph_node",
        "A node of a CUDA graph.",
        "graph_exec_key:text node_index node_type dependency_count",
        key=("graph_exec_key", "node_index"),
    ),
    _table(
        "perf_metric",
        "Counters of a scope (range profiler); what was not available is unknown.",
        f"start_ns end_ns device_id name_id:i64:scope {_SIX} scope_id:i64:user_scope scope_depth {_WHO}",
        "start_ns",
        frequent=True,
    ),
    _table(
        "kernel_perf_metric",
        "Counters of one launch (kernel replay). kernel_name may be a number (CUPTI AutoRange): then launch_ordinal "
        "tells the n-th kernel in time.",
        f"device_id range_index range_name:text kernel_name:text launch_ordinal {_SIX} achieved_occupancy_pct:f64 "
        "shared_load_bank_conflicts shared_store_bank_conflicts shared_bank_conflicts shared_wavefronts "
        f"shared_bank_conflict_overhead_pct:f64 shared_bank_conflict_nway:f64 {_WHO}",
        frequent=True,
    ),
    _table(
        "sass_config",
        "Which SASS metrics are collected.",
        "time_ns device_id configured_metrics:json skipped_metrics:json",
        "time_ns",
    ),
    _table(
        "pm_sampling_config",
        "How hardware counters are sampled.",
        "time_ns device_id interval_us max_samples preset:text metrics:json",
        "time_ns",
    ),
    _table(
        "execution_signature",
        "What a scope launched, as a hash: equal ones make passes comparable.",
        "time_ns scope_name:text signature:u64 launch_count distinct_kernels",
        "time_ns",
    ),
    _table(
        "deep_window",
        "A window of deep capture.",
        f"start_ns end_ns duration_ns name:text close_reason:text engines:json launches_covered requested_duration_ms "
        f"requested_max_launches trigger:json {_WHO}",
        "start_ns",
    ),
    _table(
        "deep_window_rule",
        "What became of a rule for deep windows.",
        "time_ns rule_id:text expression:text state:text outcome:text reason:text metric_state:text samples_seen "
        "windows_opened truncated_samples metric_quality_resets last_quality_reason:text state_sequence last_value:f64 "
        f"last_observed_ns {_WHO}",
        "time_ns",
    ),
    _table(
        "counter_quality",
        "Quality of custom counters.",
        f"time_ns source:text schema_version tracked_counters samples_observed registration_rejected "
        f"unknown_id_samples unavailable_samples negative_delta_samples rate_windows_discarded {_WHO}",
        "time_ns",
    ),
    _table(
        "system_event",
        "Telemetry starts (system_start), stops (system_stop) or is taken once (system_sample).",
        f"time_ns event:text name:text {_WHO}",
        "time_ns",
    ),
    _table(
        "source_file", "Lines of a source file.", "source_file_id:i64:source_file lines:json", key=("source_file_id",)
    ),
    _table(
        "disassembly",
        "SASS of a function (mangled name); entries are [{pc, sass, count?}].",
        "cubin_crc function_name:text entries:json",
        key=("cubin_crc", "function_name"),
    ),
    _table("ptx", "PTX of a function.", "function_name:text arch:text ptx:text", key=("function_name", "arch")),
    _table("unknown", "An event of a type that this version does not know, as it was written.", "type:text line:text"),
)

TABLES: dict[str, Table] = {table.name: table for table in _ALL}
"""By name."""

COPY_KINDS = {
    1: "HtoD",
    2: "DtoH",
    3: "HtoA",
    4: "AtoH",
    5: "AtoA",
    6: "AtoD",
    7: "DtoA",
    8: "DtoD",
    9: "HtoH",
    10: "PtoP",
}
SYNC_TYPES = {0: "unknown", 1: "event", 2: "stream_wait_event", 3: "stream", 4: "context"}
MEMORY_OPS = {1: "alloc", 2: "free"}
MEMORY_KINDS = {
    0: "unknown",
    1: "pageable",
    2: "pinned",
    3: "device",
    4: "array",
    5: "managed",
    6: "device_static",
    7: "managed_static",
}
SCOPE_EVENTS = {0: "begin", 1: "end", 2: "continuation_open", 3: "continuation_close"}
SAMPLE_KINDS = {0: "pc_sampling", 1: "sass_metric", 2: "isa_source_map"}
"""Codes of the log format → words."""
