"""NCCL's RAS (reliability, availability, serviceability): asking the thread of it that runs in a rank's process.

What is known of it, from the user guide ("RAS"), src/ras/{client.cc,client_support.cc,ras_internal.h} of NVIDIA/nccl
between 2.24 and 2.31, and issues there:

* From 2.24 on every process with a communicator listens on TCP for clients, on ``localhost:28028`` or where
  NCCL_RAS_ADDR says; NCCL_RAS_ENABLE=0 switches RAS off. The socket has SO_REUSEPORT, so all processes of one user,
  of several jobs too, share the port, and the kernel chooses which one a connection goes to. Of a second user the
  bind fails, and the job goes on without.
* The protocol is lines that end in ``\\n``, in either case of letters. ``CLIENT PROTOCOL 2``: the server says ``SERVER
  PROTOCOL n`` (2 since 2.24) and does not look at the client's number. ``TIMEOUT s`` (whole seconds; 5 if not said):
  ``OK``. ``SET FORMAT json``: ``OK``, before 2.28.7 ``ERROR: Unknown command …``. ``STATUS`` or ``VERBOSE STATUS``: the
  answer, then the server closes. Newer versions have more (MONITOR, DIAGNOSTICS, and CONTROL, which changes the job);
  nothing here sends them.
* For STATUS the thread asks the threads of all processes over the network, which takes milliseconds where all answer.
  It waits for others as long as TIMEOUT says, and 5 s more at most. NCCL's client allows 1 s for the greeting, and
  tries another connection after that: a process that is stopped accepts connections, and answers none.
* RAS compares how many collectives of each kind the ranks of a communicator launched, and says who does not answer, or
  is dead (not reached for 60 s). Counts of a running job differ for moments. Where all launched the same and nothing
  moves, it says RUNNING and OK (nccl#1730).
* Asking can end the job: while it initialises in 2.26.2 (nccl#1669), and wherever ranks of a communicator are missing
  up to 2.28 (memory corruption, nccl#1762, fixed in 2.29.2). In 2.29.7 the text answer can while communicators are
  being made (nccl#2346); that in JSON does not compute what fails there.
* JSON of 2.28.9 lacks a comma in each missing rank.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import socket
import threading
import time
from collections.abc import Collection, Sequence

import msgspec
from msgspec import Struct

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.fs import FileSystem
from gpuflight.sources.netlink.wire import enter
from gpuflight.sources.recording import Tape

PORT = 28028
MAX_BYTES = 32 << 20
"""Longest answer. JSON has about 600 bytes per rank of each communicator."""

THREADS_AT_MOST = 8
_GREETING_S = 1.0
_GREETINGS = 3
_EXTRA_S = 5.0 + 2.0  # that RAS takes beyond its timeout, and ours
_LINE_BYTES = 1024
_BY_NAME = re.compile(r"libnccl\.so\.(\d+\.\d+[\d.]*)$")
_BY_PACKAGE = re.compile(r"nvidia_nccl_cu\d+-(\d[\d.]*)\.dist-info$")
_IN_PACKAGE = "/nvidia/nccl/lib/"


class Place(Struct, frozen=True, order=True):
    """Where RAS listens, by the kernel's table of sockets: never by what an environment says. ``netns`` is 0 for our
    own network namespace."""

    netns: int
    address: str
    port: int

    def __str__(self) -> str:
        where = f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"
        return f"{where} in netns {self.netns}" if self.netns else where


class Told(Struct):
    """What came of a question that began at ``asked_s``: the answer's text, or ``error``."""

    asked_s: float
    body: bytes = b""
    structured: bool = False
    error: str = ""
    hint: str = ""


class _Question:
    def __init__(self) -> None:
        self.told: Told | None = None
        self.link: socket.socket | None = None
        self.busy = False
        self.closed = False


class NcclRas:
    """Asks in threads of its own, one question at a time per place; ``told`` is the newest answer and never waits."""

    def __init__(self, tape: Tape | None = None) -> None:
        self._tape = tape if tape is not None else Tape()
        self._questions: dict[Place, _Question] = {}
        self._answered = threading.Condition()

    @property
    def replaying(self) -> bool:
        """Whether nothing may be asked, and answers come from a recording."""
        return self._tape.mode == "replay"

    def ask(self, place: Place, doors: Sequence[str], now_s: float, timeout_s: int) -> bool:
        """Begin to ask; False if that has to wait, as a question is under way there, or too many are. ``doors``:
        ``…/ns/net`` files through which its network namespace is entered."""
        question = self._questions.setdefault(place, _Question())
        if question.busy or sum(each.busy for each in self._questions.values()) >= THREADS_AT_MOST:
            return False
        question.busy = True

        def work() -> None:
            told = Told(now_s)
            try:
                told.body, told.structured = _ask(place, doors, timeout_s, question)
            except SourceUnavailable as error:
                told.error, told.hint = error.reason, error.hint
            except OSError as error:
                told.error = error.strerror or str(error) or type(error).__name__
            with self._answered:
                question.told, question.busy = told, False
                self._answered.notify_all()

        threading.Thread(target=work, name=f"nccl-ras {place}", daemon=True).start()
        return True

    def wait(self, places: Collection[Place], seconds: float) -> None:
        """Until all questions to ``places`` are answered, or the time is up."""
        with self._answered:
            self._answered.wait_for(lambda: not any(self._questions[place].busy for place in places), timeout=seconds)

    def told(self, place: Place) -> Told | None:
        """The newest answer of this place; None as long as there is none. Raises SourceUnavailable for what a
        recording does not hold, or holds damaged."""

        def live() -> bytes:
            question = self._questions.get(place)
            return msgspec.msgpack.encode(question.told if question is not None else None)

        if self._tape.mode == "live":
            question = self._questions.get(place)
            return question.told if question is not None else None
        try:
            return msgspec.msgpack.decode(self._tape.ask("nccl_ras", str(place), live), type=Told | None)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SourceUnavailable(f"the recorded answer of {place} cannot be read: {error}") from None

    def keep(self, places: Collection[Place]) -> None:
        """Forget all places but these."""
        for place in self._questions.keys() - set(places):
            _end(self._questions.pop(place))

    def close(self) -> None:
        """End all questions. May be called twice."""
        self.keep(())


