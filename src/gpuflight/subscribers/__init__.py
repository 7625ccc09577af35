"""Where rounds go: one small file per sink, delivery (queue, worker, statistics) once for all. See ``base``."""
