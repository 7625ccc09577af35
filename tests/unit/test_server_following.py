"""Following the graph from round to round: ``GET /api/v1/graph?since=``, and a parent that does it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from tests.unit.server_fixture import HOST, ONE, TWO, Served

from gpuflight.collectors.remote_peer import Peer, PeerOptions
from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph.codec import decode_graph
from gpuflight.graph.delta import HEAD
from gpuflight.graph.namespaces import with_namespace
from gpuflight.round_codec import encode_round
from gpuflight.sources.http import Answer, Request

MANY = [nodes.Process(pid=pid, start=1, metrics={"cpu_pct": 0.5}) for pid in range(100, 160)]
OWN = ("m-own", "b-own")
URL = "/api/v1/graph?since="


@pytest.fixture
def served() -> Iterator[Served]:
    with Served(HOST, *MANY, links=[edges.Own(HOST.id, MANY[0].id)]) as made:
        made.round()
        yield made


class InProcess:
    """In place of the HTTP source: a server in this process. ``spoil`` changes what comes back."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.asked: list[str] = []
        self.spoil = lambda answer: answer

    def get(self, request: Request) -> Answer:
        path = request.url.partition("://")[2].partition("/")[2] + (f"?{request.query}" if request.query else "")
        self.asked.append("/" + path)
        headers = {"if-none-match": request.etag} if request.etag else {}
        sent_ns = time.time_ns()
        got = self.served.client.get("/" + path, headers=headers)
        answer = Answer(f"/{path}", got.status_code, dict(got.headers), got.content, sent_ns, time.time_ns())
        return self.spoil(answer)


def state(etag: str) -> str:
    return etag.removeprefix("W/").strip('"')


def test_first_the_whole_graph_then_what_changed(served: Served) -> None:
    first = served.get(URL)
    assert first.json()["round"] == 1 and len(first.json()["nodes"]) == 61
    known = first.headers["etag"]
    again = served.get(URL + state(known), 304, if_none_match=known)
    assert again.content == b"" and again.headers["etag"] == known
    served.round(HOST, replace(MANY[0], metrics={"cpu_pct": 9.0}), *MANY[1:])
    changed = served.get(URL + state(known), if_none_match=known)
    told = changed.json()
    assert changed.content.startswith(HEAD) and changed.headers["gpuflight-from-round"] == "1"
    assert (told["base"], told["round"], told["nodes_count"], told["edges_count"]) == (1, 2, 61, 1)
    assert told["nodes_changed"] == [{"id": MANY[0].id, "metrics": {"cpu_pct": 9.0}}]
    assert "coverage" not in told and len(changed.content) < len(first.content) / 10
    assert changed.headers["etag"] == served.get(URL).headers["etag"] != known, "the tag names the round reached"
    served.get(URL + state(changed.headers["etag"]), 304, if_none_match=changed.headers["etag"])


def test_several_rounds_are_told_as_one_and_made_once(served: Served) -> None:
    known = served.get(URL).headers["etag"]
    for step in range(4):
        served.round(HOST, replace(MANY[0], metrics={"cpu_pct": float(step)}), *MANY[1 + step :])
    path = URL + state(known)
    built = served.state.bodies.built_count
    told = [served.get(path, if_none_match=known, accept_encoding="gzip").json() for _ in range(5)]
    assert told[0]["nodes_removed"] == [node.id for node in MANY[1:4]] and told == [told[0]] * 5
    assert served.state.bodies.built_count - built <= 2, "as it is, and compressed"


def test_the_whole_graph_where_the_rounds_between_are_not_known(served: Served) -> None:
    known = state(served.get(URL).headers["etag"])
    instance, _, _ = known.partition("-")
    served.round()
    for other in ("0123456789ab-1", f"{instance}-99", f"{instance}-", f"{instance}-x", f"{instance}-0", "W/x", "-1"):
        assert "nodes" in served.get(URL + other).json(), other
    assert "nodes_changed" not in served.get(URL + known).json()
    served.round(ONE, TWO)
    assert served.get(URL + known).json()["nodes"], "nearly everything changed: the graph itself is less"
    served.controller.clear()
    served.round(HOST, *MANY)
    assert served.get(URL + known).json()["nodes"], "the history was cleared"


def test_after_the_history_is_too_short() -> None:
    with Served(HOST, *MANY, history={"max_bytes": 50_000}) as served:
        served.round()
        known = state(served.get(URL).headers["etag"])
        served.round()
        assert served.get(URL + known).content.startswith(HEAD)
        for _ in range(20):
            served.round()
        assert served.controller.history.numbers()[0] > 1
        assert served.get(URL + known).json()["nodes"]


@pytest.mark.parametrize("more", ["&kind=Process", "&round=1", "&limit=5", "&fields=name", "&format=text", "&at=-5"])
def test_only_the_whole_graph_can_be_followed(served: Served, more: str) -> None:
    assert "since" in served.error("GET", URL + more, 422)["message"]
    assert served.get(URL + "&format=json").json()["round"] == 1


