"""GPU sessions on the server: what agents send is decoded, stored and acknowledged, and questions are answered.

``service`` holds it together, ``ingest`` takes blocks of lines in, ``writer`` stores many of them by one write,
``decoders`` keeps what is known of sessions under way. Nothing here imports DuckDB or numpy before the first use.
"""
