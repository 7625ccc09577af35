"""The tape: what is recorded is what is replayed, round by round, errors included; and files that are no recordings."""

from __future__ import annotations

import errno
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.proc import FakeFs

from gpuflight.errors import InputError, SourceUnavailable
from gpuflight.sources import tape_reader, tape_writer
from gpuflight.sources.clock import ManualClock
from gpuflight.sources.recording import Tape
from gpuflight.sources.redact_recording import redact_answer
from gpuflight.sources.taped_fs import RecordingFs, ReplayFs

Answer = bytes | Exception


def answering(answer: Answer) -> Callable[[], bytes]:
    def live() -> bytes:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return live


def ask(tape: Tape, key: str, answer: Answer = b"never", source: str = "proc") -> Any:
    """The answer, or what identifies the error."""
    try:
        return tape.ask(source, key, answering(answer))
    except OSError as error:
        return (type(error), error.errno)
    except SourceUnavailable as error:
        return (error.reason, error.hint)


def record(path: Path, rounds: list[dict[str, Answer]], **options: Any) -> ManualClock:
    clock = ManualClock()
    tape = Tape.record(str(path), clock, **options)
    for number, answers in enumerate(rounds, 1):
        clock.advance(5)
        tape.begin_round(number)
        for key, answer in answers.items():
            ask(tape, key, answer)
    tape.close()
    return clock


def pack(path: Path, members: list[tuple[str, bytes]], cut: int | None = None) -> None:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w|") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    path.write_bytes(zstandard.compress(plain.getvalue())[:cut])


def unpack(path: Path) -> dict[str, bytes]:
    with (
        path.open("rb") as file,
        zstandard.ZstdDecompressor().stream_reader(file) as plain,
        tarfile.open(fileobj=plain, mode="r|") as tar,
    ):
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def test_a_live_tape_only_asks() -> None:
    tape = Tape()
    assert ask(tape, "k", b"v") == b"v"
    assert tape.rounds == []
    tape.begin_round(1)
    tape.close()


def test_each_round_has_its_answers(tmp_path: Path) -> None:
    path = tmp_path / "r.tar.zst"
    record(path, [{"a": b"1", "b": b"x"}, {"a": b"1", "b": b"y"}, {"a": b"\xff\x00", "late": b"l"}])
    tape = Tape.replay(str(path))
    assert tape.rounds == [1, 2, 3]
    expected = {1: (b"1", b"x"), 2: (b"1", b"y"), 3: (b"\xff\x00", b"y"), 9: (b"\xff\x00", b"y"), 0: (b"1", b"x")}
    for number, answers in expected.items():
        tape.begin_round(number)
        assert (ask(tape, "a"), ask(tape, "b")) == answers
        assert ask(tape, "late") == b"l"  # its first answer, also before it was asked


def test_errors_are_answers(tmp_path: Path) -> None:
    path = tmp_path / "r.tar.zst"
    gone = ProcessLookupError(errno.ESRCH, "No such process")
    denied = PermissionError(errno.EACCES, "Permission denied")
    record(path, [{"a": gone, "b": denied, "c": SourceUnavailable("no driver", "install it")}, {"a": b"back"}])
    tape = Tape.replay(str(path))
    tape.begin_round(1)
    assert ask(tape, "a") == (ProcessLookupError, errno.ESRCH)
    assert ask(tape, "b") == (PermissionError, errno.EACCES)
    assert ask(tape, "c") == ("no driver", "install it")
    tape.begin_round(2)
    assert ask(tape, "a") == b"back"


def test_the_recording_session_gets_the_same_answers_as_without(tmp_path: Path) -> None:
    tape = Tape.record(str(tmp_path / "r"), ManualClock(), redactor=lambda source, key, answer: b"***")
    tape.begin_round(1)
    assert ask(tape, "a", b"secret") == b"secret"
    assert ask(tape, "b", PermissionError(errno.EPERM, "no")) == (PermissionError, errno.EPERM)
    with pytest.raises(KeyError):
        tape.ask("proc", "c", answering(KeyError("bug")))
    tape.close()


def test_what_was_never_asked_is_not_in_the_recording(tmp_path: Path) -> None:
    path = tmp_path / "r"
    record(path, [{"a": b"1"}])
    tape = Tape.replay(str(path))
    tape.begin_round(1)
    assert "no answer of proc to z" in ask(tape, "z")[0]
    assert "no answer of sys to a" in ask(tape, "a", source="sys")[0]
    assert "no answer" in ask(Tape.blank(), "a")[0]


