"""Socket rows of the kernel as edges: rates, totals, ends; without a kernel."""

from __future__ import annotations

import pytest
from tests.fakes import kernel_rows as rows
from tests.fakes.collecting import Outcome, check, collect
from tests.fakes.kernel_rows import CLIENT, SERVER_ROLE, UDP, Rows
from tests.fakes.machine import FakeMachine, rich_machine
from tests.fakes.machine_answers import OWN_NETNS, SERVER, WORKER

from gpuflight.collectors.kernel_net import KernelNet, KernelNetSettings
from gpuflight.collectors.rates import FIRST_READING
from gpuflight.collectors.sockets import Sockets
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Edge, Graph, edges
from gpuflight.graph.lift import lift
from gpuflight.sources.bpf.base import ProbeBackend, ProbeObject
from gpuflight.sources.bpf.probes import Probes

HERE, THERE = ("10.0.0.5", 40000), ("10.0.0.5", 8000)
PROGRAMS = ("on_send", "on_receive", "on_state")


class Net:
    """The machine in memory, with rows of the test's."""

    def __init__(self, **settings: object) -> None:
        self.machine = FakeMachine(rich_machine())
        self.collector = KernelNet(KernelNetSettings(**settings))  # type: ignore[arg-type]
        self.sockets = Sockets()

    def round(self, traffic: Rows, sockets: Rows, waits: Rows | None = None, losses: dict[int, int] | None = None,
              seconds: float = 1.0, beside: bool = False) -> Outcome:  # fmt: skip
        maps = {"traffic": traffic, "sockets": sockets, "waits": waits or []}
        answers = self.machine.tape.answers
        answers |= rows.probe_answers("net", PROGRAMS, maps, losses)
        answers |= {
            ("bpf", f"net delete {name} {key.hex()}"): rows.packed(True) for name in maps for key, _ in maps[name]
        }
        world = self.machine.next_round(seconds)
        if beside:
            self.beside = collect(self.sockets, world)
        outcome = collect(self.collector, world)
        check(outcome)
        return outcome


def edge(outcome: Outcome, kind: str, source: str, target: str) -> Edge:
    return outcome.graph.edges[source, target, kind]


def process(pid: int) -> str:
    return f"Process(pid={pid},start={1000 + pid})"


def client(sent: int, calls: int) -> tuple[bytes, bytes]:
    return rows.traffic(13, WORKER, WORKER, 1000 + WORKER, sent=(sent, calls))


ALIVE = rows.internet(13, HERE, THERE, role=CLIENT, opened_ms=1000, established_ms=1002, netns=OWN_NETNS)


def test_a_rate_needs_two_readings_and_is_of_what_grew_between() -> None:
    net = Net()
    first = net.round([client(1000, 3)], [ALIVE])
    belong = edge(first, "Belong", "Socket(tcp,10.0.0.5:40000)", process(WORKER))
    assert belong.unknown is not None and belong.unknown["sent_bytes_per_s"] == FIRST_READING and not belong.metrics
    second = net.round([client(5000, 5)], [ALIVE], seconds=2.0)
    belong = edge(second, "Belong", "Socket(tcp,10.0.0.5:40000)", process(WORKER))
    assert belong.metrics == {
        "sent_bytes_per_s": 2000,
        "received_bytes_per_s": 0,
        "sends_per_s": 1,
        "receives_per_s": 0,
    }
    third = net.round([client(5000, 5)], [ALIVE])
    assert edge(third, "Belong", "Socket(tcp,10.0.0.5:40000)", process(WORKER)).metrics["sent_bytes_per_s"] == 0


def test_the_edge_is_the_one_that_the_snapshot_draws() -> None:
    net = Net()
    net.round([client(1, 1)], [ALIVE], beside=True)
    outcome = net.round([client(11, 2)], [ALIVE], beside=True)
    merged = net.beside.graph.merge(outcome.graph)
    between = [key for key in merged.edges if key[2] == "ConnectTo" and "10.0.0.5:40000" in key[0] + key[1]]
    assert between == [("Socket(tcp,10.0.0.5:40000)", "Socket(tcp,10.0.0.5:8000)", "ConnectTo")]
    drawn = merged.edges[between[0]]
    assert drawn.metrics["sends_per_s"] == 1 and drawn.metrics["connect_ms"] == 2.0
    assert drawn.attributes["state"] == "ESTABLISHED" and "rtt_ms" in drawn.metrics


