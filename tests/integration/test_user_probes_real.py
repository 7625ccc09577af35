"""Users' probes on this kernel: the ready one, the one of the manual, compiled ones, replaced ones, recorded ones."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import ROOT
from tests.docs_text import blocks
from tests.integration.bpf_rig import Rig, needs_probes
from tests.integration.test_bpf_backends import needs_bcc
from tests.integration.user_probe_rig import CALLS_C, CALLS_TOML, Caller, Folder, Observer, write_calls

from gpuflight.cli import main
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Entity
from gpuflight.sources.bpf.bcc_compiler import SOURCES
from gpuflight.sources.bpf.user_probe_check import check_probes
from gpuflight.sources.open import open_world

pytestmark = [needs_probes, needs_bcc]

MANUAL = ROOT / "docs" / "user-probes.md"
READY = ROOT / "configs" / "probes"

EXITS_C = """\
#include "gf.h"
GF_ARRAY(exits, __u64, 1);
GF_RAW_TP(on_exit, sched_process_exit)
{
	__u32 zero = 0;
	__u64 *count = gf_lookup(exits, &zero);
	if (count)
		gf_add(count, 1);
	return 0;
}
"""
EXITS_TOML = """\
description = "ends of threads"
[[attach]]
program = "on_exit"
[[maps]]
name = "exits"
entity = "Host"
key = ["u32 zero"]
value = ["u64 exits"]
metrics = { ended_threads_count = { value = "exits" } }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "probes")


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("user"))


@pytest.fixture
def observer(folder: Folder) -> Iterator[Observer]:
    made = Observer(open_world(), folder.path)
    yield made
    made.close()


@pytest.fixture
def caller(rig: Rig) -> Iterator[Caller]:
    made = Caller(rig.library)
    yield made
    made.end()


def manual() -> dict[str, str]:
    """The example of the manual: file → text."""
    texts = {block.language: block.text for block in blocks(MANUAL) if block.language in ("c", "toml")}
    return {"malloc_sizes.c": texts["c"], "malloc_sizes.toml": texts["toml"]}


def test_the_example_of_the_manual_counts_what_it_says(folder: Folder, tmp_path: Path) -> None:
    """On a copy of libc: probes belong to a file, and other tests run beside."""
    libc = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so.6" in line)
    copy = shutil.copy(libc, tmp_path / "libc-copy.so")
    for name, text in manual().items():
        folder.write(name, text.replace("libc.so.6:malloc", f"{copy}:malloc"))
    observer = Observer(open_world(), folder.path)
    caller = Caller(copy)
    try:
        caller.call("malloc", 1, 64)
        observer.round()
        caller.call("malloc", 50, 1000)
        caller.call("malloc", 4, 100_000)
        node = observer.of(caller.pid)
        assert node.unknown is None
        rate, amount = node.metrics["malloc_per_s"], node.metrics["malloc_bytes_per_s"]
        assert amount / rate == pytest.approx((50 * 1000 + 4 * 100_000) / 54)
        assert node.metrics["malloc_mean_bytes"] == pytest.approx((50 * 1000 + 4 * 100_000) / 54)
        assert node.metrics["malloc_p90_bytes"] == 1024  # 50 of 54 are 0.926
        (spent,) = observer.collector.programs.values()
        assert (spent.program, spent.runs_count) == ("malloc_sizes.on_malloc", 54)
    finally:
        caller.end()
        observer.close()


def test_the_ready_probe_works_here(folder: Folder) -> None:
    for name in ("read_latency.c", "read_latency.toml"):
        folder.write(name, (READY / name).read_text())
    (checked,) = check_probes(str(folder.path))
    assert (checked.name, checked.mistakes, checked.warnings, checked.unchecked) == ("read_latency", [], [], [])
    assert "Process.libc_reads_per_s" in checked.metrics


def test_values_of_all_cpus_and_of_all_places_are_one_sum(
    folder: Folder, rig: Rig, observer: Observer, caller: Caller
) -> None:
    write_calls(folder, rig)
    observer.round()
    for cpu in sorted(os.sched_getaffinity(0))[:2]:
        os.sched_setaffinity(caller.pid, {cpu})
        caller.call("gf_call_0", 10, 3)
    caller.call("gf_call_1", 2, 0)
    assert observer.of(caller.pid).metrics["calls_count"] == 20 + 2 * 100


