"""The only user of cupti-python: what of it the recorder needs, and why there is none of it where there is none."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

NUMBERS: dict[str, tuple[str, ...]] = {
    "kernel": ("CONCURRENT_KERNEL",),
    "memcpy": ("MEMCPY", "MEMCPY2"),
    "memset": ("MEMSET",),
    "sync": ("SYNCHRONIZATION",),
    "memory": ("MEMORY2",),
    "overhead": ("OVERHEAD",),
    "nvtx": ("MARKER",),
    "external": ("EXTERNAL_CORRELATION",),
    "api": ("RUNTIME", "DRIVER"),
    "graph": ("GRAPH_TRACE",),
    "device": ("DEVICE",),
}
"""Groups of kinds that are switched on together → names in ``ActivityKind``."""

KIND_OF_NUMBER = {
    1: "memcpy",
    2: "memset",
    3: "kernel",
    4: "api",
    5: "api",
    8: "device",
    10: "kernel",
    12: "nvtx",
    17: "overhead",
    22: "memcpy",
    38: "sync",
    39: "external",
    49: "memory",
    51: "graph",
}
"""``record.kind`` → group. CUPTI's numbers never change; its classes do."""

_KERNEL_CALLS = ("launchkernel", "graphlaunch", "launchcooperative")
_LAUNCH_CALLS = (*_KERNEL_CALLS, "memcpy", "memset")
_SUBSCRIBER = "gpuflight"


class Why(NamedTuple):
    """Why something is not recorded: a code for machines, what was found, what can be done."""

    code: str
    reason: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.reason} ({self.hint})" if self.hint else self.reason


class Unavailable(Exception):
    """CUPTI cannot be used here, or a part of it cannot."""

    def __init__(self, why: Why) -> None:
        super().__init__(str(why))
        self.why = why


