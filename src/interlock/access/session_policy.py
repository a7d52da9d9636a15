"""Policies that restrict the credentials of a task to its prefixes, for S3 and STS.

The session policy is generated per attempt. The bucket policy is deployed once and applies to all attempts: if a
session policy were ever wrong, it would still protect data that does not belong to the platform.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from interlock.access.prefixes import Prefix
from interlock.errors import TooLarge

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
