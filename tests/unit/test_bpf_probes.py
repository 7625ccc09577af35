"""World.probes on made-up backends: which one is taken, what is said when none can, and the tape under its answers."""

from __future__ import annotations

import ctypes.util
import errno
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from msgspec import msgpack

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf import Link, ProbeBackend, ProbeObject, ProgramCost, Uprobe, features, library
from gpuflight.sources.bpf import libbpf as libbpf_module
from gpuflight.sources.bpf.capabilities import find_capabilities
from gpuflight.sources.bpf.costs import Statistics, program_cost
from gpuflight.sources.bpf.probes import Probes
from gpuflight.sources.clock import SystemClock
from gpuflight.sources.open import open_world
from gpuflight.sources.recording import Tape


class FakeLink(Link):
    def __init__(self, attached: Sequence[Uprobe], failed: list[tuple[Uprobe, str]]) -> None:
        self.attached = list(attached)
        self.failed = failed
        self.closed = False

    def close(self) -> None:
        self.closed = True


class FakeObject(ProbeObject):
    """Answers that differ each time; ``asked`` counts them."""

    def __init__(self, name: str, backend: str) -> None:
        self.name = name
        self.backend = backend
        self.why_classic = "switched off"
        self.asked = 0
        self.links: list[FakeLink] = []
        self.rings: list[list[bytes]] = []

    def attach_uprobes(self, program: str, uprobes: Sequence[Uprobe], pid: int = 0) -> Link:
        link = FakeLink(uprobes[:-1], [(uprobes[-1], "Invalid argument")])
        self.links.append(link)
        return link

    def attach(self, program: str) -> Link:
        if program == "on_fork":
            raise SourceUnavailable("tracefs is not mounted", "mount it")
        link = FakeLink([], [])
        self.links.append(link)
        return link

    def read(self, map_name: str) -> list[tuple[bytes, bytes]]:
        self.asked += 1
        if map_name == "broken":
            raise OSError(errno.EPERM, "not permitted")
        return [(b"k", bytes([self.asked])), (b"\xff\0", b"")]

    def lookup(self, map_name: str, key: bytes) -> bytes | None:
        return b"v" if key == b"k" else None

    def update(self, map_name: str, key: bytes, value: bytes) -> None:
        self.asked += 1

    def delete(self, map_name: str, key: bytes) -> bool:
        return key == b"k"

    def clear(self, map_name: str) -> None:
        self.asked += 1

    def drain(self, map_name: str, limit: int = 65536) -> list[bytes]:
        return self.rings.pop(0) if self.rings else []

    def lost(self, map_name: str) -> int:
        return 3

    def losses(self) -> dict[int, int]:
        return {1: 4}

    def run_iter(self, link: Link) -> bytes:
        assert isinstance(link, FakeLink)
        return b"tasks"

    def costs(self) -> list[ProgramCost]:
        return [ProgramCost("on_entry", 5, 100, 0), ProgramCost("on_return")]

    def close(self) -> None:
        self.closed = True
        for link in self.links:
            link.close()


class FakeBackend(ProbeBackend):
    def __init__(self, name: str, refuse: str = "", refuse_load: str = "") -> None:
        self.name = name
        self.refuse = refuse
        self.refuse_load = refuse_load
        self.loaded: list[FakeObject] = []

    def available(self) -> None:
        if self.refuse:
            raise SourceUnavailable(self.refuse, f"what to do about {self.name}")

    def load(
        self,
        name: str,
        *,
        programs: Sequence[str] | None = None,
        map_entries: Mapping[str, int] | None = None,
        constants: Mapping[str, int] | None = None,
    ) -> ProbeObject:
        if self.refuse_load:
            raise SourceUnavailable(self.refuse_load, f"what to do about {self.name}")
        self.loaded.append(FakeObject(name, self.name))
        return self.loaded[-1]


def test_the_best_backend_is_taken() -> None:
    first, second = FakeBackend("libbpf"), FakeBackend("bcc")
    probes = Probes(backends=[first, second])
    opened = probes.open("cuda")
    assert opened is first.loaded[0]
    assert not second.loaded
    probes.close()
    assert opened.closed
    probes.close()