def ended_pair() -> Rows:
    """A connection that opened and closed between two rounds, with both its ends here."""
    return [
        rows.internet(71, ("10.0.0.5", 41111), THERE, role=CLIENT, opened_ms=2000, established_ms=2003, ended_ms=2500,
                      sent=700, received=300, retransmits=2, segments=(5, 4), rtt_us=90, pid=WORKER,
                      start=1000 + WORKER, netns=OWN_NETNS),
        rows.internet(72, THERE, ("10.0.0.5", 41111), role=SERVER_ROLE, established_ms=2003, opened_ms=2003,
                      accepted_ms=2010, ended_ms=2499, sent=300, received=700, retransmits=1, segments=(4, 5),
                      netns=OWN_NETNS, pid=SERVER, start=1000 + SERVER),
    ]  # fmt: skip


def test_a_connection_that_no_snapshot_saw_is_one_ended_edge_with_the_totals_of_both_ends() -> None:
    net = Net()
    net.round([], [])
    traffic = [
        rows.traffic(71, WORKER, WORKER, 1000 + WORKER, sent=(700, 7), received=(300, 1)),
        rows.traffic(72, SERVER, SERVER, 1000 + SERVER, sent=(300, 1), received=(700, 2)),
    ]
    outcome = net.round(traffic, ended_pair(), beside=True)
    drawn = edge(outcome, "ConnectTo", "Socket(tcp,10.0.0.5:41111)", "Socket(tcp,10.0.0.5:8000)")
    assert drawn.attributes == {
        "state": "CLOSED",
        "ended": True,
        "source_processes": [process(WORKER)],
        "target_processes": [process(SERVER)],
    }
    assert drawn.metrics == {
        "bytes_sent_count": 700,
        "bytes_received_count": 300,
        "retransmits_count": 3,
        "segments_sent_count": 9,
        "rtt_ms": 0.09,
        "duration_ms": 500.0,
        "connect_ms": 3.0,
        "accept_ms": 7.0,
    }
    again = net.round(traffic, ended_pair())
    assert not [key for key in again.graph.edges if "Socket(tcp,10.0.0.5:41111)" in key]
    assert net.machine.tape.asked["bpf", f"net delete sockets {rows.cookie(71).hex()}"] == 1


def test_the_client_s_view_from_the_server_s_end() -> None:
    """The client is on another host: what the server received is what it sent."""
    net = Net()
    net.round([], [])
    row = rows.internet(9, THERE, ("192.0.2.9", 5000), role=SERVER_ROLE, established_ms=2000, opened_ms=2000,
                        ended_ms=2100, sent=10, received=4000, netns=OWN_NETNS)  # fmt: skip
    outcome = net.round([], [row])
    drawn = edge(outcome, "ConnectTo", "Socket(tcp,192.0.2.9:5000)", "Socket(tcp,10.0.0.5:8000)")
    assert (drawn.metrics["bytes_sent_count"], drawn.metrics["bytes_received_count"]) == (4000, 10)
    assert outcome.graph.nodes["Socket(tcp,192.0.2.9:5000)"].attributes == {"remote": True}


def test_a_connection_that_was_refused_has_failed() -> None:
    net = Net()
    net.round([], [])
    row = rows.internet(9, ("10.0.0.5", 45000), ("192.0.2.9", 81), role=CLIENT, ended_ms=1100, pid=WORKER,
                        start=1000 + WORKER, netns=OWN_NETNS)  # fmt: skip
    outcome = net.round([], [row])
    drawn = edge(outcome, "ConnectTo", "Socket(tcp,10.0.0.5:45000)", "Socket(tcp,192.0.2.9:81)")
    assert drawn.attributes["failed"] is True and "connect_ms" not in drawn.metrics
    assert edge(outcome, "Belong", "Socket(tcp,10.0.0.5:45000)", process(WORKER))


def test_a_datagram_socket_is_over_when_two_snapshots_in_a_row_lack_it() -> None:
    net = Net()
    traffic = [rows.traffic(5, WORKER, WORKER, 1000 + WORKER, sent=(64, 2))]
    sockets = [rows.internet(5, ("10.0.0.5", 7777), ("192.0.2.53", 53), protocol=UDP, netns=OWN_NETNS)]
    for expected in (None, True):
        drawn = edge(net.round(traffic, sockets), "ConnectTo", "Socket(udp,10.0.0.5:7777)", "Socket(udp,192.0.2.53:53)")
        assert drawn.attributes.get("ended") is expected
    assert drawn.metrics["bytes_sent_count"] == 64
    assert not [key for key in net.round(traffic, sockets).graph.edges if "Socket(udp,192.0.2.53:53)" in key]


