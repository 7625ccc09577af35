"""The collector ``cupti``: recorders that live, asked and read in the round itself."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")
pytest.importorskip("cupti")
from tests.fakes import cupti_driver
from tests.unit.recorder_rig import UUID, UUID_TEXT, recording, until

from gpuflight.collectors.base import Batch
from gpuflight.collectors.cupti import Cupti, CuptiSettings
from gpuflight.errors import SourceUnavailable
from gpuflight.events.recorder import process
from gpuflight.sources.open import open_world


def rounds(folder: Path | None) -> Any:
    """Batches, one for each time that it is asked."""
    world = open_world()
    settings = CuptiSettings(folders=None if folder is None else [str(folder)], notify=False)
    collector = Cupti(settings)
    try:
        number = 0
        while True:
            number += 1
            world.begin_round(number)
            collector.losses, collector.notes = {}, {}
            collector.observe(world)
            yield collector.seed()
    finally:
        collector.close()
        world.close()


def session(graph: Batch) -> Any:
    found = [node for node in graph.nodes if node.kind == "Session"]
    assert len({node.id for node in found}) == 1
    attributes: dict[str, Any] = {}
    metrics: dict[str, Any] = {}
    for node in found:
        attributes |= node.attributes
        metrics |= node.metrics or {}
    return attributes, metrics


def test_what_is_recorded_is_in_the_round(tmp_path: Path) -> None:
    """Of this very process: kernels on their streams and GPU, under the process; up to the last delivered record."""
    with recording(tmp_path) as (recorder, fake):
        fake.emit(cupti_driver.device(0, UUID, "H200"))
        look = rounds(tmp_path)
        for _ in range(4):
            fake.launch("gemm", duration_ns=2_000_000)
        fake.deliver()
        # the recorder's thread takes the records of one kind after those of another: a round may come in between
        graph = next(graph for graph in islice(look, 200) if any(e.target.startswith("GPU") for e in graph.edges))
        attributes, metrics = session(graph)
        assert (attributes["recorder"], attributes["app"], metrics["launches_count"]) == ("recording", "train", 4)
        kernel = next(node for node in graph.nodes if node.kind == "Kernel")
        assert (kernel.name, kernel.metrics["launches_count"], kernel.metrics["mean_us"]) == ("gemm", 4, 2000.0)
        assert {(e.kind, e.source.partition("(")[0], e.target) for e in graph.edges if e.target.startswith("GPU")} == {
            ("RunOn", "Stream", f"GPU(uuid={UUID_TEXT})")
        }
        assert f"Process(pid={os.getpid()}," in " ".join(edge.source for edge in graph.edges if edge.kind == "Launch")
        fake.launch("gemm")
        fake.deliver()
        until(lambda: session(next(look))[1]["launches_count"] == 5)  # files are not looked at again at once
        recorder.close()
        until(lambda: session(next(look))[0]["state"] == "ended: shutdown")
        look.close()


def test_what_the_recorder_says_of_itself_is_shown(tmp_path: Path) -> None:
    fake = cupti_driver.FakeCupti()
    fake.refuse["subscribe_v2"] = 39
    with recording(tmp_path, fake):
        look = rounds(tmp_path)
        attributes, metrics = session(next(look))
        look.close()
    assert attributes["recorder"] == "off" and "another tool is attached" in attributes["recorder_why"]
    assert metrics["recorder_lost_count"] == 0


def test_the_recorder_of_this_process_is_found_wherever_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with recording(tmp_path / "elsewhere") as (recorder, fake):
        monkeypatch.setattr(process._resident, "recorder", recorder)
        fake.launch("k")
        fake.deliver()
        look = rounds(None)
        assert session(next(look))[1]["launches_count"] == 1
        look.close()


def test_sessions_that_nobody_records_any_more_are_not_its_business(tmp_path: Path) -> None:
    with recording(tmp_path):
        pass
    with pytest.raises(SourceUnavailable, match="no program of this host is being recorded"):
        next(rounds(tmp_path))
