"""What a JSON pointer names in a payload."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

_INDEX: Final = re.compile("[0-9]{1,9}")
_MOST_CHARACTERS: Final = 1000


def pointed(value: Any, pointer: str) -> str | None:
    """The scalar there, as text; None when there is no single value. ValueError when it is too long or not text."""
    for part in pointer.split("/")[1:]:
        token = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and _INDEX.fullmatch(token) and int(token) < len(value):
            value = value[int(token)]
        else:
            value = value.get(token) if isinstance(value, dict) else None
    if value is None or isinstance(value, dict | list):
        return None
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if len(text) > _MOST_CHARACTERS or "\x00" in text:
        raise ValueError("too long or not text")
    return text