def test_a_bound_datagram_socket_has_a_process_and_no_connection() -> None:
    net = Net()
    traffic = [rows.traffic(5, SERVER, SERVER, 1000 + SERVER, received=(64, 2))]
    outcome = net.round(traffic, [rows.internet(5, ("10.0.0.5", 53), None, protocol=UDP, netns=OWN_NETNS)])
    assert ("Socket(udp,10.0.0.5:53)", process(SERVER), "Belong") in outcome.graph.edges
    assert not [key for key in outcome.graph.edges if key[2] == "ConnectTo"]


@pytest.mark.parametrize("wanted", [True, False])
def test_threads_are_told_apart_unless_that_is_off(wanted: bool) -> None:
    net = Net(threads=wanted)
    start = 1000 + WORKER
    traffic = [
        rows.traffic(13, WORKER, WORKER, start, sent=(10, 1)),
        rows.traffic(13, WORKER + 1, WORKER, start, sent=(20, 1), thread_start=start + 1),
    ]
    outcome = net.round(traffic, [ALIVE])
    used = [key for key in outcome.graph.edges if key[2] == "Access"]
    assert len(used) == (2 if wanted else 0)
    if wanted:
        assert (f"Thread(tid={WORKER + 1},start={start + 1})", "Socket(tcp,10.0.0.5:40000)", "Access") in used


def test_a_thread_at_a_shared_socket_makes_no_flow_to_the_others_that_hold_it() -> None:
    net = Net()
    start = 1000 + WORKER
    traffic = [
        rows.traffic(13, WORKER + 1, WORKER, start, sent=(20, 1), thread_start=start + 1),
        rows.traffic(13, SERVER, SERVER, 1000 + SERVER, sent=(1, 1)),
    ]
    graph = net.round(traffic, [ALIVE]).graph
    assert {edge.target for edge in graph.edges_of_kind(edges.Belong)} == {process(WORKER), process(SERVER)}
    assert [key for key in graph.edges if key[2] == "Access"]
    assert not [flow for flow in lift(graph) if {flow.source, flow.target} == {process(WORKER), process(SERVER)}]


def test_a_reused_thread_id_does_not_inherit_what_the_one_before_did() -> None:
    net = Net()
    net.round([client(1000, 3)], [ALIVE])
    newer = rows.traffic(13, WORKER, WORKER, 1000 + WORKER, sent=(40, 1), thread_start=99_999)
    outcome = net.round([newer], [ALIVE])
    assert edge(outcome, "Belong", "Socket(tcp,10.0.0.5:40000)", process(WORKER)).metrics["sent_bytes_per_s"] == 40


def test_who_ended_is_not_told_again_and_its_rows_are_given_back() -> None:
    net = Net()
    gone = rows.traffic(13, 77, 77, 5, sent=(9, 1))
    first = net.round([client(1, 1), gone], [ALIVE])
    assert "Process(pid=77,start=5)" in first.graph.nodes, "what it did it did"
    second = net.round([client(1, 1), gone], [ALIVE])
    assert "Process(pid=77,start=5)" not in second.graph.nodes and process(WORKER) in second.graph.nodes
    assert net.machine.tape.asked["bpf", f"net delete traffic {gone[0].hex()}"] == 1


def test_a_thread_that_does_nothing_any_more_fades() -> None:
    net = Net()
    start = 1000 + WORKER
    traffic = [client(1, 1), rows.traffic(13, WORKER + 1, WORKER, start, sent=(20, 1), thread_start=start + 1)]
    shown = [len([key for key in net.round(traffic, [ALIVE]).graph.edges if key[2] == "Access"]) for _ in range(5)]
    assert shown == [2, 2, 2, 0, 0]


