"""vis/render of gpuflight."""
