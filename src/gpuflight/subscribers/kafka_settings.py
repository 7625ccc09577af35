"""How to reach a Kafka cluster: typed settings, and what librdkafka makes of them. No Kafka client in here."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from gpuflight.settings.dump import is_secret
from gpuflight.subscribers.netguard import Refused, Target, is_address, split_url

Protocol = Literal["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"]
Mechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "GSSAPI", "OAUTHBEARER"]
Value = bool | int | float | str | SecretStr

_HOST = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
TOPIC = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")

# What is said elsewhere, or is not to be decided by settings: how to say it instead.
_SET_BY_US = {
    "bootstrap.servers": "brokers",
    "metadata.broker.list": "brokers",
    "security.protocol": "security_protocol",
    "ssl.ca.location": "tls_ca_file",
    "ssl.certificate.location": "tls_certificate_file",
    "ssl.key.location": "tls_key_file",
    "ssl.key.password": "tls_key_password",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.mechanisms": "sasl_mechanism",
    "sasl.username": "sasl_username",
    "sasl.password": "sasl_password",
    "compression.type": "message_compression",
    "compression.codec": "message_compression",
    "message.max.bytes": "max_message_bytes",
    "message.timeout.ms": "deliver_deadline_s",
    "delivery.timeout.ms": "deliver_deadline_s",
    "acks": "",
    "request.required.acks": "",
    "enable.idempotence": "",
    "enable.gapless.guarantee": "",
    "transactional.id": "",
    "group.id": "",
    "enable.auto.commit": "",
    "auto.offset.reset": "",
    "logger": "",
    "log_level": "",
    "test.mock.num.brokers": "",
}

# Sizes, times and names: nothing in it reaches a file, a program or another host.
_HARMLESS = re.compile(
    r"client\.(id|rack|dns\.lookup)|linger\.ms|queue\.buffering\.(max\.(messages|kbytes|ms)|backpressure\.threshold)"
    r"|batch\.(size|num\.messages)|compression\.level|partitioner|max\.in\.flight(\.requests\.per\.connection)?"
    r"|(message\.send\.max\.)?retries|retry\.backoff(\.max)?\.ms|request\.timeout\.ms"
    r"|socket\.(timeout\.ms|connection\.setup\.timeout\.ms|keepalive\.enable|nagle\.disable|(send|receive)\.buffer\.bytes"
    r"|max\.fails)|reconnect\.backoff(\.max)?\.ms|connections\.max\.idle\.ms|broker\.address\.(family|ttl)"
    r"|metadata\.max\.age\.ms|topic\.metadata\.[a-z.]+\.ms|ssl\.endpoint\.identification\.algorithm"
    r"|ssl\.(cipher\.suites|curves\.list|sigalgs\.list)"
)
_SECRET_TOO = frozenset(("ssl.key.pem", "sasl.oauthbearer.config"))


class KafkaConnection(BaseModel):
    """How to reach a cluster."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    brokers: list[str] = Field(
        min_length=1, max_length=100, description="brokers to ask for the others, host or host:port (9092)"
    )
    topic: str = Field(default="gpuflight.rounds", description="topic of the rounds")
    security_protocol: Protocol = Field(default="plaintext", description="TLS (ssl), SASL, both or neither")
    tls_ca_file: str | None = Field(
        default=None, min_length=1, description="path of PEM certificates to trust instead of the system's"
    )
    tls_certificate_file: str | None = Field(
        default=None, min_length=1, description="path of the PEM certificate to show to the brokers"
    )
    tls_key_file: str | None = Field(default=None, min_length=1, description="path of its PEM key")
    tls_key_password: SecretStr | None = Field(default=None, description="password of that key")
    sasl_mechanism: Mechanism | None = Field(
        default=None, description="how to log in, with sasl_plaintext and sasl_ssl"
    )
    sasl_username: str | None = Field(default=None, min_length=1, description="user (PLAIN, SCRAM)")
    sasl_password: SecretStr | None = Field(default=None, description="password of the user")
    client: dict[str, Value] = Field(
        default_factory=dict,
        description="further settings of librdkafka by their names there, such as linger.ms; secrets shown masked",
    )

    @field_validator("brokers")
    @classmethod
    def _are_brokers(cls, value: list[str]) -> list[str]:
        for broker in value:
            broker_target(broker)
        return value

    @field_validator("topic")
    @classmethod
    def _is_a_topic(cls, value: str) -> str:
        if not TOPIC.fullmatch(value):
            raise ValueError("must be the name of a topic: at most 249 letters, digits, dots, hyphens, underscores")
        return value

    @field_validator("client")
    @classmethod
    def _are_settings(cls, value: dict[str, Value]) -> dict[str, Value]:
        for name in value:
            if name in _SET_BY_US or name.endswith("_cb"):
                instead = _SET_BY_US.get(name)
                raise ValueError(f"{name} is set by {instead}" if instead else f"{name} is set by gpuflight")
        return {
            name: SecretStr(str(inner))
            if (is_secret(name.replace(".", "_")) or name in _SECRET_TOO) and not isinstance(inner, SecretStr)
            else inner
            for name, inner in value.items()
        }

    @model_validator(mode="after")
    def _fits_together(self) -> KafkaConnection:
        sasl = self.security_protocol.startswith("sasl")
        tls = self.security_protocol.endswith("ssl")
        if sasl and self.sasl_mechanism is None:
            raise ValueError(f"security_protocol {self.security_protocol} needs sasl_mechanism")
        if not sasl and (self.sasl_mechanism or self.sasl_username or self.sasl_password):
            raise ValueError("sasl_mechanism, sasl_username and sasl_password need security_protocol sasl_ssl")
        if not tls and (self.tls_ca_file or self.tls_certificate_file or self.tls_key_file):
            raise ValueError(
                "tls_ca_file, tls_certificate_file and tls_key_file need security_protocol ssl or sasl_ssl"
            )
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_certificate_file and tls_key_file go together")
        if (self.sasl_username is None) != (self.sasl_password is None):
            raise ValueError("sasl_username and sasl_password go together")
        by_password = self.sasl_mechanism is not None and self.sasl_mechanism.startswith(("PLAIN", "SCRAM"))
        if by_password and self.sasl_username is None:
            raise ValueError(f"sasl_mechanism {self.sasl_mechanism} needs sasl_username and sasl_password")
        return self


