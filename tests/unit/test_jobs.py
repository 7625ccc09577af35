"""Ranks of jobs over several hosts, what a clock's error does, the ceiling of the wires, and change points."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from tests.rule_scenes import Player, Scene, changing
from tests.unit.rule_cases.jobs import FAR, Fleet, arriving, only, process_id

from gpuflight.bottlenecks.base import Rule, Unknown
from gpuflight.bottlenecks.ceiling import ceiling_of
from gpuflight.bottlenecks.change_points import change_points
from gpuflight.bottlenecks.engine import Engine
from gpuflight.bottlenecks.jobs import Clocks, Job, jobs_of, ranges
from gpuflight.errors import MissingExtra
from gpuflight.graph import Edge, Entity, edges, nodes
from gpuflight.registry import plugins
from gpuflight.rounds import Finding

RULES = plugins(Rule)
EIGHT = ("straggler_rank", "arrival_skew", "collective_hang", "gpu_load_imbalance", "slow_collective")


def engine_after(*rounds: list[Entity | Edge]) -> Engine:
    engine = Engine([RULES[name]() for name in EIGHT])
    Player(engine).play(Scene(rounds, repeat=0))
    return engine


def jobs_in(*elements: Entity | Edge) -> list[Job]:
    return jobs_of(engine_after(list(elements)).window)


def played(name: str, scene: Scene) -> tuple[list[Finding], list[str]]:
    """Findings of the last round, and why the rule could not judge."""
    engine = Engine([RULES[name]()])
    judged = Player(engine).play(scene)
    return judged[-1].findings, list(engine.survey()[0].unknown)


def rank(number: int, pid: int = 0, ns: str = "", ppid: int = 1, **other: Any) -> nodes.Process:
    attributes = {"rank": number, "world_size": 8, "job": "j", "ppid": ppid, **other}
    return nodes.Process(pid=pid or 100 + number, start=pid or number, ns=ns, attributes=attributes)


# --- who belongs together --------------------------------------------------------------------------------------------


def test_ranks_of_two_hosts_are_one_job() -> None:
    (job,) = jobs_of(engine_after(Fleet().round(1)).window)
    assert [each.number for each in job] == list(range(8))
    assert [each.ns for each in job] == [""] * 4 + [FAR] * 4
    assert all(len(each.sessions) == 1 for each in job)
    assert job.seen() == "all 8 ranks" and job.missing == []
    job.whole()


def test_fewer_than_all_are_said() -> None:
    (job,) = jobs_in(rank(0), rank(1), rank(5))
    assert job.seen() == "3 of 8 ranks (not 2-4, 6-7)"
    with pytest.raises(Unknown, match="3 of 8 ranks"):
        job.whole()


def test_loaders_that_a_rank_forked_are_no_ranks() -> None:
    (job,) = jobs_in(rank(3, 50, ppid=1), rank(3, 60, ppid=50), rank(3, 61, ppid=60), rank(2, 40))
    assert {each.number: each.process.pid for each in job if each.process} == {2: 40, 3: 50}


def test_processes_with_the_same_pid_on_other_hosts_are_others() -> None:
    (job,) = jobs_in(rank(0, 50), rank(1, 51, ns=FAR, ppid=50))
    assert len(job) == 2


def test_ranks_of_a_host_whose_picture_is_old_are_left_out() -> None:
    old = nodes.Host(hostname="b", ns=FAR, attributes={"stale": True})
    (job,) = jobs_in(nodes.Host(hostname="a"), old, rank(0), rank(4, ns=FAR))
    assert list(job.ranks) == [0] and job.stale == [FAR]
    with pytest.raises(Unknown, match="the picture of node-b is old"):
        job.whole()


def test_a_session_without_its_process_is_a_rank() -> None:
    session = nodes.Session(session_id="s", attributes={"rank": 1, "job": "j", "state": "live"})
    (job,) = jobs_in(rank(0), session)
    assert job.ranks[1].element is session and job.ranks[1].process is None


def test_ranks_that_end_are_forgotten() -> None:
    engine = engine_after([rank(0), rank(1)], [rank(0)])
    assert len(jobs_of(engine.window)[0]) == 1


def test_jobs_are_apart_and_those_without_a_name_are_none() -> None:
    nameless = nodes.Process(pid=9, start=9, attributes={"rank": 0, "ppid": 1})
    assert [(job.name, len(job)) for job in jobs_in(rank(0), rank(0, 7, job="k"), nameless)] == [("j", 1), ("k", 1)]


@pytest.mark.parametrize("said", [{"rank": "x"}, {"rank": None}, {"rank": 2.5}, {"rank": [1]}])
def test_what_others_say_that_is_no_rank_is_none(said: dict[str, Any]) -> None:
    (job,) = jobs_in(rank(0), rank(1, ns=FAR, **said))
    assert list(job.ranks) == [0]


def test_sizes_that_nobody_has_cost_nothing() -> None:
    (job,) = jobs_in(rank(0, world_size=1 << 60), rank(1, world_size="many"))
    assert len(job.missing) < 1 << 21 and job.seen().startswith("2 of ")


@pytest.mark.parametrize(("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5], "0-2, 5"), ([7, 6], "6-7")])
def test_numbers_of_ranks_read_well(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def test_ranks_come_from_other_instances_with_all_that_is_compared() -> None:
    """As the collector remote puts a peer's graph into its namespace: kernels still name their process as it did."""
    from gpuflight.graph import Graph
    from gpuflight.graph.namespaces import with_namespace

    near, far = Fleet(seen=range(4)), Fleet(seen=range(4), change=only(2, p50_us=160.0))

    def elements(n: int) -> list[Entity | Edge]:
        own = [each for each in near.round(n) if not (isinstance(each, nodes.Host) and each.ns)]
        theirs = [each for each in far.round(n) if not (isinstance(each, nodes.Host) and each.ns)]
        for each in theirs:
            if isinstance(each, nodes.Process):
                each.attributes["rank"] += 4
        moved = with_namespace(
            Graph(
                [each for each in theirs if isinstance(each, Entity)],
                [each for each in theirs if isinstance(each, Edge)],
            ),
            "node-7",
        )
        return [*own, *moved.nodes.values(), *moved.edges.values()]

    found, _ = played("straggler_rank", changing(lambda n: elements(n + 1), 9))
    assert [finding.entities[0] for finding in found] == ["Process(ns=node-7,pid=1002,start=7)"]
    assert "rank 6" in found[0].message and "all 8 ranks" in found[0].message


