"""Users' probes: which files may run in the kernel, and where they are attached. No kernel needed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf.user_probe_folder import Unsafe, read_text, scan_folder
from gpuflight.sources.bpf.user_probe_places import NoPlace, find_file, find_place
from gpuflight.sources.bpf.user_probe_spec import Place

# --- the folder ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "probes"
    path.mkdir(mode=0o755)
    for name, text in (("reads.toml", "description = ''"), ("reads.c", "int x;"), ("gf_more.h", ""), ("notes.txt", "")):
        (path / name).write_text(text)
        (path / name).chmod(0o644)
    return path


def test_a_probe_is_a_toml_with_code_beside_it(folder: Path) -> None:
    (one,) = scan_folder(str(folder))
    assert (one.name, one.file, one.code, one.mistake) == ("reads", "reads.toml", "reads.c", "")
    assert one.toml == "description = ''"
    (folder / "reads.bpf.o").write_bytes(b"")
    (folder / "reads.bpf.o").chmod(0o644)
    assert scan_folder(str(folder))[0].code == "reads.bpf.o"


def test_what_was_changed_has_another_fingerprint(folder: Path) -> None:
    (before,) = scan_folder(str(folder))
    assert scan_folder(str(folder)) == [before]
    for name in ("reads.toml", "reads.c", "gf_more.h"):
        (folder / name).write_text("something else entirely")
        (after,) = scan_folder(str(folder))
        assert after.fingerprint != before.fingerprint, name
        before = after
    (folder / "notes.txt").write_text("nobody compiles this")
    assert scan_folder(str(folder))[0].fingerprint == before.fingerprint


def mistakes(folder: Path) -> list[str]:
    return [one.mistake for one in scan_folder(str(folder)) if one.mistake]


def test_files_without_the_other_half_are_said(folder: Path) -> None:
    (folder / "lone.c").write_text("")
    (folder / "half.toml").write_text("")
    (folder / "Bad-Name.toml").write_text("")
    assert mistakes(folder) == [
        "Bad-Name.toml: 'Bad-Name' is no name of a probe (small letters, digits and _, at most 40)",
        "half.toml: there is neither half.c nor half.bpf.o beside it (write one)",
        "lone.c: there is no lone.toml beside it (write one)",
    ]


def test_more_probes_than_anyone_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuflight.sources.bpf.user_probe_folder.MAX_PROBES", 1)
    (folder / "second.toml").write_text("")
    assert mistakes(folder) == [f"{folder}: 2 probes, the first 1 are used (use fewer)"]


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_file_that_others_may_write_is_refused(folder: Path, mode: int) -> None:
    (folder / "reads.toml").chmod(mode)
    (said,) = mistakes(folder)
    who = "everybody" if mode & stat.S_IWOTH else f"group {os.stat(folder).st_gid}"
    assert said == f"reads.toml: it is not used: reads.toml may be written by {who}: chmod go-w it"
    (folder / "reads.c").chmod(mode)
    with pytest.raises(Unsafe, match=r"reads.c may be written by"):
        read_text(str(folder / "reads.c"))


@pytest.mark.parametrize("where", ["", ".."])
def test_a_folder_that_others_may_write_is_refused(folder: Path, where: str) -> None:
    changed = (folder / where).resolve()
    before = stat.S_IMODE(changed.stat().st_mode)
    changed.chmod(0o777)
    try:
        with pytest.raises(SourceUnavailable, match=f"{changed} may be written by everybody: chmod go-w it"):
            scan_folder(str(folder))
        changed.chmod(0o1777)  # a sticky folder above is fine, the folder itself must not take files from everybody
        if where:
            assert scan_folder(str(folder))
        else:
            with pytest.raises(SourceUnavailable, match="may be written by everybody"):
                scan_folder(str(folder))
    finally:
        changed.chmod(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_somebody_else_is_refused(folder: Path) -> None:
    os.chown(folder / "reads.toml", 12345, 12345)
    (said,) = mistakes(folder)
    assert "reads.toml belongs to user 12345; it must belong to root or to user 0" in said
    os.chown(folder, 12345, 12345)
    with pytest.raises(SourceUnavailable, match=r"probes belongs to user 12345"):
        scan_folder(str(folder))


def test_a_link_is_judged_by_what_it_leads_to(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir(mode=0o755)
    (target / "real.toml").write_text("description = 'linked'")
    (target / "real.toml").chmod(0o644)
    (folder / "reads.toml").unlink()
    (folder / "reads.toml").symlink_to(target / "real.toml")
    assert scan_folder(str(folder))[0].toml == "description = 'linked'"
    target.chmod(0o777)
    assert "elsewhere may be written by everybody" in mistakes(folder)[0]


def test_what_is_no_text_of_a_reasonable_size(folder: Path) -> None:
    (folder / "reads.toml").write_bytes(b"\xff")
    assert mistakes(folder) == ["reads.toml: it is not used: it is not UTF-8 text; save it as such"]
    os.truncate(folder / "reads.toml", 2 << 20)
    assert "it has 2097152 bytes; at most 1048576 are read" in mistakes(folder)[0]
    (folder / "reads.toml").unlink()
    os.mkfifo(folder / "reads.toml", 0o644)
    assert "it is no regular file" in mistakes(folder)[0]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable, match="cannot be read: No such file") as caught:
        scan_folder(str(tmp_path / "nothing"))
    assert "collectors.user_probes.folder" in caught.value.hint


# --- places ----------------------------------------------------------------------------------------------------------


def test_a_function_of_a_library_of_ours() -> None:
    path, offset = find_place(Place("libc.so.6", "getpid"))
    assert os.path.basename(path) == "libc.so.6"
    assert offset > 0
    assert find_place(Place(path, "getpid", plus=4)) == (path, offset + 4)
    assert find_place(Place(path, offset=77)) == (path, 77)
    inside, same = find_place(Place("libc.so.6", "getpid"), os.getpid())
    assert inside == f"/proc/{os.getpid()}/root{path}"
    assert same == offset


@pytest.mark.parametrize(
    ("place", "pid", "words", "hint"),
    [
        (Place("libno_such.so", "f"), 0, "no library libno_such.so is found", "absolute path"),
        (Place("./x.so", "f"), 0, "is no absolute path", "bare name"),
        (Place("/no/such", "f"), 0, "there is no file /no/such", ""),
        (Place("libc.so.6", "f"), 1 << 30, f"there is no process {1 << 30}", ""),
        (Place("libc.so.6", "gethostnamee"), 0, "has no function gethostnamee", "did you mean gethostname?"),
        (Place("/proc/self/status", "f"), 0, "cannot be probed: no ELF file", ""),
    ],
)
def test_a_place_that_is_not_there(place: Place, pid: int, words: str, hint: str) -> None:
    with pytest.raises(NoPlace) as caught:
        find_place(place, pid)
    assert words in str(caught.value)
    assert hint in caught.value.hint


def test_a_library_of_the_system_need_not_be_in_memory() -> None:
    assert os.path.exists(find_file("libc.so.6"))
