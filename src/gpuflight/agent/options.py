"""Flags, environment and configuration file of gpufl-agent, and ours, to settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from pydantic import ValidationError

from gpuflight.agent.settings import AgentFile, AgentSettings
from gpuflight.errors import ConfigError
from gpuflight.settings.dump import mask
from gpuflight.settings.files import read_config_file
from gpuflight.settings.problems import problems, validate
from gpuflight.subscribers.spool import state_folder


class Option(Struct, frozen=True):
    """``flag`` and ``variable``: its names. ``path``: where it goes, as in the configuration file."""

    flag: str
    variable: str
    path: str
    help: str
    kind: str = "text"
    """text, switch, or secret (hidden, and better not given as a flag)."""


OPTIONS = (
    Option("folder", "GPUFL_SOURCE_FOLDER", "", "folder with logs or session folders (default: .)"),
    Option("folders", "GPUFL_SOURCE_FOLDERS", "", "several, separated by commas"),
    Option("log-types", "GPUFL_LOG_TYPES", "", "channels (default: device,scope,system,sass)"),
    Option("type", "GPUFL_PUBLISHER_TYPE", "publisher.type", "http or kafka"),
    Option("host", "GPUFL_HTTP_HOST", "publisher.hostUrl", "http: receiver, https://host"),
    Option("url", "GPUFL_HTTP_URL", "publisher.hostUrl", "http: the same; or all of https://host/api/v1/events"),
    Option("api-version", "GPUFL_HTTP_API_VERSION", "publisher.apiVersion", "http: in the path (default: v1)"),
    Option("token", "GPUFL_HTTP_TOKEN", "publisher.authToken", "http: token or API key", "secret"),
    Option("token-file", "GPUFL_HTTP_TOKEN_FILE", "publisher.authTokenFile", "http: file with it, read again for each"),
    Option("timeout", "GPUFL_HTTP_TIMEOUT_SEC", "publisher.timeoutSeconds", "http: time to connect (s, default: 10)"),
    Option("deadline", "GPUFL_HTTP_DEADLINE_SEC", "publisher.deadlineSeconds", "time for a request (s, default: 60)"),
    Option("upload-mode", "GPUFL_AGENT_UPLOAD_MODE", "publisher.uploadMode", "http: stream or legacy"),
    Option("live", "GPUFL_AGENT_LIVE", "publisher.live", "http: lines as they are written, not windows", "switch"),
    Option("stream-max-lines", "GPUFL_AGENT_STREAM_MAX_LINES", "publisher.streamMaxLines", "lines at a time (5000)"),
    Option("stream-max-bytes", "GPUFL_AGENT_STREAM_MAX_BYTES", "publisher.streamMaxBytes", "their bytes (1000000)"),
    Option("max-body-bytes", "GPUFL_AGENT_MAX_BODY_BYTES", "publisher.maxBodyBytes", "larger windows go as lines"),
    Option("tls-ca-file", "GPUFL_TLS_CA_FILE", "publisher.tlsCaFile", "certificates to trust (PEM)"),
    Option("brokers", "GPUFL_KAFKA_BROKERS", "publisher.bootstrapServers", "kafka: host:port, separated by commas"),
    Option("topic-prefix", "GPUFL_KAFKA_TOPIC_PREFIX", "publisher.topicPrefix", "kafka: topics are PREFIX-CHANNEL"),
    Option("compression", "GPUFL_KAFKA_COMPRESSION", "publisher.compression", "kafka: none, gzip, snappy, lz4, zstd"),
    Option("kafka-linger-ms", "GPUFL_KAFKA_LINGER_MS", "publisher.lingerMs", "kafka: wait for more (ms, default: 100)"),
    Option("max-message-bytes", "GPUFL_KAFKA_MAX_MESSAGE_BYTES", "publisher.maxMessageBytes", "kafka: longest line"),
    Option("security-protocol", "GPUFL_KAFKA_SECURITY_PROTOCOL", "publisher.securityProtocol", "kafka: …"),
    Option("sasl-mechanism", "GPUFL_KAFKA_SASL_MECHANISM", "publisher.saslMechanism", "kafka: how to log in"),
    Option("sasl-username", "GPUFL_KAFKA_SASL_USERNAME", "publisher.saslUsername", "kafka: user"),
    Option("sasl-password", "GPUFL_KAFKA_SASL_PASSWORD", "publisher.saslPassword", "kafka: password", "secret"),
    Option("sasl-password-file", "GPUFL_KAFKA_SASL_PASSWORD_FILE", "publisher.saslPasswordFile", "kafka: file with it"),
    Option("archiver-endpoint", "GPUFL_ARCHIVER_ENDPOINT", "archiver.endpoint", "keep windows in S3: the server"),
    Option("archiver-bucket", "GPUFL_ARCHIVER_BUCKET", "archiver.bucket", "bucket"),
    Option("archiver-region", "GPUFL_ARCHIVER_REGION", "archiver.region", "region (default: nyc3)"),
    Option("archiver-access-key", "GPUFL_ARCHIVER_ACCESS_KEY", "archiver.accessKey", "access key", "secret"),
    Option("archiver-access-key-file", "GPUFL_ARCHIVER_ACCESS_KEY_FILE", "archiver.accessKeyFile", "file with it"),
    Option("archiver-secret-key", "GPUFL_ARCHIVER_SECRET_KEY", "archiver.secretKey", "secret key", "secret"),
    Option("archiver-secret-key-file", "GPUFL_ARCHIVER_SECRET_KEY_FILE", "archiver.secretKeyFile", "file with it"),
    Option("archiver-prefix", "GPUFL_ARCHIVER_PREFIX", "archiver.prefix", "what keys begin with (raw-events/)"),
    Option("archiver-checksum", "GPUFL_ARCHIVER_CHECKSUM", "archiver.checksum", "md5 or sha256"),
    Option("archiver-timeout", "GPUFL_ARCHIVER_TIMEOUT_SEC", "archiver.timeoutSeconds", "time for an upload (s, 60)"),
    Option("archiver-delete", "GPUFL_ARCHIVER_DELETE", "archiver.deleteAfterUpload", "delete then", "switch"),
    Option("cursor-file", "GPUFL_CURSOR_FILE", "cursorFile", "gpufl-agent's positions, taken over (./cursor.json)"),
    Option("state-folder", "GPUFL_AGENT_STATE_FOLDER", "stateFolder", "where what was sent is remembered"),
    Option("exit-when-drained", "GPUFL_AGENT_EXIT_WHEN_DRAINED", "exitWhenDrained", "end when all is sent", "switch"),
    Option("exit-if-empty", "GPUFL_AGENT_EXIT_IF_EMPTY", "exitIfEmpty", "the same, also if there is nothing", "switch"),
    Option("ignore-preexisting", "GPUFL_AGENT_IGNORE_PREEXISTING", "ignorePreexisting", "only what is new", "switch"),
    Option("prune-failed", "GPUFL_AGENT_PRUNE_FAILED", "pruneFailed", "delete sent ones of dead writers", "switch"),
    Option("retain-acked-payloads", "GPUFL_AGENT_RETAIN_ACKED_PAYLOADS", "", "keep windows: as it is anyway", "switch"),
    Option(
        "delete-acked-payloads", "GPUFL_AGENT_DELETE_ACKED_PAYLOADS", "deleteAckedPayloads",
        "delete windows that were acknowledged", "switch",
    ),
    Option("senders", "GPUFL_AGENT_SENDERS", "senders", "requests at a time (default: 4)"),
    Option("poll-interval", "GPUFL_AGENT_POLL_INTERVAL_SEC", "pollIntervalSeconds", "look for windows (s, 2)"),
    Option("settle", "GPUFL_AGENT_SETTLE_SEC", "settleSeconds", "wait for late windows (s, default: 4.5)"),
    Option("orphan-wait", "GPUFL_AGENT_ORPHAN_WAIT_SEC", "orphanWaitSeconds", "wait for a salvage (s, default: 30)"),
    Option("give-up-after", "GPUFL_AGENT_GIVE_UP_AFTER_SEC", "giveUpAfterSeconds", "(s, 300; 0: never)"),
)  # fmt: skip

ALIASES = {"exit-when-done": "exit-when-drained"}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
BY_FLAG = {option.flag: option for option in OPTIONS} | {
    alias: next(option for option in OPTIONS if option.flag == flag) for alias, flag in ALIASES.items()
}


def make_settings(
    flags: Mapping[str, str], environment: Mapping[str, str] | None = None, config: str | None = None
) -> AgentSettings:
    """Settings of ``flags`` (by name, without ``--``), else of the file ``config``, else of the environment. Raises
    ConfigError with a line per mistake."""
    environment = os.environ if environment is None else environment
    found = {
        option.flag: environment[option.variable] for option in OPTIONS if environment.get(option.variable, "").strip()
    }
    file = _file(config) if config is not None else AgentFile()
    told = file.model_dump(exclude_unset=True, exclude_none=True)
    data: dict[str, Any] = {}
    for flag, text in found.items():
        _put(data, BY_FLAG[flag], text)
    for block in ("publisher", "archiver"):
        if told.get(block):
            data[block] = {**data.get(block, {}), **told[block]}
    for flag, text in flags.items():
        _put(data, BY_FLAG[flag], text)
    data["sources"] = _sources(flags, told, found)
    data.setdefault("publisher", {})
    if "type" not in data["publisher"]:
        kinds = [kind for kind, key in (("http", "hostUrl"), ("kafka", "bootstrapServers")) if key in data["publisher"]]
        if len(kinds) != 1:
            raise ConfigError("where to? --type=http --url=https://…, or --type=kafka --brokers=host:9092")
        data["publisher"]["type"] = kinds[0]
    for block, secret in (
        ("publisher", "authToken"),
        ("publisher", "saslPassword"),
        ("archiver", "accessKey"),
        ("archiver", "secretKey"),
    ):
        _nearer_wins(data.get(block, {}), secret, flags)
    if "cursorFile" not in data and os.path.exists("cursor.json"):
        data["cursorFile"] = os.path.abspath("cursor.json")
    if "stateFolder" not in data:
        asked = flags.get("cursor-file") or found.get("cursor-file")
        data["stateFolder"] = f"{os.path.abspath(asked)}.gpuflight" if asked else os.path.join(state_folder(), "agent")
    try:
        settings = validate(AgentSettings, data, strict=False)
    except ValidationError as error:
        raise ConfigError("\n".join(_as_flag(path, line) for path, line in problems(error, AgentSettings))) from None
    return settings


def _file(path: str) -> AgentFile:
    try:
        return validate(AgentFile, read_config_file(path), strict=True)
    except ValidationError as error:
        lines = (f"{path}: {mask(line)}" for _, line in problems(error, AgentFile))
        raise ConfigError("\n".join(lines)) from None


def _put(data: dict[str, Any], option: Option, text: str) -> None:
    if not option.path:
        return
    block, _, name = option.path.rpartition(".")
    target = data.setdefault(block, {}) if block else data
    target[name] = _switch(option.flag, text) if option.kind == "switch" else text.strip()


def _switch(flag: str, text: str) -> bool:
    low = text.strip().lower()
    if low not in (*_TRUE, *_FALSE):
        raise ConfigError(f"--{flag}: must be true or false, not {text!r}")
    return low in _TRUE


def _sources(flags: Mapping[str, str], told: dict[str, Any], found: Mapping[str, str]) -> list[dict[str, Any]]:
    """Folders with their channels; channels that are named hold for all folders that name none themselves."""
    for given in (flags, None, found):
        if given is None:
            sources = [*([told["source"]] if told.get("source") else []), *(told.get("sources") or [])]
        else:
            names = [given.get("folder", ""), *given.get("folders", "").split(",")]
            sources = [{"folder": name.strip()} for name in names if name.strip()]
        if sources:
            break
    else:
        sources = [{"folder": "."}]
    channels = flags.get("log-types") or found.get("log-types")
    named = {"logTypes": [part.strip() for part in channels.split(",") if part.strip()]} if channels else {}
    return [{**named, **source} for source in sources]


def _nearer_wins(block: dict[str, Any], secret: str, flags: Mapping[str, str]) -> None:
    """A secret and a file of it: the one from nearer by; of one place, the file."""
    if secret in block and f"{secret}File" in block:
        by_flag = {BY_FLAG[flag].path.rpartition(".")[2] for flag in flags}
        del block[f"{secret}File" if secret in by_flag and f"{secret}File" not in by_flag else secret]


def _as_flag(path: tuple[str | int, ...], line: str) -> str:
    """The flag's name before the path of the file, where there is one."""
    dotted = ".".join(str(part) for part in path)
    flag = next((option.flag for option in OPTIONS if option.path == dotted), None)
    return str(mask(f"--{flag}: {line.partition(': ')[2]}" if flag else line))