def version_of(fs: FileSystem, root: str, library: str) -> str:
    """Of libnccl, by the file's name or the Python package that it is from; empty if neither says it. ``root``: a
    directory in which ``library`` is found."""
    named = _BY_NAME.search(library)
    if named is not None:
        return named[1]
    packages, found, _ = library.partition(_IN_PACKAGE)
    if found:
        with contextlib.suppress(OSError):
            for name in fs.listdir(root + packages):
                package = _BY_PACKAGE.match(name)
                if package is not None:
                    return package[1]
    return ""


def _end(question: _Question) -> None:
    question.closed = True
    link = question.link
    if link is not None:
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)


def _ask(place: Place, doors: Sequence[str], timeout_s: int, question: _Question) -> tuple[bytes, bool]:
    """The answer, and whether it is JSON. Raises OSError, SourceUnavailable."""
    if place.netns:
        _enter(place.netns, doors)
    connection = _greeted(place, question)
    try:
        if connection.command(f"TIMEOUT {timeout_s}") != "OK":
            raise SourceUnavailable("it does not take a timeout")
        structured = connection.command("SET FORMAT json") == "OK"
        connection.send("STATUS" if structured else "VERBOSE STATUS")
        return connection.rest(time.monotonic() + timeout_s + _EXTRA_S), structured
    except TimeoutError:
        raise SourceUnavailable(f"no answer within {timeout_s + _EXTRA_S:g} s") from None
    finally:
        question.link = None
        connection.close()


def _enter(netns: int, doors: Sequence[str]) -> None:
    why = "it is gone"
    for door in doors:
        try:
            if enter(netns, door):
                return
        except OSError as error:
            why = error.strerror or str(error)
    raise SourceUnavailable(f"its network namespace cannot be entered: {why}", "run as root or grant CAP_SYS_ADMIN")


def _greeted(place: Place, question: _Question) -> _Connection:
    for _ in range(_GREETINGS):
        if question.closed:
            break
        connection = _Connection(place, question)
        try:
            greeting = connection.command("CLIENT PROTOCOL 2")
            if greeting.startswith("SERVER PROTOCOL "):
                return connection
        except TimeoutError:
            connection.close()  # a process that is stopped: the next connection may go to another one
            continue
        except BaseException:
            connection.close()
            raise
        connection.close()
        raise SourceUnavailable("what listens there does not speak RAS's protocol")
    raise SourceUnavailable(
        f"{_GREETINGS} connections were not answered within {_GREETING_S:g} s each",
        "a process that is stopped, or hangs in the kernel, accepts connections and does not answer",
    )


class _Connection:
    def __init__(self, place: Place, question: _Question) -> None:
        family = socket.AF_INET6 if ":" in place.address else socket.AF_INET
        self._socket = question.link = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._kept = bytearray()
        try:
            self._socket.settimeout(_GREETING_S)
            self._socket.connect((reachable(place.address), place.port))
        except BaseException:
            self._socket.close()
            raise

    def send(self, command: str) -> None:
        self._socket.sendall(command.encode("ascii") + b"\n")

    def command(self, command: str) -> str:
        """Its one line of an answer. Raises TimeoutError."""
        self.send(command)
        deadline_s = time.monotonic() + _GREETING_S
        while b"\n" not in self._kept:
            if len(self._kept) > _LINE_BYTES:
                raise SourceUnavailable("what listens there does not speak RAS's protocol")
            if not self._receive(deadline_s):
                raise OSError(errno.ECONNRESET, "it closed the connection")
        line, _, self._kept = self._kept.partition(b"\n")
        return line.decode("ascii", "replace").strip()

    def rest(self, deadline_s: float) -> bytes:
        """All until it closes. Raises TimeoutError."""
        while self._receive(deadline_s):
            if len(self._kept) > MAX_BYTES:
                raise SourceUnavailable(f"its answer is larger than {MAX_BYTES >> 20} MiB")
        if not self._kept:
            raise OSError(errno.ECONNRESET, "it closed the connection")
        return bytes(self._kept)

    def _receive(self, deadline_s: float) -> bool:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._socket.settimeout(left_s)
        data = self._socket.recv(1 << 16)
        self._kept += data
        return bool(data)

    def close(self) -> None:
        self._socket.close()


def reachable(address: str) -> str:
    """Where to connect to for what listens on ``address``, an own one of its namespace: loopback for all addresses.
    Raises SourceUnavailable for one that needs an interface too."""
    found = ipaddress.ip_address(address)
    if found.is_unspecified:
        return "::1" if found.version == 6 else "127.0.0.1"
    if found.version == 6 and found.is_link_local:
        raise SourceUnavailable(f"it listens on the link-local address {address} only")
    return address
