"""What recording and probing cost a program on a GPU: the same loop with our recorder, with probes, and with neither.

For a machine with an NVIDIA GPU; without one it says so and ends. Two loops:

* ``cuda``: 20,000 launches of a small kernel by the driver API (ctypes and PTX; nothing but the driver is needed), in
  steps of 200 with a wait after each;
* ``torch``: 200 training steps of a small network, where PyTorch is installed; also under ``torch.profiler``.

Every side runs in a process of its own, in turn, ROUNDS times. Printed: median time per step and its ratio to neither
(the floor is 1), the kernels that were launched, seen and lost, and for torch the kernels and their total time as the
profiler has them. Probes need root (or CAP_BPF and CAP_PERFMON) and a kernel with BTF.

    python benchmarks/gpu_overhead.py [--keep DIR]     # DIR: sessions and table, to be kept as test data
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

ROUNDS = 3
LAUNCHES, PER_STEP = 20_000, 200
TORCH_STEPS = 200
PATIENCE_S = 120
PTX = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry spin(.param .u32 turns) {
  .reg .pred p; .reg .u32 n;
  ld.param.u32 n, [turns];
again:
  sub.u32 n, n, 1;
  setp.ne.u32 p, n, 0;
  @p bra again;
  ret;
}
\0"""


# --- the loops, each in a process of its own ---


