"""What NCCL's RAS answered to STATUS, in either of its forms (see nccl_ras.py for where the facts come from).

JSON (NCCL 2.28.7 and newer) lists every rank of every communicator. The text is made for people: it names ranks only
where they are few, and says of the others how many they are; what it does not name is not known, not healthy.
"""

from __future__ import annotations

import re
from collections import Counter

import msgspec
from msgspec import Struct, field

from gpuflight.errors import SourceUnavailable

_ERRORS = {
    1: "unhandled CUDA error", 2: "system error", 3: "internal error", 4: "invalid argument", 5: "invalid usage",
    6: "remote error",
}  # fmt: skip
"""ncclResult_t of nccl.h; 0 is success and 7 in progress."""
_FINE = (0, 7)
_NO_ANSWER = "does not answer"
_DEAD = "is considered dead"
_LEFT = "has left the communicator"
_LOST_COMMA = re.compile(rb'(?<=[^\s,{\[:])(?=\s*\n\s*"\w+"\s*:)')
"""Where 2.28.9 forgets one, before the last key of a missing rank."""


class Trouble(Struct, frozen=True):
    """What is the matter with a rank of a communicator or a whole process; ``what`` goes behind its name. ``pid`` is in
    its own pid namespace, 0 if not told; ``rank`` is that in the communicator."""

    what: str
    host: str = ""
    pid: int = 0
    rank: int | None = None
    communicator: str = ""

    def __str__(self) -> str:
        who = "ranks that are not listed" if not self.pid else f"process {self.pid}"
        if self.rank is not None:
            who = f"rank {self.rank}"
        where = f"process {self.pid} on {self.host}" if self.pid and self.rank is not None else self.host
        names = ", ".join(text for text in (self.communicator and f"communicator {self.communicator}", where) if text)
        return f"{who} ({names}) {self.what}" if names else f"{who} {self.what}"


class Member(Struct, frozen=True):
    """A rank of a communicator that answered; ``counts`` are the collectives that it launched, by operation."""

    host: str
    pid: int
    rank: int
    communicator: str
    size: int
    state: str
    counts: dict[str, int]

    def __str__(self) -> str:
        counts = "".join(f", {count} {name}" for name, count in self.counts.items() if count)
        return f"{self.communicator}: rank {self.rank} of {self.size}, {self.state}{counts}"


class Report(Struct):
    """One answer. ``lists_all``: whether every member of every communicator is among ``members``. ``timeouts_count``:
    processes that RAS waited for in vain. ``strange_count``: lines of a text that nothing is known of."""

    version: str = ""
    lists_all: bool = False
    members: list[Member] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    timeouts_count: int = 0
    strange_count: int = 0


def parse(body: bytes, *, structured: bool) -> Report:
    """Raises SourceUnavailable for what is no answer of RAS, or only a part of one."""
    return _parse_json(body) if structured else _parse_text(body)


# --- JSON ------------------------------------------------------------------------------------------------------------


class _Status(Struct):
    init_state: int = 0
    async_error: int = 0
    finalize_called: bool = False
    destroy_flag: bool = False
    abort_flag: bool = False

    @property
    def name(self) -> str:
        """As the text calls it."""
        if self.abort_flag:
            return "ABORT"
        if self.finalize_called or self.destroy_flag:
            return "FINALIZE"
        return "INIT" if self.init_state else "RUNNING"


class _Rank(Struct):
    rank: int
    host: str = ""
    pid: int = 0
    status: _Status = field(default_factory=_Status)
    collective_counts: dict[str, int] = field(default_factory=dict)


class _Absence(Struct):
    unresponsive: bool | None = None
    considered_dead: bool | None = None


class _Missing(Struct):
    rank: int
    host: str = ""
    pid: int = 0
    status: _Absence = field(default_factory=_Absence)


class _Communicator(Struct):
    hash: str
    size: int
    ranks: list[_Rank] = field(default_factory=list)
    missing_ranks: list[_Missing] = field(default_factory=list)


class _Ras(Struct):
    timeouts_count: int = 0


