"""Keys and values of the maps of ``c/cuda.h``, as struct formats. A test compares them with the BTF of the object."""

from __future__ import annotations

from struct import Struct

PROCESS = Struct("<10Q6I")
LAUNCH_KEY = Struct("<IHBxQQ")
LAUNCH = Struct("<10Q10I")
LAUNCH_READ = Struct("<9Q8x8I4xI")  # the same, but for what the reader does not look at
DEVICE_KEY = Struct("<II")
DEVICE = Struct("<4Q")  # the open streams that follow are for the programs
DEVICE_BYTES = DEVICE.size + 64 * 8
STREAM_KEY = Struct("<IIQ")
STREAM = Struct("<5Q4I")
HANDLE_KEY = Struct("<I4xQ")
ALLOCATION = Struct("<3QiIHHI")
MEMORY_KEY = Struct("<IHH")
MEMORY = Struct("<q5Q")
COPY_KEY = Struct("<IHBB")
COPY = Struct("<4Q")
API_KEY = Struct("<II")
DURATION = Struct("<3Q40I")
ERROR_KEY = Struct("<III4x")
ERROR = Struct("<2Q")
COLLECTIVE_KEY = Struct("<IH2xIIQ")
COLLECTIVE = Struct("<7Q")
COMMUNICATOR = Struct("<QIiII")
NAME_LENGTH = Struct("<Q")
NAME_BYTES = 512
THREAD_ID = Struct("<Q")
PID = Struct("<I")
COUNT = Struct("<Q")
LIFE = Struct("<QIIQQ")
THREAD_CALL_BYTES = 3 * 8 + 14 * 8 + 16
THREAD_DEVICE = Struct("<II")
THREAD_DEVICE_AT = 2 * THREAD_CALL_BYTES + 16
THREAD_BYTES = THREAD_DEVICE_AT + THREAD_DEVICE.size + 8

FORK, EXEC, EXIT, SETENV, UNSETENV, ALIAS = range(1, 7)
VARIABLES = {1: "CUDA_VISIBLE_DEVICES", 2: "CUDA_DEVICE_ORDER"}
MANY_DEVICES, RUNTIME, DRIVER, REGISTERED = 1, 2, 4, 8
NONBLOCKING, MAKING_SEEN, DESTROYED = 1, 2, 4
NO_REDUCTION = 0xFFFFFFFF

LOSSES = (
    ("processes", "processes beyond the table: none of their calls is counted"),
    ("threads", "calls of threads beyond the table: not counted"),
    ("launches", "launches whose (function, stream) is beyond the table: counted in launches_lost of the process only"),
    ("streams", "spans of streams beyond the table"),
    ("devices", "spans of (process, device) beyond the table"),
    ("open_streams", "spans of the 65th and further streams that are busy at a time on a device"),
    ("events", "recorded events beyond the table: waits for them end no span"),
    ("allocations", "allocations beyond the table: in no sum"),
    ("memory", "changes of memory of (process, device, kind) beyond the table"),
    ("copies", "copies beyond the table"),
    ("calls", "durations of calls beyond the table"),
    ("errors", "errors beyond the table"),
    ("collectives", "NCCL calls beyond the table"),
    ("communicators", "NCCL communicators beyond the table, or of more than 16 GPUs in one process"),
    ("names", "names of functions not told yet, as too many came at a time: told with a later launch"),
    ("registered", "registered functions beyond the table: nameless, but for ELF symbols"),
    ("returns", "calls that never returned, or whose return was missed"),
    ("stacks", "allocations without a stack: two stacks fell on one place, or the table is full"),
    ("arguments", "arguments that could not be read, as their page was not in memory"),
    ("batches", "batched copies of more than 64 parts: the bytes of the others are missing"),
    ("contexts", "contexts of the driver API beyond the table"),
)
"""Name and meaning of each loss, by the number it has in ``enum loss``."""
