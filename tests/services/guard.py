"""Runs a service for as long as somebody holds its lock: ``python guard.py LOCK LOG PROGRAM ARGUMENT…``.

Every user of the service has a shared ``flock`` on LOCK, which ends with the user, however that ends. As soon as nobody
has one, the service is killed; and if this guard is, the service goes with it. Prints the pid of the service.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import threading

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Exits with the status of the service."""
    lock_path, log_path, *argv = sys.argv[1:]
    libc = ctypes.CDLL(None)
    with open(log_path, "ab") as log:
        service = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
        )
    print(service.pid, flush=True)

    def kill_when_unused() -> None:
        lock = os.open(lock_path, os.O_RDWR)  # kept until the end of the process, so that nobody comes in meanwhile
        fcntl.flock(lock, fcntl.LOCK_EX)
        service.kill()

    threading.Thread(target=kill_when_unused, daemon=True).start()
    return service.wait()


if __name__ == "__main__":
    os._exit(main())