class Binding:
    """CUPTI in this process. Every method raises Unavailable where CUPTI refuses."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._subscriber: int | None = None
        self._keep: list[Any] = []
        self._calls_enabled = False

    def timestamp(self) -> int:
        """CUPTI's clock, ns."""
        return int(self._call("get_timestamp"))

    def register(self, requested: Callable[[], tuple[int, int]], completed: Callable[[list[Any]], None]) -> None:
        """Who gives buffers to CUPTI and takes its records. The last one who does this in a process has them all."""
        self._keep = [requested, completed]
        self._call("activity_register_callbacks", requested, completed)

    def enable(self, group: str) -> None:
        """Switch on all kinds of a group that this CUPTI knows; raises Unavailable if none could be."""
        if group == "api" and self._enable_launch_calls():
            return
        refused: Why | None = None
        done = 0
        for name in NUMBERS[group]:
            number = getattr(self.module.ActivityKind, name, None)
            if number is None:
                refused = Why("unknown_kind", f"this CUPTI does not know {name}")
                continue
            try:
                self._call("activity_enable", int(number))
                done += 1
            except Unavailable as error:
                refused = error.why
        if not done and refused is not None:
            raise Unavailable(refused)

    def disable(self, group: str) -> None:
        """Switch off; kinds that CUPTI does not know are off already."""
        if group == "api" and self._calls_enabled:
            self._switch_launch_calls(0)
        for name in NUMBERS[group]:
            number = getattr(self.module.ActivityKind, name, None)
            if number is not None:
                try:
                    self._call("activity_disable", int(number))
                except Unavailable:
                    continue

    def flush(self, *, forced: bool) -> None:
        """Have CUPTI deliver what it has; ``forced``: records of work that still runs too, at the end."""
        self._call("activity_flush_all", int(forced))

    def flush_every(self, milliseconds: int) -> bool:
        """Have CUPTI deliver by itself; whether this CUPTI can."""
        try:
            self._call("activity_flush_period", milliseconds)
        except Unavailable:
            return False
        return True

    def dropped(self) -> int:
        """Records that CUPTI dropped for want of a buffer since this was last asked."""
        count = ctypes.c_size_t(0)
        self._call("activity_get_num_dropped_records", 0, 0, ctypes.addressof(count))
        return count.value

    def push(self, kind: int, identifier: int) -> None:
        self._call("activity_push_external_correlation_id", kind, identifier)

    def pop(self, kind: int) -> None:
        self._call("activity_pop_external_correlation_id", kind)

    def who_subscribes(self) -> Why | None:
        """Whether another tool is attached to this process: found by attaching, and letting go at once."""
        try:
            subscriber = self._subscribe(_nothing)
        except Unavailable as error:
            if error.why.code == "other_subscriber":
                return error.why
            raise
        self._call("unsubscribe", subscriber)
        return None

    def on_launch(self, callback: Callable[..., None]) -> None:
        """Call back at every launch, in the launching thread (``off_launch`` ends it)."""
        self._subscriber = self._subscribe(callback)
        self._keep.append(callback)
        domain = int(self.module.CallbackDomain.RUNTIME_API)
        for number in self._launch_calls("RuntimeApiTraceCbid", _KERNEL_CALLS):
            self._call("enable_callback", 1, self._subscriber, domain, number)

    def off_launch(self) -> None:
        if self._subscriber is not None:
            subscriber, self._subscriber = self._subscriber, None
            self._call("unsubscribe", subscriber)

    def library(self) -> str:
        """Path of the CUPTI library in this process, empty if it cannot be found."""
        try:
            with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
                for line in maps:
                    path = line.rstrip("\n").partition("/")[2]
                    if os.path.basename(path).startswith("libcupti.so"):
                        return f"/{path}"
        except OSError:
            return ""
        return ""

    def _subscribe(self, callback: Callable[..., None]) -> int:
        self._keep.append(callback)
        parameters = getattr(self.module, "SubscriberParams", None)
        if parameters is None or not hasattr(self.module, "subscribe_v2"):
            return int(self._call("subscribe", callback, None))
        asked = parameters()
        asked.struct_size = self.module.SUBSCRIBER_PARAMS_SIZE
        asked.subscriber_name = _SUBSCRIBER
        emptied = self._empty_old_name(asked)
        try:
            return int(self._call("subscribe_v2", callback, None, asked.ptr))
        except Unavailable as error:
            name = _old_name(asked) if emptied else ""
            if error.why.code == "other_subscriber" and name:
                raise Unavailable(error.why._replace(reason=f"{error.why.reason} It calls itself {name!r}.")) from None
            raise

    def _empty_old_name(self, asked: Any) -> bool:
        """Where CUPTI writes who else subscribes: the binding leaves in it what was in that memory before."""
        dtype: Any = getattr(self.module, "_subscriber_params_dtype", None)
        try:
            place, size = (
                ctypes.c_uint64.from_address(asked.ptr + dtype.fields[name][1]).value
                for name in ("old_subscriber_name", "old_subscriber_size")
            )
        except (AttributeError, KeyError, TypeError):
            return False
        if not place or not 0 < size <= 4096:
            return False
        ctypes.memset(place, 0, size)
        return True

    def _enable_launch_calls(self) -> bool:
        """Only the calls that start something on the GPU; whether this CUPTI can choose."""
        if not hasattr(self.module, "activity_enable_runtime_api"):
            return False
        self._calls_enabled = True
        self._switch_launch_calls(1)
        return True

    def _switch_launch_calls(self, on: int) -> None:
        for number in self._launch_calls("RuntimeApiTraceCbid", _LAUNCH_CALLS):
            self._call("activity_enable_runtime_api", number, on)
        for number in self._launch_calls("DriverApiTraceCbid", _KERNEL_CALLS):
            self._call("activity_enable_driver_api", number, on)

    def _launch_calls(self, enumeration: str, wanted: tuple[str, ...]) -> list[int]:
        members = getattr(getattr(self.module, enumeration, None), "__members__", {})
        return [int(value) for name, value in members.items() if any(word in name.lower() for word in wanted)]

    def _call(self, function: str, *arguments: Any) -> Any:
        called = getattr(self.module, function, None)
        if called is None:
            raise Unavailable(
                Why("old_binding", f"this cupti-python has no {function}", "install a newer cupti-python")
            )
        try:
            return called(*arguments)
        except Exception as error:
            raise Unavailable(explain(error)) from error


