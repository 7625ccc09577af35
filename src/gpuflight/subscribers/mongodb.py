"""The subscriber that keeps the newest state of a host in MongoDB, with what its rounds said (docs/mongodb.md)."""

from __future__ import annotations

import os
import re
from typing import Any

import zstandard
from pydantic import Field, SecretStr, field_validator

from gpuflight.errors import DeliveryError, InputError
from gpuflight.graph.codec import decode_document, graph_of
from gpuflight.graph.namespaces import NAME_PATTERN, name_from
from gpuflight.round_documents import StoredRound, stored_document, stored_round
from gpuflight.rounds import Round
from gpuflight.sources.mongo_client import MongoAddress, MongoOptions, journaled, split_uri
from gpuflight.subscribers.base import INSTANCE_ID, Outside, PackedSettings, PackedSubscriber, Parcel, parcel
from gpuflight.subscribers.encoding import compressed
from gpuflight.subscribers.mongo_writer import MongoWriter
from gpuflight.subscribers.netguard import ANYTHING, Refused, check_url, is_address, resolve, split_url

_DATABASE = re.compile(r"[A-Za-z0-9_\-]{1,38}")
# Of a connection string that somebody gives from afar: no files, no proxies, no ways to log in that ask the cloud.
_HARMLESS_OPTIONS = frozenset(
    (
        "appname", "authmechanism", "authsource", "compressors", "directconnection", "journal", "maxidletimems",
        "retryreads", "retrywrites", "ssl", "tls", "w", "wtimeoutms", "zlibcompressionlevel",
    )
)  # fmt: skip
_HARMLESS_LOGINS = frozenset(("", "SCRAM-SHA-1", "SCRAM-SHA-256", "PLAIN"))


class MongoDBSettings(PackedSettings):
    """Settings of the MongoDB subscriber."""

    uri: SecretStr = Field(
        description="connection string, mongodb:// or mongodb+srv://, with user and password; shown masked"
    )
    database: str = Field(default="gpuflight", description="name of the database")
    namespace: str | None = Field(
        default=None,
        pattern=f"^{NAME_PATTERN}$",
        description="whose rounds these are, the first part of every _id; null: the host name",
    )
    retention_days: float = Field(
        default=7.0,
        ge=0,
        le=36_500,
        description="how long rounds, findings that ended and elements that are gone are kept (days); 0: for ever",
    )
    tls_ca_file: str | None = Field(
        default=None,
        min_length=1,
        description="path of PEM certificates to trust instead of the system's; turns TLS on",
    )
    tls_certificate_key_file: str | None = Field(
        default=None, min_length=1, description="path of our own certificate with its key (PEM); turns TLS on"
    )

    @field_validator("uri")
    @classmethod
    def _is_a_connection_string(cls, value: SecretStr) -> SecretStr:
        split_uri(value.get_secret_value())
        return value

    @field_validator("database")
    @classmethod
    def _is_a_database(cls, value: str) -> str:
        if not _DATABASE.fullmatch(value):
            raise ValueError("must be letters, digits, _ or -, at most 38 of them")
        return value


class MongoDB(PackedSubscriber):
    """Keeps the newest state of a host in MongoDB, and what its rounds said."""

    name = "mongodb"
    settings_class = MongoDBSettings

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._writer: MongoWriter | None = None

    def outside(self) -> Outside | None:
        """One server of its own name only: where others lead, or DNS, cannot be checked beforehand."""
        settings = self.settings
        address = split_uri(settings.uri.get_secret_value())
        if address.srv or len(address.hosts) != 1 or not address.options.keys() <= _HARMLESS_OPTIONS:
            return None
        if address.options.get("authmechanism", "").upper() not in _HARMLESS_LOGINS:
            return None
        files = (
            settings.tls_ca_file, settings.tls_certificate_key_file,
            settings.spool_folder and f"{settings.spool_folder}/spool",
        )  # fmt: skip
        return Outside(paths=tuple(path for path in files if path), urls=tuple(_urls(address)))

    def start(self) -> None:
        settings = self.settings
        uri = settings.uri.get_secret_value()
        try:
            pinned = self._checked(split_uri(uri))
        except Refused as error:
            raise DeliveryError(str(error), retryable=False) from error
        options = MongoOptions(
            uri=journaled(uri),
            timeout_s=float(settings.deliver_deadline_s),
            tls_ca_file=settings.tls_ca_file or "",
            tls_certificate_key_file=settings.tls_certificate_key_file or "",
            address=pinned,
        )
        writer = MongoWriter(options, settings.database, float(settings.retention_days))
        writer.open()
        self._writer = writer

    def pack(self, completed: Round, after: int | None) -> Parcel:
        """Always the whole round: a database that was set back, or lost, has all again with the next one."""
        return parcel(completed, compressed(completed, "graph", "zstd"))

    def send(self, packed: Parcel) -> None:
        try:
            with zstandard.ZstdDecompressor().stream_reader(packed.data) as reader:
                document = decode_document(reader.read())
            stored = stored_document(
                self._namespace(str(document.env.get("hostname", ""))),
                packed.key.rpartition("-")[0],
                document,
                graph_of(document),
                packed.time_ns,
            )
        except (InputError, zstandard.ZstdError) as error:
            raise DeliveryError(f"the stored round {packed.number} cannot be read: {error}", retryable=False) from error
        self._write(stored)

    def deliver(self, completed: Round) -> None:
        """From memory, where what changed is known."""
        self._write(stored_round(self._namespace(completed.env.hostname), INSTANCE_ID, completed))

    def trial(self, completed: Round) -> None:
        """Writes one document into the collection ``trials`` and deletes it."""
        self._started().trial()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _write(self, stored: StoredRound) -> None:
        self._started().write(stored)

    def _namespace(self, hostname: str) -> str:
        return self.settings.namespace or name_from(hostname or os.uname().nodename)

    def _started(self) -> MongoWriter:
        if self._writer is None:
            raise DeliveryError("not started", retryable=False)
        return self._writer

    def _checked(self, address: MongoAddress) -> str:
        """The one address to connect to if somebody set this up from afar; empty if the driver may choose. Raises
        Refused, and DeliveryError if the name cannot be resolved now."""
        found: list[str] = []
        for url in _urls(address):
            target = check_url(url, self.rules) if self.rules is not None else split_url(url)
            try:
                found += resolve(target, self.rules or ANYTHING)
            except OSError as error:
                if self.rules is not None:
                    raise DeliveryError(f"{address.where}: {error}", retryable=True) from error
        if self.rules is None:
            return ""
        if self.outside() is None:
            raise Refused("a connection string that only the configuration can set up")
        in_uri = "true" in (address.options.get("tls"), address.options.get("ssl"))
        encrypted = in_uri or self.settings.tls_ca_file or self.settings.tls_certificate_key_file
        if encrypted and not is_address(address.hosts[0][0]):
            # The driver checks the certificate by what it connects to, which is the address that was checked here.
            raise Refused("TLS to a name can be set up in the configuration only; over REST give the address")
        return found[0]


def _urls(address: MongoAddress) -> list[str]:
    """The hosts in the form that the rules are written for."""
    if address.srv:
        return []
    return [f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}" for host, port in address.hosts]