class _Answer(Struct):
    communicators: list[_Communicator]
    nccl_version: str = ""
    ras: _Ras = field(default_factory=_Ras)


def _parse_json(body: bytes) -> Report:
    try:
        answer = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SourceUnavailable(f"its answer is not understood: {str(error)[:120]}") from None
    report = Report(answer.nccl_version, lists_all=True, timeouts_count=answer.ras.timeouts_count)
    for communicator in answer.communicators:
        _read(communicator, report)
    return report


def _decode(body: bytes) -> _Answer:
    try:
        return msgspec.json.decode(body, type=_Answer)
    except msgspec.DecodeError:
        return msgspec.json.decode(_LOST_COMMA.sub(b",", body), type=_Answer)


def _read(communicator: _Communicator, report: Report) -> None:
    name, ranks = communicator.hash, communicator.ranks
    most: Counter[str] = Counter()
    for rank in ranks:
        most |= Counter(rank.collective_counts)  # the maximum of each
    usual = Counter(rank.status.name for rank in ranks).most_common(1)
    for rank in ranks:
        host, pid = _known(rank.host, rank.pid)
        status = rank.status
        if pid:
            report.members.append(
                Member(host, pid, rank.rank, name, communicator.size, status.name, rank.collective_counts)
            )
        for error in {status.init_state, status.async_error}.difference(_FINE):
            what = f"reports an error ({_ERRORS.get(error, error)})"
            report.troubles.append(Trouble(what, host, pid, rank.rank, name))
        if status.name != usual[0][0]:
            what = f"is in state {status.name}, most in {usual[0][0]}"
            report.troubles.append(Trouble(what, host, pid, rank.rank, name))
        behind = [
            f"{operation} {count} of {most[operation]}"
            for operation, count in rank.collective_counts.items()
            if count < most[operation]
        ]
        if behind:
            report.troubles.append(Trouble(_behind(behind), host, pid, rank.rank, name))
    for missing in communicator.missing_ranks:
        what = _LEFT if missing.status.unresponsive is False else _NO_ANSWER
        if missing.status.considered_dead:
            what = _DEAD
        report.troubles.append(Trouble(what, *_known(missing.host, missing.pid), missing.rank, name))


def _known(host: str, pid: int) -> tuple[str, int]:
    return (host, pid) if pid > 0 and host != "unknown" else ("", 0)


def _behind(parts: list[str]) -> str:
    return f"is behind ({', '.join(parts)})"


# --- text ------------------------------------------------------------------------------------------------------------

_END = re.compile(r"^Warnings\r?\n=+\r?\n", re.MULTILINE)
_VERSION = re.compile(r"NCCL version (\S+)")
_SECTION = re.compile(r"#\d+-\d+ \((\w+)\) (INCOMPLETE|ERROR|MISMATCH)")
_OF_PROCESSES = {"INCOMPLETE": _NO_ANSWER, "DEAD": _DEAD}
_OF_SEVERAL = {"INCOMPLETE": "do not answer", "DEAD": "are considered dead"}
_PROCESS = re.compile(r"Process (\d+) on node (\S+) managing")
_RANK = re.compile(r"Rank (\d+) (.*?)-- (?:GPU .* managed by process (\d+) on node (\S+)|\[)")
_DIFFER = re.compile(r"Communicator ranks have different (?:(status)|(\w+).*)$")
_ALIKE = re.compile(r"\d+ (?:ranks|job process\w*) (.*)$")
_LAUNCHED = re.compile(r"(?:has|have) launched up to operation (\d+)")
_IS_IN = re.compile(r"(?:has|have) status (\w+)")
_TIMEOUTS = re.compile(r"Encountered (\d+) communication timeout")
_GROUP = re.compile(r"\s*\d+\s+(\d+)\s+\d+\s+[\d-]+\s+(\d+)\s+\d+\s+[A-Z]+\s+([A-Z,]+)\s*$")
_PLAIN = ("Missing communicator data", "Initialization error", "Asynchronous error", "TIMEOUT", "Errors", "Warnings",
          "===", "[could not find")  # fmt: skip


