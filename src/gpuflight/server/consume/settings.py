"""The section ``consume`` of the settings: where rounds come from, where they go, and within what bounds."""

from __future__ import annotations

from urllib.parse import quote_plus

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from gpuflight.errors import ConfigError
from gpuflight.server.consume.kafka import OURS
from gpuflight.sources.mongo_client import MongoOptions, journaled, split_uri
from gpuflight.subscribers.kafka_settings import KafkaConnection

MIB = 1024 * 1024


class ConsumeMongo(BaseModel):
    """The database that the rounds go to, and that all servers of the fleet read."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    uri: SecretStr = Field(description="connection string, mongodb:// or mongodb+srv://; shown masked")
    username: str | None = Field(default=None, min_length=1, description="user, if the connection string names none")
    password: SecretStr | None = Field(default=None, description="password of that user")
    password_file: str | None = Field(
        default=None, min_length=1, description="path of a file that holds the password, in place of `password`"
    )
    database: str = Field(default="gpuflight", pattern=r"^[A-Za-z0-9_\-]{1,38}$", description="name of the database")
    tls_ca_file: str | None = Field(
        default=None, min_length=1, description="path of PEM certificates to trust instead of the system's"
    )
    tls_certificate_key_file: str | None = Field(
        default=None, min_length=1, description="path of a PEM file with the certificate and key to show"
    )
    retention_days: float = Field(
        default=7.0,
        ge=0,
        le=36_500,
        description="how long past rounds and what is gone are kept (days); 0: for ever",
    )
    timeout_s: float = Field(default=30.0, gt=0, le=600, description="longest time one round may take to write (s)")

    @field_validator("uri")
    @classmethod
    def _leads_somewhere(cls, value: SecretStr) -> SecretStr:
        split_uri(value.get_secret_value())
        return value

    @model_validator(mode="after")
    def _login_fits_together(self) -> ConsumeMongo:
        given = [value for value in (self.password, self.password_file) if value is not None]
        if len(given) != (self.username is not None):
            raise ValueError("username goes together with one of password and password_file")
        if self.username is not None and "@" in self.uri.get_secret_value():
            raise ValueError("username: the connection string names a user already")
        return self

    def full_uri(self) -> str:
        """The connection string with user and password. Reads ``password_file``. Raises ConfigError."""
        uri = self.uri.get_secret_value()
        if self.username is None:
            return uri
        password = self.password.get_secret_value() if self.password is not None else self._password_of_file()
        scheme, _, rest = uri.partition("://")
        return f"{scheme}://{quote_plus(self.username)}:{quote_plus(password)}@{rest}"

    def options(self) -> MongoOptions:
        """How to connect. Unless the connection string says otherwise, a write counts when it is in the journal: what
        Kafka is told to be done must not vanish with a database that is killed. Raises ConfigError."""
        return MongoOptions(
            uri=journaled(self.full_uri()),
            timeout_s=self.timeout_s,
            tls_ca_file=self.tls_ca_file or "",
            tls_certificate_key_file=self.tls_certificate_key_file or "",
        )

    def _password_of_file(self) -> str:
        where = f"consume.mongodb.password_file: {self.password_file}"
        try:
            with open(self.password_file or "", encoding="utf-8") as file:
                password = file.read(4096).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: {getattr(error, 'strerror', None) or 'no text'}") from None
        if not password:
            raise ConfigError(f"{where}: is empty")
        return password


class ConsumeSettings(KafkaConnection):
    """What ``gpuflight-server --consume kafka`` needs."""

    group: str = Field(
        default="gpuflight",
        min_length=1,
        max_length=255,
        description="consumer group, whose servers share the partitions",
    )
    mongodb: ConsumeMongo = Field(description="database that the rounds go to")
    writers_count: int = Field(default=2, ge=1, le=64, description="threads that write; a host's rounds are one's")
    max_queue_bytes: int = Field(
        default=128 * MIB, ge=1, description="rounds that wait to be written (bytes); beyond, nothing more is read"
    )
    max_queue_rounds: int = Field(default=1000, ge=1, description="rounds that wait to be written")
    max_unfinished_bytes: int = Field(
        default=256 * MIB, ge=1, description="parts that wait for others (bytes); beyond, the oldest round is given up"
    )
    unfinished_max_s: float = Field(
        default=300.0, gt=0, description="how long a part waits for others while the topic is read (s)"
    )
    max_message_bytes: int = Field(default=32 * MIB, ge=1, description="largest message that is looked at (bytes)")
    max_round_bytes: int = Field(default=512 * MIB, ge=1, description="largest round, decompressed (bytes)")
    max_held_elements: int = Field(
        default=1_000_000,
        ge=1,
        description="entities and edges held for differences to come; others are read again",
    )
    retry_first_s: float = Field(
        default=0.5, gt=0, le=3600, description="pause before the first retry (s), then doubled"
    )
    retry_max_s: float = Field(default=30.0, gt=0, le=3600, description="longest pause before a retry (s)")

    @field_validator("client")
    @classmethod
    def _are_not_ours(cls, value: dict[str, object]) -> dict[str, object]:
        for name in value:
            if name in OURS:
                raise ValueError(f"{name} is set by gpuflight")
        return value
