"""The rules of the catalogue, one file per subject; each rule has a page in docs/rules."""
