"""Probes with fewer rights, without type information, with tracefs, after a sudden death: each in its own process."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.bpf_rig import Rig, needs_probes

from gpuflight.sources.bpf import features, syscalls

pytestmark = [
    needs_probes,
    pytest.mark.skipif(os.geteuid() != 0, reason="starts processes with other rights: needs root"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv of util-linux"),
]

# What a process finds, and what it counts in a library if it may.
_LOOK = """
import ctypes, json, os, resource, sys
import msgspec
from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf import Uprobe
from gpuflight.sources.bpf.probes import Probes

resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
library, offset, choice, programs, attach = sys.argv[1:]
programs = programs.split(",")
probes = Probes(backend=choice)
answer = {"capabilities": msgspec.to_builtins(probes.capabilities())}
try:
    probe = probes.open("engine", programs=programs)
    answer["opened_by"] = probe.backend
    if attach:
        probe.attach(attach)
    else:
        answer["failed"] = probe.attach_uprobes(programs[0], [Uprobe(library, int(offset), 5)]).failed
    if not os.fork():  # this user may not be able to start this Python again
        ctypes.CDLL(library).gf_call_0(*range(8))
        os._exit(0)
    os.wait()
    answer["calls"] = [int.from_bytes(value, "little") for _, value in probe.read("slots" if attach else "calls")]
    answer["costs"] = msgspec.to_builtins(probe.costs())
except SourceUnavailable as error:
    answer["refused"] = [error.reason, error.hint]
