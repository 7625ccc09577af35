"""Finding CUDA in the memory of processes: by symbols, however it is called, linked or hidden, and at what cost."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from gpuflight.sources import cuda_libraries
from gpuflight.sources.clock import ManualClock
from gpuflight.sources.cuda_libraries import CudaLibraries, CudaScan
from gpuflight.sources.elf_symbols import ElfFile, NotElf
from gpuflight.sources.fs import HostFs
from gpuflight.sources.procfs import ProcFs
from gpuflight.sources.recording import Tape

RUNTIME = "void cudaLaunchKernel(void) {}"
DRIVER = "void cuLaunchKernel(void) {}"
NCCL = "void ncclAllReduce(void) {}"
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
pytestmark = NEEDS_COMPILER


def build(path: Path, code: str, *options: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["gcc", "-x", "c", "-", "-o", path, *options], input=code.encode(), check=True)
    return path


class Machine:
    """A tree of processes that map files; ``fs`` counts what is read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fs = CountingFs(str(root))
        self.procfs = ProcFs(self.fs, ManualClock())
        self.libraries = CudaLibraries(self.fs, self.procfs)
        self.number = 0
        (root / "proc/self/ns").mkdir(parents=True)

    def process(
        self, pid: int, *mapped: Path | str, exe: Path | None = None, size: int = 1000, start: int = 5, ticks: int = 0
    ) -> None:
        """A process; its files are as they are in ``root``, unless a text gives the whole line."""
        folder = self.root / f"proc/{pid}"
        folder.mkdir(parents=True, exist_ok=True)
        fields = ["S", "1", "1", "1", "0", "-1", "0", *"0000", str(ticks), *["0"] * 5, "1", "0", str(start), str(size)]
        (folder / "stat").write_text(f"{pid} (python3) {' '.join(fields)} {'0 ' * 40}\n")
        lines = [one if isinstance(one, str) else self.line(one) for one in mapped]
        (folder / "maps").write_text("".join(lines) or "5500-5600 r-xp 00000000 08:01 77 /usr/bin/app\n")
        if not (folder / "root").is_symlink():
            (folder / "root").symlink_to(self.root)
        if exe is not None:
            (folder / "exe").unlink(missing_ok=True)
            (folder / "exe").symlink_to("/" + str(exe.relative_to(self.root)))

    def line(self, path: Path, **other: object) -> str:
        status = path.stat()
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
        name = other.get("name", "/" + str(path.relative_to(self.root)))
        return f"7f00-7f10 r--p 00000000 {device} {status.st_ino} {name}\n" + (
            f"7f10-7f20 r-xp 00001000 {device} {other.get('inode', status.st_ino)}    {name}\n"
        )

    def scan(self, libraries: CudaLibraries | None = None) -> CudaScan:
        self.number += 1
        self.procfs.begin_round(self.number)
        return (libraries or self.libraries).scan()


class CountingFs(HostFs):
    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.asked: Counter[str] = Counter()

    def read(self, path: str) -> bytes:
        self.asked[path] += 1
        return super().read(path)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def layers(scan: CudaScan, pid: int) -> set[str]:
    return {layer for key in scan.processes[pid].libraries for layer in scan.libraries[key].layers}


def test_by_the_symbols_not_by_the_name(machine: Machine) -> None:
    bundled = build(machine.root / "opt/app/libbundle-1a2b.so", RUNTIME + NCCL, "-shared")
    driver = build(machine.root / "usr/lib/libcuda.so.1", DRIVER, "-shared", "-Wl,--hash-style=sysv")
    named_only = build(machine.root / "usr/lib/libcudart.so.12", "int other;", "-shared")
    machine.process(10, bundled, driver)
    machine.process(11, named_only)
    machine.process(12)
    scan = machine.scan()
    assert list(scan.processes) == [10]
    assert layers(scan, 10) == {"runtime", "driver", "nccl"}
    assert not scan.processes[10].hidden
    paths = {library.path for library in scan.libraries.values()}
    assert paths == {"/opt/app/libbundle-1a2b.so", "/usr/lib/libcuda.so.1"}
    assert {library.open_path for library in scan.libraries.values()} == {f"/proc/10/root{path}" for path in paths}
    assert next(iter(scan.libraries.values())).by_way_of(77).startswith("/proc/77/root/")


