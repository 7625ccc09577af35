"""settings of gpuflight."""
