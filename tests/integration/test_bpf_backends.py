"""Whichever backend loads a probe, and however it is attached, the numbers are the same."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.fakes.cuda.check import check
from tests.fakes.cuda.oracle import expect, read_log
from tests.integration.bpf_rig import Rig, counts, needs_probes
from tests.integration.cuda_rig import compiled, read_of_ended, why_no_probe

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf import ProbeBackend, ProbeObject, Uprobe, features
from gpuflight.sources.bpf.bcc_backend import BccBackend
from gpuflight.sources.bpf.bcc_compiler import Compiler
from gpuflight.sources.bpf.libbpf import LibbpfBackend
from gpuflight.sources.bpf.probes import Probes
from gpuflight.sources.cuda_probe.probe import CudaProbe

pytestmark = needs_probes

COMPILER = Compiler()  # it keeps what it compiled

BACKENDS: dict[str, Callable[[], ProbeBackend]] = {
    "libbpf": LibbpfBackend,
    "libbpf-classic": lambda: LibbpfBackend(multi=False),
    "bcc": lambda: BccBackend(compiler=COMPILER),
    "bcc-classic": lambda: BccBackend(multi=False, compiler=COMPILER),
    "bcc-without-cookies": lambda: BccBackend(cookies=False, compiler=COMPILER),
}

Load = Callable[..., ProbeObject]


@cache
def why_no_bcc() -> str:
    try:
        BccBackend(compiler=COMPILER).available()
    except SourceUnavailable as error:
        return str(error)
    return ""


needs_bcc = pytest.mark.skipif(bool(why_no_bcc()), reason=why_no_bcc() or "bcc works here")


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("backends"))


@pytest.fixture(params=list(BACKENDS))
def load(request: pytest.FixtureRequest) -> Iterator[Load]:
    """``load(name, …)`` of each backend; what it gives is closed at the end."""
    if request.param.startswith("bcc") and why_no_bcc():
        pytest.skip(why_no_bcc())
    if request.param in ("libbpf", "bcc") and features.why_no_uprobe_multi():
        pytest.skip(features.why_no_uprobe_multi())
    backend = BACKENDS[request.param]()
    loaded: list[ProbeObject] = []

    def load(name: str = "engine", **how: object) -> ProbeObject:
        loaded.append(backend.load(name, **how))  # type: ignore[arg-type]
        return loaded[-1]

    yield load
    for one in loaded:
        one.close()
        one.close()


def detached() -> None:
    """Classic uprobes are detached behind our back, since the kernel takes its time."""
    for thread in threading.enumerate():
        if thread.name == "gpuflight-detach":
            thread.join(60)


def returns(rows: list[tuple[bytes, bytes]]) -> dict[int, int]:
    return {struct.unpack("=II", key)[1]: struct.unpack("=q", value)[0] for key, value in rows}


def calls(records: list[bytes]) -> list[tuple[int, ...]]:
    return [struct.unpack("=10Q", record) for record in records]


def test_calls_cookies_arguments_returns_and_stacks(rig: Rig, load: Load) -> None:
    probe = load(constants={"ring_above": 1 << 40})
    assert not probe.attach_uprobes("on_entry", rig.uprobes(cookie=1 << 20)[:6]).failed
    assert not probe.attach_uprobes("on_return", rig.uprobes(ret=True, cookie=0xFFFF_FF00)[:4]).failed
    rig.call("0:3", "5:1000", f"2:2:{1 << 41}", "4:1")
    expected = {(1 << 20) + number: times for number, times in ((0, 3), (5, 1000), (2, 2), (4, 1))}
    assert counts(probe.read("calls"), rig.pid) == expected
    assert counts(probe.read("calls_percpu"), rig.pid) == expected
    assert returns(probe.read("last_return")) == {0xFFFF_FF00: 36, 0xFFFF_FF02: (1 << 41) + 37}
    assert calls(probe.drain("ring")) == [(rig.pid, (1 << 20) + 2, 1 << 41, 2, 3, 4, 5, 6, 7, 8)] * 2
    assert probe.drain("ring") == []
    ((_, stack),) = probe.read("stacks")
    assert len(stack) == 8 * 64
    assert struct.unpack_from("=Q", stack)[0] & 0xFFF == rig.offsets[2] & 0xFFF
    assert probe.lost("ring") == 0
    assert probe.losses() == {}


def test_one_process_only(rig: Rig, load: Load) -> None:
    probe = load(programs=["on_entry"])
    assert not probe.attach_uprobes("on_entry", rig.uprobes()[:2], pid=os.getpid()).failed
    rig.call("0:5")
    assert probe.read("calls") == []


def test_constants_are_seen_by_the_program(rig: Rig, load: Load) -> None:
    probe = load(programs=["on_entry"], constants={"only_tgid": os.getpid()})
    probe.attach_uprobes("on_entry", rig.uprobes()[:2])
    rig.call("0:5")
    assert probe.read("calls") == []


def test_full_maps_and_full_rings_are_counted(rig: Rig, load: Load) -> None:
    probe = load(programs=["on_entry"], map_entries={"calls": 4, "ring": 4096}, constants={"ring_above": 0})
    probe.attach_uprobes("on_entry", rig.uprobes()[:8])
    rig.call(*(f"{number}:10" for number in range(8)))
    assert sum(counts(probe.read("calls"), rig.pid).values()) == 40
    assert probe.losses() == {0: 40}
    records = probe.drain("ring")
    assert 0 < len(records) < 80
    assert probe.lost("ring") == 80 - len(records)


def test_keys_are_set_deleted_and_cleared(load: Load) -> None:
    probe = load(programs=["on_entry"])
    keys = [struct.pack("=II", 7, number) for number in range(300)]
    for number, key in enumerate(keys):
        probe.update("calls", key, struct.pack("=Q", number))
    assert sorted(probe.read("calls")) == sorted((key, struct.pack("=Q", n)) for n, key in enumerate(keys))
    assert probe.lookup("calls", keys[7]) == struct.pack("=Q", 7)
    assert probe.delete("calls", keys[7]) is True
    assert probe.delete("calls", keys[7]) is False
    assert probe.lookup("calls", keys[7]) is None
    probe.clear("calls")
    assert probe.read("calls") == []
    probe.update("slots", struct.pack("=I", 2), struct.pack("=Q", 9))
    probe.clear("slots")
    assert [value for _, value in probe.read("slots")] == [bytes(8)] * 4
    with pytest.raises(KeyError):
        probe.read("no_such_map")


def test_a_bad_place_costs_itself_and_a_closed_link_counts_nothing(rig: Rig, load: Load) -> None:
    probe = load(programs=["on_entry"])
    missing = Uprobe(f"{rig.library}.gone", 64, 2, symbol="no such file")
    link = probe.attach_uprobes("on_entry", [*rig.uprobes()[:3], missing])
    assert [uprobe.symbol for uprobe, _ in link.failed] == ["no such file"]
    assert link.failed[0][1]
    rig.call("1:1")
    assert counts(probe.read("calls"), rig.pid) == {101: 1}
    link.close()
    link.close()
    detached()
    rig.call("1:5")
    assert counts(probe.read("calls"), rig.pid) == {}
    with pytest.raises(KeyError):
        probe.attach_uprobes("no_such_program", rig.uprobes())


def test_names_that_a_probe_does_not_have(load: Load) -> None:
    for how in ({"programs": ["nothing"]}, {"map_entries": {"nothing": 1}}):
        with pytest.raises(KeyError):
            load(**how)


def test_own_cost_is_counted(rig: Rig, load: Load) -> None:
    probe = load(programs=["on_entry"])
    probe.attach_uprobes("on_entry", rig.uprobes()[:2])
    rig.call("0:100", "1:50")
    (cost,) = probe.costs()
    if cost.run_count is None:
        pytest.skip("the kernel does not count what programs cost")
    assert cost.program == "on_entry"
    assert cost.run_count == 150
    assert cost.run_time_ns is not None
    assert cost.run_time_ns > 0


def test_nothing_stays_when_the_process_is_killed(rig: Rig, load: Load, tmp_path: Path) -> None:
    """Links are descriptors, so the kernel detaches whatever ends the process."""
    probe = load(programs=["on_entry"])
    kind = f"{type(probe).__module__}.{probe.why_classic}"
    how = "BccBackend" if probe.backend == "bcc" else "LibbpfBackend"
    module = "bcc_backend" if probe.backend == "bcc" else "libbpf"
    switches = "cookies=False" if "cookies" in kind else "multi=False" if probe.why_classic else ""
    probe.close()
    code = f"""
