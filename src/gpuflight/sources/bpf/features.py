"""What this kernel lets this process do with probes: asked by trying, because containers, lockdown and seccomp say no
where the capabilities say yes. One reason, one hint."""

from __future__ import annotations

import errno
import functools
import os
import platform

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf import syscalls
from gpuflight.sources.bpf.objects import require_machine
from gpuflight.sources.bpf.uprobes import uprobe_pmu

BTF = "/sys/kernel/btf/vmlinux"
BTF_HINT = "use a kernel with CONFIG_DEBUG_INFO_BTF=y, or install bcc (Debian: python3-bpfcc)"
RIGHTS_HINT = "run as root, or grant CAP_BPF and CAP_PERFMON (systemd: AmbientCapabilities=CAP_BPF CAP_PERFMON)"
TRACEFS_HINT = "mount -t tracefs nodev /sys/kernel/tracing"
_SYS_ADMIN, _PERFMON, _BPF = 21, 38, 39  # linux/capability.h
_TRACEFS = ("/sys/kernel/tracing", "/sys/kernel/debug/tracing")


def require_btf() -> None:
    """Raises SourceUnavailable if the kernel does not describe its types."""
    if not os.path.exists(BTF):
        raise SourceUnavailable("the kernel carries no type information (BTF)", BTF_HINT)


def require_rights() -> None:
    """Raises SourceUnavailable if this process may not load a probe."""
    require_machine(platform.machine())
    reason, hint = _why_no_programs()
    if reason:
        raise SourceUnavailable(reason, hint)


def why_no_uprobe_multi() -> str:
    """Why a program cannot be attached to many places by one link; empty if it can."""
    return _why_no_uprobe_multi()


def require_uprobe_multi() -> None:
    """Raises SourceUnavailable if symbols have to be attached one by one."""
    require_rights()
    if reason := why_no_uprobe_multi():
        raise SourceUnavailable(reason, "symbols are attached one by one, which costs more; use Linux 6.6 or newer")


def require_classic_uprobes() -> None:
    """Raises SourceUnavailable if uprobes by perf events cannot be had, or carry no cookie."""
    try:
        uprobe_pmu()
    except (OSError, ValueError) as error:
        raise SourceUnavailable(
            f"the kernel has no uprobes for perf events: {error}", "use a kernel with CONFIG_UPROBE_EVENTS=y"
        ) from error


def require_tracefs() -> None:
    """Raises SourceUnavailable without tracefs, which only classic tracepoints need. We mount nothing ourselves."""
    if tracefs() is None:
        raise SourceUnavailable("not mounted; only classic tracepoints of your own probes need it", TRACEFS_HINT)


def require_statistics() -> None:
    """Raises SourceUnavailable if nobody counts what programs cost and we may not ask for it."""
    from gpuflight.sources.bpf.costs import STATISTICS

    STATISTICS.start()
    try:
        if not STATISTICS.counting:
            hint = "run with CAP_SYS_ADMIN, or set kernel.bpf_stats_enabled=1, to see it" if STATISTICS.wanted else ""
            raise SourceUnavailable(STATISTICS.why_not, hint)
    finally:
        STATISTICS.stop()


def tracefs() -> str | None:
    """Where tracefs is mounted; None if it is not, or not readable."""
    return next((path for path in _TRACEFS if os.path.exists(f"{path}/events")), None)


@functools.cache
def _why_no_programs() -> tuple[str, str]:
    try:
        os.close(syscalls.load_nothing())
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES):
            return _why_not_permitted()
        if error.errno == errno.ENOSYS:
            return "the kernel has no BPF", "use a kernel with CONFIG_BPF_SYSCALL=y"
        return f"the kernel loads no uprobe programs: {error.strerror}", "use a kernel with CONFIG_BPF_EVENTS=y"
    return "", ""


def _why_not_permitted() -> tuple[str, str]:
    """What takes the right away: mostly a capability, else what stands above capabilities."""
    if missing := missing_rights(_status("CapEff")):
        return f"no right to load BPF programs: {' and '.join(missing)} missing", RIGHTS_HINT
    try:
        with open("/proc/self/uid_map", encoding="utf-8") as file:
            whole = file.read().split() == ["0", "0", "4294967295"]
    except OSError:
        whole = True
    if not whole:
        return (
            "no right to load BPF programs: capabilities of a user namespace do not count",
            "run in the user namespace of the host (podman and docker: not rootless, --userns=host)",
        )
    if _status("Seccomp") == 2:
        return (
            "no right to load BPF programs: a seccomp filter forbids bpf()",
            "allow bpf and perf_event_open (docker: --cap-add BPF --cap-add PERFMON; systemd: SystemCallFilter=)",
        )
    return (
        "the kernel lets nobody load BPF programs",
        "see /sys/kernel/security/lockdown (confidentiality forbids them), and the security modules' audit log",
    )


def missing_rights(effective: int) -> list[str]:
    """Capabilities to load probes that a set (bits as in ``CapEff``) does not hold; CAP_SYS_ADMIN is enough alone."""
    if effective >> _SYS_ADMIN & 1:
        return []
    return [name for name, bit in (("CAP_BPF", _BPF), ("CAP_PERFMON", _PERFMON)) if not effective >> bit & 1]


def _status(name: str) -> int:
    """A hexadecimal field of /proc/self/status; 0 if it is not there."""
    try:
        with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
            return next((int(line.split()[1], 16) for line in file if line.startswith(f"{name}:")), 0)
    except (OSError, ValueError, IndexError):
        return 0


@functools.cache
def _why_no_uprobe_multi() -> str:
    """Linux 6.6 brought it. As in libbpf's own probe: for a folder instead of a file such a kernel says EBADF."""
    try:
        program = syscalls.load_nothing(syscalls.UPROBE_MULTI)
    except OSError as error:
        return f"the kernel does not load programs for uprobe_multi: {error.strerror}"
    try:
        os.close(syscalls.link_uprobe_multi(program, "/", [0], [0]))
    except OSError as error:
        if error.errno != errno.EBADF:
            return f"the kernel has no uprobe_multi (Linux 6.6 has it): {error.strerror}"
    finally:
        os.close(program)
    return ""
