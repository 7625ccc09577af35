"""The one error tree of gpuflight.

GpuflightError
├── ConfigError           bad settings: exit code 2
├── InputError            a file or id that a command was given cannot be used: exit code 2
├── MissingExtra          an optional package is not installed; the message names the extra
├── SourceUnavailable     a source cannot be read: reason and hint; costs a collector its round
└── DeliveryError         a subscriber could not deliver; ``retryable`` says whether to try again
"""

from __future__ import annotations


class GpuflightError(Exception):
    """Base of every error that gpuflight raises on purpose. ``exit_code`` is what the CLI ends with."""

    exit_code = 1


class ConfigError(GpuflightError):
    """Settings that cannot be used; the message has one line per problem."""

    exit_code = 2


class InputError(GpuflightError):
    """A file, id or argument that cannot be used: what, where, what to do."""

    exit_code = 2


class MissingExtra(GpuflightError):
    """An optional package is not installed."""

    exit_code = 2

    def __init__(self, package: str, extra: str, what: str) -> None:
        super().__init__(f"{what} needs the package {package}: pip install 'gpuflight[{extra}]'")
        self.package = package
        self.extra = extra


class SourceUnavailable(GpuflightError):
    """A source of facts cannot be read.

    ``reason`` says what was found, ``hint`` what the user can do about it (may be empty).
    """

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(f"{reason} ({hint})" if hint else reason)
        self.reason = reason
        self.hint = hint


class DeliveryError(GpuflightError):
    """A subscriber could not deliver a round.

    ``retryable``: the same round may succeed later, not before ``retry_after_s`` if the receiver said so.
    ``blames_item``: the receiver answered and failed over this very round; others may pass.
    """

    def __init__(
        self, message: str, *, retryable: bool, retry_after_s: float | None = None, blames_item: bool = False
    ) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.retry_after_s = retry_after_s
        self.blames_item = blames_item
