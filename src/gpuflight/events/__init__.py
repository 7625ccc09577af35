"""events of gpuflight."""