def cuda_loop() -> list[float]:
    """Seconds of each step."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: Any) -> None:
        code = getattr(cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: CUDA error {code}")

    call("cuInit", 0)
    device, context, module, function = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuModuleLoadData", ctypes.byref(module), PTX)
    call("cuModuleGetFunction", ctypes.byref(function), module, b"spin")
    turns = ctypes.c_uint(200)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(turns))
    launch = cuda.cuLaunchKernel
    steps = []
    for step in range(LAUNCHES // PER_STEP + 5):
        begin = time.perf_counter()
        for _ in range(PER_STEP):
            launch(function, 8, 1, 1, 64, 1, 1, 0, None, parameters, None)
        call("cuCtxSynchronize")
        if step >= 5:
            steps.append(time.perf_counter() - begin)
    return steps


def torch_loop(around: Callable[[Callable[[], None]], None] = lambda body: body()) -> list[float]:
    """Seconds of each step."""
    import torch

    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(512, 512), torch.nn.ReLU())]
    network = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    batch = torch.randn(64, 512, device="cuda")
    steps: list[float] = []

    def step() -> None:
        optimizer.zero_grad()
        network(batch).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()

    for _ in range(20):
        step()

    def measured() -> None:
        for _ in range(TORCH_STEPS):
            begin = time.perf_counter()
            step()
            steps.append(time.perf_counter() - begin)

    around(measured)
    return steps


def child(loop: str, side: str, folder: str) -> None:
    """One run; its figures as a line of JSON."""
    told: dict[str, Any] = {}
    recorder = None
    if side == "recorder":
        import gpuflight

        recorder = gpuflight.init(loop, folder=folder)
    if side == "profiler":
        import torch
        from torch.profiler import ProfilerActivity, profile

        def profiled(body: Callable[[], None]) -> None:
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                body()
            events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
            kernels = [e for e in events if not e.name.startswith(("Memcpy", "Memset"))]
            told["kernels"] = len(kernels)
            told["kernel_ms"] = sum(event.time_range.elapsed_us() for event in kernels) / 1e3

        steps = torch_loop(profiled)
    else:
        steps = cuda_loop() if loop == "cuda" else torch_loop()
    told["step_us"] = statistics.median(steps) * 1e6
    if recorder is not None:
        recorder.close()
        told["session"] = recorder.path
        told["why"] = str(recorder.capture.why or "")
    print(json.dumps(told))


# --- around them ---


def run(loop: str, side: str, folder: str) -> dict[str, Any]:
    command = [sys.executable, os.path.abspath(__file__), "--child", loop, side, folder]
    watcher = None
    if side == "probes":
        watch = [sys.executable, "-m", "gpuflight.cli", "run", "--offline", str(PATIENCE_S), "--interval", "1"]
        watch += ["--collectors", "cuda_probes,nvml", "--out", f"{folder}/probes", "--force"]
        watcher = subprocess.Popen(watch, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(3)  # until it looks for programs to attach to
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    finally:
        if watcher is not None:
            watcher.terminate()
            watcher.wait(30)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["?"])[-1]}
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "session" in told:
        told.update(recorded(told["session"]))
    return told


def recorded(folder: str) -> dict[str, Any]:
    """What is in a session: kernels, their time, what was lost."""
    from gpuflight.events.files import read_session
    from gpuflight.events.ledger import Ledger

    ledger = Ledger()
    count, total_ns = 0, 0
    for batch in read_session(folder, ledger):
        if batch.table == "kernel":
            count += batch.count
            total_ns += int(batch.columns["duration_ns"].sum())
    lost = {entry.reason: entry.detail for entry in ledger if entry.reason == "marked_loss"}
    return {"kernels": count, "kernel_ms": total_ns / 1e6, "lost": lost}


def why_not() -> str:
    """Why there is nothing to measure, empty if there is."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no CUDA driver here (libcuda.so.1)"
    count = ctypes.c_int()
    code = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    return f"the driver cannot be used: CUDA error {code}" if code else "" if count.value else "the driver sees no GPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", metavar="DIR", help="keep sessions, recordings and the table there")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child)
        return
    reason = subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r});"
                             "import gpu_overhead; print(gpu_overhead.why_not())"],
                            capture_output=True, text=True, check=False)  # fmt: skip
    if (why := reason.stdout.strip() or reason.stderr.strip()[-200:]) and why:
        print(f"nothing measured: {why}.")
        print(
            "This is for a machine with an NVIDIA GPU: it compares a loop with the recorder, with probes, with neither."
        )
        return
    folder = arguments.keep or tempfile.mkdtemp(prefix="gpuflight-overhead-")
    os.makedirs(folder, exist_ok=True)
    table: list[dict[str, Any]] = []
    try:
        for loop in ("cuda", "torch"):
            if loop == "torch" and find_spec("torch") is None:
                print("torch: not installed, left out")
                continue
            sides = ["neither", "recorder", "probes", *(["profiler"] if loop == "torch" else [])]
            found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
            for _ in range(ROUNDS):
                for side in sides:
                    found[side].append(run(loop, side, folder))
            table += report(loop, found)
        with open(f"{folder}/overhead.json", "w", encoding="utf-8") as file:
            json.dump(table, file, indent=2)
        if arguments.keep:
            print(f"\nkept in {folder}")
    finally:
        if not arguments.keep:
            shutil.rmtree(folder)


def report(loop: str, found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    launched = f"{LAUNCHES + 5 * PER_STEP:,} launched" if loop == "cuda" else f"{TORCH_STEPS} steps"
    print(f"\n{loop} ({launched})")
    good = {side: [run for run in runs if "step_us" in run] for side, runs in found.items()}
    floor = statistics.median(run["step_us"] for run in good["neither"]) if good["neither"] else None
    rows = []
    for side, runs in found.items():
        if not good[side] or floor is None:
            print(f"  {side:9} failed: {runs[-1].get('failed', '')}")
            continue
        step = statistics.median(run["step_us"] for run in good[side])
        last = good[side][-1]
        more = f", {last['kernels']:,} kernels, {last['kernel_ms']:.2f} ms" if "kernels" in last else ""
        more += f", lost: {last['lost']}" if last.get("lost") else ""
        more += f", {last['why']}" if last.get("why") else ""
        print(f"  {side:9} {step:10.1f} us per step, {step / floor:5.2f} x neither{more}")
        rows.append({"loop": loop, "side": side, "step_us": step, "ratio": step / floor, **last})
    return rows


if __name__ == "__main__":
    main()
