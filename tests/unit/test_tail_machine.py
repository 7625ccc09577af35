"""Whatever writers, rotators, compressors, crashes and damage do: each line once into the store, at least once out.

The oracle is the bytes written. A line that was cut off, or whose file was thrown away before it could be read, may be
missing, but must not come twice; anything that was never a whole line must not come at all.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.fakes.tailing import SESSION, FaultyDisk, Rig, line

from gpuflight.events.tail import Chunk


class Logs(RuleBasedStateMachine):
    """A writer of generation E, B or A, and a tailer."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="gpuflight-tail-"))
        self.number = 0
        self.window = 0
        self.pending: list[Chunk] = []
        self.must: set[bytes] = set()
        self.may: set[bytes] = set()
        self.of_active: list[bytes] = []
        self.owed = b""
        """What has to be written before the next line: the rest of one, its newline."""
        self.cut: bytes = b""
        """The line that is not whole yet."""
        self.retired: list[Path] = []

    @initialize(
        generation=st.sampled_from("EBA"),
        chunk_bytes=st.sampled_from([64, 100, 1000, 1 << 20]),
        network=st.booleans(),
        open_files=st.sampled_from([1, 256]),
    )
    def begin(self, generation: str, chunk_bytes: int, network: bool, open_files: int) -> None:
        self.generation = generation
        logs = self.root / "logs"
        self.session = logs / SESSION if generation == "E" else logs
        (self.session / ".tmp").mkdir(parents=True) if generation == "E" else logs.mkdir()
        disk = FaultyDisk()
        disk.network = network
        self.rig = Rig(
            logs, disk=disk, chunk_bytes=chunk_bytes, max_open_files=open_files, max_inflating=1, settle_s=15
        )

    @property
    def active(self) -> Path:
        if self.generation == "E":
            return self.session / ".tmp" / "device.log"
        return self.session / (f"app.device.{self.window}.log" if self.generation == "A" else "app.device.log")

    # --- the writer ----------------------------------------------------------------------------------------------

    @rule(
        sizes=st.lists(st.sampled_from([0, 0, 60, 150, 900]), min_size=1, max_size=6),
        end=st.sampled_from(["newline", "none", "cut"]),
        at=st.integers(1, 20),
    )
    def append(self, sizes: list[int], end: str, at: int) -> None:
        data = self.owed
        if self.cut:
            self.done(self.cut)
        self.owed = self.cut = b""
        for index, size in enumerate(sizes):
            self.number += 1
            text = line(self.number, size)
            if index < len(sizes) - 1 or end == "newline":
                data += text + b"\n"
                self.done(text)
            elif end == "none":
                data += text
                self.owed = b"\n"
                self.done(text)
            else:
                data += text[:at]
                self.owed, self.cut = text[at:] + b"\n", text
        with open(self.active, "ab") as file:
            file.write(data)

    def done(self, text: bytes) -> None:
        self.must.add(text)
        self.of_active.append(text)

    def close_active(self) -> None:
        self.owed = self.cut = b""
        self.of_active = []

    @precondition(lambda self: self.active.exists())
    @rule()
    def rotate(self) -> None:
        if self.generation == "A":
            self.window += 1
        elif self.generation == "E":
            self.window += 1
            target = self.session / ".tmp" / f"device.{self.window}.log"
            os.link(self.active, target)
            os.unlink(self.active)
            self.retired.append(target)
        else:
            self.shift()
            os.rename(self.active, self.session / "app.device.1.log")
        self.close_active()

    def shift(self) -> None:
        """As generation B: every number one higher."""
        for number in range(self.window, 0, -1):
            for suffix in (".log", ".log.gz"):
                old = self.session / f"app.device.{number}{suffix}"
                if old.exists():
                    os.rename(old, self.session / f"app.device.{number + 1}{suffix}")
        self.window += 1

    @precondition(lambda self: self.generation == "E" and bool(self.retired))
    @rule(which=st.integers(0, 3))
    def export_step(self, which: int) -> None:
        """One of: half compressed, compressed beside, plain removed, moved out."""
        path = self.retired[which % len(self.retired)]
        packed = path.with_name(path.name + ".gz")
        part = path.with_name(path.name + ".gz.part")
        if path.exists() and not packed.exists():
            if not part.exists():
                data = gzip.compress(path.read_bytes(), 1)
                part.write_bytes(data[: len(data) // 2])
            else:
                part.write_bytes(gzip.compress(path.read_bytes(), 1))
                os.rename(part, packed)
        elif path.exists():
            path.unlink()
        else:
            os.link(packed, self.session / packed.name)
            os.unlink(packed)
            self.retired.remove(path)

    @precondition(lambda self: self.generation == "B" and self.window > 0)
    @rule()
    def compress_in_place(self) -> None:
        """The newest plain one; its name ends in .gz before all of it is there."""
        for number in range(1, self.window + 1):
            path = self.session / f"app.device.{number}.log"
            if path.exists():
                data = gzip.compress(path.read_bytes(), 1)
                with open(f"{path}.gz", "wb") as file:
                    file.write(data[: len(data) // 2])
                    file.flush()
                    self.poll(3)
                    file.write(data[len(data) // 2 :])
                path.unlink()
                return

    @precondition(lambda self: self.active.exists())
    @rule()
    def truncate(self) -> None:
        self.excuse()
        os.truncate(self.active, 0)
        self.close_active()

    @precondition(lambda self: self.generation == "B" and self.active.exists())
    @rule(look=st.booleans())
    def copytruncate(self, look: bool) -> None:
        self.shift()
        shutil.copyfile(self.active, self.session / "app.device.1.log")
        if look:
            self.poll(2)
        os.truncate(self.active, 0)
        self.close_active()

    @precondition(lambda self: self.active.exists())
    @rule()
    def recreate(self) -> None:
        """Deleted and made anew, as a rule with the same inode."""
        self.excuse()
        self.active.unlink()
        self.active.touch()
        self.close_active()

    def excuse(self) -> None:
        """Lines that are thrown away unread need not come."""
        for text in self.of_active:
            if text not in self.rig.store.lines:
                self.must.discard(text)
                self.may.add(text)

    # --- the reader ----------------------------------------------------------------------------------------------

    @rule(taken=st.integers(0, 10))
    def poll(self, taken: int) -> None:
        chunks = self.rig.poll()
        for chunk in chunks:  # the writer leaves no blank lines
            assert not chunk.data.startswith(b"\n") and b"\n\n" not in chunk.data
            assert len(chunk.data) == chunk.end - chunk.start
        self.pending += chunks
        now, self.pending = self.pending[:taken], self.pending[taken:]
        self.rig.take(now)

    @rule()
    def take_the_last_first(self) -> None:
        """Commits need not be in order; into the store they have to."""
        for chunk in self.pending:
            self.rig.store.write(chunk)
            self.rig.sink += chunk.lines()
        for chunk in reversed(self.pending):
            self.rig.tailer.commit(chunk)
        self.pending = []

    @rule()
    def kill(self) -> None:
        self.pending = []
        self.rig.kill()

    @rule()
    def restart(self) -> None:
        self.pending = []
        self.rig.restart()

    @rule(how=st.sampled_from(["nothing", "nul", "half", "json", "gone", "flip"]))
    def damage(self, how: str) -> None:
        self.pending = []
        self.rig.tailer.close(save=True)
        path = Path(self.rig.checkpoint or "")
        data = path.read_bytes()
        if how == "gone":
            path.unlink()
        else:
            damaged = {
                "nothing": b"",
                "nul": b"\0" * len(data),
                "half": data[: len(data) // 2],
                "json": b'{"positions": 7}',
                "flip": data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
            }
            path.write_bytes(damaged[how])
        self.rig.tailer = self.rig.open()
        assert self.rig.count("bad_checkpoint") == (how not in ("nothing", "gone"))

    # --- what has to hold ------------------------------------------------------------------------------------------

    @invariant()
    def nothing_twice_and_nothing_made_up(self) -> None:
        if not hasattr(self, "rig"):
            return
        stored = self.rig.store.lines
        assert all(count == 1 for count in stored.values()), [t for t, c in stored.items() if c > 1]
        assert set(stored) <= self.must | self.may, set(stored) - self.must - self.may

    def teardown(self) -> None:
        try:
            if hasattr(self, "rig"):
                self.take_the_last_first()
                self.rig.drain()
                stored, sunk = Counter(self.rig.store.lines), set(self.rig.sink)
                assert self.must <= set(stored), sorted(self.must - set(stored))
                self.nothing_twice_and_nothing_made_up()
                assert self.must <= sunk
                assert self.rig.tailer.uncommitted_bytes == 0
                self.rig.tailer.close()
        finally:
            Rig.close_all()
            shutil.rmtree(self.root, ignore_errors=True)


def test_logs() -> None:
    run_state_machine_as_test(Logs, settings=settings(stateful_step_count=40, deadline=None))
