"""What of a graph is drawn, where the graph holds what no collector of ours would write."""

from __future__ import annotations

import pytest

from gpuflight.graph import Graph, nodes
from gpuflight.vis.choose import Choice, choose


@pytest.mark.parametrize("value", ["95", None, [1, 99], {"p50": 99}, float("nan")])
def test_what_is_no_number_passes_no_test_of_a_metric(value: object) -> None:
    graph = Graph([nodes.Process(pid=1, start=1, metrics={"cpu_pct": 95.0}), nodes.Process(pid=2, start=1)])
    graph.nodes["Process(pid=2,start=1)"].metrics = {"cpu_pct": value}  # type: ignore[dict-item]
    chosen, _ = choose(graph, Choice(metrics=("cpu_pct>50",)))
    assert set(chosen.nodes) == {"Process(pid=1,start=1)"}
