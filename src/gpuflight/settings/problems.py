"""What is wrong with some settings, one line each: path, what is wrong, nearest valid key."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from gpuflight.settings.dump import is_secret

Path = tuple[str | int, ...]
Model = TypeVar("Model", bound=BaseModel)

# pydantic's wording, said for people who edit a file; the rest of its messages read well as they are.
_WORDING = (
    (re.compile(r"^Input should be (.*)$"), r"must be \1"),
    (re.compile(r"^String should "), "must "),
    (re.compile(r"^Value error, "), ""),
    (re.compile(r"a valid (dictionary|mapping)( or instance of \w+| or object to extract fields from)?"), "an object"),
    (re.compile(r"a valid string"), "text"),
    (re.compile(r"a valid (list|array)"), "a list"),
    (re.compile(r"a valid boolean"), "true or false"),
    (re.compile(r"a valid integer"), "a whole number"),
    (re.compile(r"a valid number"), "a number"),
    (re.compile(r", (unable|got) .*$"), ""),
    (re.compile(r"an object or instance of \w+"), "an object"),
    (re.compile(r"'"), ""),
)


def nearest(name: str, candidates: Iterable[str]) -> str:
    """The candidate that ``name`` was most likely meant to be; empty if none is near."""
    known = {candidate.lower(): candidate for candidate in candidates}
    found = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1, cutoff=0.6)
    return known[found[0]] if found else ""


def path_text(path: Path) -> str:
    """``("subscribers", 0, "path")`` → ``subscribers[0].path``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def problems(error: ValidationError, model: type[BaseModel], prefix: Path = ()) -> list[tuple[Path, str]]:
    """(path, line) for each mistake that pydantic found in data for ``model``; ``prefix`` is where that data stands."""
    found: dict[Path, str] = {}
    for detail in error.errors(include_url=False):
        path: Path = detail["loc"]
        full = prefix + path
        if full in found:
            continue
        if detail["type"] == "extra_forbidden":
            text = unknown_key(path, model, prefix)
        elif detail["type"] == "missing":
            text = "missing"
        else:
            text = _reworded(detail["msg"]) + _shown(full, detail["input"])
        found[full] = f"{path_text(full)}: {text}"
    return list(found.items())


def unknown_key(path: Path, model: type[BaseModel], prefix: Path = ()) -> str:
    """``unknown key; did you mean limits.max_nodes?`` for a key that ``model`` does not have."""
    *parent, name = path
    siblings = _keys_at(model, parent)
    close = nearest(str(name), siblings)
    if close:
        return f"unknown key; did you mean {path_text((*prefix, *parent, close))}?"
    leaves = {str(leaf[-1]): leaf for leaf in reversed(list(_all_keys(model)))}
    elsewhere = nearest(str(name), leaves)
    if elsewhere:
        return f"unknown key; did you mean {path_text(prefix + leaves[elsewhere])}?"
    return f"unknown key; there {'are' if len(siblings) != 1 else 'is'}: {', '.join(siblings) or 'none'}"


def validate(model: type[Model], data: Any, *, strict: bool) -> Model:
    """``data`` as a ``model``. Strict: a number is not text and text is not a number, as in a file; otherwise text is
    read as what is asked for, as from the environment or a command line. Raises pydantic's ValidationError."""
    if strict:
        # Through JSON, whose strictness still takes a list for a tuple and text for a path or an enumeration.
        return model.model_validate_json(json.dumps(data), strict=True)
    return model.model_validate(data)


def _reworded(message: str) -> str:
    for pattern, replacement in _WORDING:
        message = pattern.sub(replacement, message)
    return message[:1].lower() + message[1:]


def _shown(path: Path, value: Any) -> str:
    if any(isinstance(part, str) and is_secret(part) for part in path):
        return ""
    if isinstance(value, (dict, list)):
        return f", not {'an object' if isinstance(value, dict) else 'a list'}"
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return f", not {text if len(text) <= 60 else text[:57] + '…'}"


def _keys_at(model: type[BaseModel], path: list[str | int]) -> list[str]:
    here: type[BaseModel] | None = model
    for part in path:
        if isinstance(part, int):
            continue
        field = here.model_fields.get(part) if here else None
        here = _model_in(field.annotation) if field else None
    return list(here.model_fields) if here else []


def _all_keys(model: type[BaseModel], prefix: Path = ()) -> Iterator[Path]:
    for name, field in model.model_fields.items():
        yield (*prefix, name)
        inner = _model_in(field.annotation)
        if inner is not None and isinstance(field.annotation, type):  # not under a list or an option
            yield from _all_keys(inner, (*prefix, name))


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _model_in(arg))), None)