def test_an_answer_that_stays_is_stored_once(tmp_path: Path) -> None:
    path = tmp_path / "r"
    record(path, [{"a": b"same", "b": bytes([number])} for number in range(3)])
    files = unpack(path)
    assert [json.loads(line)["k"] for line in files["0001/proc.jsonl"].splitlines()] == ["a", "b"]
    assert [json.loads(line)["k"] for line in files["0003/proc.jsonl"].splitlines()] == ["b"]


@given(
    st.lists(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([b"1", b"2", None])), max_size=6), min_size=1)
)
def test_answers_that_change_within_a_round_come_in_their_order(rounds: list[list[tuple[str, bytes | None]]]) -> None:
    """A process that ends between two collectors of one round has done so in the replay too."""
    gone = ProcessLookupError(errno.ESRCH, "No such process")
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/r"
        tape = Tape.record(path, ManualClock())
        for number, questions in enumerate(rounds, 1):
            tape.begin_round(number)
            for key, answer in questions:
                ask(tape, key, gone if answer is None else answer)
        tape.close()
        tape = Tape.replay(path)
        for number, questions in enumerate(rounds, 1):
            tape.begin_round(number)
            for key, answer in questions:
                assert ask(tape, key) == ((ProcessLookupError, errno.ESRCH) if answer is None else answer)


def test_keys_that_are_gone_are_forgotten_and_still_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape_writer, "FORGET_ROUNDS", 4)
    path = tmp_path / "r"
    tape = Tape.record(str(path), ManualClock())
    for number in range(1, 40):
        tape.begin_round(number)
        ask(tape, f"key {number}", b"%d" % number)
    assert tape._writer is not None
    assert len(tape._writer._last) < 10
    tape.close()
    tape = Tape.replay(str(path))
    tape.begin_round(39)
    assert [ask(tape, f"key {number}") for number in (1, 20, 39)] == [b"1", b"20", b"39"]


def test_the_clock_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "r"
    record(path, [{"a": b"1"}, {"a": b"2"}])
    tape = Tape.replay(str(path))
    tape.begin_round(1)
    first = (tape.clock.wall_ns(), tape.clock.monotonic_s())
    assert first == (1_700_000_005_000_000_000, 1005.0)
    tape.begin_round(2)
    assert (tape.clock.wall_ns() - first[0], tape.clock.monotonic_s() - first[1]) == (5_000_000_000, 5.0)


def test_what_the_file_says_of_itself(tmp_path: Path) -> None:
    path = tmp_path / "r"
    record(path, [{"a": b"1"}], hostname="node1", version="1.2", redactor=redact_answer)
    files = unpack(path)
    assert list(files) == ["meta.json", "0001/round.json", "0001/proc.jsonl", "end.json"]
    meta = Tape.replay(str(path)).meta
    assert (meta["hostname"], meta["version"], meta["redacted"], meta["schema"]) == ("node1", "1.2", True, 1)
    assert json.loads(files["0001/proc.jsonl"]) == {"k": "a", "t": "1"}
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_existing_file_stays_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.write_bytes(b"mine")
    with pytest.raises(InputError, match="exists already"):
        record(path, [{"a": b"1"}])
    assert path.read_bytes() == b"mine"
    record(path, [{"a": b"1"}], force=True)
    assert Tape.replay(str(path)).rounds == [1]
    assert os.listdir(tmp_path) == ["r"]


def test_a_file_that_appears_while_recording_stays(tmp_path: Path) -> None:
    path = tmp_path / "r"
    tape = Tape.record(str(path), ManualClock())
    tape.begin_round(1)
    path.write_bytes(b"mine")
    with pytest.raises(InputError, match="cannot write"):
        tape.close()
    assert path.read_bytes() == b"mine"
    assert os.listdir(tmp_path) == ["r"]


def test_nothing_appears_before_the_end_nor_after_a_discard(tmp_path: Path) -> None:
    path = tmp_path / "r"
    tape = Tape.record(str(path), ManualClock())
    tape.begin_round(1)
    ask(tape, "a", b"1")
    assert not path.exists()
    tape.discard()
    tape.close()
    assert os.listdir(tmp_path) == []