def test_a_changed_file_takes_effect_and_a_mistake_ends_nothing(
    folder: Folder, rig: Rig, observer: Observer, caller: Caller
) -> None:
    write_calls(folder, rig)
    observer.round()
    caller.call("gf_call_0", 5, 1)
    assert observer.of(caller.pid).metrics["calls_count"] == 5
    folder.write("calls.c", CALLS_C.replace("1 + gf_cookie(ctx)", "1 + no_such(ctx)"))
    assert observer.round() == {}
    (note,) = observer.notes
    assert note.startswith("calls.c:14: ")
    assert "no_such" in note
    folder.write("calls.c", CALLS_C.replace("1 + gf_cookie(ctx)", "1000"))
    observer.round()
    caller.call("gf_call_0", 2, 1)
    assert observer.of(caller.pid).metrics["calls_count"] == 2000
    (folder.path / "calls.toml").unlink()
    (folder.path / "calls.c").unlink()
    assert observer.round() == {}
    assert observer.notes == []
    caller.call("gf_call_0", 1, 1)  # nothing is attached any more, and nothing breaks


def test_rows_of_processes_that_ended_are_dropped(folder: Folder, rig: Rig, observer: Observer, caller: Caller) -> None:
    write_calls(folder, rig)
    observer.round()
    caller.call("gf_call_0", 5, 1)
    rig.call("0:7")
    observer.of(caller.pid)
    assert observer.collector.losses == {"rows of what has ended": 1}
    observer.of(caller.pid)
    assert observer.collector.losses == {}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("gf_call_1", "gf_cal_1", "calls.toml:7: libcalls.so has no function gf_cal_1 (did you mean gf_call_"),
        ('program = "on_call"', 'program = "on_cal"', "calls.c has no program on_cal (did you mean on_call?)"),
        ('name = "sums"', 'name = "sum"', "calls.toml:10: calls.c has no map sum (did you mean sums?)"),
        ('["u32 pid"]', '["u64 pid"]', "calls.toml:12: a key of the map sums has 4 bytes in calls.c"),
        ('"u64 first"]', '"u64 first", "u32 more"]', "calls.toml:13: a value of the map sums has 16 bytes in calls.c"),
        ('name = "sums"', 'name = "gf_losses"', "a value of the map gf_losses has 8 bytes"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(
    folder: Folder, rig: Rig, observer: Observer, old: str, new: str, words: str
) -> None:
    write_calls(folder, rig, **{old: new})
    assert observer.round() == {}
    (note,) = observer.notes
    assert words in note
    (checked,) = check_probes(str(folder.path))
    assert words in checked.mistakes[0]


def test_an_optional_place_may_be_missing(folder: Folder, rig: Rig, observer: Observer, caller: Caller) -> None:
    write_calls(folder, rig, **{"gf_call_1": "gf_no_such", "cookie = 99": "optional = true"})
    observer.round()
    (note,) = observer.notes
    assert "has no function gf_no_such" in note
    caller.call("gf_call_0", 5, 1)
    assert any(node.metrics["calls_count"] == 5 for node in observer.round().values())


def test_what_the_verifier_refuses_is_found_by_the_check(folder: Folder, rig: Rig) -> None:
    write_calls(folder, rig)
    folder.write("calls.c", CALLS_C.replace("GF_ARG1(ctx)", "*(__u64 *)GF_ARG1(ctx)"))
    (checked,) = check_probes(str(folder.path))
    assert checked.mistakes[0].startswith("calls.c: the kernel refuses the program on_call of the probe calls: R")


def test_traps_of_bcc_are_told(folder: Folder, rig: Rig) -> None:
    write_calls(folder, rig, **{'"u64 calls", "u64 first"': '"u64 calls"', 'first_per_s = { rate = "first" }': ""})
    folder.write(
        "calls.c",
        """\
#include <uapi/linux/ptrace.h>
BPF_TABLE("lru_hash", u32, u64, sums, 100);
int on_call(struct pt_regs *ctx) {
	u32 pid = 1;
	sums.increment(pid);
	return 0;
}
""",
    )
    (checked,) = check_probes(str(folder.path))
    assert checked.mistakes == []
    assert checked.warnings == [
        "calls.c:5: sums.increment() does nothing for a new key of an LRU or per-CPU map"
        " (use lookup_or_try_init and add)"
    ]


def test_only_one_process_by_its_own_view_of_the_file(
    folder: Folder, rig: Rig, observer: Observer, caller: Caller
) -> None:
    write_calls(folder, rig, **{"cookie = 99": "cookie = 99\npid = 1", ":gf_call_0": ":gf_call_2"})
    folder.write("calls.toml", (folder.path / "calls.toml").read_text().replace("pid = 1", f"pid = {caller.pid}"))
    observer.round()
    caller.call("gf_call_1", 1, 1)
    other = Caller(rig.library)
    try:
        other.call("gf_call_1", 1, 1)
        assert {name.partition(",")[0] for name in observer.round()} == {f"Process(pid={caller.pid}"}
    finally:
        other.end()


def test_every_file_of_a_name_wherever_it_lies(
    folder: Folder, rig: Rig, observer: Observer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two copies, one of them in a mount namespace of its own, as in a container; the second comes later, and goes."""
    monkeypatch.setattr("gpuflight.collectors.user_probes.RETRY_ROUNDS", 1)
    name = f"lib{tmp_path.name.replace('-', '_')}.so"
    toml = CALLS_TOML.replace("LIBRARY", name).replace("cookie = 99", "everywhere = true")
    folder.write("calls.c", CALLS_C)
    folder.write("calls.toml", toml.replace('gf_call_0"', 'gf_call_0"\neverywhere = true'))
    assert observer.round() == {}
    assert observer.notes == [f"calls.toml: no process has {name}:gf_call_{n} in memory yet" for n in (0, 1)]
    shutil.copy(rig.library, tmp_path / name)
    here = Caller(str(tmp_path / name))
    inside = tmp_path / "inside"
    inside.mkdir()
    mounted = f'mount -t tmpfs none {inside} && cp {rig.library} {inside}/{name} && exec "$@"'
    there = Caller(f"{inside}/{name}", ("unshare", "-m", "sh", "-c", mounted, "sh"))
    try:
        here.call("gf_call_0", 1, 1)
        there.call("gf_call_0", 1, 1)
        assert not (inside / name).exists()
        observer.round()
        assert observer.notes == []
        here.call("gf_call_0", 5, 1)
        there.call("gf_call_1", 7, 1)
        assert observer.of(here.pid).metrics["calls_count"] == 5
        assert observer.of(there.pid).metrics["calls_count"] == 7
        (known,) = observer.collector._known.values()
        assert known.probe is not None
        assert [each.attached for each in known.probe.everywhere] == [2, 2]
        there.end()
        observer.round()
        assert [each.attached for each in known.probe.everywhere] == [1, 1]
    finally:
        here.end()
        there.end()


def test_a_probe_at_a_raw_tracepoint(folder: Folder, observer: Observer) -> None:
    folder.write("exits.c", EXITS_C)
    folder.write("exits.toml", EXITS_TOML)
    observer.round()
    for _ in range(3):
        subprocess.run([sys.executable, "-S", "-c", ""], check=True)
    (host,) = observer.round().values()
    assert host.kind == "Host"
    assert host.metrics["ended_threads_count"] >= 3


@pytest.mark.skipif(shutil.which("clang") is None, reason="needs clang")
def test_a_compiled_probe_needs_no_compiler(
    folder: Folder, rig: Rig, observer: Observer, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the manual says it is compiled."""
    write_calls(folder, rig)
    (line,) = re.findall(r"^clang .*$", MANUAL.read_text(), re.MULTILINE)
    words = line.replace("malloc_sizes", "calls").replace("FOLDER_OF_GF_H", str(SOURCES)).split()
    if platform.machine() == "aarch64":
        words = [word.replace("_x86", "_arm64") for word in words]
    subprocess.run(words, cwd=folder.path, check=True)
    (folder.path / "calls.bpf.o").chmod(0o644)
    (folder.path / "calls.c").unlink()
    monkeypatch.setattr("gpuflight.sources.bpf.bcc_compiler.Compiler._ask", lambda *given: pytest.fail("compiled"))
    (checked,) = check_probes(str(folder.path))
    assert (checked.mistakes, checked.unchecked) == ([], [])
    observer.round()
    caller.call("gf_call_0", 5, 1)
    caller.call("gf_call_1", 1, 1)
    assert observer.of(caller.pid).metrics["calls_count"] == 105
    for old, new, words in (
        ("uprobe = ", "raw_tracepoint = 'sched_switch' #", "was compiled for uprobe, not for raw_tp/sched_switch"),
        ('"on_call"', '"on_cal"', "calls.toml: calls.bpf.o does not fit: no program on_cal"),
        ('["u32 pid"]', '["u64 pid"]', "a key of the map sums has 4 bytes in calls.bpf.o"),
    ):
        write_calls(folder, rig, **{old: new})
        assert words in check_probes(str(folder.path))[0].mistakes[0]


def test_a_compiled_probe_that_is_damaged(folder: Folder, rig: Rig, observer: Observer) -> None:
    write_calls(folder, rig)
    folder.write("calls.bpf.o", "no object at all")
    assert observer.round() == {}
    (note,) = observer.notes
    assert note.startswith("calls.toml: ")
    assert "calls" in note


def counted(found: dict[str, Entity]) -> dict[str, tuple[object, set[str]]]:
    """What does not depend on how long a round of a few milliseconds was."""
    return {name: (node.metrics.get("calls_count"), set(node.metrics)) for name, node in found.items()}


def test_a_recording_shows_what_was_counted(folder: Folder, rig: Rig, caller: Caller, tmp_path: Path) -> None:
    write_calls(folder, rig)
    file = tmp_path / "machine.tar.zst"
    live = Observer(open_world(record=file), folder.path)
    seen = [live.round()]
    caller.call("gf_call_0", 5, 2)
    seen.append(live.round())
    folder.write("calls.c", "broken")
    seen.append(live.round())
    said = live.notes
    live.close()
    assert any(node.metrics["calls_count"] == 5 for node in seen[1].values())
    replayed = Observer(open_world(replay=file), None)
    for expected in seen:
        assert counted(replayed.round()) == counted(expected)
    assert replayed.notes == said
    replayed.close()


def test_without_a_right_the_probe_says_so(folder: Folder, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_right() -> None:
        raise SourceUnavailable("no right to load BPF programs", "run as root")

    monkeypatch.setattr("gpuflight.sources.bpf.features.require_rights", no_right)
    write_calls(folder, rig)
    observer = Observer(open_world(), folder.path)
    assert observer.round() == {}
    assert observer.notes == ["calls.toml: no right to load BPF programs (run as root)"]
    observer.close()
    (checked,) = check_probes(str(folder.path))
    assert checked.mistakes == []
    assert checked.unchecked == ["no right to load BPF programs (run as root)"]


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_check_prints_one_line_for_each_mistake(
    folder: Folder, rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    write_calls(folder, rig)
    assert main(["plugins", "--check", str(folder.path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "calls: works here",
        "  gives Process.calls_count, Process.first_per_s",
    ]
    folder.write("calls.c", "int x = ;")
    folder.write("other.toml", "x")
    assert main(["plugins", "--check", str(folder.path)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "calls: will not work"
    assert out[1].startswith("  calls.c:1: expected expression")
    assert out[2:] == [
        "other: will not work",
        "  other.toml: there is neither other.c nor other.bpf.o beside it (write one)",
    ]
    assert main(["plugins", "--check", str(folder.path / "nothing")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_probes_are_listed_with_the_plugins(
    folder: Folder, rig: Rig, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_calls(folder, rig)
    folder.write("bad.toml", 'description = "x"')
    folder.write("bad.c", "")
    monkeypatch.setenv("GPUFLIGHT_COLLECTORS__USER_PROBES__FOLDER", str(folder.path))
    assert main(["plugins", "--family", "user_probes", "--json"]) == 0
    import json

    bad, calls = json.loads(capsysbinary.readouterr().out)["user_probes"]
    assert (calls["name"], calls["description"], calls["error"]) == ("calls", "calls", "")
    assert bad["error"] == "bad.toml:1: attach is missing"
