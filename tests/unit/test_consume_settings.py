"""What ``gpuflight-server --consume`` takes, refuses, hides and shows."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.topic import MemoryStore, message
from tests.unit.server_fixture import Served
from tests.unit.test_consume_loop import FakeClient, Limits

from gpuflight.cli.consume import for_consumer, lock_path
from gpuflight.cli.plugin_settings import effective, make_collectors, make_consume
from gpuflight.cli.server import run_server
from gpuflight.collectors.fleet import Fleet
from gpuflight.core.lockfile import default_lock_path
from gpuflight.errors import ConfigError, SourceUnavailable
from gpuflight.server.consume.client import ClientError
from gpuflight.server.consume.coverage import ConsumeCoverage
from gpuflight.server.consume.figures import Figures, PartitionFigures
from gpuflight.server.consume.loop import Loop
from gpuflight.server.routes.metrics import exposition
from gpuflight.settings import Settings, load
from gpuflight.subscribers.kafka_wire import Message

MINIMAL = {"brokers": ["k:9092"], "mongodb": {"uri": "mongodb://m/"}}
SECRET = "correct horse"


def settings(**changes: Any) -> Settings:
    return Settings(consume={**MINIMAL, **changes})


def test_the_ready_settings_of_a_fleet_load(repository: Path) -> None:
    consumer = load(str(repository / "configs/fleet/consumer.json"))
    agent = load(str(repository / "configs/fleet/agent.json"))
    made = make_consume(consumer)
    [sink] = effective(agent)["subscribers"]
    assert (sink["topic"], sink["brokers"]) == (made.topic, made.brokers)
    assert sink["policy"] == "spool" and sink["content"] == "diff"
    effective(for_consumer(consumer))


@pytest.mark.parametrize(
    ("consume", "line"),
    [
        ({}, "consume.brokers: missing"),
        ({"brokers": ["k"]}, "consume.mongodb: missing"),
        ({**MINIMAL, "grupo": "x"}, "consume.grupo: unknown key; did you mean consume.group?"),
        ({**MINIMAL, "brokers": ["http://k"]}, "consume.brokers"),
        ({**MINIMAL, "mongodb": {"uri": "k:9092"}}, "consume.mongodb.uri"),
        ({**MINIMAL, "mongodb": {"uri": "mongodb://m", "username": "u"}}, "one of password and password_file"),
        ({**MINIMAL, "mongodb": {"uri": "mongodb://u:p@m", "username": "u", "password": "p"}}, "a user already"),
        ({**MINIMAL, "client": {"group.id": "mine"}}, "group.id is set by gpuflight"),
        ({**MINIMAL, "client": {"partition.assignment.strategy": "range"}}, "is set by gpuflight"),
        ({**MINIMAL, "client": {"plugin.library.paths": "/tmp/x.so"}}, "is set by gpuflight"),
        ({**MINIMAL, "writers_count": 0}, "consume.writers_count"),
    ],
)
def test_mistakes_are_told_with_their_place(consume: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match="consume") as caught:
        for_consumer(Settings(consume=consume))
    assert line in str(caught.value)


def test_it_does_not_start_without_its_section(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"consume\.brokers: missing"):
        run_server(["--consume", "kafka"])
    for arguments in (["carrier-pigeon"], ["kafka", "--replay", "x.tape"]):
        with pytest.raises(SystemExit):
            run_server(["--consume", *arguments])
    said = capsys.readouterr().err
    assert "carrier-pigeon" in said and "a recording holds no topic" in said


def test_secrets_come_from_the_environment_and_files_and_are_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: Path
) -> None:
    password = tmp_path / "password"
    password.write_text(f"{SECRET}\n")
    monkeypatch.setenv("GPUFLIGHT_CONSUME__MONGODB__USERNAME", "fleet@home")
    monkeypatch.setenv("GPUFLIGHT_CONSUME__MONGODB__PASSWORD_FILE", str(password))
    monkeypatch.setenv("GPUFLIGHT_CONSUME__SECURITY_PROTOCOL", "sasl_ssl")
    monkeypatch.setenv("GPUFLIGHT_CONSUME__SASL_MECHANISM", "SCRAM-SHA-512")
    monkeypatch.setenv("GPUFLIGHT_CONSUME__SASL_USERNAME", "consumer")
    monkeypatch.setenv("GPUFLIGHT_CONSUME__SASL_PASSWORD", SECRET)
    monkeypatch.setenv("GPUFLIGHT_CONSUME__BROKERS", '["other:9093"]')
    loaded = for_consumer(load(str(repository / "configs/fleet/consumer.json")))
    made = make_consume(loaded)
    assert made.brokers == ["other:9093"]
    assert made.sasl_password is not None and made.sasl_password.get_secret_value() == SECRET
    uri = "mongodb://fleet%40home:correct+horse@mongodb:27017/?authSource=admin"
    assert made.mongodb.options().uri == f"{uri}&journal=true"
    [fleet] = [c for c in make_collectors(loaded) if isinstance(c, Fleet)]
    assert fleet.settings.uri is not None and fleet.settings.uri.get_secret_value() == uri
    shown = json.dumps(effective(loaded))
    assert SECRET not in shown and "correct+horse" not in shown
    password.unlink()
    with pytest.raises(ConfigError, match="password_file"):
        make_consume(loaded).mongodb.options()


@pytest.mark.parametrize(
    ("uri", "full"),
    [
        ("mongodb://h", "mongodb://h/?journal=true"),
        ("mongodb://a:1,b/?replicaSet=r", "mongodb://a:1,b/?replicaSet=r&journal=true"),
        ("mongodb://h/?journal=false", "mongodb://h/?journal=false"),
        ("mongodb://h/?w=0", "mongodb://h/?w=0"),
    ],
)
def test_a_write_counts_when_it_is_in_the_journal(uri: str, full: str) -> None:
    assert make_consume(settings(mongodb={"uri": uri})).mongodb.options().uri == full


def test_it_looks_at_the_database_and_not_at_its_host() -> None:
    changed = for_consumer(settings())
    assert [collector.name for collector in make_collectors(changed)] == ["fleet"]
    also = settings()
    also.collectors = {"host": {"enabled": True}, "fleet": {"uri": "mongodb://elsewhere/", "interval_s": 1.0}}
    found = {collector.name: collector for collector in make_collectors(for_consumer(also))}
    assert set(found) == {"fleet", "host"}
    fleet = found["fleet"].settings
    assert fleet.uri.get_secret_value() == "mongodb://elsewhere/" and fleet.interval_s == 1.0 and fleet.show_own
    unknown = settings()
    unknown.collectors = {"flet": {"enabled": True}}
    with pytest.raises(ConfigError, match="did you mean fleet"):
        make_collectors(for_consumer(unknown))


def test_it_keeps_apart_from_the_agent_of_its_host(tmp_path: Path) -> None:
    here = settings()
    here.server.state_folder = str(tmp_path)
    assert for_consumer(here).server.state_folder == str(tmp_path / "consume")
    assert here.server.state_folder == str(tmp_path), "the settings that were given are not changed"
    assert lock_path() != default_lock_path()


# --- what it shows ---------------------------------------------------------------------------------------------------


class Told:
    """A loop that says what the test says."""

    def __init__(self, **figures: Any) -> None:
        self.silent_s = 0.0
        self.now = Figures(connected=True, **figures)

    def figures(self) -> Figures:
        return self.now


TROUBLED: dict[str, Any] = {
    "messages": 40,
    "rounds": 20,
    "outcomes": {"written": 11, "duplicate": 2, "older": 1, "waiting": 3, "unreadable": 2, "refused": 1},
    "skipped": {"foreign": 4, "malformed": 0, "corrupt": 1},
    "repeated": 5,
    "paused": True,
    "store_error": "mongodb://m:27017: no server answers",
    "waiting_count": 2,
    "waiting_namespaces": ["node-1"],
    "partitions": [
        PartitionFigures(partition=0, position=9, committed=7, high=12, lag=5),
        PartitionFigures(partition=3),
    ],
}


def test_coverage_says_what_was_read_and_passed_over() -> None:
    told = Told(**TROUBLED)
    coverage = ConsumeCoverage(told)  # type: ignore[arg-type]
    coverage.observe(None)  # type: ignore[arg-type]
    assert coverage.losses == {
        "messages of another format": 4,
        "rounds whose bytes are damaged or too many": 1,
        "rounds that cannot be read": 2,
        "rounds that the database refuses": 1,
        "differences whose base is not known": 3,
    }
    counts = {note.reason: note.count for note in coverage.notes.values()}
    assert counts["messages read"] == 40 and counts["rounds written"] == 11
    assert counts["rounds that were there already"] == 3 and counts["messages that came again"] == 5
    assert counts["partition 0: messages that are not done with"] == 5
    assert counts["waiting for a whole graph of node-1, …"] == 2
    assert any("no server answers" in reason for reason in counts)
    assert coverage.seed().nodes == []


def test_coverage_says_that_kafka_is_not_there() -> None:
    told = Told(client_error="k:9092: Connection refused")
    told.now.connected = False
    coverage = ConsumeCoverage(told)  # type: ignore[arg-type]
    with pytest.raises(SourceUnavailable, match="Connection refused"):
        coverage.observe(None)  # type: ignore[arg-type]
    told.now.connected, told.silent_s = True, 60.0
    with pytest.raises(SourceUnavailable, match="has not come back for 60 s"):
        coverage.observe(None)  # type: ignore[arg-type]


def test_metrics_have_every_figure_with_bounded_labels() -> None:
    with Served() as served:
        assert "gpuflight_consume" not in exposition(served.state)
        served.state.consumer = Told(**TROUBLED)
        text = exposition(served.state)
    assert 'gpuflight_consume_lag_messages{partition="0"} 5' in text
    assert 'gpuflight_consume_lag_messages{partition="3"}' not in text, "what is unknown has no sample"
    assert 'gpuflight_consume_rounds_done_total{outcome="written"} 11' in text
    assert 'gpuflight_consume_skipped_total{reason="foreign"} 4' in text
    assert "gpuflight_consume_paused 1" in text and "gpuflight_consume_store_ok 0" in text
    assert "node-1" not in text, "hosts come and go"


def test_a_loop_that_was_never_started_stops() -> None:
    store = MemoryStore()
    logs: dict[int, list[Message]] = {0: message("a", 1)}
    loop = Loop(lambda: FakeClient(logs, {0: 0}), store.writer, Limits())
    assert loop.stop(10.0)
    assert store.open_count == 0 and loop.figures().messages == 0


def test_a_client_that_cannot_be_made_is_told_and_made_again() -> None:
    store = MemoryStore()
    made: list[FakeClient] = []

    def make() -> FakeClient:
        made.append(FakeClient({0: message("a", 1)}, {0: 0}))
        if len(made) < 3:
            raise ClientError("no such file: ca.pem", fatal=True)
        return made[-1]

    loop = Loop(make, store.writer, Limits())
    loop.start()
    end_s = time.monotonic() + 30.0
    while not store.written("a"):
        assert time.monotonic() < end_s
        time.sleep(0.005)
    assert loop.stop(10.0) and len(made) == 3
