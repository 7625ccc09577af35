"""The live stream: what clients know equals the core's graph, whatever they, their neighbours and the server do."""

from __future__ import annotations

import asyncio
import threading
import time
import zlib
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from tests.unit.stream_rig import Rounds, SseClient, settle

from gpuflight.graph import edges, nodes
from gpuflight.graph.codec import decode_graph
from gpuflight.round_codec import encode_round
from gpuflight.server import hub as hub_module
from gpuflight.server import hub_events
from gpuflight.server.app import create_app
from gpuflight.server.hub import STOPPING, TOO_SLOW, StreamHub
from gpuflight.server.state import ServerState
from gpuflight.server.tokens import Role, TokenStore
from gpuflight.settings import Settings


class Rig:
    """An application with a hub whose clock stands still."""

    def __init__(self, **hub: Any) -> None:
        self.now = [0.0]
        self.hub = StreamHub(now_s=lambda: self.now[0], **hub)
        self.rounds = Rounds(self.hub)
        self.tokens = TokenStore()
        state = ServerState(
            controller=self.rounds,  # type: ignore[arg-type]
            settings=Settings(),
            hub=self.hub,
            tokens=self.tokens,
        )
        self.app = create_app(state)

    def round(self, *values: int) -> Any:
        """One process per value, the first connected with the others."""
        found = [nodes.Process(pid=pid, start=1, metrics={"cpu_pct": value}) for pid, value in enumerate(values)]
        return self.rounds.round(found, [edges.Own(found[0].id, other.id) for other in found[1:]])

    def client(self, *headers: tuple[str, str], transport: bool = True) -> SseClient:
        return SseClient(self.app, headers, transport=transport)

    def tick(self, seconds: float) -> None:
        self.now[0] += seconds
        self.hub.tick()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def test_the_first_event_is_the_graph_and_then_come_differences() -> None:
    async def test() -> None:
        rig = Rig()
        rig.round(1, 2)
        client = rig.client()
        await client.has(1)
        for values in ((1, 3), (1, 3, 4), (5,), (5, 6)):
            last = rig.round(*values)
            await client.has(last.number)
            assert client.graph() == last.graph
        assert client.numbers() == [1, 2, 3, 4, 5]
        assert [name for _, name, _ in client.events()] == ["graph", "diff", "diff", "diff", "diff"]
        assert client.status == 200 and bytes(client.body).startswith(b"retry: ")
        client.gone()
        await client.until(lambda: client.finished)
        assert rig.hub.clients_count == 0

    run(test())


def test_a_client_that_comes_before_the_first_round_waits_for_it() -> None:
    async def test() -> None:
        rig = Rig()
        client = rig.client()
        await client.until(lambda: client.status == 200)
        assert client.events() == []
        last = rig.round(1)
        await client.has(1)
        assert client.graph() == last.graph
        client.gone()
        await client.task

    run(test())


