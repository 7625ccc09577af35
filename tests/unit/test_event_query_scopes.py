"""The tree of scopes, against the program that made it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("duckdb")
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.event_rows import Rows, both, fill, names

from gpuflight.events.names import text_id
from gpuflight.events.query import scopes
from gpuflight.events.query.scopes import scope_tree
from gpuflight.events.store import EventStore

BASE_NS = 10**18
NAMES = {1: "step", 2: "forward", 3: "backward"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EventStore]:
    made = EventStore(str(tmp_path_factory.mktemp("events") / "store"), threads=1)
    yield made
    made.close()


class Program:
    """Runs scopes and kernels, writes what the log would hold, and keeps what is true."""

    def __init__(self) -> None:
        self.now = BASE_NS
        self.rows: Rows = []
        self.kernels: Rows = []
        self.texts: dict[int, str] = {}
        self.truth: dict[str, dict[str, Any]] = {}
        self.instances = 0
        self.open: list[tuple[int, int, int, int]] = []  # instance, name, start, time of inner ones

    @property
    def path(self) -> str:
        return "|".join(NAMES[name] for _, name, _, _ in self.open)

    def begin(self, name: int) -> None:
        self.instances += 1
        self._row(0, name, self.instances, len(self.open))
        self.open.append((self.instances, name, self.now, 0))

    def end(self, written: bool = True) -> None:
        path = self.path
        instance, name, start, inner = self.open.pop()
        if written:
            self._row(1, name, instance, len(self.open))
        took = self.now - start
        line = self.truth.setdefault(path, {"runs": [], "open": 0, "exclusive": 0, "kernels": [0, 0]})
        line["runs"].append(took)
        line["open"] += not written
        line["exclusive"] += took - inner
        if self.open:
            outer = self.open[-1]
            self.open[-1] = (*outer[:3], outer[3] + took)

    def launch(self, duration: int) -> None:
        scope = "global|" + self.path if self.open else "global"
        self.texts[text_id(scope)] = scope
        self.kernels.append(
            {
                "start_ns": self.now,
                "duration_ns": duration,
                "kernel_id": 1,
                "corr_id": len(self.kernels),
                "scope": scope,
            }
        )

    def _row(self, event: int, name: int, instance: int, depth: int) -> None:
        row = {"time_ns": self.now, "event_type": event, "name_id": name, "scope_instance_id": instance, "depth": depth}
        self.rows.append(row)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    program = Program()
    for _ in range(draw(st.integers(0, 30))):
        program.now += draw(st.integers(1, 100))
        what = draw(st.sampled_from(["begin", "end", "launch"]))
        if what == "begin":
            program.begin(draw(st.sampled_from(sorted(NAMES))))
        elif what == "end" and program.open:
            program.end()
        elif what == "launch":
            program.launch(draw(st.integers(0, 50)))
    if program.rows:
        program.now = program.rows[-1]["time_ns"]  # killed: what is open is counted up to the last event
    while program.open:
        program.end(written=False)
    return program


@given(programs(), st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_tree(store: EventStore, program: Program, in_details: bool) -> None:
    kernels, details = [], []
    for kernel in program.kernels:
        scope = text_id(kernel["scope"])
        kernels.append({k: v for k, v in kernel.items() if k != "scope"} | ({} if in_details else {"scope_id": scope}))
        details.append({"corr_id": kernel["corr_id"], "scope_id": scope})
        parts = kernel["scope"].split("|")[1:]
        for length in range(1, len(parts) + 1):
            line = program.truth["|".join(parts[:length])]["kernels"]
            line[0] += 1
            line[1] += kernel["duration_ns"]
    reader = fill(
        store,
        scope=program.rows,
        kernel=kernels,
        kernel_detail=details if in_details else [],
        name=names("scope", NAMES) + names("user_scope", program.texts),
    )
    tree = scope_tree(reader)
    assert tree.complete and tree.unmatched_ends_count == 0
    found = {
        n.path: (n.count, n.open_count, n.inclusive_ns, n.exclusive_ns, n.min_ns, n.max_ns, n.depth) for n in tree.nodes
    }
    assert found == {
        path: (
            len(t["runs"]),
            t["open"],
            sum(t["runs"]),
            t["exclusive"],
            min(t["runs"]),
            max(t["runs"]),
            path.count("|"),
        )
        for path, t in program.truth.items()
    }
    for node in tree.nodes:
        wanted = program.truth[node.path]["kernels"] if kernels else [None, None]
        assert [node.kernels_count, node.kernels_ns] == wanted
    seen: set[str] = set()
    for node in tree.nodes:  # parents before children
        parent = node.path.rpartition("|")[0]
        assert not parent or parent in seen
        seen.add(node.path)
    roots = [node.inclusive_ns for node in tree.nodes if node.depth == 0]
    assert roots == sorted(roots, reverse=True)


def row(time: int, event: int, instance: int | None, depth: int, name: int = 1) -> dict[str, Any]:
    fields = {"time_ns": BASE_NS + time, "event_type": event, "scope_instance_id": instance, "depth": depth}
    return {**fields, "name_id": name}


def test_ends_without_a_begin_are_counted(store: EventStore) -> None:
    tree = scope_tree(fill(store, scope=[row(5, 1, 9, 0)]))
    assert (tree.nodes, tree.unmatched_ends_count) == ([], 1)


def test_segments_go_on_with_what_was_open(store: EventStore) -> None:
    """Continuations (2 and 3) are the begin and the end within a segment; a name that never came is told as its id."""
    tree = scope_tree(fill(store, scope=[row(0, 2, 1, 0, 77), row(10, 3, 1, 0, 77)]))
    assert [(n.path, n.name, n.inclusive_ns) for n in tree.nodes] == [("#77", None, 10)]


def test_legacy_scopes_have_no_instance(store: EventStore) -> None:
    rows = [row(0, 0, None, 0), row(3, 0, None, 1, 2), row(5, 1, None, 1, 2), row(9, 1, None, 0)]
    tree = scope_tree(fill(store, scope=rows, name=names("scope", NAMES)))
    assert [(n.path, n.inclusive_ns, n.exclusive_ns) for n in tree.nodes] == [("step", 9, 7), ("step|forward", 2, 2)]


def test_two_sessions_are_two_trees_in_one(store: EventStore) -> None:
    one = fill(store, scope=[row(0, 0, 1, 0)], name=names("scope", NAMES))
    two = fill(store, scope=[row(5, 0, 1, 0), row(9, 1, 1, 0)], name=names("scope", NAMES))
    (node,) = scope_tree(both(one, two)).nodes
    assert (node.count, node.open_count, node.inclusive_ns) == (2, 1, 4)


def test_what_is_not_looked_at_is_told(store: EventStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scopes, "MAX_INSTANCES", 2)
    tree = scope_tree(fill(store, scope=[row(i, i % 2, i // 2, 0) for i in range(4)]))
    assert not tree.complete and tree.nodes[0].count == 1
