"""Ids of texts: those the writer gave, and those we give where a line has the text itself.

Writers count their dictionaries from 1, per session. Texts that come inline (single-event lines, user scopes, stacks)
get an id from a hash of the text, between 2^52 and 2^53: no state, so a reader that starts again gives the same id;
no clash with a writer's counter; and exact in JSON readers that only have doubles.
"""

from __future__ import annotations

from hashlib import blake2b

_FIRST = 1 << 52

DICTIONARIES = {
    "kernel_dict": "kernel",
    "scope_name_dict": "scope",
    "function_dict": "function",
    "metric_dict": "metric",
    "source_file_dict": "source_file",
    "func_symbol_dict": "symbol",
}
"""Dictionaries of ``dictionary_update`` → ours. Ours alone: user_scope, stack, marker, range."""


def text_id(text: str) -> int:
    """Id of a text that came without one. Empty text: 0, as on the wire."""
    if not text:
        return 0
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return _FIRST | (int.from_bytes(digest, "little") & (_FIRST - 1))


class Names:
    """Texts of one session by (dictionary, id), filled from the batches of the table ``name``."""

    def __init__(self) -> None:
        self._texts: dict[str, dict[int, str]] = {}

    def add(self, dictionary: str, identifier: int, text: str) -> None:
        self._texts.setdefault(dictionary, {})[identifier] = text

    def get(self, dictionary: str, identifier: int) -> str | None:
        """The text; None if it never came (its window is lost, or it is still to come)."""
        return self._texts.get(dictionary, {}).get(identifier)

    def of(self, dictionary: str) -> dict[int, str]:
        return self._texts.get(dictionary, {})

    def __len__(self) -> int:
        return sum(map(len, self._texts.values()))