# --- clocks ----------------------------------------------------------------------------------------------------------


def host(ns: str, offset_s: float, error_s: float) -> nodes.Host:
    metrics = {"clock_offset_s": offset_s, "clock_offset_error_s": error_s}
    return nodes.Host(hostname=ns[-1:], ns=ns, metrics=metrics)


def test_errors_of_clocks_add_up_along_the_way() -> None:
    window = engine_after([nodes.Host(hostname="h"), host("a", 2.0, 0.1), host("a/b", -0.5, 0.2)]).window
    clocks = Clocks(window)
    assert clocks.offset_s("") == (0.0, 0.0)
    assert clocks.offset_s("a/b") == pytest.approx((1.5, 0.3))
    with pytest.raises(Unknown, match="the clock of c is not compared with ours"):
        clocks.offset_s("c")


def test_a_skew_below_the_error_of_the_clocks_is_unknown_and_says_both() -> None:
    found, why = played("arrival_skew", Fleet(marks=arriving(5, 4.0), error_s=0.008).scene())
    assert found == []
    assert why == ["the last rank comes 4.01 ms after the median, which the clocks' error of 8.00 ms may explain"]


def test_the_error_counts_between_two_foreign_hosts_too() -> None:
    found, _ = played("arrival_skew", Fleet(marks=arriving(5, 4.0), error_s=0.002).scene())
    assert found[0].evidence[2].metric == "clock_error_ms" and found[0].evidence[2].value == 2.0
    assert "rank 5" in found[0].message and "on node-b" in found[0].message and "all 8 ranks" in found[0].message


