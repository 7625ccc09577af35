"""How a program that was started by ``gpuflight run`` begins to be recorded; light, for all its children do it too."""

from __future__ import annotations

import os
import sys

from gpuflight.events.recorder.lifecycle import LATER, doze


def bootstrap(text: str) -> None:
    """Do as the options say (``text``: JSON, of the environment). Never raises.

    The program itself is recorded at once; its children, which get what is left in the environment, when they use CUDA
    or scopes.
    """
    try:
        if LATER in text:
            doze(text)
            return
        os.environ["GPUFLIGHT_RECORDER"] = f"{text[:-1]}{',' if len(text) > 2 else ''}{LATER}}}"
        from gpuflight.events.recorder.process import begin

        begin(text)
    except Exception as error:  # noqa: BLE001 - the program runs as if we were not there
        if '"quiet":true' not in text:
            sys.stderr.write(f"gpuflight: nothing is recorded: {error}\n")
