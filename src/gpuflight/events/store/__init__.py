"""The event store: GPU records by column, sessions by row, each in the database that is best at it.

``EventStore`` is the whole of it. ``layout`` says what the tables look like, ``records`` writes and reads them
(DuckDB), ``catalogue`` keeps the sessions (SQLite), ``retention`` decides what goes. docs/adr says why.

``parquet.ParquetStore`` is the same for a fleet, Parquet files in a folder that hosts share; ``open_store`` chooses.
"""

from gpuflight.events.store.catalogue import Catalogue, Session
from gpuflight.events.store.choose import open_store
from gpuflight.events.store.parts import Overlap, Part, Relation, Source, Written
from gpuflight.events.store.store import EventStore

__all__ = ["Catalogue", "EventStore", "Overlap", "Part", "Relation", "Session", "Source", "Written", "open_store"]
