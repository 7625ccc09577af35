"""Server backends: one file each, see ``gpuflight.server.base``."""
