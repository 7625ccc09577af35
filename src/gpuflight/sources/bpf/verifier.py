"""What the kernel's verifier says of a program that it does not accept: pages, with the reason near the end."""

from __future__ import annotations

_COUNTS = ("processed ", "verification time", "stack depth", "insns_state", "mark_read")
_BEGIN, _END = "-- BEGIN PROG LOAD LOG --", "-- END PROG LOAD LOG --"


def last_words(log: str) -> str:
    """The reason, in one line; empty if there is none."""
    said = [line.strip() for line in log.splitlines()]
    meant = [line for line in said if line and not line.startswith(_COUNTS)]
    return meant[-1] if meant else ""


def log_among(lines: list[str]) -> str:
    """The verifier's log in what libbpf warned of; empty without one."""
    begin = next((number for number, line in enumerate(lines) if line.endswith(_BEGIN)), None)
    if begin is None:
        return ""
    end = next((number for number, line in enumerate(lines) if number > begin and _END in line), len(lines))
    return "\n".join(lines[begin + 1 : end])
