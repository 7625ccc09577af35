"""The folder that ``gpuflight run -- python …`` puts into PYTHONPATH: the interpreter runs its ``sitecustomize``."""
