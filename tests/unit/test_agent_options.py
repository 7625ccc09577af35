"""Flags, environment and configuration file: gpufl-agent's, said in their words; secrets are shown to nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.conftest import DATA, ROOT

from gpuflight.agent.options import ALIASES, BY_FLAG, OPTIONS, make_settings
from gpuflight.agent.settings import AgentFile, AgentSettings, Archiver, Publisher, Source
from gpuflight.cli import main
from gpuflight.errors import ConfigError

THEIRS = {
    "folder": "GPUFL_SOURCE_FOLDER",
    "folders": "GPUFL_SOURCE_FOLDERS",
    "log-types": "GPUFL_LOG_TYPES",
    "cursor-file": "GPUFL_CURSOR_FILE",
    "type": "GPUFL_PUBLISHER_TYPE",
    "host": "GPUFL_HTTP_HOST",
    "api-version": "GPUFL_HTTP_API_VERSION",
    "token": "GPUFL_HTTP_TOKEN",
    "timeout": "GPUFL_HTTP_TIMEOUT_SEC",
    "upload-mode": "GPUFL_AGENT_UPLOAD_MODE",
    "stream-max-lines": "GPUFL_AGENT_STREAM_MAX_LINES",
    "stream-max-bytes": "GPUFL_AGENT_STREAM_MAX_BYTES",
    "brokers": "GPUFL_KAFKA_BROKERS",
    "topic-prefix": "GPUFL_KAFKA_TOPIC_PREFIX",
    "compression": "GPUFL_KAFKA_COMPRESSION",
    "kafka-linger-ms": "GPUFL_KAFKA_LINGER_MS",
    "archiver-endpoint": "GPUFL_ARCHIVER_ENDPOINT",
    "archiver-bucket": "GPUFL_ARCHIVER_BUCKET",
    "archiver-region": "GPUFL_ARCHIVER_REGION",
    "archiver-access-key": "GPUFL_ARCHIVER_ACCESS_KEY",
    "archiver-secret-key": "GPUFL_ARCHIVER_SECRET_KEY",
    "archiver-prefix": "GPUFL_ARCHIVER_PREFIX",
    "archiver-delete": "GPUFL_ARCHIVER_DELETE",
    "exit-when-drained": "GPUFL_AGENT_EXIT_WHEN_DRAINED",
    "exit-if-empty": "GPUFL_AGENT_EXIT_IF_EMPTY",
    "ignore-preexisting": "GPUFL_AGENT_IGNORE_PREEXISTING",
    "prune-failed": "GPUFL_AGENT_PRUNE_FAILED",
    "retain-acked-payloads": "GPUFL_AGENT_RETAIN_ACKED_PAYLOADS",
    "url": "GPUFL_HTTP_URL",
}
"""Flags of gpufl-agent 357615b and their variables."""


def settings(environment: dict[str, str] | None = None, config: str | None = None, **flags: str) -> AgentSettings:
    given = {name.replace("_", "-"): value for name, value in flags.items()}
    return make_settings(given, environment or {}, config)


def test_every_flag_and_variable_of_theirs_is_there() -> None:
    assert {flag: BY_FLAG[flag].variable for flag in THEIRS} == THEIRS
    variables = [option.variable for option in OPTIONS]
    assert len(variables) == len(set(variables))


def test_every_option_leads_to_a_setting() -> None:
    blocks = {"publisher": Publisher, "archiver": Archiver, "": AgentSettings}
    for option in OPTIONS:
        block, _, name = option.path.rpartition(".")
        assert not option.path or name in blocks[block].model_fields, option.flag
    named = {option.path for option in OPTIONS}
    for prefix, model in (("publisher.", Publisher), ("archiver.", Archiver), ("", AgentSettings)):
        for name in model.model_fields.keys() - {"sources", "publisher", "archiver"}:
            assert f"{prefix}{name}" in named, f"{prefix}{name} has no flag"


def test_defaults_are_theirs() -> None:
    found = settings(host="https://api.example.com/")
    assert found.sources == [Source(folder=".")]
    assert found.sources[0].logTypes == ["device", "scope", "system", "sass"]
    publisher = found.publisher
    assert (publisher.type, publisher.hostUrl, publisher.apiVersion) == ("http", "https://api.example.com", "v1")
    assert (publisher.timeoutSeconds, publisher.uploadMode) == (10, "stream")
    assert (publisher.streamMaxLines, publisher.streamMaxBytes) == (5000, 1_000_000)
    assert not found.drains and not found.deleteAckedPayloads and found.archiver is None
    kafka = settings(brokers="k:9092").publisher
    assert (kafka.type, kafka.topicPrefix, kafka.compression, kafka.lingerMs) == ("kafka", "gpu-trace", "snappy", 100)
    archiver = settings(host="https://a", archiver_bucket="logs").archiver
    assert archiver is not None
    assert (archiver.region, archiver.prefix, archiver.deleteAfterUpload) == ("nyc3", "raw-events/", False)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("https://api.example.com", "/api/v1/events"),
        ("https://api.example.com/", "/api/v1/events"),
        ("api.example.com", "/api/v1/events"),
        ("http://localhost:8080/api/v1/events", "/api/v1/events"),
        ("http://localhost:8080/api/v1/events/", "/api/v1/events"),
        ("http://localhost:8080/api/v1/events/stream", "/api/v1/events"),
        ("https://example.com/gpu", "/gpu/api/v1/events"),
    ],
)
def test_the_address_in_all_its_forms(url: str, path: str) -> None:
    assert settings(type="http", url=url).publisher.events_path == path


def test_the_form_of_the_article() -> None:
    found = settings(folder="/tmp/gpufl", type="kafka", brokers="localhost:9092, other:9093")
    assert found.sources[0].folder == "/tmp/gpufl"
    assert found.publisher.bootstrapServers == "localhost:9092, other:9093"


def test_a_flag_goes_before_the_file_and_that_before_the_environment(tmp_path: Path) -> None:
    config = tmp_path / "agent.json"
    publisher = {"type": "http", "hostUrl": "https://file", "streamMaxLines": 7}
    config.write_text(json.dumps({"source": {"folder": "/file"}, "publisher": publisher}))
    environment = {
        "GPUFL_HTTP_HOST": "https://environment",
        "GPUFL_HTTP_TOKEN": "t",
        "GPUFL_SOURCE_FOLDER": "/environment",
        "GPUFL_AGENT_STREAM_MAX_LINES": "8",
    }
    found = settings(environment, str(config), stream_max_lines="9")
    assert found.publisher.hostUrl == "https://file"
    assert found.sources[0].folder == "/file"
    assert found.publisher.streamMaxLines == 9
    assert found.publisher.authToken is not None and found.publisher.authToken.get_secret_value() == "t"
    assert settings(environment).sources[0].folder == "/environment"


def test_several_folders_and_channels() -> None:
    found = settings({"GPUFL_SOURCE_FOLDERS": "/a, /b", "GPUFL_LOG_TYPES": "device,system"}, host="https://a")
    assert [source.folder for source in found.sources] == ["/a", "/b"]
    assert found.sources[1].logTypes == ["device", "system"]


@pytest.mark.parametrize("text", ["true", "1", "yes", "on", "TRUE"])
def test_switches(text: str) -> None:
    assert settings({"GPUFL_AGENT_EXIT_IF_EMPTY": text}, host="https://a").drains
    assert not settings({"GPUFL_AGENT_EXIT_IF_EMPTY": text}, host="https://a", exit_if_empty="false").drains
    assert ALIASES == {"exit-when-done": "exit-when-drained"}


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"publisher": {"type": "http", "hostURL": "x"}}, "hostURL: unknown key; did you mean publisher.hostUrl?"),
        ({"publisher": {"type": "kafka", "bootstrapServer": "x"}}, "did you mean publisher.bootstrapServers?"),
        ({"archiver": {"bucket": "abc", "deleteAfterUploads": True}}, "did you mean archiver.deleteAfterUpload?"),
        ({"sources": [{"foldr": "/x"}]}, "sources[0].foldr: unknown key; did you mean sources[0].folder?"),
        ({"publisher": {"type": "http", "streamMaxLines": "7"}}, "streamMaxLines: must be a whole number"),
        ({"publishr": {}}, "publishr: unknown key; did you mean publisher?"),
        ({"source": {"logTypes": ["gpu"]}}, "source.logTypes[0]"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_file_is_named(tmp_path: Path, config: object, line: str) -> None:
    path = tmp_path / "agent.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        settings(config=str(path), host="https://a")
    assert line in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({}, "where to? --type=http --url=https://…, or --type=kafka --brokers=host:9092"),
        ({"type": "http"}, "http needs hostUrl (--host or --url)"),
        ({"type": "kafka"}, "kafka needs bootstrapServers (--brokers)"),
        ({"host": "ftp://x"}, "--host: ftp://x: only http:// and https:// are possible"),
        ({"host": "https://user:secret@x"}, "use a header instead"),
        ({"host": "https://a", "stream-max-lines": "many"}, "--stream-max-lines: must be a valid integer"),
        ({"host": "https://a", "live": "perhaps"}, "--live: must be true or false, not 'perhaps'"),
        ({"brokers": "k:9092", "live": "true"}, "live is for http"),
        ({"brokers": "k:9092:1:x/"}, "is not host or host:port"),
        ({"host": "https://a", "archiver-endpoint": "https://s3"}, "--archiver-bucket: missing"),
    ],
)
def test_a_mistake_in_a_flag_is_named(flags: dict[str, str], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_settings(flags, {})
    assert line.replace("a valid integer", "") in str(error.value).replace("a valid integer", "").replace(
        "a whole number", ""
    )
    assert "secret" not in str(error.value)


def test_the_example_has_every_key_that_theirs_has() -> None:
    path = ROOT / "configs" / "agent.json"
    found = settings(config=str(path))
    assert found.publisher.sends_windows
    assert found.archiver is not None and found.archiver.bucket == "gpu-flight-logs"
    assert AgentFile.model_validate_json(path.read_text(), strict=True).publisher is not None


def test_secrets_are_in_no_dump_and_no_error() -> None:
    flags = {"host": "https://a", "token": "gpfl_hidden", "archiver-bucket": "b", "archiver-secret-key": "hidden2"}
    with pytest.raises(ConfigError) as error:
        make_settings(flags, {})
    assert "hidden" not in str(error.value)
    found = make_settings({**flags, "archiver-bucket": "bucket"}, {})
    assert "hidden" not in repr(found)
    assert "hidden" not in found.model_dump_json()


def test_of_a_secret_and_its_file_the_nearer_counts(tmp_path: Path) -> None:
    found = settings({"GPUFL_HTTP_TOKEN_FILE": "/file"}, host="https://a", token="t").publisher
    assert found.authToken is not None and found.authTokenFile is None
    found = settings({"GPUFL_HTTP_TOKEN": "t"}, host="https://a", token_file="/file").publisher
    assert found.authToken is None and found.authTokenFile == "/file"


def test_where_it_remembers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/x")
    assert settings(host="https://a").stateFolder == "/var/lib/x/agent"
    assert settings(host="https://a", cursor_file="/data/cursor.json").stateFolder == "/data/cursor.json.gpuflight"
    assert settings(host="https://a").cursorFile is None
    (tmp_path / "cursor.json").write_text("{}")
    assert settings(host="https://a").cursorFile == str(tmp_path / "cursor.json")


def test_folders_within_one_another_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = [f"--folders={tmp_path},{tmp_path}/below", "--host=http://127.0.0.1:9", f"--state-folder={tmp_path}/state"]
    assert main(["agent", *flags]) == 2
    assert "name the outer one only" in capsys.readouterr().err


def test_a_secret_in_the_command_line_is_overwritten_and_warned_of(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    process = subprocess.Popen(
        [
            sys.executable, "-m", "gpuflight.cli", "agent", f"--folder={tmp_path}/logs",
            "--host=http://127.0.0.1:9", "--token=gpfl_hush-hush", "--archiver-bucket=bucket", "--archiver-endpoint=http://127.0.0.1:9",
            "--archiver-access-key", "AKIAhush", "--archiver-secret-key=hush/secret",
            f"--state-folder={tmp_path}/state",
        ],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    try:
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(3)]
        assert all("could read it in the command line; use --" in line for line in lines), lines
        deadline_s = time.monotonic() + 30
        while (shown := Path(f"/proc/{process.pid}/cmdline").read_bytes()) and b"hush" in shown:
            assert time.monotonic() < deadline_s, shown
        assert b"--token=xxxxxxxx" in shown
        while "sending what is in" not in lines[-1]:  # it ends as it should from there on
            lines.append(process.stderr.readline())
            assert lines[-1]
    finally:
        process.terminate()
        rest = process.communicate(timeout=60)[1]
    assert process.returncode == 0, "nothing was there to be delivered"
    assert "hush" not in "".join(lines) + rest


def test_it_works_without_duckdb_and_numpy(tmp_path: Path) -> None:
    """And without watchfiles: what it needs is httpcore."""
    code = """
