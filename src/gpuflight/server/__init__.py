"""server of gpuflight."""
