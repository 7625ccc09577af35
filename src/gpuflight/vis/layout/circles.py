"""Strongly connected parts of a directed graph (Tarjan, SIAM J. Comput. 1(2), 1972), without recursion."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable


def circles(count: int, edges: Iterable[tuple[int, int]]) -> list[list[int]]:
    """The parts with more than one of the nodes 0 … count - 1, in which each leads to each. O(nodes + edges)."""
    following: dict[int, list[int]] = defaultdict(list)
    for source, target in edges:
        following[source].append(target)
    index = [-1] * count
    low = [0] * count
    open_nodes: list[int] = []
    is_open = [False] * count
    found: list[list[int]] = []
    seen = 0
    for start in range(count):
        if index[start] >= 0:
            continue
        work = [(start, iter(following[start]))]
        index[start] = low[start] = seen
        seen += 1
        open_nodes.append(start)
        is_open[start] = True
        while work:
            node, ways = work[-1]
            for target in ways:
                if index[target] < 0:
                    index[target] = low[target] = seen
                    seen += 1
                    open_nodes.append(target)
                    is_open[target] = True
                    work.append((target, iter(following[target])))
                    break
                if is_open[target]:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    above = work[-1][0]
                    low[above] = min(low[above], low[node])
                if low[node] == index[node]:
                    members = []
                    while True:
                        member = open_nodes.pop()
                        is_open[member] = False
                        members.append(member)
                        if member == node:
                            break
                    if len(members) > 1:
                        found.append(members)
    return found
