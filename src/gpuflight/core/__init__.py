"""core of gpuflight."""
