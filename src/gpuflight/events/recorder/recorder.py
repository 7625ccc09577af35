"""One recorded session: its files, the thread that writes them, and its end."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from gpuflight.events.format.writer import SessionWriter
from gpuflight.events.recorder import capabilities, torch_ranges
from gpuflight.events.recorder.binding import Binding, Why, load, profiling_in_torch
from gpuflight.events.recorder.budget import CpuBudget
from gpuflight.events.recorder.capture import Capture
from gpuflight.events.recorder.clock import Clock
from gpuflight.events.recorder.control import Answer, ControlServer, Request
from gpuflight.events.recorder.garbage import Garbage
from gpuflight.events.recorder.lifecycle import cuda_is_loaded
from gpuflight.events.recorder.metrics import Metrics
from gpuflight.events.recorder.options import Options
from gpuflight.events.recorder.ranges import Ranges
from gpuflight.events.recorder.stacks import Stacks
from gpuflight.events.recorder.translate import Translator
from gpuflight.events.recorder.window import Window
from gpuflight.sources.job_environment import job_facts

log = logging.getLogger("gpuflight.recorder")

ENGINE = "nvidia.trace"
_BEAT_S = 0.25
_LOOK_FOR_CUDA_S = 0.1
_RETRY_S = 30.0
_CHUNKS_A_TURN = 64
_CLOSE_S = 10.0
TORCH_PROFILES = Why("torch_profiler", "torch.profiler is running, and CUPTI serves one at a time")


class Recorder:
    """Starts with ``start``, ends with ``close``; both may be called from any thread, and never raise.

    ``path``: the session's folder, empty if it could not be made (``problem`` says why).
    """

    def __init__(
        self,
        options: Options,
        make: Callable[[], Binding] = load,
        *,
        signals: Callable[[], int] = lambda: -1,
        on_signal: Callable[[int], None] = lambda number: None,
    ) -> None:
        """``signals``: the descriptor that numbers of signals come from, for ``on_signal``; -1 for none."""
        self.options = options
        self.problem = ""
        self.path = ""
        self.session_id = ""
        self.pid = os.getpid()
        self.clock = Clock()
        self._wake_in, self._wake_out = -1, -1
        self.capture = Capture(options, self.clock, self.wake, make)
        self.ranges = Ranges(self.clock, self.capture)
        self._garbage = Garbage(self.ranges, self.clock)
        self.metrics = Metrics(self.clock, options.metrics_interval_s)
        self.stacks = Stacks(options.stacks)
        self.budget = CpuBudget(options.cpu_budget_pct / 100)
        self._window = Window(options, self.clock.now_ns())
        self._writer: SessionWriter | None = None
        self._translator: Translator | None = None
        self._control: ControlServer | None = None
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._closed = threading.Event()
        self._close_lock = threading.RLock()
        self._work = threading.RLock()
        self._closing_in: int | None = None
        self._held_for_fork = False
        self._signals, self._on_signal = signals, on_signal
        self._told: Any = None
        self._told_devices: Any = None
        self._retry_ns = 0
        self._paused = False
        self._torch_follows = False
        self._looks_for_cuda = False
        self._next_turn_s = 0.0

    @property
    def state(self) -> str:
        """In a word or two."""
        if self._closed.is_set():
            return "closed"
        if self.capture.running:
            return "recording"
        if self._paused:
            return "paused"
        if self.capture.why is not None:
            return "off"
        return "waiting" if not self._window.open else "waiting for CUDA"

    def start(self) -> bool:
        """Make the session and its thread; whether there is one now."""
        try:
            self._open()
        except Exception as error:  # noqa: BLE001 - a full disk, a missing right: the program runs on
            self.problem = f"{type(error).__name__}: {error}" if not isinstance(error, OSError) else str(error)
            self._closed.set()
            if not self.options.quiet:
                log.warning("gpuflight records nothing: %s", self.problem)
            return False
        if self.options.gc_ranges:
            self._garbage.start()
        return True

    def _open(self) -> None:
        place = self.options.place
        os.makedirs(place, exist_ok=True)
        writer = SessionWriter(
            place,
            compress=self.options.compress and self.budget.allows,
            rotate_after_s=self.options.rotate_after_s,
        )
        self._writer, self.path, self.session_id = writer, writer.path, writer.session_id
        writer.event(
            "job_start",
            {
                "pid": self.pid,
                "app": self.options.name,
                "log_path": place,
                "ts_ns": self.clock.now_ns(),
                "hostname": socket.gethostname(),
                "devices": [],
                "gpu_static_devices": [],
                "cuda_static_devices": [],
                "rocm_static_devices": [],
                "session_kind": "trace",
                "profiling_engine": ENGINE,
                **job_facts(os.environ, socket.gethostname()).attributes,
            },
        )
        writer.flush(sync=False)
        self._wake_in, self._wake_out = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._control = ControlServer(self.path, self._answer)
        if not self.options.wait_for_cuda or cuda_is_loaded():
            self._turn_capture()  # nothing of what the caller does next is missed
        self.metrics.start()
        self._thread = threading.Thread(target=self._run, name="gpuflight-recorder", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Have the thread look at what came; from any thread, without waiting."""
        try:
            os.write(self._wake_out, b"x")
        except OSError:  # it is full: the thread is about to wake
            pass

    def close(self) -> bool:
        """Everything out and the session complete. The second caller waits for the first one; only our own thread, for
        which the first one may wait, does not: then the answer is False."""
        if self.closing_here:
            return False
        ours = self._thread is threading.current_thread()
        if not self._close_lock.acquire(blocking=not ours):
            return False
        try:
            if self._closed.is_set():
                return True
            self._closing_in = threading.get_ident()
            self._garbage.stop()
            self._ending.set()
            self.wake()
            if self._thread is not None and not ours:
                self._thread.join(_CLOSE_S)
            held = self._work.acquire(timeout=_CLOSE_S)
            try:
                self._finish()
            except Exception as error:  # noqa: BLE001 - at the end of the user's program
                if not self.options.quiet:
                    log.warning("gpuflight: the session %s is not complete: %s", self.path, error)
            finally:
                if held:
                    self._work.release()
                self._closed.set()
                self._closing_in = None
            return True
        finally:
            self._close_lock.release()

    @property
    def closing_here(self) -> bool:
        """Whether ``close`` is under way in this very thread (which a signal handler may interrupt)."""
        return self._closing_in == threading.get_ident()

    def flush(self) -> None:
        """What was taken until now can be read in the files when this returns."""
        with self._work:
            if not self._closed.is_set() and self._writer is not None:
                self._drain(everything=True)
                self._writer.flush(sync=False)

    def before_fork(self) -> None:
        if self._writer is not None and not self._closed.is_set():
            self._held_for_fork = True
            self._writer.before_fork()

    def after_fork(self) -> None:
        if self._writer is not None and self._held_for_fork:  # it may have been closed meanwhile
            self._held_for_fork = False
            self._writer.after_fork()

    def forget_in_child(self) -> bool:
        """In a forked child: the session is the parent's. Answers whether the parent used CUPTI."""
        used = self.capture.ever_ran
        self._garbage.stop()
        if not self._closed.is_set():
            self._closed = threading.Event()  # a thread of the parent may have been in the middle of the old one
            self._closed.set()
            if self._writer is not None:
                self._writer.abandon_in_child()
            if self._control is not None:
                self._control.abandon_in_child()
            ends, self._wake_in, self._wake_out = (self._wake_in, self._wake_out), -1, -1
            for descriptor in ends:
                if descriptor >= 0:
                    os.close(descriptor)
        self.capture.lost()
        return used

    # what follows runs in the recorder's thread

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._wake_in, selectors.EVENT_READ)
        control = self._control
        if control is not None and control.listening:
            selector.register(control.fileno(), selectors.EVENT_READ)
        signals = self._signals()
        if signals >= 0:
            selector.register(signals, selectors.EVENT_READ)
        while not self._ending.is_set():
            try:
                ready = selector.select(self._pause_s())
                for key, _ in ready:
                    if key.fd == self._wake_in:
                        os.read(self._wake_in, 4096)
                    elif key.fd == signals:
                        for number in os.read(signals, 64):
                            self._on_signal(number)
                    elif control is not None:
                        control.serve()
                if not self._ending.is_set() and (ready or not self._only_looks_for_cuda()):
                    with self._work:
                        self._turn()
            except Exception as error:  # noqa: BLE001 - told once; what can go on goes on
                self._trouble(error)
                self._ending.wait(_BEAT_S)
        selector.close()
        self.budget.left()

    def _trouble(self, error: Exception) -> None:
        """Say it once."""
        if not self.problem:
            self.problem = f"{type(error).__name__}: {error}"[:300]
            if not self.options.quiet:
                log.warning("gpuflight: recording has trouble: %s", self.problem)

    def _only_looks_for_cuda(self) -> bool:
        """Whether this is a look in between, which found nothing."""
        now = time.monotonic()
        if self._looks_for_cuda and now < self._next_turn_s and not cuda_is_loaded():
            return True
        self._next_turn_s = now + _BEAT_S
        return False

    def _pause_s(self) -> float:
        if self.capture.intake is not None and self.capture.intake.waiting_bytes:
            return 0.0 if self.capture.intake.waiting_bytes > 1 << 20 else _BEAT_S / 2
        due = self._window.next_s(self.clock.now_ns())
        beat = _BEAT_S if due is None else min(due, _BEAT_S)
        waits = not self.capture.running and self._window.open and self.capture.why is None and not self._paused
        self._looks_for_cuda = waits
        return min(beat, _LOOK_FOR_CUDA_S) if waits else beat

    def _turn(self) -> None:
        self._turn_capture()
        self._drain()
        self.capture.tick()
        writer = self._writer
        if writer is None:
            return
        if self.options.torch_ranges and not self._torch_follows:
            self._torch_follows = torch_ranges.follow(lambda: None if self._closed.is_set() else self.ranges)
        self._write_metrics(writer)
        self._tell()
        writer.tick()

    def _write_metrics(self, writer: SessionWriter) -> None:
        devices = self._translator.devices if self._translator is not None else {}
        self.metrics.write(writer, socket.gethostname(), self.metrics.numbers(devices))

    def _turn_capture(self) -> None:
        """Switch CUPTI on or off, as the window, the program and other profilers say."""
        now = self.clock.now_ns()
        count = self._kernels_so_far()
        if self._writer is not None and self._writer.stopped:  # the disk or the session is full: end what it costs
            self._window.end("spool_full", now)
            self.capture.why = Why("spool_full", f"the writer has ended the capture: {self._writer.stopped}")
        wanted = self._window.look(now, count)
        torch = profiling_in_torch()
        if self.capture.running and (torch or not wanted):
            self.stacks.stop()
            self.capture.stop()
            self._paused = torch and wanted
            self._drain(everything=True)
        elif wanted and not self.capture.running and not torch:
            if self.capture.why is not None and (now < self._retry_ns or self.capture.binding is None):
                return  # what cannot be imported will not be there later; what is busy may be free
            if self.options.wait_for_cuda and not cuda_is_loaded():
                return
            self._paused = False
            self._retry_ns = now + round(_RETRY_S * 1e9)
            if self.capture.start() and self.capture.binding is not None:
                self.stacks.start(self.capture.binding)
        self._write_windows()

    def _write_windows(self) -> None:
        closed, self._window.closed = self._window.closed, []
        if self._writer is not None:
            for fields, before in closed:  # what was under way when it closed has been written by now
                line = {"pid": self.pid, "app": self.options.name, **fields}
                line["launches_covered"] = self._kernels_so_far() - before
                self._writer.event("deep_window_event", line)

    def _kernels_so_far(self) -> int:
        return self._translator.counts["kernel"] if self._translator is not None else 0

    def _drain(self, *, everything: bool = False) -> None:
        writer, intake = self._writer, self.capture.intake
        if writer is None:
            return
        self.ranges.write(writer)
        if intake is None:
            return
        translator = self._translator
        if translator is None:  # only now: it needs numpy, and most of a process tree never gets here
            translator = self._translator = Translator(writer, self.pid, self.options.name)
            self.budget.watch()
        if self.capture.anchor is not None:
            translator.offset_ns = self.capture.anchor.offset_ns
        translator.stacks.update(self.stacks.take())
        taken = 0
        while (everything or taken < _CHUNKS_A_TURN) and (chunk := intake.take()) is not None:
            taken += 1
            try:
                translator.chunk(chunk)
            except Exception as error:  # noqa: BLE001 - a full disk, or a defect: it costs these records
                intake.dropped[chunk.group] += chunk.size
                self._trouble(error)

    def _tell(self, *, final: bool = False) -> None:
        """The capabilities, devices and losses, whenever they are not what was told last."""
        writer, translator = self._writer, self._translator
        if writer is None:
            return
        self._tell_devices(writer, translator.devices if translator is not None else {})
        state = (
            self.capture.ever_ran,
            str(self.capture.why),
            tuple(self.capture.refused),
            self._paused,
            bool(self.metrics.why),
            self.budget.plain,
        )
        if state == self._told and not final:
            return
        self._told = state
        parts = (self.options, self.capture, translator, self.ranges, self.metrics)
        told = capabilities.lines(*parts, final=final, more=self._more_lines())
        writer.event(
            "capture_capabilities",
            {
                "ts_ns": self.clock.now_ns(),
                "requested_engine": ENGINE,
                "selected_engine": ENGINE if self.capture.ever_ran else "nvidia.none",
                "capabilities": told,
            },
        )

    def _more_lines(self) -> list[dict[str, Any]]:
        found = [self.stacks.line()]
        if self.budget.plain:
            told = f"{self.budget.plain} of {self.budget.windows} windows were left plain, to cost no more than"
            reason = Why("cpu_budget", f"{told} {self.options.cpu_budget_pct:g} % of a core (cpu_budget_pct)")
            found.append(capabilities.entry("window_compression", True, "partial", "gzip", reason))
        if self._paused:
            found.append(capabilities.entry("torch_profiler", True, "skipped", "paused", TORCH_PROFILES))
        if self._control is not None:
            why = None if self._control.listening else Why("no_socket", self._control.why)
            status = "collected" if why is None else "skipped"
            found.append(capabilities.entry("on_demand_control", True, status, "unix_socket", why))
        return found

    def _tell_devices(self, writer: SessionWriter, told: dict[int, dict[str, Any]]) -> None:
        """The GPUs by CUDA's numbers: as CUPTI tells them, before that as NVML and the environment do."""
        devices = dict(told)
        if not devices:
            numbers = self.metrics.numbers({})
            for gpu in self.metrics.gpus:
                if gpu["uuid"] in numbers:
                    number = numbers[gpu["uuid"]]
                    devices[number] = {"id": number, **{k: v for k, v in gpu.items() if k != "index"}}
        if not devices or devices == self._told_devices:
            return
        self._told_devices = devices
        lines = [devices[number] for number in sorted(devices)]
        fields = {"pid": self.pid, "app": self.options.name, "name": "sampling_start", "ts_ns": self.clock.now_ns()}
        writer.event("system_start", {**fields, "devices": [], "gpu_static_devices": lines})

    def _finish(self) -> None:
        writer = self._writer
        if writer is None:
            return
        self.stacks.stop()
        self.capture.stop()
        self.metrics.stop()
        self._window.end("session_stop", self.clock.now_ns())
        self._drain(everything=True)
        self._write_windows()
        self._write_metrics(writer)
        self._tell(final=True)
        for channel in ("device", "scope"):
            reason = capabilities.marker_of(channel, self.capture, self._translator, self.ranges)
            if reason:
                writer.loss(channel, reason)
        ended = {"pid": self.pid, "app": self.options.name, "ts_ns": self.clock.now_ns()}
        writer.event("shutdown", ended)
        writer.close()
        if self._control is not None:
            self._control.close()
        ends, self._wake_in, self._wake_out = (self._wake_in, self._wake_out), -1, -1
        for descriptor in ends:
            os.close(descriptor)

    def _answer(self, request: Request) -> Answer:
        """A question or an order from outside."""
        with self._work:
            return self._obey(request)

    def _obey(self, request: Request) -> Answer:
        now = self.clock.now_ns()
        if request.do == "start":
            if request.stacks is not None:
                self.stacks.every = request.stacks
            self._window.ask(request.for_s, request.launches, request.name or "on_demand", now)
            self.capture.why = None
            self._retry_ns = 0
            self._turn_capture()
        elif request.do == "stop":
            self._window.end("manual", now)
            self._turn_capture()
        if request.do in ("stop", "flush"):
            self.flush()
        why = self.capture.why or (TORCH_PROFILES if self._paused else None)
        if why is None and not self.capture.running and self._window.open:
            why = capabilities.NOT_YET
        translator = self._translator
        return Answer(
            ok=True,
            state=self.state,
            why=str(why) if why is not None else "",
            session_id=self.session_id,
            folder=self.path,
            pid=self.pid,
            app=self.options.name,
            counts=dict(translator.counts) if translator is not None else {},
            lost=sum(capabilities.lost_counts(self.capture, translator, self.ranges).values()),
        )