def test_a_file_is_looked_into_once_for_all_processes(machine: Machine) -> None:
    runtime = build(machine.root / "usr/lib/libx.so", RUNTIME, "-shared")
    elsewhere = machine.root / "other/liby.so"
    elsewhere.parent.mkdir()
    os.link(runtime, elsewhere)
    for pid in range(10, 20):
        machine.process(pid, runtime if pid % 2 else elsewhere)
    asked: list[str] = []
    tape = AskedTape(asked)
    scan = machine.scan(CudaLibraries(machine.fs, machine.procfs, tape))
    assert len(asked) == 1 and len(scan.libraries) == 1 and len(scan.processes) == 10


class AskedTape(Tape):
    def __init__(self, asked: list[str]) -> None:
        super().__init__()
        self._asked = asked

    def ask(self, source: str, key: str, live):  # type: ignore[no-untyped-def]
        self._asked.append(key)
        return super().ask(source, key, live)


def test_a_runtime_linked_statically_is_found_in_the_full_symbol_table(machine: Machine) -> None:
    driver = build(machine.root / "usr/lib/libcuda.so.1", DRIVER, "-shared")
    static = build(machine.root / "bin/train", RUNTIME + "int main(void) { return 0; }")
    stripped = build(machine.root / "bin/hidden", RUNTIME + "int main(void) { return 1; }", "-s")
    machine.process(10, static, driver, exe=static)
    machine.process(11, stripped, driver, exe=stripped)
    machine.process(12, static, exe=static)
    scan = machine.scan()
    assert layers(scan, 10) == {"runtime", "driver"} and not scan.processes[10].hidden
    assert [library.static for library in scan.libraries.values()].count(True) == 1
    assert layers(scan, 11) == {"driver"} and scan.processes[11].hidden
    assert 12 not in scan.processes, "it has not loaded a driver, so it does nothing on a GPU"


def test_late_loading_is_seen_and_pauses_grow_where_it_is_in_vain(machine: Machine) -> None:
    runtime = build(machine.root / "usr/lib/libx.so", RUNTIME, "-shared")
    machine.process(10)
    assert not machine.scan().processes
    machine.process(10, runtime, size=2000)
    assert list(machine.scan().processes) == [10]
    reads = []
    for turn in range(40):
        machine.process(10, runtime, size=3000 + turn)
        machine.scan()
        reads.append(machine.fs.asked["/proc/10/maps"])
    assert reads[-1] - reads[0] <= 6
    machine.process(10, runtime, ticks=5, size=3039)
    before = machine.fs.asked["/proc/10/maps"]
    for _ in range(40):
        machine.scan()
    assert machine.fs.asked["/proc/10/maps"] <= before + 1, "the size of its memory stays"


def test_who_is_told_to_be_looked_at_is_at_once(machine: Machine) -> None:
    machine.process(10, size=1)
    machine.scan()
    runtime = build(machine.root / "usr/lib/libx.so", RUNTIME, "-shared")
    machine.process(10, runtime, size=1)
    assert not machine.scan().processes
    machine.libraries.look_at([10])
    assert list(machine.scan().processes) == [10]


def test_another_program_under_the_same_pid(machine: Machine) -> None:
    runtime = build(machine.root / "usr/lib/libx.so", RUNTIME, "-shared")
    machine.process(10, runtime)
    assert machine.scan().processes[10].start == 5
    machine.process(10, start=6)
    assert not machine.scan().processes
    machine.process(10, runtime, start=7)
    assert machine.scan().processes[10].start == 7


def test_a_file_replaced_on_disk_is_not_taken_for_the_one_in_use(machine: Machine) -> None:
    runtime = build(machine.root / "usr/lib/libx.so", RUNTIME, "-shared")
    machine.process(10, machine.line(runtime, inode=runtime.stat().st_ino + 1))
    scan = machine.scan()
    assert not scan.processes and scan.replaced == 1
    line = machine.line(runtime, name="/usr/lib/libx.so (deleted)")
    machine.process(11, line)
    assert 11 in machine.scan().processes, "the very same file, that has another name now"


def test_of_an_overlay_maps_tell_the_file_beneath(machine: Machine) -> None:
    """Another device, so another inode: that is no sign that it was replaced."""
    runtime = build(machine.root / "usr/lib/libx.so", RUNTIME, "-shared")
    machine.process(10, f"7f10-7f20 r-xp 00001000 fe:fe 123 /{runtime.relative_to(machine.root)}\n")
    assert machine.scan().processes[10].libraries == ((os.makedev(0xFE, 0xFE), 123),)


