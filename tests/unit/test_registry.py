"""The one metaclass: names, abstract bases, duplicates, discovery, broken plugins."""

from __future__ import annotations

import importlib.metadata
import sys
import textwrap
import threading
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuflight import registry
from gpuflight.errors import InputError
from gpuflight.registry import Plugin, default_name, families, get, plugins


@pytest.fixture(autouse=True)
def _families_and_modules() -> Iterator[None]:
    """Every test leaves the registry and the loaded modules as they were."""
    known, modules = dict(registry._families), set(sys.modules)
    yield
    registry._families.clear()
    registry._families.update(known)
    for name in set(sys.modules) - modules:
        if name.startswith("some_plugins"):
            del sys.modules[name]


@pytest.fixture
def sink() -> type[Plugin]:
    """A family without a package."""

    class Sink(Plugin, family="test_sinks"):
        """Base of the test sinks."""

    return Sink


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of plugin modules on disk; its ``base`` declares the family."""
    folder = tmp_path / "some_plugins"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "base.py").write_text(
        textwrap.dedent(
            """
            from gpuflight.registry import Plugin

            class Box(Plugin, family="test_boxes", package="some_plugins"):
                '''Base.'''
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def _box(folder: Path, name: str, body: str) -> None:
    (folder / f"{name}.py").write_text("from some_plugins.base import Box\n" + textwrap.dedent(body))


def _base() -> type[Plugin]:
    import some_plugins.base  # type: ignore[import-not-found]

    base: type[Plugin] = some_plugins.base.Box
    return base


def _entry(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> None:
    found = [importlib.metadata.EntryPoint(name, value, "gpuflight.test_boxes") for name, value in entries]

    def entry_points(group: str) -> list[importlib.metadata.EntryPoint]:
        return found if group == "gpuflight.test_boxes" else []

    monkeypatch.setattr(registry, "entry_points", entry_points)


@pytest.mark.parametrize(
    ("class_name", "root", "name"),
    [
        ("TopCpuCollector", "Collector", "top_cpu"),
        ("TopCpu", "Collector", "top_cpu"),
        ("Numa", "Collector", "numa"),
        ("GPU", "Collector", "gpu"),
        ("GPULinks", "Collector", "gpu_links"),
        ("Nvml2Fast", None, "nvml2_fast"),
        ("FileJSON", "Subscriber", "file_json"),
        ("Collector", "Collector", "collector"),
        ("HttpPOSTSubscriber", "Subscriber", "http_post"),
    ],
)
def test_names_come_from_the_class(class_name: str, root: str | None, name: str) -> None:
    assert default_name(class_name, root) == name


def test_a_concrete_subclass_is_a_plugin_with_name_and_description(sink: Any) -> None:
    class FileTextSink(sink):  # type: ignore[misc]
        """Writes text. And more on the second

        and third line."""

    assert plugins(sink) == {"file_text": FileTextSink}
    assert FileTextSink.description == "Writes text. And more on the second"
    assert (FileTextSink.version, FileTextSink.stability, FileTextSink.settings_class) == ("1", "beta", None)
    assert get(sink, "file_text") is FileTextSink


def test_name_description_and_version_can_be_given(sink: Any) -> None:
    class Odd(sink):  # type: ignore[misc]
        name = "plain"
        description = "Given"
        version = "7"
        stability = "experimental"

    assert plugins(sink) == {"plain": Odd}
    assert (Odd.description, Odd.version, Odd.stability) == ("Given", "7", "experimental")


def test_a_subclass_does_not_inherit_the_name_or_the_description(sink: Any) -> None:
    class First(sink):  # type: ignore[misc]
        """The first."""

        name = "one"

    class Second(First):
        pass

    assert plugins(sink) == {"one": First, "second": Second}
    assert Second.description == ""


def test_the_base_and_abstract_classes_are_no_plugins(sink: Any) -> None:
    class Half(sink):  # type: ignore[misc]
        @abstractmethod
        def write(self) -> None: ...

    class Marked(sink):  # type: ignore[misc]
        abstract = True

    class Whole(Half):
        def write(self) -> None: ...

    class OfMarked(Marked):
        pass

    assert plugins(sink) == {"whole": Whole, "of_marked": OfMarked}


def test_the_first_of_a_name_stays_and_the_second_is_listed(sink: Any) -> None:
    class Twin(sink):  # type: ignore[misc]
        """First."""

    first = Twin

    def again() -> type:
        class Twin(sink):  # type: ignore[misc]
            """Second."""

        return Twin

    again()
    assert plugins(sink) == {"twin": first}
    [broken] = sink.family.broken
    assert broken.name == "twin"
    assert "name already taken by" in broken.error
    assert broken.family == "test_sinks"


def test_a_module_loaded_again_replaces_its_own_plugin(sink: Any) -> None:
    def define() -> type:
        class Reloaded(sink):  # type: ignore[misc]
            """The same place each time."""

        return Reloaded

    define()
    later = define()
    assert plugins(sink) == {"reloaded": later}
    assert sink.family.broken == []


def test_families_do_not_mix(sink: Any) -> None:
    class Other(Plugin, family="test_others"):
        """Another base."""

    class A(sink):  # type: ignore[misc]
        pass

    class B(Other):
        pass

    assert plugins(sink) == {"a": A}
    assert plugins(Other) == {"b": B}
    assert families()["test_sinks"] is sink.family
    families().clear()
    assert "test_sinks" in families()


def test_get_names_what_there_is(sink: Any) -> None:
    with pytest.raises(InputError, match="no test_sinks plugin 'x'; there are: none"):
        get(sink, "x")

    class Known(sink):  # type: ignore[misc]
        pass

    with pytest.raises(InputError, match="there are: known"):
        get(sink, "x")


def test_a_package_is_scanned_without_anyone_importing_its_modules(package: Path) -> None:
    """Defect 17 of the reference system: classes in modules nobody imports silently did not exist."""
    _box(package, "red", "class Red(Box):\n    'Red.'\n")
    (package / "deep").mkdir()
    (package / "deep" / "__init__.py").write_text("")
    _box(package / "deep", "blue", "class Blue(Box):\n    'Blue.'\n")
    assert "some_plugins.red" not in sys.modules
    assert list(plugins(_base())) == ["blue", "red"]


@pytest.mark.parametrize(
    "body",
    [
        "import a_library_nobody_has",
        "raise RuntimeError('first line\\nsecond')",
        "1 / 0",
        "this is no python",
        "raise SystemExit(3)",
    ],
)
def test_a_broken_module_is_listed_with_its_error_and_harms_nobody(package: Path, body: str) -> None:
    _box(package, "bad", body)
    _box(package, "good", "class Good(Box):\n    'Good.'\n")
    assert list(plugins(_base())) == ["good"]
    [broken] = _base().family.broken
    assert (broken.name, broken.origin) == ("bad", "some_plugins.bad")
    assert broken.error
    assert "\n" not in broken.error
    with pytest.raises(InputError, match="'bad' cannot be loaded"):
        get(_base(), "bad")


@pytest.mark.parametrize("error", ["ImportError", "RuntimeError"])
def test_a_broken_subpackage_is_listed_once_and_the_rest_is_found(package: Path, error: str) -> None:
    (package / "deep").mkdir()
    (package / "deep" / "__init__.py").write_text(f"raise {error}('deep trouble')")
    _box(package, "good", "class Good(Box):\n    'Good.'\n")
    assert list(plugins(_base())) == ["good"]
    assert [broken.error for broken in _base().family.broken] == [f"{error}: deep trouble"]


def test_discovery_happens_once(package: Path) -> None:
    _box(package, "bad", "raise ValueError('x')")
    for _ in range(3):
        plugins(_base())
    assert len(_base().family.broken) == 1


def test_entry_points_of_others_are_plugins(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = package.parent / "some_plugins_outside.py"
    outside.write_text("from some_plugins.base import Box\nclass Green(Box):\n    'From outside.'\n")
    _entry(monkeypatch, ("green", "some_plugins_outside:Green"))
    assert plugins(_base())["green"].description == "From outside"


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("some_plugins_gone:Green", "ModuleNotFoundError"),
        ("some_plugins.base:Absent", "AttributeError"),
        ("some_plugins.base:__name__", "TypeError"),
        ("pathlib:Path", "TypeError"),
    ],
)
def test_a_broken_entry_point_is_listed(package: Path, monkeypatch: pytest.MonkeyPatch, value: str, error: str) -> None:
    _box(package, "good", "class Good(Box):\n    'Good.'\n")
    _entry(monkeypatch, ("third", value))
    assert list(plugins(_base())) == ["good"]
    [broken] = _base().family.broken
    assert (broken.name, broken.origin) == ("third", value)
    assert broken.error.startswith(error)


