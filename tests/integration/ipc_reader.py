"""One round of the IPC and container collectors in a process of its own, printed as JSON; run as a script by the tests.

With ``ipcns`` as argument the process itself first moves into a new IPC namespace; with ``nobody`` it gives up all
rights first (after its imports: an ordinary user may not be able to read the interpreter of a root's environment).
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

CLONE_NEWIPC = 0x08000000
PR_SET_DUMPABLE = 4
NOBODY = 65534


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if "ipcns" in sys.argv and libc.unshare(CLONE_NEWIPC) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    from gpuflight.collectors.containers import ContainersCollector
    from gpuflight.collectors.message_queues import MessageQueuesCollector
    from gpuflight.collectors.pipes import PipesCollector
    from gpuflight.collectors.semaphores import SemaphoresCollector
    from gpuflight.collectors.shared_memory import SharedMemoryCollector
    from gpuflight.graph import nodes
    from gpuflight.sources.open import open_world

    if "nobody" in sys.argv:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        libc.prctl(PR_SET_DUMPABLE, 1)  # as a program started by that user would be
    world = open_world()
    world.procfs.begin_round(1)
    world.cgroups.begin_round(1)
    world.ipc.begin_round(1)
    processes = world.procfs.processes().values()
    frontier: list[Any] = [nodes.Process(pid=stat.pid, start=stat.start) for stat in processes]
    host: list[Any] = [nodes.Host(hostname=world.procfs.hostname)]
    answer: dict[str, Any] = {"uid": os.getuid()}
    for collector in (
        ContainersCollector(),
        PipesCollector(),
        SharedMemoryCollector(),
        MessageQueuesCollector(),
        SemaphoresCollector(),
    ):
        collector.observe(world)
        batch = collector.expand(frontier)
        orphans = collector.expand(host) if nodes.Host in collector.expands else None
        answer[collector.name] = {
            "nodes": sorted({node.id for node in batch.nodes}),
            "edges": sorted({edge.id for edge in batch.edges}),
            "orphans": sorted({node.id for node in orphans.nodes}) if orphans else [],
            "notes": {note.reason: note.count for note in collector.notes.values()},
            "losses": dict(collector.losses),
        }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
