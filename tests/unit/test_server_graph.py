"""The graph over REST: which round, which part, which form, how many bytes."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zstandard
from tests.unit.server_fixture import BUSY, FOREIGN, HOST, LOST, ONE, TWO, Served, small

from gpuflight.graph import edges, nodes
from gpuflight.graph.codec import decode_graph, time_text
from gpuflight.server.auth import Role
from gpuflight.server.bodies import BodyCache, Key, compress


@pytest.fixture
def served() -> Iterator[Served]:
    with small() as made:
        yield made


def ids(answer: Any) -> set[str]:
    return {node["id"] for node in answer.json().get("nodes", [])}


def test_the_graph_is_the_graph_file_of_the_latest_round(served: Served) -> None:
    answer = served.get("/api/v1/graph")
    latest = served.controller.latest
    assert latest is not None
    assert decode_graph(answer.content) == latest.graph
    assert answer.json()["round"] == 2 and answer.headers["gpuflight-round"] == "2"
    assert answer.json()["env"]["hostname"] == "box"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("kind=GPU", [LOST, BUSY]),
        ("kind=GPU&kind=Host", [LOST, BUSY, HOST]),
        ("namespace=node-7", [FOREIGN]),
        ("kind=Process&namespace=", [ONE, TWO]),
        ("attribute=name=init", [ONE, FOREIGN]),
        ("attribute=index=0", [LOST]),
        ("attribute=state", [LOST]),
        ("metric=cpu_pct%3E=50", [TWO]),
        ("metric=cpu_pct", [ONE, TWO]),
        ("metric=cpu_pct%3C50&metric=rss_bytes", [ONE]),
        ("metric=sm_util_pct%3E=0", [BUSY]),
        ("around=pid:2", [ONE, TWO]),
        ("around=gpu:1&depth=0", [BUSY]),
        ("around=pid:2&depth=2", [ONE, TWO, HOST]),
        ("around=pid:2&depth=2&kind=Host", [HOST]),
    ],
)
def test_parts(query: str, expected: list[Any]) -> None:
    with Served(ONE, TWO, HOST, LOST, BUSY, links=[edges.Own(ONE.id, TWO.id), edges.Own(HOST.id, ONE.id)]) as served:
        if "pid:" not in query:  # there, pid 1 must be one process
            served.seeder.found.append(FOREIGN)
        served.round()
        assert ids(served.get(f"/api/v1/graph?{query}")) == {entity.id for entity in expected}


def test_edges_of_a_part_are_those_within_it(served: Served) -> None:
    found = served.get("/api/v1/graph?kind=Process").json()["edges"]
    assert [(edge["source"], edge["target"]) for edge in found] == [(ONE.id, TWO.id)]


def test_fields(served: Served) -> None:
    found = {node["id"]: node for node in served.get("/api/v1/graph?fields=name,rss_bytes").json()["nodes"]}
    assert found[ONE.id]["attributes"] == {"name": "init"} and found[ONE.id]["metrics"] == {"rss_bytes": 4096}
    assert "unknown" not in found[LOST.id]
    only = served.get("/api/v1/graph?fields=").json()["nodes"]
    assert all(not {"attributes", "metrics", "unknown"} & node.keys() for node in only)
    assert decode_graph(served.get("/api/v1/graph?fields=attributes,metrics,unknown").content) == _graph(served)


def _graph(served: Served) -> Any:
    assert served.controller.latest is not None
    return served.controller.latest.graph


def test_an_unknown_or_ambiguous_entity_is_told(served: Served) -> None:
    assert served.error("GET", "/api/v1/graph?around=nobody", 404)["code"] == "no_such_entity"
    error = served.error("GET", "/api/v1/graph?around=pid:1", 409)
    assert error["code"] == "ambiguous" and set(error["detail"]["candidates"]) == {ONE.id, FOREIGN.id}


def test_n08_a_lost_gpu_is_in_an_answer_that_stands(served: Served) -> None:
    gpu = served.get(f"/api/v1/entities/{LOST.id}").json()["entity"]
    assert gpu["attributes"]["state"] == "lost" and gpu["unknown"] == {"sm_util_pct": "GPU is lost"}
    text = served.get("/metrics").text
    assert f'gpuflight_gpu_lost{{gpu="0",id="{LOST.id}",name="H200"}} 1' in text
    assert f'gpuflight_gpu_sm_util_pct{{gpu="1",id="{BUSY.id}",name="H200"}} 50' in text
    assert 'gpu_sm_util_pct{gpu="0"' not in text


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("form", ["json", "msgpack", "ndjson"])
def test_pages_together_are_the_whole_of_one_round(served: Served, limit: int, form: str) -> None:
    graph = _graph(served)
    cursor = ""
    found: list[Any] = []
    for _ in range(100):
        answer = served.get(f"/api/v1/graph?limit={limit}&format={form}" + (f"&cursor={cursor}" if cursor else ""))
        page = _document(answer.content, form)
        assert page["round"] == 2
        elements = page.get("nodes", []) + page.get("edges", [])
        assert len(elements) <= limit
        found += elements
        cursor = answer.headers.get("gpuflight-next-cursor", "")
        assert page.get("next_cursor", "") == cursor
        if not cursor:
            break
        served.round(ONE, TWO)  # rounds that come in between change nothing
    assert [item["id"] for item in found if "id" in item] == list(graph.nodes)
    assert [(item["source"], item["target"], item["kind"]) for item in found if "id" not in item] == list(graph.edges)


def _document(data: bytes, form: str) -> Any:
    if form == "msgpack":
        return msgspec.msgpack.decode(data)
    if form == "json":
        return msgspec.json.decode(data)
    first, *rest = [msgspec.json.decode(line) for line in data.splitlines()]
    return {
        **first,
        "nodes": [item for item in rest if "id" in item],
        "edges": [item for item in rest if "source" in item],
    }


def test_text_pages_hold_all_nodes(served: Served) -> None:
    first = served.get("/api/v1/graph?limit=4&format=text")
    second = served.get(f"/api/v1/graph?limit=4&format=text&cursor={first.headers['gpuflight-next-cursor']}")
    assert "gpuflight-next-cursor" not in second.headers
    assert "train" in first.text and "H200" in second.text


def test_a_cursor_belongs_to_its_query_and_its_round(served: Served) -> None:
    cursor = served.get("/api/v1/graph?limit=1").json()["next_cursor"]
    assert served.error("GET", f"/api/v1/graph?limit=1&kind=GPU&cursor={cursor}", 422)["code"] == "bad_cursor"
    assert served.error("GET", f"/api/v1/graph?limit=1&round=1&cursor={cursor}", 422)["code"] == "bad_cursor"
    served.send("POST", "/api/v1/control/clear")
    served.round()
    assert served.error("GET", f"/api/v1/graph?limit=1&cursor={cursor}", 410)["code"] == "round_gone"


def test_forms_by_accept_and_by_parameter(served: Served) -> None:
    latest = served.controller.latest
    assert latest is not None
    assert served.get("/api/v1/graph", accept="text/plain").text.strip() == latest.graph.describe().strip()
    assert served.get("/api/v1/graph", accept="text/html, */*;q=0.1").headers["content-type"] == "application/json"
    packed = served.get("/api/v1/graph", accept="application/x-msgpack, application/json;q=0.5")
    assert packed.headers["content-type"] == "application/msgpack"
    assert msgspec.msgpack.decode(packed.content)["nodes"] == served.get("/api/v1/graph").json()["nodes"]
    assert served.get("/api/v1/graph?format=json", accept="text/plain").headers["content-type"] == "application/json"
    refused = served.client.get("/api/v1/graph", headers={"accept": "image/png"})
    assert refused.status_code == 406 and refused.json()["error"]["code"] == "not_acceptable"


def test_names_that_are_no_unicode_are_escaped_in_every_form(served: Served) -> None:
    served.round(nodes.Process(pid=1, start=10, attributes={"name": "a\udcffb"}))
    for form in ("json", "msgpack", "ndjson", "text"):
        assert served.get(f"/api/v1/graph?format={form}").content
    assert served.get("/api/v1/entities?q=pid:1").json()["entities"][0]["attributes"]["name"] == "a\\udcffb"


def test_an_unchanged_round_is_a_304_without_a_body(served: Served) -> None:
    first = served.get("/api/v1/graph")
    etag = first.headers["etag"]
    again = served.get("/api/v1/graph", 304, if_none_match=f'"other", {etag}')
    assert again.content == b"" and again.headers["etag"] == etag
    assert served.get("/api/v1/graph?kind=GPU", if_none_match=etag).headers["etag"] != etag
    served.round()
    assert served.get("/api/v1/graph", if_none_match=etag).headers["etag"] != etag


def test_rounds_of_another_process_have_other_etags() -> None:
    with small() as one, small() as other:
        etag = one.get("/api/v1/graph").headers["etag"]
        assert other.get("/api/v1/graph", if_none_match=etag).status_code == 200


def test_a_body_is_built_once_per_round_and_encoding(served: Served) -> None:
    served.round(*[nodes.Process(pid=pid, start=pid) for pid in range(1, 200)])
    plain = served.get("/api/v1/graph", accept_encoding="identity")
    built = served.state.bodies.built_count
    for _ in range(3):
        assert served.get("/api/v1/graph", accept_encoding="identity").content == plain.content
    assert served.state.bodies.built_count == built
    for encoding in ("gzip", "zstd"):
        for _ in range(2):
            answer = served.get("/api/v1/graph", accept_encoding=encoding)
            assert answer.headers["content-encoding"] == encoding
            assert answer.content == plain.content and int(answer.headers["content-length"]) < len(plain.content) / 2
    assert served.state.bodies.built_count == built + 2


def test_small_bodies_are_not_compressed(served: Served) -> None:
    assert "content-encoding" not in served.get("/api/v1/graph?kind=Disk&fields=&limit=1&format=text").headers


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("", "identity"), ("gzip", "gzip"), ("gzip, zstd", "zstd"), ("gzip;q=1, zstd;q=0.5", "gzip"),
        ("gzip;q=0, zstd;q=0", "identity"), ("*", "zstd"), ("br", "identity"), ("zstd;q=oops", "identity"),
        ("GZIP", "gzip"), ("*;q=0, gzip", "gzip"),
    ],
)  # fmt: skip
def test_choice_of_the_encoding(header: str, expected: str) -> None:
    from gpuflight.server.respond import choose_encoding

    assert choose_encoding(header) == expected


def test_compressed_bodies_are_what_they_say() -> None:
    body = b"graph" * 10_000
    assert gzip.decompress(compress(body, "gzip")) == body
    assert zstandard.ZstdDecompressor().decompress(compress(body, "zstd")) == body
    assert compress(body, "gzip") == compress(body, "gzip")


def test_the_cache_stays_within_its_bytes_and_keeps_what_was_used_last() -> None:
    cache = BodyCache(max_bytes=100)
    for number in range(1, 5):
        cache.get(Key(number, "graph"), lambda: b"x" * 30)
        cache.find(Key(1, "graph"))
    assert cache.used_bytes <= 100 and len(cache) == 3
    assert cache.find(Key(1, "graph")) and not cache.find(Key(2, "graph"))
    assert cache.get(Key(9, "graph"), lambda: b"x" * 1000) == b"x" * 1000  # too large to keep, still given
    assert cache.used_bytes <= 100


def test_of_many_that_want_one_body_one_builds_it() -> None:
    import threading

    cache, started, built = BodyCache(), threading.Barrier(8), []

    def build() -> bytes:
        built.append(1)
        return b"x" * 5000

    def want() -> None:
        started.wait()
        assert len(cache.get(Key(1, "graph", "gzip"), build)) < 5000

    threads = [threading.Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [1]


def test_a_build_that_fails_is_tried_again() -> None:
    cache = BodyCache()
    with pytest.raises(ZeroDivisionError):
        cache.get(Key(1, "graph"), lambda: bytes(1 // 0))
    assert cache.get(Key(1, "graph"), lambda: b"ok") == b"ok"


def test_rounds_of_the_past(served: Served) -> None:
    served.round(ONE)
    assert ids(served.get("/api/v1/graph?round=3")) == {ONE.id}
    assert TWO.id in ids(served.get("/api/v1/graph?round=2"))
    error = served.error("GET", "/api/v1/graph?round=99", 404)
    assert error["code"] == "no_such_round" and error["detail"]["newest_round"] == 3


def test_t11_a_time_gives_the_round_of_then_and_one_too_old_says_what_there_is(served: Served) -> None:
    second = served.controller.history.rounds(2, 2)[0].time_ns
    answer = served.get(f"/api/v1/graph?at={time_text(second + 2_000_000_000)}")
    assert answer.json()["round"] == 2
    assert served.get(f"/api/v1/graph?at={time_text(second - 1_000_000_000)}").json()["round"] == 1
    assert served.get(f"/api/v1/graph?at={second / 1e9 + 100:.3f}").json()["round"] == 2
    assert served.get(f"/api/v1/rounds?at={time_text(second)}").json()["rounds"][0]["round"] == 2
    error = served.error("GET", "/api/v1/graph?at=2001-01-01T00:00:00Z", 404)
    assert error["code"] == "before_history" and error["detail"]["oldest_round"] == 1


def test_rounds_in_a_range(served: Served) -> None:
    for _ in range(4):
        served.round()
    listed = served.get("/api/v1/rounds?from=2&to=5&limit=3").json()
    assert [line["round"] for line in listed["rounds"]] == [3, 4, 5] and listed["truncated"] is True
    assert listed["rounds"][0]["nodes_count"] == 6
    whole = served.get("/api/v1/rounds/2").json()
    assert {line["collector"] for line in whole["coverage"]} == {"process_tree", "core", "rules"}
    assert served.get("/api/v1/rounds/latest").json()["round"] == 6


def test_differences_apply(served: Served) -> None:
    from gpuflight.graph.codec import decode_diff
    from gpuflight.graph.diff import apply

    before = _graph(served)
    served.round(ONE, HOST)
    change, line = decode_diff(served.get("/api/v1/diff?from=2&to=3").content, before)
    assert apply(change, before) == _graph(served) and line.round == 3
    change, _ = decode_diff(served.get("/api/v1/rounds/3/diff").content, before)
    assert apply(change, before) == _graph(served)
    back, _ = decode_diff(served.get("/api/v1/diff?from=3&to=2").content, _graph(served))
    assert apply(back, _graph(served)) == before
    assert served.error("GET", "/api/v1/rounds/1/diff", 404)["code"] == "no_round_before"


def test_noise_hides_small_moves(served: Served) -> None:
    moved = nodes.Process(pid=2, start=20, attributes={"name": "train"}, metrics={"cpu_pct": 100.0})
    served.round(ONE, moved, FOREIGN, HOST, LOST, BUSY)
    assert len(served.get("/api/v1/diff?from=2").json()["nodes_changed"]) == 1
    assert "nodes_changed" not in served.get("/api/v1/diff?from=2&noise=5").json()


def test_entities_edges_and_the_way_between(served: Served) -> None:
    found = served.get(f"/api/v1/entities/{ONE.id}").json()
    assert found["entity"]["attributes"] == {"name": "init"} and len(found["edges"]) == 2
    edge = served.get(f"/api/v1/edges/{found['edges'][0]['id']}").json()["edge"]
    assert edge["category"] == "deploy" and edge["id"] == found["edges"][0]["id"]
    assert served.error("GET", "/api/v1/entities/Process(pid=9,start=9)", 404)["code"] == "no_such_entity"
    for wrong in ("x", "Own(", "Own(a)", "Own(a->b)", "->"):
        assert served.error("GET", f"/api/v1/edges/{wrong}", 404)["code"] == "no_such_edge"
    way = served.get("/api/v1/path?from=pid:2&to=Host(box)").json()["path"]
    assert [hop["kind"] for hop in way["hops"]] == ["Own", "Own"]
    assert served.error("GET", "/api/v1/path?from=pid:2&to=gpu:0", 404)["code"] == "not_connected"
    assert served.get("/api/v1/entities?q=init").json()["count"] == 2


def test_the_graph_as_a_picture(served: Served) -> None:
    answer = served.get("/api/v1/graph/export?format=html")
    assert answer.headers["content-type"].startswith("text/html") and b"train" in answer.content
    assert "sandbox" in answer.headers["content-security-policy"]
    served.get("/api/v1/graph/export?format=html", 304, if_none_match=answer.headers["etag"])
    assert served.error("GET", "/api/v1/graph/export?format=nothing", 422)["detail"]["there_are"]


def test_a_picture_of_a_part_and_of_what_changed(served: Served) -> None:
    whole = served.get("/api/v1/graph/export")
    part = served.get("/api/v1/graph/export?focus=gpu:1&depth=1&kinds=GPU,Process&min_metric=sm_util_pct>=0")
    assert len(part.content) < len(whole.content) and b"Only what is" in part.content
    assert part.headers["etag"] != whole.headers["etag"]
    number = int(whole.headers["gpuflight-round"])
    assert f"Compared with round {number}".encode() in served.get(f"/api/v1/graph/export?diff={number}").content
    for query in ("focus=nothing-such", "kinds=Toaster", "min_metric=cpu_pct", "focus=gpu:1&depth=99"):
        assert "message" in served.error("GET", f"/api/v1/graph/export?{query}", 422)
    served.error("GET", "/api/v1/graph/export?diff=999999", 404)


# --- the short way of repeated requests -----------------------------------------------------------------------------


@pytest.mark.parametrize("query", ["", "?kind=Process", "?format=msgpack", "?around=gpu:1"])
@pytest.mark.parametrize("encoding", ["identity", "gzip", "zstd"])
def test_a_repeated_request_gets_the_same_answer_the_short_way(served: Served, query: str, encoding: str) -> None:
    path = f"/api/v1/graph{query}"
    first = served.get(path, accept_encoding=encoding)
    handled: list[Any] = []
    real = served.client.app.router.middleware_stack  # type: ignore[attr-defined]

    async def counted(scope: Any, receive: Any, send: Any) -> None:
        handled.append(scope["path"])
        await real(scope, receive, send)

    served.client.app.router.middleware_stack = counted  # type: ignore[attr-defined]
    again = served.get(path, accept_encoding=encoding)
    assert again.content == first.content
    for answer in (first, again):
        answer.headers.pop("gpuflight-time-ns")  # of each answer
    assert again.headers == first.headers
    unchanged = served.get(path, 304, accept_encoding=encoding, if_none_match=first.headers["etag"])
    assert unchanged.content == b"" and unchanged.headers["etag"] == first.headers["etag"]
    assert handled == []
    served.round()
    fresh = served.get(path, accept_encoding=encoding, if_none_match=first.headers["etag"])
    assert fresh.headers["gpuflight-round"] == "3" and handled == ["/api/v1/graph"]


def test_an_answer_to_one_form_or_round_is_none_to_another(served: Served) -> None:
    served.get("/api/v1/graph", accept="application/json")
    assert served.get("/api/v1/graph", accept="text/plain").headers["content-type"].startswith("text/plain")
    served.get("/api/v1/graph?round=2")
    served.round()
    assert served.get("/api/v1/graph?round=2").json()["round"] == 2
    assert served.get("/api/v1/graph").json()["round"] == 3


def test_the_short_way_asks_for_the_role_and_the_host_as_well(served: Served) -> None:
    served.get("/api/v1/graph")
    assert served.client.get("/api/v1/graph", headers={"host": "evil.example"}).status_code >= 400
    token, _ = served.state.tokens.create(Role.VIEWER)
    assert served.error("GET", "/api/v1/graph", 401)["code"] == "unauthorized"
    assert served.get("/api/v1/graph", authorization=f"Bearer {token}").json()["round"] == 2
    answers = [served.client.get("/api/v1/graph", headers={"authorization": "Bearer x"}) for _ in range(30)]
    assert {answer.status_code for answer in answers} == {401, 429}
    assert all("error" in answer.json() for answer in answers)
    assert answers[-1].headers["retry-after"]


def test_an_answer_that_left_the_cache_is_built_again(served: Served) -> None:
    first = served.get("/api/v1/graph")
    served.state.bodies.clear()
    assert served.get("/api/v1/graph").content == first.content


@pytest.mark.parametrize(
    "at", ["-1e11", "1e300", "inf", "nan", "0001-01-01T00:00:00%2B05:00", "9999-12-31T23:59:59-23:59", "", "2024-13-01"]
)
def test_times_that_are_none(served: Served, at: str) -> None:
    assert served.error("GET", f"/api/v1/graph?at={at}", 422)["code"] == "bad_request"
