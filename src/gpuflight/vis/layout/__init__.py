"""vis/layout of gpuflight."""
