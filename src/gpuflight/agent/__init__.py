"""Shipping GPU Flight logs: to an HTTP receiver, to Kafka, and copies of the windows to S3.

``settings`` says what and where, ``agent`` runs it. Finished windows go as the files they are (``windows``), lines of
files that are still written one by one (``lines``). Nothing here needs numpy or duckdb.
"""
