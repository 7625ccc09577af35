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
"""

from __future__ import annotations

import errno
from abc import abstractmethod
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from gpuflight.errors import DeliveryError
from gpuflight.registry import Plugin
from gpuflight.rounds import Round

Policy = Literal["latest"]


class SubscriberSettings(BaseModel):
    """What every subscriber takes; each adds its own."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    type: str = Field(default="", description="which subscriber")
    name: str | None = Field(default=None, description="name of this one, unique; its type when null")
    expected_update_interval_s: float = Field(
        default=0.0, ge=0, description="least time between two rounds delivered here (s); 0 takes every round"
    )
    policy: Policy = Field(default="latest", description="when rounds come faster than they go: keep the latest")


class Subscriber(Plugin, family="subscribers", package="gpuflight.subscribers"):
    """Base of every subscriber. ``settings`` is an instance of ``settings_class``; ``label`` names this one."""

    settings_class: ClassVar[type[Any] | None] = SubscriberSettings

    def __init__(self, settings: Any = None) -> None:
        self.settings: Any = settings if settings is not None else self._default_settings()
        self.label: str = self.settings.name or self.name

    @classmethod
    def _default_settings(cls) -> Any:
        return cls.settings_class() if cls.settings_class is not None else SubscriberSettings()

    @property
    def expected_update_interval_s(self) -> float:
        """Least time between two rounds delivered here, s; 0 for every round."""
        return float(self.settings.expected_update_interval_s)

    def start(self) -> None:
        """Open what delivering needs. Raises DeliveryError."""

    @abstractmethod
    def deliver(self, completed: Round) -> None:
        """Hand over one round. Raises DeliveryError."""

    def flush(self, deadline_s: float) -> None:
        """Make what was delivered safe, until ``deadline_s`` of ``time.monotonic``. Raises DeliveryError."""

    def close(self) -> None:
        """Give back everything; the last call."""


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