def load() -> Binding:
    """The binding; raises Unavailable, with what to do, where there is none."""
    if sys.platform != "linux":
        raise Unavailable(Why("not_linux", "CUPTI is recorded on Linux only"))
    try:
        import numpy  # noqa: F401 - asked for by itself: cupti's own message does not say what is missing
    except ImportError:
        raise Unavailable(
            Why("no_numpy", "the package numpy is not installed", "pip install 'gpuflight[cupti,events]'")
        ) from None
    try:
        from cupti import cupti
    except ImportError as error:
        raise Unavailable(
            Why("no_cupti", f"cupti-python cannot be imported: {_line(error)}", "pip install 'gpuflight[cupti,events]'")
        ) from None
    except Exception as error:  # noqa: BLE001 - a broken installation must not break the program
        raise Unavailable(Why("broken_cupti", f"cupti-python fails to load: {_line(error)}")) from None
    return Binding(cupti)


def explain(error: BaseException) -> Why:
    """What an error of the binding means, and what to do about it."""
    status = getattr(error, "status", None)
    text = _line(error)
    if status == 39:
        return Why(
            "other_subscriber",
            f"another tool is attached to CUPTI in this process.{_likely_holder()}",
            "one at a time can be; record without it",
        )
    if status in (35, 40):
        return Why(
            "insufficient_privilege",
            f"the driver lets only administrators profile: {text}",
            "modprobe nvidia NVreg_RestrictProfilingToAdminUsers=0, or give the process CAP_SYS_ADMIN",
        )
    if status in (14, 15, 11, 27):
        return Why(
            "driver_mismatch",
            f"the driver does not work with this CUPTI: {text}",
            "cupti-python 13 needs a driver for CUDA 13; for CUDA 12: pip install 'cupti-python<13'",
        )
    if status == 26:
        return Why("hardware_busy", f"another process has the GPU's profiling hardware: {text}", "try when it is done")
    if status in (41, 42, 43, 44, 45, 33):
        return Why("not_supported_here", f"CUPTI does not work on this GPU or in this mode: {text}")
    if "driver is not found" in text or "libcuda" in text:
        return Why("no_driver", f"there is no NVIDIA driver: {text}", "nothing to record without one")
    if type(error).__name__ in ("NotSupportedError", "FunctionNotFoundError"):
        return Why(
            "driver_mismatch",
            f"the driver or its CUPTI is too old or too new for the binding: {text}",
            "cupti-python 13 needs a driver for CUDA 13; for CUDA 12: pip install 'cupti-python<13'",
        )
    return Why("cupti_error", f"CUPTI refuses: {text}")


def _likely_holder() -> str:
    """Who it may be, by what can be seen of it."""
    signs = []
    if any(name in os.environ for name in ("NSYS_PROFILING_SESSION_ID", "QUADD_INJECTION_PROXY")):
        signs.append("Nsight Systems")
    if "CUDA_INJECTION64_PATH" in os.environ:
        signs.append(os.path.basename(os.environ["CUDA_INJECTION64_PATH"]))
    if profiling_in_torch():
        signs.append("torch.profiler")
    if "GPUFL_INJECT" in os.environ:
        signs.append("gpufl")
    return f" Likely {' or '.join(signs)}." if signs else ""


def profiling_in_torch() -> bool:
    """Whether torch's own profiler runs now, other than to emit NVTX ranges, which needs no CUPTI; imports nothing."""
    torch = sys.modules.get("torch")
    enabled = getattr(getattr(torch, "autograd", None), "_profiler_enabled", None)
    kind = getattr(getattr(getattr(torch, "_C", None), "_autograd", None), "_profiler_type", None)
    try:
        if enabled is None or not enabled():
            return False
        return kind is None or str(kind()).rpartition(".")[2] not in ("NVTX", "ITT")
    except Exception:  # noqa: BLE001 - private to torch
        return False


def _old_name(asked: Any) -> str:
    try:
        return str(asked.old_subscriber_name or "")
    except UnicodeDecodeError:
        return ""


def _nothing(*_: Any) -> None:
    """Of a subscription that only asks."""


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
