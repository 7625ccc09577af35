"""What could be seen over many rounds: one line per collector, folded from each round's coverage."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, field

from gpuflight.rounds import Coverage, Note, ProgramTime


class CoverageSummary(Struct, kw_only=True):
    """How one collector did over all rounds.

    ``status`` is that of the last round, ``reason`` and ``hint`` those of the last round that was not ok. Times are
    means per round, ``wall_ms_max`` the longest; losses add up, and so does what programs in the kernel cost; a note
    has its largest count.
    """

    collector: str
    status: str = "ok"
    reason: str = ""
    hint: str = ""
    rounds: dict[str, int] = field(default_factory=dict)
    wall_ms: float = 0.0
    wall_ms_max: float = 0.0
    cpu_ms: float = 0.0
    nodes_count: int = 0
    edges_count: int = 0
    losses: dict[str, int] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    programs: list[ProgramTime] = field(default_factory=list)


class CoverageFold:
    """Takes each round's coverage; ``summary`` gives it per collector, in order of first sight."""

    def __init__(self) -> None:
        self._lines: dict[str, CoverageSummary] = {}

    def add(self, coverage: Iterable[Coverage]) -> None:
        """One more round."""
        for line in coverage:
            known = self._lines.setdefault(line.collector, CoverageSummary(collector=line.collector))
            known.rounds[line.status] = known.rounds.get(line.status, 0) + 1
            known.status = line.status
            if line.status != "ok":
                known.reason, known.hint = line.reason, line.hint
            count = sum(known.rounds.values())
            known.wall_ms += (line.wall_ms - known.wall_ms) / count
            known.cpu_ms += (line.cpu_ms - known.cpu_ms) / count
            known.wall_ms_max = max(known.wall_ms_max, line.wall_ms)
            known.nodes_count, known.edges_count = line.nodes_count, line.edges_count
            for what, lost in line.losses.items():
                known.losses[what] = known.losses.get(what, 0) + lost
            for note in line.notes:
                self._note(known, note)
            for program in line.programs:
                self._program(known, program)

    def summary(self) -> list[CoverageSummary]:
        """One line per collector."""
        for line in self._lines.values():
            line.wall_ms, line.cpu_ms = round(line.wall_ms, 3), round(line.cpu_ms, 3)
        return list(self._lines.values())

    @staticmethod
    def _note(line: CoverageSummary, note: Note) -> None:
        for known in line.notes:
            if known.reason == note.reason:
                known.count = max(known.count, note.count)
                return
        line.notes.append(Note(reason=note.reason, hint=note.hint, count=note.count))

    @staticmethod
    def _program(line: CoverageSummary, program: ProgramTime) -> None:
        for known in line.programs:
            if known.program == program.program:
                known.runs_count += program.runs_count
                known.run_ms += program.run_ms
                return
        line.programs.append(ProgramTime(program=program.program, runs_count=program.runs_count, run_ms=program.run_ms))