def broker_target(broker: str) -> Target:
    """A broker's host and port. Raises ValueError."""
    text = f"[{broker}]" if broker.count(":") > 1 and not broker.startswith("[") else broker
    try:
        target = split_url(f"kafka://{text}", ("kafka",))
    except Refused:
        target = None
    named = target is not None and (is_address(target.host) or _HOST.fullmatch(target.host))
    if target is None or not named or target.path != "/" or text.endswith("/"):
        raise ValueError(f"{broker!r} is not host or host:port")
    return target


def address_of(target: Target) -> str:
    """``host:port``, as librdkafka takes it."""
    return f"[{target.host}]:{target.port}" if ":" in target.host else f"{target.host}:{target.port}"


def beyond_reach(connection: KafkaConnection) -> list[str]:
    """What may reach files, programs, hosts or credentials of this machine that nobody has checked, as names of
    settings."""
    further = sorted(f"client.{name}" for name in connection.client if not _HARMLESS.fullmatch(name))
    return [*(["sasl_mechanism GSSAPI"] if connection.sasl_mechanism == "GSSAPI" else []), *further]


def files_of(connection: KafkaConnection) -> tuple[str, ...]:
    """Files that are read."""
    files = (connection.tls_ca_file, connection.tls_certificate_file, connection.tls_key_file)
    return tuple(path for path in files if path)


def librdkafka_config(connection: KafkaConnection) -> dict[str, Any]:
    """The connection in librdkafka's words, secrets in the clear."""
    found: dict[str, Any] = {
        "bootstrap.servers": ",".join(address_of(broker_target(broker)) for broker in connection.brokers),
        "client.id": "gpuflight",
        "security.protocol": connection.security_protocol,
        "ssl.ca.location": connection.tls_ca_file,
        "ssl.certificate.location": connection.tls_certificate_file,
        "ssl.key.location": connection.tls_key_file,
        "ssl.key.password": connection.tls_key_password,
        "sasl.mechanism": connection.sasl_mechanism,
        "sasl.username": connection.sasl_username,
        "sasl.password": connection.sasl_password,
        **connection.client,
    }
    return {name: _plain(value) for name, value in found.items() if value is not None}


def secrets_of(connection: KafkaConnection) -> list[str]:
    """What must be in no message and no log."""
    held = (connection.tls_key_password, connection.sasl_password, *connection.client.values())
    return [value.get_secret_value() for value in held if isinstance(value, SecretStr) and value.get_secret_value()]


def _plain(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return str(value).lower() if isinstance(value, bool) else value
