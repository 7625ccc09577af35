"""subscribers of gpuflight."""
