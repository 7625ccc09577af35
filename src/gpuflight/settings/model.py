"""The shape of the settings: what there is, its unit, its default, its bounds.

The blocks under ``collectors``, ``subscribers``, ``consume``, ``events`` and ``rules`` belong to layers above, which
this one does not know: they are kept as they come and checked there by gpuflight.cli.plugin_settings.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr

LogLevel = Literal["debug", "info", "warning", "error"]

Count = Annotated[int, Field(ge=1)]


class Block(BaseModel):
    """Base of every block: unknown keys and non-finite numbers are errors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Limits(Block):
    """How far one round may go; a round that hits a limit says so (``truncated_by``)."""

    max_depth: Count = Field(default=16, description="waves of expansion")
    max_nodes: Count = Field(default=200_000, description="entities in one graph")
    max_edges: Count = Field(default=1_000_000, description="edges in one graph")
    round_deadline_s: float = Field(default=30.0, gt=0, description="time one round may take (s)")


class History(Block):
    """What is kept of past rounds."""

    max_bytes: Count = Field(
        default=64 * 1024 * 1024, description="memory for past rounds (bytes); the oldest go first"
    )


class Tls(Block):
    """Certificate of the server, as PEM files."""

    certificate_file: str = Field(description="path of the certificate chain")
    key_file: str = Field(description="path of the private key")


class Auth(Block):
    """Who may talk to the server. Without a token it listens on loopback only."""

    token: SecretStr | None = Field(default=None, description="access token, of role admin")
    token_file: str | None = Field(default=None, description="path of a file that holds one access token")
    store_file: str | None = Field(
        default=None,
        description="path of the file that `gpuflight token` keeps; null: /var/lib/gpuflight/tokens.json for root,"
        " else ~/.local/state/gpuflight/tokens.json",
    )


class Reach(Block):
    """What subscribers that are created over REST may touch. Link-local and metadata addresses are never called."""

    folders: list[str] = Field(default_factory=list, description="folders in and below which they may write files")
    url_hosts: list[str] = Field(
        default_factory=list,
        description="hosts they may call: `name`, `*.domain`, address or network, each also with `:port`; `*` is all",
    )
    loopback: bool = Field(default=False, description="whether they may call this machine itself")


RoleName = Literal["viewer", "operator", "admin"]


class Server(Block):
    """Where ``gpuflight-server`` listens."""

    host: str | None = Field(
        default="127.0.0.1", min_length=1, description="address to listen on; null: on `socket` only"
    )
    port: int = Field(default=9477, ge=0, le=65535, description="TCP port; 0 takes a free one")
    socket: str | None = Field(
        default=None, min_length=1, description="path of a unix socket to listen on as well; none when null"
    )
    socket_users: dict[str, RoleName] = Field(
        default_factory=dict,
        description="roles of users on the unix socket, by name or uid; root and the user of the server are admins",
    )
    socket_groups: dict[str, RoleName] = Field(
        default_factory=dict, description="roles of groups on the unix socket, by name or gid"
    )
    tls: Tls | None = Field(default=None, description="TLS of the address, not of the unix socket; off when null")
    auth: Auth = Field(default_factory=Auth, description="who may talk to the server")
    max_request_bytes: Count = Field(default=1024 * 1024, description="body of one request (bytes)")
    max_connections: Count = Field(default=2000, description="connections at a time, idle ones and streams included")
    request_timeout_s: float = Field(
        default=30.0, gt=0, le=600, description="time for a request to come in, and for its first byte to begin (s)"
    )
    send_timeout_s: float = Field(
        default=60.0, gt=0, le=3600, description="a client that reads nothing for so long is cut off (s)"
    )
    stop_deadline_s: float = Field(default=10.0, gt=0, le=600, description="time to end after SIGTERM (s)")
    allowed_hosts: list[str] = Field(
        default_factory=list, description="names that clients may call the server by, beside loopback names"
    )
    reach: Reach = Field(default_factory=Reach, description="what subscribers that are created over REST may touch")
    state_folder: str | None = Field(
        default=None,
        min_length=1,
        description="folder for what outlives the server: subscribers created over REST; null: $STATE_DIRECTORY,"
        " /var/lib/gpuflight for root, else ~/.local/state/gpuflight",
    )
    cors_origins: list[str] = Field(
        default_factory=list, description="origins of web pages that may use the API, as https://host:port"
    )


class Remote(Block):
    """Another instance that is pulled; an interval or timeout of its own goes before those of `collectors.remote`."""

    url: str = Field(min_length=1, description="base URL of the instance")
    name: str | None = Field(default=None, description="namespace of its entities; its own host name when null")
    token: SecretStr | None = Field(default=None, description="access token of that instance")
    ca_file: str | None = Field(default=None, description="certificate authorities (PEM); the system's when null")
    interval_s: float | None = Field(default=None, ge=0.1, le=86_400, description="time between two requests (s)")
    timeout_s: float | None = Field(default=None, gt=0, le=600, description="longest time one answer may take (s)")


class Probes(Block):
    """Probes in the kernel (docs/probes.md)."""

    backend: Literal["auto", "libbpf", "bcc", "off"] = Field(
        default="auto", description="what loads them; auto: libbpf, and bcc where that cannot"
    )
    own_cost: bool = Field(
        default=True,
        description="have the kernel count what they cost; every BPF program of the host then takes some 40 ns longer",
    )


class SubscriberEntry(BaseModel):
    """One place where rounds are delivered; the further keys depend on ``type`` (``gpuflight plugins``)."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    type: str = Field(min_length=1, description="which subscriber, as `gpuflight plugins` lists it")
    name: str | None = Field(default=None, description="name of this one, unique; its type when null")


class Settings(Block):
    """All settings. ``Settings()`` are the defaults; ``gpuflight.settings.load`` also reads environment and file."""

    interval_s: float = Field(
        default=5.0, ge=0.01, le=86_400, description="time from the start of a round to the next (s)"
    )
    limits: Limits = Field(default_factory=Limits, description="how far one round may go")
    history: History = Field(default_factory=History, description="what is kept of past rounds")
    tombstone_rounds: int = Field(
        default=3, ge=0, description="rounds that an entity which vanished stays, marked as ended"
    )
    collectors: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="per collector: `enabled`, and its own settings"
    )
    subscribers: list[SubscriberEntry] = Field(default_factory=list, description="where rounds are delivered")
    server: Server = Field(default_factory=Server, description="where gpuflight-server listens")
    remotes: list[Remote] = Field(default_factory=list, description="other instances that are pulled")
    probes: Probes = Field(default_factory=Probes, description="probes in the kernel (docs/probes.md)")
    consume: dict[str, Any] = Field(
        default_factory=dict, description="what `gpuflight-server --consume` reads and where it writes (docs/fleet.md)"
    )
    events: dict[str, Any] = Field(
        default_factory=dict, description="GPU sessions that agents send to gpuflight-server (docs/events.md)"
    )
    rules: dict[str, Any] = Field(default_factory=dict, description="how rounds are judged (docs/rules.md)")
    log_level: LogLevel = Field(default="warning", description="least severity that is logged to stderr")

    _file: dict[str, Any] = PrivateAttr(default_factory=dict)
    """What the file said: plugin blocks from a file are checked strictly, those from the environment are text."""

    _file_name: str = PrivateAttr(default="")