@pytest.mark.parametrize("first", [FakeBackend("libbpf", refuse="no"), FakeBackend("libbpf", refuse_load="no BTF")])
def test_the_next_one_is_taken_where_the_best_cannot(first: FakeBackend) -> None:
    second = FakeBackend("bcc")
    assert Probes(backends=[first, second]).open("cuda").backend == "bcc"


def test_where_none_can_what_the_best_one_misses_is_said() -> None:
    probes = Probes(backends=[FakeBackend("libbpf", refuse="no library"), FakeBackend("bcc", refuse="no compiler")])
    with pytest.raises(SourceUnavailable) as refused:
        probes.open("cuda")
    assert (refused.value.reason, refused.value.hint) == ("no library", "what to do about libbpf")


def test_switched_off_is_a_reason_of_its_own() -> None:
    probes = Probes(backend="off")
    assert probes.backends() == []
    with pytest.raises(SourceUnavailable, match="switched off"):
        probes.open("cuda")
    capabilities = probes.capabilities()
    assert (capabilities.backend, capabilities.reason) == ("", "probes are switched off")


@pytest.mark.parametrize(("choice", "names"), [("auto", ["libbpf", "bcc"]), ("libbpf", ["libbpf"]), ("bcc", ["bcc"])])
def test_settings_choose_among_the_real_ones(choice: str, names: list[str]) -> None:
    assert [backend.name for backend in Probes(backend=choice).backends()] == names  # type: ignore[arg-type]


def test_capabilities_say_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(reason: str) -> Callable[[], None]:
        def check() -> None:
            raise SourceUnavailable(reason, f"hint for {reason}")

        return check

    for name in ("rights", "btf", "uprobe_multi", "classic_uprobes", "tracefs", "statistics"):
        monkeypatch.setattr(features, f"require_{name}", refuse(name))
    found = find_capabilities([FakeBackend("libbpf", refuse="no library"), FakeBackend("bcc", refuse="no compiler")])
    assert (found.backend, found.reason, found.hint) == ("", "no library", "what to do about libbpf")
    assert [(item.name, item.ok) for item in found.items] == [
        (name, False)
        for name in (
            "backend libbpf", "backend bcc", "right to load", "BTF", "uprobe_multi", "uprobes", "tracefs", "own cost",
        )
    ]  # fmt: skip
    assert found.item("BTF").hint == "hint for btf"
    with pytest.raises(KeyError):
        found.item("wings")
    found = find_capabilities([FakeBackend("libbpf", refuse="no library"), FakeBackend("bcc")])
    assert (found.backend, found.reason, found.hint) == ("bcc", "", "")


@pytest.mark.parametrize(
    ("effective", "missing"),
    [
        (0, ["CAP_BPF", "CAP_PERFMON"]),
        (1 << 38, ["CAP_BPF"]),
        (1 << 39, ["CAP_PERFMON"]),
        (1 << 38 | 1 << 39, []),
        (1 << 21, []),
    ],
)
def test_rights_that_are_missing_are_named(effective: int, missing: list[str]) -> None:
    assert features.missing_rights(effective) == missing


def test_other_machines_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(SourceUnavailable, match="no probes for riscv64"):
        features.require_rights()


# --- no library -----------------------------------------------------------------------------------------------------


def test_without_libbpf_there_is_one_reason_and_one_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libbpf_module, "load_library", lambda: library.LibBpf("libgpuflight-no-such-bpf.so.9"))
    backend = libbpf_module.LibbpfBackend()
    for attempt in (backend.available, lambda: backend.load("engine")):
        with pytest.raises(SourceUnavailable) as refused:
            attempt()
        assert refused.value.reason.startswith("libgpuflight-no-such-bpf.so.9 cannot be loaded")
        assert "apt install libbpf1" in refused.value.hint


def test_a_library_without_the_functions_is_called_too_old() -> None:
    name = ctypes.util.find_library("c")
    if name is None:
        pytest.skip("no C library by name")
    with pytest.raises(SourceUnavailable, match="is too old"):
        library.LibBpf(name)


