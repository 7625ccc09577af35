"""Following GPU Flight logs while they are written: ``Tailer(folders, checkpoint)``, ``poll``, ``commit``.

Bytes in, whole lines out; nothing here knows what a line says. ``tree`` finds folders that have changed, ``stream``
puts the files of a channel together to windows, ``raw`` and ``packed`` read them, ``checkpoint`` remembers.
"""

from gpuflight.events.tail.chunk import Chunk
from gpuflight.events.tail.disk import Disk, Stamp
from gpuflight.events.tail.progress import SessionProgress
from gpuflight.events.tail.settings import TailSettings
from gpuflight.events.tail.tailer import Tailer

__all__ = ["Chunk", "Disk", "SessionProgress", "Stamp", "TailSettings", "Tailer"]