def test_a_bound_on_files_per_round_is_told_and_made_up_for(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_libraries, "FILES", 1)
    files = [
        build(machine.root / f"usr/lib/lib{name}.so", code, "-shared")
        for name, code in (("a", "int a;"), ("cuda", RUNTIME))
    ]
    machine.process(10, *files)
    first, second = machine.scan(), machine.scan()
    assert (first.pending, second.pending) == (1, 0)
    assert list(second.processes) == [10]


def test_who_probably_has_cuda_does_not_wait_for_all_the_others(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_libraries, "FILES", 1)
    for pid in range(10, 20):
        machine.process(pid, build(machine.root / f"usr/lib/lib{pid}.so", "int a;", "-shared"))
    machine.process(20, build(machine.root / "opt/libcudart.so.12", RUNTIME, "-shared"))
    scan = machine.scan()
    assert list(scan.processes) == [20] and scan.pending == 10


def test_maps_that_may_not_be_read_are_counted(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.process(10)

    def refuse(pid: int) -> bytes:
        raise PermissionError

    monkeypatch.setattr(machine.procfs, "maps", refuse)
    assert machine.scan().unreadable == 1
    assert machine.scan().unreadable == 1


def test_a_map_that_could_not_be_read_is_tried_again(machine: Machine) -> None:
    runtime = build(machine.root / "usr/lib/libx.so", RUNTIME, "-shared")
    machine.process(10, runtime)
    maps = machine.root / "proc/10/maps"
    content = maps.read_text()
    maps.write_text("")
    assert not machine.scan().processes
    maps.write_text(content)
    found = [10 in machine.scan().processes for _ in range(cuda_libraries.RETRY_ROUNDS)]
    assert found[-1] and not found[0]


def test_a_thousand_processes_that_run_cost_one_reading_each(machine: Machine) -> None:
    """Whatever they do: no file but the process list is read again while their memory stays as large."""
    runtime = build(machine.root / "usr/lib/libx.so", RUNTIME, "-shared")
    for pid in range(100, 400):
        machine.process(pid, runtime)
    assert len(machine.scan().processes) == 300
    before = sum(machine.fs.asked.values())
    for pid in range(100, 400):
        machine.process(pid, runtime, ticks=1)
    machine.scan()
    assert sum(machine.fs.asked.values()) == before


def test_a_recording_answers_the_same_without_the_files(machine: Machine, tmp_path: Path) -> None:
    runtime = build(machine.root / "usr/lib/libx.so", RUNTIME, "-shared")
    machine.process(10, runtime)
    path = str(tmp_path / "recording")
    tape = Tape.record(path, ManualClock())
    tape.begin_round(1)
    live = machine.scan(CudaLibraries(machine.fs, machine.procfs, tape))
    tape.close()
    runtime.write_bytes(b"gone")
    replay = Tape.replay(path)
    replay.begin_round(1)
    again = machine.scan(CudaLibraries(machine.fs, machine.procfs, replay))
    assert again.libraries == live.libraries and again.processes == live.processes


# --- ELF ----------------------------------------------------------------------------


def look(raw: bytes) -> ElfFile:
    return ElfFile(lambda offset, size: raw[offset : offset + size])


@pytest.mark.parametrize("style", ["gnu", "sysv", "both"])
def test_symbols_are_looked_up_as_the_loader_does(tmp_path: Path, style: str) -> None:
    names = [f"function_{number}" for number in range(200)]
    code = (
        "".join(f"void {name}(void) {{}}\n" for name in names) + "extern void absent(void); void f(void) { absent(); }"
    )
    raw = build(tmp_path / "lib.so", code, "-shared", f"-Wl,--hash-style={style}").read_bytes()
    asked = [*names, "absent", "function_200", "", "f"]
    assert look(raw).exports(asked) == {*names, "f"}
    assert look(raw).holds(["function_3", "nothing"]) == {"function_3"}


def test_no_damage_raises_anything_but_what_is_said(tmp_path: Path) -> None:
    raw = build(tmp_path / "lib.so", RUNTIME, "-shared").read_bytes()
    for cut in range(0, len(raw), 97):
        damaged = raw[:cut] + bytes(255 - byte for byte in raw[cut : cut + 40]) + raw[cut + 40 :]
        for attempt in (raw[:cut], damaged):
            try:
                file = look(attempt)
                assert file.exports(["cudaLaunchKernel"]) <= {"cudaLaunchKernel"}
                assert file.holds(["cudaLaunchKernel"]) <= {"cudaLaunchKernel"}
            except NotElf:
                pass
    with pytest.raises(NotElf):
        look(b"#!/bin/sh\n")
