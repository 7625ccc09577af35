"""vis of gpuflight."""
