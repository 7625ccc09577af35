"""What a subscriber is: a place that rounds are delivered to.

The delivery engine (``gpuflight.subscribers.delivery``) gives each subscriber its own bounded queue and its own worker
thread, and calls it by these rules, which hold for every subscriber (tests/unit/test_plugin_conformance.py):

* ``__init__`` takes settings and touches nothing: no file, no connection, no thread.
* ``start`` opens what delivering needs. It runs in the worker, so it may be slow without delaying a round. It is called
  again, with growing pauses, while it raises a retryable DeliveryError.
* ``deliver`` hands over one round and returns when the round is safe there. It is called by one thread, one round at a
  time, in order, never before ``start`` succeeded, and not more often than ``expected_update_interval_s``. It need not
  see every round: under the policy ``latest`` a newer round takes the place of one that waits. A round is shared: it
  must not be changed.
* ``flush`` makes what was delivered so far safe, until ``deadline_s`` of ``time.monotonic``. It may be called after any
  ``deliver`` and, once ``start`` succeeded, always before ``close``.
* ``close`` gives back everything. It is called once, also when ``start`` was never called or failed; it must not raise
  for that.
* What goes wrong is a DeliveryError: ``retryable`` if the same round may succeed later (full disk, no network), not
  retryable if it never will (no right, refused). Any other exception counts as not retryable. None of them reaches
  another subscriber or a round.

A **PackedSubscriber** splits ``deliver`` in two, so that rounds can wait on disk (policy ``spool``): ``pack`` makes
bytes of a round and changes nothing (it may be called by another thread), ``send`` hands the bytes over.

With ``window_items`` above 0 it takes the next rounds that wait on disk while those before are under way, all by the
one thread of the worker: ``begin`` hands over some and does not wait, ``settle`` waits for the oldest, ``recall`` takes
back what is under way, which the worker calls after every error and before it ends.
"""

from __future__ import annotations

import errno
import uuid
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field, field_validator

from gpuflight.errors import DeliveryError
from gpuflight.registry import Plugin
from gpuflight.rounds import Round
from gpuflight.subscribers.queue import Policy
from gpuflight.subscribers.retry import BACKOFF_FIRST_S, BACKOFF_MAX_S

if TYPE_CHECKING:
    from gpuflight.subscribers.netguard import Rules

INSTANCE_ID = uuid.uuid4().hex
"""Names this run of gpuflight: round numbers begin anew with each."""