# --- own cost -------------------------------------------------------------------------------------------------------


def test_a_cost_that_nobody_counts_is_unknown() -> None:
    assert program_cost("on_entry", -1, counting=False) == ProgramCost("on_entry", None, None, None)


def test_the_right_to_count_is_asked_once_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    asked: list[int] = []

    def enable() -> int:
        asked.append(os.open("/dev/null", os.O_RDONLY))
        return asked[-1]

    monkeypatch.setattr("gpuflight.sources.bpf.syscalls.enable_stats", enable)
    statistics = Statistics()
    statistics.start()
    statistics.start()
    statistics.stop()
    assert statistics.counting
    statistics.stop()
    assert len(asked) == 1
    with pytest.raises(OSError):
        os.fstat(asked[0])


def test_it_is_not_asked_where_nobody_wants_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuflight.sources.bpf.syscalls.enable_stats", lambda: pytest.fail("asked"))
    statistics = Statistics()
    monkeypatch.setattr("gpuflight.sources.bpf.costs.STATISTICS", statistics)
    Probes(backends=[FakeBackend("libbpf")], own_cost=False).open("cuda")
    statistics.start()
    assert statistics.why_not == "switched off by the setting probes.own_cost"
    statistics.stop()


# --- the tape -------------------------------------------------------------------------------------------------------

PLACES = [Uprobe("/lib/a.so", 16, 1, symbol="a"), Uprobe("/lib/a.so", 32, 2, True, "b")]


def ask(probe: ProbeObject) -> list[object]:
    """Everything that a collector may ask, in a form that can be compared."""
    link = probe.attach_uprobes("on_entry", PLACES)
    iterator = probe.attach("each_task")
    try:
        probe.attach("on_fork")
        refused = ""
    except SourceUnavailable as error:
        refused = f"{error.reason}|{error.hint}"
    try:
        probe.read("broken")
        broken = 0
    except OSError as error:
        broken = error.errno or 0
    probe.update("calls", b"k", b"v")
    probe.clear("calls")
    answers = [
        probe.backend, probe.why_classic, list(link.attached), link.failed, refused, broken, probe.read("calls"),
        probe.lookup("calls", b"k"), probe.lookup("calls", b"x"), probe.delete("calls", b"k"),
        probe.delete("calls", b"x"), probe.lost("ring"), probe.losses(), probe.run_iter(iterator), probe.costs(),
    ]  # fmt: skip
    link.close()
    assert link.attached == []
    return answers


def test_a_replay_answers_as_the_kernel_did_and_loads_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "recording")
    backend = FakeBackend("libbpf")
    tape = Tape.record(path, SystemClock())
    probes = Probes(tape, backends=[backend])
    recorded = []
    for number in (1, 2):
        tape.begin_round(number)
        probes.begin_round(number)
        probe = probes.open("cuda")
        recorded.append(ask(probe))
        probe.close()
        assert all(link.closed for link in backend.loaded[-1].links)
    probes.close()
    tape.close()

    tape = Tape.replay(path)
    probes = Probes(tape, backends=[])
    assert probes.replaying
    for number in (1, 2):
        tape.begin_round(number)
        probes.begin_round(number)
        probe = probes.open("cuda")
        assert ask(probe) == recorded[number - 1]
        probe.close()


def test_a_ring_buffer_is_replayed_in_the_rounds_it_was_drained_in(tmp_path: Path) -> None:
    path = str(tmp_path / "recording")
    backend = FakeBackend("libbpf")
    tape = Tape.record(path, SystemClock())
    probes = Probes(tape, backends=[backend])
    tape.begin_round(1)
    probes.begin_round(1)
    probe = probes.open("cuda")
    backend.loaded[0].rings = [[b"a", b"b"], [b"c"], [b"d"], []]
    assert probe.drain("ring") + probe.drain("ring") == [b"a", b"b", b"c"]
    for number, drained in ((2, [b"d"]), (3, [])):
        tape.begin_round(number)
        probes.begin_round(number)
        assert probe.drain("ring") == drained
    probes.close()
    tape.close()

    tape = Tape.replay(path)
    probes = Probes(tape)
    seen = []
    for number in (1, 2, 3):
        tape.begin_round(number)
        probes.begin_round(number)
        if number == 1:
            probe = probes.open("cuda")
        seen.append(probe.drain("ring") + (probe.drain("ring") if number == 1 else []))
    assert seen == [[b"a", b"b", b"c"], [b"d"], []]


