"""What probes can do on this host, thing by thing, each with what was found and how to get it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct, field

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf.base import ProbeBackend


class Capability(Struct):
    """``found``: what is there, or why it is not. ``hint``: what to do about it; empty if nothing is to be done."""

    name: str
    ok: bool
    found: str
    hint: str = ""


class Capabilities(Struct):
    """``backend``: what loads probes here, empty if nothing does; then ``reason`` and ``hint`` say why."""

    backend: str
    reason: str = ""
    hint: str = ""
    items: list[Capability] = field(default_factory=list)

    def item(self, name: str) -> Capability:
        """One of them. Raises KeyError."""
        for known in self.items:
            if known.name == name:
                return known
        raise KeyError(name)


def find_capabilities(backends: Sequence[ProbeBackend]) -> Capabilities:
    """Look and try; nothing stays loaded."""
    from gpuflight.sources.bpf import features

    found = Capabilities("")
    for backend in backends:
        error = _asked(backend.available)
        found.items.append(_capability(f"backend {backend.name}", error, backend.version if error is None else ""))
        if error is None and not found.backend:
            found.backend = backend.name
        elif error is not None and not found.reason:
            found.reason, found.hint = error.reason, error.hint
    if found.backend:
        found.reason = found.hint = ""
    elif not backends:
        found.reason, found.hint = "probes are switched off", "set probes.backend to auto"
    for name, check, there in (
        ("right to load", features.require_rights, "BPF programs can be loaded"),
        ("BTF", features.require_btf, features.BTF),
        ("uprobe_multi", features.require_uprobe_multi, "many symbols in one link"),
        ("uprobes", features.require_classic_uprobes, "perf events, without tracefs"),
        ("tracefs", features.require_tracefs, features.tracefs() or ""),
        ("own cost", features.require_statistics, "run time of each program is counted"),
    ):
        found.items.append(_capability(name, _asked(check), there))
    return found


def _asked(check: Callable[[], None]) -> SourceUnavailable | None:
    try:
        check()
    except SourceUnavailable as error:
        return error
    return None


def _capability(name: str, error: SourceUnavailable | None, there: str) -> Capability:
    if error is not None:
        return Capability(name, False, error.reason, error.hint)
    return Capability(name, True, there)