def _parse_text(body: bytes) -> Report:
    text = body.decode("utf-8", "replace")
    version = _VERSION.search(text)
    if version is None or _END.search(text) is None:
        raise SourceUnavailable("its answer is not understood" if version is None else "its answer is cut off")
    summary, _, rest = text.partition("\nErrors\n")
    report = Report(version[1])
    reader = _Reader(report)
    for line in rest.splitlines():
        reader.read(line.strip())
    reader.end()
    if not report.troubles:  # whatever form that took
        for group in map(_GROUP.match, summary.splitlines()):
            if group is not None and group[3] != "OK":
                report.troubles.append(Trouble(f"of {group[1]} communicators of {group[2]} ranks: {group[3]}"))
    return report


class _Reader:
    """Reads the parts "Errors" and "Warnings" line by line."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._communicator = ""
        self._section = ""  # INCOMPLETE, DEAD (of processes); INCOMPLETE, ERROR, MISMATCH (of a communicator)
        self._named = True  # whether the section named somebody
        self._operation = ""  # whose counts differ
        self._alike = ""  # what is said of the ranks that follow
        self._counts: list[tuple[int, Trouble | None]] = []  # of that operation; None: of several ranks

    def read(self, line: str) -> None:
        section = _SECTION.match(line)
        if section is not None or line in _OF_PROCESSES:
            self.end()
            self._communicator = f"0x{section[1].lstrip('0')}" if section is not None else ""
            self._section = section[2] if section is not None else line
            self._named, self._alike = False, ""
        elif (process := _PROCESS.match(line)) is not None:
            self._add(_OF_PROCESSES.get(self._section, _NO_ANSWER), process[2], int(process[1]), None)
        elif (rank := _RANK.match(line)) is not None:
            host, pid = (rank[4], int(rank[3])) if rank[3] else ("", 0)
            self._rank(int(rank[1]), rank[2].strip() or self._alike, host, pid)
        elif (differ := _DIFFER.match(line)) is not None:
            self._end_of_counts()
            self._operation = "" if differ[1] else differ[2]
            self._alike = ""
        elif (alike := _ALIKE.match(line)) is not None:
            self._alike = alike[1]
            if self._operation:
                self._counts.append((_count(self._alike), None))
        elif (timeouts := _TIMEOUTS.match(line)) is not None:
            self._report.timeouts_count = int(timeouts[1])
        elif line and not line.startswith(_PLAIN):
            self._report.strange_count += 1

    def end(self) -> None:
        """The end of a section."""
        self._end_of_counts()
        if self._section and not self._named:
            what = _OF_SEVERAL.get(self._section, f"have the trouble {self._section}")
            self._report.troubles.append(Trouble(what, communicator=self._communicator))
        self._section, self._operation, self._named = "", "", True

    def _rank(self, rank: int, said: str, host: str, pid: int) -> None:
        status = _IS_IN.match(said)
        if self._section == "INCOMPLETE":
            self._add(_NO_ANSWER, host, pid, rank)
        elif status is not None:
            what = _LEFT if status[1] == "NOCOMM" else f"is in state {status[1]}, others are not"
            self._add(what, host, pid, rank)
        elif said.startswith("reported "):
            self._add(f"reports an error ({said.removeprefix('reported ')})", host, pid, rank)
        elif self._operation:
            self._counts.append((_count(said), Trouble("", host, pid, rank, self._communicator)))

    def _end_of_counts(self) -> None:
        most = max((count for count, _ in self._counts), default=0)
        for count, trouble in self._counts:
            if trouble is not None and count < most:
                what = _behind([f"{self._operation} {count} of {most}"])
                self._add(what, trouble.host, trouble.pid, trouble.rank)
        self._counts = []

    def _add(self, what: str, host: str, pid: int, rank: int | None) -> None:
        self._named = True
        self._report.troubles.append(Trouble(what, host, pid, rank, self._communicator))


def _count(said: str) -> int:
    launched = _LAUNCHED.match(said)
    return int(launched[1]) if launched is not None else 0  # "not launched any operations"
