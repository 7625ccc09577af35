"""A report as sections of words, the same for the terminal and for the page."""

from __future__ import annotations

from typing import Literal

import msgspec

from gpuflight.events.report import words
from gpuflight.events.report.model import KernelDetail, Report

Cell = str | None
_NAME_WIDTH = 160


class Section(msgspec.Struct, kw_only=True):
    """``rows`` under ``columns`` (a name that ends with ``>`` is of numbers, set to the right); without ``columns``
    pairs of a name and a value. ``note`` is read before the rows. A cell None is unknown."""

    id: str
    title: str
    columns: list[str] = []
    rows: list[list[Cell]]
    note: str = ""
    tone: Literal["", "warning"] = ""


def sections(report: Report) -> list[Section]:
    """Those that have something to say, and always the summary and what could not be seen."""
    made = [
        _summary(report),
        _hints(report),
        _kernels(report),
        _top(report),
        _details(report),
        _copies(report),
        _fills(report),
        _waits(report),
        _memory(report),
        _held(report),
        _telemetry(report),
        _scopes(report),
        _counters(report),
        _pm(report),
        _stalls(report),
        _sass(report),
        _capabilities(report),
        _unseen(report),
        _losses(report),
    ]
    return [section for section in made if section.rows or section.note]


STATES = {
    "live": "live: it is still being written",
    "ended": "ended",
    "died": "died: its launcher wrote the end",
    "silent": "no end was written, and nobody writes any more",
}


def _summary(report: Report) -> Section:
    head = report.head
    rows: list[list[Cell]] = [
        ["session", head.session_id],
        ["state", STATES.get(head.state, head.state)],
        ["application", head.app],
        ["host", head.hostname],
        ["process", None if head.pid is None else str(head.pid)],
        ["capture", " · ".join(x for x in (head.session_kind, head.profiling_engine) if x) or None],
        ["from", words.moment(head.first_ns)],
        ["to", words.moment(head.last_ns)],
        ["lasted", words.time(head.span_ns)],
    ]
    if head.run_id:
        segment = "" if head.segment_index is None else f", segment {head.segment_index}"
        rows.append(["run", f"{head.run_id}{segment}"])
    if head.source:
        rows.append(["read from", head.source])
    for device in report.devices:
        facts = [
            device.name,
            device.architecture,
            f"compute capability {device.compute_capability}" if device.compute_capability else None,
            f"{device.multi_processor_count} multiprocessors" if device.multi_processor_count else None,
            f"{words.size(device.total_mib * 1024**2)} memory" if device.total_mib else None,
            f"{words.size(device.l2_cache_size_bytes)} L2" if device.l2_cache_size_bytes else None,
            f"{words.size(device.shared_mem_per_block_bytes)} shared memory per block"
            if device.shared_mem_per_block_bytes
            else None,
        ]
        rows.append([f"GPU {device.device_id}", " · ".join(fact for fact in facts if fact) or None])
    records = " · ".join(f"{words.count(n)} {name}" for name, n in sorted(head.records.items(), key=lambda i: -i[1]))
    rows.append(["records", records or "none"])
    lost = sum(loss.count for loss in report.losses if loss.effect == "lost")
    rows.append(["lost", words.count(lost) if lost else "nothing that is known of"])
    return Section(id="summary", title="Session", rows=rows)


def _hints(report: Report) -> Section:
    order = {"high": 0, "medium": 1, "low": 2}
    rows: list[list[Cell]] = [
        [
            hint.severity,
            _short(hint.about),
            hint.text,
            f"{hint.rule}: threshold {words.number(hint.threshold)}, {hint.source}",
        ]
        for hint in sorted(report.hints, key=lambda hint: (order.get(hint.severity, 3), -hint.value))
    ]
    return Section(id="hints", title="Hints", columns=["severity", "about", "what", "rule"], rows=rows, tone="warning")


def _kernels(report: Report) -> Section:
    kernels = report.kernels
    if not kernels.count:
        return Section(id="kernels", title="Kernels", rows=[])
    rows: list[list[Cell]] = [
        ["launches", words.count(kernels.count)],
        ["different kernels", words.count(kernels.unique_count)],
        ["time in all", words.time(kernels.total_ns)],
        [
            "GPU busy",
            None
            if kernels.busy_ns is None
            else f"{words.percent(kernels.busy_share) or '–'} of the session ({words.time(kernels.busy_ns)})",
        ],
        ["mean", words.time(kernels.mean_ns)],
        ["median", words.time(kernels.median_ns)],
        ["p90 / p99", f"{words.time(kernels.p90_ns) or '–'} / {words.time(kernels.p99_ns) or '–'}"],
        ["least / most", f"{words.time(kernels.min_ns) or '–'} / {words.time(kernels.max_ns) or '–'}"],
    ]
    note = "Busy: time in which at least one kernel ran; kernels that overlap count once."
    if kernels.synthetic:
        note = "These kernels were not timed on the GPU: durations are gaps between launches."
    return Section(id="kernels", title="Kernels", rows=rows, note=note)


