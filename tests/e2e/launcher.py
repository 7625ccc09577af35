"""Becomes another program under limits of rights; a script of the standard library alone, run by ``runner.py``.

    python launcher.py '{"uid": 65534, "netlink_errno": 97, …}' PROGRAM ARGUMENT…

Whatever is asked for holds from the first instruction of PROGRAM on. Where the kernel or the user does not allow it,
nothing is run: one line on stderr, exit code 125.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import struct
import sys
from typing import Any, NoReturn

REFUSED = 125

libc = ctypes.CDLL(None, use_errno=True)
libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]

CLONE_NEWNS = 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2

# <linux/audit.h>, <asm/unistd.h>: machine → (AUDIT_ARCH_…, number of socket(2))
ARCHITECTURES = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}

AF_NETLINK = 16


class Instructions(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def refuse(why: str) -> NoReturn:
    print(f"launcher: {why}", file=sys.stderr)
    sys.exit(REFUSED)


def check(result: int, what: str) -> None:
    if result != 0:
        refuse(f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    check(libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()), f"mount {target}")


def private_mounts() -> None:
    """A mount namespace of our own, in which nothing that we do is seen outside."""
    check(libc.unshare(CLONE_NEWNS), "unshare")
    mount("", "/", "", MS_REC | MS_PRIVATE)


def closed_to_others(path: str) -> str:
    """The first folder above ``path`` (every link followed) that an unrelated user may not enter, or ``""``."""
    path = os.path.realpath(path)
    while path != "/":
        path = os.path.dirname(path)
        if not os.stat(path).st_mode & 0o001:
            shut = path
            while (parent := os.path.dirname(path)) != path:
                path = parent
                if not os.stat(path).st_mode & 0o001:
                    shut = path
            return shut
    return ""


def reveal(path: str) -> None:
    """Make one folder enterable for everybody, below folders that stay closed: nothing else of them is there."""
    path = os.path.realpath(path)
    while shut := closed_to_others(os.path.join(path, "x")):
        if shut == path:
            refuse(f"{path} is closed to others")
        kept = os.open(path, os.O_PATH)
        mount("revealed", shut, "tmpfs", 0, "mode=755,size=64k")
        os.makedirs(path)
        mount(f"/proc/self/fd/{kept}", path, "", MS_BIND | MS_REC)
        os.close(kept)


def become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def without_netlink(error: int) -> None:
    """socket(AF_NETLINK, …) fails with ``error`` in this process and all that it becomes and starts."""
    try:
        architecture, socket_call = ARCHITECTURES[platform.machine()]
    except KeyError:
        refuse(f"no seccomp filter is written for {platform.machine()}")
    load, equal, answer = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K of <linux/bpf_common.h>
    allow, fail = 0x7FFF0000, 0x00050000 | error  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO
    program = [
        (load, 0, 0, 4),  # struct seccomp_data: nr, arch, instruction pointer, six arguments of 8 bytes
        (equal, 0, 5, architecture),
        (load, 0, 0, 0),
        (equal, 0, 3, socket_call),
        (load, 0, 0, 16),  # the low half of the first argument; both machines are little-endian
        (equal, 0, 1, AF_NETLINK),
        (answer, 0, 0, fail),
        (answer, 0, 0, allow),
    ]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    filter_program = Instructions(len(program), code)
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(filter_program), 0, 0), "seccomp")


def main() -> None:
    asked: dict[str, Any] = json.loads(sys.argv[1])
    command = sys.argv[2:]
    uid = asked.get("uid")
    reveals = [
        path for path in asked.get("reveal", []) if uid is not None and closed_to_others(os.path.join(path, "x"))
    ]
    if reveals or asked.get("hidepid") or asked.get("tmpfs"):
        private_mounts()
    for path in reveals:
        reveal(path)
    for path, size_bytes in asked.get("tmpfs", {}).items():
        mount("small", path, "tmpfs", 0, f"mode=777,size={size_bytes}")
    os.chdir(os.getcwd())  # onto what is mounted there now
    if asked.get("hidepid"):
        # Kernels before 5.8 have one set of options for all mounts of a pid namespace, and keep the first.
        mount("proc", "/proc", "proc", 0, f"hidepid={asked['hidepid']}")
    if asked.get("open_files"):
        resource.setrlimit(resource.RLIMIT_NOFILE, (asked["open_files"],) * 2)
    if uid is not None:
        become(uid)
    if asked.get("hidepid") and os.path.exists("/proc/1/stat"):
        refuse("this kernel does not hide processes in a second mount of /proc")
    if asked.get("netlink_errno"):
        without_netlink(asked["netlink_errno"])
    try:
        os.execv(command[0], command)
    except OSError as error:
        refuse(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
