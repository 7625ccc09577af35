"""Run by every Python of a process tree that was started by ``gpuflight run``, before the program's first line.

Whatever goes wrong here costs the recording and not the program; a sitecustomize that the interpreter has of its own is
run as if this one were not there.
"""

import os
import sys


def _begin() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    try:
        _other_sitecustomize()
    finally:
        _record()


def _other_sitecustomize() -> None:
    """The one that would have been run. What it raises is reported by the interpreter, as ever."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _record() -> None:
    text = os.environ.get("GPUFLIGHT_RECORDER", "")
    if not text:
        return
    try:
        from gpuflight.events.recorder.bootstrap import bootstrap
    except Exception as error:  # noqa: BLE001 - another interpreter, without gpuflight or with another version of it
        if '"always":false' not in text and '"quiet":true' not in text:
            sys.stderr.write(f"gpuflight: nothing is recorded: {sys.executable} cannot import gpuflight: {error}\n")
        return
    bootstrap(text)


_begin()
