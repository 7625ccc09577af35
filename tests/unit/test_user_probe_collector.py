"""The collector of users' probes: from rows to metrics, over answers of a tape. No kernel needed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.fakes.collecting import Outcome, collect
from tests.fakes.kernel_rows import Rows, packed
from tests.fakes.machine import FakeMachine, rich_machine
from tests.fakes.machine_answers import SERVER, TRAINER
from tests.fakes.user_probe_answers import SHAPES, TOML, found, switches

from gpuflight.collectors.user_probe_rows import Rows as RowReader
from gpuflight.collectors.user_probe_rows import metrics_of, quantile_bound
from gpuflight.collectors.user_probes import UserProbeCollector, UserProbesSettings
from gpuflight.graph import Entity
from gpuflight.sources.bpf.base import ProgramCost
from gpuflight.sources.bpf.loaded import Shape
from gpuflight.sources.bpf.user_probe_spec import parse_spec

# --- from rows to metrics --------------------------------------------------------------------------------------------

SPEC = parse_spec(TOML, "switches.toml")
SWITCHES = SPEC.maps[0]


def reader(kind: int = 1) -> RowReader:
    return RowReader(SWITCHES, Shape(8, 48, 64, kind))


def test_a_row_counts_from_zero_if_it_is_new_and_from_its_last_value_if_not() -> None:
    rows = reader()
    first = rows.read([switches(1, 100)], 10.0)
    assert rows.elapsed_s == 0.0
    assert "this was the first" in metrics_of(SWITCHES, first, rows.elapsed_s)[1]["switches_per_s"]
    second = rows.read([switches(1, 150), switches(2, 30)], 12.0)
    assert rows.elapsed_s == 2.0
    by_pid = {row.key["pid"]: metrics_of(SWITCHES, [row], 2.0)[0] for row in second}
    assert by_pid[1] == {"switches_per_s": 25.0, "switch_mean_us": 2.0, "switch_p50_ns": 4}
    assert by_pid[2]["switches_per_s"] == 15.0
    assert metrics_of(SWITCHES, second, 2.0)[0]["switches_per_s"] == 40.0


def test_where_chooses_rows() -> None:
    assert [row.key for row in reader().read([switches(1, 5), switches(1, 9, operation=2)], 1.0)] == [
        {"pid": 1, "operation": 1}
    ]


def test_nothing_counted_is_not_zero_for_a_mean() -> None:
    rows = reader()
    rows.read([switches(1, 5)], 1.0)
    metrics, unknown = metrics_of(SWITCHES, rows.read([switches(1, 5)], 2.0), 1.0)
    assert metrics == {"switches_per_s": 0.0}
    assert unknown == dict.fromkeys(("switch_mean_us", "switch_p50_ns"), "nothing was counted in this round")


def test_a_row_that_went_back_began_again() -> None:
    rows = reader()
    rows.read([switches(1, 500)], 1.0)
    (row,) = rows.read([switches(1, 20)], 2.0)
    assert rows.restarted == 1
    assert metrics_of(SWITCHES, [row], 1.0)[0]["switches_per_s"] == 20.0


def test_gauges_are_summed_or_the_largest_is_taken() -> None:
    for combine, expected in (("sum", 12), ("max", 7)):
        text = TOML.replace("metrics = { depth", f'combine = "{combine}"\nmetrics = {{ depth')
        spec = parse_spec(text, "x.toml").maps[2]
        rows = RowReader(spec, Shape(4, 4, 8, 1))
        read = rows.read([(bytes(4), (7).to_bytes(4, "little")), (bytes([1, 0, 0, 0]), (5).to_bytes(4, "little"))], 1.0)
        assert metrics_of(spec, read, 0.0) == ({"depth_count": expected}, {})
        assert rows.read([(bytes(4), (2).to_bytes(4, "little"))], 2.0)
        assert rows.restarted == 0, "a gauge may fall"


@pytest.mark.parametrize(
    ("slots", "quantile", "bound"),
    [([0, 0], 0.5, None), ([10, 0, 0], 0.5, 2), ([1, 0, 9], 0.1, 2), ([1, 0, 9], 0.11, 8), ([0, 0, 1], 0.99, 8)],
)
def test_a_quantile_is_the_bound_of_its_slot(slots: list[int], quantile: float, bound: int | None) -> None:
    assert quantile_bound(slots, quantile) == bound


# --- the collector, over answers of a tape ---------------------------------------------------------------------------


class Machine:
    """The machine in memory, with answers that a test changes."""

    def __init__(self) -> None:
        self.machine = FakeMachine(rich_machine())
        self.answers = self.machine.tape.answers
        self.collector = UserProbeCollector()

    def rows(self, **maps: Rows) -> None:
        for which, rows in maps.items():
            self.answers["bpf", f"user/switches read {which}"] = packed(rows)

    def answer(self, question: str, value: object) -> None:
        self.answers["bpf", f"user/switches {question}"] = packed(value)

    def round(self) -> Outcome:
        self.collector.programs.clear()
        return collect(self.collector, self.machine.next_round())


@pytest.fixture
def machine() -> Machine:
    return Machine()


def entity(outcome: Outcome, start: str) -> Entity:
    return next(node for node in outcome.nodes if node.id.startswith(start) and (node.metrics or node.unknown))


def test_metrics_land_on_every_kind(machine: Machine) -> None:
    machine.round()
    outcome = machine.round()
    assert entity(outcome, f"Process(pid={TRAINER}").metrics == {
        "switches_per_s": 10.0, "switch_mean_us": 2.0, "switch_p50_ns": 4,
    }  # fmt: skip
    assert entity(outcome, f"Thread(tid={TRAINER}").metrics == {"thread_switches_per_s": 20.0}
    assert entity(outcome, "Disk(nvme0n1)").metrics == {"depth_count": 5}
    assert entity(outcome, "Nic(ib0)").metrics == {"nic_switches_per_s": 10.0}
    assert entity(outcome, "Numa(1)").metrics == {"node_switches_per_s": 0.0}
    assert entity(outcome, "Host(node1)").metrics == {"host_switches_per_s": 10.0}
    assert [(edge.source, edge.target) for edge in outcome.edges] == [
        (f"Process(pid={TRAINER},start={1000 + TRAINER})", f"Thread(tid={TRAINER},start={1000 + TRAINER})")
    ]
    assert outcome.losses == {}
    assert outcome.notes == []


def test_without_a_folder_it_is_skipped_and_says_which_setting() -> None:
    from gpuflight.sources.bpf.probes import Probes

    machine = Machine()
    machine.machine.world.probes = Probes()
    outcome = machine.round()
    assert not outcome.ok
    assert (outcome.reason, outcome.hint) == (
        "no folder with probes is set", "name it in collectors.user_probes.folder",
    )  # fmt: skip


def test_a_mistake_costs_that_probe_only(machine: Machine) -> None:
    broken = found(TOML.replace('rate = "calls"', 'rate = "cals"', 1), "broken")
    half = msgspec.structs.replace(found(name="half"), mistake="half.toml: there is no half.c beside it (write one)")
    machine.answers["user_probes", "folder"] = packed([broken, half, found()])
    outcome = machine.round()
    assert [(note.reason, note.hint) for note in outcome.notes] == [
        ("half.toml: there is no half.c beside it (write one)", ""),
        ("broken.toml:14: the value has no number 'cals'", "did you mean calls?"),
    ]
    assert entity(outcome, "Disk(nvme0n1)")


def test_two_probes_must_not_give_the_same_metric(machine: Machine) -> None:
    machine.answers["user_probes", "folder"] = packed([found(), found(name="twin")])
    (note,) = machine.round().notes
    assert note.reason == "twin.toml: Process has switches_per_s from switches.toml already"


def test_a_probe_that_cannot_be_loaded_is_tried_again_later(machine: Machine) -> None:
    live = machine.answers.pop(("bpf", "open user/switches"))
    assert "this machine has no bpf" in machine.round().notes[0].reason
    machine.answers["bpf", "open user/switches"] = live
    rounds = 0
    while machine.round().notes:
        rounds += 1
        assert rounds < 20
    assert rounds > 5


def test_a_changed_file_is_loaded_in_the_next_round(machine: Machine) -> None:
    machine.round()
    changed = msgspec.structs.replace(found(TOML.replace("depth_count", "waiting_count")), fingerprint="2")
    machine.answers["user_probes", "folder"] = packed([changed])
    assert entity(machine.round(), "Disk(nvme0n1)").metrics == {"waiting_count": 5}
    machine.answers["user_probes", "folder"] = packed([])
    outcome = machine.round()
    assert (outcome.nodes, outcome.notes) == ([], [])


def test_rows_of_what_has_ended_are_deleted_and_counted(machine: Machine) -> None:
    machine.rows(switches=[switches(TRAINER, 5), switches(99_999, 7)])
    question = f"delete switches {switches(99_999, 7)[0].hex()}"
    machine.answer(question, True)
    outcome = machine.round()
    assert outcome.losses == {"rows of what has ended": 1}
    assert machine.machine.tape.asked["bpf", f"user/switches {question}"] == 1
    assert not [node for node in outcome.nodes if "99999" in node.id]


def test_a_process_number_that_was_used_again_is_not_mixed_up(machine: Machine) -> None:
    machine.rows(switches=[switches(SERVER, 100)])
    machine.round()
    path = f"/proc/{SERVER}/stat"
    fs = machine.machine.fs
    before = fs.files[path].decode()
    head, _, rest = before.rpartition(")")
    fields = rest.split()
    fields[19] = str(int(fields[19]) + 50)
    fs.files[path] = f"{head}) {' '.join(fields)}".encode()
    machine.rows(switches=[switches(SERVER, 120)])
    machine.answer(f"delete switches {switches(SERVER, 0)[0].hex()}", True)
    outcome = machine.round()
    assert outcome.losses == {"rows whose process number was used again": 1}
    assert not [node for node in outcome.nodes if "switches_per_s" in node.metrics]
    machine.rows(switches=[switches(SERVER, 4)])
    assert entity(machine.round(), f"Process(pid={SERVER}").metrics["switches_per_s"] == 4.0


def test_a_full_map_is_said(machine: Machine) -> None:
    machine.answers["user_probes", "maps switches"] = packed({**SHAPES, "disks": Shape(4, 4, 1, 1)})
    (note,) = machine.round().notes
    assert note.reason == "the map disks of switches is full (1 rows): new ones are not counted"
    assert note.hint == "raise entries of the map in switches.toml"


def test_losses_have_the_names_of_the_toml(machine: Machine) -> None:
    machine.answer("losses", {0: 5, 3: 1})
    assert machine.round().losses == {"switches that found no room": 5, "losses of kind 3 of switches": 1}
    machine.answer("losses", {0: 7, 3: 1})
    assert machine.round().losses == {"switches that found no room": 2}


def test_what_programs_cost_is_told(machine: Machine) -> None:
    machine.round()
    machine.answer("costs", [ProgramCost("on_switch", 25, 9000, 0)])
    machine.round()
    (spent,) = machine.collector.programs.values()
    assert (spent.program, spent.runs_count, round(spent.run_ms, 6)) == ("switches.on_switch", 15, 0.004)
    machine.answer("costs", [ProgramCost("on_switch")])
    machine.round()
    assert machine.collector.programs == {}


def test_in_a_pid_namespace_of_our_own_process_numbers_mean_nothing(machine: Machine) -> None:
    procfs: Any = machine.machine.world.procfs
    procfs.own_namespace = lambda kind: 4026532999
    outcome = machine.round()
    assert "mean nothing in the pid namespace" in outcome.notes[0].reason
    assert "hostPID" in outcome.notes[0].hint
    assert not [node for node in outcome.nodes if node.kind == "Process"]
    assert entity(outcome, "Disk(nvme0n1)")


@pytest.mark.parametrize("which", ["read switches", "losses", "costs"])
def test_an_answer_that_is_damaged_costs_what_it_was_about(machine: Machine, which: str) -> None:
    machine.round()
    machine.answers["bpf", f"user/switches {which}"] = b"\xc1"
    outcome = machine.round()
    assert outcome.ok
    assert outcome.notes
    assert entity(outcome, "Disk(nvme0n1)")


def test_loading_does_not_take_a_round(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuflight.collectors.user_probes.LOADING_S", -1.0)
    assert [note.reason for note in machine.round().notes] == ["probes that wait to be loaded in the next round"]
    monkeypatch.undo()
    assert entity(machine.round(), "Disk(nvme0n1)")


def test_settings() -> None:
    assert UserProbesSettings().folder is None
