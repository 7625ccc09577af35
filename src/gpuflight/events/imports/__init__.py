"""Traces of other profilers as batches of GPU events.

``open_import(path)`` tells which one a file is of and answers with an ``Import``: iterate over it for lists of batches;
its ``ledger`` tells afterwards what was lost or has no table here.
"""

from gpuflight.events.imports.base import Import
from gpuflight.events.imports.open import open_import

__all__ = ["Import", "open_import"]
