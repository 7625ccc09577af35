"""GPU activity: records, log formats, tailer, recorder, aggregation, store.

The record model is three small files: ``tables`` (what there is to know about each kind of event), ``batch`` (rows of
one table, by column) and ``ledger`` (what was lost, kept raw or seen twice, by reason and place). ``format`` turns the
lines of GPU Flight logs into batches and back; ``files`` finds them on disk.
"""
