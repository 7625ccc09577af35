"""What the wire says → our tables, as data: every type of line that clients have ever written.

A field is ``wire`` or ``wire=column``, with an optional way to read it behind ``!``: ``@dictionary`` (a text that
becomes an id), ``na`` (-1 means not available), a name of ``WORDS`` (a word that becomes its code), ``memory_word`` (a
code of a memory kind that becomes its word, 0 none) or ``x100``.
"""

from __future__ import annotations

from typing import NamedTuple

from gpuflight.events.tables import COPY_KINDS, MEMORY_KINDS, MEMORY_OPS, SYNC_TYPES, TABLES, Column, Table

WORDS: dict[str, dict[str, int]] = {
    "copy": {v.lower(): k for k, v in COPY_KINDS.items()},
    "sync": {v: k for k, v in SYNC_TYPES.items()},
    "op": {v: k for k, v in MEMORY_OPS.items()},
    "memory": {v: k for k, v in MEMORY_KINDS.items()},
    "sample": {"pc_sampling": 0, "sass_metric": 1, "isa_source_map": 2},
}


MEMORY_WORDS = {code: word if code else "" for code, word in MEMORY_KINDS.items()}
"""Unknown memory has no word."""


class Field(NamedTuple):
    """How a field of the wire becomes a column."""

    column: Column
    how: str = ""


class Plan(NamedTuple):
    """A type of line. ``volatile``: whole numbers that differ from line to line; the rest of a line tends to repeat.

    ``ignored``: fields that say nothing a record needs (constants of the session, names of the type itself).
    ``constants``: columns that the type itself tells. ``shaped``: carries a launch configuration.
    ``telemetry``: carries readings of host and devices.
    """

    table: Table
    fields: dict[str, Field]
    volatile: frozenset[str] = frozenset()
    ignored: frozenset[str] = frozenset()
    constants: tuple[tuple[str, int | str], ...] = ()
    shaped: bool = False
    telemetry: bool = False


def _fields(table: Table, text: str) -> dict[str, Field]:
    fields = {}
    for word in text.split():
        spec, _, how = word.partition("!")
        wire, _, column = spec.partition("=")
        fields[wire] = Field(table.column(column or wire), how)
    return fields


def _plan(
    table: str,
    fields: str,
    volatile: str = "",
    ignored: str = "",
    constants: tuple[tuple[str, int | str], ...] = (),
    shaped: bool = False,
    telemetry: bool = False,
) -> Plan:
    envelope = {"type", "version", "session_id"}
    return Plan(
        TABLES[table],
        _fields(TABLES[table], fields),
        frozenset(volatile.split()),
        frozenset(envelope | set(ignored.split())),
        constants,
        shaped,
        telemetry,
    )


_API = "api_start_ns api_exit_ns"

BATCHES: dict[str, Plan] = {
    "kernel_event_batch": _plan(
        "kernel",
        "dt_ns=start_ns kernel_id stream_id duration_ns corr_id dyn_shared=dyn_shared_bytes num_regs has_details "
        f"external_kind external_id device_id {_API}",
    ),
    "memcpy_event_batch": _plan(
        "memcpy",
        "dt_ns=start_ns stream_id duration_ns bytes copy_kind corr_id src_kind!memory_word dst_kind!memory_word "
        f"device_id {_API}",
    ),
    "device_metric_batch": _plan(
        "device_metric",
        "dt_ns=time_ns device_id gpu_util=gpu_util_pct mem_util=mem_util_pct temp_c power_mw used_mib total_mib "
        "clock_sm=clock_sm_mhz fan_speed_pct temp_mem_c temp_junction_c voltage_mv energy_uj clock_mem=clock_mem_mhz "
        "pcie_bw_bps=pcie_bytes_per_s ecc_corrected ecc_uncorrected",
    ),
    "host_metric_batch": _plan("host_metric", "dt_ns=time_ns cpu_pct_x100=cpu_pct!x100 ram_used_mib ram_total_mib"),
    "scope_event_batch": _plan(
        "scope", "dt_ns=time_ns scope_instance_id name_id event_type depth repeat warmup original_start_ns"
    ),
    "profile_sample_batch": _plan(
        "profile_sample",
        "dt_ns=time_ns corr_id device_id function_id pc_offset metric_id metric_value stall_reason sample_kind "
        "scope_name_id source_file_id source_line",
    ),
    "pm_sample_batch": _plan("pm_sample", "sample_index dt_ns=time_ns device_id metric_id value scope_name_id"),
    "synchronization_event_batch": _plan(
        "sync", "dt_ns=start_ns duration_ns sync_type stream_id event_id context_id corr_id function_id"
    ),
    "memory_alloc_event_batch": _plan(
        "allocation",
        "dt_ns=start_ns duration_ns memory_op memory_kind address bytes device_id stream_id corr_id",
    ),
}
"""Lines of many rows, mapped by their ``columns``. device_id and the times of the call, behind those of the original,
are of our own recorder, as are the kinds of memory of copies."""