print(json.dumps(answer))
"""


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with tempfile.TemporaryDirectory(prefix="gpuflight-") as folder:  # pytest's own is closed to other users
        os.chmod(folder, 0o755)
        yield Rig(Path(folder))


def look(
    rig: Rig, *prefix: str, choice: str = "libbpf", programs: str = "on_entry,each_task", attach: str = ""
) -> dict[str, Any]:
    """What a process that is started by ``prefix`` finds."""
    arguments = [rig.library, str(rig.offsets[0]), choice, programs, attach]
    done = subprocess.run(
        [*prefix, sys.executable, "-c", _LOOK, *arguments], capture_output=True, text=True, timeout=60, cwd="/"
    )
    if (
        "ModuleNotFoundError" in done.stderr
        or "can't open file" in done.stderr
        or "setpriv" in done.stderr
        or "shared libraries" in done.stderr
    ):
        pytest.skip("another user cannot use this Python or this repository")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def as_nobody(*capabilities: str) -> list[str]:
    """A user without rights but these."""
    held = ",".join(["-all", *(f"+{name}" for name in capabilities)])
    return [
        "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups",
        f"--inh-caps={held}", f"--ambient-caps={held}", f"--bounding-set={held}",
    ]  # fmt: skip


def item(answer: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(item for item in answer["capabilities"]["items"] if item["name"] == name)
    return found


def test_two_capabilities_are_enough_and_locked_memory_is_no_matter(rig: Rig) -> None:
    answer = look(rig, *as_nobody("bpf", "perfmon"))
    assert answer["capabilities"]["backend"] == "libbpf"
    assert answer["failed"] == []
    assert answer["calls"] == [1]
    assert answer["costs"][0]["run_count"] is None  # unknown, which is not zero
    assert not item(answer, "own cost")["ok"]
    assert "CAP_SYS_ADMIN" in item(answer, "own cost")["hint"]


@pytest.mark.parametrize(
    ("held", "missing"), [((), "CAP_BPF and CAP_PERFMON"), (("bpf",), "CAP_PERFMON"), (("perfmon",), "CAP_BPF")]
)
def test_a_missing_right_is_named_once_with_what_to_do(rig: Rig, held: tuple[str, ...], missing: str) -> None:
    answer = look(rig, *as_nobody(*held))
    reason, hint = answer["refused"]
    assert reason == f"no right to load BPF programs: {missing} missing"
    assert "AmbientCapabilities=CAP_BPF CAP_PERFMON" in hint
    assert answer["capabilities"]["backend"] == ""
    assert [answer["capabilities"]["reason"], answer["capabilities"]["hint"]] == [reason, hint]


def test_rights_within_a_user_namespace_do_not_count(rig: Rig) -> None:
    if subprocess.run(["unshare", "-Ur", "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    reason, hint = look(rig, "unshare", "-Ur")["refused"]
    assert reason == "no right to load BPF programs: capabilities of a user namespace do not count"
    assert "user namespace of the host" in hint


# Forbids one system call to itself, as a container's profile does, and goes on as another program (seccomp(2)).
_FORBID = """
import ctypes, os, struct, sys
code = b"".join(struct.pack("=HBBI", *line) for line in (
    (0x20, 0, 0, 0),                    # load the number of the call
    (0x15, 0, 1, int(sys.argv[1])),     # if it is this one
    (0x06, 0, 0, 0x00050001),           # EPERM
    (0x06, 0, 0, 0x7FFF0000),           # else go on
))
room = ctypes.create_string_buffer(code)
program = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(room)))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0              # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, program, 0, 0) == 0        # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
os.execv(sys.argv[2], sys.argv[2:])
"""


def test_a_filter_of_system_calls_is_told_apart_from_a_missing_right(rig: Rig) -> None:
    number, _ = syscalls._NUMBERS[platform.machine()]
    reason, hint = look(rig, sys.executable, "-c", _FORBID, str(number))["refused"]
    assert reason == "no right to load BPF programs: a seccomp filter forbids bpf()"
    assert "--cap-add BPF" in hint
    assert "SystemCallFilter" in hint


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare of util-linux")
def test_without_type_information_only_what_needs_it_is_missing(rig: Rig) -> None:
    hide = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none /sys/kernel/btf && exec "$@"', "sh"]
    answer = look(rig, *hide)
    assert answer["refused"] == [
        "the probe engine needs type information (BTF) of the kernel",
        "use a kernel with CONFIG_DEBUG_INFO_BTF=y, or install bcc (Debian: python3-bpfcc)",
    ]
    assert answer["capabilities"]["backend"] == "libbpf"
    assert not item(answer, "BTF")["ok"]
    answer = look(rig, *hide, choice="auto", programs="on_entry")
    if answer.get("refused"):
        assert answer["refused"][0] == "the probe engine needs type information (BTF) of the kernel"  # bcc is not here
    else:
        assert answer["opened_by"] == "bcc"
        assert answer["calls"] == [1]


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare of util-linux")
def test_tracepoints_work_where_tracefs_is_mounted_and_say_so_where_not(rig: Rig) -> None:
    mount = ["unshare", "-m", "sh", "-c", 'mount -t tracefs none /sys/kernel/tracing && exec "$@"', "sh"]
    if subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("no tracefs here")
    answer = look(rig, *mount, programs="on_fork", attach="on_fork")
    assert answer["calls"][2] >= 1
    assert item(answer, "tracefs")["ok"]
    if features.tracefs() is None:
        reason, hint = look(rig, programs="on_fork", attach="on_fork")["refused"]
        assert reason == "tracepoint/sched/sched_process_fork cannot be attached: tracefs is not mounted"
        assert hint == "mount -t tracefs nodev /sys/kernel/tracing"


# --- nothing stays behind -------------------------------------------------------------------------------------------

_HOLD = """
import sys
from gpuflight.sources.bpf import Uprobe
from gpuflight.sources.bpf.libbpf import LibbpfBackend
loaded = LibbpfBackend(multi=sys.argv[3] == "multi").load("engine", programs=["on_entry", "on_exec"])
assert not loaded.attach_uprobes("on_entry", [Uprobe(sys.argv[1], int(sys.argv[2]), 5)]).failed
loaded.attach("on_exec")
print("attached", flush=True)
sys.stdin.readline()
"""


class _IdAttr(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint32), ("next", ctypes.c_uint32), ("flags", ctypes.c_uint32)]


def in_kernel(command: int, number: int) -> bool:
    """Whether a program or link of this number is there. ENOENT: it is gone or about to be."""
    try:
        os.close(syscalls.bpf(command, _IdAttr(id=number)))
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        return False
    return True


def held_by(pid: int) -> dict[int, set[int]]:
    """Command that finds it → numbers of the programs and links that a process holds."""
    found: dict[int, set[int]] = {_PROGRAM: set(), _LINK: set()}
    for name in os.listdir(f"/proc/{pid}/fdinfo"):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/fdinfo/{name}").read_text()
            for command, field in ((_PROGRAM, "prog_id"), (_LINK, "link_id")):
                found[command] |= {int(number) for number in re.findall(rf"^{field}:\s+(\d+)", text, re.MULTILINE)}
    return found


_PROGRAM, _LINK = 13, 30  # BPF_PROG_GET_FD_BY_ID, BPF_LINK_GET_FD_BY_ID


@pytest.mark.parametrize("way", ["multi", "classic"])
def test_a_killed_process_leaves_nothing_attached(rig: Rig, way: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, rig.library, str(rig.offsets[0]), way],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"attached\n"
        held = held_by(process.pid)
        assert len(held[_PROGRAM]) >= 2
        assert len(held[_LINK]) == 2
        assert all(in_kernel(command, number) for command, numbers in held.items() for number in numbers)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
    deadline = time.monotonic() + 20  # the kernel frees them after a grace period
    left = {(command, number) for command, numbers in held.items() for number in numbers}
    while left and time.monotonic() < deadline:
        left = {(command, number) for command, number in left if in_kernel(command, number)}
        time.sleep(0.02 if left else 0)
    assert not left
