"""Object prefixes in the only spelling that a grant may have: `s3://bucket/a/b/` or `file:///a/b/`.

A prefix limits what untrusted code can access, and stores, clients and policy engines all parse text differently. A
prefix is therefore never repaired: everything that one of them could interpret as another location, a pattern or a
variable is rejected. The remaining prefixes mean the same to all of them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from interlock.errors import Forbidden

Scheme = Literal["s3", "file"]

_MAX_BYTES: Final = 1024
"""Maximum length of an S3 key."""
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
# No `*` or `?`, which are wildcards; no `$`, which starts a policy variable; no `%`, `&` or backslash, which start an
# escape; no `#`, quotes, brackets or `;<>|^`, which some clients interpret as syntax.
_PLAIN: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 _.,=@:+~()!-")


@dataclass(frozen=True, order=True)
class Prefix:
    """A directory: `a/b/` never contains anything of `a/bc`."""

    scheme: Scheme
    bucket: str
    """Empty for a local directory."""
    path: str
    """Ends with a slash."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.path}"

    def has(self, uri: str) -> bool:
        """Returns True if the URI is an object below this prefix in canonical spelling."""
        text = str(self)
        return uri.startswith(text) and _problem(uri[len(text) :]) is None


def canonical(text: str) -> Prefix:
    """Returns the canonical prefix, with a trailing slash. Raises Forbidden for an invalid prefix."""
    scheme, separator, rest = text.partition("://")
    bucket, slash, path = rest.partition("/")
    problem = _place_problem(scheme, bucket) if separator and slash else "it is not of the form scheme://bucket/prefix/"
    problem = problem or _problem(path.removesuffix("/"))
    if scheme == "s3" and not path.isascii():
        # STS rejects policies with other characters.
        problem = "it has a non-ASCII character"
    if problem:
        raise Forbidden(
            f"A prefix of this task cannot be granted: {problem}. Set objects_url to a plain path, for example "
            "s3://bucket/interlock.",
            code="bad_prefix",
        )
    return Prefix("s3" if scheme == "s3" else "file", bucket, f"{path.removesuffix('/')}/")


def canonical_all(texts: Iterable[str], root: str) -> list[Prefix]:
    """Returns the canonical prefixes, sorted and without duplicates. Rejects prefixes outside the object root."""
    found = sorted({canonical(text) for text in texts})
    for prefix in found:
        if not str(prefix).startswith(f"{root.rstrip('/')}/"):
            raise Forbidden(
                "A prefix of this task is outside objects_url; claim the task again after all processes use "
                "the same objects_url.",
                code="bad_prefix",
            )
    return found


def _place_problem(scheme: str, bucket: str) -> str | None:
    if scheme == "file":
        return "a local path starts with file:///" if bucket else None
    if scheme != "s3":
        return "its scheme is neither s3 nor file"
    return None if _BUCKET.fullmatch(bucket) and ".." not in bucket else "its bucket name is empty or invalid"


def _problem(path: str) -> str | None:
    if not path:
        return "it is empty"
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    if size > _MAX_BYTES:
        return f"it has more than {_MAX_BYTES} bytes"
    if not all(character in _PLAIN or character == "/" or _is_letter(character) for character in path):
        return "it has a wildcard, a control character, an escape, or a lookalike of an ASCII character"
    if unicodedata.normalize("NFC", path) != path:
        return "it is not in Unicode normal form NFC"
    return next((problem for segment in path.split("/") if (problem := _segment_problem(segment))), None)


def _segment_problem(segment: str) -> str | None:
    if not segment:
        return "it has an empty segment"
    if ".." in segment or not segment.strip(". "):
        return "it has a segment with `..`, or one that consists of dots"
    return "a segment starts or ends with a space" if segment.strip(" ") != segment else None


def _is_letter(character: str) -> bool:
    """Returns True for letters of other scripts, except those that Unicode normalization turns into ASCII."""
    if character.isascii() or unicodedata.category(character)[0] not in "LNM":
        return False
    return not any(part.isascii() for part in unicodedata.normalize("NFKC", character))
