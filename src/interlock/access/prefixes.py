"""Prefixes of objects, in the one spelling that a grant may have: `s3://bucket/a/b/` or `file:///a/b/`.

A prefix is the border of what untrusted code may touch, and each store, client and policy engine reads text in its own
way. So a prefix is never repaired. Whatever one of them could take for another place, a pattern or a variable is
refused, and what is left is the same to all of them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from interlock.errors import Forbidden

Scheme = Literal["s3", "file"]

_MOST_BYTES: Final = 1024
"""Of a key in S3."""
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
# No `*` or `?`, which widen; no `$`, which begins a variable of a policy; no `%`, `&` or backslash, which begin another
# spelling of a character; no `#`, quotes, brackets or `;<>|^`, which some client reads as its own syntax.
_PLAIN: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 _.,=@:+~()!-")


@dataclass(frozen=True, order=True)
class Prefix:
    """A directory: `a/b/` never has anything of `a/bc`."""

    scheme: Scheme
    bucket: str
    """Empty for a directory of this machine."""
    path: str
    """Ends with a slash."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.path}"

    def has(self, uri: str) -> bool:
        """Whether this is an object below, spelled as objects are. Anything else is not below."""
        text = str(self)
        return uri.startswith(text) and _problem(uri[len(text) :]) is None


def canonical(text: str) -> Prefix:
    """The prefix, with its last slash. Raises Forbidden for what is none."""
    scheme, separator, rest = text.partition("://")
    bucket, slash, path = rest.partition("/")
    problem = _place_problem(scheme, bucket) if separator and slash else "it is not scheme://bucket/prefix/"
    problem = problem or _problem(path.removesuffix("/"))
    if scheme == "s3" and not path.isascii():
        # STS takes no policy with others.
        problem = "it has a character outside ASCII"
    if problem:
        raise Forbidden(
            f"A prefix of this task cannot be granted: {problem}. Set objects_url to a plain path, such as "
            "s3://bucket/interlock.",
            code="bad_prefix",
        )
    return Prefix("s3" if scheme == "s3" else "file", bucket, f"{path.removesuffix('/')}/")


def canonical_all(texts: Iterable[str], root: str) -> list[Prefix]:
    """Each one once, in order. One that does not lie under the root of objects is nobody's to grant."""
    found = sorted({canonical(text) for text in texts})
    for prefix in found:
        if not str(prefix).startswith(f"{root.rstrip('/')}/"):
            raise Forbidden(
                "A prefix of this task does not lie under objects_url; claim the task again once all processes have "
                "the same objects_url.",
                code="bad_prefix",
            )
    return found


def _place_problem(scheme: str, bucket: str) -> str | None:
    if scheme == "file":
        return "a path of this machine begins with file:///" if bucket else None
    if scheme != "s3":
        return "its scheme is neither s3 nor file"
    return None if _BUCKET.fullmatch(bucket) and ".." not in bucket else "its bucket is empty or is no name of a bucket"


def _problem(path: str) -> str | None:
    if not path:
        return "it is empty"
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        return "it is not Unicode"
    if size > _MOST_BYTES:
        return f"it has more than {_MOST_BYTES} bytes"
    if not all(character in _PLAIN or character == "/" or _is_letter(character) for character in path):
        return "it has a character that is a pattern, a control, an escape, or only looks like a plain one"
    if unicodedata.normalize("NFC", path) != path:
        return "its characters are not composed (Unicode NFC)"
    return next((problem for segment in path.split("/") if (problem := _segment_problem(segment))), None)


def _segment_problem(segment: str) -> str | None:
    if not segment:
        return "it has an empty segment"
    if ".." in segment or not segment.strip(". "):
        return "it has a segment with `..`, or one that is all dots"
    return "a segment begins or ends with a space" if segment.strip(" ") != segment else None


def _is_letter(character: str) -> bool:
    """Of another script, as a directory may have them; never one that turns into an ASCII character when normalized."""
    if character.isascii() or unicodedata.category(character)[0] not in "LNM":
        return False
    return not any(part.isascii() for part in unicodedata.normalize("NFKC", character))
