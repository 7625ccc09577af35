"""Rows of one table of one session, by column: the form in which GPU events travel inside gpuflight.

* ``columns`` holds the columns that these rows have, each a numpy array (int64, uint64, float64) or, for text, a list
  of str. **A column that is not there is unknown for all rows of the batch**; there are no null cells, rows that lack
  something come in a batch of their own. Nothing is ever 0 for being unknown.
* Times are absolute UNIX nanoseconds. ``clock`` says whether they can be put on the session's timeline: ``wall`` can;
  ``steady`` (by the format's design) and ``unplaced`` (zero or since-boot stamps) cannot, durations still hold.
* Texts that repeat are ids into the session's dictionaries, which come as batches of the table ``name``
  (dictionary, id, name), before the first use. Names and shapes may come more than once: take them as upserts.
* ``extra`` has columns that this version does not know, by their name on the wire, raw and aligned with the rows.
* ``batch_id`` is the number that the writer gave the batch (unique in a session per ``wire_type``), None for lines of
  single events; ``part`` counts the batches that one line of the file became. (session, wire_type, batch_id, part)
  identifies the rows of such a line whenever and from wherever they come again. Rows of single-event lines have no
  such number: a reader keeps its place in the file together with what it has stored.
* ``place``: where the first row was read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from gpuflight.events.ledger import Place

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Numbers = npt.NDArray[np.int64] | npt.NDArray[np.uint64] | npt.NDArray[np.float64]

Clock = Literal["wall", "steady", "unplaced"]


class Batch(msgspec.Struct):
    """Rows of one table; see the module's text for what each field promises."""

    table: str
    session_id: str
    count: int
    columns: dict[str, Any]
    wire_type: str = ""
    batch_id: int | None = None
    part: int = 0
    place: Place = Place()
    clock: Clock = "wall"
    extra: dict[str, list[Any]] | None = None

    def rows(self) -> list[dict[str, Any]]:
        """As plain dicts with Python numbers: for tests, JSON and small tables; not for the many."""
        lists = {k: v if isinstance(v, list) else v.tolist() for k, v in self.columns.items()}
        return [{k: v[i] for k, v in lists.items()} for i in range(self.count)]
