"""Parts compressed once make the same gzip stream for everybody."""

from __future__ import annotations

import gzip
import random
import shutil
import subprocess
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflight.server.gzip_stream import HEADER, GzipStream, compress_part


def _stream(parts: list[bytes]) -> bytes:
    stream, packed = GzipStream(), HEADER
    for part in map(compress_part, parts):
        stream.add(part)
        packed += part.data
    return packed + stream.end()


@given(st.lists(st.binary(max_size=2000) | st.binary(max_size=20).map(lambda word: word * 100), max_size=8))
def test_any_parts_in_any_order_are_one_member(parts: list[bytes]) -> None:
    decoder = zlib.decompressobj(31)
    assert decoder.decompress(_stream(parts)) == b"".join(parts)  # which also compares checksum and length
    assert decoder.eof and not decoder.unused_data


def test_each_part_can_be_read_when_it_came() -> None:
    parts = [random.Random(seed).randbytes(50) * 200 for seed in range(5)]
    decoder = zlib.decompressobj(31)
    assert decoder.decompress(HEADER) == b""
    for part in parts:
        packed = compress_part(part)
        assert decoder.decompress(packed.data) == part and len(packed.data) < len(part) / 10


def test_a_part_needs_nothing_before_it() -> None:
    same = random.Random(1).randbytes(1000)
    first, second = compress_part(same), compress_part(same)
    assert first == second and len(second.data) > 1000  # no reference to the first one


def test_large_parts() -> None:
    parts = [random.Random(1).randbytes(3_000_000), b"a" * 5_000_000]
    assert gzip.decompress(_stream(parts)) == b"".join(parts)


@pytest.mark.skipif(shutil.which("gzip") is None, reason="no gzip")
def test_gzip_itself_finds_it_whole(tmp_path: Path) -> None:
    file = tmp_path / "x.gz"
    file.write_bytes(_stream([b"one\n", b"", b"two\n"]))
    assert subprocess.run(["gzip", "-dc", str(file)], capture_output=True, check=True).stdout == b"one\ntwo\n"