def test_rounds_are_encoded_once_and_only_for_somebody(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("encode_round", "encode_round_diff"):
        real = getattr(hub_module, name)
        monkeypatch.setattr(hub_module, name, lambda done, real=real, name=name: (calls.append(name), real(done))[1])

    async def test() -> None:
        rig = Rig()
        rig.round(1)
        await settle()
        assert calls == []
        clients = [rig.client() for _ in range(20)]
        for client in clients:
            await client.has(1)
        rig.round(2)
        for client in clients:
            await client.has(2)
        assert calls == ["encode_round", "encode_round_diff"]
        for client in clients:
            client.gone()
            await client.task

    run(test())


def test_resume_gives_what_changed_since() -> None:
    async def test() -> None:
        rig = Rig()
        for values in ((1,), (1, 2), (1, 3)):
            rig.round(*values)
        first = rig.client()
        await first.has(3)
        rig.round(4, 3)
        await first.has(4)
        first.gone()
        await first.task
        seen = first.events()[-1][0]
        for values in ((4, 5), (4, 5, 6)):
            last = rig.round(*values)
        again = rig.client(("Last-Event-ID", seen))
        await again.has(6)
        assert [name for _, name, _ in again.events()] == ["diff"] and again.numbers() == [6]
        first.body += again.body
        assert first.graph() == last.graph
        last = rig.round(1)
        await again.has(7)
        first.body += bytes(again.body)[bytes(again.body).index(b"id: 7") :]
        assert first.graph() == last.graph
        again.gone()
        await again.task

    run(test())


@pytest.mark.parametrize("event_id", ["2", "2-00000000", "99-{}", "x", "-1-{}", "٣-{}", "9" * 40 + "-{}", "0-{}"])
def test_an_id_that_is_not_known_here_gets_the_whole_graph(event_id: str) -> None:
    """Above all one of the process before, whose rounds had the same numbers."""

    async def test() -> None:
        rig = Rig()
        for value in range(3):
            last = rig.round(value)
        client = rig.client(("Last-Event-ID", event_id.format(rig.hub.instance)))
        await client.has(3)
        assert [name for _, name, _ in client.events()] == ["graph"] and client.graph() == last.graph
        client.gone()
        await client.task

    run(test())


def test_who_is_up_to_date_gets_the_next_round_only() -> None:
    async def test() -> None:
        rig = Rig()
        rig.round(1)
        client = rig.client(("Last-Event-ID", f"1-{rig.hub.instance}"))
        await client.until(lambda: client.status == 200)
        await settle()
        assert client.events() == []
        rig.round(2)
        await client.has(2)
        assert [name for _, name, _ in client.events()] == ["diff"]
        client.gone()
        await client.task

    run(test())


def test_after_clear_a_whole_graph_comes() -> None:
    """The difference after ``clear`` is one to nothing: applied, it would leave what is gone."""

    async def test() -> None:
        rig = Rig()
        rig.round(1, 2, 3)
        client = rig.client()
        await client.has(1)
        rig.rounds.clear()
        other = rig.client(("Last-Event-ID", f"1-{rig.hub.instance}"))
        await other.until(lambda: other.status == 200)
        last = rig.round(4)
        for each in (client, other):
            await each.has(2)
            assert each.graph() == last.graph and each.events()[-1][1] == "graph"
            each.gone()
            await each.task

    run(test())


def test_a_round_between_looking_and_attaching_is_not_missed() -> None:
    async def test() -> None:
        rig = Rig()
        old = rig.round(1)
        newer = rig.round(1, 2)
        current = rig.client()  # for which the next difference is of use
        await current.has(2)
        rig.rounds.latest = old  # what the route saw
        client = rig.client(("Last-Event-ID", f"{old.number}-{rig.hub.instance}"))
        await client.until(lambda: client.status == 200)
        last = rig.round(3, 2)
        await client.has(3)
        await current.has(3)
        assert [name for _, name, _ in client.events()] == ["diff"]
        client.body[:0] = b"id: 1\nevent: graph\ndata: " + encode_round(old) + b"\n\n"  # what it had
        assert client.graph() == current.graph() == last.graph != newer.graph
        for each in (client, current):
            each.gone()
            await each.task

    run(test())


def test_f18_a_slow_client_is_coalesced_then_goes_on() -> None:
    async def test() -> None:
        rig = Rig(queue_events=4)
        rig.round(0)
        slow, live = rig.client(), rig.client()
        await slow.has(1)
        await live.has(1)
        slow.hold()
        for value in range(1, 50):
            last = rig.round(value)
            await live.has(last.number)
        assert rig.hub.coalesced_count == 1
        slow.resume()
        await slow.has(50)
        # One was under way when it stopped reading; the others were left out.
        assert slow.numbers()[:2] == [1, 2] and slow.numbers()[-1] == 50 and len(slow.numbers()) == 3
        assert [name for _, name, _ in slow.events()] == ["graph", "diff", "diff"] and slow.graph() == last.graph
        assert live.numbers() == list(range(1, 51)) and live.graph() == last.graph
        for each in (slow, live):
            each.gone()
            await each.task

    run(test())


def test_what_slow_clients_missed_is_put_together_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("encode_round", "encode_round_diff", "merge_diffs"):
        real = getattr(hub_module, name)

        def counted(*given: Any, real: Any = real, name: str = name) -> Any:
            calls.append(name)
            return real(*given)

        monkeypatch.setattr(hub_module, name, counted)

    async def test() -> None:
        rig = Rig(queue_events=2)
        rig.round(*range(20))
        slow, live = [rig.client() for _ in range(10)], rig.client()
        for each in (*slow, live):
            await each.has(1)
        for each in slow:
            each.hold()
        for value in range(1, 9):
            last = rig.round(value, *range(1, 20 + value % 2))
            await live.has(last.number)
        calls.clear()
        for each in slow:
            each.resume()
        for each in slow:
            await each.has(last.number)
            assert each.graph() == last.graph and each.numbers() == [1, 2, 9]
        assert sorted(calls) == ["encode_round_diff", "merge_diffs"] and rig.hub.merged_count == 1
        # What waits in between is not in it: the process that came and went seven times.
        assert b"nodes_added" not in slow[0].events()[-1][2]
        for each in (*slow, live):
            each.gone()
            await each.task

    run(test())


@pytest.mark.parametrize("why", ["forgotten", "more than the graph", "broken"])
def test_where_no_difference_helps_a_graph_comes(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        rig = Rig()
        rig.round(*range(20))
        seen = f"1-{rig.hub.instance}"
        last = rig.round(*range(1, 21))
        if why == "more than the graph":
            for _ in range(2):
                last = rig.round(1)
        elif why == "forgotten":
            rig.rounds.history.max_bytes = 1
            last = rig.round(*range(2, 22))
        elif why == "broken":
            monkeypatch.setattr(hub_module, "merge_diffs", None)
        client = rig.client(("Last-Event-ID", seen))
        await client.has(last.number)
        assert [name for _, name, _ in client.events()] == ["graph"] and client.graph() == last.graph
        again = rig.round(99)
        await client.has(again.number)
        assert client.graph() == again.graph
        client.gone()
        await client.task

    run(test())


def test_rounds_that_come_while_differences_are_put_together_are_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    real = hub_module.merge_diffs

    def held(*given: Any) -> Any:
        begun.set()
        assert go_on.wait(10)
        return real(*given)

    async def test() -> None:
        rig = Rig()
        values = list(range(20))
        first = rig.round(*values)
        rig.round(*values[1:])
        monkeypatch.setattr(hub_module, "merge_diffs", held)
        client = rig.client(("Last-Event-ID", f"1-{rig.hub.instance}"))
        await asyncio.to_thread(begun.wait, 10)
        for value in range(3):
            last = rig.round(value, *values[2:])
        await settle()
        go_on.set()
        await client.has(last.number)
        assert client.numbers() == [2, 5]
        last = rig.round(7, *values[2:])
        await client.has(last.number)
        client.body[:0] = b"id: 1\nevent: graph\ndata: " + encode_round(first) + b"\n\n"
        assert client.graph() == last.graph and client.numbers() == [1, 2, 5, 6]
        client.gone()
        await client.task

    run(test())


@pytest.mark.parametrize("transport", [True, False])
def test_f18_a_client_that_never_reads_is_closed(transport: bool) -> None:
    async def test() -> None:
        rig = Rig(stall_s=30, grace_s=2)
        rig.round(0)
        dead, live = rig.client(transport=transport), rig.client()
        await dead.has(1)
        await live.has(1)
        dead.hold()
        for value in range(1, 20):
            await live.has(rig.round(value).number)
        rig.tick(29)
        await settle()
        assert rig.hub.clients_count == 2
        rig.tick(1)
        rig.tick(1)
        await settle()
        assert rig.hub.clients_count == 2  # it is given a chance to hear the reason
        rig.tick(1)
        await dead.until(lambda: dead.finished)
        assert rig.hub.clients_count == 1
        assert rig.hub.statistics()["closed"] == {TOO_SLOW: 1} and rig.hub.aborted_count == 1
        if dead.transport is not None:
            assert dead.transport.aborted
        assert live.numbers() == list(range(1, 21))
        live.gone()
        await live.task

    run(test())


def test_f18_a_slow_client_hears_why_it_is_closed() -> None:
    async def test() -> None:
        rig = Rig(stall_s=30, grace_s=2)
        rig.round(0)
        slow = rig.client()
        await slow.has(1)
        slow.hold()
        rig.round(1)
        await settle()
        rig.tick(30)
        slow.resume()
        await slow.until(lambda: slow.finished)
        assert slow.end_reason() == TOO_SLOW and rig.hub.aborted_count == 0

    run(test())


def test_half_an_event_is_never_completed() -> None:
    async def test() -> None:
        rig = Rig(stall_s=30)
        rig.rounds.round([nodes.Process(pid=p, start=1, attributes={"name": "x" * 200}) for p in range(10_000)])
        client = rig.client()
        client.hold_after_bytes = 1000
        await client.until(lambda: len(client.body) > 1000)
        await settle()
        rig.tick(30)
        client.resume()
        await client.until(lambda: client.finished)
        assert client.events() == [] and 1_000_000 < len(client.body) < 2_200_000

    run(test())


def test_f19_one_that_stands_still_holds_up_nobody() -> None:
    async def test() -> None:
        rig = Rig()
        rig.round(0)
        clients = [rig.client() for _ in range(10)]
        for client in clients:
            await client.has(1)
        clients[0].hold()
        for value in range(1, 30):
            last = rig.round(value)
            for client in clients[1:]:
                await client.has(last.number)
        for client in clients[1:]:
            assert client.numbers() == list(range(1, 31)) and client.graph() == last.graph
        for client in clients:
            client.gone()
            await client.task
        assert rig.hub.clients_count == 0

    run(test())


def test_f20_whoever_goes_leaves_nothing_behind() -> None:
    async def test() -> None:
        rig = Rig()
        rig.round(0)
        before = len(asyncio.all_tasks())
        clients = [rig.client() for _ in range(12)]
        for client in clients:
            await client.has(1)
        for client in clients[:4]:
            client.hold()
        rig.round(1)
        await clients[-1].has(2)
        for client in clients[:8]:
            client.gone()  # four of them in the middle of a send
        for client in clients[8:]:
            client.task.cancel()  # the server gives up the request
        await asyncio.gather(*(client.task for client in clients), return_exceptions=True)
        await settle()
        assert rig.hub.clients_count == 0 and len(asyncio.all_tasks()) == before
        assert sum(rig.hub.closed_counts.values()) == 12
        rig.round(2)  # nobody there: nothing is queued
        assert not rig.hub._inbox and rig.hub._newest is None and rig.hub._timer is None

    run(test())


def test_a_hundred_clients_of_which_ten_never_read() -> None:
    async def test() -> None:
        rig = Rig(queue_events=4, stall_s=30, grace_s=2)
        rig.round(0)
        clients = [rig.client() for _ in range(100)]
        for client in clients:
            await client.has(1)
        dead, live = clients[:10], clients[10:]
        for client in dead:
            client.hold()
        threads = threading.active_count()
        waiting = list(rig.hub._clients)
        for value in range(1, 60):
            last = rig.round(value, value // 2, *([value] if value % 3 else []))
            for client in live:
                await client.has(last.number)
            # What one that never reads costs: the event under way, and references to at most so many shared ones.
            assert all(len(each._queue) <= 4 for each in waiting)
            assert all(client.transport and len(client.transport.buffered) < 1000 for client in dead)
            assert len(rig.hub._merged) == 0 and len(rig.hub._inbox) <= 1
            if value == 30:
                rig.tick(30)
                rig.tick(2)
        for client in live:
            assert client.numbers() == list(range(1, 61))
            assert client.graph() == last.graph
        assert all(client.finished for client in dead) and rig.hub.clients_count == 90
        assert threading.active_count() == threads
        for client in live:
            client.gone()
            await client.task

    run(test())


GZIP = ("Accept-Encoding", "zstd, gzip;q=0.5")


@pytest.mark.parametrize("transport", [True, False])
def test_a_stream_in_gzip_is_compressed_once_and_read_as_it_comes(
    transport: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = hub_events.compress_part
    monkeypatch.setattr(hub_events, "compress_part", lambda data: (calls.append(len(data)), real(data))[1])

    async def test() -> None:
        rig = Rig(heartbeat_s=15)
        rig.round(*range(50))
        plain, *packed = [rig.client(), *(rig.client(GZIP, transport=transport) for _ in range(10))]
        decoders = [zlib.decompressobj(31) for _ in packed]
        read = [b""] * len(packed)
        raw_bytes = 0

        def everything() -> list[bytes]:
            """What each has read so far: all that was sent to it, without waiting for the end."""
            nonlocal raw_bytes
            for index, client in enumerate(packed):
                read[index] += decoders[index].decompress(bytes(client.body))
                raw_bytes += len(client.body)
                client.body.clear()
            return read

        for value in range(1, 20):
            if value > 1:
                rig.round(value, *range(1, 50 + value % 3))
            await plain.has(value)
            await settle()
            assert all(each == plain.body for each in everything())
        rig.tick(15)
        await settle()
        assert everything()[0] == plain.body and plain.body.endswith(b": alive\n\n")
        assert len(calls) == 19, "each event once"
        rig.hub.close()
        for client in (plain, *packed):
            await client.until(lambda client=client: client.finished)
        assert all(each == plain.body for each in everything()) and plain.end_reason() == STOPPING
        assert all(decoder.eof and not decoder.unused_data for decoder in decoders)
        assert raw_bytes / len(packed) < len(plain.body) / 2

    run(test())


def test_a_large_graph_is_compressed_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()
    real = hub_events.compress_part
    monkeypatch.setattr(hub_events, "compress_part", lambda data: (threads.add(threading.get_ident()), real(data))[1])

    async def test() -> None:
        rig = Rig()
        last = rig.rounds.round(
            [nodes.Process(pid=p, start=1, attributes={"name": str(p * 7919)}) for p in range(20_000)]
        )
        clients = [rig.client(GZIP) for _ in range(3)]
        for client in clients:
            await client.until(lambda client=client: len(client.body) > 50_000)
            await settle()
            text = zlib.decompressobj(31).decompress(bytes(client.body))
            assert decode_graph(text[text.index(b"data: ") + 6 :]) == last.graph
            client.gone()
            await client.task

    run(test())
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_who_takes_no_gzip_gets_none() -> None:
    async def test() -> None:
        rig = Rig()
        rig.round(1)
        for header in ("identity", "zstd", "gzip;q=0", "br, *;q=0", ""):
            client = rig.client(("Accept-Encoding", header))
            await client.has(1)
            client.gone()
            await client.task

    run(test())


def test_heartbeats_only_when_nothing_else_is_sent() -> None:
    async def test() -> None:
        rig = Rig(heartbeat_s=15)
        rig.round(0)
        client = rig.client()
        await client.has(1)
        rig.tick(14)
        await settle()
        assert b": alive" not in client.body
        rig.tick(1)
        await settle()
        assert client.body.count(b": alive\n\n") == 1
        rig.tick(14)
        rig.round(1)
        await client.has(2)
        rig.tick(14)
        await settle()
        assert client.body.count(b": alive\n\n") == 1
        client.gone()
        await client.task

    run(test())


def test_the_server_stops_and_everybody_hears_it() -> None:
    async def test() -> None:
        rig = Rig(grace_s=2)
        rig.round(0)
        clients = [rig.client() for _ in range(3)]
        for client in clients:
            await client.has(1)
        clients[0].hold()
        rig.round(1)
        await clients[1].has(2)
        await asyncio.to_thread(rig.hub.close)
        for client in clients[1:]:
            await client.until(lambda client=client: client.finished)
            assert client.end_reason() == STOPPING
        rig.tick(2)
        await clients[0].until(lambda: clients[0].finished)
        late = rig.client()
        await late.until(lambda: late.finished)
        assert late.status == 503 and msgspec.json.decode(late.body)["error"]["code"] == "no_stream"
        rig.hub.close()

    run(test())


def test_too_many_clients_are_refused() -> None:
    async def test() -> None:
        rig = Rig(max_clients=1)
        rig.round(0)
        first, second = rig.client(), rig.client()
        await second.until(lambda: second.finished)
        assert second.status == 503
        first.gone()
        await first.task
        third = rig.client()
        await third.has(1)
        third.gone()
        await third.task

    run(test())


def test_a_revoked_token_ends_its_streams() -> None:
    async def test() -> None:
        rig = Rig()
        rig.round(0)
        token, info = rig.tokens.create(Role.VIEWER)
        client, stranger = rig.client(("Authorization", f"Bearer {token}")), rig.client()
        await client.has(1)
        await stranger.until(lambda: stranger.finished)
        assert stranger.status == 401
        rig.tokens.revoke(info.id)
        rig.round(1)
        await client.until(lambda: client.finished)
        assert client.numbers() == [1] and "token" in (client.end_reason() or "")

    run(test())


def test_publish_never_waits_for_the_loop() -> None:
    """Even while the loop stands still; what it missed then comes as a whole graph, and little is kept for it."""

    async def test() -> None:
        rig = Rig(queue_events=4)
        rig.round(0)
        client = rig.client()
        await client.has(1)
        done = threading.Event()

        def rounds() -> None:
            for value in range(1, 200):
                rig.round(value)
            done.set()

        thread = threading.Thread(target=rounds)
        thread.start()
        assert done.wait(30)  # blocks the loop
        thread.join()
        assert len(rig.hub._inbox) <= 4
        await client.has(200)
        assert rig.rounds.latest is not None and client.graph() == rig.rounds.latest.graph
        client.gone()
        await client.task

    run(test())


def test_publish_after_the_loop_is_gone_is_harmless() -> None:
    rig = Rig()

    async def test() -> None:
        rig.round(0)
        client = rig.client()
        await client.has(1)
        client.task.cancel()
        rig.hub._clients.add(object())  # type: ignore[arg-type]  # one that nobody could detach

    run(test())
    rig.round(1)
    rig.hub.close()


def test_publish_is_cheap_for_the_round() -> None:
    """No encoding in the core's thread: far below the 1 ms that ten sinks may add."""

    async def test() -> None:
        rig = Rig()
        client = rig.client()
        await client.until(lambda: client.status == 200)
        many = [nodes.Process(pid=pid, start=1, metrics={"cpu_pct": 1.0}) for pid in range(20_000)]
        done = rig.rounds.round(many, publish=False)
        began = time.thread_time()
        rig.hub.publish(done)
        assert time.thread_time() - began < 0.001
        client.gone()
        await client.task

    run(test())


def test_websocket() -> None:
    rig = Rig()
    last = rig.round(1, 2)
    with (
        TestClient(rig.app, base_url="http://127.0.0.1", client=("127.0.0.1", 1)) as http,
        http.websocket_connect("ws://127.0.0.1/api/v1/stream/ws") as socket,
    ):
        first = socket.receive_json()
        assert first["event"] == "graph" and first["id"] == f"1-{rig.hub.instance}"
        assert decode_graph(msgspec.json.encode(first["data"])) == last.graph
        socket.send_text("whatever")
        rig.round(1, 3)
        second = socket.receive_json()
        assert second["event"] == "diff" and second["data"]["round"] == 2
        rig.hub.close()
        assert socket.receive_json() == {"event": "end", "data": {"reason": STOPPING}}
        with pytest.raises(WebSocketDisconnect) as closed:
            socket.receive_json()
        assert closed.value.code == 1001 and closed.value.reason == STOPPING
    assert rig.hub.clients_count == 0


def test_websocket_resumes_and_goes() -> None:
    rig = Rig()
    rig.round(1)
    rig.round(2)
    with TestClient(rig.app, base_url="http://127.0.0.1", client=("127.0.0.1", 1)) as http:
        with http.websocket_connect(f"ws://127.0.0.1/api/v1/stream/ws?last_event_id=1-{rig.hub.instance}") as socket:
            assert socket.receive_json()["event"] == "diff"
        with http.websocket_connect("ws://127.0.0.1/api/v1/stream/ws?max_events=1") as socket:
            assert socket.receive_json()["event"] == "graph"
            assert socket.receive_json()["event"] == "end"
    assert rig.hub.clients_count == 0


def test_websocket_needs_a_token_and_our_own_page() -> None:
    rig = Rig()
    rig.round(1)
    with TestClient(rig.app, base_url="http://127.0.0.1", client=("127.0.0.1", 1)) as http:
        for headers in ({"origin": "https://evil.example"}, {"authorization": "Bearer x"}, {"host": "evil.example"}):
            with (
                pytest.raises(WebSocketDisconnect),
                http.websocket_connect("ws://127.0.0.1/api/v1/stream/ws", headers=headers),
            ):
                pass
        with http.websocket_connect(
            "ws://127.0.0.1/api/v1/stream/ws", headers={"origin": "http://127.0.0.1"}
        ) as socket:
            assert socket.receive_json()["event"] == "graph"


def test_metrics_count_the_clients() -> None:
    from tests.unit.server_fixture import small

    with small() as served:
        served.get("/api/v1/stream?max_events=1")
        text = served.get("/metrics").text
    assert "gpuflight_stream_clients 0\n" in text and "gpuflight_stream_events_total 1\n" in text
    assert 'gpuflight_stream_closed_total{reason="as many events as were asked for"} 1\n' in text
