"""Policies: exactly the given prefixes, deny by default, and within the size limit of STS.

The expected policies are files in golden/. `python -m tests.access.test_session_policy` rewrites them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import assume, given, reject
from hypothesis import strategies as st

from interlock.access.prefixes import MAX_CHARACTERS, Prefix, bucket_policy, canonical, session_policy
from interlock.access.tokens import read_prefix, write_grants
from interlock.errors import Forbidden, TooLarge
from interlock.wire.jobs import DatasetRef

GOLDEN = Path(__file__).parent / "golden"
ROOT = "s3://trace-objects/interlock"
ROLE = "arn:aws:iam::123456789012:role/interlock-task"
UNTIL = datetime(2026, 11, 15, 23, 12, 34, 999_999, UTC)


def _id(number: int) -> UUID:
    return UUID(int=0x0A1E17A0_0000_4000_8000_000000000000 + number)


def _read(*numbers: int, root: str = ROOT) -> list[Prefix]:
    return [canonical(read_prefix(root, _id(number), _id(number + 100))) for number in numbers]


def _written(*numbers: int) -> list[Prefix]:
    outputs = [DatasetRef(dataset_uuid=_id(number), dataset_version=_id(number + 100)) for number in numbers]
    grants = write_grants(ROOT, _id(1000), 2, outputs)
    return [canonical(text) for grant in grants for text in (grant.write_prefix, grant.buffer_prefix)]


POLICIES = {
    "reads_one_writes_one": lambda: session_policy(_read(1), _written(2)),
    "reads_two": lambda: session_policy(_read(1, 2), []),
    "writes_one": lambda: session_policy([], _written(2)),
    "reads_two_buckets": lambda: session_policy(_read(1) + _read(2, root="s3://other-bucket/x"), []),
    "until_the_lease_ends": lambda: session_policy(_read(1), _written(2), UNTIL),
    "bucket": lambda: json.dumps(bucket_policy(ROOT, ROLE)),
    "bucket_without_a_prefix": lambda: json.dumps(bucket_policy("s3://trace-objects", ROLE)),
}


def _text(name: str) -> str:
    return json.dumps(json.loads(POLICIES[name]()), indent=2) + "\n"


@pytest.mark.parametrize("name", POLICIES)
def test_policy_matches_the_golden_file(name: str) -> None:
    assert _text(name) == (GOLDEN / f"{name}.json").read_text()


def test_every_golden_file_has_a_policy() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(POLICIES)


def test_policy_expiry_is_utc_and_rounded_down() -> None:
    elsewhere = UNTIL.astimezone(timezone(timedelta(hours=5, minutes=30)))
    policy = json.loads(session_policy(_read(1), _written(2), elsewhere))
    moments = {json.dumps(each["Condition"]["DateLessThan"]) for each in policy["Statement"]}
    assert moments == {'{"aws:CurrentTime": "2026-11-15T23:12:34Z"}'}


@pytest.mark.parametrize(("read", "write"), [(30, 0), (0, 8), (6, 4)])
def test_oversized_policy_is_refused_with_advice(read: int, write: int) -> None:
    with pytest.raises(TooLarge) as refusal:
        session_policy(_read(*range(read)), _written(*range(write)))
    assert refusal.value.code == "policy_too_large"
    assert f"{read} read and {2 * write} write prefixes" in refusal.value.detail
    assert "Reduce the inputs and outputs" in refusal.value.detail


@pytest.mark.parametrize(("read", "write"), [(3, 1), (5, 1), (3, 2), (1, 3)])
def test_policy_for_a_few_inputs_and_outputs_fits(read: int, write: int) -> None:
    reads, writes = _read(*range(read)), _written(*range(50, 50 + write))
    policy = session_policy(reads, writes, UNTIL)
    assert len(policy) <= MAX_CHARACTERS
    granted = json.loads(policy)["Statement"]
    assert sorted(granted[0]["Resource"]) == [f"arn:aws:s3:::trace-objects/{each.path}*" for each in reads]
    assert sorted(granted[1]["Resource"]) == sorted(f"arn:aws:s3:::trace-objects/{each.path}*" for each in writes)


def test_long_policy_omits_listing_of_write_prefixes() -> None:
    def listed(policy: str) -> set[str]:
        return set(json.loads(policy)["Statement"][-1]["Condition"]["StringLike"]["s3:prefix"])

    reads, writes = _read(1, 2, 3), _written(4)
    paths = {f"{each.path}*" for each in reads}
    assert listed(session_policy(reads, writes, UNTIL)) == paths | {f"{each.path}*" for each in writes}
    reads, writes = _read(1), _written(4, 5, 6)
    assert listed(session_policy(reads, writes, UNTIL)) == {f"{each.path}*" for each in reads}


# Evaluation by S3

SEGMENTS = st.text("ab.-_ =", min_size=1, max_size=3)
PATHS = st.lists(SEGMENTS, min_size=1, max_size=3).map("/".join)


def _prefixes(paths: Sequence[str]) -> list[Prefix]:
    try:
        return [canonical(f"s3://bucket/{path}/") for path in paths]
    except Forbidden:
        reject()


def _allows(policy: dict[str, Any], action: str, resource: str, listed: str | None = None) -> bool:
    """Returns True if a statement allows it. IAM patterns here contain only `*`, which fnmatch supports."""
    return any(
        action in each["Action"]
        and any(fnmatchcase(resource, pattern) for pattern in each["Resource"])
        and _listable(each.get("Condition", {}), listed)
        for each in policy["Statement"]
        if each["Effect"] == "Allow"
    )


def _listable(condition: dict[str, Any], listed: str | None) -> bool:
    patterns = condition.get("StringLike", {}).get("s3:prefix")
    return patterns is None or (listed is not None and any(fnmatchcase(listed, each) for each in patterns))


@given(st.lists(PATHS, max_size=3), st.lists(PATHS, max_size=3), PATHS)
def test_policy_allows_exactly_the_prefixes(read: list[str], write: list[str], path: str) -> None:
    reads, writes = _prefixes(read), _prefixes(write)
    policy = json.loads(session_policy(reads, writes))
    uri, arn = f"s3://bucket/{path}", f"arn:aws:s3:::bucket/{path}"
    assume(_prefixes([path]))
    readable, writable = (any(prefix.has(uri) for prefix in these) for these in (reads + writes, writes))
    assert _allows(policy, "s3:GetObject", arn) == readable
    assert _allows(policy, "s3:PutObject", arn) == writable
    assert _allows(policy, "s3:AbortMultipartUpload", arn) == writable
    assert not _allows(policy, "s3:DeleteObject", arn)
    assert not _allows(policy, "s3:GetObject", f"arn:aws:s3:::bucket2/{path}")
    listed = any(f"{path}/".startswith(prefix.path) for prefix in reads + writes)
    assert _allows(policy, "s3:ListBucket", "arn:aws:s3:::bucket", f"{path}/") == listed
    assert not _allows(policy, "s3:ListBucket", "arn:aws:s3:::bucket", "")
    assert not _allows(policy, "s3:ListBucket", "arn:aws:s3:::bucket")


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for one in POLICIES:
        (GOLDEN / f"{one}.json").write_text(_text(one))
