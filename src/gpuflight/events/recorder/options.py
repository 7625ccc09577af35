"""What a recorder is asked for; travels as JSON in the environment of the programs that are started under it."""

from __future__ import annotations

import os
import sys

import msgspec

from gpuflight.errors import ConfigError

ENVIRONMENT = "GPUFLIGHT_RECORDER"
"""Variable with the options, as JSON, that a program started by ``gpuflight run`` finds."""

DEFAULT_FOLDER = "~/.gpufl/traces"
KINDS = ("kernel", "memcpy", "memset", "sync", "memory", "overhead", "nvtx", "external", "api", "graph")
"""Groups of CUPTI's activity kinds. ``api``: calls of launches and copies, whose times then stand with their kernels;
``graph``: graphs as a whole, instead of the kernels in them."""
DEFAULT_KINDS = ("kernel", "memcpy", "memset", "sync", "memory", "overhead", "nvtx", "external")


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """All of a recorder's settings.

    ``folder``: the session's folder is made in it. ``after_s``, ``for_s``, ``launches``: the window that is recorded:
    how long after the start it opens, and what closes it (0: nothing does). ``on_demand``: nothing is recorded until
    somebody asks. ``stacks``: the Python stack of every n-th launch (0: of none). ``metrics_interval_s``: between two
    readings of host and GPUs (0: none). ``max_pending_bytes``: records that wait to be written; beyond it they are
    dropped and counted. ``wait_for_cuda``: CUPTI is not touched before the program has loaded the CUDA driver, so that
    children it forks before that may still use CUDA. ``compress``: gzip finished windows, those that ``cpu_budget_pct``
    leaves time for: the share of one core that writing and compressing may cost (0: any). ``gc_ranges``: garbage
    collections are scopes. ``quiet``: no line on stderr, whatever happens.
    """

    app: str = ""
    folder: str = ""
    kinds: tuple[str, ...] = DEFAULT_KINDS
    after_s: float = 0.0
    for_s: float = 0.0
    launches: int = 0
    on_demand: bool = False
    stacks: int = 0
    metrics_interval_s: float = 1.0
    max_pending_bytes: int = 256 << 20
    buffer_bytes: int = 8 << 20
    wait_for_cuda: bool = True
    torch_ranges: bool = True
    gc_ranges: bool = True
    compress: bool = True
    cpu_budget_pct: float = 2.0
    rotate_after_s: float = 0.0
    quiet: bool = False
    always: bool = True
    """Whether a process that never uses CUDA gets a session too."""

    def checked(self) -> Options:
        """These options. Raises ConfigError for what makes no sense."""
        problems = [f"{kind}: no such kind; there are {', '.join(KINDS)}" for kind in self.kinds if kind not in KINDS]
        for name in (
            "after_s",
            "for_s",
            "launches",
            "stacks",
            "metrics_interval_s",
            "rotate_after_s",
            "cpu_budget_pct",
        ):
            if getattr(self, name) < 0:
                problems.append(f"{name}: must not be negative")
        if self.buffer_bytes < 1 << 16 or self.max_pending_bytes < 1 << 20:
            problems.append("buffer_bytes is at least 64 KiB, max_pending_bytes at least 1 MiB")
        if 0 < self.metrics_interval_s < 0.05:
            problems.append("metrics_interval_s: at least 0.05, or 0 for none")
        if problems:
            raise ConfigError("\n".join(problems))
        return self

    @property
    def place(self) -> str:
        """The folder, whole."""
        return os.path.abspath(os.path.expanduser(self.folder or DEFAULT_FOLDER))

    @property
    def name(self) -> str:
        """Of the program: as given, else of its script or module."""
        if self.app:
            return self.app
        script = sys.argv[0] if getattr(sys, "argv", None) else ""
        if script in ("", "-", "-c"):
            return "python"
        name = os.path.basename(script)
        return os.path.basename(os.path.dirname(script)) if name == "__main__.py" else name


def encoded(options: Options) -> str:
    """For the environment."""
    return msgspec.json.encode(options).decode()


def decoded(text: str) -> Options:
    """From the environment. Raises ConfigError."""
    try:
        return msgspec.json.decode(text, type=Options).checked()
    except msgspec.DecodeError as error:
        raise ConfigError(f"{ENVIRONMENT}: {error}") from error