def test_objects_of_one_name_are_told_apart(tmp_path: Path) -> None:
    path = str(tmp_path / "recording")
    tape = Tape.record(path, SystemClock())
    probes = Probes(tape, backends=[FakeBackend("libbpf")])
    tape.begin_round(1)
    first, second = probes.open("cuda"), probes.open("cuda")
    first.read("calls")
    recorded = first.read("calls"), second.read("calls")
    first.close()
    third = probes.open("cuda")  # takes the place of the first
    probes.close()
    tape.close()
    assert third.closed

    tape = Tape.replay(path)
    tape.begin_round(1)
    probes = Probes(tape)
    first, second = probes.open("cuda"), probes.open("cuda")
    assert (first.read("calls")[0][1], second.read("calls")) == (b"\x01", recorded[1])


def test_a_refusal_is_replayed_as_well(tmp_path: Path) -> None:
    path = str(tmp_path / "recording")
    tape = Tape.record(path, SystemClock())
    tape.begin_round(1)
    probes = Probes(tape, backends=[FakeBackend("libbpf", refuse="no library")])
    with pytest.raises(SourceUnavailable):
        probes.open("cuda")
    found = probes.capabilities()
    tape.close()
    tape = Tape.replay(path)
    tape.begin_round(1)
    probes = Probes(tape)
    with pytest.raises(SourceUnavailable) as refused:
        probes.open("cuda")
    assert (refused.value.reason, refused.value.hint) == ("no library", "what to do about libbpf")
    assert probes.capabilities() == found


def test_a_damaged_answer_of_a_recording_is_said_to_be_one(tmp_path: Path) -> None:
    path = str(tmp_path / "recording")
    tape = Tape.record(path, SystemClock())
    tape.begin_round(1)
    tape.ask("bpf", "open cuda", lambda: msgpack.encode({"backend": 5}))
    tape.close()
    tape = Tape.replay(path)
    tape.begin_round(1)
    with pytest.raises(SourceUnavailable, match="makes no sense"):
        Probes(tape).open("cuda")


def test_beside_a_tree_of_files_no_probe_is_loaded(tmp_path: Path) -> None:
    world = open_world(str(tmp_path))
    try:
        with pytest.raises(SourceUnavailable, match="holds no answer"):
            world.probes.open("engine")
    finally:
        world.close()


@pytest.mark.parametrize(
    ("backends", "state", "found", "hint"),
    [
        ([FakeBackend("libbpf", refuse="no library")], "no", "no library", "what to do about libbpf"),
        ([FakeBackend("libbpf", refuse="no library"), FakeBackend("bcc")], "limited", "loaded by bcc", ""),
    ],
)
def test_gpuflight_env_tells_it(
    backends: list[ProbeBackend], state: str, found: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpuflight.cli.env import checks

    def no_btf() -> None:
        raise SourceUnavailable("no BTF", "another kernel")

    monkeypatch.setattr(features, "require_btf", no_btf)
    world = open_world(str(tmp_path))
    world.probes = Probes(backends=backends)
    told = {check.name: check for check in checks(world) if check.area == "probes"}
    assert (told["probes"].state, told["probes"].found, told["probes"].hint) == (state, found, hint)
    assert (told["BTF"].state, told["BTF"].hint) == ("no", "another kernel")
    assert told["backend libbpf"].state == "no"
    world.close()


def test_gpuflight_env_of_a_recording_that_does_not_know(tmp_path: Path) -> None:
    from gpuflight.cli.env import checks

    world = open_world(str(tmp_path))  # as of a recording of an older version
    (told,) = [check for check in checks(world) if check.name == "probes"]
    assert told.state == "no"
    assert told.found.startswith("not known: the recording holds no answer")
    world.close()
