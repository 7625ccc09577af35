"""Limits of the host and its processes: descriptors, IPC resources, the clock."""

from __future__ import annotations

from gpuflight.bottlenecks.base import CLEAR, ElementRule, Need, Screen, Threshold, Verdict
from gpuflight.bottlenecks.window import Look, told
from gpuflight.graph import nodes

_SLOPE_WINDOW_S = 3600.0
_FEWEST = 256
"""Descriptors: of processes with fewer the limit is not read."""


class DescriptorLeak(ElementRule):
    """A process, or the host, runs out of file descriptors; or a process opens more and more of them."""

    catalogue_id = "S14"
    subject = (nodes.Process, nodes.Host)
    needs = (
        Need(kind=nodes.Process, metrics=("fds_count", "fds_limit_count"), given_by="process_tree"),
        Need(kind=nodes.Host, metrics=("files_open_count", "files_limit_count"), given_by="host_counters"),
    )
    screens = (Screen("fds_count", ">=", _FEWEST), Screen("files_open_count", ">", 0))
    thresholds = {
        "used_warn": Threshold(value=85, clear_at=80, unit="% of the limit", source="Netdata; gpud 80 %"),
        "used_crit": Threshold(value=95, clear_at=90, unit="% of the limit", source="Netdata; gpud 95 %"),
        "hours_left": Threshold(
            value=8, clear_at=16, unit="h", source="as for disks that fill", guess=True, falling=True
        ),
    }
    guard = "processes with 256 descriptors and more; a growth is judged over one hour"
    histories = {nodes.Process: {"fds_count": _SLOPE_WINDOW_S}}
    advice = "see which they are (ls -l /proc/<pid>/fd), close what is opened in loops; raise the limit (ulimit -n)"
    verify = "ls /proc/<pid>/fd | wc -l; grep 'open files' /proc/<pid>/limits"

    def judge(self, look: Look) -> Verdict:
        if isinstance(look.element, nodes.Host):
            return self._judge(look, "files_open_count", "files_limit_count", "files open")
        return self._judge(look, "fds_count", "fds_limit_count", "descriptors")

    def _judge(self, look: Look, count_name: str, limit_name: str, what: str) -> Verdict:
        count = look.metric(count_name)
        if count_name == "fds_count" and count < _FEWEST:
            return CLEAR  # its limit is not read
        limit = look.metric(limit_name)
        share = 100 * count / limit if limit else 0.0
        seen = [look.saw(count_name), look.saw(limit_name)]
        if share > look.limit("used_warn"):
            return look.fired(
                f"{look.label} has {count:.0f} of {limit:.0f} {what} ({share:.0f} %)",
                seen,
                severity="critical" if share > look.limit("used_crit") else "warn",
            )
        series = look.window.history(look.element, count_name)
        now_s = look.window.now_s
        if series is None or series.covered_s(now_s) < _SLOPE_WINDOW_S * 0.95:
            return CLEAR
        if count - min(series.values) < 0.03 * count:  # spares most of them the median of all slopes
            return CLEAR
        slope = series.slope_per_s(now_s, _SLOPE_WINDOW_S)
        if slope is None or slope * 3600 < 0.05 * count:
            return CLEAR
        hours = (limit - count) / slope / 3600
        if hours >= look.limit("hours_left"):
            return CLEAR
        return look.fired(
            f"{look.label} opens {slope * 3600:.0f} {what} an hour more than it closes, and has {count:.0f} of"
            f" {limit:.0f}: full in {hours:.1f} h",
            [look.saw(count_name, samples_count=series.rounds_count, window_s=_SLOPE_WINDOW_S), seen[1]],
        )


class IpcExhaustion(ElementRule):
    """A message queue is nearly full: who writes to it next waits, or fails."""

    catalogue_id = "S20"
    subject = nodes.MessageQueue
    needs = (
        Need(
            kind=nodes.MessageQueue,
            metrics=("queued_bytes", "limit_bytes", "messages_count"),
            given_by="message_queues",
        ),
    )
    thresholds = {
        "full_warn": Threshold(value=80, clear_at=70, unit="%", source="Netdata, semaphores 70/80 %", guess=True),
        "full_crit": Threshold(value=95, clear_at=85, unit="%", source="as above", guess=True),
    }
    guard = "the queue has a limit"
    explains = ("collective_hang", "data_loader_starvation")
    advice = "who reads it? (gpuflight describe --around <queue>); a reader that died leaves it to fill"
    verify = "ipcs -q; ls -l /dev/mqueue"

    def judge(self, look: Look) -> Verdict:
        queued, limit = look.metric("queued_bytes"), look.metric("limit_bytes")
        share = 100 * queued / limit if limit else 0.0
        if share <= look.limit("full_warn"):
            return CLEAR
        return look.fired(
            f"{look.label} holds {told('x_bytes', queued)} of {told('x_bytes', limit)} ({share:.0f} %)",
            [look.saw("queued_bytes"), look.saw("limit_bytes")],
            severity="critical" if share > look.limit("full_crit") else "warn",
        )


class ClockUnsynchronised(ElementRule):
    """The host's clock is not kept in step with others, or is off.

    What happens on several hosts can then not be put in order: skew between ranks, who waited for whom.
    """

    catalogue_id = "S21"
    subject = nodes.Host
    severity = "info"
    needs = (
        Need(
            kind=nodes.Host,
            attributes=("clock_synchronised",),
            metrics=("clock_offset_ms", "clock_max_error_ms"),
            given_by="host_counters",
        ),
        Need(kind=nodes.RdmaDevice),
    )
    thresholds = {"offset": Threshold(value=10, clear_at=5, unit="ms", source="Netdata, system.clock_sync", guess=True)}
    guard = (
        "a clock that nothing keeps matters where hosts are compared: there is an RDMA card, or another host is watched"
    )
    persist_s = 30.0
    advice = "run chrony or systemd-timesyncd; in a VM the hypervisor's clock (kvm-clock, hyperv) may do it"
    verify = "timedatectl; chronyc tracking"

    def judge(self, look: Look) -> Verdict:
        if look.attribute("clock_synchronised") == "no" and self._compared(look):
            return look.fired(
                f"nothing keeps the clock of {look.label} in step (0 sources, as far as the kernel knows)",
                [look.saw("clock_synchronised")],
                severity="info",
            )
        if look.element.attributes["clock_synchronised"] == "no":
            return CLEAR  # no offset is known of a clock that nothing keeps
        offset = look.metric("clock_offset_ms")
        if abs(offset) <= look.limit("offset"):
            return CLEAR
        return look.fired(
            f"the clock of {look.label} is {offset:.1f} ms off",
            [look.saw("clock_offset_ms"), look.saw("clock_max_error_ms")],
            severity="warn",
        )

    @staticmethod
    def _compared(look: Look) -> bool:
        """Whether what happens here is put in order with what happens on other hosts."""
        cards = next(look.window.all(nodes.RdmaDevice), None)
        return cards is not None or any(host.ns for host in look.window.all(nodes.Host))
