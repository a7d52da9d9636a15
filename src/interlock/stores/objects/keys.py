"""Object keys: the part of a URI below the root.

Keys from outside are rejected instead of normalized: two spellings of one object could get two different authorization
decisions.
"""

from __future__ import annotations

import unicodedata
from typing import Final

from interlock.errors import BadRequest

UPLOADS: Final = "_uploads"
"""The folder below the root of a directory for incomplete uploads. No key can name it."""
_MAX_BYTES: Final = 1024
_MAX_SEGMENT_BYTES: Final = 255
_ESCAPES: Final = frozenset("\\%\N{REPLACEMENT CHARACTER}")
_UNSEEN: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_ELSEWHERE: Final = frozenset({"", ".", ".."})


def is_outside(key: str) -> bool:
    """Returns True if the key names nothing below the root, or the reserved uploads folder."""
    segments = key.split("/")
    return segments[0] == UPLOADS or "\0" in key or any(segment in _ELSEWHERE for segment in segments)


def canonical_key(key: str) -> str:
    """Returns the key if it is in canonical spelling. Raises BadRequest."""
    problem = _problem(key)
    if problem is not None:
        raise BadRequest(f"Invalid object key: {problem}.", code="bad_object_key")
    return key


def canonical_prefix(prefix: str) -> str:
    """Returns a prefix, which is a key with a trailing slash, so that `a/b` never matches `a/bc`. Raises BadRequest."""
    if not prefix.endswith("/"):
        raise BadRequest("An object prefix must end with a slash.", code="bad_object_key")
    canonical_key(prefix[:-1])
    return prefix


def _problem(key: str) -> str | None:
    if any(character in _ESCAPES or unicodedata.category(character) in _UNSEEN for character in key):
        return "it has a backslash, a percent sign or an invisible character"
    if not 0 < len(key.encode()) <= _MAX_BYTES:
        return f"it must have from 1 to {_MAX_BYTES} bytes"
    if any(len(segment.encode()) > _MAX_SEGMENT_BYTES for segment in key.split("/")):
        return f"each path component must have at most {_MAX_SEGMENT_BYTES} bytes"
    if unicodedata.normalize("NFC", key) != key:
        return "it must be in Unicode normal form NFC"
    # Characters that some reader may interpret as a dot or a slash are rejected like the real ones.
    folded = unicodedata.normalize("NFKC", key)
    if folded.count("/") != key.count("/") or "\\" in folded or is_outside(folded):
        return f"a segment is empty, is or looks like `.` or `..`, or the first one is {UPLOADS}"
    return None
