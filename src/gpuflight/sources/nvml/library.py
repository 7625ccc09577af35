"""Loading NVML, and turning its error codes into the three things that matter: a reason, a lost GPU, a dead library."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any

from gpuflight.errors import SourceUnavailable

SONAME = "libnvidia-ml.so.1"

UNINITIALIZED, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, INSUFFICIENT_SIZE = 1, 3, 4, 6, 7
DRIVER_NOT_LOADED, TIMEOUT, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND, GPU_IS_LOST = 9, 10, 12, 13, 15
RESET_REQUIRED, LIB_RM_VERSION_MISMATCH, IN_USE, VERSION_MISMATCH, DEPRECATED = 16, 18, 19, 25, 26

IN_USE_REASON = "in use by another profiler or management client"
NOT_SUPPORTED_REASON = "not supported by this GPU or driver"
REASONS = {
    0: "no data",
    UNINITIALIZED: "NVML is not initialised",
    2: "NVML takes the argument for invalid",
    NOT_SUPPORTED: NOT_SUPPORTED_REASON,
    NO_PERMISSION: "no permission",
    NOT_FOUND: "NVML has no data",
    INSUFFICIENT_SIZE: "the answer kept growing",
    DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
    TIMEOUT: "NVML timed out",
    FUNCTION_NOT_FOUND: "the driver is too old for it",
    14: "the infoROM is corrupted",
    GPU_IS_LOST: "the GPU is lost: it has fallen off the bus",
    RESET_REQUIRED: "the GPU needs a reset",
    17: "the operating system blocked the request",
    LIB_RM_VERSION_MISMATCH: "NVML library and driver are of different versions",
    IN_USE: IN_USE_REASON,
    20: "NVML ran out of memory",
    21: "NVML has no data",
    VERSION_MISMATCH: "the driver does not know this version of the structure",
    DEPRECATED: "no longer supported by the driver",
    27: "not ready yet",
}
_HINTS = {
    LIBRARY_NOT_FOUND: (
        "install the NVIDIA driver; in a container run with --gpus all and NVIDIA_DRIVER_CAPABILITIES=utility"
    ),
    DRIVER_NOT_LOADED: "modprobe nvidia; see dmesg if it fails",
    LIB_RM_VERSION_MISMATCH: "the driver was updated while loaded: reboot, or reload the nvidia kernel modules",
    NO_PERMISSION: "run as root, or give this user access to /dev/nvidiactl and /dev/nvidia*",
}


class Refused(Exception):
    """NVML answered a call with an error that concerns this call only."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(reason or reason_of(code))
        self.code = code
        self.reason = reason or reason_of(code)


class Lost(Exception):
    """The GPU does not answer any more; its handle must not be used again."""


class Broken(Exception):
    """The library as a whole does not work any more; it has to be initialised again."""


def reason_of(code: int) -> str:
    """The words for an nvmlReturn_t."""
    return REASONS.get(code) or f"NVML error {code}"


def unavailable(code: int) -> SourceUnavailable:
    """What initialising NVML failed with, for people."""
    return SourceUnavailable(
        f"NVML cannot be used: {reason_of(code)}", _HINTS.get(code, "see dmesg for messages of NVRM")
    )


_copies: dict[str, Any] = {}
_copies_lock = threading.Lock()


def load_bindings(library: str | None) -> Any:
    """The ``pynvml`` module around NVML: the shared one, or for a path of its own a private copy that nobody else sees.

    The library is tried before pynvml is imported, which takes ten times as long as everything else on a machine
    without a GPU. Raises SourceUnavailable.
    """
    try:
        loaded = ctypes.CDLL(library or SONAME)
    except OSError as error:
        text = str(error)
        missing = "No such file" in text
        raise SourceUnavailable(
            f"the NVML library {library or SONAME} is not there" if missing else f"NVML cannot be loaded: {text}",
            _HINTS[LIBRARY_NOT_FOUND] if missing else "reinstall the user-space part of the NVIDIA driver",
        ) from error
    if library is None:
        return _import("pynvml")
    with _copies_lock:
        if library not in _copies:
            found = importlib.util.find_spec("pynvml")
            name = f"gpuflight_pynvml_{len(_copies)}"
            spec = importlib.util.spec_from_file_location(name, found.origin) if found and found.origin else None
            if spec is None or spec.loader is None:
                raise _no_bindings()
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module  # pynvml looks itself up there while it is loaded
            spec.loader.exec_module(module)
            module.nvmlLib = loaded  # type: ignore[attr-defined] # what _LoadNvmlLibrary would have found by itself
            _copies[library] = module
        return _copies[library]


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _no_bindings() from error


def _no_bindings() -> SourceUnavailable:
    return SourceUnavailable("the Python bindings of NVML are not installed", "pip install nvidia-ml-py")


class Doing:
    """The call under way, for whoever waits for it in vain; written by one thread and read by another."""

    __slots__ = ("text",)

    def __init__(self) -> None:
        self.text = ""


class Library:
    """NVML as initialised once: calls by name, with errors sorted. Used by one thread only."""

    def __init__(self, path: str | None, doing: Doing | None = None) -> None:
        """Raises SourceUnavailable."""
        self._doing = doing or Doing()
        self._doing.text = "loading NVML"
        self.nv = load_bindings(path)
        self._doing.text = "nvmlInit"
        self._absent: set[str] = set()
        try:
            self.nv.nvmlInit()
        except self.nv.NVMLError as error:
            raise unavailable(error.value) from error
        self._doing.text = ""

    def call(self, function: str, *arguments: Any, what: str = "") -> Any:
        """Call an NVML function. Raises Refused, Lost or Broken; ``what`` says of which device, for ``doing``."""
        self._doing.text = f"{function} of {what}" if what else function
        try:
            return getattr(self.nv, function)(*arguments)
        except self.nv.NVMLError as error:
            raise self._sorted(function, error.value) from error
        except self.nv.NVMLLibraryMismatchError as error:
            raise Refused(FUNCTION_NOT_FOUND) from error
        except AttributeError as error:
            raise Refused(FUNCTION_NOT_FOUND, "the installed nvidia-ml-py is too old for it") from error
        finally:
            self._doing.text = ""

    def raw(self, function: str, *arguments: Any, what: str = "") -> int:
        """Call a C function that pynvml reads with the wrong structure or not at all; gives its nvmlReturn_t.

        Raises Refused if the library lacks it, Lost or Broken.
        """
        if function in self._absent:
            raise Refused(FUNCTION_NOT_FOUND)
        self._doing.text = f"{function} of {what}" if what else function
        try:
            code = int(self.nv.nvmlLib[function](*arguments))  # [] and not getattr: pynvml's own object stays as it is
        except AttributeError as error:
            self._absent.add(function)
            raise Refused(FUNCTION_NOT_FOUND) from error
        finally:
            self._doing.text = ""
        if code in _FATAL:
            raise self._sorted(function, code)
        return code

    def _sorted(self, function: str, code: int) -> Exception:
        if code in (GPU_IS_LOST, RESET_REQUIRED):
            return Lost(reason_of(code))
        if code in (UNINITIALIZED, DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH):
            return Broken(f"{function}: {reason_of(code)}")
        return Refused(code)

    def close(self) -> None:
        """Shut NVML down; errors do not matter any more."""
        self._doing.text = "nvmlShutdown"
        try:
            self.nv.nvmlShutdown()
        except self.nv.NVMLError:
            pass
        self._doing.text = ""


_FATAL = (UNINITIALIZED, DRIVER_NOT_LOADED, GPU_IS_LOST, RESET_REQUIRED, LIB_RM_VERSION_MISMATCH)