class SubscriberSettings(BaseModel):
    """What every subscriber takes; each adds its own."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    can_spool: ClassVar[bool] = False

    type: str = Field(default="", description="which subscriber")
    name: str | None = Field(default=None, min_length=1, description="name of this one, unique; its type when null")
    expected_update_interval_s: float = Field(
        default=0.0, ge=0, description="least time between two rounds delivered here (s); 0 takes every round"
    )
    policy: Policy = Field(
        default="latest",
        description="when rounds come faster than they go: keep the latest, keep all on disk, or let the round wait",
    )
    max_items: int = Field(default=1000, ge=1, description="rounds in the queue (spool, block)")
    max_bytes: int = Field(
        default=256 * 1024 * 1024, ge=1, description="size of the queue (bytes; spool: on disk, the oldest go first)"
    )
    block_timeout_s: float = Field(
        default=1.0,
        ge=0,
        le=3600,
        description="block: longest time a round waits for room here (s), then it is dropped",
    )
    synchronous: bool = Field(
        default=False, description="block: a round also waits until it is delivered here, within the same time"
    )
    deliver_deadline_s: float = Field(
        default=30.0, gt=0, le=3600, description="time one delivery may take (s); one that takes longer shows as stuck"
    )
    retry_first_s: float = Field(
        default=BACKOFF_FIRST_S, gt=0, le=3600, description="pause before the first retry (s); each next one doubles"
    )
    retry_max_s: float = Field(default=BACKOFF_MAX_S, gt=0, le=86_400, description="longest pause before a retry (s)")
    retry_max_attempts: int = Field(default=0, ge=0, description="tries per round before it is dropped; 0: no limit")

    @field_validator("policy")
    @classmethod
    def _only_bytes_can_lie_on_disk(cls, value: Policy) -> Policy:
        if value == "spool" and not cls.can_spool:
            raise ValueError("this subscriber cannot keep rounds on disk; latest or block")
        return value


class PackedSettings(SubscriberSettings):
    """What every subscriber takes that can also keep its rounds on disk."""

    can_spool: ClassVar[bool] = True

    spool_folder: str | None = Field(
        default=None,
        min_length=1,
        description="folder of the spool; null: $STATE_DIRECTORY/spool, /var/lib/gpuflight/spool for root,"
        " else ~/.local/state/gpuflight/spool",
    )


class Outside(Struct, frozen=True):
    """What a subscriber touches outside of this process: files by path, receivers by URL."""

    paths: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()


class Subscriber(Plugin, family="subscribers", package="gpuflight.subscribers"):
    """Base of every subscriber. ``settings`` is an instance of ``settings_class``; ``label`` names this one."""

    settings_class: ClassVar[type[Any] | None] = SubscriberSettings

    def __init__(self, settings: Any = None) -> None:
        self.settings: Any = settings if settings is not None else self._default_settings()
        self.label: str = self.settings.name or self.name
        self.rules: Rules | None = None
        """What it may touch; None when whoever configured it may say so. See ``outside``."""

    @classmethod
    def _default_settings(cls) -> Any:
        return cls.settings_class() if cls.settings_class is not None else SubscriberSettings()

    @property
    def expected_update_interval_s(self) -> float:
        """Least time between two rounds delivered here, s; 0 for every round."""
        return float(self.settings.expected_update_interval_s)

    def outside(self) -> Outside | None:
        """What it touches outside of this process, so that it can be checked; None: unknown, and then it cannot be
        created over REST. It has to keep to ``rules`` also while it runs: names resolve anew and links change."""
        return None

    def start(self) -> None:
        """Open what delivering needs. Raises DeliveryError."""

    @abstractmethod
    def deliver(self, completed: Round) -> None:
        """Hand over one round. Raises DeliveryError."""

    def trial(self, completed: Round) -> None:
        """Show that a delivery would succeed, on an instance of its own that is started and then closed. What the
        receiver has must stay usable. Raises DeliveryError."""
        self.deliver(completed)

    def flush(self, deadline_s: float) -> None:
        """Make what was delivered safe, until ``deadline_s`` of ``time.monotonic``. Raises DeliveryError."""

    def close(self) -> None:
        """Give back everything; the last call."""


class Parcel(Struct, frozen=True, kw_only=True):
    """A round ready to be sent: its number, its time (ns since the epoch) and its bytes.

    ``base`` is the number of the round that a difference starts from, None for a whole round. ``key`` is the same for
    every try and for no other round.
    """

    number: int
    time_ns: int
    key: str
    data: bytes
    base: int | None = None


def parcel(completed: Round, data: bytes, base: int | None = None) -> Parcel:
    """The bytes of a round, with all that has to be known to send them later."""
    key = f"{INSTANCE_ID}-{completed.number}"
    return Parcel(number=completed.number, time_ns=completed.time_ns, key=key, data=data, base=base)


class PackedSubscriber(Subscriber):
    """A subscriber whose rounds can wait as bytes."""

    settings_class: ClassVar[type[Any] | None] = PackedSettings
    window_items: ClassVar[int] = 0
    """How many rounds that wait on disk may be under way at a time, by ``begin`` and ``settle``; 0 if each is sent for
    itself, by ``send``."""

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        self._last_number: int | None = None

    @abstractmethod
    def pack(self, completed: Round, after: int | None) -> Parcel:
        """The round as bytes. ``after`` is the number of the round that the receiver has before it, None if unknown: a
        difference makes sense only from that one."""

    @abstractmethod
    def send(self, packed: Parcel) -> None:
        """Hand over one round. Raises DeliveryError."""

    def begin(self, batch: list[Parcel]) -> int:
        """Hand over several rounds, in order, after those that are under way, and do not wait until they have arrived.
        Returns how many of the first are under way now: at least one. Raises DeliveryError if the first cannot be; then
        none of the batch is, and those before are settled first."""
        raise NotImplementedError

    def settle(self, wait_s: float) -> int:
        """Wait until the oldest round that is under way has arrived, for at most ``wait_s``; returns how many of the
        oldest have arrived since it was asked last. Raises DeliveryError if the oldest has not and will not, which is
        so ``deliver_deadline_s`` after it was begun at the latest. Those after it are begun again, after ``recall``."""
        raise NotImplementedError

    def recall(self) -> None:
        """Take back what is under way, if anything is, so that it does not overtake what is begun later. Bounded in
        time."""

    def deliver(self, completed: Round) -> None:
        """Pack and send."""
        self.send(self.pack(completed, self._last_number))
        self._last_number = completed.number


# What may pass by itself or with someone's help, while the round is still worth keeping.
_RETRYABLE = frozenset(
    (
        errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.EMFILE, errno.ENFILE,
        errno.ENOMEM, errno.ETIMEDOUT, errno.EBUSY,
    )
)  # fmt: skip


def delivery_error(error: OSError, what: str) -> DeliveryError:
    """An OSError as a DeliveryError, retryable if the system may recover from it by itself."""
    return DeliveryError(f"{what}: {error.strerror or error}", retryable=error.errno in _RETRYABLE)
