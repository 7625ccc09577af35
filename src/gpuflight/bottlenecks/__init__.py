"""bottlenecks of gpuflight."""
