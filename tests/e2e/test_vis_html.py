"""The page in a real browser: headless Chromium, driven by the address, read back from the DOM."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

import pytest
from tests.chromium import CHROMIUM, Chromium
from tests.conftest import DATA
from tests.e2e.test_server_stream_real import Live
from tests.unit import vis_scenes

from gpuflight.cli import vis
from gpuflight.graph import Graph, edges, nodes
from gpuflight.rounds import Finding
from gpuflight.server.tokens import Role, TokenStore
from gpuflight.vis.base import LayoutOptions
from gpuflight.vis.layout.default import DefaultLayout
from gpuflight.vis.render.html import HtmlRenderer

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


class Dom(HTMLParser):
    """The page after its script ran: text and attributes by element id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: dict[str, dict[str, str | None]] = {}
        self.open: list[tuple[str, str]] = []
        self.texts: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        name = found.get("id") or ""
        self.attributes[name or tag] = found
        if tag not in ("meta", "input"):
            self.open.append((tag, name))

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        for name in {name for _, name in self.open if name}:
            self.texts[name] = self.texts.get(name, "") + data


class Browser:
    """Opens pages of one folder in fresh profiles."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, graph: Graph, name: str = "page.html", **options: object) -> Path:
        path = self.folder / name
        renderer = HtmlRenderer()
        with open(path, "wb") as file:
            renderer.write(renderer.build(DefaultLayout().layout(graph, LayoutOptions(**options))), file)  # type: ignore[arg-type]
        return path

    def run(self, page: Path, fragment: str, *extra: str) -> subprocess.CompletedProcess[str]:
        profile = self.folder / "profile"
        shutil.rmtree(profile, ignore_errors=True)
        command = [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
            "--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}",
            "--enable-logging=stderr", "--virtual-time-budget=5000", "--window-size=1600,1000", *extra,
            f"{page.as_uri()}#{fragment}",
        ]  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120, check=True)

    def open(self, page: Path, **asked: str) -> Dom:
        """The DOM of a page once its script ran; fails on anything it says on the console."""
        done = self.run(
            page, "&".join(f"{name}={quote(value, safe='')}" for name, value in asked.items()), "--dump-dom"
        )
        said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        assert not said, "\n".join(said)
        dom = Dom(done.stdout)
        assert dom.attributes["html"].get("data-ready") == "yes"
        assert int(dom.attributes["canvas"].get("data-painted") or 0) > 0
        return dom


@pytest.fixture
def browser(tmp_path: Path) -> Browser:
    return Browser(tmp_path)


@pytest.fixture
def h100(browser: Browser) -> Path:
    """The H100 host with coverage and findings."""
    graph = vis_scenes.h100()
    return browser.write(
        graph, environment=vis_scenes.ENV, coverage=vis_scenes.coverage(), findings=vis_scenes.findings(graph)
    )


def test_opens_without_a_word_on_the_console(browser: Browser, h100: Path) -> None:
    dom = browser.open(h100)
    assert dom.texts["title"] == "dgx-01"
    assert "534 entities" in dom.texts["subtitle"].replace("\u202f", "")
    assert "GPU use" in dom.texts["legend"] and "shared memory segment" in dom.texts["legend"]


def test_the_address_searches(browser: Browser, h100: Path) -> None:
    dom = browser.open(h100, q="pt_data_worker")
    assert dom.texts["search-count"] == "48 found"
    assert "pt_data_worker" in dom.texts["results"]
    assert browser.open(h100, q="train.py rank=5").texts["search-count"] == "1 found", "every word, attributes too"
    assert browser.open(h100, q="no such thing").texts["search-count"] == "nothing"


def test_details_hold_metrics_with_units_unknowns_and_edges(browser: Browser, h100: Path) -> None:
    details = browser.open(h100, id="GPU(uuid=GPU-00000005-aaaa-bbbb-cccc-000000000005)").texts["details"]
    for words in (
        "memory used70 GiB", "power680 W", "sm util89 %", "sm clock1.75 GHz",
        "pcie replaysnot supported by this driver",
        "GPU 5 runs below its clocks: power cap", "python3 train.py local-rank=5", "NvLink",
    ):  # fmt: skip
        assert words in details


def test_folding_a_box_leaves_its_lines(browser: Browser, h100: Path) -> None:
    dom = browser.open(h100, fold="Container(5f1c9a7e2b40)")
    assert "Unfold" in dom.texts["details"]


def test_findings_and_coverage_say_what_to_do(browser: Browser, h100: Path) -> None:
    dom = browser.open(h100, tab="coverage")
    assert dom.attributes["coverage"].get("hidden") is None and "hidden" not in dom.attributes["coverage"]
    for words in (
        "rdma: no such tool",
        "apt-get install iproute2",
        "3 rounds old",
        "lost: 2 vanished processes",
        "(×3)",
    ):
        assert words in dom.texts["coverage"]
    assert "Raise the limit" in dom.texts["findings"]
    root, symptom = dom.texts["findings"].index("power cap"), dom.texts["findings"].index("symptom")
    assert root < symptom


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_both_themes(browser: Browser, h100: Path, theme: str) -> None:
    assert browser.open(h100, theme=theme).attributes["html"]["data-theme"] == theme


@pytest.mark.parametrize("count", [0, 1, 10_000])
def test_no_one_and_ten_thousand_nodes(browser: Browser, count: int) -> None:
    graph = vis_scenes.crowd(count) if count > 1 else Graph([nodes.Process(pid=1, start=1)][:count])
    dom = browser.open(browser.write(graph), q="nginx")
    if count == 0:
        assert "This graph is empty" in dom.texts["message"]
    if count > 1:
        found = sum("nginx" in str(entity.attributes.get("name")) for entity in graph)
        assert dom.texts["search-count"] == f"{found} found"


def test_the_graph_of_the_reference_system(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "reference.html"
    assert vis.main([str(DATA / "witty" / "vllm-tp4-npu.json"), "-o", str(page)]) == 0
    dom = browser.open(page, q="vllm")
    assert "vllm" in dom.texts["results"]


HOSTILE = (
    "</script><script>document.title='owned'</script>", "<img src=x onerror=\"document.title='owned'\">",
    "<!--<script>",
    "\"'&`${1}", "nul\x00esc\x1b", "\u202ednuob", "תהליך", "🚀👩‍👩‍👧",
    "\ud800", "x" * 65536, "__proto__", "constructor", "\u2028",
)  # fmt: skip


def test_hostile_names_do_nothing(browser: Browser) -> None:
    graph = Graph(
        [
            *(
                nodes.Process(pid=at, start=1, attributes={"name": name, name: name}, unknown={name: name})
                for at, name in enumerate(HOSTILE, 1)
            ),
            *(nodes.Numa(index=at, ns=name) for at, name in enumerate(HOSTILE)),
        ],
        [
            edges.SendTo(
                f"Process(pid={at},start=1)", f"Process(pid={at + 1},start=1)", {name: name}, {"x": float("nan")}
            )
            for at, name in enumerate(HOSTILE[:-1], 1)
        ],
    )
    page = browser.write(graph, title=HOSTILE[0], notes=list(HOSTILE))
    for at in (1, 2, 5, 11):
        dom = browser.open(page, id=f"Process(pid={at},start=1)", q="proc")
        assert html.unescape(dom.texts["title"]) == HOSTILE[0]
        assert not re.search(r"(?m)^owned$", dom.texts.get("title", ""))
        assert f"Process(pid={at},start=1)" in dom.texts["details"]


def test_the_picture_is_drawn_and_not_blank(browser: Browser, h100: Path, tmp_path: Path) -> None:
    """A blank canvas compresses to almost nothing; boxes, words and lines do not."""
    sizes = []
    for name, page in (("full", h100), ("empty", browser.write(Graph(), "empty.html"))):
        target = tmp_path / f"{name}.png"
        browser.run(page, "panel=0", f"--screenshot={target}", "--hide-scrollbars")
        sizes.append(target.stat().st_size)
    assert sizes[0] > 4 * sizes[1]


# --- driven: what a reader does with the mouse and the keys ----------------------------------------------------------


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as driven:
        driven.call("Runtime.enable")
        driven.call("Log.enable")
        yield driven


def _key(chromium: Chromium, key: str) -> None:
    chromium.js(f"document.dispatchEvent(new KeyboardEvent('keydown', {{key: {key!r}, bubbles: true}}))")


def _visit(chromium: Chromium, url: str) -> None:
    chromium.call("Page.navigate", url="about:blank")
    chromium.events.clear()
    chromium.call("Page.navigate", url=url)
    chromium.until("document.documentElement.dataset.ready === 'yes'")


def test_findings_stand_on_lines_pins_side_by_side_and_keys_work(browser: Browser, chromium: Chromium) -> None:
    graph = vis_scenes.h100()
    edge = next(edge for edge in graph.edges.values() if edge.kind == "ConnectTo" and "10.0.0.6" in edge.target)
    finding = Finding(id="f", rule="retransmits", severity="critical", message="loses segments", edges=[edge.id])
    _visit(chromium, browser.write(graph, findings=[finding]).as_uri())
    marked = "gpuflightViewer.lines.filter((line) => line.severity === 'critical')"
    assert chromium.js(f"{marked}.length") == 1
    chromium.js("document.querySelector('#findings .link').click()")
    assert "loses segments" in chromium.js("document.getElementById('details').textContent")
    for number in (1, 2):
        chromium.js(
            f"gpuflightViewer.select(gpuflightViewer.model.boxes.find((it) => it.label.startsWith('GPU {number} ')).i)"
        )
        _key(chromium, "k")
    pins = chromium.js("document.getElementById('pins').textContent")
    assert "GPU 1" in pins and "GPU 2" in pins and "sm util" in pins
    chromium.js("document.querySelector('#pins button[title^=Unpin]').click()")
    assert chromium.js("gpuflightViewer.pinned.length") == 1
    zoom = chromium.js("gpuflightViewer.view.k")
    _key(chromium, "+")
    assert chromium.js("gpuflightViewer.view.k") > zoom
    _key(chromium, "0")
    assert chromium.js("gpuflightViewer.view.k") == pytest.approx(zoom)
    assert chromium.said() == []


def test_a_moved_picture_is_the_picture_painted_there(browser: Browser, chromium: Chromium) -> None:
    """Panning draws only what comes into sight; apart from words that wait, no pixel may differ from a whole paint."""
    _visit(chromium, browser.write(vis_scenes.h100()).as_uri())
    different = chromium.js("""(async () => {
      const viewer = gpuflightViewer, frame = () => new Promise((done) => requestAnimationFrame(done));
      viewer.painter.lineLabels = viewer.painter.farLabels = () => {};
      viewer.zoom(1.6); await frame(); await frame();
      for (let step = 0; step < 12; step++) { viewer.pan(-23, step % 2 ? 17 : -31); await frame(); }
      const { width, height } = viewer.canvas, { context } = viewer.painter;
      const read = () => context.getImageData(0, 0, width, height).data.slice();
      const moved = read();
      viewer.paint();
      const whole = read();
      let count = 0;
      for (let at = 0; at < whole.length; at += 4) {
        const off = Math.max(...[0, 1, 2].map((part) => Math.abs(whole[at + part] - moved[at + part])));
        if (off > 48) count++;
      }
      return count / (width * height);
    })()""")
    assert different < 0.002, "but for the edges of letters, which stand at other fractions of a pixel"


@pytest.fixture
def live() -> Iterator[Live]:
    made = Live()
    made.round(7)
    yield made
    made.stop()


def test_the_live_page_follows_the_rounds(live: Live, chromium: Chromium) -> None:
    url = f"http://127.0.0.1:{live.address[1]}/"
    _visit(chromium, url)
    chromium.js(
        "gpuflightViewer.select(gpuflightViewer.model.boxes.findIndex((box) => box.id === 'Process(pid=7,start=1)'))"
    )
    chromium.until("document.documentElement.dataset.live === 'following'")
    chromium.js("gpuflightViewer.zoom(1.7)")
    zoom = chromium.js("gpuflightViewer.view.k")
    number = int(chromium.js("document.documentElement.dataset.round"))
    live.round(63)
    chromium.until("document.getElementById('details').textContent.includes('63 %')")
    chromium.until(f"Number(document.documentElement.dataset.round) > {number}")
    assert chromium.js("gpuflightViewer.view.k") == pytest.approx(zoom)
    assert "pid 7" in chromium.js("document.getElementById('details').textContent")
    chromium.until("gpuflightViewer.model.boxes.some((box) => box.metrics.cpu_pct === 63)")
    assert chromium.said() == []


def test_the_live_page_asks_for_a_token_where_one_is_needed(live: Live, chromium: Chromium, tmp_path: Path) -> None:
    tokens = TokenStore(str(tmp_path / "tokens"))
    live.server.config.app.state.gpuflight.tokens = tokens  # type: ignore[union-attr]
    token, _ = tokens.create(Role.VIEWER)
    chromium.call("Page.navigate", url=f"http://127.0.0.1:{live.address[1]}/?kinds=Process")
    chromium.until("document.documentElement.dataset.live === 'login'")
    for text in ("wrong", token):
        chromium.js(f"document.getElementById('token').value = {text!r}; document.getElementById('token-use').click()")
        if text == "wrong":
            chromium.until("document.getElementById('token-said').textContent")
    chromium.until("document.documentElement.dataset.live === 'following'")
    assert chromium.js("document.getElementById('login').hidden") is True
    chromium.js("sessionStorage.clear()")


def test_the_live_page_allows_itself_only_its_own_server(live: Live) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{live.address[1]}/") as answer:
        policy, text = answer.headers["content-security-policy"], answer.read().decode()
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy
    assert not re.findall(r"(?:src|href)\s*=", text.partition("<body>")[2].partition("<script>")[0])
    assert "://" not in text.partition("<script>")[0]
