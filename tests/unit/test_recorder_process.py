"""Programs under ``gpuflight run -- python …``: their process trees, their ends, and that they do not notice."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")
pytest.importorskip("cupti")
from tests.unit.recorder_rig import Read, until

from gpuflight.events.files import find_sessions
from gpuflight.events.recorder import lifecycle
from gpuflight.events.recorder.control import Request, ask, find_recorders

ROOT = Path(__file__).parents[2]
PATIENCE_S = 20
SITE = """
    # an interpreter's own sitecustomize; here it also plays CUPTI
    import os, sys, types
    sys.path.insert(0, {root!r})
    os.environ["OWN_SITECUSTOMIZE"] = "ran"
    from tests.fakes.cupti_driver import FakeCupti
    package = types.ModuleType("cupti")
    package.cupti = FakeCupti()
    sys.modules["cupti"] = package
"""


class Rig:
    """A place for a program, its sitecustomize and its sessions."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.sessions = place / "sessions"
        site = place / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(textwrap.dedent(SITE).format(root=str(ROOT)))
        self.environment = {**os.environ, "PYTHONPATH": str(site), "HOME": str(place)}

    def command(self, program: str, *options: str, python: tuple[str, ...] = ()) -> list[str]:
        (self.place / "train.py").write_text(textwrap.dedent(program))
        start = [sys.executable, "-m", "gpuflight.cli", "run", "--out", str(self.sessions), "--no-metrics", *options]
        return [*start, "--", sys.executable, *python, str(self.place / "train.py")]

    def run(self, program: str, *options: str, **how: Any) -> subprocess.CompletedProcess[str]:
        command = self.command(program, *options, python=how.pop("python", ()))
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False, **how
        )

    def start(self, program: str, *options: str, plain: bool = False) -> subprocess.Popen[str]:
        command = self.command(program, *options)
        return subprocess.Popen(
            command[command.index("--") + 1 :] if plain else command,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def read(self) -> Read:
        return Read(self.sessions)

    def all(self) -> list[Read]:
        return [Read(Path(found.path)) for found in find_sessions(str(self.sessions))]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A library of the driver's name."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    place = tmp_path_factory.mktemp("cuda")
    (place / "cuda.c").write_text("int cuInit(unsigned int flags) { return 0; }\n")
    library = place / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(place / "cuda.c")]
    subprocess.run(command, check=True)
    yield str(library)


def scope_names(read: Read) -> list[str]:
    return [read.text("scope", row["name_id"]) for row in read.rows("scope") if row["event_type"] == 0]


def test_a_program_is_recorded_without_a_change(rig: Rig, libcuda: str) -> None:
    """Its arguments, input, output and exit code are its own; its interpreter's sitecustomize has run."""
    program = f"""
        import ctypes, os, sys, time
        assert "gpuflight" not in {{name.partition(".")[0] for name in vars()}}
        ctypes.CDLL({libcuda!r})
        from cupti import cupti
        while not cupti.enabled: time.sleep(0.005)
        for _ in range(5): cupti.launch("gemm")
        print(sys.stdin.read().upper(), os.environ["OWN_SITECUSTOMIZE"])
        print("to stderr", file=sys.stderr)
        sys.exit(23)
    """
    done = rig.run(program, "--name", "training", input="typed")
    assert (done.returncode, done.stdout) == (23, "TYPED ran\n"), done.stderr
    assert done.stderr == f"gpuflight: recording into {rig.sessions}\nto stderr\n"
    read = rig.read()
    assert not read.losses
    assert (read.one("session_start")["app"], len(read.rows("kernel"))) == ("training", 5)
    assert read.one("session_end")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_every_rank_has_its_session(rig: Rig, libcuda: str, method: str) -> None:
    """Children of every kind record what they do on GPUs; those that do nothing there leave no session."""
    program = f"""
        import ctypes, multiprocessing, os, subprocess, sys, time
        def rank(number):
            if number:
                ctypes.CDLL({libcuda!r})
                from cupti import cupti
                while not cupti.enabled: time.sleep(0.005)
                for _ in range(number): cupti.launch(f"rank{{number}}")
            return os.getpid()
        if __name__ == "__main__":
            with multiprocessing.get_context({method!r}).Pool(1, maxtasksperchild=1) as pool:
                pids = pool.map(rank, [0, 1, 2], chunksize=1)
                pool.close(); pool.join()
            print(*pids)
    """
    done = rig.run(program, "--quiet")
    assert done.returncode == 0, done.stderr
    pids = [int(word) for word in done.stdout.split()]
    sessions = {read.one("session_start")["pid"]: read for read in rig.all()}
    assert set(pids[1:]) < set(sessions) and pids[0] not in sessions and len(sessions) == 3
    for number, pid in enumerate(pids[1:], 1):
        read = sessions[pid]
        assert [read.text("kernel", row["kernel_id"]) for row in read.rows("kernel")] == [f"rank{number}"] * number
        assert read.one("session_end") and not read.losses
    assert not done.stderr


