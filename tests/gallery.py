"""The gallery of docs/gallery: every layout and every format that gives a picture, of six reference graphs.

``make gallery`` rebuilds it: ``python -m tests.gallery [FOLDER] [WORD …]`` (only pictures whose names hold every word).
Each picture is opened in headless Chromium, as a reader would, and kept as a small PNG.
"""

from __future__ import annotations

import base64
import html
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.chromium import Chromium
from tests.conftest import DATA
from tests.unit import vis_scenes

from gpuflight.cli.vis_inputs import merge_inputs
from gpuflight.errors import GpuflightError
from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph.load import LoadedGraph, load_graph
from gpuflight.registry import get, plugins
from gpuflight.vis.base import Layout, LayoutOptions, Renderer
from gpuflight.vis.loaded import layout_options
from gpuflight.vis.picture import make_picture

WIDTH, HEIGHT = 1280, 800
SCALE = 0.6
AT_MOST = {"graphviz_svg": 700, "pyvis": 200, "png": 1000}
"""Formats of which only graphs of at most so many entities are drawn: beyond, one picture takes a minute."""
SHOWN = ("html", "svg", *AT_MOST)
"""Formats that a browser shows; the other formats are data, or are opened by programs of their own."""

# In namespaces of its own: whoever makes it, the picture of "this machine" shows its hardware and a few programs.
_RIG = """
hostname this-machine; ip link set lo up
python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 & server=$!
sleep 1
python3 -c 'import socket,time; c=[socket.create_connection(("127.0.0.1",8000)) for _ in range(4)]; time.sleep(60)' &
(yes | sleep 60) &
{gpuflight} run --offline 2 --interval 1 --out {folder} >/dev/null 2>&1
"""


def this_machine(folder: Path) -> LoadedGraph:
    """A look at the machine that makes the gallery."""
    gpuflight = Path(sys.executable).with_name("gpuflight")
    script = _RIG.format(gpuflight=gpuflight, folder=folder / "run")
    unshared = ["unshare", "--pid", "--fork", "--mount-proc", "--net", "--uts", "--kill-child"]
    subprocess.run([*unshared, "sh", "-c", script], check=True, timeout=120)
    return load_graph(str(folder / "run"))


def training() -> LoadedGraph:
    """Eight GPUs and a training job, with findings."""
    graph = vis_scenes.h100()
    return LoadedGraph(
        graph,
        env={"hostname": "dgx-01"},
        coverage=list(vis_scenes.coverage()),
        findings=list(vis_scenes.findings(graph)),
    )


def two_hosts() -> LoadedGraph:
    """The same host and another one that it talks to; both saw their ends of the connections."""
    from gpuflight.graph.load import parse_graph

    text = vis_scenes.h100().model_dump_json()
    for old, new in ((b"10.0.0.6", b"10.0.0.9"), (b"10.0.0.5", b"10.0.0.6"), (b"dgx-01", b"dgx-02")):
        text = text.replace(old, new)
    there = parse_graph(text).graph
    rank = "Process(pid=4100,start=4200)"
    for number in range(4):
        own = nodes.Socket(protocol="tcp", address=f"10.0.0.6:{29600 + number}", attributes={"state": "ESTABLISHED"})
        far = nodes.Socket(protocol="tcp", address=f"10.0.0.5:{48000 + number}", attributes={"remote": True})
        there.try_add_node(own)
        there.try_add_node(far)
        there.try_add_edge(edges.Belong(own.id, rank))
        there.try_add_edge(edges.ConnectTo(own.id, far.id, {"half": True}, {"bytes_per_s": 480_000_000}))
    loaded = [
        LoadedGraph(vis_scenes.h100(), env={"hostname": "dgx-01"}),
        LoadedGraph(Graph(there.nodes.values(), there.edges.values()), env={"hostname": "dgx-02"}),
    ]
    return merge_inputs(loaded, ["dgx-01", "dgx-02"])


def references(folder: Path) -> Iterator[tuple[str, LoadedGraph]]:
    """The six graphs, by the names of their files."""
    try:
        yield "this-machine", this_machine(folder)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"not drawn: this-machine: {error}; it needs root and unshare")
    yield "training", training()
    yield "two-hosts", two_hosts()
    yield "witty-npu", load_graph(str(DATA / "witty" / "vllm-tp4-npu.json"))
    yield "1k", LoadedGraph(vis_scenes.crowd(1000), env={"hostname": "a thousand"})
    yield "10k", LoadedGraph(vis_scenes.crowd(10_000), env={"hostname": "ten thousand"})


