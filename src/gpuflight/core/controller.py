"""The controller: runs rounds, in the background or on demand, and hands each to the subscribers."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from gpuflight import __version__
from gpuflight.bottlenecks.engine import Judgement
from gpuflight.bottlenecks.survey import RuleState
from gpuflight.collectors.base import Collector
from gpuflight.core.expansion import CollectorRunner, ExpansionLimits, expand_world
from gpuflight.core.history import History
from gpuflight.core.lockfile import LockFile
from gpuflight.core.own_cost import OwnCostMeter
from gpuflight.errors import GpuflightError, InputError
from gpuflight.graph.store import LiveStore
from gpuflight.rounds import Coverage, Environment, Round
from gpuflight.sources.world import World

log = logging.getLogger(__name__)

_STOP_DEADLINE_S = 10.0


class HistorySettings(Protocol):
    """What is kept of past rounds."""

    max_bytes: int


class ControllerSettings(Protocol):
    """What of ``gpuflight.settings.Settings`` the controller uses."""

    interval_s: float
    tombstone_rounds: int

    @property
    def limits(self) -> ExpansionLimits:
        """How far one round may go."""

    @property
    def history(self) -> HistorySettings:
        """What is kept of past rounds."""


class Publisher(Protocol):
    """Where completed rounds go (``subscribers.delivery.SubscriberSet``); ``publish`` must not block."""

    def publish(self, done: Round, /) -> None:
        """Take over a round."""


class Judge(Protocol):
    """Who judges rounds (``bottlenecks.engine.Engine``)."""

    def judge(self, done: Round, /) -> Judgement:
        """What the round shows. Never raises for a rule's sake."""

    def clear(self) -> None:
        """Forget everything."""

    def survey(self) -> list[RuleState]:
        """What every rule says about the last round, and why it cannot."""


