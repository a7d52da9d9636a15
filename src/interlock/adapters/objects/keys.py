"""Keys of objects: the part of a URI below the root.

What comes from outside is refused rather than cleaned: two spellings of one object are two answers to the question who
may have it.
"""

from __future__ import annotations

import unicodedata
from typing import Final

from interlock.errors import BadRequest

UPLOADS: Final = "_uploads"
"""The folder below a directory's root for what is not an object yet. No key leads there."""
_MOST_BYTES: Final = 1024
_MOST_SEGMENT_BYTES: Final = 255
_ESCAPES: Final = frozenset("\\%\N{REPLACEMENT CHARACTER}")
_UNSEEN: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_ELSEWHERE: Final = frozenset({"", ".", ".."})


def leads_elsewhere(key: str) -> bool:
    """Whether it names no place below the root, or the one that is not for objects."""
    segments = key.split("/")
    return segments[0] == UPLOADS or "\0" in key or any(segment in _ELSEWHERE for segment in segments)


def canonical_key(key: str) -> str:
    """The key itself, when it is spelled as keys from outside must be. Raises BadRequest."""
    problem = _problem(key)
    if problem is not None:
        raise BadRequest(f"This is no key of an object: {problem}.", code="bad_object_key")
    return key


def canonical_prefix(prefix: str) -> str:
    """As a key with a slash behind it, so that `a/b` is never the beginning of `a/bc`. Raises BadRequest."""
    if not prefix.endswith("/"):
        raise BadRequest("A prefix of objects ends with a slash.", code="bad_object_key")
    canonical_key(prefix[:-1])
    return prefix


def _problem(key: str) -> str | None:
    if any(character in _ESCAPES or unicodedata.category(character) in _UNSEEN for character in key):
        return "it has a backslash, a percent sign or a character that cannot be seen"
    if not 0 < len(key.encode()) <= _MOST_BYTES:
        return f"it must have between 1 and {_MOST_BYTES} bytes"
    if any(len(segment.encode()) > _MOST_SEGMENT_BYTES for segment in key.split("/")):
        return f"what is between two slashes must have at most {_MOST_SEGMENT_BYTES} bytes"
    if unicodedata.normalize("NFC", key) != key:
        return "its characters must be composed ones, as of Unicode's NFC"
    # What some reader may take for a dot or a slash is refused with the real ones.
    folded = unicodedata.normalize("NFKC", key)
    if folded.count("/") != key.count("/") or "\\" in folded or leads_elsewhere(folded):
        return f"a segment is empty, is or looks like `.` or `..`, or the first one is {UPLOADS}"
    return None