def test_waits_of_a_round_are_the_difference_of_two_readings() -> None:
    net = Net()
    start = 1000 + WORKER
    net.round([], [], [rows.wait(WORKER, 0, start, [100] * 5)])
    node = net.round([], [], [rows.wait(WORKER, 0, start, [100] * 5 + [3000] * 3)]).graph.nodes[process(WORKER)]
    assert node.metrics["connects_per_s"] == 3 and node.metrics["connect_mean_ms"] == 3.0
    assert node.attributes["connect_us_log2"] == [0] * 12 + [3]
    assert 2.048 <= node.metrics["connect_p50_ms"] <= 4.096
    nobody = net.round([], [], [rows.wait(WORKER, 0, 4_000_000, [7])]).graph.nodes[
        f"Process(pid={WORKER},start=4000000)"
    ]
    assert nobody.metrics["connects_per_s"] == 1, "another process with that pid: all of it is new"


def test_losses_are_counted_once() -> None:
    net = Net()
    assert net.round([], [], losses={0: 5}).losses == {"uses of sockets that found no room": 5}
    assert net.round([], [], losses={0: 7, 1: 2}).losses == {
        "uses of sockets that found no room": 2,
        "sockets that found no room": 2,
    }
    assert net.round([], [], losses={0: 7, 1: 2}).losses == {}


def test_each_round_says_what_the_programs_cost() -> None:
    net = Net()
    net.round([], [])
    spent = {line.program: (line.runs_count, line.run_ms) for line in net.collector.programs.values()}
    assert spent == dict.fromkeys(PROGRAMS, (10, 0.005))


def test_without_seeds_only_what_a_process_has_to_do_with_is_shown() -> None:
    net = Net(seed_all=False)
    outcome = net.round([client(1, 1), rows.traffic(5, SERVER, SERVER, 1000 + SERVER, sent=(1, 1))], [ALIVE])
    only = net.collector.expand([next(node for node in outcome.nodes if node.id == process(WORKER))])  # type: ignore[list-item]
    assert {found.id for found in only.nodes} >= {process(WORKER), "Socket(tcp,10.0.0.5:40000)"}
    assert net.collector.seed().nodes == []
    assert {found.target for found in only.edges} == {process(WORKER), "Socket(tcp,10.0.0.5:8000)"}


def test_rows_of_another_version_are_no_crash() -> None:
    net = Net()
    net.machine.tape.answers |= rows.probe_answers("net", PROGRAMS, {"traffic": [(b"x" * 16, b"y")], "sockets": []})
    outcome = collect(net.collector, net.machine.next_round())
    assert not outcome.ok and "another layout" in outcome.reason and outcome.hint == "record again"


class Refusing(ProbeBackend):
    """A backend of a host where nothing may be loaded."""

    name = "libbpf"

    def __init__(self) -> None:
        self.asked = 0

    def available(self) -> None:
        self.asked += 1
        raise SourceUnavailable("no right to load BPF programs", "run as root or grant CAP_BPF and CAP_PERFMON")

    def load(self, name: str, **_: object) -> ProbeObject:  # type: ignore[override]
        raise AssertionError("it is not available")


def test_without_the_right_there_is_one_reason_and_one_hint_and_it_is_not_tried_every_round() -> None:
    machine = FakeMachine(rich_machine())
    backend = Refusing()
    machine.world.probes = Probes(backends=[backend])
    collector = KernelNet()
    for _ in range(13):
        outcome = collect(collector, machine.next_round())
        assert (outcome.ok, outcome.reason) == (False, "no right to load BPF programs")
        assert outcome.hint == "run as root or grant CAP_BPF and CAP_PERFMON"
    assert backend.asked == 4, "twice, and each time for less as well"
    assert collector.seed().nodes == []
    collector.close()


def test_a_kernel_without_events_of_sends_and_receives_still_shows_connections() -> None:
    """Before Linux 6.3."""
    net = Net()
    net.round([], [])
    net.collector.close()
    maps = {"traffic": [], "sockets": ended_pair(), "waits": []}
    net.machine.tape.answers |= rows.probe_answers("net", ("on_state",), maps)
    del net.machine.tape.answers["bpf", "net attach on_send"]
    outcome = collect(net.collector, net.machine.next_round())
    assert edge(outcome, "ConnectTo", "Socket(tcp,10.0.0.5:41111)", "Socket(tcp,10.0.0.5:8000)").attributes["ended"]
    assert edge(outcome, "Belong", "Socket(tcp,10.0.0.5:41111)", process(WORKER))
    [note] = outcome.notes
    assert "bytes and calls of processes are not" in note.reason and "Linux 6.3" in note.hint


def test_graph_of_nothing() -> None:
    assert Net().round([], []).graph == Graph()