# --- hangs -----------------------------------------------------------------------------------------------------------


def hang(name: str) -> tuple[list[Finding], list[str]]:
    from tests.unit.rule_cases.jobs import CASES

    case = CASES["collective_hang"]
    return played("collective_hang", case.fires if not name else case.also[name][1])


def test_n29_a_hang_is_found_though_ras_says_healthy() -> None:
    """nccl#1730: RAS answered that all was well while ranks stood still."""
    found, _ = hang("RAS says healthy")
    assert "NCCL's RAS says healthy, which only means that ranks answer" in found[0].message
    assert "rank 6 is not there" in found[0].message and "ranks 0-5, 7 wait in one" in found[0].message
    assert found[0].entities[0] == process_id(6)


def test_n30_three_of_eight_ranks_are_no_freeze() -> None:
    """ray#64928: a part of the ranks was seen, and the rest taken for frozen."""
    found, why = played("collective_hang", _three())
    assert found == [] and why == ["only 3 of 8 ranks (not 3-7) of the job are seen"]


def _three() -> Scene:
    from tests.unit.rule_cases.jobs import CASES

    unknown = CASES["collective_hang"].unknown
    assert unknown is not None
    return unknown


def test_n31_a_long_checkpoint_is_no_hang() -> None:
    """dlrover#1727, #1590: one sign alone was enough."""
    assert hang("long checkpoint") == ([], [])
    found, why = hang("it may be a checkpoint")
    assert found == [] and "may be writing a checkpoint" in why[0]


def test_all_ranks_in_the_same_collective_is_a_matter_of_the_network() -> None:
    found, _ = hang("all wait")
    assert "all of them are there, so it is their way to each other that fails" in found[0].message


def test_a_hang_ends_when_ranks_go_on() -> None:
    from tests.unit.rule_cases.jobs import _hung

    def change(n: int, number: int, values: dict[str, Any]) -> None:
        if n < 24:
            _hung(n, number, values)

    engine = Engine([RULES["collective_hang"]()])
    judged = Player(engine).play(Fleet(change=change).scene(count=34, step_s=20.0))
    assert judged[21].findings and not judged[-1].findings


# --- stragglers ------------------------------------------------------------------------------------------------------


def test_a_straggler_of_some_ranks_says_how_many_were_seen() -> None:
    found, _ = played("straggler_rank", Fleet(seen=[0, 1, 2, 3, 5], change=only(5, p50_us=160.0)).scene())
    assert [finding.entities[0] for finding in found] == [process_id(5)]
    assert "5 of 8 ranks (not 4, 6-7)" in found[0].message and "50 %" in found[0].message


def test_n27_an_empty_rank_is_left_out_and_that_is_said() -> None:
    """HTA#107: one empty rank broke the analysis of all."""

    def change(n: int, number: int, values: dict[str, Any]) -> None:
        values["p50_us"] = None
        if number == 1:
            values["step_ms"] = None
        elif number == 2:
            values["step_ms"] = 170.0

    found, _ = played("straggler_rank", Fleet(change=change).scene())
    assert [finding.entities[0] for finding in found] == [process_id(2)] and "7 of 8 ranks" in found[0].message
    told = arriving(5, 4.0)
    found, _ = played("arrival_skew", Fleet(marks=lambda n, number: told(n, number) if number != 1 else []).scene())
    assert "rank 5" in found[0].message and "compared: 7 of 8 ranks" in found[0].message
    healthy = arriving()
    found, why = played("arrival_skew", Fleet(marks=lambda n, number: healthy(n, number) if number else []).scene())
    assert found == [] and why == ["the times of collectives are told by 7 of 8 ranks only"]


def test_kernels_of_communication_do_not_make_a_straggler() -> None:
    """Who waits longest in collectives is the fastest."""
    slow_nccl = changing(
        lambda n: [
            nodes.Kernel(process=k.process, name=k.name, ns=k.ns, metrics={**k.metrics, "p50_us": 5000.0})
            if isinstance(k, nodes.Kernel) and k.name.startswith("nccl") and "1002" in k.process
            else k
            for k in Fleet().round(n + 1)
        ],
        9,
    )
    assert played("straggler_rank", slow_nccl) == ([], [])


