"""cli of gpuflight."""
