"""The documentation says what the code does: generated parts, settings, links, make targets, configurations."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.docs_text import PAGES, ROOT, blocks, commands

from gpuflight.cli import COMMANDS
from gpuflight.cli.plugin_settings import effective, make_collectors, make_subscribers
from gpuflight.cli.reference import _BLOCK, GENERATED, refreshed
from gpuflight.settings import Settings, dump, load

LANGUAGES = {"console", "python", "json", "toml", "yaml", "c"}
"""What is executed or loaded; ``text``, or nothing, is for drawings and output."""

NO_SETTINGS = {
    "user-probes.md",  # probes: tests/integration/test_user_probes_real.py
    "rules.md",  # rules and labels: test_rules_and_labels_shown_in_the_docs_load
}
"""Pages whose TOML is something else than settings."""

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("GPUFLIGHT_"):
            monkeypatch.delenv(name)


@every_page
def test_generated_parts_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    # Python versions break the lines of a usage text differently.
    assert "".join(refreshed(text).split()) == "".join(text.split()), "run `make docs`"


def test_every_generated_part_is_somewhere() -> None:
    found = {match["name"] for page in PAGES for match in _BLOCK.finditer(page.read_text(encoding="utf-8"))}
    assert found == set(GENERATED)


@every_page
def test_every_block_is_of_a_kind_that_is_tested(page: Path) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES | {"", "text"}, f"{page.name}:{block.line}"
        assert "$ gpuflight" not in block.text or block.language == "console", f"{page.name}:{block.line}"


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("name", ["collector", "subscriber", "renderer", "rule"])
def test_the_readme_links_how_to_add(name: str) -> None:
    assert f"docs/adding-a-{name}.md" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_configurations_shown_in_the_docs_load(tmp_path: Path) -> None:
    shown = [
        block
        for page in PAGES
        for block in blocks(page)
        if block.language in ("json", "toml", "yaml") and not (block.language == "toml" and page.name in NO_SETTINGS)
    ]
    assert shown
    for block in shown:
        path = tmp_path / f"shown.{block.language}"
        path.write_text(block.text, encoding="utf-8")
        settings = load(str(path))
        make_collectors(settings)
        make_subscribers(settings)


def test_rules_and_labels_shown_in_the_docs_load(tmp_path: Path) -> None:
    from gpuflight.bottlenecks.backtest import read_labels
    from gpuflight.bottlenecks.build import make_engine
    from gpuflight.bottlenecks.settings import RulesSettings
    from gpuflight.bottlenecks.user_rules import RuleText, load_file

    page = ROOT / "docs" / "rules.md"
    rules, labels = (block for block in blocks(page) if block.language == "toml")
    (tmp_path / "rules.toml").write_text(rules.text, encoding="utf-8")
    assert [rule.name for rule in load_file(str(tmp_path / "rules.toml"))] == ["hot_gpu", "slow_scratch"]
    (tmp_path / "labels.toml").write_text(labels.text, encoding="utf-8")
    assert read_labels(str(tmp_path / "labels.toml")).expect
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \| ", text, re.MULTILINE) == list(RuleText.model_fields)
    (shown,) = (block for block in blocks(page) if block.language == "yaml")
    (tmp_path / "gpuflight.yaml").write_text(shown.text, encoding="utf-8")
    assert make_engine(RulesSettings.model_validate(load(str(tmp_path / "gpuflight.yaml")).rules))


AGENT = ROOT / "configs" / "agent.json"  # in the form of gpufl-agent: tests/unit/test_agent_options.py
PROBES = ROOT / "configs" / "probes"  # users' probes: tests/integration/test_user_probes_real.py
RULES = ROOT / "configs" / "rules"  # users' rules: tests/unit/test_user_rules.py
CONFIGS = sorted(
    path
    for path in (ROOT / "configs").rglob("*")
    if path.is_file() and path != AGENT and not {PROBES, RULES} & set(path.parents)
)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_ready_configurations_load_and_change_something(path: Path) -> None:
    settings = load(str(path))
    assert make_collectors(settings)
    make_subscribers(settings)
    dumped = effective(settings)
    json.dumps(dumped)
    if path.name != "default.json":
        assert dumped != effective(Settings())


def test_the_default_configuration_is_the_default() -> None:
    assert json.loads((ROOT / "configs" / "default.json").read_text()) == dump(Settings())


def test_commands_in_the_docs_exist() -> None:
    programs = {"gpuflight", "gpuflight-vis", "gpuflight-server", "make"}
    for page in PAGES:
        for line in commands(page):
            words = [word for word in line.split() if not re.match(r"[A-Z_]+=", word)]
            assert words[0] in programs, f"{page.name}: {line}"
            if words[0] == "gpuflight":
                assert words[1] in COMMANDS, f"{page.name}: {line}"


def make(*arguments: str) -> str:
    done = subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def test_make_targets_in_the_docs_exist_and_explain_themselves() -> None:
    listed = set(re.findall(r"^make ([a-z-]+) +\S", make("help"), re.MULTILINE))
    assert {"run", "test", "check", "bench", "help"} <= listed
    for page in PAGES:
        for target in re.findall(r"(?:^\$ |`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert target in listed, f"{page.name}: make {target}"


def test_make_test_runs_what_it_says() -> None:
    assert "-m pytest" in make("--dry-run", "test")


def test_ci_runs_the_test_command_of_the_readme(tmp_path: Path) -> None:
    """The script is run with a `make` that only tells what it was asked for."""
    fake = tmp_path / "make"
    fake.write_text('#!/bin/sh\necho "made $*"\n')
    fake.chmod(0o755)
    done: Any = subprocess.run(
        [ROOT / ".ci" / "run"], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "made test"


def test_constraints_pin_every_dependency_and_name_no_place() -> None:
    import tomllib

    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        found = re.fullmatch(r"([A-Za-z0-9_.-]+)==([0-9][A-Za-z0-9.]*)", line)
        assert found, line
        pins[re.sub(r"[-_.]+", "-", found[1]).lower()] = found[2]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["dev"]]
    needed += [each for name in ("server",) if f"gpuflight[{name}]" in needed for each in extras[name]]
    for requirement in needed:
        if requirement.startswith("gpuflight["):
            continue
        name = re.match(r"[A-Za-z0-9_.-]+", requirement)
        assert name
        assert re.sub(r"[-_.]+", "-", name[0]).lower() in pins, requirement
