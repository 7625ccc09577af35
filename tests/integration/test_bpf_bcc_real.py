"""What only bcc has to do: kernels without cookies, sources of users, places by name, and stepping in for libbpf."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.bpf_rig import Rig, counts, needs_probes
from tests.integration.test_bpf_backends import COMPILER, needs_bcc

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf import ProbeObject, bcc_load, features
from gpuflight.sources.bpf.bcc_backend import BccBackend
from gpuflight.sources.bpf.libbpf import LibbpfBackend
from gpuflight.sources.bpf.probes import Probes

pytestmark = [needs_probes, needs_bcc]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("bcc"))


def test_without_cookies_of_the_kernel_each_place_gets_a_program_of_its_own(rig: Rig) -> None:
    probe = BccBackend(cookies=False, compiler=COMPILER).load("engine", programs=["on_entry"])
    try:
        probe.attach_uprobes("on_entry", rig.uprobes(cookie=(1 << 63) + 5)[:3])
        rig.call("0:1", "1:2", "2:3")
        assert counts(probe.read("calls"), rig.pid) == {5: 1, 6: 2, 7: 3}  # the key keeps the lower 32 bits
        assert [cost.program for cost in probe.costs()] == ["on_entry"]
    finally:
        probe.close()


def test_bcc_steps_in_where_libbpf_is_missing_or_the_kernel_refuses_it(rig: Rig) -> None:
    class Missing(LibbpfBackend):
        def available(self) -> None:
            raise SourceUnavailable("libbpf.so.1 cannot be loaded", "apt install libbpf1")

    class Refused(LibbpfBackend):
        def load(self, name: str, **how: object) -> ProbeObject:  # type: ignore[override]
            raise SourceUnavailable(f"the kernel refuses the probe {name}: unknown func bpf_get_attach_cookie#174")

    for first in (Missing(), Refused()):
        probes = Probes(backends=[first, BccBackend(multi=False, compiler=COMPILER)])
        probe = probes.open("engine", programs=["on_entry"])
        assert probe.backend == "bcc"
        probe.attach_uprobes("on_entry", rig.uprobes()[:1])
        rig.call("0:4")
        assert counts(probe.read("calls"), rig.pid) == {100: 4}
        probes.close()


def test_a_probe_that_bcc_cannot_compile_says_what_libbpf_said(tmp_path: Path) -> None:
    class Without(LibbpfBackend):
        def available(self) -> None:
            raise SourceUnavailable("the kernel carries no type information (BTF)", "another kernel")

    probes = Probes(backends=[Without(), BccBackend(compiler=COMPILER)])
    with pytest.raises(SourceUnavailable, match="no type information"):
        probes.open("net")


def test_raw_tracepoints_are_attached_by_their_section() -> None:
    source = """
#include "gf.h"
GF_HASH(exits, __u32, __u64, 65536);
GF_RAW_TP(on_exit, sched_process_exit)
{
    __u32 pid = bpf_get_current_pid_tgid() >> 32;
    __u64 task = ctx[0];
    gf_update(exits, &pid, &task);
    return 0;
}
"""
    probe = BccBackend(compiler=COMPILER).load_source("exits", source, "exits.c")
    try:
        probe.attach("on_exit")
        process = subprocess.Popen([sys.executable, "-c", ""])
        assert process.wait(30) == 0
        assert struct.pack("=I", process.pid) in dict(probe.read("exits"))
    finally:
        probe.close()


TRACEPOINT = """
import subprocess, sys
from gpuflight.sources.bpf.bcc_backend import BccBackend
probe = BccBackend().load_source("forks", sys.stdin.read(), "forks.c")
probe.attach("on_fork")
subprocess.run(["true"])
print(int.from_bytes(probe.read("forks")[0][1], "little") > 0)
"""


def test_tracepoints_are_attached_where_tracefs_is_mounted() -> None:
    """In a mount namespace of its own, so that nothing is mounted for anybody else."""
    source = """