SHAPE_FIELDS: dict[str, str] = {
    "static_shared": "static_shared_bytes",
    "static_shared_bytes": "static_shared_bytes",
    "local_bytes": "local_bytes",
    "const_bytes": "const_bytes",
    "occupancy": "occupancy",
    "reg_occupancy": "reg_occupancy",
    "smem_occupancy": "smem_occupancy",
    "warp_occupancy": "warp_occupancy",
    "block_occupancy": "block_occupancy",
    "limiting_resource": "limiting_resource",
    "max_active_blocks": "max_active_blocks",
    "local_mem_total": "local_mem_total_bytes",
    "local_mem_total_bytes": "local_mem_total_bytes",
    "local_mem_per_thread_bytes": "local_mem_per_thread_bytes",
    "cache_config_requested": "cache_config_requested",
    "cache_config_executed": "cache_config_executed",
    "shared_mem_executed": "shared_mem_executed_bytes",
    "shared_mem_executed_bytes": "shared_mem_executed_bytes",
}
"""Fields of a launch configuration, beside ``grid`` and ``block``, under all the names they have had."""

_SPAN = "start_ns end_ns"
_TEXTS = "user_scope=scope_id!@user_scope stack_trace=stack_id!@stack scope_depth"
_SIX = (
    "sm_throughput_pct!na l1_hit_rate_pct!na l2_hit_rate_pct!na dram_read_bytes!na dram_write_bytes!na "
    "tensor_active_pct!na"
)
_ACTIVITY = "device_id stream_id corr_id start_ns " + _API + " " + _TEXTS
_ACTIVITY_VOLATILE = f"{_SPAN} {_API} corr_id bytes"

