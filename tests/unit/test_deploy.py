"""What deploy/ says is so: options, settings, paths, ports, rights; and its small programs do what they are for."""

from __future__ import annotations

import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.conftest import ROOT

from gpuflight.cli.env import CAPABILITIES
from gpuflight.cli.plugin_settings import effective, make_consume, make_subscribers
from gpuflight.cli.server import build_parser
from gpuflight.settings import Settings, load

DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
PORT = Settings().server.port

every_service = pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
every_one_of_ours = pytest.mark.parametrize("service", OURS.values(), ids=OURS)
every_unit = pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("GPUFLIGHT_"):
            monkeypatch.delenv(name)


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """What deploy/make-secrets makes."""
    folder = tmp_path / "secrets"
    subprocess.run([DEPLOY / "make-secrets", folder], check=True, capture_output=True)
    return folder


# --- compose ---------------------------------------------------------------------------------------------------------


def test_the_stack_is_whole() -> None:
    assert set(SERVICES) == {"agent", "consumer", "kafka", "mongodb"} and set(OURS) == {"agent", "consumer"}


@every_service
def test_every_service_is_bounded_watched_and_comes_back(service: dict[str, Any]) -> None:
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["mem_limit"] and service["cpus"] and service["pids_limit"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert not service.get("privileged")
    assert re.search(r":[\w.${}-]+$", service["image"]) and not service["image"].endswith(":latest")


@every_service
def test_ports_are_published_on_loopback_only(service: dict[str, Any]) -> None:
    for port in service.get("ports", ()):
        assert port.startswith("127.0.0.1:")


@every_service
def test_what_a_service_uses_is_defined(service: dict[str, Any], secrets: Path) -> None:
    for name in service.get("secrets", ()):
        assert COMPOSE["secrets"][name]["file"] == f"${{SECRETS:-./secrets}}/{name}"
        assert (secrets / name).read_text()
    used = [str(value) for value in service.get("environment", {}).values() if "/run/secrets/" in str(value)]
    assert {Path(value).name for value in used} == set(service.get("secrets", ()))
    for volume in service["volumes"]:
        source = volume.split(":")[0]
        assert (DEPLOY / source).is_file() if source.startswith(".") else source in COMPOSE["volumes"]
    for name in service.get("depends_on", ()):
        assert service["depends_on"][name] == {"condition": "service_healthy"} and name in SERVICES


@every_one_of_ours
def test_our_containers_have_no_right_that_is_not_needed(service: dict[str, Any]) -> None:
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
    known = {name.removeprefix("CAP_") for name in CAPABILITIES}
    assert set(service.get("cap_add", ())) <= known
    assert bool(service.get("cap_add")) == (service is SERVICES["agent"])
    for volume in service["volumes"]:
        assert volume.endswith((":ro", ":/var/lib/gpuflight"))


@every_one_of_ours
def test_our_containers_start_with_options_and_settings_that_exist(
    service: dict[str, Any], secrets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = build_parser().parse_args(service["command"])
    (config,) = [DEPLOY / one.split(":")[0] for one in service["volumes"] if one.split(":")[1] == arguments.config]
    for name, value in service["environment"].items():
        path = str(value).replace("/run/secrets", str(secrets))
        if name.startswith("FILE__"):
            monkeypatch.setenv(name.removeprefix("FILE__"), Path(path).read_text())
        else:
            monkeypatch.setenv(name, path)
    settings = load(str(config))
    effective(settings)
    assert Path(str(settings.server.auth.token_file)).read_text() == (secrets / service["secrets"][0]).read_text()
    assert settings.server.port == PORT
    ports = [port.split(":")[2] for port in service.get("ports", ())]
    if service.get("network_mode") == "host":
        assert settings.server.host == "127.0.0.1" and not ports
        assert build_parser().parse_args(service["command"]).consume is None
        brokers = [one.settings.brokers for one in make_subscribers(settings)]
        assert brokers == [["kafka:9092"]] and service["extra_hosts"] == ["kafka:127.0.0.1"]
    else:
        assert settings.server.host == "0.0.0.0" and ports == [str(PORT)]
        consume = make_consume(settings)
        assert arguments.consume == "kafka" and consume.brokers == ["kafka:9092"]
        password = (secrets / "mongodb_password").read_text()
        user = SERVICES["mongodb"]["environment"]["MONGO_INITDB_ROOT_USERNAME"]
        assert consume.mongodb.uri.get_secret_value().startswith(f"mongodb://{user}:{password}@mongodb:27017/")


def test_agent_and_consumer_meet_in_one_topic() -> None:
    agent, consumer = (load(str(ROOT / "configs" / "fleet" / f"{name}.json")) for name in ("agent", "consumer"))
    (sink,) = make_subscribers(agent)
    assert sink.settings.topic == make_consume(consumer).topic


def test_kafka_tells_its_clients_where_all_of_them_find_it() -> None:
    kafka = SERVICES["kafka"]
    assert kafka["environment"]["KAFKA_ADVERTISED_LISTENERS"] == "PLAINTEXT://kafka:9092"
    assert kafka["ports"] == ["127.0.0.1:9092:9092"]


# --- secrets ---------------------------------------------------------------------------------------------------------


def test_secrets_are_made_once_and_nobody_else_gets_to_them(secrets: Path) -> None:
    made = {path.name: path.read_text() for path in secrets.iterdir()}
    assert set(made) == set(COMPOSE["secrets"])
    assert len(set(made.values())) == len(made) and all(len(text) >= 64 for text in made.values())
    assert secrets.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in secrets.iterdir()} == {0o444}
    subprocess.run([DEPLOY / "make-secrets", secrets], check=True)
    assert {path.name: path.read_text() for path in secrets.iterdir()} == made


def test_no_secret_is_in_the_repository() -> None:
    assert "/deploy/secrets/" in (ROOT / ".gitignore").read_text().splitlines()
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            if re.search(r"password|token|secret|_uri$", name, re.IGNORECASE):
                assert str(value).startswith("/run/secrets/"), name


# --- image -----------------------------------------------------------------------------------------------------------


def instructions(name: str) -> list[str]:
    joined = CONTAINERFILE.replace("\\\n", " ")
    return [line.split(maxsplit=1)[1] for line in joined.splitlines() if line.startswith(name + " ")]


def test_the_image_takes_only_what_is_there() -> None:
    ignore = [line for line in (DEPLOY / "Containerfile.dockerignore").read_text().splitlines() if line]
    let_in = {line[1:] for line in ignore if line.startswith("!")}
    copied = [word for line in instructions("COPY") if "--from" not in line for word in line.split()[:-1]]
    assert copied and set(copied) == let_in
    for name in copied:
        assert (ROOT / name).exists(), name


def test_the_image_has_the_extras_and_runs_as_nobody_in_particular() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = [line.split("=")[1] for line in instructions("ARG") if line.startswith("EXTRAS=")]
    assert {"server", "kafka", "mongodb"} <= set(extras.split(",")) <= set(project["optional-dependencies"])
    (user,) = instructions("USER")
    assert user == "10477:10477"
    assert instructions("EXPOSE") == [str(PORT)]
    assert instructions("VOLUME") == ["/var/lib/gpuflight"]
    assert SERVICES["agent"]["user"].split(":")[1] == user.split(":")[1], "the group that owns the state folder"


def test_python_of_the_image_is_one_that_is_supported() -> None:
    minor = int(re.search(r"python:3\.(\d+)-slim", CONTAINERFILE)[1])  # type: ignore[index]
    assert 11 <= minor <= 13
    assert SERVICES["agent"]["build"]["args"]["BASE"].endswith(f"python:3.{minor}-slim-bookworm}}")


@contextmanager
def answering(status: int) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/healthz" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/healthz"
        server.shutdown()


def healthy(url: str) -> bool:
    environment = {**os.environ, "HEALTH_URL": url, "http_proxy": "http://127.0.0.1:1"}
    return subprocess.run([sys.executable, DEPLOY / "healthcheck.py"], env=environment, timeout=60).returncode == 0


def test_the_health_check_tells() -> None:
    assert f"127.0.0.1:{PORT}/healthz" in (DEPLOY / "healthcheck.py").read_text()
    with answering(200) as url:
        assert healthy(url)
    assert not healthy(url), "nobody there"
    with answering(503) as url:
        assert not healthy(url)


def test_the_entry_point_reads_secrets_from_files(tmp_path: Path) -> None:
    fake = tmp_path / "gpuflight-server"
    fake.write_text('#!/bin/sh\necho "$@"\nenv\n')
    fake.chmod(0o755)
    secret = tmp_path / "a secret"
    secret.write_text('it\'s $HOME `id` "quoted"\n')
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FILE__GPUFLIGHT_CONSUME__MONGODB__URI": str(secret)}
    done = subprocess.run(
        [DEPLOY / "entrypoint", "--set", "a b"], env=environment, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "--set a b"
    assert 'GPUFLIGHT_CONSUME__MONGODB__URI=it\'s $HOME `id` "quoted"' in lines
    assert "FILE__" not in done.stdout
    environment["FILE__GPUFLIGHT_CONSUME__MONGODB__URI"] += "-missing"
    done = subprocess.run([DEPLOY / "entrypoint"], env=environment, capture_output=True, text=True)
    assert done.returncode != 0 and done.stdout == "" and "No such file" in done.stderr


# --- systemd ---------------------------------------------------------------------------------------------------------


def lines_of(unit: Path, key: str) -> list[str]:
    return [line.partition("=")[2] for line in unit.read_text().splitlines() if line.startswith(f"{key}=")]


@every_unit
def test_units_start_with_options_that_exist(unit: Path) -> None:
    (start,) = lines_of(unit, "ExecStart")
    program, *arguments = start.split()
    assert program == "/opt/gpuflight/bin/gpuflight-server"
    parsed = build_parser().parse_args(arguments)
    assert parsed.config.startswith("/etc/gpuflight/")
    assert parsed.consume == ("kafka" if "consumer" in unit.name else None)
    (stop_s,) = lines_of(unit, "TimeoutStopSec")
    assert float(stop_s) > Settings().server.stop_deadline_s
    (state,) = lines_of(unit, "StateDirectory")
    assert f"Environment=GPUFLIGHT_SERVER__AUTH__STORE_FILE=%S/{state}/tokens.json" in unit.read_text()
    (user,) = lines_of(unit, "User")
    assert f"\nu {user} " in (DEPLOY / "systemd" / "gpuflight.sysusers.conf").read_text()


@every_unit
def test_units_give_only_rights_that_an_agent_uses(unit: Path) -> None:
    given = " ".join(lines_of(unit, "AmbientCapabilities")).split()
    (bounded,) = lines_of(unit, "CapabilityBoundingSet")
    assert bounded.split() == given
    assert set(given) <= set(CAPABILITIES)
    assert bool(given) == ("consumer" not in unit.name)
    agent = {f"CAP_{name}" for name in SERVICES["agent"]["cap_add"]}
    assert not given or set(given) == agent, "as in the compose file"
    described = re.findall(r"CAP_\w+", (ROOT / "docs" / "deploy.md").read_text())
    assert agent <= set(described)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze reads the units")
@every_unit
def test_units_are_what_systemd_understands_and_calls_hardened(unit: Path, tmp_path: Path) -> None:
    server = Path(sys.executable).with_name("gpuflight-server")
    here = tmp_path / unit.name
    here.write_text(unit.read_text().replace("/opt/gpuflight/bin/gpuflight-server", str(server)))
    verified = subprocess.run(["systemd-analyze", "verify", here], capture_output=True, text=True)
    said = [line for line in verified.stderr.splitlines() if unit.name in line]
    assert verified.returncode == 0 and not said, verified.stderr
    most = "20" if "consumer" in unit.name else "40"
    hardened = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", f"--threshold={most}", here], capture_output=True, text=True
    )
    assert hardened.returncode == 0, hardened.stdout.splitlines()[-1:]


# --- documentation ---------------------------------------------------------------------------------------------------


def test_files_that_the_page_names_are_there() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    named = set(re.findall(r"(?<![\w/.])(?:deploy|configs|tests)/[\w./-]*\w", page)) - {"deploy/secrets"}
    named = {name for name in named if not name.startswith("deploy/secrets/")}
    assert len(named) >= 6
    for name in named:
        assert (ROOT / name).exists(), name
