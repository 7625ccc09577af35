"""Records of a session in the formats of others, a piece at a time: memory does not grow with the session.

``trace.chrome_trace`` makes a timeline for Perfetto; ``tables`` writes tables and answers as CSV, NDJSON and Parquet,
``arrow`` as Arrow IPC streams.
"""
