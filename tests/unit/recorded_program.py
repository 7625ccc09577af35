"""A made-up program whose steps run on a made-up GPU, and its log: what the doctor is to find in it is put in."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.unit.gpufl_files import START_NS, line, session_folder

US = 1_000
MS = 1_000_000


@dataclass
class Program:
    """Steps, one after the other: load data, launch kernels, copy, wait. All times in ns; ``calls``: the log has the
    times of calls. A launch costs ``launch_ns``; the host is ahead of the GPU where it can."""

    steps: int = 40
    kernels: int = 50
    kernel_ns: int = 600 * US
    launch_ns: int = 5 * US
    python_ns: int = 5 * US
    load_ns: int = 0
    pause_ns: int = 0
    gc_ns: int = 0
    copies: int = 1
    copy_bytes: int = 4 << 20
    copy_ns: int = 400 * US
    pageable: bool = False
    blocking: bool = False
    syncs: int = 1
    late_ns: int = 4 * US
    slow_every: int = 0
    odd_steps: int = 0
    calls: bool = True
    start_up_ns: int = 2_000 * MS
    local_bytes: int = 0
    occupancy: float = 0.75
    grid: int = 6336
    stalls: dict[str, int] = field(default_factory=dict)

    def write(self, folder: Path, session: str = "s") -> Path:
        """Run it, and write its log as one session."""
        run = _Run(self)
        run.all()
        return session_folder(folder, {"device.1.log.gz": run.device(session), "scope.1.log.gz": run.scopes(session),
                                       "sass.1.log.gz": run.samples(session)}, session)  # fmt: skip


class _Run:
    def __init__(self, program: Program) -> None:
        self.p = program
        self.host = START_NS + program.start_up_ns
        self.gpu = self.host
        self.corr = 0
        self.kernel_rows: list[list[int]] = []
        self.copy_rows: list[list[int]] = []
        self.wait_rows: list[list[int]] = []
        self.scope_rows: list[list[int]] = []
        self.instances = 0

    def all(self) -> None:
        p = self.p
        for number in range(p.steps):
            step = self.begin(1, 0)
            if p.load_ns:
                loading = self.begin(2, 1)
                self.host += p.load_ns
                self.end(loading, 2, 1)
            if p.gc_ns and number % 4 == 0:
                collecting = self.begin(3, 1)
                self.host += p.gc_ns
                self.end(collecting, 3, 1)
            for _ in range(p.copies):
                self.copy()
            slow = p.odd_steps and number % (p.steps // p.odd_steps) == 0
            for n in range(p.kernels):
                self.launch(p.kernel_ns * (8 if slow else 1))
                if p.syncs > 1 and n % max(p.kernels // p.syncs, 1) == 0:
                    self.wait()
            if p.syncs:
                self.wait()
            if p.pause_ns and number % 10 == 9:
                self.host += p.pause_ns
            self.end(step, 1, 0)

    def begin(self, name: int, depth: int) -> int:
        self.instances += 1
        self.scope_rows.append([self.host - START_NS, self.instances, name, 0, depth])
        return self.instances

    def end(self, instance: int, name: int, depth: int) -> None:
        self.scope_rows.append([self.host - START_NS, instance, name, 1, depth])

    def work(self, duration: int, call_ns: int) -> list[int]:
        """[start, duration, corr, begin and end of the call] of a piece of work called now."""
        self.corr += 1
        called = self.host
        self.host += call_ns
        start = max(called + self.p.late_ns, self.gpu)
        self.gpu = start + duration
        return [start - START_NS, duration, self.corr, called, self.host]

    def launch(self, duration: int) -> None:
        self.host += self.p.python_ns
        slow = self.p.slow_every and self.corr % self.p.slow_every == 0
        start, took, corr, called, back = self.work(duration, 90 * US if slow else self.p.launch_ns)
        self.kernel_rows.append([start, 1 + corr % 4, 7, took, corr, 40, 1, 0, called, back])

    def copy(self) -> None:
        p = self.p
        start, took, corr, called, back = self.work(p.copy_ns, p.launch_ns)
        if p.blocking:
            self.host = back = max(back, START_NS + start + took + 10 * US)
        self.copy_rows.append([start, 7, took, p.copy_bytes, 1, corr, 1 if p.pageable else 2, 3, 0, called, back])

    def wait(self) -> None:
        until = max(self.gpu, self.host)
        self.wait_rows.append([self.host - START_NS, until - self.host, 3, 7, 0, 0, 0])
        self.host = until + 5 * US

    def device(self, session: str) -> bytes:
        more = ["device_id", *(["api_start_ns", "api_exit_ns"] if self.p.calls else [])]
        shape = {
            "grid": f"({self.p.grid},1,1)", "block": "(256,1,1)", "occupancy": self.p.occupancy,
            "reg_occupancy": self.p.occupancy, "limiting_resource": "registers", "max_active_blocks": 6,
            "local_mem_per_thread_bytes": self.p.local_bytes, "num_regs": 40,
        }  # fmt: skip
        lines = [
            line("job_start", session, pid=4242, app="train.py", hostname="node-1", ts_ns=START_NS,
                 cuda_static_devices=[{"id": 0, "name": "NVIDIA H100", "uuid": "GPU-6f1c", "multi_processor_count": 132,
                                       "compute_major": 9, "compute_minor": 0, "warp_size": 32}]),
            line("dictionary_update", session, kernel_dict={str(n): f"layer_{n}" for n in range(1, 5)}),
            _batches("kernel_event_batch", session, ["dt_ns", "kernel_id", "stream_id", "duration_ns", "corr_id",
                     "num_regs", "has_details", *more], self.kernel_rows),
            _batches("memcpy_event_batch", session, ["dt_ns", "stream_id", "duration_ns", "bytes", "copy_kind",
                     "corr_id", "src_kind", "dst_kind", *more], self.copy_rows),
            *(line("kernel_detail", session, pid=4242, app="train.py", corr_id=row[4], **shape)
              for row in self.kernel_rows[:8]),
            line("shutdown", session, pid=4242, app="train.py", ts_ns=max(self.host, self.gpu) + MS),
        ]  # fmt: skip
        return b"".join(lines)

    def scopes(self, session: str) -> bytes:
        named = {"1": "train_step", "2": "load_batch", "3": "gc"}
        scope = ["dt_ns", "scope_instance_id", "name_id", "event_type", "depth"]
        wait = ["dt_ns", "duration_ns", "sync_type", "stream_id", "event_id", "context_id", "corr_id"]
        return b"".join((
            line("dictionary_update", session, scope_name_dict=named),
            _batches("scope_event_batch", session, scope, self.scope_rows),
            _batches("synchronization_event_batch", session, wait, self.wait_rows),
        ))  # fmt: skip

    def samples(self, session: str) -> bytes:
        stalls = list(self.p.stalls.items())
        texts = {str(n): f"smsp__pcsamp_warps_issue_stalled_{name}" for n, (name, _) in enumerate(stalls, 1)}
        names = ["dt_ns", "corr_id", "device_id", "function_id", "pc_offset", "metric_id", "metric_value",
                 "stall_reason", "sample_kind"]  # fmt: skip
        rows = [[n, 0, 0, 1, 16 * n, n, count, 0, 0] for n, (_, count) in enumerate(stalls, 1)]
        return line("dictionary_update", session, metric_dict=texts) + _batches(
            "profile_sample_batch", session, names, rows
        )


def _batches(wire_type: str, session: str, columns: list[str], rows: list[list[int]]) -> bytes:
    """Lines of at most 512 rows; columns that a row has too many are left out."""
    return b"".join(
        line(wire_type, session, batch_id=n // 512 + 1, base_time_ns=START_NS, columns=columns,
             rows=[row[: len(columns)] for row in rows[n : n + 512]])
        for n in range(0, len(rows), 512)
    )  # fmt: skip


def findings(text: str) -> dict[str, dict[str, Any]]:
    """Of ``gpuflight doctor --json``: by rule, the last of each."""
    return {finding["rule"]: finding for finding in json.loads(text)["findings"]}
