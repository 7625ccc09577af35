"""ProcFs: processes, threads and open descriptors, read once per round from /proc."""

from gpuflight.sources.procfs.fds import FdIndex, FdRef
from gpuflight.sources.procfs.source import ProcFs
from gpuflight.sources.procfs.stat import ProcStat, parse_stat

__all__ = ["FdIndex", "FdRef", "ProcFs", "ProcStat", "parse_stat"]
