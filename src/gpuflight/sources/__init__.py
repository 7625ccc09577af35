"""The only code that reads the world; each source is an object handed to the collectors in a World."""