def test_an_entry_point_cannot_take_a_built_in_name(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _box(package, "red", "class Red(Box):\n    'Built in.'\n")
    outside = package.parent / "some_plugins_outside.py"
    outside.write_text("from some_plugins.base import Box\nclass Red(Box):\n    'From outside.'\n")
    _entry(monkeypatch, ("red", "some_plugins_outside:Red"))
    assert plugins(_base())["red"].description == "Built in"
    [broken] = _base().family.broken
    assert broken.origin == "some_plugins_outside.Red"


def test_many_threads_may_ask_first(package: Path) -> None:
    for number in range(20):
        _box(package, f"box{number}", f"class Box{number}(Box):\n    'Box.'\n")
    base, barrier, seen = _base(), threading.Barrier(8), []

    def ask() -> None:
        barrier.wait()
        seen.append(len(plugins(base)))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [20] * 8


def test_importing_a_plugin_while_another_thread_discovers_cannot_deadlock(package: Path) -> None:
    """The importer holds the module's lock and wants to register; the discoverer wants the module."""
    _box(
        package,
        "slow",
        """
        import some_plugins.base as base
        base.importing.set()
        base.go_on.wait(10)
        class Slow(Box):
            'Slow.'
        """,
    )
    base = _base()
    module: Any = sys.modules["some_plugins.base"]
    module.importing, module.go_on = threading.Event(), threading.Event()
    importer = threading.Thread(target=lambda: __import__("some_plugins.slow"), daemon=True)
    importer.start()
    assert module.importing.wait(10)
    discoverer = threading.Thread(target=lambda: plugins(base), daemon=True)
    discoverer.start()
    while not base.family.discovered:
        pass
    module.go_on.set()
    for thread in (importer, discoverer):
        thread.join(10)
        assert not thread.is_alive()
    assert list(plugins(base)) == ["slow"]


def test_every_built_in_plugin_is_described_and_loads() -> None:
    from gpuflight.collectors.base import Collector
    from gpuflight.subscribers.base import Subscriber

    for base in (Collector, Subscriber):
        found = plugins(base)
        assert found
        assert [broken for broken in base.family.broken if broken.origin.startswith("gpuflight.")] == []
        for name, plugin in found.items():
            assert plugin.description, name
            assert plugin.stability in ("experimental", "beta", "stable"), name
            assert name == name.lower()
