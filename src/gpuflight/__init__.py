"""gpuflight: what is wired to what on a GPU machine, what each GPU does, and what holds it back.

In a program that uses GPUs: ``gpuflight.init("train")`` records it, ``with gpuflight.scope("step"):`` names its parts,
``gpuflight.shutdown()`` ends the recording (so does the end of the program). docs/recorder.md tells more.
"""

from __future__ import annotations

__version__ = "0.1.0"

_RECORDER = {
    "init": "gpuflight.events.recorder.process",
    "shutdown": "gpuflight.events.recorder.process",
    "scope": "gpuflight.events.recorder.scopes",
}


def __getattr__(name: str) -> object:
    """The recorder, imported when it is used first."""
    if name in _RECORDER:
        from importlib import import_module

        with import_module("gpuflight.events.recorder.lifecycle").imports:  # the process may fork meanwhile
            found: object = getattr(import_module(_RECORDER[name]), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
