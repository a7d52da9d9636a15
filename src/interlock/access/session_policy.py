"""Policies that hold credentials of a task to its prefixes, as S3 and STS read them.

The session policy is made for one attempt. The bucket policy is deployed once and says the same of all attempts
together: should a session policy ever be wrong, it still stands between a task and what is not the platform's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from interlock.access.prefixes import Prefix
from interlock.errors import TooLarge

MOST_CHARACTERS: Final = 2048
"""What STS takes as a session policy."""
READ: Final = ("s3:GetObject",)
WRITE: Final = ("s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts")
"""An attempt may read back what it wrote. It deletes nothing: what it leaves is swept."""
LIST: Final = ("s3:ListBucket",)

Statement = dict[str, Any]


def session_policy(read: Sequence[Prefix], write: Sequence[Prefix], until: datetime | None = None) -> str:
    """Allows nothing but this. `until` ends it earlier than the credentials that carry it.

    Where there is no room for it, an attempt cannot list what it wrote: that it knows anyway.
    """
    objects = [*_objects(READ, [prefix for prefix in read if prefix not in write]), *_objects(WRITE, write)]
    policies = [_text([*objects, *_lists(listed)], until) for listed in ({*read, *write}, {*read})]
    if len(policies[-1]) > MOST_CHARACTERS:
        raise _too_large(len(policies[-1]), len(read), len(write))
    return next(policy for policy in policies if len(policy) <= MOST_CHARACTERS)


def _text(statements: list[Statement], until: datetime | None) -> str:
    if until is not None:
        # With each permission, not as a denial: where this key is unknown, nothing is allowed.
        moment = {"DateLessThan": {"aws:CurrentTime": _moment(until)}}
        statements = [each | {"Condition": each.get("Condition", {}) | moment} for each in statements]
    return json.dumps(_document(statements), separators=(",", ":"), ensure_ascii=False)


def bucket_policy(root: str, role_arn: str) -> dict[str, Any]:
    """To be deployed on the bucket of `root` (s3://bucket/prefix): sessions of the role stay in the layout of objects.

    Only denials: it gives nobody anything, whatever else the role or the bucket is allowed.
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
    """A statement for each bucket: a prefix that is granted in one says nothing about another."""
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
    # Rounded down: never longer than the lease.
    return until.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _too_large(size: int, read: int, write: int) -> TooLarge:
    return TooLarge(
        f"The session policy for {read} read and {write} write prefixes has {size} characters; STS takes "
        f"{MOST_CHARACTERS}. Give the job fewer inputs and outputs, or objects_url a shorter prefix.",
        code="policy_too_large",
    )
