"""Questions to the event store, each with a bounded answer.

Every function takes a ``Reader`` (a store and the sessions that are asked about) and returns structs with units in
their names; what is not known is None, and a statistic carries its sample count. Answers come in pages: ``limit`` is
at most ``MAX_ROWS``.
"""