def _top(report: Report) -> Section:
    rows: list[list[Cell]] = [
        [
            _name(line.name, line.kernel_id),
            words.count(line.count),
            words.time(line.total_ns),
            words.percent(line.share),
            words.time(line.mean_ns),
            words.time(line.p50_ns),
            words.time(line.p99_ns),
            words.time(line.max_ns),
        ]
        for line in report.top_kernels
    ]
    more = report.top_kernels_count - len(rows)
    return Section(
        id="top",
        title="Kernels with the most time",
        columns=["kernel", "launches>", "total>", "share>", "mean>", "median>", "p99>", "most>"],
        rows=rows,
        note=f"{words.count(more)} more kernels are not listed." if more > 0 else "",
    )


def _details(report: Report) -> Section:
    return Section(
        id="details",
        title="How they were launched",
        columns=[
            *("kernel", "grid>", "block>", "registers>", "shared memory>", "spilled>", "occupancy>", "of its limits"),
            *("limited by", "waves/SM>", "seen>"),
        ],
        rows=[_detail(detail) for detail in report.kernel_details],
        note="The most frequent configuration of each; seen: launches that had it, of those that told theirs."
        if report.kernel_details
        else "",
    )


def _detail(detail: KernelDetail) -> list[Cell]:
    shape = detail.shape
    sides = [[shape.get(f"{of}_{axis}") for axis in "xyz"] for of in ("grid", "block")]
    shared = [n for n in (shape.get("static_shared_bytes"), detail.dyn_shared_bytes) if n is not None]
    spilled = shape.get("local_mem_per_thread_bytes") or shape.get("local_bytes")
    parts = [
        f"{short} {words.percent(shape[f'{name}_occupancy'])}"
        for short, name in (("reg", "reg"), ("smem", "smem"), ("warp", "warp"), ("block", "block"))
        if f"{name}_occupancy" in shape
    ]
    return [
        _name(detail.name, detail.kernel_id),
        *("×".join(map(str, side)) if None not in side else None for side in sides),
        None if detail.num_regs is None else str(detail.num_regs),
        words.size(sum(shared)) if shared else None,
        None if spilled is None and "local_mem_total_bytes" not in shape else f"{words.size(spilled or 0)}/thread",
        words.percent(shape.get("occupancy")),
        ", ".join(parts) or None,
        shape.get("limiting_resource") or None,
        None if detail.waves_per_sm is None else words.significant(detail.waves_per_sm),
        f"{words.count(detail.shape_count)} of {words.count(detail.details_count)}" if detail.details_count else None,
    ]


def _copies(report: Report) -> Section:
    rows: list[list[Cell]] = [
        [
            line.direction,
            words.count(line.count),
            words.size(line.bytes),
            words.time(line.total_ns),
            words.rate(line.bytes_per_s),
            words.rate(line.best_bytes_per_s),
            words.size(line.min_bytes),
            words.size(line.max_bytes),
        ]
        for line in report.copies
    ]
    columns = ["direction", "copies>", "bytes>", "time>", "rate>", "best>", "smallest>", "largest>"]
    return Section(id="copies", title="Copies", columns=columns, rows=rows)


def _fills(report: Report) -> Section:
    rows: list[list[Cell]] = [
        [
            _id(line.device_id),
            _id(line.stream_id),
            words.count(line.count),
            words.size(line.bytes),
            words.time(line.total_ns),
            words.rate(line.bytes_per_s),
        ]
        for line in report.fills
    ]
    columns = ["device", "stream", "fills>", "bytes>", "time>", "rate>"]
    return Section(id="fills", title="Fills (memset)", columns=columns, rows=rows)


def _waits(report: Report) -> Section:
    rows: list[list[Cell]] = [
        [
            line.kind,
            None if line.place is None else _short(line.place),
            words.count(line.count),
            words.time(line.total_ns),
            words.percent(line.share),
            words.time(line.mean_ns),
            words.time(line.max_ns),
        ]
        for line in report.waits
    ]
    columns = ["wait for", "place in the program", "waits>", "total>", "of session>", "mean>", "most>"]
    return Section(id="waits", title="Waits of the host", columns=columns, rows=rows)


def _memory(report: Report) -> Section:
    rows: list[list[Cell]] = [
        [
            line.kind,
            _id(line.device_id),
            words.count(line.allocations_count),
            words.size(line.allocated_bytes),
            words.size(line.peak_bytes),
            f"{words.size(line.held_bytes)} in {words.count(line.held_count)}",
        ]
        for line in report.memory
    ]
    columns = ["memory", "device", "allocations>", "allocated in all>", "most at once>", "held at the end>"]
    return Section(id="memory", title="Memory that was taken", columns=columns, rows=rows)


def _held(report: Report) -> Section:
    rows: list[list[Cell]] = [
        [line.kind, _id(line.device_id), words.size(line.bytes), f"{line.address:#x}", line.scope, line.stack]
        for line in report.held
    ]
    columns = ["memory", "device", "bytes>", "address", "scope", "stack"]
    return Section(id="held", title="Memory that was never given back", columns=columns, rows=rows)


