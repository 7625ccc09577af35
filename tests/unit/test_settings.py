"""Settings: precedence, formats, and one line with path and nearest key for each mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflight.errors import ConfigError
from gpuflight.settings import Settings, dump, load, mask, nearest, read_config_file
from gpuflight.settings.dump import MASK, is_secret
from gpuflight.settings.load import merge, set_path


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("GPUFLIGHT_"):
            monkeypatch.delenv(name)


def write(path: Path, text: str, encoding: str = "utf-8") -> str:
    path.write_bytes(text.encode(encoding))
    return str(path)


def mistakes(*arguments: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(*arguments)
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


def test_defaults_are_those_of_the_model() -> None:
    assert load() == Settings()
    assert Settings().interval_s == 5.0
    assert Settings().server.host == "127.0.0.1"


def test_command_line_beats_environment_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(
        tmp_path / "c.json",
        '{"interval_s": 1, "tombstone_rounds": 1, "log_level": "debug", "limits": {"max_nodes": 10, "max_depth": 2}}',
    )
    monkeypatch.setenv("GPUFLIGHT_INTERVAL_S", "2")
    monkeypatch.setenv("GPUFLIGHT_TOMBSTONE_ROUNDS", "2")
    monkeypatch.setenv("GPUFLIGHT_LIMITS__MAX_NODES", "20")
    settings = load(path, {"interval_s": "3"})
    assert settings.interval_s == 3.0
    assert settings.tombstone_rounds == 2
    assert settings.log_level == "debug"
    assert settings.limits.max_nodes == 20
    assert settings.limits.max_depth == 2, "objects merge key by key"
    assert settings.limits.max_edges == Settings().limits.max_edges


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.json", '{"interval_s": 2.5, "limits": {"max_nodes": 7}, "collectors": {"sockets": {"enabled": false}}}'),
        ("c.toml", "interval_s = 2.5\n[limits]\nmax_nodes = 7\n[collectors.sockets]\nenabled = false\n"),
        ("c.yaml", "interval_s: 2.5\nlimits: {max_nodes: 7}\ncollectors:\n  sockets:\n    enabled: false\n"),
        ("c.yml", "interval_s: 2.5\nlimits: {max_nodes: 7}\ncollectors: {sockets: {enabled: false}}\n"),
        ("c", '{"interval_s": 2.5, "limits": {"max_nodes": 7}, "collectors": {"sockets": {"enabled": false}}}'),
        ("c.conf", "interval_s: 2.5\nlimits: {max_nodes: 7}\ncollectors: {sockets: {enabled: false}}\n"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_formats_mean_the_same(tmp_path: Path, name: str, text: str, encoding: str) -> None:
    settings = load(write(tmp_path / name, text, encoding))
    assert settings.interval_s == 2.5
    assert settings.limits.max_nodes == 7
    assert settings.collectors == {"sockets": {"enabled": False}}


@pytest.mark.parametrize("name", ["e.json", "e.toml", "e.yaml"])
def test_empty_file_means_defaults(tmp_path: Path, name: str) -> None:
    assert dump(load(write(tmp_path / name, "\n"))) == dump(Settings())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"intervall_s": 3}', "intervall_s: unknown key; did you mean interval_s?"),
        ('{"limits": {"max_node": 3}}', "limits.max_node: unknown key; did you mean limits.max_nodes?"),
        ('{"max_nodes": 3}', "max_nodes: unknown key; did you mean limits.max_nodes?"),
        ('{"qqqqqq": 3}', "qqqqqq: unknown key; there are: interval_s, limits,"),
        ('{"interval_s": "5"}', 'interval_s: must be a number, not "5"'),
        ('{"interval_s": true}', "interval_s: must be a number, not true"),
        ('{"interval_s": 0}', "interval_s: must be greater than or equal to 0.01, not 0"),
        ('{"interval_s": null}', "interval_s: must be a number, not null"),
        ('{"tombstone_rounds": 1.5}', "tombstone_rounds: must be a whole number, not 1.5"),
        ('{"limits": 3}', "limits: must be an object, not 3"),
        ('{"limits": []}', "limits: must be an object, not a list"),
        ('{"subscribers": {}}', "subscribers: must be a list, not an object"),
        ('{"subscribers": [{"name": "x"}]}', "subscribers[0].type: missing"),
        ('{"collectors": {"sockets": true}}', "collectors.sockets: must be an object, not true"),
        ('{"log_level": "loud"}', 'log_level: must be debug, info, warning or error, not "loud"'),
        ('{"server": {"port": 70000}}', "server.port: must be less than or equal to 65535, not 70000"),
        ('{"server": {"auth": {"token": 5}}}', "server.auth.token: must be text"),
    ],
)
def test_one_line_per_mistake_in_a_file(tmp_path: Path, text: str, expected: str) -> None:
    path = write(tmp_path / "c.json", text)
    [line] = mistakes(path)
    assert line.startswith(f"{path}: {expected}")


def test_all_mistakes_of_all_layers_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "c.json", '{"interval": 1, "limits": {"max_depth": "deep"}}')
    monkeypatch.setenv("GPUFLIGHT_INTERVALL_S", "1")
    lines = mistakes(path, {"tombstone_rounds": "many"})
    assert lines == [
        f'{path}: limits.max_depth: must be a whole number, not "deep"',
        f"{path}: interval: unknown key; did you mean interval_s?",
        "GPUFLIGHT_INTERVALL_S: unknown setting; did you mean GPUFLIGHT_INTERVAL_S?",
        'command line: tombstone_rounds: must be a whole number, not "many"',
    ]


def test_environment_mistakes_name_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFLIGHT_LIMITS__MAX_DEPTH", "deep")
    monkeypatch.setenv("GPUFLIGHT_LIMITS__MAX_NODE", "3")
    lines = mistakes()
    assert 'GPUFLIGHT_LIMITS__MAX_DEPTH: limits.max_depth: must be a whole number, not "deep"' in lines
    assert any(line.endswith("unknown key; did you mean limits.max_nodes?") for line in lines)
    assert len(lines) == 2


def test_environment_that_is_no_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFLIGHT_SUBSCRIBERS", "[{")
    assert mistakes() == ["GPUFLIGHT_SUBSCRIBERS: not valid JSON"]


def test_environment_reaches_lists_and_plugin_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFLIGHT_SUBSCRIBERS", '[{"type": "console"}]')
    monkeypatch.setenv("GPUFLIGHT_COLLECTORS__TOP_CPU__COUNT", "4")
    monkeypatch.setenv("GPUFLIGHT_COLLECTORS__STATIC__PIDS", "[1, 2]")
    settings = load()
    assert settings.subscribers[0].type == "console"
    assert settings.collectors == {"top_cpu": {"count": "4"}, "static": {"pids": [1, 2]}}


def test_debug_switch_is_no_unknown_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFLIGHT_DEBUG", "1")
    assert load() == Settings()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("c.json", '{"a": 1 "b": 2}', ":1:9: not valid JSON"),
        ("c.json", '{"limits": {"max_nodes": 1, "max_nodes": 2}}', ": max_nodes: given twice"),
        ("c.yaml", "a: 1\na: 2\n", ":2: a: given twice"),
        ("c.yaml", "a: [1\n", "not valid YAML"),
        ("c.yaml", "!!python/object/apply:os.system ['true']", "not valid YAML"),
        ("c.yaml", "1: 2\n", ": 1: keys must be text, this is a number"),
        ("c.toml", "a = \n", "not valid TOML"),
        ("c.json", "[]", "must hold one object of settings, not a list"),
    ],
)
def test_files_that_cannot_be_parsed(tmp_path: Path, name: str, text: str, expected: str) -> None:
    path = write(tmp_path / name, text)
    [line] = mistakes(path)
    assert line.startswith(path)
    assert expected in line


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in mistakes(str(tmp_path / "absent.json"))[0]
    assert "directory" in mistakes(str(tmp_path))[0]
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    assert "not UTF-8 at byte 7" in mistakes(str(tmp_path / "latin.json"))[0]


def test_a_token_never_appears_in_a_dump_or_a_mistake(tmp_path: Path) -> None:
    path = write(
        tmp_path / "c.json",
        json.dumps(
            {
                "server": {"auth": {"token": "hunter2", "token_file": "/etc/token"}},
                "remotes": [{"url": "https://me:hunter2@peer:1/", "token": "hunter2"}],
                "subscribers": [{"type": "mongodb", "password": "hunter2", "url": "mongodb://u:hunter2@h/db"}],
                "collectors": {"x": {"api_key": "hunter2", "tokens_count": 3}},
            }
        ),
    )
    text = json.dumps(dump(load(path)))
    assert "hunter2" not in text
    assert text.count(MASK) == 6
    assert "/etc/token" in text
    assert '"tokens_count": 3' in text
    broken = write(tmp_path / "b.json", '{"server": {"auth": {"token": ["hunter2"]}}}')
    assert not any("hunter2" in line for line in mistakes(broken))


def test_dump_of_defaults_loads_to_the_same(tmp_path: Path) -> None:
    path = write(tmp_path / "dump.json", json.dumps(dump(Settings())))
    assert dump(load(path)) == dump(Settings())


@pytest.mark.parametrize("name", ["token", "api_key", "apikey", "sasl_password", "client-secret", "Authorization"])
def test_secret_names(name: str) -> None:
    assert is_secret(name)
    assert mask({name: "x"}) == {name: MASK}


@pytest.mark.parametrize("name", ["token_file", "key", "keys_count", "host", "tokenizer", "password_file"])
def test_names_that_are_no_secret(name: str) -> None:
    assert not is_secret(name)


def test_set_path() -> None:
    target: dict[str, Any] = {}
    set_path(target, "limits.max_nodes=10")
    set_path(target, "log_level=debug")
    set_path(target, 'subscribers=[{"type": "console"}]')
    set_path(target, "limits.max_depth=2")
    assert target == {
        "limits": {"max_nodes": 10, "max_depth": 2},
        "log_level": "debug",
        "subscribers": [{"type": "console"}],
    }
    for bad in ("limits", "=3", "a..b=3", "log_level.x=1"):
        with pytest.raises(ConfigError, match="--set"):
            set_path(target, bad)


def test_nearest_is_near() -> None:
    assert nearest("Max-Nodes", ["max_nodes", "max_edges"]) == "max_nodes"
    assert nearest("zzz", ["max_nodes"]) == ""


objects = st.dictionaries(
    st.sampled_from("abc"), st.integers(0, 9) | st.dictionaries(st.sampled_from("xy"), st.integers(0, 9), max_size=2)
)


@given(objects, objects)
def test_merging_layers_keeps_all_keys_and_the_upper_layer_stands(a: Any, b: Any) -> None:
    merged = merge(a, b)
    assert merge(a, {}) == merge({}, a) == merge(a, a) == a
    assert merged.keys() == a.keys() | b.keys()
    for key, value in b.items():
        if isinstance(value, dict) and isinstance(a.get(key), dict):
            assert merged[key] == {**a[key], **value}
        else:
            assert merged[key] == value


@given(st.binary(max_size=200), st.sampled_from([".json", ".toml", ".yaml", ""]))
def test_no_file_gives_anything_but_settings_or_a_config_error(tmp_path_factory: Any, data: bytes, suffix: str) -> None:
    path = tmp_path_factory.getbasetemp() / f"fuzz{suffix}"
    path.write_bytes(data)
    try:
        assert isinstance(read_config_file(str(path)), dict)
    except ConfigError as error:
        assert str(error).startswith(str(path))
        assert len(str(error).splitlines()) == 1
