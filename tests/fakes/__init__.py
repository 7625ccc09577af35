"""Stand-ins for what a test machine lacks, at the lowest boundary, so that the real bindings stay under test."""
