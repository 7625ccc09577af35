"""Running another program for what only it can tell (``npu-smi``): never through a shell, never without a deadline."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import time

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.recording import Tape

MAX_OUTPUT_BYTES = 8 << 20
"""A program that writes more is ended."""

_ERROR_TAIL_BYTES = 4096


class Tools:
    """Programs of the machine. Which one is there is looked up once and again after ``LOOKUP_ROUNDS`` rounds."""

    LOOKUP_ROUNDS = 60

    def __init__(self, tape: Tape | None = None) -> None:
        self._tape = tape if tape is not None else Tape()
        self._found: dict[str, str | None] = {}

    def begin_round(self, number: int) -> None:
        """Forget now and then what was not installed: it may be by now."""
        if number % self.LOOKUP_ROUNDS == 0:
            self._found.clear()

    def which(self, name: str) -> str | None:
        """Path of a program on PATH; None without it."""
        if name not in self._found:
            try:
                answer = self._tape.ask("tools", f"which {name}", lambda: (shutil.which(name) or "").encode())
            except SourceUnavailable:  # not part of this recording
                answer = b""
            self._found[name] = answer.decode() or None
        return self._found[name]

    def run(self, argv: list[str], timeout_s: float) -> bytes:
        """Standard output of a program.

        Its whole process group is ended at the deadline. Both its outputs are read all the time, so that it can never
        block on a full pipe. Raises SourceUnavailable if it is missing, fails, takes too long or writes too much.
        """
        return self._tape.ask("tools", "run " + " ".join(argv), lambda: _run(argv, timeout_s))


def _run(argv: list[str], timeout_s: float) -> bytes:
    name = os.path.basename(argv[0])
    deadline = time.monotonic() + timeout_s
    environment = {**os.environ, "LC_ALL": "C"}  # we parse what it writes
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            close_fds=True,
        )
    except FileNotFoundError as error:
        raise SourceUnavailable(f"{name} is not installed") from error
    except OSError as error:
        raise SourceUnavailable(f"{name} cannot be started: {error.strerror}") from error
    try:
        output, errors = _drain(process, name, deadline, timeout_s)
        try:
            code = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise SourceUnavailable(f"{name} did not end within {timeout_s:g} s") from error
    finally:
        _end(process)
    if code != 0:
        said = (errors or output).decode("utf-8", "replace").strip().splitlines()
        how = f"was ended by signal {-code}" if code < 0 else f"failed with code {code}"
        raise SourceUnavailable(f"{name} {how}" + (f": {said[-1][:200]}" if said else ""))
    return output


def _drain(process: subprocess.Popen[bytes], name: str, deadline: float, timeout_s: float) -> tuple[bytes, bytes]:
    """Read both outputs until their end or the deadline; of stderr the tail is kept."""
    assert process.stdout is not None  # noqa: S101
    assert process.stderr is not None  # noqa: S101
    output, errors = bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        for stream, kept in ((process.stdout, output), (process.stderr, errors)):
            selector.register(stream, selectors.EVENT_READ, kept)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                raise SourceUnavailable(f"{name} did not answer within {timeout_s:g} s")
            for key, _ in selector.select(left):
                data = os.read(key.fd, 65_536)
                if not data:
                    selector.unregister(key.fileobj)
                key.data.extend(data)
            if len(output) > MAX_OUTPUT_BYTES:
                raise SourceUnavailable(f"{name} wrote more than {MAX_OUTPUT_BYTES >> 20} MiB")
            del errors[:-_ERROR_TAIL_BYTES]
    return bytes(output), bytes(errors)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the whole group (a descendant may hold the pipes) and reap the child, unless it cannot even be killed."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)  # a process in uninterruptible sleep stays; Popen reaps it later
