"""Names that programs give, as they may be shown."""

from __future__ import annotations

import hashlib
from functools import lru_cache

from gpuflight.redaction import redact_text

_LONGEST = 200


@lru_cache(maxsize=8192)
def shown_name(text: str) -> str:
    """A name of the program's as it may be shown: without secrets, on one line, not longer than can be read. Long names
    that begin alike stay different."""
    clean = redact_text("".join(c if c.isprintable() else "\ufffd" for c in text[:65_536]))
    if len(clean) <= _LONGEST:
        return clean
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=4).hexdigest()
    return f"{clean[:_LONGEST]}…#{digest}"
