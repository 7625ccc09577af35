"""Our corpus: what rules are tried on, each part with labels that say what it shows.

    make corpus        # python -m tests.tools.corpus: records the real faults anew, writes docs/rules/accuracy.md

* ``tests/data/recordings/faults.tar.zst``: real faults (``tests.tools.faults``) on a real machine.
* ``tests/data/recordings/idle.tar.zst``: the same machine doing nothing.
* Made-up machines with GPUs under the fake NVML, and logs of made-up programs: made anew each time, in seconds.

``tests/data/recordings/labels.toml`` has the labels of all.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import zstandard
from tests.fakes.nvml.build import FakeNvml, fake_nvml
from tests.fakes.nvml.world import Tree
from tests.rule_scenes import Player
from tests.tools.gpus import description
from tests.tools.inject import COLLECTORS
from tests.unit.recorded_program import MS, US, Program
from tests.unit.test_rule_conformance import CASES

from gpuflight.bottlenecks.backtest import Episode, Score, read_labels, run, score
from gpuflight.bottlenecks.build import make_engine
from gpuflight.bottlenecks.settings import RulesSettings
from gpuflight.cli.doctor_sessions import recorded
from gpuflight.cli.plugin_settings import make_collectors
from gpuflight.cli.rules import episodes_of
from gpuflight.core.controller import Controller
from gpuflight.rounds import Round
from gpuflight.settings import Settings
from gpuflight.sources.clock import ManualClock
from gpuflight.sources.nvml import Nvml
from gpuflight.sources.open import open_world

ROOT = Path(__file__).parents[2]
RECORDINGS = ROOT / "tests" / "data" / "recordings"
LABELS = RECORDINGS / "labels.toml"
PAGE = ROOT / "docs" / "rules" / "accuracy.md"
STEP_S = 5.0
USERS = {number: 500 + number for number in range(8)}
ROUNDS = 20

Change = Callable[[FakeNvml, Tree, int], None]
"""What happens to a machine before the round of a number (from 1)."""


def _from_round(first: int, section: str, values: dict[str, str]) -> Change:
    def change(fake: FakeNvml, tree: Tree, number: int) -> None:
        if number == first:
            fake.set(section, values)

    return change


def _hot(fake: FakeNvml, tree: Tree, number: int) -> None:
    if number >= 4:
        fake.set("gpu 2", {"clock_event_reasons": "0x40", "temperature": "91", "clocks": "1200 1200 2619 1545"})


def _zombie(fake: FakeNvml, tree: Tree, number: int) -> None:
    if number == 4:  # the process is gone from /proc, its memory is not given back
        shutil.rmtree(tree.root / f"proc/{USERS[3]}")
        fake.set("gpu 3", {"utilization": "0 0", "clock_event_reasons": "0x1"})


def _errors(fake: FakeNvml, tree: Tree, number: int) -> None:
    if number >= 4:
        fake.set("gpu 6", {"link.errors": f"0 0 {200 * number} 0"})


MACHINES: dict[str, Change] = {
    "healthy-training": lambda _fake, _tree, _number: None,
    "idle-gpus": lambda _fake, _tree, _number: None,
    "zombie-memory": _zombie,
    "thermal-throttle": _hot,
    "degraded-pcie": _from_round(4, "gpu 5", {"pcie_gen": "3", "pcie_width": "8"}),
    "dead-nvlink": _from_round(4, "gpu 6", {"link.17.state": "0"}),
    "nvlink-errors": _errors,
    "gpu-lost": _from_round(4, "gpu 1", {"lost": "yes"}),
}
"""Made-up machines: eight GPUs that train, and what happens to one of them; on ``idle-gpus`` nobody trains."""

PROGRAMS: dict[str, Program] = {
    "healthy-program": Program(),
    "idle-gaps": Program(pause_ns=900 * MS),
    "host-bound": Program(python_ns=900 * US, syncs=0),
    "launch-bound": Program(steps=25, kernels=5000, kernel_ns=2 * US, python_ns=0, launch_ns=9 * US),
    "slow-loader": Program(load_ns=40 * MS),
    "pageable-copies": Program(pageable=True, copy_ns=3 * MS),
    "small-copies": Program(copies=60, copy_bytes=4096, copy_ns=3 * US),
    "many-syncs": Program(syncs=50, kernel_ns=300 * US, python_ns=300 * US),
    "gc-pauses": Program(gc_ns=6 * MS),
    "late-start": Program(start_up_ns=1_500_000 * MS),
}
"""Logs of made-up programs, each with one fault."""

SCENES: dict[str, str] = {
    "slow-disk": "slow_storage",
    "cross-numa": "remote_numa",
    "straggler": "straggler_rank",
    "low-overlap": "exposed_communication",
    "hanging-collective": "collective_hang",
    "rdma-errors": "rdma_fatal",
}
"""Made-up rounds: those of a rule's own case, here before all rules."""


def machine_rounds(name: str, folder: Path) -> Iterator[Round]:
    """The rounds of a made-up machine, ``STEP_S`` apart by its own clock. Raises NoCompiler."""
    folder.mkdir(parents=True)
    users = {} if name == "idle-gpus" else USERS
    fake = fake_nvml(str(description(folder, users)))
    tree = Tree(folder / "root")
    for pid in users.values():
        tree.process(pid, comm="python3")
    clock = ManualClock()
    wanted = {"nvml", "process_tree"}
    collectors = [each for each in make_collectors(Settings()) if each.name in wanted]
    with fake.activated():
        world = replace(open_world(str(folder / "root"), clock=clock), nvml=Nvml(fake.library, clock=clock))
        controller = Controller(world, settings=Settings(interval_s=STEP_S), collectors=collectors)
        try:
            for number in range(1, ROUNDS + 1):
                MACHINES[name](fake, tree, number)
                clock.advance(STEP_S)
                yield controller.run_round()
        finally:
            controller.close()


