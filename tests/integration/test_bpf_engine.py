"""The probe engine on this kernel: everything it offers, by both ways to attach."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.bpf_rig import FUNCTIONS, Rig, counts, finish, go, needs_probes

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf import ProbeObject, Uprobe, bcc_load, features
from gpuflight.sources.bpf.libbpf import LibbpfBackend
from gpuflight.sources.bpf.maps import Map, possible_cpus
from gpuflight.sources.open import open_world
from gpuflight.sources.world import World

pytestmark = needs_probes

multi_and_classic = pytest.mark.parametrize("multi", [True, False], ids=["multi", "classic"])


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("bpf"))


@pytest.fixture
def engine() -> Iterator[ProbeObject]:
    loaded = LibbpfBackend().load("engine")
    yield loaded
    loaded.close()


def backend(multi: bool) -> LibbpfBackend:
    if multi and features.why_no_uprobe_multi():
        pytest.skip(features.why_no_uprobe_multi())
    return LibbpfBackend(multi=multi)


@multi_and_classic
def test_calls_are_counted_with_the_cookie_of_their_symbol(rig: Rig, multi: bool) -> None:
    loaded = backend(multi).load("engine", programs=["on_entry"])
    try:
        wanted = rig.uprobes()[:8]
        link = loaded.attach_uprobes("on_entry", wanted)
        assert link.attached == wanted
        assert not link.failed
        assert bool(loaded.why_classic) is not multi
        rig.call("0:3", "5:1000", "7:1", "9:4")
        expected = {100: 3, 105: 1000, 107: 1}  # number 9 is not probed
        assert counts(loaded.read("calls"), rig.pid) == expected
        assert counts(loaded.read("calls_percpu"), rig.pid) == expected
        assert loaded.losses() == {}
    finally:
        loaded.close()


@multi_and_classic
def test_what_a_function_returned_is_seen(rig: Rig, multi: bool) -> None:
    loaded = backend(multi).load("engine", programs=["on_return"])
    try:
        assert not loaded.attach_uprobes("on_return", rig.uprobes(ret=True)[:4]).failed
        rig.call("0:1", "3:2")
        returned = {
            struct.unpack("=II", key)[1]: struct.unpack("=Q", value)[0] for key, value in loaded.read("last_return")
        }
        assert returned == {100: 36, 103: 39}
    finally:
        loaded.close()


@multi_and_classic
def test_only_one_process_is_probed_where_that_is_asked(rig: Rig, multi: bool) -> None:
    loaded = backend(multi).load("engine", programs=["on_entry"])
    try:
        link = loaded.attach_uprobes("on_entry", rig.uprobes()[:1], pid=os.getpid())
        assert not link.failed
        rig.call("0:5")
        assert loaded.read("calls") == []
    finally:
        loaded.close()


def test_where_the_kernel_has_no_cookies_another_backend_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bcc_load, "has_cookies", lambda: False)
    LibbpfBackend(multi=False).load("engine", programs=["on_exec"]).close()
    with pytest.raises(SourceUnavailable, match=r"Linux 5\.15") as refused:
        LibbpfBackend(multi=False).load("engine", programs=["on_entry"])
    assert "bcc" in refused.value.hint


def test_arguments_come_from_registers_and_the_stack(rig: Rig) -> None:
    loaded = LibbpfBackend().load("engine", programs=["on_entry"], constants={"ring_above": 1 << 40})
    try:
        loaded.attach_uprobes("on_entry", rig.uprobes())
        rig.call("1:2", f"2:2:{1 << 41}")
        records = [struct.unpack("=10Q", record) for record in loaded.drain("ring")]
        assert records == [(rig.pid, 102, 1 << 41, 2, 3, 4, 5, 6, 7, 8)] * 2
        assert loaded.drain("ring") == []
        assert loaded.lost("ring") == 0
        ((_, stack),) = loaded.read("stacks")
        assert len(stack) == 8 * 64
        assert struct.unpack_from("=Q", stack)[0] & 0xFFF == rig.offsets[2] & 0xFFF
    finally:
        loaded.close()


def test_one_bad_place_costs_itself_only(rig: Rig, engine: ProbeObject) -> None:
    good = rig.uprobes()
    beyond = Uprobe(rig.library, 1 << 30, 1, symbol="beyond the end")
    missing = Uprobe(f"{rig.library}.gone", good[0].offset, 2, symbol="no such file")
    link = engine.attach_uprobes("on_entry", [*good[:7], beyond, *good[7:], missing])
    assert {uprobe.symbol for uprobe, _ in link.failed} == {"beyond the end", "no such file"}
    assert all(reason for _, reason in link.failed)
    assert sorted(uprobe.cookie for uprobe in link.attached) == sorted(uprobe.cookie for uprobe in good)
    rig.call("6:1", "7:1", f"{FUNCTIONS - 1}:1")
    assert counts(engine.read("calls"), rig.pid) == {106: 1, 107: 1, 100 + FUNCTIONS - 1: 1}


def test_a_closed_link_counts_no_more_and_a_new_one_does(rig: Rig, engine: ProbeObject) -> None:
    link = engine.attach_uprobes("on_entry", rig.uprobes())
    rig.call("0:2")
    first = rig.pid
    link.close()
    link.close()
    assert link.attached == []
    rig.call("0:2")
    assert {struct.unpack("=II", key)[0] for key, _ in engine.read("calls")} == {first}
    engine.attach_uprobes("on_entry", rig.uprobes())
    rig.call("0:4")
    assert counts(engine.read("calls"), rig.pid) == {100: 4}


def test_only_the_chosen_programs_are_loaded_and_settings_reach_them(rig: Rig) -> None:
    loaded = LibbpfBackend().load("engine", programs=["on_entry"], constants={"only_tgid": 1})
    try:
        loaded.attach_uprobes("on_entry", rig.uprobes())
        rig.call("0:3")
        assert loaded.read("calls") == []
        assert [cost.program for cost in loaded.costs()] == ["on_entry"]
        with pytest.raises(KeyError):
            loaded.attach_uprobes("on_return", rig.uprobes())
    finally:
        loaded.close()


@pytest.mark.parametrize(
    "wrong", [{"programs": ["on_nothing_known"]}, {"map_entries": {"gone": 1}}, {"constants": {"gone": 1}}]
)
def test_names_that_an_object_does_not_have_are_an_error(wrong: dict[str, object]) -> None:
    with pytest.raises(KeyError):
        LibbpfBackend().load("engine", **wrong)  # type: ignore[arg-type]


def test_a_full_map_is_a_counted_loss(rig: Rig) -> None:
    loaded = LibbpfBackend().load("engine", programs=["on_entry"], map_entries={"calls": 4, "calls_percpu": 8})
    try:
        loaded.attach_uprobes("on_entry", rig.uprobes())
        rig.call(*(f"{number}:2" for number in range(6)))
        assert len(loaded.read("calls")) == 4
        assert loaded.losses() == {0: 4}  # two functions without room, called twice each
        loaded.clear("calls")
        assert loaded.read("calls") == []
    finally:
        loaded.close()


def test_a_ring_buffer_counts_what_it_cannot_hold_and_goes_on_behind_its_end(rig: Rig) -> None:
    room = 4096 // 88
    loaded = LibbpfBackend().load(
        "engine", programs=["on_entry"], map_entries={"ring": 4096}, constants={"ring_above": 1}
    )
    try:
        loaded.attach_uprobes("on_entry", rig.uprobes())
        rig.call("0:100")
        assert len(loaded.drain("ring")) == room
        assert loaded.lost("ring") == 100 - room
        for number in range(1, 8):  # several times around
            rig.call(f"{number}:30")
            assert len(loaded.drain("ring", limit=10)) == 10
            rest = [struct.unpack("=10Q", record)[1] for record in loaded.drain("ring")]
            assert rest == [100 + number] * 20
        assert loaded.lost("ring") == 100 - room
    finally:
        loaded.close()


def test_records_are_whole_and_in_order_while_they_are_being_written(rig: Rig) -> None:
    times = 200_000
    loaded = LibbpfBackend().load(
        "engine", programs=["on_entry"], map_entries={"ring": 1 << 16}, constants={"ring_above": 1}
    )
    process = rig.racer(times)
    try:
        loaded.attach_uprobes("on_entry", rig.uprobes()[:1])
        seen: list[int] = []
        go(process)
        while len(seen) + loaded.lost("ring") < times:
            for record in loaded.drain("ring"):
                words = struct.unpack("=10Q", record)
                assert words[:2] == (process.pid, 100)
                assert words[3:] == (2, 3, 4, 5, 6, 7, 8)
                seen.append(words[2])
        finish(process)
        assert loaded.drain("ring") == []
        assert len(seen) + loaded.lost("ring") == times
        assert seen == sorted(set(seen))
        assert counts(loaded.read("calls"), process.pid) == {100: times}
    finally:
        process.kill()
        loaded.close()


@multi_and_classic
def test_a_process_that_runs_already_is_probed_and_let_go_while_it_runs(rig: Rig, multi: bool) -> None:
    loaded = backend(multi).load("engine", programs=["on_entry"])
    process = rig.racer(300)
    try:
        loaded.attach_uprobes("on_entry", rig.uprobes()[:1])
        go(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        assert counts(loaded.read("calls"), process.pid) == {100: 300}
        loaded.close()
        process.communicate("\n", timeout=30)
        assert process.returncode == 0
    finally:
        process.kill()
        loaded.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="makes mounts: needs root")
def test_a_library_that_only_another_mount_namespace_has_is_found_there(rig: Rig, engine: ProbeObject) -> None:
    hidden = rig.folder / "hidden"
    hidden.mkdir(exist_ok=True)
    inside = f'mount -t tmpfs none {hidden} && cp {rig.library} {hidden}/lib.so && exec "$@"'
    process = rig.racer(7, f"{hidden}/lib.so", ["unshare", "-m", "sh", "-c", inside, "sh"])
    try:
        assert not (hidden / "lib.so").exists()
        path = f"/proc/{process.pid}/root{hidden}/lib.so"
        link = engine.attach_uprobes("on_entry", [Uprobe(path, rig.offsets[0], 9)])
        assert not link.failed
        go(process)
        finish(process)
        assert counts(engine.read("calls"), process.pid) == {9: 7}
    finally:
        process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="map_files needs CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE")
def test_a_library_that_was_deleted_is_reached_through_the_memory_of_a_process(rig: Rig, engine: ProbeObject) -> None:
    """As after an update of a package, or of a container's layer, under a running job."""
    copy = rig.folder / "deleted.so"
    copy.write_bytes(Path(rig.library).read_bytes())
    process = rig.racer(5, str(copy))
    try:
        copy.unlink()
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        area = next(line.split()[0] for line in maps.splitlines() if line.endswith("deleted.so (deleted)"))
        link = engine.attach_uprobes("on_entry", [Uprobe(f"/proc/{process.pid}/map_files/{area}", rig.offsets[0], 8)])
        assert not link.failed
        go(process)
        finish(process)
        assert counts(engine.read("calls"), process.pid) == {8: 5}
    finally:
        process.kill()


