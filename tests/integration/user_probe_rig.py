"""A folder of users' probes, the collector over the real sources, and processes that call what is probed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.integration.bpf_rig import Rig

from gpuflight.collectors.user_probes import UserProbeCollector, UserProbesSettings
from gpuflight.graph import Entity
from gpuflight.sources.world import World

CALLS_C = """\
#include "gf.h"
struct sums { __u64 calls; __u64 first; };
GF_PERCPU_HASH(sums, __u32, struct sums, 1024);
GF_UPROBE(on_call)
{
	__u32 pid = bpf_get_current_pid_tgid() >> 32;
	struct sums none = {}, *sum = gf_lookup(sums, &pid);
	if (!sum) {
		gf_insert(sums, &pid, &none);
		sum = gf_lookup(sums, &pid);
	}
	if (!sum)
		return 0;
	gf_add(&sum->calls, 1 + gf_cookie(ctx));
	gf_add(&sum->first, GF_ARG1(ctx));
	return 0;
}
"""
CALLS_TOML = """\
description = "calls"
[[attach]]
program = "on_call"
uprobe = "LIBRARY:gf_call_0"
[[attach]]
program = "on_call"
uprobe = "LIBRARY:gf_call_1"
cookie = 99
[[maps]]
name = "sums"
entity = "Process"
key = ["u32 pid"]
value = ["u64 calls", "u64 first"]
[maps.metrics]
calls_count = { value = "calls" }
first_per_s = { rate = "first" }
"""


class Folder:
    """A folder of probes, safe whatever the umask is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(mode=0o755)

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)
        (self.path / name).chmod(0o644)


class Observer:
    """The collector, round by round, over the real sources."""

    def __init__(self, world: World, folder: Path | None) -> None:
        self.world = world
        self.collector = UserProbeCollector(UserProbesSettings(folder=str(folder) if folder else None))
        self.number = 0

    def round(self) -> dict[str, Entity]:
        """Entities with metrics or reasons, by id; rounds are of no certain length."""
        self.number += 1
        self.collector.notes.clear()
        self.collector.losses.clear()
        self.collector.programs.clear()
        self.world.begin_round(self.number)
        self.collector.observe(self.world)
        return {node.id: node for node in self.collector.seed().nodes if node.metrics or node.unknown}

    def of(self, pid: int) -> Entity:
        found = self.round()
        assert self.notes == []
        return next(node for name, node in found.items() if name.startswith(f"Process(pid={pid},"))

    @property
    def notes(self) -> list[str]:
        said = [note.reason + (f" ({note.hint})" if note.hint else "") for note in self.collector.notes.values()]
        # Process 1 of a sandbox may be hidden from root itself.
        return [line for line in said if "is not looked for in processes of others" not in line]

    def close(self) -> None:
        self.collector.close()
        self.world.close()


class Caller:
    """A process that calls a function of a library whenever it is told to. ``before``: a command that runs it."""

    def __init__(self, library: str, before: tuple[str, ...] = ()) -> None:
        code = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
for line in sys.stdin:
    name, times, value = line.split()
    function = getattr(library, name)
    function.argtypes, function.restype = [ctypes.c_long], ctypes.c_void_p
    for _ in range(int(times)):
        function(int(value))
    print("done", flush=True)
"""
        self.process = subprocess.Popen(
            [*before, sys.executable, "-c", code, library], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid

    def call(self, name: str, times: int, value: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{name} {times} {value}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def write_calls(folder: Folder, rig: Rig, **changes: str) -> None:
    folder.write("calls.c", CALLS_C)
    text = CALLS_TOML.replace("LIBRARY", rig.library)
    for old, new in changes.items():
        text = text.replace(old, new)
    folder.write("calls.toml", text)
