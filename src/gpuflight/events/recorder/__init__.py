"""Our recorder: what CUPTI tells of this process's GPU work, as a session of the format's newest generation.

``options`` what is asked for, ``binding`` the only user of cupti-python, ``intake`` what runs in CUPTI's callbacks,
``layouts`` record classes to columns, ``translate`` and its parts columns to lines, ``recorder`` the life of a session,
``process`` one recorder per process (exit, fork, signals), ``control`` questions and orders from outside.
"""