def _telemetry(report: Report) -> Section:
    rows: list[list[Cell]] = []
    for metric in report.metrics:
        name, unit, scale = words.metric(metric.metric)
        values = (metric.mean, metric.min, metric.max, metric.last)
        rows.append(
            [
                "host" if metric.device_id is None else f"GPU {metric.device_id}",
                name,
                unit or None,
                words.count(metric.samples_count),
                *(None if value is None else words.number(value * scale) for value in values),
            ]
        )
    for energy in report.energy:
        watts = energy.joules / energy.seconds
        text = f"{words.number(energy.joules)} J over {words.time(energy.seconds * 1e9)} ({energy.how})"
        rows.append([f"GPU {energy.device_id}", f"energy: {text}", "W", None, words.number(watts), None, None, None])
    columns = ["of", "metric", "unit", "samples>", "mean>", "least>", "most>", "last>"]
    return Section(id="telemetry", title="Telemetry", columns=columns, rows=rows)


def _scopes(report: Report) -> Section:
    rows: list[list[Cell]] = [
        [
            "  " * node.depth + (node.name if node.name is not None else node.path.rpartition("|")[2]),
            words.count(node.count),
            words.time(node.inclusive_ns),
            words.time(node.exclusive_ns),
            words.time(node.inclusive_ns / node.count),
            words.time(node.max_ns),
            words.count(node.kernels_count),
            words.time(node.kernels_ns),
        ]
        for node in report.scopes
    ]
    more = report.scopes_count - len(rows)
    columns = ["scope", "runs>", "inclusive>", "exclusive>", "mean>", "most>", "kernels>", "kernel time>"]
    note = f"{words.count(more)} more scopes are not listed." if more > 0 else ""
    return Section(id="scopes", title="Scopes", columns=columns, rows=rows, note=note)


def _counters(report: Report) -> Section:
    rows: list[list[Cell]] = [
        [
            f"{line.kind} {_short(line.of)}",
            words.count(line.count),
            ", ".join(
                f"{name.removesuffix('_pct').removesuffix('_bytes').replace('_', ' ')} "
                f"{words.size(value) if name.endswith('_bytes') else words.number(value)}"
                f"{' %' if name.endswith('_pct') else ''}"
                for name, value in line.values.items()
            )
            or None,
        ]
        for line in report.counters
    ]
    note = "Mean of each counter that was available; bytes are sums." if rows else ""
    return Section(
        id="counters", title="Range profiler counters", columns=["of", "ranges>", "counters"], rows=rows, note=note
    )


def _pm(report: Report) -> Section:
    rows: list[list[Cell]] = [
        [
            _id(metric.device_id),
            metric.metric,
            metric.scope,
            words.count(metric.samples_count),
            words.number(metric.mean),
            words.number(metric.min),
            words.number(metric.max),
        ]
        for metric in report.pm_sampling
    ]
    columns = ["device", "counter", "scope", "samples>", "mean>", "least>", "most>"]
    return Section(id="pm", title="PM sampling", columns=columns, rows=rows)


def _stalls(report: Report) -> Section:
    rows: list[list[Cell]] = [
        [_short(line.function), line.metric, words.count(line.value), words.percent(line.share)]
        for line in report.stalls
    ]
    columns = ["function", "stall", "samples>", "of function>"]
    return Section(id="stalls", title="PC sampling: where warps wait", columns=columns, rows=rows)


def _sass(report: Report) -> Section:
    rows: list[list[Cell]] = [[_short(line.function), line.metric, words.count(line.value)] for line in report.sass]
    return Section(id="sass", title="SASS metrics", columns=["function", "metric", "value>"], rows=rows)


def _capabilities(report: Report) -> Section:
    asked = {True: "yes", False: "no", None: None}
    rows: list[list[Cell]] = [
        [c.feature, asked[c.requested], c.status, c.mode or None, c.message or c.reason_code or None]
        for c in report.capabilities
    ]
    columns = ["feature", "asked for", "came", "mode", "why"]
    return Section(id="capabilities", title="What the capture could do", columns=columns, rows=rows)


def _unseen(report: Report) -> Section:
    rows: list[list[Cell]] = [[item.what, item.reason] for item in report.unseen]
    note = "" if rows else "Everything that this report asks for was in the log."
    return Section(id="unseen", title="What could not be seen", columns=["what", "why"], rows=rows, note=note)


def _losses(report: Report) -> Section:
    rows: list[list[Cell]] = [
        [loss.effect, words.count(loss.count), loss.text, loss.about or None, loss.place or None]
        for loss in report.losses
    ]
    note = "" if rows else "Every line of the log became a record."
    columns = ["effect", "times>", "what", "about", "first at"]
    return Section(id="losses", title="What was lost, repaired or met again", columns=columns, rows=rows, note=note)


def _name(name: str | None, number: int | None) -> str:
    return _short(name) if name is not None else f"(name never came: #{number})"


def _short(text: str | None) -> str:
    if text is None:
        return "(name never came)"
    return text if len(text) <= _NAME_WIDTH else text[: _NAME_WIDTH - 1] + "…"


def _id(number: int | None) -> Cell:
    return None if number is None else str(number)
