"""What a JSON pointer names in a payload."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

_INDEX: Final = re.compile("[0-9]{1,9}")
_MOST_CHARACTERS: Final = 1000
_MOST_BYTES: Final = 2000
"""Keys are parts of index entries, which PostgreSQL limits to about 2,700 bytes."""


def pointed(value: Any, pointer: str) -> str | None:
    """The scalar there, as text; None when there is no single value. ValueError when it is too long or not text."""
    found = resolved(value, pointer)
    return None if isinstance(found, dict | list) else as_key(found)


def resolved(value: Any, pointer: str) -> Any:
    """Returns the value at a JSON pointer; None when there is none."""
    for part in pointer.split("/")[1:]:
        token = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and _INDEX.fullmatch(token) and int(token) < len(value):
            value = value[int(token)]
        else:
            value = value.get(token) if isinstance(value, dict) else None
    return value


def as_key(value: Any) -> str | None:
    """Returns a scalar as text, None for null. ValueError says why it cannot be a key."""
    if value is None:
        return None
    if isinstance(value, dict | list):
        raise ValueError("is a list or an object")  # noqa: TRY004 - a value of the payload, not of the program
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if len(text) > _MOST_CHARACTERS or len(text.encode()) > _MOST_BYTES:
        raise ValueError(f"has more than {_MOST_CHARACTERS} characters or {_MOST_BYTES} bytes")
    if "\x00" in text:
        raise ValueError("has a NUL character")
    return text
