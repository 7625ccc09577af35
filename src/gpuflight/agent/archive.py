"""Copies of delivered windows in an S3 bucket."""

from __future__ import annotations

import os
import re
import ssl
import threading

from gpuflight.agent.secrets import read_secret
from gpuflight.agent.settings import Archiver
from gpuflight.errors import GpuflightError, MissingExtra
from gpuflight.subscribers.netguard import ANYTHING, split_url
from gpuflight.subscribers.s3_client import Access, S3Client

MAX_BYTES = 1 << 30
"""A window is read whole to be uploaded in one request."""

_UNSAFE = re.compile(r"[^A-Za-z0-9._=-]")


class TooLarge(GpuflightError):
    """A window that is not archived, now or later."""


class Archive:
    """One bucket; one upload at a time. Raises ConfigError, DeliveryError, MissingExtra."""

    def __init__(self, settings: Archiver) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        endpoint = settings.endpoint or f"https://s3.{settings.region}.amazonaws.com"
        target = split_url(endpoint)
        access_key = read_secret(settings.accessKey, settings.accessKeyFile)
        secret_key = read_secret(settings.secretKey, settings.secretKeyFile)
        access = Access(
            endpoint_url=endpoint,
            region=settings.region,
            bucket=settings.bucket,
            path_style=True,
            access_key=access_key,
            secret_key=secret_key,
            instance_credentials=access_key is None,
            timeout_s=settings.timeoutSeconds,
        )
        context = ssl.create_default_context() if target.scheme == "https" else None
        try:
            self._client = S3Client(access, target, ANYTHING, context)
        except ImportError as error:
            package = "boto3" if (error.name or "").startswith("boto") else error.name or "boto3"
            raise MissingExtra(package, "s3", "the agent's archiver") from error

    def key(self, session_id: str, channel: str, name: str) -> str:
        """``PREFIXhost/session/channel/window``. (gpufl-agent's keys have neither session nor host, so that one
        session's windows overwrite another's.)"""
        parts = (os.uname().nodename, session_id, channel, name)
        return self._settings.prefix + "/".join(_UNSAFE.sub("-", part) or "-" for part in parts)

    def put(self, session_id: str, channel: str, path: str) -> None:
        """Upload a window; done when the server has found the checksum right. Raises DeliveryError, TooLarge,
        OSError."""
        size_bytes = os.stat(path).st_size
        if size_bytes > MAX_BYTES:
            raise TooLarge(f"{path}: too large to be archived ({size_bytes} bytes)")
        with open(path, "rb") as file:
            data = file.read()
        kind = "application/gzip" if path.endswith(".gz") else "application/x-ndjson"
        with self._lock:
            key = self.key(session_id, channel, os.path.basename(path))
            self._client.put(key, data, self._settings.checksum, ContentType=kind)

    def close(self) -> None:
        self._client.close()
