"""gpuflight: what is wired to what on a GPU machine, what each GPU does, and what holds it back."""

__version__ = "0.1.0"