def test_closing_twice_and_answers_after_the_end(tmp_path: Path) -> None:
    path = tmp_path / "r"
    tape = Tape.record(str(path), ManualClock())
    tape.begin_round(1)
    tape.close()
    tape.close()
    assert ask(tape, "a", b"1") == b"1"  # a thread that was left behind


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_full_disk_ends_the_recording_without_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_the_end: bool
) -> None:
    tape = Tape.record(str(tmp_path / "r"), ManualClock())
    tape.begin_round(1)
    ask(tape, "a", b"1")

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tape._writer, "_add", full)
    with pytest.raises(OSError, match=f"No space left.*{tmp_path}/r"):
        tape.close() if at_the_end else tape.begin_round(2)
    assert os.listdir(tmp_path) == []
    assert ask(tape, "b", b"2") == b"2"
    tape.begin_round(3)
    tape.close()


def test_a_place_that_cannot_be_written() -> None:
    with pytest.raises(InputError, match="cannot write /nowhere/at/all"):
        Tape.record("/nowhere/at/all", ManualClock())


META = ("meta.json", b'{"schema": 1}')
ROUND = ("0001/round.json", b'{"round": 1, "wall_ns": 1, "monotonic_s": 1.0}')
END = ("end.json", b'{"rounds_count": 1}')


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("meta.json", b'{"schema": 99}'), ROUND, END], "newer gpuflight"),
        ([("other.json", b"{}")], "does not begin with meta.json"),
        ([META, ROUND], "cut short"),
        ([META, END], "cut short"),
        ([("meta.json", b"{}"), END], "damaged recording"),
        ([("meta.json", b"[1]"), END], "damaged recording"),
        ([META, ("0001/round.json", b"{}"), END], "damaged recording"),
        ([META, ROUND, ("0001/proc.jsonl", b"{not json\n"), END], "damaged recording"),
        ([META, ROUND, ("0001/proc.jsonl", b'{"t": "no key"}\n'), END], "damaged recording"),
        ([META, ROUND, ("0001/proc.jsonl", b'{"k": "a", "x": 1}\n'), END], "damaged recording"),
        ([META, ROUND, ("0001/proc.jsonl", b'{"k": "a", "e": ["x"]}\n'), END], "damaged recording"),
        ([META, ROUND, ("0001/proc.jsonl", b'{"k": "a", "b": "?"}\n'), END], "damaged recording"),
    ],
)
def test_files_that_are_no_recordings(tmp_path: Path, members: list[tuple[str, bytes]], message: str) -> None:
    path = tmp_path / "r"
    pack(path, members)
    with pytest.raises(InputError, match=message) as error:
        Tape.replay(str(path))
    assert "\n" not in str(error.value)


def test_no_file_no_archive_and_every_cut(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        Tape.replay(str(tmp_path / "none"))
    with pytest.raises(InputError, match="cannot read"):
        Tape.replay(str(tmp_path))
    path = tmp_path / "r"
    path.write_bytes(b"hello")
    with pytest.raises(InputError, match="not a gpuflight recording"):
        Tape.replay(str(path))
    record(tmp_path / "whole", [{"a": os.urandom(500)}, {"a": os.urandom(500)}])
    whole = (tmp_path / "whole").read_bytes()
    for end in range(0, len(whole) - 1, 37):
        path.write_bytes(whole[:end])
        with pytest.raises(InputError):
            Tape.replay(str(path))


def test_members_with_hostile_names_touch_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "in" / "r"
    path.parent.mkdir()
    pack(path, [META, ROUND, ("../../evil", b"x"), ("/evil", b"x"), ("0001/proc.jsonl", b'{"k":"a","t":"1"}\n'), END])
    tape = Tape.replay(str(path))
    assert ask(tape, "a") == b"1"
    assert os.listdir(tmp_path) == ["in"]


def test_a_bomb_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape_reader, "MAX_BYTES", 1000)
    path = tmp_path / "r"
    pack(path, [META, ROUND, ("0001/proc.jsonl", b" " * 2000), END])
    with pytest.raises(InputError, match="not loaded"):
        Tape.replay(str(path))


_answers = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([errno.ENOENT, errno.ESRCH, errno.EACCES, errno.EIO]).map(lambda number: OSError(number, "x")),
    st.tuples(st.text(max_size=5), st.text(max_size=5)).map(lambda pair: SourceUnavailable(*pair)),
)
_rounds = st.lists(st.dictionaries(st.sampled_from("abcd"), _answers, max_size=4), min_size=1, max_size=6)