def program_rounds(name: str, folder: Path) -> Iterator[Round]:
    """The one round that a log makes."""
    folder.mkdir(parents=True)
    PROGRAMS[name].write(folder)
    yield recorded(str(folder))


def scene_rounds(name: str, _folder: Path) -> Iterator[Round]:
    """The rounds of the scene in which a rule fires."""
    rounds: list[Round] = []

    class Keeper:
        def judge(self, done: Round) -> None:
            rounds.append(done)

    Player(Keeper()).play(CASES[SCENES[name]].fires)  # type: ignore[arg-type]
    return iter(rounds)


def episodes(folder: Path) -> dict[str, list[Episode]]:
    """What the rules say of every part of the corpus. ``folder``: for what is made anew."""
    found: dict[str, list[Episode]] = {}
    for path in sorted(RECORDINGS.glob("*.tar.zst")):
        found[path.name] = episodes_of(str(path), Settings(collectors=COLLECTORS))
    for names, rounds in ((MACHINES, machine_rounds), (PROGRAMS, program_rounds), (SCENES, scene_rounds)):
        for name in names:
            engine = make_engine(RulesSettings())
            assert engine is not None
            found[name] = run(engine, rounds(name, folder / name), name)
    return found


def scores(found: dict[str, list[Episode]]) -> list[Score]:
    """Of every rule that fired or should have."""
    labels = read_labels(str(LABELS))
    return score([each for part in found.values() for each in part], labels.expect, labels.ignore)


def page(figures: list[Score], parts: int) -> str:
    """docs/rules/accuracy.md."""
    lines = [
        "<!-- made by `make corpus` -->",
        "# How right the rules are",
        "",
        f"Over our corpus of {parts} parts (`tests/tools/corpus.py`): real faults recorded on a real machine, the same"
        " machine doing nothing, made-up machines with eight GPUs under a fake NVML, logs of made-up programs,"
        " made-up rounds. What each shows is in `tests/data/recordings/labels.toml`; a finding that no label expects is"
        " wrong (notes excepted).",
        "Rules that are not named neither fired nor were expected to: no part shows what they are about.",
        "",
        "| rule | right | wrong | missed | precision | recall |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for each in figures:
        shares = (f"{100 * share:.0f} %" if share is not None else "" for share in (each.precision, each.recall))
        lines.append(f"| `{each.rule}` | {each.right} | {each.wrong} | {each.missed} | {' | '.join(shares)} |")
    right, wrong, missed = (sum(getattr(each, name) for each in figures) for name in ("right", "wrong", "missed"))
    total = Score(rule="", right=right, wrong=wrong, missed=missed)
    precision, recall = (f"{100 * (share or 0):.0f} %" for share in (total.precision, total.recall))
    lines.append(f"| all | {right} | {wrong} | {missed} | {precision} | {recall} |")
    return "\n".join(lines) + "\n"


def record() -> None:
    """Record the real faults, and the machine doing nothing, in namespaces of their own."""
    RECORDINGS.mkdir(parents=True, exist_ok=True)
    for name, more in (("faults", []), ("idle", ["none"])):
        out = RECORDINGS / f"{name}.tar.zst"
        command = [sys.executable, "-m", "tests.tools.inject", "--alone", "--out", str(out), *more]
        told = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
        print(json.dumps(told, indent=1))
        neutral(out)


def neutral(path: Path) -> None:
    """Take out of a recording where it was made: names of folders by others as long, people, the pid namespace by
    the first one (the pids of the fake NVML are of the recorded namespace)."""
    swaps = {str(ROOT): "/opt/train", sys.prefix: "/opt/train/venv"}
    unpacked = BytesIO(zstandard.ZstdDecompressor().stream_reader(BytesIO(path.read_bytes())).read())
    packed = BytesIO()
    with tarfile.open(fileobj=unpacked) as before, tarfile.open(fileobj=packed, mode="w") as after:
        for member in before:
            file = before.extractfile(member)
            data = file.read() if file is not None else b""
            for old, new in swaps.items():
                short = new[: len(old)] if len(new) >= len(old) else new + "x" * (len(old) - len(new))
                data = data.replace(old.encode(), short.encode())
            data = re.sub(rb"pid:\[40265\d{5}\]", b"pid:[4026531836]", data)
            data = re.sub(
                rb"(?<=\\n)[\w-]+:x:\d+:\d+:[^:]*:/home/[^:]*:[\w/]*(\\n)?", b"", data
            )  # people of /etc/passwd
            data = re.sub(rb"(memory:/)\w+/[0-9a-f]{32}", rb"\1", data)
            member.size = len(data)
            after.addfile(member, BytesIO(data))
    path.write_bytes(zstandard.ZstdCompressor(level=19).compress(packed.getvalue()))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the corpus, and the table of how right the rules are.")
    parser.add_argument("--table-only", action="store_true", help="do not record anew")
    parser.add_argument("--show", action="store_true", help="print every finding")
    arguments = parser.parse_args()
    if not arguments.table_only:
        record()
    with tempfile.TemporaryDirectory() as folder:
        found = episodes(Path(folder))
    if arguments.show:
        for part, told in found.items():
            for each in told:
                print(f"{part}: {each.from_s:g}-{each.to_s}: {each.severity}: {each.id}: {each.message}")
    PAGE.write_text(page(scores(found), len(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