import os, signal
from gpuflight.sources.bpf import Uprobe
from gpuflight.sources.bpf.{module} import {how}
probe = {how}({switches}).load("engine", programs=["on_entry"])
link = probe.attach_uprobes("on_entry", [Uprobe({rig.library!r}, {rig.offsets[0]})])
print(len(link.attached), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "1", done.stderr
    rig.call("0:10")  # on a breakpoint that nobody serves this would end with SIGTRAP


@needs_bcc
def test_both_backends_see_the_same_at_the_same_time(rig: Rig) -> None:
    loaded = {name: make().load("engine", constants={"ring_above": 1 << 40}) for name, make in BACKENDS.items()}
    try:
        for probe in loaded.values():
            assert not probe.attach_uprobes("on_entry", rig.uprobes()[:8]).failed
            assert not probe.attach_uprobes("on_return", rig.uprobes(ret=True)[:8]).failed
        rig.call(*(f"{number}:{number * 7 + 1}:{number << 38}" for number in range(8)))
        for map_name in ("calls", "calls_percpu", "last_return"):
            rows = {
                name: sorted((key, value) for key, value in probe.read(map_name) if counts([(key, value)], rig.pid))
                for name, probe in loaded.items()
            }
            first = rows["libbpf"]
            assert len(first) == 8
            assert all(found == first for found in rows.values()), map_name
        drained = {name: calls(probe.drain("ring")) for name, probe in loaded.items()}
        assert drained["libbpf"]
        assert all(found == drained["libbpf"] for found in drained.values())
    finally:
        for probe in loaded.values():
            probe.close()


# --- the CUDA probe --------------------------------------------------------------------------------------------------

SCRIPT = (
    "0 screate 1 0", "0 screate 2 1", "0 ecreate 1",
    "0 launch f0 10 2 1 32 4 1 0 s1", "1 launch f1 1 1 1 64 1 1 49152 0", "0 launchptsz f2 1 1 1 64 1 1 0 s2",
    "0 launchcoop f0 3 1 1 128 1 1 0 s2", "2 launchex f3 7 1 1 9 1 1 0 2", "0 malloc 1 4096", "0 malloc 2 123456",
    "0 malloc 3 1152921504606846976", "0 managed 4 65536", "0 memcpy 1000 1", "1 memcpyasync 100000 2 s2",
    "0 memcpy 5 9", "0 memset 1000", "0 erecord 1 s1", "0 swait s2 1", "0 esync 1", "0 ssync s1", "0 free 1",
    "0 free 5", "0 setdevice 99", "0 setdevice 1", "0 launch f0 1 1 1 1 1 1 0 0", "0 usleep 150", "0 sync",
    "0 setdevice 0", "0 launch f1 100 100 1 1024 1 1 0 s2", "0 ssync s2", "0 sdestroy 1", "0 sync",
)  # fmt: skip
"""Every stream is waited for: where only bcc works, the end of a process is not seen in the kernel (CO-RE only)."""


@pytest.mark.parametrize("name", BACKENDS)
def test_the_cuda_probe_counts_what_the_fake_runtime_logs(name: str, tmp_path: Path) -> None:
    if why_no_probe():
        pytest.skip(why_no_probe())
    if name.startswith("bcc") and why_no_bcc():
        pytest.skip(why_no_bcc())
    fakes = compiled().copy(tmp_path / "cuda")
    probe = CudaProbe(Probes(backends=[BACKENDS[name]()]))
    try:
        assert probe.backend == name.partition("-")[0]
        attachment = probe.attach(str(fakes.runtime), "runtime")
        assert attachment.failed == []
        pid = fakes.run(list(SCRIPT))
        if probe.without:
            probe.forget([pid])  # as the collector does, which finds ends of processes in /proc too
        rows, ended_ns = read_of_ended(probe, pid)
        assert not any(rows.losses.values())
        expected = expect(read_log(fakes.log, time.monotonic_ns()), pid, ended_ns)
        assert sum(sums.count for sums in expected.launches.values()) == 7
        check(rows, pid, expected)
    finally:
        probe.close()
