"""What all that is chaos shares."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.chaos.victims import until
from tests.conftest import ROOT


@pytest.fixture
def stalled(tmp_path: Path) -> Iterator[Path]:
    """A file with how long the machine kept others waiting."""
    path = tmp_path / "stalls.txt"
    meter = subprocess.Popen([sys.executable, "-m", "tests.chaos.stalls", str(path)], cwd=ROOT, stdin=subprocess.PIPE)
    assert meter.stdin is not None
    until(path.exists)
    yield path
    meter.stdin.close()
    assert meter.wait(30) == 0
