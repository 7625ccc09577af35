"""Random programs on the fake runtime, whose own log is the oracle for every aggregate of the probe."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.fakes.cuda.build import Fakes
from tests.fakes.cuda.check import check
from tests.fakes.cuda.oracle import expect, read_log
from tests.integration.cuda_rig import compiled, loaded, read_of_ended, why_no_probe

from gpuflight.sources.cuda_probe.probe import CudaProbe
from gpuflight.sources.cuda_probe.rows import ProcessRow

pytestmark = pytest.mark.skipif(bool(why_no_probe()), reason=why_no_probe())

_STREAM = st.sampled_from(["0", "1", "2", "s1", "s2", "s3", "s4"])
_SIZE = st.sampled_from([0, 1, 4096, 123_456, 1 << 33, 1 << 60])
_SMALL = st.integers(0, 3)
_COPY = st.sampled_from([0, 1, 1000, 100_000])
_KIND = st.integers(0, 5)
_GRID = st.tuples(*[st.integers(1, 70_000)] * 2, st.just(1)).map(lambda size: " ".join(map(str, size)))
_BLOCK = st.tuples(st.integers(1, 64), st.integers(1, 20), st.integers(1, 2)).map(lambda size: " ".join(map(str, size)))


def _say(form: str, *values: st.SearchStrategy[object]) -> st.SearchStrategy[str]:
    return st.tuples(*values).map(lambda chosen: form.format(*chosen))


_LAUNCH = st.sampled_from(["launch", "launch", "launch", "launchptsz", "launchcoop", "launch__", "launchex"])
_CALLS = st.one_of(
    _say("{} f{} {} {} {} {}", _LAUNCH, _SMALL, _GRID, _BLOCK, st.sampled_from([0, 49152]), _STREAM),
    _say("{} f{} {} {} {} {}", _LAUNCH, _SMALL, _GRID, _BLOCK, st.sampled_from([0, 49152]), _STREAM),
    _say("{}", st.sampled_from(["sync", "sync", "reset"])),
    _say("{} {}", st.sampled_from(["ssync", "ssync", "ssyncptsz", "squery"]), _STREAM),
    _say("screate {} {}", st.integers(1, 4), st.integers(0, 1)),
    _say("sdestroy {}", st.integers(1, 4)),
    _say("ecreate {}", _SMALL),
    _say("edestroy {}", _SMALL),
    _say("{} {} {}", st.sampled_from(["erecord", "erecord", "erecordptsz"]), _SMALL, _STREAM),
    _say("{} {}", st.sampled_from(["esync", "equery"]), _SMALL),
    _say("swait {} {}", _STREAM, _SMALL),
    _say("setdevice {}", st.sampled_from([0, 1, 2, 99])),
    _say("{} {} {}", st.sampled_from(["malloc", "managed", "mallochost"]), st.integers(0, 5), _SIZE),
    _say("mallocasync {} {} {}", st.integers(0, 5), _SIZE, _STREAM),
    _say("pitch {} {} {}", st.integers(0, 5), st.integers(1, 2000), st.integers(1, 9)),
    _say("malloc3d {} {} {} {}", st.integers(0, 5), st.integers(1, 2000), st.integers(1, 9), st.integers(1, 9)),
    _say("hostregister {} {}", st.integers(6, 8), _COPY.map(lambda size: size + 1)),
    _say("{} {}", st.sampled_from(["free", "free", "freehost"]), st.integers(0, 5)),
    _say("freeasync {} {}", st.integers(0, 5), _STREAM),
    _say("hostunregister {}", st.integers(6, 8)),
    _say("memcpy {} {}", _COPY, _KIND),
    _say("memcpyasync {} {} {}", _COPY, _KIND, _STREAM),
    _say("memcpy2d {} {} {}", st.integers(0, 300), st.integers(0, 30), _KIND),
    _say("memcpy2dasync {} {} {} {}", st.integers(0, 300), st.integers(0, 30), _KIND, _STREAM),
    _say("memcpy3d {} {} {} {}", st.integers(0, 99), st.integers(0, 9), st.integers(0, 9), _KIND),
    _say("batch {} {} {}", _STREAM, st.integers(0, 64), _COPY),
    _say("memset {}", _COPY),
    _say("memsetasync {} {}", _COPY, _STREAM),
    _say("memset3d {} {} {}", st.integers(0, 99), st.integers(0, 9), st.integers(0, 9)),
    _say("usleep {}", st.sampled_from([1, 150])),
)
_LINES = st.lists(st.tuples(st.sampled_from([0, 0, 0, 1, 2]), _CALLS), min_size=5, max_size=60)


@pytest.fixture(scope="module")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CudaProbe, Fakes]]:
    fakes = compiled().copy(tmp_path_factory.mktemp("property") / "cuda")
    with loaded() as probe:
        probe.attach(str(fakes.runtime), "runtime")
        yield probe, fakes


@pytest.fixture(scope="module")
def both_layers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CudaProbe, Fakes]]:
    """The runtime passes its calls on to a driver that is hooked too."""
    fakes = compiled().copy(tmp_path_factory.mktemp("layers") / "cuda")
    with loaded() as probe:
        probe.attach(str(fakes.runtime), "runtime")
        probe.attach(str(fakes.driver), "driver")
        yield probe, fakes


def _agree(
    probe: CudaProbe, fakes: Fakes, script: list[str], environment: Mapping[str, str] | None = None
) -> ProcessRow:
    for old in (fakes.log, *fakes.folder.glob("script*")):
        Path(old).unlink(missing_ok=True)
    before = probe.read().losses
    pid = fakes.run(script, environment=environment)
    rows, ended = read_of_ended(probe, pid)
    # Stacks of so many programs fall on one place now and then: counted, and told of no other aggregate.
    assert {**rows.losses, "stacks": 0} == {**before, "stacks": 0}
    note("\n".join(script))
    note(fakes.log.read_text() if fakes.log.exists() else "no call was written down")
    check(rows, pid, expect(read_log(fakes.log, time.monotonic_ns()), pid, ended))
    return next(row for row in rows.processes if row.pid == pid)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(lines=_LINES)
def test_every_aggregate_is_what_the_log_says(hooked: tuple[CudaProbe, Fakes], lines: list[tuple[int, str]]) -> None:
    probe, fakes = hooked
    made = [f"0 screate {number} {number % 2}" for number in (1, 2)] + ["0 ecreate 1"]
    _agree(probe, fakes, made + [f"{thread} {call}" for thread, call in lines])


@settings(max_examples=examples(15), deadline=None, suppress_health_check=list(HealthCheck))
@given(lines=st.lists(_CALLS.filter(lambda call: "reset" not in call), min_size=1, max_size=20), spread=st.booleans())
def test_what_is_captured_into_a_graph_does_not_run(
    hooked: tuple[CudaProbe, Fakes], lines: list[str], spread: bool
) -> None:
    probe, fakes = hooked
    spreading = ["0 erecord 1 s1", "0 swait s2 1"] if spread else []
    _agree(
        probe,
        fakes,
        [
            *("0 screate 1 1", "0 screate 2 1", "0 ecreate 1", "0 begincapture s1"),
            *spreading,
            *(f"0 {line}" for line in lines),
            *("0 endcapture s1 0", "0 graphlaunch 0 s1", "0 launch f0 1 1 1 1 1 1 0 s2", "0 ssync s1", "0 sync"),
        ],
    )


@settings(max_examples=examples(20), deadline=None, suppress_health_check=list(HealthCheck))
@given(lines=_LINES)
def test_a_call_that_passes_both_layers_is_counted_once(
    both_layers: tuple[CudaProbe, Fakes], lines: list[tuple[int, str]]
) -> None:
    probe, fakes = both_layers
    made = ["0 screate 1 1", "0 screate 2 0", "0 ecreate 1", "0 launch f0 1 1 1 1 1 1 0 s1"]
    script = made + [f"{thread} {call}" for thread, call in lines]
    process = _agree(probe, fakes, script, {"FAKE_DRIVER": str(fakes.driver)})
    assert process.launches_inner == process.launches
    assert not process.driver_calls


def test_the_log_is_there_to_be_compared(hooked: tuple[CudaProbe, Fakes]) -> None:
    """A log that stays empty would agree with a probe that sees nothing."""
    _, fakes = hooked
    fakes.run(["0 launch f0 1 1 1 1 1 1 0 0", "0 sync"])
    assert len(read_log(fakes.log, 0)) >= 2
    shutil.copy(fakes.log, fakes.folder / "kept.log")