@given(rounds=_rounds)
def test_replay_is_the_recording(tmp_path_factory: pytest.TempPathFactory, rounds: list[dict[str, Answer]]) -> None:
    path = tmp_path_factory.mktemp("tape") / "r"
    record(path, rounds)
    tape = Tape.replay(str(path))
    for number, answers in enumerate(rounds, 1):
        tape.begin_round(number)
        for key, answer in answers.items():
            assert ask(tape, key) == ask(Tape(), key, answer)


# --- files ---------------------------------------------------------------------------------------------------------


def test_files_are_replayed_as_they_were(tmp_path: Path) -> None:
    fs = FakeFs()
    fs.files = {"/proc/1/stat": b"1 (\xff) S", "/sys/x/numa_node": b"-1\n", "/etc/os-release": b"ID=x"}
    fs.links = {"/proc/1/exe": "/caf\udce9"}
    fs.sizes["/proc/1/fd"] = 3
    fs.denied.add("/proc/2")
    path = str(tmp_path / "r")
    tape = Tape.record(path, ManualClock())
    taped = RecordingFs(fs, tape)
    replayed_tape = None

    def answers(through: Any) -> list[Any]:
        def guarded(what: Callable[[str], Any], of: str) -> Any:
            try:
                return what(of)
            except OSError as error:
                return (type(error), error.errno, error.filename)

        return [
            guarded(through.read, "/proc/1/stat"),
            guarded(through.read_record, "/sys/x/numa_node"),
            guarded(through.read, "/etc/os-release"),
            guarded(through.listdir, "/proc/1"),
            guarded(through.readlink, "/proc/1/exe"),
            guarded(through.realpath, "/sys/x"),
            guarded(through.stat, "/proc/1/fd"),
            guarded(through.lstat, "/proc/1/exe"),
            guarded(through.statvfs, "/"),
            guarded(through.read, "/proc/2/stat"),
            guarded(through.read, "/proc/3/stat"),
        ]

    tape.begin_round(1)
    recorded = answers(taped)
    assert recorded == answers(fs)
    tape.close()
    replayed_tape = Tape.replay(path)
    assert answers(ReplayFs(replayed_tape)) == recorded
    assert {name for name in unpack(Path(path)) if name.endswith("jsonl")} == {
        f"0001/{source}.jsonl" for source in ("proc", "sys", "files")
    }


def test_a_path_that_was_never_asked_for_does_not_exist(tmp_path: Path) -> None:
    record(tmp_path / "r", [{}])
    fs = ReplayFs(Tape.replay(str(tmp_path / "r")))
    with pytest.raises(FileNotFoundError) as error:
        fs.read("/proc/9/stat")
    assert error.value.filename == "/proc/9/stat"


# --- what may be stored --------------------------------------------------------------------------------------------


def test_secrets_do_not_reach_the_file() -> None:
    assert redact_answer("proc", "read /proc/7/cmdline", b"app\0--token\0abc\0") == b"app\0--token\0***\0"
    assert redact_answer("proc", "read /proc/7/cmdline", b"") == b""
    assert redact_answer("proc", "read /proc/7/task/8/cmdline", b"app\0--token=abc\0") == b"app\0--token=***\0"
    environ = b"HOME=/root\0RANK=1\0HF_TOKEN=abc\0"
    assert redact_answer("proc", "read /proc/7/environ", environ) == b"RANK=1\0"
    mount = b"1 0 0:1 / /m rw - cifs //h/s rw,username=u,password=abc\n"
    assert b"abc" not in redact_answer("proc", "read /proc/self/mountinfo", mount)
    assert redact_answer("proc", "read /proc/cmdline", b"root=/dev/vda token=abc\n") == b"root=/dev/vda token=***\n"
    assert redact_answer("files", "read /etc/passwd", b"ann:x:1000:1000:Ann B:/home/ann:/bin/sh\n") == (
        b"ann:x:1000:1000::/home/ann:\n"
    )
    daemon = b'{"proxies": {"http-proxy": "http://u:abc@proxy"}}'
    assert b"abc" not in redact_answer("files", "read /etc/docker/daemon.json", daemon)
    assert redact_answer("tools", "run npu-smi", b"password=abc") == b"password=***"


def test_everything_else_is_stored_as_it_is() -> None:
    for source, key in (("proc", "read /proc/7/stat"), ("sys", "read /sys/x"), ("netlink", "dump"), ("nvml", "name")):
        assert redact_answer(source, key, b"token=abc \xff") == b"token=abc \xff"
    assert redact_answer("proc", "read /proc/7/cmdline", b"caf\xe9\0\xff\0\0") == b"caf\xe9\0\xff\0\0"