class Controller:
    """Collects rounds of one World.

    ``start`` and ``stop`` count references: the background thread runs from the first start to the last stop. A start
    that fails changes nothing. All methods are thread-safe. ``lock_path`` names a lock file that is held while the
    background thread runs, so that a second instance is refused before it touches anything.

    One instance per process is the rule (``Controller.shared``); tests and replays make their own.
    """

    _shared: Controller | None = None
    _shared_lock = threading.Lock()

    def __init__(
        self,
        world: World,
        *,
        settings: ControllerSettings,
        collectors: Sequence[Collector],
        subscribers: Publisher | None = None,
        lock_path: str | None = None,
        judge: Judge | None = None,
    ) -> None:
        self.world = world
        self.settings = settings
        self.subscribers = subscribers
        self.history = History(settings.history.max_bytes)
        self.latest: Round | None = None
        self.judge = judge
        self.failed_rounds_count = 0
        self._runners = [CollectorRunner(c) for c in sorted(collectors, key=lambda c: (-c.precedence, c.name))]
        self._disabled: frozenset[str] = frozenset()
        self._asked_last_round: list[CollectorRunner] = []
        self._store = LiveStore(settings.tombstone_rounds)
        self._number = 0
        self._environment: Environment | None = None
        self._own_cost = OwnCostMeter()
        self._lock_file = LockFile(lock_path) if lock_path else None
        self._references = 0
        self._lifecycle = threading.RLock()
        self._round_lock = threading.Lock()
        self._condition = threading.Condition()
        self._wanted = False
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._closed = False

    @classmethod
    def shared(cls, build: Callable[[], Controller] | None = None) -> Controller:
        """The process's controller, made by ``build`` at the first call. Raises GpuflightError without one to give."""
        with cls._shared_lock:
            if cls._shared is None or cls._shared._closed:
                if build is None:
                    raise GpuflightError("no controller in this process yet")
                cls._shared = build()
            return cls._shared

    @property
    def collectors(self) -> list[Collector]:
        """The collectors in order of precedence."""
        return [runner.collector for runner in self._runners]

    @property
    def disabled(self) -> frozenset[str]:
        """Names of the collectors that are switched off."""
        return self._disabled

    def set_enabled(self, name: str, enabled: bool) -> bool:
        """Switch a collector on or off from the next round on; True if that changed anything. What it alone reported
        then ends like anything that is no longer there. Raises InputError if there is no such collector."""
        with self._lifecycle:
            known = [runner.collector.name for runner in self._runners]
            if name not in known:
                raise InputError(f"there is no collector {name!r} here; there are: {', '.join(known) or 'none'}")
            before = self._disabled
            self._disabled = before - {name} if enabled else before | {name}
            return self._disabled != before

    @property
    def running(self) -> bool:
        """Whether the background thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def references_count(self) -> int:
        """How many starts have not been stopped."""
        return self._references

    def start(self) -> int:
        """Begin, or share, background rounds; returns the number of references. Raises AlreadyRunning, OSError."""
        with self._lifecycle:
            if self._closed:
                raise GpuflightError("this controller was closed")
            if self._references == 0:
                if self._lock_file is not None:
                    self._lock_file.acquire()
                try:
                    self._stopping = False
                    thread = threading.Thread(target=self._run, name="gpuflight-rounds", daemon=True)
                    thread.start()
                except BaseException:
                    if self._lock_file is not None:
                        self._lock_file.release()
                    raise
                self._thread = thread
            self._references += 1
            return self._references

    def stop(self) -> int:
        """Give back one reference; the last one ends the background rounds. Returns the references left.

        Stopping what was never started is not an error and changes nothing.
        """
        with self._lifecycle:
            if self._references == 0:
                return 0
            self._references -= 1
            if self._references == 0:
                self._end_thread()
            return self._references

    def close(self) -> None:
        """End background rounds whatever the references, and give back collectors and sources. May be called twice."""
        with self._lifecycle:
            if self._closed:
                return
            self._references = 0
            self._end_thread()
            self._closed = True
            for runner in self._runners:
                runner.close()
            self.world.close()

    def clear(self) -> None:
        """Forget graph and history; the next round starts anew."""
        with self._round_lock:
            self._store.clear()
            if self.judge is not None:
                self.judge.clear()
            self.history.clear()
            self.latest = None

    def survey(self) -> list[RuleState]:
        """What every rule says about the last round; empty where nothing judges. Waits for the round under way."""
        with self._round_lock:
            return self.judge.survey() if self.judge is not None else []

    def trigger(self, timeout_s: float | None = None) -> Round:
        """A round that begins after this call. Raises TimeoutError if it is not done in time."""
        if not self.running:
            return self.run_round()
        with self._condition:
            # A round that is under way began before this call: wait for the one after it.
            wanted = self._number + 1
            self._wanted = True
            self._condition.notify_all()
            done = self._condition.wait_for(lambda: self.latest is not None and self.latest.number >= wanted, timeout_s)
            latest = self.latest
        if not done or latest is None:
            raise TimeoutError(f"no round within {timeout_s:g} s")
        return latest

    def run_round(self) -> Round:
        """Collect one round now, in this thread, and publish it."""
        with self._round_lock:
            collecting = gc.isenabled()
            gc.disable()  # a round makes many objects and no cycles (graph/store.py)
            try:
                done = self._round()
            finally:
                if collecting:
                    gc.enable()
        if self.subscribers is not None:
            self.subscribers.publish(done)
        with self._condition:
            self._condition.notify_all()
        return done

    def _round(self) -> Round:
        number = self._number = self._number + 1
        self.world.begin_round(number)
        time_ns, monotonic_s = self.world.clock.wall_ns(), self.world.clock.monotonic_s()
        started_s, started_cpu_s = time.monotonic(), time.thread_time()
        runners = self._enabled_runners()
        expansion = expand_world(self.world, runners, self.settings.limits)
        collected_s = time.monotonic()
        advance = self._store.advance(number, expansion.nodes, expansion.edges)
        own = Coverage(
            collector="core",
            status="ok",
            wall_ms=round((time.monotonic() - collected_s) * 1e3, 3),
            cpu_ms=round((time.thread_time() - started_cpu_s) * 1e3, 3),
            nodes_count=len(advance.graph.nodes),
            edges_count=len(advance.graph.edges),
        )
        if advance.dangling_count:
            own.losses["edges to things that no collector reported"] = advance.dangling_count
        done = Round(
            number=number,
            time_ns=time_ns,
            duration_s=time.monotonic() - started_s,
            graph=advance.graph,
            diff=advance.diff,
            coverage=[*expansion.coverage, own],
            env=self._env(),
            monotonic_s=round(monotonic_s, 6),
            truncated_by=expansion.truncated_by,
            own_cost=self._own_cost.read(),
        )
        if self.judge is not None:
            judgement = self.judge.judge(done)
            done.findings, done.cleared = judgement.findings, judgement.cleared
            done.coverage.append(judgement.coverage)
        self.latest = done
        self.history.append(done)
        return done

    def _enabled_runners(self) -> list[CollectorRunner]:
        disabled = self._disabled
        runners = [runner for runner in self._runners if runner.collector.name not in disabled]
        for runner in runners:
            if runner not in self._asked_last_round:
                runner.forget()  # its last answer is from before it was switched off
        self._asked_last_round = runners
        return runners

    def _env(self) -> Environment:
        if self._environment is None:
            read = self.world.fs.read

            def text(path: str) -> str:
                try:
                    return read(path).decode("utf-8", "backslashreplace").strip()
                except OSError:
                    return ""

            machine_id, boot_id = self.world.procfs.identity()
            self._environment = Environment(
                hostname=text("/proc/sys/kernel/hostname"),
                machine_id=machine_id,
                boot_id=boot_id,
                kernel=text("/proc/sys/kernel/osrelease"),
                version=__version__,
            )
        return self._environment

    def _run(self) -> None:
        next_s = time.monotonic()
        while True:
            with self._condition:
                while not self._stopping and not self._wanted:
                    left_s = next_s - time.monotonic()
                    if left_s <= 0:
                        break
                    self._condition.wait(left_s)
                if self._stopping:
                    return
                self._wanted = False
            try:
                self.run_round()
            except Exception:  # a round that fails must not be the last one
                self.failed_rounds_count += 1
                log.exception("round %d failed", self._number)
            # Fixed rate; what was missed is skipped, not made up for.
            next_s = max(next_s + self.settings.interval_s, time.monotonic())

    def _end_thread(self) -> None:
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(_STOP_DEADLINE_S)
            if thread.is_alive():
                log.warning("the round under way did not end within %g s; it is left behind", _STOP_DEADLINE_S)
        if self._lock_file is not None:
            self._lock_file.release()
