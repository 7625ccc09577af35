"""What librdkafka reports, in one line each, and whether to try again."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any

from gpuflight.errors import DeliveryError

log = logging.getLogger(__name__)

# By name of the code (KafkaError.name()), so that no client is needed to judge. Whatever is not here may pass: brokers
# come back, topics are created, rights are given, quotas have room again. These never will, for this round.
_NEVER = frozenset(
    (
        "INVALID_MSG_SIZE", "INVALID_RECORD", "INVALID_REQUIRED_ACKS", "INVALID_TIMESTAMP", "POLICY_VIOLATION",
        "TOPIC_EXCEPTION", "UNSUPPORTED_COMPRESSION_TYPE", "UNSUPPORTED_FOR_MESSAGE_FORMAT", "UNSUPPORTED_VERSION",
        "_BAD_COMPRESSION", "_INVALID_ARG", "_NOT_IMPLEMENTED", "_UNSUPPORTED_FEATURE",
    )
)  # fmt: skip
TOO_LARGE = frozenset(("MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE"))
UNKNOWN_TOPIC = frozenset(("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION"))
_NO_RIGHT = frozenset(("TOPIC_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED"))
_NOBODY_ANSWERED = frozenset(
    ("_MSG_TIMED_OUT", "_TIMED_OUT", "_TRANSPORT", "_ALL_BROKERS_DOWN", "_PURGE_QUEUE", "_PURGE_INFLIGHT")
)
# How well an error that librdkafka tells in passing explains why nothing arrives.
_WEIGHT = {"_AUTHENTICATION": 4, "SASL_AUTHENTICATION_FAILED": 4, "_SSL": 4, "_RESOLVE": 3, "_TRANSPORT": 2}

_UNEXPLAINED = "in state APIVERSION_QUERY"
"""The first question of a client was not answered: so does a broker that expects another protocol."""

_VARIES = re.compile(r" \((after \d+ms in state [A-Z_0-9]+|_?[A-Z_]+)(, \d+ identical error\(s\) suppressed)?\)")
_THREAD = re.compile(r"^\[thrd:[^]]*\]: ")
_WHERE = re.compile(r"^(?:[a-z_]+://)?(?P<broker>[^/\s]+)/(?:bootstrap|\d+): ")


class Reasons:
    """What librdkafka told in passing since ``clear``: the line that explains most."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets = sorted(secrets, key=len, reverse=True)
        self.clear()

    def clear(self) -> None:
        """Forget it."""
        self._weight = 0
        self.text = ""
        self.fatal = False

    def note(self, error: Any) -> None:
        """One KafkaError (``error_cb``)."""
        self.fatal = self.fatal or bool(error.fatal())
        self._weigh(_WEIGHT.get(error.name(), 0), error.str())

    def log(self, level: int, line: str, *arguments: object) -> None:
        """One line of librdkafka's log (``logger``). It is told by no other way that a broker hangs up. Logged on only
        when debugging: each try to connect is a line of its own."""
        log.debug(line, *arguments)
        facility, *_, text = arguments or ("", line)
        if facility == "FAIL":
            self._weigh(1, _THREAD.sub("", str(text)))

    def _weigh(self, weight: int, text: str) -> None:
        if weight >= self._weight:
            hint = "; it may want another security_protocol" if _UNEXPLAINED in text else ""
            self._weight, self.text = weight, self.clean(text) + hint

    def clean(self, text: str) -> str:
        """Without what varies from one try to the next, and without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        text = _WHERE.sub(r"\g<broker>: ", _VARIES.sub("", text))
        return " ".join(text.split())


def delivery_error(error: Any, where: str, topic: str, reasons: Reasons, *, limit_bytes: int = 0) -> DeliveryError:
    """A KafkaError of a message or a request as a DeliveryError. ``where`` names the cluster."""
    name, text = error.name(), reasons.clean(error.str())
    if name in TOO_LARGE:
        line = (
            f"a message is larger than the broker takes, though none is larger than {limit_bytes} bytes: lower"
            f" max_message_bytes, or raise max.message.bytes of the topic {topic}"
        )
    elif name in UNKNOWN_TOPIC:
        line = f"there is no topic {topic}, and the brokers do not create it: create it, or let them"
    elif name in _NO_RIGHT:
        line = f"no right to write to the topic {topic}: {text}"
    elif reasons.text and name in _NOBODY_ANSWERED:
        line = reasons.text
    elif name in ("_MSG_TIMED_OUT", "_PURGE_QUEUE", "_PURGE_INFLIGHT"):
        line = "no acknowledgement in time"
    else:
        line = text
    return DeliveryError(
        f"kafka {where}: {line}",
        retryable=name not in _NEVER and name not in TOO_LARGE,
        blames_item=name in ("INVALID_RECORD", "INVALID_MSG"),
    )