def test_maps_are_the_same_in_batches_and_key_by_key(engine: ProbeObject) -> None:
    for number in range(3000):
        engine.update("calls", struct.pack("=II", number, 7), struct.pack("=Q", number * 3))
        engine.update("last_return", struct.pack("=II", number, 7), struct.pack("=Q", number))
    engine.update("calls_percpu", bytes(8), b"".join(struct.pack("=Q", cpu + 1) for cpu in range(possible_cpus())))
    for name in ("calls", "last_return", "calls_percpu", "slots"):
        opened: Map = engine._maps[name]  # type: ignore[attr-defined]
        batches = sorted(opened.items())
        opened._batches = False
        assert sorted(opened.items()) == batches
        opened._batches, opened._keys, opened._chunk = True, None, 0
        opened._room(1)  # too little for a bucket: it has to grow
        assert sorted(opened.items()) == batches
    assert len(engine.read("calls")) == 3000
    assert sum(struct.unpack(f"={possible_cpus()}Q", engine.read("calls_percpu")[0][1])) == sum(
        range(possible_cpus() + 1)
    )
    assert engine.lookup("calls", struct.pack("=II", 5, 7)) == struct.pack("=Q", 15)
    assert engine.delete("calls", struct.pack("=II", 5, 7))
    assert not engine.delete("calls", struct.pack("=II", 5, 7))
    assert engine.lookup("calls", struct.pack("=II", 5, 7)) is None
    engine.update("slots", struct.pack("=I", 1), struct.pack("=Q", 9))
    engine.clear("slots")
    assert {value for _, value in engine.read("slots")} == {bytes(8)}
    with pytest.raises(ValueError, match="takes 8"):
        engine.update("calls", b"x", bytes(8))


