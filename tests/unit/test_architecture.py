"""What a reader may trust: layers, light imports, documented kinds."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import ROOT
from tests.kind_tables import BEGIN, END, kind_tables

from gpuflight.graph.edges import EDGE_KINDS
from gpuflight.graph.element import Edge, Entity
from gpuflight.graph.nodes import NODE_KINDS

SOURCE = ROOT / "src" / "gpuflight"
HEAVY = (
    "boto3",
    "bcc",
    "confluent_kafka",
    "cuda",
    "cupti",
    "fastapi",
    "graphviz",
    "networkx",
    "numpy",
    "psutil",
    "pydantic",
    "pymongo",
    "pynvml",
    "pyvis",
    "rich",
    "starlette",
    "torch",
    "uvicorn",
    "yaml",
)


def test_the_layers_hold() -> None:
    """In a process of its own: the linter disables every logger that there is, for good."""
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def _imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return names


@pytest.mark.parametrize(("room", "beneath"), [("graph", ()), ("sources", ("gpuflight.redaction",))])
def test_the_ground_floor_imports_nothing_of_ours(room: str, beneath: tuple[str, ...]) -> None:
    allowed = ("gpuflight.errors", f"gpuflight.{room}", *beneath)
    for path in sorted((SOURCE / room).rglob("*.py")):
        for name in _imported(path):
            assert not name.startswith("gpuflight.") or name.startswith(allowed), f"{path.name} imports {name}"


def test_only_sources_read_the_world() -> None:
    """A collector that opens a file cannot be replayed from a recording."""
    forbidden = {"open", "io", "socket", "subprocess", "psutil", "pynvml", "ctypes", "glob", "pathlib"}
    for path in sorted((SOURCE / "collectors").rglob("*.py")):
        assert not _imported(path) & forbidden, path.name
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "open", f"{path.name}:{node.lineno} opens a file"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                reads = node.attr in ("open", "listdir", "scandir", "readlink", "stat", "popen", "system", "environ")
                assert not reads, f"{path.name}:{node.lineno} uses os.{node.attr}"


def _loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    # -S would lose the editable install; a plain start is what a user has.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_importing_gpuflight_is_light() -> None:
    before = _loaded_by("pass")
    assert not (_loaded_by("import gpuflight") - before) & {*HEAVY, "msgspec", "asyncio", "http"}


def test_importing_the_graph_needs_msgspec_only() -> None:
    before = _loaded_by("pass")
    statement = "import gpuflight.graph, gpuflight.graph.codec, gpuflight.graph.describe, gpuflight.graph.paths"
    assert not (_loaded_by(statement) - before) & set(HEAVY)


@pytest.mark.parametrize("kind", [*NODE_KINDS.values(), *EDGE_KINDS.values()], ids=lambda kind: kind.__name__)
def test_every_kind_says_what_it_is(kind: type[Entity | Edge]) -> None:
    text = (kind.__doc__ or "").strip()
    assert text, kind
    assert len(text.splitlines()[0]) > 10
    assert kind.__struct_config__.tag == kind.__name__
    if issubclass(kind, Edge):
        assert kind.category in ("deploy", "data_stream", "placement", "attribute")


def test_the_tables_of_kinds_in_the_docs_are_those_of_the_code() -> None:
    """UPDATE_DOCS=1 writes them anew."""
    page = ROOT / "docs" / "graph.md"
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = before + BEGIN + "\n" + kind_tables() + END + after
    if os.environ.get("UPDATE_DOCS"):
        page.write_text(wanted)
    assert page.read_text() == wanted, "run this test once with UPDATE_DOCS=1"