#include "gf.h"
GF_ARRAY(forks, __u64, 1);
GF_TRACEPOINT(on_fork, sched, sched_process_fork)
{
    __u32 zero = 0;
    __u64 *count = gf_lookup(forks, &zero);
    if (count)
        gf_add(count, 1);
    return 0;
}
"""
    mount = 'mount -t tracefs nodev /sys/kernel/tracing && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-c", TRACEPOINT]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False, timeout=60)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"tracefs cannot be mounted: {done.stderr.strip()}")
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ("raw_tp/no_such_event", "there is no such place"),
        ("tracepoint/sched/no_such_event", "tracefs is not mounted" if not features.tracefs() else "no such place"),
        ("kprobe/no_such_function", "kprobe"),
    ],
)
def test_a_place_that_the_kernel_does_not_have_is_one_reason(section: str, reason: str) -> None:
    source = '#include "gf.h"\nint program(void *ctx) { return 0; }'
    probe = BccBackend(compiler=COMPILER).load_source("none", source, "none.c", sections={"program": section})
    try:
        with pytest.raises(SourceUnavailable, match=reason):
            probe.attach("program")
    finally:
        probe.close()


def test_maps_in_the_words_of_bcc_work_too(rig: Rig) -> None:
    """Programs that were written for bcc's own front end: its macros for maps, and arguments of the function."""
    source = """
#include <uapi/linux/ptrace.h>
BPF_HASH(counts, u32, u64);
int on_call(struct pt_regs *ctx) {
    u32 pid = bpf_get_current_pid_tgid() >> 32;
    counts.increment(pid, PT_REGS_PARM1(ctx));
    return 0;
}
"""
    probe = BccBackend(compiler=COMPILER).load_source("plain", source, "plain.c")
    try:
        probe.attach_uprobes("on_call", rig.uprobes()[:1])
        rig.call("0:6:7")
        assert dict(probe.read("counts"))[struct.pack("=I", rig.pid)] == struct.pack("=Q", 42)
    finally:
        probe.close()


def test_what_the_verifier_says_is_one_line(tmp_path: Path) -> None:
    source = '#include "gf.h"\nGF_UPROBE(bad) { return *(int *)GF_ARG1(ctx); }'
    with pytest.raises(
        SourceUnavailable, match=r"the kernel refuses the program bad of the probe bad: R\d invalid mem"
    ):
        BccBackend(compiler=COMPILER).load_source("bad", source, "bad.c")


def test_bcc_load_links_only_what_is_a_map() -> None:
    code = struct.pack("<BBhiBBhi", 0x18, 0x11, 0, 5, 0, 0, 0, 0) + struct.pack("<BBhi", 0xB7, 0x01, 0, 5)
    linked = bcc_load.link(code, {5: 77})
    assert linked == struct.pack("<BBhiBBhi", 0x18, 0x11, 0, 77, 0, 0, 0, 0) + code[16:]


_LOOK = """
import ctypes, sys
from gpuflight.sources.bpf import Uprobe
from gpuflight.sources.bpf.bcc_backend import BccBackend
library, offset = sys.argv[1:]
backend = BccBackend()
backend.available()
probe = backend.load("engine", programs=["on_entry"])
assert not probe.attach_uprobes("on_entry", [Uprobe(library, int(offset), 5)]).failed
ctypes.CDLL(library).gf_call_0(*range(8))
print([int.from_bytes(value, "little") for _, value in probe.read("calls")])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="starts processes with other rights: needs root")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv of util-linux")
@pytest.mark.parametrize(
    ("held", "seen"),
    [("+bpf,+perfmon", "[1]"), ("+bpf", "no right to load BPF programs"), ("", "no right to load BPF")],
)
def test_two_capabilities_are_enough_for_bcc_too(rig: Rig, held: str, seen: str) -> None:
    sets = ",".join(["-all", *([held] if held else [])])
    command = ["setpriv", f"--inh-caps={sets}", f"--bounding-set={sets}", sys.executable, "-c", _LOOK]
    done = subprocess.run(
        [*command, rig.library, str(rig.offsets[0])], capture_output=True, text=True, check=False, timeout=60
    )
    assert seen in done.stdout + done.stderr