def test_tracepoints_by_type_information_and_raw_ones_need_no_tracefs() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.readline()"], stdin=subprocess.PIPE)
    loaded = LibbpfBackend().load("engine", programs=["on_exec", "on_exit"], constants={"only_tgid": process.pid})
    try:
        loaded.attach("on_exec")
        loaded.attach("on_exit")
        process.communicate(b"\n")
        slots = [struct.unpack("=Q", value)[0] for _, value in sorted(loaded.read("slots"))]
        assert slots == [0, 1, 0, 0]
    finally:
        loaded.close()


def test_an_iterator_lists_every_task() -> None:
    loaded = LibbpfBackend().load("engine", programs=["each_task"])
    try:
        link = loaded.attach("each_task")
        for _ in range(2):
            seen = dict(struct.iter_unpack("=II", loaded.run_iter(link)))
            assert seen[os.getpid()] == os.getpid()
            assert seen[threading.get_native_id()] == os.getpid()
    finally:
        loaded.close()


def test_what_our_programs_cost_is_counted(rig: Rig) -> None:
    try:
        features.require_statistics()
    except SourceUnavailable as error:
        pytest.skip(str(error))
    loaded = LibbpfBackend().load("engine", programs=["on_entry", "on_nothing"])
    try:
        loaded.attach_uprobes("on_entry", rig.uprobes())
        rig.call("0:50")
        costs = {cost.program: cost for cost in loaded.costs()}
        assert costs["on_entry"].run_count == 50
        assert costs["on_entry"].run_time_ns is not None
        assert costs["on_entry"].run_time_ns > 50
        assert costs["on_nothing"].run_count == 0
    finally:
        loaded.close()


