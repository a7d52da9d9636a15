"""Object prefixes in the only spelling that a grant may have, and the AWS policies that restrict credentials to them.

A prefix limits what untrusted code can access, and stores, clients and policy engines all parse text differently. A
prefix is therefore never repaired: everything that one of them could interpret as another location, a pattern or a
variable is rejected. The remaining prefixes mean the same to all of them.

The session policy is generated per attempt. The bucket policy is deployed once and applies to all attempts: if a
session policy were ever wrong, it would still protect data that does not belong to the platform.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

from interlock.errors import Forbidden, TooLarge

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


MAX_CHARACTERS: Final = 2048
"""Maximum length of a session policy in STS."""
READ: Final = ("s3:GetObject",)
WRITE: Final = ("s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts")
"""An attempt may read back its own files. It cannot delete them; a sweep removes leftovers."""
LIST: Final = ("s3:ListBucket",)

Statement = dict[str, Any]


def session_policy(read: Sequence[Prefix], write: Sequence[Prefix], until: datetime | None = None) -> str:
    """Returns a policy that allows only these prefixes, optionally only `until` a time before the credentials expire.

    If the policy would be too long, it omits the permission to list the write prefixes, whose files the attempt knows.
    """
    objects = [*_objects(READ, [prefix for prefix in read if prefix not in write]), *_objects(WRITE, write)]
    policies = [_text([*objects, *_lists(listed)], until) for listed in ({*read, *write}, {*read})]
    if len(policies[-1]) > MAX_CHARACTERS:
        raise _too_large(len(policies[-1]), len(read), len(write))
    return next(policy for policy in policies if len(policy) <= MAX_CHARACTERS)


def _text(statements: list[Statement], until: datetime | None) -> str:
    if until is not None:
        # This condition is part of each permission, not a denial: where the condition key is unknown, nothing is
        # allowed.
        moment = {"DateLessThan": {"aws:CurrentTime": _moment(until)}}
        statements = [each | {"Condition": each.get("Condition", {}) | moment} for each in statements]
    return json.dumps(_document(statements), separators=(",", ":"), ensure_ascii=False)


def bucket_policy(root: str, role_arn: str) -> dict[str, Any]:
    """Returns the policy for the bucket of `root` (s3://bucket/prefix), which keeps sessions of the role in our layout.

    It contains only denials, so it grants nothing regardless of other permissions of the role or the bucket.
    """
    bucket, _, path = root.removeprefix("s3://").rstrip("/").partition("/")
    base = f"{path}/" if path else ""
    arn = f"arn:aws:s3:::{bucket}"
    readable = [f"{arn}/{base}dataset/*", f"{arn}/{base}buffers/*"]
    writable = [f"{arn}/{base}dataset/*/version/*/_attempts/*", f"{arn}/{base}buffers/*"]
    listable = {"StringNotLike": {"s3:prefix": [f"{base}dataset/*/version/*", f"{base}buffers/*"]}}
    denials: list[Statement] = [
        {"Sid": "NothingElse", "NotAction": [*WRITE, *LIST], "Resource": [arn, f"{arn}/*"]},
        {"Sid": "ReadOnlyObjects", "Action": list(READ), "NotResource": readable},
        {"Sid": "WriteOnlyAttempts", "Action": [each for each in WRITE if each not in READ], "NotResource": writable},
        {"Sid": "ListOnlyObjects", "Action": list(LIST), "Resource": [arn], "Condition": listable},
    ]
    return _document([{"Effect": "Deny", "Principal": {"AWS": role_arn}} | each for each in denials])


def _objects(actions: Sequence[str], prefixes: Sequence[Prefix]) -> list[Statement]:
    if not prefixes:
        return []
    return [
        {"Effect": "Allow", "Action": list(actions), "Resource": [f"{_arn(each)}/{each.path}*" for each in prefixes]}
    ]


def _lists(prefixes: Iterable[Prefix]) -> list[Statement]:
    """Returns one statement per bucket, because a prefix granted in one bucket must not apply to another."""
    by_arn: dict[str, list[str]] = {}
    for prefix in sorted(prefixes):
        by_arn.setdefault(_arn(prefix), []).append(f"{prefix.path}*")
    return [
        {"Effect": "Allow", "Action": list(LIST), "Resource": [arn], "Condition": {"StringLike": {"s3:prefix": paths}}}
        for arn, paths in by_arn.items()
    ]


def _arn(prefix: Prefix) -> str:
    return f"arn:aws:s3:::{prefix.bucket}"


def _document(statements: list[Statement]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": statements}


def _moment(until: datetime) -> str:
    # Rounded down, so that it never outlasts the lease.
    return until.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _too_large(size: int, read: int, write: int) -> TooLarge:
    return TooLarge(
        f"The session policy for {read} read and {write} write prefixes has {size} characters; STS accepts at most "
        f"{MAX_CHARACTERS}. Reduce the inputs and outputs of the job, or shorten the prefix in objects_url.",
        code="policy_too_large",
    )
