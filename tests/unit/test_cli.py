"""The command line without a machine: exit codes, laziness, output that nothing can break."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpuflight.cli as cli
from gpuflight.cli import COMMANDS, EXIT_CODES, build_parser, guarded, main, server_main
from gpuflight.cli.output import clean, console, emit_json, make_table, shorten
from gpuflight.errors import ConfigError, GpuflightError, InputError, MissingExtra
from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph.codec import encode_graph


def graph_file(path: Path, *, extra: bool = False) -> Path:
    """A small machine with two GPUs and a network card on one PCIe tree."""
    content: list[Any] = [
        nodes.Host(hostname="box"),
        nodes.Process(pid=10, start=1, attributes={"name": "train"}, metrics={"cpu_pct": 90.0}),
        nodes.GPU(uuid="GPU-a", attributes={"index": 0, "name": "H100"}, metrics={"memory_used_bytes": 1 << 30}),
        nodes.GPU(uuid="GPU-b", attributes={"index": 1, "name": "H100"}),
        nodes.PciDevice(address="0000:00:01.0"),
        nodes.Nic(name="eth0"),
    ]
    wires: list[Any] = [
        edges.AttachedTo("GPU(uuid=GPU-a)", "PciDevice(0000:00:01.0)"),
        edges.AttachedTo("Nic(eth0)", "PciDevice(0000:00:01.0)"),
        edges.NvLink("GPU(uuid=GPU-a)", "GPU(uuid=GPU-b)", {}, {"expected_bytes_per_s": 450_000_000_000}),
        edges.Access("Process(pid=10,start=1)", "GPU(uuid=GPU-a)", {}, {"memory_used_bytes": 1 << 29}),
    ]
    if extra:
        content.append(nodes.Process(pid=11, start=2, attributes={"name": "late\x1b[31m"}))
        content[1] = nodes.Process(pid=10, start=1, attributes={"name": "train"}, metrics={"cpu_pct": 91.0})
    path.write_bytes(encode_graph(Graph(content, wires)))
    return path


# --- exit codes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (GpuflightError("failed"), 1),
        (ConfigError("a: wrong\nb: wrong"), 2),
        (InputError("no such file"), 2),
        (MissingExtra("pymongo", "mongodb", "the sink"), 2),
        (KeyboardInterrupt(), 130),
        (OSError(28, "No space left on device", "/x"), 1),
        (KeyError("defect"), 1),
        (MemoryError(), 1),
        (SystemExit(2), 2),
        (SystemExit(None), 0),
        (SystemExit("text"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_exceptions_become_exit_codes_and_lines(
    raised: BaseException, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GPUFLIGHT_DEBUG", raising=False)

    def command() -> int:
        raise raised

    assert guarded("gpuflight", command) == code
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("gpuflight: ") for line in lines)
    assert len(lines) <= 2
    assert "Traceback" not in "".join(lines)


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFLIGHT_DEBUG", "1")

    def command() -> int:
        raise KeyError("where")

    assert guarded("gpuflight", command) == 1
    assert "Traceback" in capsys.readouterr().err


def test_exit_codes_are_documented_in_every_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        assert EXIT_CODES in capsys.readouterr().out
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert " ".join(EXIT_CODES.split()) in " ".join(out.split())
    for name, summary in COMMANDS.items():
        assert name in out
        assert summary.split(",")[0] in " ".join(out.split())


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nonsense"],
        ["run"],
        ["run", "--offline", "0"],
        ["run", "--offline", "nan"],
        ["run", "--offline", "ten"],
        ["run", "--offline", "1", "--pid", "-4"],
        ["run", "--offline", "1", "--collectors", "nonsense"],
        ["run", "--offline", "1", "--collectors", ","],
        ["run", "--offline", "1", "--set", "limits"],
        ["run", "--offline", "1", "--config", "/nonexistent/c.json"],
        ["run", "--replay", "/nonexistent/machine.tar.zst"],
        ["describe", "/nonexistent/graph.json"],
        ["diff", "/nonexistent/a", "/nonexistent/b"],
        ["diff", "a", "b", "--noise", "-1"],
        ["record", "/nonexistent/folder/out.tar.zst"],
        ["record", "out", "--rounds", "0"],
        ["plugins", "--family", "nonsense"],
        ["env", "--replay", "/nonexistent/machine.tar.zst"],
    ],
    ids=" ".join,
)
def test_wrong_usage_and_wrong_input_end_with_2(
    argv: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.err or argv == []
    assert list(tmp_path.iterdir()) == [], "nothing was touched"


# --- laziness -------------------------------------------------------------------------------------------------------


def modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


def test_importing_gpuflight_imports_nothing_heavy() -> None:
    loaded = modules_after("import gpuflight")
    assert not loaded & {"pydantic", "fastapi", "pymongo", "networkx", "rich", "msgspec", "pynvml", "psutil", "cupti"}


@pytest.mark.parametrize("argv", [["--help"], ["run", "--help"], ["version"]])
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    loaded = modules_after(f"from gpuflight.cli import main; main({argv!r})")
    assert not loaded & {"pydantic", "networkx", "rich", "msgspec", "pynvml", "psutil", "zstandard", "yaml"}


def test_no_command_imports_an_extra(tmp_path: Path) -> None:
    path = graph_file(tmp_path / "graph.json")
    loaded = modules_after(f"from gpuflight.cli import main; main(['describe', {str(path)!r}])")
    assert not loaded & {"fastapi", "pymongo", "boto3", "confluent_kafka", "cupti", "pyvis", "graphviz", "networkx"}


def test_only_the_wanted_command_is_imported() -> None:
    build_parser(["version"])
    loaded = modules_after("from gpuflight.cli import build_parser; build_parser(['diff', 'a', 'b'])")
    ours = {name for name in loaded if name.startswith("gpuflight.cli.")}
    assert ours == {"gpuflight.cli.diff"}


def test_every_command_declares_the_same_things() -> None:
    from importlib import import_module

    for name in COMMANDS:
        module = import_module(f"gpuflight.cli.{name}")
        assert module.DESCRIPTION
        assert module.EXAMPLES
        assert all(example.startswith(f"gpuflight {name}") for example in module.EXAMPLES)
    parser = build_parser(everything=True)
    for name in COMMANDS:
        commands: Any = next(action for action in parser._actions if action.choices)
        assert "--json" in commands.choices[name].format_help(), f"{name} has --json"


# --- output ---------------------------------------------------------------------------------------------------------


def test_clean_leaves_nothing_that_acts_on_a_terminal() -> None:
    assert clean("a\x1b[31mb\nc\x9b\u202e\ud800é漢") == "a\\x1b[31mb\\nc\\x9b\\u202e\\ud800é漢"


def test_shorten_counts_columns() -> None:
    assert shorten("abcdef", 4) == "abc…"
    assert shorten("abcd", 4) == "abcd"
    assert shorten("漢字漢字", 5) == "漢字…"
    assert shorten("é" * 3, 3) == "é" * 3


def test_json_is_utf8_and_valid_whatever_is_in_it(capfdbinary: Any) -> None:
    emit_json({"name": "\udcff漢\x1b"})
    data = capfdbinary.readouterr().out
    assert json.loads(data.decode("utf-8")) == {"name": "\udcff漢\x1b"}


def test_tables_fit_80_columns_and_carry_no_colour_when_not_a_terminal() -> None:
    stream = io.StringIO()
    console(stream).print(make_table(["name", "what"], [["x" * 50, "[red]y[/red] " * 20], [None, "\x1b[31m"]]))
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert "[red]y[/red]" in text, "no markup is interpreted"
    assert "–" in text


# --- commands on files ----------------------------------------------------------------------------------------------


def test_describe_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(graph_file(tmp_path / "graph.json", extra=True))
    assert main(["describe", path]) == 0
    text = capsys.readouterr().out
    assert "train" in text
    assert "\x1b" not in text
    assert main(["describe", path, "--around", "gpu:1", "--depth", "1"]) == 0
    near = capsys.readouterr().out
    assert "GPU-b" in near or "GPU 1" in near or "H100" in near
    assert "eth0" not in near


def test_describe_as_json_is_a_graph_file_again(tmp_path: Path, capfdbinary: Any) -> None:
    path = graph_file(tmp_path / "graph.json")
    assert main(["describe", str(path), "--kind", "GPU", "--json"]) == 0
    data = json.loads(capfdbinary.readouterr().out)
    assert data["schema"] == 1
    assert {node["kind"] for node in data["nodes"]} == {"GPU"}
    assert [edge["kind"] for edge in data["edges"]] == ["NvLink"]


def test_describe_an_entity_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = graph_file(tmp_path / "graph.json")
    assert main(["describe", str(path), "--around", "gpu:9"]) == 2
    assert "gpu:9" in capsys.readouterr().err


def test_diff_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = str(graph_file(tmp_path / "a.json")), str(graph_file(tmp_path / "b.json", extra=True))
    assert main(["diff", a, b]) == 0
    text = capsys.readouterr().out
    assert "+ Process(pid=11,start=2) late\\x1b[31m" in text
    assert "cpu_pct: 90 % → 91 %" in text
    assert "1 nodes added, 0 nodes removed, 1 nodes changed" in text
    assert main(["diff", a, b, "--noise", "5"]) == 0
    assert "cpu_pct" not in capsys.readouterr().out
    assert main(["diff", a, b, "--exit-code"]) == 1
    assert main(["diff", a, a, "--exit-code"]) == 0


def test_diff_as_json(tmp_path: Path, capfdbinary: Any) -> None:
    a, b = str(graph_file(tmp_path / "a.json")), str(graph_file(tmp_path / "b.json", extra=True))
    assert main(["diff", a, b, "--json"]) == 0
    data = json.loads(capfdbinary.readouterr().out)
    assert [node["id"] for node in data["nodes_added"]] == ["Process(pid=11,start=2)"]
    assert data["nodes_changed"][0]["changes"] == [
        {"group": "metrics", "name": "cpu_pct", "before": 90.0, "after": 91.0}
    ]
    assert main(["diff", a, b, "--no-metrics", "--json"]) == 0
    assert json.loads(capfdbinary.readouterr().out)["nodes_changed"] == []


def test_path_names_the_narrowest_hop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(graph_file(tmp_path / "graph.json"))
    assert main(["path", "gpu:0", "gpu:1", "--graph", path]) == 0
    text = capsys.readouterr().out
    assert "NvLink 450 GB/s" in text
    assert "narrowest hop: NvLink" in text
    assert main(["path", "gpu:0", "gpu:0", "--graph", path]) == 0
    assert main(["path", "gpu:0", "train", "--graph", path, "--json"]) == 0


def test_path_without_a_way_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "graph.json"
    path.write_bytes(encode_graph(Graph([nodes.Nic(name="eth0"), nodes.Nic(name="eth1")])))
    assert main(["path", "nic:eth0", "nic:eth1", "--graph", str(path)]) == 1
    assert "no way" in capsys.readouterr().err
    assert main(["path", "nic:eth0", "nic:eth1", "--graph", str(path), "--json"]) == 1
    assert capsys.readouterr().out.strip() == "null"
    assert main(["path", "nic:eth0", "nothing", "--graph", str(path)]) == 2


def test_plugins_lists_broken_ones_and_harms_nobody(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpuflight.cli.plugins import every_plugin
    from gpuflight.registry import Broken, families

    every_plugin()
    family = families()["subscribers"]
    monkeypatch.setattr(family, "broken", [Broken("subscribers", "bad", "elsewhere:Bad", "ImportError: no\x1bmodule")])
    found = every_plugin()
    assert [plugin["name"] for plugin in found["subscribers"] if plugin["error"]] == ["bad"]
    assert {"console", "file_json", "file_text", "memory"} <= {plugin["name"] for plugin in found["subscribers"]}
    assert {"collectors", "subscribers", "layouts", "renderers"} <= set(found)
    assert main(["plugins"]) == 0
    out = capsys.readouterr().out
    assert "cannot be loaded: bad" in out
    assert "no\\x1bmodule" in out


def test_plugins_as_json(capfdbinary: Any) -> None:
    assert main(["plugins", "--family", "subscribers", "--json"]) == 0
    data = json.loads(capfdbinary.readouterr().out)
    by_name = {plugin["name"]: plugin for plugin in data["subscribers"]}
    assert by_name["file_json"]["settings"]["path"]["default"] == "required"
    assert by_name["memory"]["settings"]["rounds_count"]["default"] == 16


def test_version(capfdbinary: Any) -> None:
    from gpuflight import __version__

    assert main(["version", "--json"]) == 0
    assert json.loads(capfdbinary.readouterr().out)["gpuflight"] == __version__


# --- settings of plugins --------------------------------------------------------------------------------------------


def dumped(argv: list[str], capfdbinary: Any, code: int = 0, program: Any = main) -> Any:
    assert program(argv) == code
    captured = capfdbinary.readouterr()
    return json.loads(captured.out) if code == 0 else captured.err.decode()


def test_dump_config_is_effective_and_loads_again(tmp_path: Path, capfdbinary: Any) -> None:
    first = dumped(["run", "--dump-config", "--interval", "2", "--set", "collectors.top_cpu.count=3"], capfdbinary)
    assert first["interval_s"] == 2.0
    assert first["collectors"]["top_cpu"]["count"] == 3
    assert first["collectors"]["top_cpu"]["enabled"] is True
    path = tmp_path / "dumped.json"
    path.write_text(json.dumps(first))
    assert dumped(["run", "--dump-config", "--config", str(path)], capfdbinary) == first


def test_dump_config_touches_nothing(tmp_path: Path, capfdbinary: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dumped(["run", "--offline", "5", "--dump-config", "--out", "x"], capfdbinary)
    dumped(["record", "x.tar.zst", "--dump-config"], capfdbinary)
    assert list(tmp_path.iterdir()) == []


def test_collectors_and_pids_from_the_command_line(capfdbinary: Any) -> None:
    data = dumped(
        ["run", "--dump-config", "--collectors", "host, static", "--pid", "1", "2", "--pid", "3"], capfdbinary
    )
    enabled = {name for name, block in data["collectors"].items() if block["enabled"]}
    assert enabled == {"host", "static"}
    assert data["collectors"]["static"]["pids"] == [1, 2, 3]
    assert data["collectors"]["process_tree"]["seed_all"] is False
    assert data["limits"]["max_depth"] == 2


def test_unknown_collector_is_told_with_the_nearest(capfdbinary: Any) -> None:
    text = dumped(["run", "--dump-config", "--collectors", "sokets"], capfdbinary, 2)
    assert "no collector 'sokets'; did you mean sockets?" in text


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (
            {"collectors": {"top_cpus": {}}},
            "collectors.top_cpus: there is no collector 'top_cpus'; did you mean top_cpu?",
        ),
        (
            {"collectors": {"top_cpu": {"coun": 3}}},
            "collectors.top_cpu.coun: unknown key; did you mean collectors.top_cpu.count?",
        ),
        ({"collectors": {"top_cpu": {"count": "3"}}}, 'collectors.top_cpu.count: must be a whole number, not "3"'),
        ({"collectors": {"top_cpu": {"enabled": 1}}}, "collectors.top_cpu.enabled: must be true or false"),
        ({"collectors": {"host": {"x": 1}}}, "collectors.host.x: unknown key"),
        (
            {"subscribers": [{"type": "consol"}]},
            "subscribers[0].type: there is no subscriber 'consol'; did you mean console?",
        ),
        (
            {"subscribers": [{"type": "console", "strem": "stdout"}]},
            "subscribers[0].strem: unknown key; did you mean subscribers[0].stream?",
        ),
        ({"subscribers": [{"type": "file_json"}]}, "subscribers[0].path: missing"),
        (
            {"subscribers": [{"type": "memory", "expected_update_interval_s": "abc"}]},
            'subscribers[0].expected_update_interval_s: must be a number, not "abc"',
        ),
        (
            {"subscribers": [{"type": "memory", "expected_update_interval_s": "3"}]},
            'subscribers[0].expected_update_interval_s: must be a number, not "3"',
        ),
        (
            {"subscribers": [{"type": "memory"}, {"type": "memory"}]},
            "subscribers[1].name: 'memory' is already the name of",
        ),
        (
            {"subscribers": [{"type": "file_json", "path": "x", "content": "diff"}]},
            "subscribers[0]: content diff needs mode append",
        ),
    ],
)
def test_plugin_blocks_in_a_file_are_checked(
    tmp_path: Path, block: dict[str, Any], expected: str, capfdbinary: Any
) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps(block))
    for program in (main, server_main):
        argv = ["run", "--dump-config"] if program is main else []
        text = dumped([*argv, "--config", str(path)], capfdbinary, 2, program)
        assert len(text.splitlines()) == 1
        assert f"{path}: {expected}" in text


def test_plugin_blocks_from_the_environment_are_text(monkeypatch: pytest.MonkeyPatch, capfdbinary: Any) -> None:
    monkeypatch.setenv("GPUFLIGHT_COLLECTORS__TOP_CPU__COUNT", "7")
    monkeypatch.setenv("GPUFLIGHT_COLLECTORS__THREADS__ENABLED", "no")
    monkeypatch.setenv("GPUFLIGHT_SUBSCRIBERS", '[{"type": "memory", "rounds_count": "4"}]')
    data = dumped(["run", "--dump-config"], capfdbinary)
    assert data["collectors"]["top_cpu"]["count"] == 7
    assert data["collectors"]["threads"]["enabled"] is False
    assert data["subscribers"][0]["rounds_count"] == 4
    monkeypatch.setenv("GPUFLIGHT_COLLECTORS__TOP_CPU__COUNT", "many")
    assert "collectors.top_cpu.count: must be a whole number" in dumped(["run", "--dump-config"], capfdbinary, 2)


# --- the server: how it begins (what it does: test_server_*.py, tests/e2e/test_server_real.py) -----------------------


def test_server_without_its_extra_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch, capfdbinary: Any) -> None:
    monkeypatch.setattr("gpuflight.server.backends.uvicorn.find_spec", lambda package: None)
    monkeypatch.setattr("gpuflight.core.lockfile.LockFile.acquire", lambda lock: pytest.fail("it must touch nothing"))
    text = dumped([], capfdbinary, 2, server_main)
    assert len(text.splitlines()) == 1
    assert "gpuflight[server]" in text and "--backend offline" in text


def test_server_refuses_strangers_without_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: Any
) -> None:
    monkeypatch.setattr("gpuflight.core.lockfile.LockFile.acquire", lambda lock: pytest.fail("it must touch nothing"))
    path = tmp_path / "c.json"
    store = str(tmp_path / "tokens.json")
    path.write_text(json.dumps({"server": {"host": "0.0.0.0", "auth": {"store_file": store}}}))
    text = dumped(["--config", str(path)], capfdbinary, 2, server_main)
    assert len(text.splitlines()) == 1
    assert "no token is configured" in text


def test_server_with_a_certificate_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: Any
) -> None:
    monkeypatch.setattr("gpuflight.core.lockfile.LockFile.acquire", lambda lock: pytest.fail("it must touch nothing"))
    path = tmp_path / "c.json"
    (tmp_path / "cert.pem").write_text("nothing")
    tls = {"certificate_file": str(tmp_path / "cert.pem"), "key_file": str(tmp_path / "key.pem")}
    path.write_text(json.dumps({"server": {"tls": tls, "auth": {"store_file": str(tmp_path / "tokens.json")}}}))
    assert "server.tls: " in dumped(["--config", str(path)], capfdbinary, 2, server_main)


def test_server_of_no_known_backend(capfdbinary: Any) -> None:
    assert "there are: offline, uvicorn" in dumped(["--backend", "x"], capfdbinary, 2, server_main)


def test_server_dumps_and_checks_its_settings(tmp_path: Path, capfdbinary: Any) -> None:
    path = tmp_path / "c.json"
    path.write_text('\ufeff{"server": {"port": 1, "auth": {"token": "hunter2"}}}', encoding="utf-8")
    data = dumped(["--config", str(path), "--dump-config"], capfdbinary, 0, server_main)
    assert data["server"]["port"] == 1
    assert data["server"]["auth"]["token"] == "********"


def test_module_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpuflight.cli", "version"], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout.startswith("gpuflight ")
    assert cli.__doc__ is not None
    assert os.listdir(tmp_path) == []
