"""GPU activity: records, log formats, tailer, recorder, aggregation, store (to come)."""