SINGLES: dict[str, Plan] = {
    "kernel_detail": _plan(
        "kernel_detail",
        "corr_id user_scope=scope_id!@user_scope stack_trace=stack_id!@stack",
        "corr_id",
        "pid app",
        shaped=True,
    ),
    "kernel_event": _plan(
        "kernel",
        _ACTIVITY + " name=kernel_id!@kernel has_details dyn_shared_bytes num_regs external_kind external_id",
        _ACTIVITY_VOLATILE,
        "pid app platform",
        shaped=True,
    ),
    "kernel_start": _plan(
        "kernel_start",
        "ts_ns=time_ns corr_id name=kernel_id!@kernel num_regs has_details",
        "ts_ns corr_id",
        "pid app platform uuid",
        shaped=True,
    ),
    "kernel_end": _plan("kernel_end", "ts_ns=time_ns corr_id cuda_error", "ts_ns corr_id", "pid app uuid name"),
    "memcpy_event": _plan(
        "memcpy",
        _ACTIVITY + " bytes copy_kind!copy src_kind dst_kind",
        _ACTIVITY_VOLATILE,
        "pid app platform name",
    ),
    "memset_event": _plan("memset", _ACTIVITY + " bytes", _ACTIVITY_VOLATILE, "pid app platform name"),
    "synchronization_event": _plan(
        "sync",
        "start_ns duration_ns sync_type!sync stream_id event_id context_id corr_id device_id "
        "user_scope=scope_id!@user_scope stack_trace=stack_id!@stack function_name=function_id!@function",
        f"{_SPAN} duration_ns corr_id event_id",
        "pid app platform name scope_depth",
    ),
    "memory_alloc_event": _plan(
        "allocation",
        "start_ns duration_ns memory_op!op memory_kind!memory address bytes device_id stream_id corr_id "
        "user_scope=scope_id!@user_scope stack_trace=stack_id!@stack",
        f"{_SPAN} duration_ns address bytes corr_id",
        "pid app platform name scope_depth",
    ),
    "profile_sample": _plan(
        "profile_sample",
        "ts_ns=time_ns device_id corr_id sample_count=metric_value metric_value stall_reason "
        "reason_name=metric_id!@metric metric_name=metric_id!@metric pc_offset source_file=source_file_id!@source_file "
        "function_name=function_id!@function source_line sample_kind!sample scope_name=scope_name_id!@scope",
        "ts_ns corr_id sample_count metric_value",
        "pid app",
    ),
    "scope_begin": _plan(
        "scope",
        "ts_ns=time_ns name=name_id!@scope tag user_scope=scope_id!@user_scope scope_depth=depth",
        ignored="pid app",
        constants=(("event_type", 0),),
        telemetry=True,
    ),
    "scope_end": _plan(
        "scope",
        "ts_ns=time_ns name=name_id!@scope tag user_scope=scope_id!@user_scope scope_depth=depth",
        ignored="pid app",
        constants=(("event_type", 1),),
        telemetry=True,
    ),
    "nvtx_marker_event": _plan(
        "nvtx",
        "start_ns end_ns duration_ns name=name_id!@marker domain marker_id pid app",
        "start_ns end_ns duration_ns marker_id",
    ),
    "graph_launch_event": _plan(
        "graph_launch",
        "start_ns end_ns duration_ns graph_id device_id stream_id corr_id graph_exec_key pid app",
        "start_ns end_ns duration_ns corr_id",
    ),
    "graph_node_definition": _plan("graph_node", "graph_exec_key node_index node_type dependency_count", "node_index"),
    "perf_metric_event": _plan(
        "perf_metric",
        f"start_ns end_ns device_id name=name_id!@scope {_SIX} user_scope=scope_id!@user_scope scope_depth pid app",
    ),
    "kernel_perf_metric_event": _plan(
        "kernel_perf_metric",
        f"device_id range_index range_name kernel_name launch_ordinal {_SIX} achieved_occupancy_pct!na "
        "shared_load_bank_conflicts!na shared_store_bank_conflicts!na shared_bank_conflicts!na shared_wavefronts!na "
        "shared_bank_conflict_overhead_pct!na shared_bank_conflict_nway!na pid app",
    ),
    "sass_config": _plan("sass_config", "ts_ns=time_ns device_id configured_metrics skipped_metrics"),
    "pm_sampling_config": _plan("pm_sampling_config", "ts_ns=time_ns device_id interval_us max_samples preset metrics"),
    "execution_signature": _plan(
        "execution_signature", "ts_ns=time_ns scope_name signature launch_count distinct_kernels"
    ),
    "deep_window_event": _plan(
        "deep_window",
        "start_ns end_ns duration_ns name close_reason engines launches_covered requested_duration_ms "
        "requested_max_launches trigger pid app",
    ),
    "deep_window_rule_summary": _plan(
        "deep_window_rule",
        "emitted_ns=time_ns rule_id expression state outcome reason metric_state samples_seen windows_opened "
        "truncated_samples metric_quality_resets last_quality_reason state_sequence last_value last_observed_ns "
        "pid app",
    ),
    "counter_data_quality_summary": _plan(
        "counter_quality",
        "emitted_ns=time_ns source schema_version tracked_counters samples_observed registration_rejected "
        "unknown_id_samples unavailable_samples negative_delta_samples rate_windows_discarded pid app",
    ),
    "system_start": _plan(
        "system_event", "ts_ns=time_ns name pid app", constants=(("event", "system_start"),), telemetry=True
    ),
    "system_stop": _plan(
        "system_event", "ts_ns=time_ns name pid app", constants=(("event", "system_stop"),), telemetry=True
    ),
    "system_sample": _plan(
        "system_event", "ts_ns=time_ns name pid app", constants=(("event", "system_sample"),), telemetry=True
    ),
    "source_file_content": _plan("source_file", "source_file_id lines"),
    "cubin_disassembly": _plan("disassembly", "cubin_crc function_name entries"),
    "ptx_disassembly": _plan("ptx", "function_name arch ptx"),
    # what goes to every channel
    "job_start": _plan(
        "session_start",
        "pid app version log_path ts_ns=time_ns hostname ip_addr session_kind profiling_engine analysis_id pass_index "
        "pass_count run_id segment_index roll_chain_id part_index previous_run_id system_rate_ms=sample_interval_ms "
        "rank world_size local_rank job job_launcher",
        telemetry=True,
    ),
    "shutdown": _plan(
        "session_end",
        "ts_ns=time_ns pid app synthetic exit_code signaled signal window_stopped crashed",
    ),
    "segment_start": _plan(
        "segment_start",
        "ts_ns=time_ns run_id segment_index actual_start_ns previous_session_id requested_boundary_ns "
        "boundary_delay_ns deferred_by",
    ),
    "segment_end": _plan(
        "segment_end",
        "ts_ns=time_ns run_id segment_index actual_end_ns requested_boundary_ns boundary_delay_ns end_reason "
        "deferred_by records_outside_segment_window",
        ignored="previous_session_id actual_start_ns",
    ),
    "run_end": _plan(
        "run_end",
        "ts_ns=time_ns run_id final_segment_index ended_ns end_reason rollover_reason requested_rollover_ns "
        "actual_rollover_ns synthetic",
    ),
}
"""Lines of one event. ``init`` is the first generation's ``job_start``."""
SINGLES["init"] = SINGLES["job_start"]

EVERY_CHANNEL = frozenset(
    {"job_start", "init", "shutdown", "segment_start", "segment_end", "run_end", "capture_capabilities"}
)
"""Types that are written to every channel file (and dictionary_update, whose entries speak for themselves)."""

ZERO_IS_UNKNOWN = frozenset({"temp_mem_c", "temp_junction_c", "voltage_mv"})
"""Readings that the writer leaves at 0 where the GPU has none: unknown if they are 0 in all rows of a batch."""

SHAPED_FIELDS = frozenset(SHAPE_FIELDS) | {"grid", "block"}
