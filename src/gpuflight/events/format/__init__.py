"""The GPU Flight log format, every generation, to batches (``decoder``) and back (``writer``)."""
