"""Questions about stored GPU sessions over HTTP, in our shapes and in those of the open backend."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit import gpufl_files
from tests.unit.events_fixture import SESSION, STREAM, EventServer
from tests.unit.test_server_app import EVENT_TAGS, examples

from gpuflight.server.events.samples import OTHER_SESSION, lines_of
from gpuflight.server.samples import ORIGIN
from gpuflight.server.tokens import Role

WINDOWS = [("device", n) for n in range(1, 12)] + [("scope", n) for n in range(1, 5)]
WINDOWS += [("system", n) for n in range(1, 4)] + [("sass", 1)]
ROOT = f"/api/v1/sessions/{SESSION}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EventServer]:
    """The clean session of the fixtures, and another small one. Not to be changed."""
    with EventServer(tmp_path_factory.mktemp("events")) as made:
        fill(made)
        yield made


def fill(server: EventServer) -> None:
    server.round()
    for channel, number in WINDOWS:
        server.window(channel, number)
    server.post(STREAM, lines_of(OTHER_SESSION))
    server.post("/api/v1/events/session-complete", b"", **{"X-GpuFlight-Session-Id": SESSION})


EVENT_EXAMPLES = [found for found in examples() if found[3] & EVENT_TAGS]


@pytest.mark.parametrize(("method", "path"), [found[:2] for found in EVENT_EXAMPLES if found[0] == "GET"])
def test_the_example_of_each_question_works(server: EventServer, method: str, path: str) -> None:
    source = next(found[2] for found in EVENT_EXAMPLES if found[:2] == (method, path))
    target = shlex.split(source)[-1].removeprefix(ORIGIN)
    answer = server.get(target)
    if "content-length" not in answer.headers:  # a stream: tests/unit/test_server_session_report.py
        return
    assert answer.headers["content-type"] == "application/json"
    head = server.send("HEAD", target)
    assert head.content == b""
    if "/report" not in target:  # that one says how long ago things were
        assert head.headers["content-length"] == answer.headers["content-length"]
    assert head.headers.get("etag") == answer.headers.get("etag")


@pytest.mark.parametrize(("method", "path"), [found[:2] for found in EVENT_EXAMPLES if found[0] != "GET"])
def test_the_example_of_each_change_works(tmp_path: Path, method: str, path: str) -> None:
    source = next(found[2] for found in EVENT_EXAMPLES if found[:2] == (method, path))
    with EventServer(tmp_path) as server:
        server.post(STREAM, lines_of(SESSION))
        if "api-keys" in path or "login" in path:
            server.state.tokens.create(Role.INGEST, "node-1")
            token = server.state.tokens.create(Role.ADMIN)[0]
            server.client.headers["authorization"] = f"Bearer {token}"
            source = source.replace("gpfl_EXAMPLE", token)
        words = shlex.split(source)
        headers = dict(words[at + 1].split(": ", 1) for at, word in enumerate(words) if word == "-H")
        body = words[words.index("-d") + 1] if "-d" in words else None
        answer = server.client.request(method, words[-1].removeprefix(ORIGIN), content=body, headers=headers)
        assert answer.status_code < 300, answer.text


def test_sessions_are_listed_with_what_is_here_of_them(server: EventServer) -> None:
    found = server.get("/api/v1/sessions").json()
    assert found["sessions_count"] == 2
    by_id = {line["session"]["session_id"]: line for line in found["sessions"]}
    clean = by_id[SESSION]
    assert clean["state"] == "ended" and clean["complete"] is True and clean["lost_count"] == 0
    assert clean["records"]["kernel"] == len(server.rows("kernel"))
    assert by_id[OTHER_SESSION]["state"] == "live" and by_id[OTHER_SESSION]["complete"] is False
    assert server.get("/api/v1/sessions?app=train").json()["sessions_count"] == 1
    assert server.get("/api/v1/sessions?live=true").json()["sessions"][0]["session"]["session_id"] == OTHER_SESSION
    page = server.get("/api/v1/sessions?limit=1&offset=1").json()
    assert len(page["sessions"]) == 1 and page["sessions_count"] == 2
    assert server.get("/api/v1/sessions?from=2030-01-01").json()["sessions_count"] == 0
    one = server.get(ROOT).json()
    assert one["devices"] and one["capabilities"] and one["session"]["app"] == "fixture_app"


def test_kernels_are_those_of_the_files(server: EventServer) -> None:
    rows = server.rows("kernel")
    top = server.get(f"{ROOT}/kernels/top?quantiles=true").json()
    assert top["count"] == len(rows) and top["total_ns"] == sum(row["duration_ns"] for row in rows)
    assert all(line["name"] and line["p99_ns"] <= line["max_ns"] for line in top["lines"])
    assert sum(line["share"] for line in top["lines"]) == pytest.approx(1)
    listed = server.get(f"{ROOT}/kernels?limit=10000").json()["kernels"]
    assert len(listed) == len(rows) and any(launch.get("shape") for launch in listed)
    longest = server.get(f"{ROOT}/kernels?longest_first=true&limit=1").json()["kernels"][0]
    assert longest["duration_ns"] == max(row["duration_ns"] for row in rows)
    name = top["lines"][0]["name"]
    part = server.get(f"{ROOT}/kernels/top", 200).json()
    assert part == server.get(f"{ROOT}/kernels/top").json()
    only = server.client.get(f"{ROOT}/kernels/top", params={"name": name}).json()
    assert [line["name"] for line in only["lines"]] == [name]
    stream = server.get(f"{ROOT}/kernels/top?by=stream_id").json()
    assert sum(line["count"] for line in stream["lines"]) == len(rows)
    buckets = server.get(f"{ROOT}/kernels/histogram").json()["buckets"]
    assert sum(bucket["count"] for bucket in buckets) == len(rows)
    middle = sorted(row["start_ns"] for row in rows)[len(rows) // 2]
    before = server.get(f"{ROOT}/kernels?to={middle}&limit=10000").json()["kernels"]
    assert 0 < len(before) < len(rows)


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("copies", "copies"), ("memset", "fills"), ("waits", "waits"), ("memory", "memory"), ("scopes", "nodes"),
        ("profile", "lines"), ("telemetry", "series"), ("counters", "series"), ("memory/series", "points"),
    ],
)  # fmt: skip
def test_the_session_has_something_of_everything(server: EventServer, path: str, key: str) -> None:
    assert server.get(f"{ROOT}/{path}").json()[key]


@pytest.mark.parametrize(
    "query",
    [
        "kernels?limit=0", "kernels?limit=10001", "kernels?offset=-1", "kernels/top?order=x", "kernels?from=yesterday",
        "telemetry?metric=nonsense", "telemetry?points=0", "kernels/histogram?per_octave=17", "compare",
        "profile?kind=nonsense", f"kernels?from={2**63}", "kernels?stream=x",
    ],
)  # fmt: skip
def test_questions_that_make_no_sense_are_422(server: EventServer, query: str) -> None:
    assert server.error("GET", f"{ROOT}/{query}", 422)["message"]


@pytest.mark.parametrize("path", ["", "/kernels", "/kernels/top", "/scopes", "/telemetry", "/compare?with=x"])
def test_a_session_that_is_not_here_is_404(server: EventServer, path: str) -> None:
    assert server.error("GET", f"/api/v1/sessions/nothing{path}", 404)["code"] == "no_such_session"


def test_an_answer_is_not_worked_out_again_while_nothing_is_written(tmp_path: Path) -> None:
    with EventServer(tmp_path) as server:
        server.post(STREAM, lines_of(SESSION))
        first = server.get(f"{ROOT}/kernels/top")
        etag = first.headers["etag"]
        assert server.get(f"{ROOT}/kernels/top", 304, if_none_match=etag).content == b""
        assert server.get(f"{ROOT}/kernels/top?limit=1", if_none_match=etag).status_code == 200
        server.post(STREAM, gpufl_files.kernels([[0, 1, 7, 10, 9]], number=2, session=SESSION))
        again = server.get(f"{ROOT}/kernels/top", if_none_match=etag)
        assert again.json()["count"] == first.json()["count"] + 1
        server.send("DELETE", ROOT)
        server.error("GET", f"{ROOT}/kernels/top", 404)
        answer = server.client.get(f"{ROOT}/kernels/top", headers={"if-none-match": again.headers["etag"]})
        assert answer.status_code == 404


def test_a_session_is_deleted_and_can_be_sent_anew(tmp_path: Path) -> None:
    with EventServer(tmp_path) as server:
        server.window("device", 1)
        kernels = len(server.rows("kernel"))
        server.send("DELETE", ROOT)
        assert server.events.store.session(SESSION) is None and not server.rows("kernel")
        server.error("DELETE", ROOT, 404)
        answer = server.window("device", 1)
        assert "repeated" not in answer and len(server.rows("kernel")) == kernels
        assert server.get(f"{ROOT}/kernels/top").json()["lines"][0]["name"]


def test_retention_of_one_session(tmp_path: Path) -> None:
    with EventServer(tmp_path) as server:
        server.post(STREAM, lines_of(SESSION))
        for days in (90, 0, 0.5, None):
            server.send("PUT", f"{ROOT}/retention", body={"retention_days": days})
            found = server.events.store.session(SESSION)
            assert found is not None and found.retention_days == days
        for wrong in ({"retention_days": -1}, {}, {"retention_days": "x"}, {"days": 1}):
            server.send("PUT", f"{ROOT}/retention", 422, body=wrong)


def test_two_sessions_side_by_side(server: EventServer) -> None:
    found = server.get(f"{ROOT}/compare?with={OTHER_SESSION}").json()
    assert found["after_count"] == 2 and found["before_count"] == len(server.rows("kernel"))
    back = server.get(f"/api/v1/sessions/{OTHER_SESSION}/compare?with={SESSION}").json()
    assert back["before_count"] == found["after_count"]


def test_the_open_backends_list_of_hosts(server: EventServer) -> None:
    found = server.get("/api/v1/events/hosts").json()
    sessions = {session["sessionId"]: (host, session) for host in found for session in host["sessions"]}
    host, session = sessions[OTHER_SESSION]
    assert (host["hostname"], host["ipAddr"]) == ("n1", "10.0.0.5")
    assert session["appName"] == "train" and session["endTime"] is None and session["startTime"].startswith("2026-")
    assert sessions[SESSION][1]["gpus"][0]["uuid"]


def test_the_open_backends_sessions_with_their_rows(server: EventServer) -> None:
    found = server.get("/api/v1/events/init?dateFrom=2026-01-01T00:00:00Z&dateTo=2027-01-01T00:00:00Z").json()
    by_id = {session["sessionId"]: session for session in found}
    clean = by_id[SESSION]
    assert set(clean) == {
        "pid", "app", "sessionId", "logPath", "time", "tsNs", "shutdownTsNs", "systemRateMs", "hostMetrics",
        "cudaStaticDevices", "scopes", "kernels", "createdAt", "updatedAt",
    }  # fmt: skip
    rows = {row["corr_id"]: row for row in server.rows("kernel")}
    assert len(clean["kernels"]) == len(rows)
    for kernel in clean["kernels"]:
        row = rows[kernel["corrId"]]
        assert kernel["endNs"] - kernel["startNs"] == row["duration_ns"] and kernel["name"]
        assert kernel["deviceId"] is None  # batches do not tell it, and it is not 0 for that
    assert any(re.fullmatch(r"\(\d+,\d+,\d+\)", kernel["grid"] or "") for kernel in clean["kernels"])
    assert clean["scopes"] and all(
        scope["endNs"] is None or scope["endNs"] >= scope["tsNs"] for scope in clean["scopes"]
    )
    assert clean["hostMetrics"]
    assert server.get("/api/v1/events/init?dateFrom=2031-01-01").json() == []


def test_the_open_backends_telemetry_and_samples(server: EventServer) -> None:
    periods = server.get(f"/api/v1/events/system?sessionId={SESSION}").json()
    assert {period["eventType"] for period in periods} >= {"system_start"}
    assert any(period["deviceMetrics"] for period in periods)
    total = sum(len(period["deviceMetrics"]) for period in periods)
    assert 0 < total <= len(server.rows("device_metric"))
    samples = server.get(f"/api/v1/events/profile-samples?sessionId={SESSION}").json()
    assert sum(line["metricValue"] for line in samples) == sum(r["metric_value"] for r in server.rows("profile_sample"))
    assert any(line["functionName"] for line in samples)
    whole = server.get(f"/api/v1/events/system?sessionId={OTHER_SESSION}").json()
    assert len(whole) == 1 and whole[0]["hostMetrics"] == []


def test_sources_and_disassembly_that_the_front_asks_for(tmp_path: Path) -> None:
    with EventServer(tmp_path) as server:
        names = gpufl_files.line("dictionary_update", source_file_dict={"4": "a.cu", "5": "b.cu"})
        contents = [gpufl_files.line("source_file_content", source_file_id=i, lines=[f"int x{i};"]) for i in (4, 5)]
        entries = [{"pc": 0, "sass": "NOP", "count": 8}]
        sass = gpufl_files.line("cubin_disassembly", cubin_crc=7, function_name="_Z1f", entries=entries)
        server.post(STREAM, names + b"".join(contents) + sass)
        files = server.get("/api/v1/events/source-content?sessionId=s").json()["files"]
        assert files == [{"sourceFile": "a.cu", "lines": ["int x4;"]}, {"sourceFile": "b.cu", "lines": ["int x5;"]}]
        one = server.get("/api/v1/events/source-content?sessionId=s&sourceFile=b.cu").json()["files"]
        assert one == files[1:]
        functions = server.get("/api/v1/events/disassembly?sessionId=s").json()["functions"]
        assert functions == [{"functionName": "_Z1f", "cubinCrc": 7, "entries": entries}]
        nothing = server.get("/api/v1/events/disassembly?sessionId=s&functionName=no").json()
        assert nothing["functions"] == []


def test_what_the_open_backends_rules_find(tmp_path: Path) -> None:
    with EventServer(tmp_path) as server:
        shape = {
            "occupancy": 0.25,
            "reg_occupancy": 0.25,
            "limiting_resource": "registers",
            "local_mem_total_bytes": 64,
        }
        columns = ["dt_ns", "kernel_id", "stream_id", "duration_ns", "corr_id", "num_regs"]
        metrics = {"1": "smsp__pcsamp_warps_issue_stalled_long_scoreboard", "2": "smsp__sass_inst_executed",
                   "3": "smsp__sass_thread_inst_executed"}  # fmt: skip
        body = b"".join(
            [
                gpufl_files.start(),
                gpufl_files.line(
                    "dictionary_update", kernel_dict={"1": "gemm"}, function_dict={"1": "f"}, metric_dict=metrics
                ),
                gpufl_files.kernels([[0, 1, 7, 10, 1, 64], [5, 1, 7, 10, 2, 64]], columns=columns),
                gpufl_files.detail(1, **shape), gpufl_files.detail(2, **shape),
                gpufl_files.line("profile_sample_batch", batch_id=1, base_time_ns=gpufl_files.START_NS,
                                 columns=["dt_ns", "function_id", "metric_id", "metric_value", "sample_kind"],
                                 rows=[[0, 1, 1, 90, 0], [0, 1, 2, 100, 1], [0, 1, 3, 1000, 1]]),
                gpufl_files.line("device_metric_batch", batch_id=1, base_time_ns=gpufl_files.START_NS,
                                 columns=["dt_ns", "device_id", "temp_c"], rows=[[0, 0, 90], [1, 0, 92], [1, 1, 40]]),
            ]
        )  # fmt: skip
        server.post(STREAM, body)
        found = server.get("/api/v1/insights/s").json()["insights"]
        assert [(line["severity"], line["category"]) for line in found] == [
            ("HIGH", "DIVERGENCE"), ("HIGH", "OCCUPANCY"), ("HIGH", "STALL"), ("HIGH", "THROTTLING"),
            ("MEDIUM", "MEMORY"), ("MEDIUM", "OCCUPANCY"),
        ]  # fmt: skip
        assert found[1]["kernelName"] == "gemm" and found[1]["metric"]["launches"] == 2
        server.post(STREAM, lines_of(OTHER_SESSION))
        assert server.get(f"/api/v1/insights/{OTHER_SESSION}").json()["insights"] == []


def test_api_keys_are_shown_once_listed_and_revoked(tmp_path: Path) -> None:
    with EventServer(tmp_path) as server:
        admin, _ = server.state.tokens.create(Role.ADMIN)
        server.client.headers["authorization"] = f"Bearer {admin}"
        made = server.send("POST", "/api/v1/api-keys", 201, body={"name": "node-7"}).json()
        key = made["api_key"]
        assert key.startswith("gpfl_") and made["prefix"] == key[:8]
        listed = server.get("/api/v1/api-keys")
        assert [line["name"] for line in listed.json()["api_keys"]] == ["node-7"] and key not in listed.text
        assert (
            server.send("POST", "/api/v1/api-keys", 409, body={"name": "node-7"}).json()["error"]["code"]
            == "name_taken"
        )
        other = server.send("POST", "/api/v1/auth/api-keys", body={"name": "node-8"}).json()
        assert set(other) == {"id", "name", "rawKey"}
        front = server.get("/api/v1/auth/api-keys").json()
        assert {line["keyPrefix"] for line in front} == {key[:8], other["rawKey"][:8]}
        assert (
            server.client.post(
                STREAM, content=gpufl_files.start(), headers={"X-API-Key": key, "authorization": f"Bearer {key}"}
            ).status_code
            == 200
        )
        server.send("DELETE", "/api/v1/api-keys/node-7")
        assert server.client.post(STREAM, content=b"", headers={"authorization": f"Bearer {key}"}).status_code == 401
        assert server.client.delete(f"/api/v1/auth/api-keys/{other['id']}").status_code == 204
        server.error("DELETE", "/api/v1/api-keys/node-7", 404)
        admins = next(info for info in server.state.tokens.all() if info.role == "admin")
        server.error("DELETE", f"/api/v1/api-keys/{admins.id}", 404)  # a token of another role is no key
        stored = json.dumps([info.public() for info in server.state.tokens.all()])
        assert key not in stored


def test_the_front_logs_in_with_a_token(tmp_path: Path) -> None:
    with EventServer(tmp_path) as server:
        viewer, info = server.state.tokens.create(Role.VIEWER, "me")
        answer = server.send("POST", "/api/v1/auth/login", body={"emailOrUsername": "x", "password": viewer}).json()
        assert answer == {"token": viewer, "username": "me", "role": "USER"}
        headers = {"authorization": f"Bearer {answer['token']}"}
        assert server.client.get("/api/v1/auth/profile", headers=headers).json()["username"] == info.name
        for wrong in ("wrong", "", "x" * 600, "\x00"):
            server.send("POST", "/api/v1/auth/login", 401, body={"emailOrUsername": "x", "password": wrong})


def test_every_operation_is_told_on_its_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "events.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(GET|POST|PUT|DELETE) (/[^`]*)`", page))
    assert {(method, path) for method, path, _, _ in EVENT_EXAMPLES} <= named
