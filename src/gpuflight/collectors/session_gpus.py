"""Which GPUs of the topology a session ran on.

Kernels in batches name no GPU. Where the session has but one, or single events tell on which one a stream is, that is
it. Else the one GPU is taken, of those that the session names, that NVML sees the process on; if there are several,
nobody can tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from gpuflight.collectors.gpu_processes import PidMap
from gpuflight.collectors.session_names import shown_name
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Entity, nodes

if TYPE_CHECKING:
    from gpuflight.events.activity.summary import DeviceFacts, Summary
    from gpuflight.sources.world import World

_UUID = re.compile(r"[\w.:-]{1,80}", re.ASCII)


class SessionGpus:
    """Answers for the sessions of one round; NVML is asked only where a log leaves it open."""

    def __init__(self) -> None:
        self._world: World | None = None
        self._used: dict[str, set[str]] | None = None
        self._chosen: dict[str, str] = {}

    def begin(self, world: World) -> None:
        """A round begins."""
        self._world = world
        self._used = None

    def drop(self, keep: set[str]) -> None:
        """Forget all sessions but these."""
        self._chosen = {session: uuid for session, uuid in self._chosen.items() if session in keep}

    def unplaced(self, session: Summary, process: str | None) -> str | None:
        """UUID of the GPU of whatever names none; None if that cannot be told."""
        if not _needs_one(session):
            return None
        named = {device.uuid for device in session.devices if device.uuid}
        if len(named) <= 1:
            return next(iter(named), None)
        if process is not None:
            used = self._used_by(process) & named
            if len(used) == 1:
                self._chosen[session.session_id] = next(iter(used))
            elif used:
                self._chosen.pop(session.session_id, None)
        return self._chosen.get(session.session_id)

    def _used_by(self, process: str) -> set[str]:
        if self._used is None:
            assert self._world is not None  # noqa: S101 - begin() comes first
            self._used = {}
            try:
                snapshot = self._world.nvml.snapshot()
                pids = PidMap(self._world.procfs)
                for gpu in snapshot.gpus:
                    migs = {(mig.gpu_instance, mig.compute_instance): mig.uuid for mig in gpu.migs}
                    for user in gpu.processes:
                        stat = pids.process(user.pid)
                        if stat is not None:
                            uuid = migs.get((user.gpu_instance, user.compute_instance), gpu.uuid)
                            self._used.setdefault(stat.id, set()).add(uuid)
            except (OSError, SourceUnavailable):
                pass  # then nobody can tell
        return self._used.get(process, set())


def _needs_one(session: Summary) -> bool:
    """Whether anything of a session names no GPU."""
    return (
        any(stream.device_id is None for stream in session.streams)
        or any(copy.device_id is None for copy in session.copies or ())
        or any(place.device_id is None and not place.pinned for place in session.memory or ())
    )


def gpu_entities(devices: Iterable[DeviceFacts]) -> dict[int, Entity]:
    """By device number; what is no UUID of a GPU is left out."""
    return {device.device_id: gpu_entity(device) for device in devices if _UUID.fullmatch(device.uuid)}


def gpu_entity(device: DeviceFacts) -> Entity:
    """The entity of a GPU as the nvml collector names it, with what the session knows of it."""
    attributes = {"name": shown_name(device.name)} if device.name else {}
    if device.uuid.startswith("MIG-"):
        return nodes.MigInstance(uuid=device.uuid, attributes=attributes)
    return nodes.GPU(uuid=device.uuid, attributes=attributes)
