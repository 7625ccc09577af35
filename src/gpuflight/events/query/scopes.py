"""Scopes of the program as a tree, with the time spent in each, its inner scopes included and excluded."""

from __future__ import annotations

import msgspec

from gpuflight.events.query.reader import MAX_ROWS, Reader

MAX_INSTANCES = 2_000_000
"""Most begins and ends that are looked at; what is beyond is told (``complete`` false)."""


class ScopeNode(msgspec.Struct, kw_only=True):
    """All runs of a scope at one place in the tree. ``path``: names from the outermost, joined by ``|``.

    Times are the host's. ``open_count`` runs never ended in the log; their time is counted up to its last event.
    ``kernels_count`` and ``kernels_ns`` are of the kernels launched in it, those of inner scopes included; None where
    launches carry no scope.
    """

    path: str
    name: str | None
    depth: int
    count: int
    open_count: int
    inclusive_ns: int
    exclusive_ns: int
    min_ns: int
    max_ns: int
    kernels_count: int | None = None
    kernels_ns: int | None = None


class ScopeTree(msgspec.Struct, kw_only=True):
    """``nodes`` in order of the tree, parents before children, the longest first among siblings.

    ``unmatched_ends_count``: ends whose begin is not in the log. ``complete``: every begin and end was looked at.
    """

    nodes: list[ScopeNode]
    unmatched_ends_count: int
    complete: bool


class _Open(msgspec.Struct):
    path: str
    name: str | None
    depth: int
    start_ns: int
    inner_ns: int
    parent: _Open | None


def scope_tree(reader: Reader) -> ScopeTree:
    """The tree of the sessions asked about, together. Runs are matched by their instance number; who is inside of whom
    comes of the depth that was written, which is per thread of the program."""
    rows = reader.rows(
        f"""
        SELECT session_no, time_ns, scope_instance_id, coalesce(name_id, 0) AS name_id, event_type,
            coalesce(depth, 0) AS depth
        FROM {reader.table("scope")} WHERE clock = 0 AND event_type IS NOT NULL
        ORDER BY session_no, time_ns, event_type IN (1, 3) DESC, depth LIMIT {MAX_INSTANCES + 1}
        """  # noqa: S608
    )
    complete = len(rows) <= MAX_INSTANCES
    texts = reader.texts("scope", {row["name_id"] for row in rows})
    nodes: dict[str, ScopeNode] = {}
    unmatched = 0
    session_no = -1
    open_: dict[int, _Open] = {}
    stack: dict[int, _Open] = {}
    last_ns = 0
    for row in rows[:MAX_INSTANCES]:
        if row["session_no"] != session_no:
            _end_all(open_, last_ns, nodes)
            session_no, open_, stack = row["session_no"], {}, {}
        last_ns = row["time_ns"]
        instance, depth = row["scope_instance_id"], row["depth"]
        if row["event_type"] in (0, 2):
            parent = stack.get(depth - 1)
            name = texts.get((session_no, row["name_id"]))
            shown = name if name is not None else f"#{row['name_id']}"
            path = f"{parent.path}|{shown}" if parent is not None else shown
            opened = _Open(path, name, parent.depth + 1 if parent is not None else 0, row["time_ns"], 0, parent)
            stack[depth] = opened
            if instance is not None:
                open_[instance] = opened
        else:
            ended = open_.pop(instance, None) if instance is not None else stack.get(depth)
            if ended is None:
                unmatched += 1
                continue
            if stack.get(depth) is ended:
                del stack[depth]
            _count(ended, row["time_ns"], nodes, open_ended=False)
    _end_all(open_, last_ns, nodes)
    _add_kernels(reader, nodes)
    ordered = _in_tree_order(nodes)
    return ScopeTree(nodes=ordered[:MAX_ROWS], unmatched_ends_count=unmatched, complete=complete)


def _end_all(open_: dict[int, _Open], now_ns: int, nodes: dict[str, ScopeNode]) -> None:
    for scope in sorted(open_.values(), key=lambda scope: -scope.depth):  # inner ones first, for their parents' sake
        _count(scope, now_ns, nodes, open_ended=True)


def _count(scope: _Open, now_ns: int, nodes: dict[str, ScopeNode], *, open_ended: bool) -> None:
    took_ns = max(now_ns - scope.start_ns, 0)
    if scope.parent is not None:
        scope.parent.inner_ns += took_ns
    node = nodes.get(scope.path)
    if node is None:
        node = nodes[scope.path] = ScopeNode(
            path=scope.path,
            name=scope.name,
            depth=scope.depth,
            count=0,
            open_count=0,
            inclusive_ns=0,
            exclusive_ns=0,
            min_ns=took_ns,
            max_ns=took_ns,
        )
    node.count += 1
    node.open_count += open_ended
    node.inclusive_ns += took_ns
    node.exclusive_ns += max(took_ns - scope.inner_ns, 0)
    node.min_ns, node.max_ns = min(node.min_ns, took_ns), max(node.max_ns, took_ns)


def _add_kernels(reader: Reader, nodes: dict[str, ScopeNode]) -> None:
    """Launches tell their scope as ``global|outer|inner``."""
    rows = reader.rows(
        f"""
        SELECT n.text AS text, count(*) AS count, sum(k.duration_ns) AS total_ns
        FROM (SELECT k.session_no, k.duration_ns, coalesce(nullif(k.scope_id, 0), d.scope_id) AS scope_id
            FROM {reader.table("kernel")} AS k LEFT JOIN (
                SELECT session_no, corr_id, any_value(scope_id) AS scope_id FROM {reader.table("kernel_detail")}
                GROUP BY session_no, corr_id) AS d USING (session_no, corr_id)) AS k
        JOIN {reader.table("name")} AS n ON n.session_no = k.session_no AND n.id = k.scope_id
        WHERE n.dictionary = 'user_scope' GROUP BY n.text
        """  # noqa: S608
    )
    if not rows:
        return
    for node in nodes.values():
        node.kernels_count = node.kernels_ns = 0
    for row in rows:
        parts = row["text"].split("|")
        path = parts[1:] if parts[0] == "global" else parts
        for length in range(1, len(path) + 1):
            inner = nodes.get("|".join(path[:length]))
            if inner is not None:
                inner.kernels_count = (inner.kernels_count or 0) + row["count"]
                inner.kernels_ns = (inner.kernels_ns or 0) + int(row["total_ns"] or 0)


def _in_tree_order(nodes: dict[str, ScopeNode]) -> list[ScopeNode]:
    children: dict[str, list[ScopeNode]] = {}
    for node in nodes.values():
        parent = node.path.rpartition("|")[0]
        children.setdefault(parent if parent in nodes else "", []).append(node)
    ordered: list[ScopeNode] = []
    waiting = sorted(children.get("", []), key=lambda node: node.inclusive_ns)
    while waiting:
        node = waiting.pop()
        ordered.append(node)
        waiting += sorted(children.get(node.path, []), key=lambda node: node.inclusive_ns)
    return ordered