def test_a_recorded_world_is_replayed_without_a_kernel(rig: Rig, tmp_path: Path) -> None:
    def look(world: World) -> list[object]:
        seen: list[object] = []
        world.begin_round(1)
        probe = world.probes.open("engine", programs=["on_entry", "on_exec", "each_task"], constants={"ring_above": 1})
        link = probe.attach_uprobes("on_entry", rig.uprobes())
        seen += [link.attached, link.failed, probe.attach("on_exec").attached]
        tasks = probe.attach("each_task")
        for number in (1, 2, 3):
            if number > 1:
                world.begin_round(number)
            if not world.probes.replaying:
                rig.call(f"3:{number}")
            seen += [sorted(probe.read("calls")), probe.drain("ring"), probe.lost("ring"), probe.run_iter(tasks)]
            seen += [probe.costs(), probe.losses(), world.probes.capabilities()]
        world.close()
        return seen

    path = tmp_path / "recording"
    recorded = look(open_world(record=path))
    assert look(open_world(replay=path, probes="off")) == recorded
    assert len(recorded[-6]) == 3  # type: ignore[arg-type]


def test_opening_and_closing_leaves_no_descriptor_and_no_thread(rig: Rig) -> None:
    def once() -> None:
        loaded = LibbpfBackend().load("engine")
        loaded.attach_uprobes("on_entry", rig.uprobes())
        loaded.attach("on_exec")
        loaded.drain("ring")
        loaded.close()
        loaded.close()

    def attach_often() -> None:
        loaded = LibbpfBackend().load("engine", programs=["on_entry"])
        for _ in range(5):
            loaded.attach_uprobes("on_entry", rig.uprobes()[:1]).close()
        assert len(loaded._links) == 1  # type: ignore[attr-defined]
        loaded.close()

    for thread in threading.enumerate():
        if thread.name == "gpuflight-detach":  # of a test before, one by one
            thread.join()
    attach_often()
    once()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(10):
        once()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_an_object_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable, match="missing from this installation") as missing:
        LibbpfBackend(folder=str(tmp_path)).load("engine")
    assert "make probes" in missing.value.hint
    (tmp_path / "engine.x86_64.bpf.o").write_bytes(b"\x7fELF not really")
    (tmp_path / "engine.arm64.bpf.o").write_bytes(b"\x7fELF not really")
    with pytest.raises(SourceUnavailable, match="refuses the probe engine"):
        LibbpfBackend(folder=str(tmp_path)).load("engine")