def test_steps_of_another_name_are_not_compared() -> None:
    def elements(n: int) -> list[Entity | Edge]:
        found = Fleet(change=only(2, step_ms=600.0, p50_us=80.0)).round(n + 1)
        for element in found:
            if isinstance(element, nodes.Session) and element.session_id == "s2":
                element.attributes["step_scope"] = "eval_step"
        return found

    assert played("straggler_rank", changing(elements, 9)) == ([], [])


# --- wires -----------------------------------------------------------------------------------------------------------


def wired(*more: Entity | Edge, world_size: int = 2, here: int = 2) -> tuple[Engine, Job]:
    elements: list[Entity | Edge] = [nodes.Host(hostname="h"), *more]
    for number in range(world_size):
        away = number >= here
        process = rank(number, ns=FAR if away else "", world_size=world_size)
        gpu = nodes.GPU(uuid=f"G{number}", ns=FAR if away else "", attributes={"index": number})
        elements += [process, gpu, edges.Access(process.id, gpu.id)]
    engine = engine_after(elements)
    return engine, jobs_of(engine.window)[0]


def nvlink(rate: float = 450e9) -> edges.NvLink:
    return edges.NvLink("GPU(uuid=G0)", "GPU(uuid=G1)", {}, {"expected_bytes_per_s": rate})


def port(name: str, bits_per_s: float, state: str = "ACTIVE") -> nodes.RdmaPort:
    return nodes.RdmaPort(device=name, port=1, attributes={"state": state}, metrics={"speed_bits_per_s": bits_per_s})


def test_the_ceiling_of_one_host_is_that_of_its_gpus() -> None:
    engine, job = wired(nvlink())
    ceiling = ceiling_of(engine.window, job, job.ranks[0])
    assert ceiling.bytes_per_s == 450e9 and ceiling.edges == ["NvLink(GPU(uuid=G0)->GPU(uuid=G1))"]


def test_the_ceiling_between_hosts_is_that_of_the_cards_that_are_up() -> None:
    engine, job = wired(nvlink(), port("a", 400e9), port("b", 400e9), port("c", 400e9, "DOWN"), world_size=4)
    ceiling = ceiling_of(engine.window, job, job.ranks[0])
    assert ceiling.bytes_per_s == 100e9 and "2 RDMA ports" in ceiling.text


@pytest.mark.parametrize(
    ("setup", "why"),
    [
        ({"more": ()}, "what the ways between its GPUs carry is not known"),
        ({"more": (nvlink(),), "world_size": 4}, "no RDMA port is up"),
    ],
)
def test_what_is_not_known_of_the_wires_is_unknown(setup: dict[str, Any], why: str) -> None:
    engine, job = wired(*setup.pop("more"), **setup)
    with pytest.raises(Unknown, match=why):
        ceiling_of(engine.window, job, job.ranks[0])


# --- change points ---------------------------------------------------------------------------------------------------


def test_levels_are_found_where_they_begin() -> None:
    values = [100.0 + n % 3 for n in range(40)] + [130.0 + n % 3 for n in range(20)]
    assert change_points(values, 4) == [40]
    assert change_points(values[:40], 4) == []
    assert change_points(values, 4) == change_points(list(values), 4)


@pytest.mark.parametrize("values", [[], [1.0] * 7, [0.0] * 60, [5.0] * 60])
def test_nothing_is_found_where_nothing_is(values: list[float]) -> None:
    assert change_points(values, 4) == []


@pytest.mark.parametrize("package", ["ruptures", "numpy"])
def test_without_the_library_the_rule_is_unknown_and_says_so(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.unit.rule_cases.jobs import CASES

    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra):
        change_points([1.0] * 60, 4)
    found, why = played("fail_slow", CASES["fail_slow"].fires)
    assert found == [] and why == [f"finding change points needs the package {package}: pip install 'gpuflight[rules]'"]
