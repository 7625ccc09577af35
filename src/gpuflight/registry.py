"""The one metaclass by which every pluggable family registers itself.

A *family* is a base class that names itself::

    class Collector(Plugin, family="collectors", package="gpuflight.collectors"):
        ...

Every concrete subclass is then a plugin of that family: its name comes from the class (``name = ...`` overrides),
its one-line description from the first line of its docstring. Classes with abstract methods left are bases, not
plugins. Plugins are found by scanning the family's package and by the entry points ``gpuflight.<family>``, never by who
happened to import what; one that fails to import is listed with its error and harms nobody.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import threading
from abc import ABCMeta
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, ClassVar

from gpuflight.errors import InputError


@dataclass(frozen=True)
class Broken:
    """A plugin that could not be loaded: where it came from and why it failed."""

    family: str
    name: str
    origin: str
    error: str


@dataclass
class Family:
    """One pluggable family: its base class, its plugins by name, and the plugins that could not be loaded."""

    name: str
    base: type[Plugin]
    package: str | None
    plugins: dict[str, type[Plugin]] = field(default_factory=dict)
    broken: list[Broken] = field(default_factory=list)
    discovered: bool = False
    # Two locks, since a thread that imports a plugin holds that module's import lock when it comes to ``add``: it must
    # not wait there for one that is discovering, which may be waiting for the module.
    discovery: threading.RLock = field(default_factory=threading.RLock)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def discover(self) -> None:
        """Import every module of the family's package and every entry point, once."""
        with self.discovery:
            if self.discovered:
                return
            self.discovered = True
            if self.package:
                self._scan(self.package)
            for entry in entry_points(group=f"gpuflight.{self.name}"):
                self._load_entry_point(entry)

    def _scan(self, package_name: str) -> None:
        pending = [importlib.import_module(package_name)]
        while pending:  # not pkgutil.walk_packages, which imports packages itself and lets most errors through
            package = pending.pop()
            for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
                try:
                    loaded = importlib.import_module(module.name)
                except (Exception, SystemExit) as error:  # noqa: BLE001 - a broken plugin is listed, never fatal
                    self.broken.append(Broken(self.name, module.name.rpartition(".")[2], module.name, _one_line(error)))
                    continue
                if module.ispkg:
                    pending.append(loaded)

    def _load_entry_point(self, entry: Any) -> None:
        try:
            loaded = entry.load()
            if not (isinstance(loaded, type) and issubclass(loaded, self.base)):
                raise TypeError(f"{entry.value} is not a {self.base.__name__} class")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - see above
            self.broken.append(Broken(self.name, entry.name, entry.value, _one_line(error)))

    def add(self, plugin: type[Plugin]) -> None:
        """Register a class; the first of a name stays, a later one from elsewhere is listed as broken."""
        with self.lock:
            known = self.plugins.get(plugin.name)
            if known is not None and (known.__module__, known.__qualname__) != (
                plugin.__module__,
                plugin.__qualname__,
            ):
                self.broken.append(
                    Broken(
                        self.name,
                        plugin.name,
                        f"{plugin.__module__}.{plugin.__qualname__}",
                        f"name already taken by {known.__module__}.{known.__qualname__}",
                    )
                )
                return
            self.plugins[plugin.name] = plugin


_families: dict[str, Family] = {}


def default_name(class_name: str, root: str | None) -> str:
    """``TopCpuCollector`` → ``top_cpu``: snake case, less the family's base name as a suffix."""
    if root and class_name != root and class_name.endswith(root):
        class_name = class_name[: -len(root)]
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", class_name).lower()


def first_line(cls: type) -> str:
    """First line of the class's own docstring, without the full stop; empty without one."""
    text = (cls.__dict__.get("__doc__") or "").strip()
    return text.splitlines()[0].rstrip(".") if text else ""


def _families_root_name(cls: type) -> str | None:
    root = getattr(cls, "family", None)
    return root.base.__name__ if root is not None else None


class PluginMeta(ABCMeta):
    """Registers each concrete subclass of a family base; see the module's docstring."""

    def __new__(
        mcls,
        class_name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        family: str | None = None,
        package: str | None = None,
        **kwargs: Any,
    ) -> PluginMeta:
        cls = super().__new__(mcls, class_name, bases, namespace, **kwargs)
        if family is not None:
            cls.family = _families[family] = Family(family, cls, package)  # type: ignore[attr-defined, arg-type]
        if "name" not in namespace:
            cls.name = default_name(class_name, _families_root_name(cls))  # type: ignore[attr-defined]
        if "description" not in namespace:
            cls.description = first_line(cls)  # type: ignore[attr-defined]
        return cls

    def __init__(
        cls,
        class_name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        family: str | None = None,
        package: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(class_name, bases, namespace, **kwargs)
        root: Family | None = getattr(cls, "family", None)
        if family is None and root is not None and not inspect.isabstract(cls) and not namespace.get("abstract"):
            root.add(cls)  # type: ignore[arg-type]


class Plugin(metaclass=PluginMeta):
    """Base of every plugin of every family. ``settings_class`` is a pydantic model or ``None``."""

    name: ClassVar[str]
    description: ClassVar[str]
    version: ClassVar[str] = "1"
    stability: ClassVar[str] = "beta"  # "experimental" | "beta" | "stable"
    settings_class: ClassVar[type[Any] | None] = None
    family: ClassVar[Family]


def families() -> dict[str, Family]:
    """Every family declared so far, by name."""
    return dict(_families)


def plugins(base: type[Plugin]) -> dict[str, type[Any]]:
    """All plugins of the family that ``base`` declares, discovered first."""
    base.family.discover()
    return dict(sorted(base.family.plugins.items()))


def get(base: type[Plugin], name: str) -> type[Any]:
    """The plugin ``name`` of a family; InputError names the ones there are."""
    known = plugins(base)
    try:
        return known[name]
    except KeyError:
        for broken in base.family.broken:
            if broken.name == name:
                raise InputError(f"{base.family.name} plugin {name!r} cannot be loaded: {broken.error}") from None
        raise InputError(
            f"there is no {base.family.name} plugin {name!r}; there are: {', '.join(known) or 'none'}"
        ) from None


def _one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