def pictures(count: int) -> Iterator[tuple[str, str, str]]:
    """Format, layout, and what the address of the page asks for."""
    layouts = [name for name in plugins(Layout) if name != "timeline"]
    known = plugins(Renderer)
    for renderer in SHOWN:
        if renderer not in known or count > AT_MOST.get(renderer, count):
            continue
        for layout in layouts if renderer == "svg" else ["default"]:
            yield renderer, layout, ""
    yield "html", "default", "#theme=dark&tab=findings"


def shoot(browser: Chromium, page: Path, fragment: str) -> bytes:
    """A file as the browser shows it."""
    url = page.as_uri()
    if page.suffix in (".svg", ".png"):
        frame = page.with_suffix(".frame.html")
        frame.write_text(
            "<body style='margin:0;background:#fff'><img style='width:100vw;height:100vh;object-fit:contain' "
            f"src='{html.escape(page.name)}'>"
        )
        url = frame.as_uri()
    browser.call("Page.navigate", url="about:blank")
    browser.call("Page.navigate", url=url + fragment)
    browser.until("document.readyState === 'complete' && document.documentElement.dataset.ready !== 'no'")
    if page.suffix == ".html":
        time.sleep(0.5 if "gpuflight" in browser.js("document.title") else 6)  # a page of PyVis settles while shown
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT, "scale": SCALE}
    return base64.b64decode(browser.call("Page.captureScreenshot", format="png", clip=clip)["data"])


def main() -> None:
    """Make all of it."""
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/gallery")
    words = sys.argv[2:]
    target.mkdir(parents=True, exist_ok=True)
    if not words:
        for old in target.glob("*.png"):
            old.unlink()
    rows: dict[str, list[str]] = {}
    missing: set[str] = set()
    with tempfile.TemporaryDirectory() as name, Chromium(Path(name) / "profile") as browser:
        browser.call(
            "Emulation.setDeviceMetricsOverride", width=WIDTH, height=HEIGHT, deviceScaleFactor=1, mobile=False
        )
        for graph_name, loaded in references(Path(name)):
            for renderer, layout, fragment in pictures(len(loaded.graph.nodes)):
                file = f"{graph_name}-{renderer}-{layout}{'-dark' if fragment else ''}.png"
                if not all(word in file for word in words):
                    continue
                began = time.monotonic()
                try:
                    page = draw(loaded, renderer, layout, Path(name))
                except GpuflightError as error:
                    missing.add(f"{renderer}: {error}")
                    continue
                (target / file).write_bytes(shoot(browser, page, fragment))
                rows.setdefault(graph_name, []).append(file)
                print(f"{file}  {time.monotonic() - began:.1f} s", flush=True)
    for line in sorted(missing):
        print(f"not drawn: {line}")
    if not words:
        (target / "README.md").write_text(index(rows))


def draw(loaded: LoadedGraph, renderer: str, layout: str, folder: Path) -> Path:
    """One picture in a file of its format."""
    made = get(Renderer, renderer)()
    options: LayoutOptions = layout_options(loaded)
    page = folder / f"picture{made.suffix}"
    with open(page, "wb") as file:
        made.write(made.build(make_picture(loaded.graph, options, get(Layout, layout)())), file)
    if page.suffix != ".html":
        return page
    return Path(shutil.copy(page, folder / "page.html"))


def index(rows: dict[str, list[str]]) -> str:
    """The page that shows them all."""
    text = [
        "# Gallery",
        "",
        "Six graphs in every layout and every format that gives a picture. `make gallery` makes all of it again.",
        "What the shapes and colours mean: [visual-language.md](../visual-language.md).",
    ]
    for graph_name, files in rows.items():
        text += ["", f"## {graph_name}", ""]
        for file in files:
            what = file.removeprefix(f"{graph_name}-").removesuffix(".png")
            text += [f"**{what}**", "", f"![{what} of {graph_name}]({file})", ""]
    return "\n".join(text).rstrip() + "\n"


if __name__ == "__main__":
    main()
