"""The functions of libcudart, libcuda, libnccl and libc that are hooked, and what their arguments mean.

Sources: cuda_runtime_api.h of CUDA 12.9 and 13, cuda.h of 13, nccl.h of 2.28, setenv(3). Functions whose old form takes
32-bit sizes (``cuMemAlloc`` without ``_v2``) are not hooked: nothing built in this decade calls them.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from gpuflight.sources.cuda_probe.cookies import Class, Direction, Memory, pack

Layer = Literal["runtime", "driver", "nccl", "libc"]


class Function(Struct, frozen=True):
    """One function by its name in the headers, and the symbols that it has in libraries.

    ``waits``: the host waits for the GPU in it. ``per_thread``: suffix of its twin for programs built with per-thread
    default streams (``_ptsz``, ``_ptds``), empty if it has none. For the numbers of arguments see ``cookies.pack``.
    """

    name: str
    kind: Class
    symbol: str = ""  # where it differs from the name
    per_thread: str = ""
    waits: bool = False
    blocks: bool = False
    a: int = 0
    b: int = 0
    stream: int = 0
    d: int = 0
    shift: int = 0
    detail: int = 0

    def symbols(self) -> list[tuple[str, bool]]:
        """Exported names, and whether each is the per-thread twin."""
        symbol = self.symbol or self.name
        return [(symbol, False), *([(symbol + self.per_thread, True)] if self.per_thread else [])]

    def cookie(self, api: int, layer: Layer, *, per_thread: bool, file_number: int) -> int:
        """What the kernel side is told of this function in this file."""
        return pack(
            api,
            self.kind,
            per_thread=per_thread,
            driver=layer == "driver",
            blocks=self.blocks,
            a=self.a,
            b=self.b,
            stream=self.stream,
            d=self.d,
            shift=self.shift,
            detail=self.detail,
            file_number=file_number,
        )


def _plain(*names: str) -> list[Function]:
    return [Function(name, Class.PLAIN) for name in names]


def _copy(name: str, **details: object) -> Function:
    """A copy that keeps the host until it is done."""
    return Function(name, waits=True, blocks=True, **{"kind": Class.COPY, **details})  # type: ignore[arg-type]


_SZ, _DS = "_ptsz", "_ptds"

_RUNTIME = [
    Function("cudaLaunchKernel", Class.LAUNCH, per_thread=_SZ),
    Function("__cudaLaunchKernel", Class.LAUNCH, per_thread=_SZ),
    Function("cudaLaunchCooperativeKernel", Class.LAUNCH, per_thread=_SZ),
    Function("cudaLaunchKernelExC", Class.LAUNCH_CONFIG, per_thread=_SZ),
    Function("cudaGraphLaunch", Class.LAUNCH_GRAPH, per_thread=_SZ),
    Function("__cudaRegisterFunction", Class.REGISTER),
    Function("__cudaGetKernel", Class.HANDLE_OF, a=2),
    Function("cudaGetKernel", Class.HANDLE_OF, a=2),
    Function("cudaGetFuncBySymbol", Class.HANDLE_OF, a=2),
    Function("cudaLibraryGetKernel", Class.NAME_OF, b=3),
    Function("cudaDeviceSynchronize", Class.SYNC_DEVICE, waits=True),
    Function("cudaThreadSynchronize", Class.SYNC_DEVICE, waits=True),
    Function("cudaStreamSynchronize", Class.SYNC_STREAM, per_thread=_SZ, waits=True),
    Function("cudaStreamQuery", Class.SYNC_STREAM, per_thread=_SZ),
    Function("cudaEventSynchronize", Class.SYNC_EVENT, waits=True),
    Function("cudaEventQuery", Class.SYNC_EVENT),
    Function("cudaDeviceReset", Class.RESET_DEVICE, waits=True),
    Function("cudaThreadExit", Class.RESET_DEVICE, waits=True),
    Function("cudaSetDevice", Class.SET_DEVICE),
    Function("cudaStreamCreate", Class.STREAM_CREATE),
    Function("cudaStreamCreateWithFlags", Class.STREAM_CREATE, b=2),
    Function("cudaStreamCreateWithPriority", Class.STREAM_CREATE, b=2),
    Function("cudaExecutionCtxStreamCreate", Class.STREAM_CREATE, b=3),
    Function("cudaStreamDestroy", Class.STREAM_DESTROY),
    Function("cudaStreamWaitEvent", Class.WAIT_EVENT, per_thread=_SZ),
    Function("cudaStreamBeginCapture", Class.CAPTURE_BEGIN, per_thread=_SZ),
    Function("cudaStreamBeginCaptureToGraph", Class.CAPTURE_BEGIN, per_thread=_SZ),
    Function("cudaStreamEndCapture", Class.CAPTURE_END, per_thread=_SZ),
    Function("cudaEventCreate", Class.EVENT_CREATE),
    Function("cudaEventCreateWithFlags", Class.EVENT_CREATE),
    Function("cudaEventDestroy", Class.EVENT_DESTROY),
    Function("cudaEventRecord", Class.EVENT_RECORD, per_thread=_SZ, stream=2),
    Function("cudaEventRecordWithFlags", Class.EVENT_RECORD, per_thread=_SZ, stream=2),
    Function("cudaMalloc", Class.ALLOC, a=2, detail=Memory.DEVICE),
    Function("cudaMallocPitch", Class.ALLOC_PITCH, detail=Memory.DEVICE),
    Function("cudaMalloc3D", Class.ALLOC_3D, detail=Memory.DEVICE),
    Function("cudaMallocAsync", Class.ALLOC, per_thread=_SZ, a=2, detail=Memory.ASYNC),
    Function("cudaMallocFromPoolAsync", Class.ALLOC, per_thread=_SZ, a=2, detail=Memory.ASYNC),
    Function("cudaMallocManaged", Class.ALLOC, a=2, detail=Memory.MANAGED),
    Function("cudaMallocHost", Class.ALLOC, a=2, detail=Memory.HOST),
    Function("cudaHostAlloc", Class.ALLOC, a=2, detail=Memory.HOST),
    Function("cudaHostRegister", Class.ALLOC, a=2, detail=Memory.REGISTERED),
    Function("cudaFree", Class.FREE, detail=Memory.DEVICE),
    Function("cudaFreeAsync", Class.FREE, per_thread=_SZ, detail=Memory.ASYNC),
    Function("cudaFreeHost", Class.FREE, detail=Memory.HOST),
    Function("cudaHostUnregister", Class.FREE, detail=Memory.REGISTERED),
    _copy("cudaMemcpy", per_thread=_DS, a=3, d=4),
    _copy("cudaMemcpy2D", per_thread=_DS, a=5, b=6, d=7),
    _copy("cudaMemcpyToSymbol", per_thread=_DS, a=3, d=5),
    _copy("cudaMemcpyFromSymbol", per_thread=_DS, a=3, d=5),
    _copy("cudaMemcpyToArray", per_thread=_DS, a=5, d=6),
    _copy("cudaMemcpyFromArray", per_thread=_DS, a=5, d=6),
    _copy("cudaMemcpyArrayToArray", per_thread=_DS, a=7, d=8),
    _copy("cudaMemcpy2DToArray", per_thread=_DS, a=6, b=7, d=8),
    _copy("cudaMemcpy2DFromArray", per_thread=_DS, a=6, b=7, d=8),
    _copy("cudaMemcpy2DArrayToArray", per_thread=_DS, a=7, b=8, d=9),
    _copy("cudaMemcpy3D", per_thread=_DS, kind=Class.COPY_3D),
    _copy("cudaMemcpy3DPeer", per_thread=_DS, kind=Class.COPY_3D_PEER, detail=Direction.PTOP),
    _copy("cudaMemcpyPeer", a=5, detail=Direction.PTOP),
    Function("cudaMemcpyAsync", Class.COPY, per_thread=_SZ, a=3, d=4),
    Function("cudaMemcpy2DAsync", Class.COPY, per_thread=_SZ, a=5, b=6, d=7),
    Function("cudaMemcpyToSymbolAsync", Class.COPY, per_thread=_SZ, a=3, d=5),
    Function("cudaMemcpyFromSymbolAsync", Class.COPY, per_thread=_SZ, a=3, d=5),
    Function("cudaMemcpyToArrayAsync", Class.COPY, per_thread=_SZ, a=5, d=6),
    Function("cudaMemcpyFromArrayAsync", Class.COPY, per_thread=_SZ, a=5, d=6),
    Function("cudaMemcpy2DToArrayAsync", Class.COPY, per_thread=_SZ, a=6, b=7, d=8),
    Function("cudaMemcpy2DFromArrayAsync", Class.COPY, per_thread=_SZ, a=6, b=7, d=8),
    Function("cudaMemcpy3DAsync", Class.COPY_3D, per_thread=_SZ),
    Function("cudaMemcpy3DPeerAsync", Class.COPY_3D_PEER, per_thread=_SZ, detail=Direction.PTOP),
    Function("cudaMemcpyPeerAsync", Class.COPY, a=5, detail=Direction.PTOP),
    Function("cudaMemcpyBatchAsync", Class.COPY_BATCH, per_thread=_SZ, detail=Direction.DEFAULT),
    Function("cudaMemcpyWithAttributesAsync", Class.COPY, per_thread=_SZ, a=3, detail=Direction.DEFAULT),
    Function("cudaMemset", Class.MEMSET, per_thread=_DS, blocks=True, a=3, detail=Direction.MEMSET),
    Function("cudaMemset2D", Class.MEMSET, per_thread=_DS, blocks=True, a=4, b=5, detail=Direction.MEMSET),
    Function("cudaMemset3D", Class.MEMSET_3D, per_thread=_DS, blocks=True, detail=Direction.MEMSET),
    Function("cudaMemsetAsync", Class.MEMSET, per_thread=_SZ, a=3, detail=Direction.MEMSET),
    Function("cudaMemset2DAsync", Class.MEMSET, per_thread=_SZ, a=4, b=5, detail=Direction.MEMSET),
    Function("cudaMemset3DAsync", Class.MEMSET_3D, per_thread=_SZ, detail=Direction.MEMSET),
    Function("cudaExecutionCtxSynchronize", Class.PLAIN, waits=True),
    Function("cudaGraphUpload", Class.PLAIN, per_thread=_SZ),
    Function("cudaLaunchHostFunc", Class.PLAIN, per_thread=_SZ),
    Function("cudaMemPrefetchAsync", Class.PLAIN, per_thread=_SZ),
    *_plain("cudaGraphInstantiate", "cudaGraphInstantiateWithFlags", "cudaGraphExecUpdate", "cudaInitDevice"),
    *_plain("cudaGetDeviceCount", "cudaGetDeviceProperties", "cudaMemGetInfo", "cudaDeviceEnablePeerAccess"),
    *_plain("cudaIpcGetMemHandle", "cudaIpcOpenMemHandle", "cudaIpcCloseMemHandle", "cudaHostGetDevicePointer"),
    *_plain("cudaMallocArray", "cudaMalloc3DArray", "cudaMallocMipmappedArray", "cudaFreeArray"),
    *_plain("cudaDeviceSetLimit", "cudaFuncSetAttribute", "cudaMemPoolCreate", "cudaMemPoolTrimTo"),
]

_DRIVER = [
    Function("cuLaunchKernel", Class.LAUNCH, per_thread=_SZ),
    Function("cuLaunchCooperativeKernel", Class.LAUNCH, per_thread=_SZ),
    Function("cuLaunchKernelEx", Class.LAUNCH_CONFIG, per_thread=_SZ),
    Function("cuGraphLaunch", Class.LAUNCH_GRAPH, per_thread=_SZ),
    Function("cuModuleGetFunction", Class.NAME_OF, b=3),
    Function("cuLibraryGetKernel", Class.NAME_OF, b=3),
    Function("cuKernelGetFunction", Class.HANDLE_OF, a=2),
    Function("cuCtxSynchronize", Class.SYNC_DEVICE, waits=True),
    Function("cuStreamSynchronize", Class.SYNC_STREAM, per_thread=_SZ, waits=True),
    Function("cuStreamQuery", Class.SYNC_STREAM, per_thread=_SZ),
    Function("cuEventSynchronize", Class.SYNC_EVENT, waits=True),
    Function("cuEventQuery", Class.SYNC_EVENT),
    Function("cuCtxCreate", Class.CONTEXT_CREATE, symbol="cuCtxCreate_v2", a=3, detail=1),
    Function("cuCtxCreate", Class.CONTEXT_CREATE, symbol="cuCtxCreate_v3", a=5, detail=1),
    Function("cuCtxCreate", Class.CONTEXT_CREATE, symbol="cuCtxCreate_v4", a=4, detail=1),
    Function("cuDevicePrimaryCtxRetain", Class.CONTEXT_CREATE, a=2),
    Function("cuCtxSetCurrent", Class.CONTEXT_SET),
    Function("cuCtxPushCurrent", Class.CONTEXT_SET, symbol="cuCtxPushCurrent_v2", detail=1),
    Function("cuCtxPopCurrent", Class.CONTEXT_SET, symbol="cuCtxPopCurrent_v2", detail=2),
    Function("cuStreamCreate", Class.STREAM_CREATE, b=2),
    Function("cuStreamCreateWithPriority", Class.STREAM_CREATE, b=2),
    Function("cuStreamDestroy", Class.STREAM_DESTROY),
    Function("cuStreamDestroy", Class.STREAM_DESTROY, symbol="cuStreamDestroy_v2"),
    Function("cuStreamWaitEvent", Class.WAIT_EVENT, per_thread=_SZ),
    Function("cuStreamBeginCapture", Class.CAPTURE_BEGIN, symbol="cuStreamBeginCapture_v2", per_thread=_SZ),
    Function("cuStreamBeginCaptureToGraph", Class.CAPTURE_BEGIN, per_thread=_SZ),
    Function("cuStreamEndCapture", Class.CAPTURE_END, per_thread=_SZ),
    Function("cuEventCreate", Class.EVENT_CREATE),
    Function("cuEventDestroy", Class.EVENT_DESTROY),
    Function("cuEventDestroy", Class.EVENT_DESTROY, symbol="cuEventDestroy_v2"),
    Function("cuEventRecord", Class.EVENT_RECORD, per_thread=_SZ, stream=2),
    Function("cuEventRecordWithFlags", Class.EVENT_RECORD, per_thread=_SZ, stream=2),
    Function("cuMemAlloc", Class.ALLOC, symbol="cuMemAlloc_v2", a=2, detail=Memory.DEVICE),
    Function("cuMemAllocPitch", Class.ALLOC_PITCH, symbol="cuMemAllocPitch_v2", detail=Memory.DEVICE),
    Function("cuMemCreate", Class.ALLOC, a=2, detail=Memory.DEVICE),
    Function("cuMemAllocAsync", Class.ALLOC, per_thread=_SZ, a=2, detail=Memory.ASYNC),
    Function("cuMemAllocFromPoolAsync", Class.ALLOC, per_thread=_SZ, a=2, detail=Memory.ASYNC),
    Function("cuMemAllocManaged", Class.ALLOC, a=2, detail=Memory.MANAGED),
    Function("cuMemAllocHost", Class.ALLOC, symbol="cuMemAllocHost_v2", a=2, detail=Memory.HOST),
    Function("cuMemHostAlloc", Class.ALLOC, a=2, detail=Memory.HOST),
    Function("cuMemHostRegister", Class.ALLOC, symbol="cuMemHostRegister_v2", a=2, detail=Memory.REGISTERED),
    Function("cuMemFree", Class.FREE, symbol="cuMemFree_v2", detail=Memory.DEVICE),
    Function("cuMemRelease", Class.FREE, detail=Memory.DEVICE),
    Function("cuMemFreeAsync", Class.FREE, per_thread=_SZ, detail=Memory.ASYNC),
    Function("cuMemFreeHost", Class.FREE, detail=Memory.HOST),
    Function("cuMemHostUnregister", Class.FREE, detail=Memory.REGISTERED),
    _copy("cuMemcpy", per_thread=_DS, a=3, detail=Direction.DEFAULT),
    _copy("cuMemcpyHtoD", symbol="cuMemcpyHtoD_v2", per_thread=_DS, a=3, detail=Direction.HTOD),
    _copy("cuMemcpyDtoH", symbol="cuMemcpyDtoH_v2", per_thread=_DS, a=3, detail=Direction.DTOH),
    _copy("cuMemcpyDtoD", symbol="cuMemcpyDtoD_v2", per_thread=_DS, a=3, detail=Direction.DTOD),
    _copy("cuMemcpyHtoA", symbol="cuMemcpyHtoA_v2", per_thread=_DS, a=4, detail=Direction.HTOD),
    _copy("cuMemcpyAtoH", symbol="cuMemcpyAtoH_v2", per_thread=_DS, a=4, detail=Direction.DTOH),
    _copy("cuMemcpyDtoA", symbol="cuMemcpyDtoA_v2", per_thread=_DS, a=4, detail=Direction.DTOD),
    _copy("cuMemcpyAtoD", symbol="cuMemcpyAtoD_v2", per_thread=_DS, a=4, detail=Direction.DTOD),
    _copy("cuMemcpyAtoA", symbol="cuMemcpyAtoA_v2", per_thread=_DS, a=5, detail=Direction.DTOD),
    _copy("cuMemcpy2D", symbol="cuMemcpy2D_v2", per_thread=_DS, kind=Class.COPY_DRIVER_2D),
    _copy("cuMemcpy2DUnaligned", symbol="cuMemcpy2DUnaligned_v2", per_thread=_DS, kind=Class.COPY_DRIVER_2D),
    _copy("cuMemcpy3D", symbol="cuMemcpy3D_v2", per_thread=_DS, kind=Class.COPY_DRIVER_3D),
    _copy("cuMemcpyPeer", per_thread=_DS, a=5, detail=Direction.PTOP),
    Function("cuMemcpyAsync", Class.COPY, per_thread=_SZ, a=3, detail=Direction.DEFAULT),
    Function("cuMemcpyHtoDAsync", Class.COPY, "cuMemcpyHtoDAsync_v2", _SZ, a=3, detail=Direction.HTOD),
    Function("cuMemcpyDtoHAsync", Class.COPY, "cuMemcpyDtoHAsync_v2", _SZ, a=3, detail=Direction.DTOH),
    Function("cuMemcpyDtoDAsync", Class.COPY, "cuMemcpyDtoDAsync_v2", _SZ, a=3, detail=Direction.DTOD),
    Function("cuMemcpyHtoAAsync", Class.COPY, "cuMemcpyHtoAAsync_v2", _SZ, a=4, detail=Direction.HTOD),
    Function("cuMemcpyAtoHAsync", Class.COPY, "cuMemcpyAtoHAsync_v2", _SZ, a=4, detail=Direction.DTOH),
    Function("cuMemcpy2DAsync", Class.COPY_DRIVER_2D, "cuMemcpy2DAsync_v2", _SZ),
    Function("cuMemcpy3DAsync", Class.COPY_DRIVER_3D, "cuMemcpy3DAsync_v2", _SZ),
    Function("cuMemcpyPeerAsync", Class.COPY, per_thread=_SZ, a=5, detail=Direction.PTOP),
    Function("cuMemcpyBatchAsync", Class.COPY_BATCH, per_thread=_SZ, detail=Direction.DEFAULT),
    Function("cuMemcpyBatchAsync", Class.COPY_BATCH, "cuMemcpyBatchAsync_v2", _SZ, detail=Direction.DEFAULT),
    Function("cuMemcpyWithAttributesAsync", Class.COPY, per_thread=_SZ, a=3, detail=Direction.DEFAULT),
    *(
        Function(f"cuMemsetD{bits}", Class.MEMSET, f"cuMemsetD{bits}_v2", _DS, False, True, a=3, shift=shift, detail=6)
        for shift, bits in enumerate((8, 16, 32))
    ),
    *(
        Function(f"cuMemsetD{bits}Async", Class.MEMSET, per_thread=_SZ, a=3, shift=shift, detail=Direction.MEMSET)
        for shift, bits in enumerate((8, 16, 32))
    ),
    *(
        Function(f"cuMemsetD2D{bits}", Class.MEMSET, f"cuMemsetD2D{bits}_v2", _DS, False, True, 4, 5, 0, 0, shift, 6)
        for shift, bits in enumerate((8, 16, 32))
    ),
    *(
        Function(f"cuMemsetD2D{bits}Async", Class.MEMSET, per_thread=_SZ, a=4, b=5, shift=shift, detail=6)
        for shift, bits in enumerate((8, 16, 32))
    ),
    *_plain("cuInit", "cuModuleLoad", "cuModuleLoadData", "cuModuleLoadDataEx", "cuLibraryLoadData"),
    *_plain("cuLibraryLoadFromFile", "cuGraphInstantiateWithFlags", "cuMemMap", "cuMemUnmap"),
]

_NCCL = [
    # a: count, b: datatype, d: reduction, stream: communicator
    Function("ncclAllReduce", Class.COLLECTIVE, a=3, b=4, d=5, stream=6),
    Function("ncclReduce", Class.COLLECTIVE, a=3, b=4, d=5, stream=7),
    Function("ncclReduceScatter", Class.COLLECTIVE, a=3, b=4, d=5, stream=6),
    Function("ncclBroadcast", Class.COLLECTIVE, a=3, b=4, stream=6),
    Function("ncclBcast", Class.COLLECTIVE, a=2, b=3, stream=5),
    Function("ncclAllGather", Class.COLLECTIVE, a=3, b=4, stream=5),
    Function("ncclAlltoAll", Class.COLLECTIVE, a=3, b=4, stream=5),
    Function("ncclGather", Class.COLLECTIVE, a=3, b=4, stream=6),
    Function("ncclScatter", Class.COLLECTIVE, a=3, b=4, stream=6),
    Function("ncclSend", Class.COLLECTIVE, a=2, b=3, stream=5),
    Function("ncclRecv", Class.COLLECTIVE, a=2, b=3, stream=5),
    Function("ncclCommInitRank", Class.COMM_CREATE),
    Function("ncclCommInitRankConfig", Class.COMM_CREATE),
    Function("ncclCommInitAll", Class.COMM_CREATE_ALL),
    Function("ncclCommSplit", Class.COMM_SPLIT),
    Function("ncclCommDestroy", Class.COMM_DESTROY),
    Function("ncclCommAbort", Class.COMM_DESTROY),
    Function("ncclGroupEnd", Class.NCCL_PLAIN),
]

_LIBC = [
    Function("setenv", Class.ENVIRONMENT, detail=1),
    Function("unsetenv", Class.ENVIRONMENT, detail=2),
    Function("putenv", Class.ENVIRONMENT, detail=3),
]

FUNCTIONS: dict[Layer, list[Function]] = {"runtime": _RUNTIME, "driver": _DRIVER, "nccl": _NCCL, "libc": _LIBC}

_FIRST: dict[Layer, int] = {"runtime": 1, "driver": 256, "nccl": 512, "libc": 640}
"""Numbers of functions begin here; they are part of recordings, so new functions go to the end of their list."""


def _numbers() -> dict[tuple[Layer, str], int]:
    numbers: dict[tuple[Layer, str], int] = {}
    for layer, functions in FUNCTIONS.items():
        for at, function in enumerate(functions):
            numbers.setdefault((layer, function.name), _FIRST[layer] + at)
    return numbers


API_NUMBERS = _numbers()
API_NAMES = {number: name for (_, name), number in API_NUMBERS.items()}
WAITING_APIS = {
    API_NUMBERS[layer, function.name]
    for layer, functions in FUNCTIONS.items()
    for function in functions
    if function.waits
}

SYMBOLS: dict[Layer, dict[str, tuple[Function, bool]]] = {
    layer: {symbol: (function, per_thread) for function in functions for symbol, per_thread in function.symbols()}
    for layer, functions in FUNCTIONS.items()
}
"""Exported name → the function, and whether this is its per-thread twin."""