import sys
for name in ("duckdb", "numpy", "watchfiles", "boto3", "botocore", "confluent_kafka", "isal"):
    sys.modules[name] = None
from gpuflight.cli import main
sys.exit(main(sys.argv[1:]))
"""
    from tests.fakes.http_receiver import Receiver
    from tests.unit.agent_rig import QUICK, copy

    for live in ("false", "true"):
        logs = copy(DATA / "gpufl/gen/v1.3.0rc1-clean", tmp_path / f"logs-{live}")
        with Receiver() as receiver:
            flags = {"folder": str(logs), "host": f"http://127.0.0.1:{receiver.port}", **QUICK, "live": live}
            flags |= {"state-folder": str(tmp_path / f"state-{live}"), "exit-when-drained": "true"}
            done = subprocess.run(
                [sys.executable, "-c", code, "agent", "--json", *(f"--{k}={v}" for k, v in flags.items())],
                capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["uploaded"] == 1
        assert receiver.received[-1].path.endswith("/session-complete")


@pytest.mark.parametrize(
    ("missing", "flags", "line"),
    [
        ("httpcore", ["--host=http://127.0.0.1:9"], "pip install 'gpuflight[server]'"),
        ("confluent_kafka", ["--brokers=127.0.0.1:9", "--exit-if-empty"], ""),
        ("botocore", ["--host=http://127.0.0.1:9", "--archiver-bucket=abc", "--archiver-access-key=a",
                      "--archiver-secret-key=b", "--archiver-endpoint=http://127.0.0.1:9"], "gpuflight[s3]"),
    ],
)  # fmt: skip
def test_a_missing_package_is_named(
    missing: str, flags: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "logs").mkdir()
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "botocore":
        for name in [name for name in sys.modules if name.startswith("botocore.")]:
            monkeypatch.setitem(sys.modules, name, None)
    code = main(["agent", f"--folder={tmp_path}/logs", f"--state-folder={tmp_path}/state", *flags])
    shown = capsys.readouterr().err
    if line:
        assert code == 2 and line in shown, shown
    else:
        assert code == 2 and "gpuflight[kafka]" in shown, shown