def test_every_answer_says_the_time(served: Served) -> None:
    for path, status in ((URL, 200), (URL, 200), ("/api/v1/nothing", 404), ("/healthz", 200)):
        before_ns = time.time_ns()
        received_ns, sent_ns = map(int, served.get(path, status).headers["gpuflight-time-ns"].split())
        assert before_ns <= received_ns <= sent_ns <= time.time_ns(), "its own, also where the body was kept"


# --- a parent --------------------------------------------------------------------------------------------------------


def parent() -> Peer:
    return Peer(PeerOptions(url="http://peer", name="n7"))


def expected(served: Served) -> Graph:
    assert served.controller.latest is not None
    return with_namespace(decode_graph(encode_round(served.controller.latest)), "n7")


def shown(peer: Peer) -> Graph:
    assert peer.view.host is not None and peer.view.copy is not None and peer.view.error == ""
    lists = peer.view.copy.lists()
    told = ("name", "instance", "poll_interval_s", "machine_id", "boot_id", "gpuflight_version")
    attributes = {name: value for name, value in peer.view.host.attributes.items() if name not in told}
    return Graph([replace(peer.view.host, attributes=attributes), *lists.entities], lists.connections)


def test_a_parents_copy_is_the_peers_graph_after_many_rounds(served: Served) -> None:
    chance, peer, http, standing = random.Random(5), parent(), InProcess(served), list(MANY)
    for turn in range(60):
        for _ in range(chance.choice((0, 1, 1, 3))):
            standing = [
                replace(node, metrics={"cpu_pct": turn / 2}) if chance.random() < 0.03 else node for node in standing
            ]
            served.round(replace(HOST, metrics={"uptime_s": float(turn)}), *chance.sample(standing, 59))
            served.seeder.links = [edges.Own(HOST.id, chance.choice(served.seeder.found).id) for _ in range(3)]
        peer.poll(http, OWN)  # type: ignore[arg-type]
        assert shown(peer) == expected(served)
        assert served.controller.latest is not None and peer.view.round_number == served.controller.latest.number
    assert peer.wholes_count == 1 and peer.diffs_count > 20 and peer.misfits_count == 0
    assert peer.view.offset_error_s is not None and peer.view.offset_error_s < 0.5


def test_a_peer_that_was_restarted_is_asked_for_all(served: Served) -> None:
    """Its rounds have the same numbers again."""
    peer, http = parent(), InProcess(served)
    peer.poll(http, OWN)  # type: ignore[arg-type]
    served.round()
    with Served(HOST, *MANY[:30]) as other:
        other.round()
        other.round()
        http.served = other
        peer.poll(http, OWN)  # type: ignore[arg-type]
        assert shown(peer) == expected(other) and peer.wholes_count == 2 and peer.misfits_count == 0
        other.round(HOST, *MANY[:29])
        peer.poll(http, OWN)  # type: ignore[arg-type]
        assert shown(peer) == expected(other) and peer.diffs_count == 1


@pytest.mark.parametrize(
    "spoil",
    [(b'"base":1', b'"base":7'), (b'"nodes_count":61', b'"nodes_count":60'), (b'"id":"Process', b'"id":"Nobody'),
     (b'"cpu_pct":9.0', b'"cpu_pct":"x"'), (b'"schema":1', b'"schema":99')],
)  # fmt: skip
def test_a_difference_that_does_not_fit_costs_one_more_request(served: Served, spoil: tuple[bytes, bytes]) -> None:
    peer, http = parent(), InProcess(served)
    peer.poll(http, OWN)  # type: ignore[arg-type]
    served.round(HOST, replace(MANY[0], metrics={"cpu_pct": 9.0}), *MANY[1:])

    def spoiled(answer: Answer) -> Answer:
        if answer.body.startswith(HEAD):
            body = answer.body.replace(*spoil)
            assert body != answer.body
            return replace(answer, body=body)
        return answer

    http.spoil = spoiled  # type: ignore[assignment]
    peer.poll(http, OWN)  # type: ignore[arg-type]
    assert shown(peer) == expected(served) and (peer.misfits_count, peer.wholes_count) == (1, 2)
    assert http.asked[-1] == URL and len(http.asked) == 3
    http.spoil = lambda answer: replace(answer, body=answer.body.replace(b'"nodes_count":61', b'"nodes_count":1'))  # type: ignore[assignment]
    for turn in range(40):
        served.round(HOST, replace(MANY[0], metrics={"cpu_pct": float(turn)}), *MANY[1:])
        peer.poll(http, OWN)  # type: ignore[arg-type]
        assert shown(peer) == expected(served)
    assert peer.misfits_count < 10, "whose differences never fit is asked for them less and less often"


def test_a_peer_without_since_is_asked_for_the_whole_graph(served: Served) -> None:
    """An older version, which refuses parameters that it does not know."""
    peer, http = parent(), InProcess(served)
    http.spoil = lambda answer: replace(answer, status=422, body=b"") if "since" in answer.url else answer  # type: ignore[assignment]
    for _ in range(3):
        served.round(HOST, *MANY[:50])
        peer.poll(http, OWN)  # type: ignore[arg-type]
        assert shown(peer) == expected(served)
    assert [path for path in http.asked if "since" in path] == [URL], "it is tried once"
