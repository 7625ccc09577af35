"""A session on its way: what is left of it, what waits, whether its writer is gone."""

from __future__ import annotations

import os
from collections import deque

from msgspec import Struct, field

from gpuflight.agent.gate import FIRST_S, LONGEST_S
from gpuflight.agent.plan import Item, Plan
from gpuflight.events.files.folder import SessionFolder
from gpuflight.events.tail.cursors import Cursor
from gpuflight.subscribers.retry import Backoff

COMPLETE = ""
"""Name of the job that says that a session is complete, beside those of its channels."""


class Job(Struct, eq=False):
    """A channel of a session, of which one window at a time is sent, in order."""

    session: Session
    channel: str
    items: deque[Item] = field(default_factory=deque)
    busy: bool = False
    due_s: float = 0.0
    refusals: int = 0
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_S, LONGEST_S))
    told: str = ""


class Session(Struct, eq=False):
    """``state``: open; closed (by us); others (closed by another agent, or not wanted)."""

    folder: SessionFolder
    plan: Plan
    state: str = "open"
    cursors: dict[str, Cursor] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    live: bool = True
    ask_s: float = 0.0
    over_since_s: float = -1.0
    final: bool = False
    """Planned once more after its writer was gone and all had settled."""
    stale: bool = False
    """Its folder has to be looked at again."""
    orphaned: bool = False
    holes_since_s: dict[tuple[str, int], float] = field(default_factory=dict)
    reason: str = ""

    @property
    def path(self) -> str:
        return self.folder.path

    @property
    def busy(self) -> bool:
        return any(job.busy for job in self.jobs.values())

    @property
    def left(self) -> int:
        """Windows to be sent."""
        return sum(len(job.items) for job in self.jobs.values())

    def take(self, folder: SessionFolder, plan: Plan, now_s: float) -> None:
        """A new plan. What is under way stays first."""
        self.folder, self.plan, self.stale = folder, plan, False
        for channel, items in plan.items.items():
            job = self.jobs.get(channel)
            if job is None:
                job = self.jobs[channel] = Job(self, channel)
            if job.busy and job.items:
                under_way = job.items[0].key
                items = [job.items[0], *(item for item in items if item.key != under_way)]
            job.items = deque(items)
        holes = set(plan.missing)
        self.holes_since_s = {hole: self.holes_since_s.get(hole, now_s) for hole in holes}

    def held_back(self, job: Job, now_s: float, wait_s: float) -> bool:
        """Whether a hole before the next window is still waited for."""
        number = job.items[0].window.number
        return number is not None and any(
            channel == job.channel and hole < number and now_s - since_s < wait_s
            for (channel, hole), since_s in self.holes_since_s.items()
        )

    def why_not_whole(self) -> str:
        """Why not all of it has arrived; empty if it has."""
        missing = [f"{channel}.{number}: missing" for channel, number in self.plan.missing]
        reasons = list(dict.fromkeys([*self.plan.notes, *self.plan.losses, *missing]))
        more = f"; and {len(reasons) - 10} more" if len(reasons) > 10 else ""
        return "; ".join(reasons[:10]) + more

    def prune(self) -> int:
        """Delete the windows and companions of a session that was delivered; nothing that is not of the format."""
        from gpuflight.events.files.names import parse_name

        count = 0
        for sub in (f"{self.path}/.tmp", self.path):
            try:
                names = os.listdir(sub)
            except OSError:
                continue
            for name in names:
                ours = name.startswith(".gpufl-") or name in (".uploaded", ".failed")
                if ours or parse_name(sub, name) is not None:
                    os.unlink(f"{sub}/{name}")
                    count += 1
            try:
                os.rmdir(sub)
            except OSError:  # there is something else in it
                pass
        return count
