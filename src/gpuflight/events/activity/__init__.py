"""What running sessions do, in sums: per kernel, stream, copy direction, wait, scope and piece of memory.

``session.Activity`` takes the batches of one session as they come and keeps sums only: memory is that of the distinct
keys, not of the events. ``summary.Summary`` is what it answers: plain data that can be stored, sent, and compared with
an earlier one.
"""