def test_programs_that_a_program_starts_are_recorded_too(rig: Rig, libcuda: str) -> None:
    """As torchrun starts its ranks; a child that is no Python does not notice."""
    program = f"""
        import subprocess, sys
        child = '''
        import ctypes, time
        ctypes.CDLL({libcuda!r})
        from cupti import cupti
        while not cupti.enabled: time.sleep(0.005)
        cupti.launch("in the child")
        '''
        import textwrap
        subprocess.run([sys.executable, "-c", textwrap.dedent(child)], check=True)
        print(subprocess.run(["/bin/sh", "-c", "echo plain"], capture_output=True, text=True).stdout, end="")
    """
    done = rig.run(program, "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "plain\n", "")
    kernels = [[r.text("kernel", k["kernel_id"]) for k in r.rows("kernel")] for r in rig.all()]
    assert sorted(kernels) == [[], ["in the child"]]


def test_a_child_of_a_process_that_uses_cuda_leaves_cupti_alone(rig: Rig, libcuda: str) -> None:
    """It cannot use CUDA; its scopes are recorded all the same, and the parent's session stays whole."""
    program = f"""
        import ctypes, os, time, gpuflight
        ctypes.CDLL({libcuda!r})
        from cupti import cupti
        while not cupti.enabled: time.sleep(0.005)
        cupti.launch("before")
        for _ in range(3):
            child = os.fork()
            if not child:
                with gpuflight.scope("in the child"): pass
                gpuflight.shutdown()
                os._exit(0)
            os.waitpid(child, 0)
        cupti.launch("after")
    """
    done = rig.run(program)
    assert done.returncode == 0, done.stderr
    reads = sorted(rig.all(), key=lambda read: len(read.rows("kernel")))
    assert [scope_names(read) for read in reads] == [["in the child"]] * 3 + [[]]
    told = reads[0].capability("kernel_events")
    assert (told["status"], told["reason_code"]) == ("skipped", "forked_after_cuda")
    assert [reads[3].text("kernel", k["kernel_id"]) for k in reads[3].rows("kernel")] == ["before", "after"]
    assert all(not read.losses and read.one("session_end") for read in reads)


STUCK = """
    import ctypes, sys, gpuflight
    recorder = gpuflight.init("t", folder={folder!r}, wait_for_cuda=False, metrics_interval_s=0)
    from cupti import cupti
    cupti.launch("k")
    print("ready", flush=True)
    {wait}
"""
NATIVE = "libc = ctypes.CDLL(None); m = ctypes.create_string_buffer(64); [libc.pthread_mutex_lock(m) for _ in '12']"


@pytest.mark.parametrize("wait", ["sys.stdin.read()", NATIVE], ids=["in Python", "in a call that never returns"])
def test_sigterm_ends_the_recording_and_then_the_program(rig: Rig, wait: str) -> None:
    with rig.start(STUCK.format(wait=wait, folder=str(rig.sessions)), plain=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == -signal.SIGTERM
    read = rig.read()
    assert not read.losses
    assert len(read.rows("kernel")) == 1 and read.one("session_end")


def test_sigkill_leaves_a_session_that_can_be_read(rig: Rig) -> None:
    wait = "cupti.deliver(); recorder.flush(); print('x', flush=True); sys.stdin.read()"
    with rig.start(STUCK.format(wait=wait, folder=str(rig.sessions)), plain=True) as p:
        assert p.stdout is not None
        assert [p.stdout.readline(), p.stdout.readline()] == ["ready\n", "x\n"]
        p.kill()
        p.wait(PATIENCE_S)
    read = rig.read()
    assert len(read.rows("kernel")) == 1
    assert set(read.losses) == {"unclean_end"}


def test_a_program_that_handles_sigterm_keeps_its_handler(rig: Rig) -> None:
    program = """
        import os, signal, sys, gpuflight
        def handle(number, frame):
            print("handled", flush=True)
            sys.exit(4)
        signal.signal(signal.SIGTERM, handle)
        print("ready", flush=True)
        sys.stdin.read()
    """
    with rig.start(program) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "handled\n"
        assert process.wait(PATIENCE_S) == 4
    assert rig.read().one("session_end")


def test_ctrl_c_is_the_programs(rig: Rig) -> None:
    with rig.start("import sys\nprint('ready', flush=True)\nsys.stdin.read()") as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == -signal.SIGINT
        assert "KeyboardInterrupt" in process.stderr.read()
    assert rig.read().one("session_end")


@pytest.mark.parametrize("flag", ["-S", "-I", "-E", "-uE"])
def test_interpreters_that_keep_us_out_are_told_of(rig: Rig, flag: str) -> None:
    done = rig.run("print('ran')", python=(flag,))
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "nothing will be recorded: python -" in done.stderr and "gpuflight.init()" in done.stderr
    assert not rig.sessions.exists()


def test_an_interpreter_without_gpuflight_says_so_once_and_runs(rig: Rig) -> None:
    shadow = rig.place / "site" / "gpuflight"
    shadow.mkdir()
    (shadow / "__init__.py").write_text("raise ImportError('no gpuflight here')")
    program = """
        import subprocess, sys
        if len(sys.argv) == 1:
            subprocess.run([sys.executable, __file__, "again"], check=True)
        print("ran", flush=True)
    """
    options = {"GPUFLIGHT_RECORDER": '{"folder":"/nonexistent"}'}
    inject = ROOT / "src" / "gpuflight" / "events" / "recorder" / "inject"
    paths = {"PYTHONPATH": f"{inject}:{rig.place / 'site'}"}
    (rig.place / "train.py").write_text(textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, str(rig.place / "train.py")],
        env={**rig.environment, **options, **paths},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ran\nran\n")
    assert done.stderr.splitlines()[0].endswith("cannot import gpuflight: no gpuflight here")


def test_without_numpy_the_session_says_so(rig: Rig) -> None:
    """And without cupti-python: the program runs, scopes are recorded, the session says what is missing."""
    program = """
        import sys
        sys.modules["numpy"] = None
        import gpuflight
        recorder = gpuflight.init(wait_for_cuda=False)
        with gpuflight.scope("step"): print("ran")
    """
    done = rig.run(program, "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")
    read = rig.read()
    assert scope_names(read) == ["step"]
    # the program itself was recorded from its start on, waiting for CUDA; nothing of numpy is needed for that
    assert read.capability("kernel_events")["reason_code"] == "cuda_not_used"


def test_a_running_program_is_asked_and_told(rig: Rig) -> None:
    """--on-demand: nothing until somebody asks; then so many kernels."""
    program = """
        import sys, gpuflight
        from cupti import cupti
        import ctypes
        print("ready", flush=True)
        for line in sys.stdin:
            for _ in range(10): cupti.launch("k")
            cupti.deliver()
            print("done", flush=True)
    """
    options = ("--on-demand", "--quiet")
    with rig.start(program, *options) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        until(lambda: find_recorders([str(rig.sessions)]))
        (folder,) = find_recorders([str(rig.sessions)])
        assert ask(folder, Request("status")).state == "waiting"
        answer = ask(folder, Request("start", launches=10))
        assert (answer.ok, answer.state) == (True, "waiting for CUDA")
        assert "has not loaded the CUDA driver" in answer.why
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
    assert not find_recorders([str(rig.sessions)])


def test_importing_gpuflight_imports_nothing_else() -> None:
    program = "import sys; before = set(sys.modules); import gpuflight; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert set(done.stdout.split()) - {"__future__"} == {"gpuflight"}


def test_children_that_may_use_cuda_later_carry_next_to_nothing() -> None:
    inject = ROOT / "src" / "gpuflight" / "events" / "recorder" / "inject"
    environment = {**os.environ, "PYTHONPATH": str(inject), "GPUFLIGHT_RECORDER": '{"always":false}'}
    program = "import sys, threading; print(threading.active_count(), {'msgspec', 'numpy', 'cupti'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stdout.strip() == "2 set()"


def test_gpuflight_itself_runs_in_a_recorded_tree(rig: Rig) -> None:
    program = """
        import subprocess, sys
        command = [sys.executable, "-m", "gpuflight.cli", "run", "--dump-config"]
        print("interval_s" in subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    """
    done = rig.run(program, "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_forks_while_other_threads_import_launch_and_write(rig: Rig) -> None:
    """A child never waits for what a thread of its parent was in the middle of: an import, a write, a delivery."""
    done = rig.run(
        """
        import os, threading, time, warnings
        import cupti.cupti as played
        import gpuflight

        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later, of what is done here on purpose
        gpuflight.init(wait_for_cuda=False)
        stop = threading.Event()

        def work():
            while not stop.is_set():
                with gpuflight.scope("work"):
                    for _ in range(100):
                        played.launch("k")
                played.deliver()
                time.sleep(0.001)

        worker = threading.Thread(target=work)
        worker.start()
        for number in range(30):
            child = os.fork()
            if not child:
                if number % 10 == 0:
                    with gpuflight.scope("child"):
                        pass
                gpuflight.shutdown()
                os._exit(0)
            end = time.monotonic() + 5
            while not (ended := os.waitpid(child, os.WNOHANG))[0]:
                if time.monotonic() > end:
                    os.kill(child, 9)
                    stop.set()
                    raise SystemExit(f"child {number} hangs")
                time.sleep(0.001)
            assert ended[1] == 0
        stop.set()
        worker.join()
        """,
        "--quiet",
    )
    assert (done.returncode, done.stderr) == (0, "")
    sessions = rig.all()
    assert len(sessions) == 4
    assert not any(read.losses for read in sessions)


def test_a_fork_waits_for_imports_of_other_threads_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    held, let_go = threading.Event(), threading.Event()

    def importing() -> None:
        with lifecycle.imports:
            held.set()
            let_go.wait(PATIENCE_S)

    thread = threading.Thread(target=importing)
    thread.start()
    held.wait(PATIENCE_S)
    monkeypatch.setattr(lifecycle, "_IMPORTS_S", 0.01)
    lifecycle._before_fork()
    lifecycle._after_fork()
    let_go.set()
    thread.join(PATIENCE_S)
    lifecycle._before_fork()
    assert lifecycle._holds_imports
    other = threading.Thread(target=lambda: got.append(lifecycle.imports.acquire(blocking=False)))
    got: list[bool] = []
    other.start()
    other.join(PATIENCE_S)
    lifecycle._after_fork()
    assert got == [False]
    assert lifecycle.imports.acquire(blocking=False)
    lifecycle.imports.release()
