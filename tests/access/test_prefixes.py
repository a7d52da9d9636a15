"""Prefixes of grants: only one spelling is accepted, and it covers exactly the objects below it."""

from __future__ import annotations

import string
import unicodedata
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from interlock.access.prefixes import Prefix, canonical, canonical_all
from interlock.errors import Forbidden

REFUSED = {
    "nothing": "",
    "no scheme": "bucket/a/",
    "another scheme": "https://bucket/a/",
    "a scheme in capitals": "S3://bucket/a/",
    "a scheme of Hadoop": "s3a://bucket/a/",
    "a scheme and no more": "s3://",
    "one slash": "s3:/bucket/a/",
    "no bucket": "s3:///a/",
    "no prefix": "s3://bucket",
    "an empty prefix": "s3://bucket/",
    "a prefix that is a slash": "s3://bucket//",
    "a bucket that is a pattern": "s3://*/a/",
    "a bucket in capitals": "s3://Bucket/a/",
    "a bucket with a port": "s3://bucket:80/a/",
    "a bucket with a user": "s3://me@bucket/a/",
    "a bucket of dots": "s3://../a/",
    "a bucket with two dots": "s3://a..b/a/",
    "a bucket that is too short": "s3://b/a/",
    "a machine": "file://machine/a/",
    "the root of a machine": "file:///",
    "dots": "s3://bucket/a/../b/",
    "dots at the end": "s3://bucket/a/..",
    "dots at the beginning": "s3://bucket/../a/",
    "dots inside a name": "s3://bucket/a..b/",
    "many dots": "s3://bucket/a/.../b/",
    "encoded dots": "s3://bucket/a/%2e%2e/b/",
    "encoded dots in capitals": "s3://bucket/a/%2E%2E/b/",
    "one encoded dot": "s3://bucket/a/.%2e/b/",
    "dots that are encoded twice": "s3://bucket/a/%252e%252e/b/",
    "dots that are encoded three times": "s3://bucket/a/%25252e%25252e/b/",
    "overlong dots": "s3://bucket/a/%c0%ae%c0%ae/b/",
    "overlong dots as they are decoded": "s3://bucket/a/\xc0\xae\xc0\xae/b/",
    "dots of IIS": "s3://bucket/a/%u002e%u002e/b/",
    "dots as an entity": "s3://bucket/a/&#46;&#46;/b/",
    "dots as a hexadecimal entity": "s3://bucket/a/&#x2e;&#x2E;/b/",
    "dots as a named entity": "s3://bucket/a/&period;&period;/b/",
    "one dot as an entity": "s3://bucket/a/.&#46;/b/",
    "a slash as an entity": "s3://bucket/a&sol;b/",
    "a fragment": "s3://bucket/a/#/b/",
    "parameters of a segment": "s3://bucket/a/..;/b/",
    "parameters of a plain segment": "s3://bucket/a;b/",
    "dots as an escape": "s3://bucket/a/\\u002e\\u002e/b/",
    "wide dots": "file:///a/\uff0e\uff0e/b/",
    "a leader of two dots": "file:///a/\u2025/b/",
    "leaders of one dot": "file:///a/\u2024\u2024/b/",
    "small dots": "file:///a/\ufe52\ufe52/b/",
    "dots of another script": "file:///a/\u3002\u3002/b/",
    "a wide slash": "file:///a\uff0fb/",
    "a slash of division": "file:///a\u2215b/",
    "a slash of fractions": "file:///a\u2044b/",
    "a wide percent sign": "file:///a/\uff052e/",
    "a wide star": "file:///a/\uff0a/",
    "wide letters": "file:///\uff41/",
    "a ligature": "file:///\ufb01le/",
    "letters that are not composed": "file:///cafe\u0301/",
    "a letter outside ASCII in S3": "s3://bucket/é/",
    "a backslash": "s3://bucket/a\\b/",
    "dots behind a backslash": "s3://bucket/a/..\\b/",
    "an encoded slash": "s3://bucket/a%2fb/",
    "an encoded NUL": "s3://bucket/a%00/",
    "a star": "s3://bucket/a/*",
    "a star inside": "s3://bucket/a/*/b/",
    "a question mark": "s3://bucket/a/?/",
    "a query": "s3://bucket/a/?versionId=1",
    "a variable of a policy": "s3://bucket/${aws:username}/",
    "a variable that is a star": "s3://bucket/${*}/",
    "brackets": "s3://bucket/[ab]/",
    "a quote": 's3://bucket/a"/',
    "an empty segment": "s3://bucket/a//b/",
    "two slashes at the end": "s3://bucket/a//",
    "two slashes at the beginning": "s3://bucket//a/",
    "a segment that is a dot": "s3://bucket/a/./b/",
    "a dot at the end": "s3://bucket/a/.",
    "a space at the end of a segment": "s3://bucket/a /b/",
    "a segment that is a space": "s3://bucket/a/ /b/",
    "dots around a space": "s3://bucket/a/. ./b/",
    "NUL": "s3://bucket/a\0/",
    "a line feed": "s3://bucket/a\n/",
    "a line feed at the very end": "s3://bucket/a/\n",
    "a tab": "s3://bucket/a\tb/",
    "delete": "s3://bucket/a\x7f/",
    "a control of Latin-1": "file:///a\x85/",
    "a mark of direction": "file:///a\u202e/",
    "a space of no width": "file:///a\u200b/",
    "a joiner of no width": "file:///a\u200d/",
    "a mark of the byte order": "\ufeffs3://bucket/a/",
    "half of a surrogate pair": "file:///a\ud800/",
    "a space before it": " s3://bucket/a/",
    "more than a key may have": f"s3://bucket/{'a' * 1025}/",
}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_ambiguous_prefix_is_refused(text: str) -> None:
    with pytest.raises(Forbidden) as refusal:
        canonical(text)
    assert refusal.value.code == "bad_prefix"
    assert "objects_url" in refusal.value.detail


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("s3://bucket/a/b/", "s3://bucket/a/b/"),
        ("s3://bucket/a/b", "s3://bucket/a/b/"),
        ("s3://my.bucket-1/_attempts/1=2,3 4/", "s3://my.bucket-1/_attempts/1=2,3 4/"),
        ("file:///var/lib/interlock.d/objects/", "file:///var/lib/interlock.d/objects/"),
        ("file:///home/josé/データ/objects", "file:///home/josé/データ/objects/"),
    ],
)
def test_plain_prefix_gets_a_trailing_slash(text: str, spelled: str) -> None:
    assert str(canonical(text)) == spelled


PLAIN = string.ascii_letters + string.digits + "_-=.é语 "
SEGMENTS = st.text(PLAIN, min_size=1, max_size=12)
HOSTILE = st.sampled_from(
    [
        "..",
        ".",
        "",
        "%2e%2e",
        "%252e",
        "%c0%ae",
        "&#46;&#46;",
        "#",
        ";",
        "*",
        "?",
        "\0",
        "\n",
        "\\",
        "\uff0e\uff0e",
        "\u2025",
        "\u2215",
        "${aws:userid}",
        "%00",
        "\u202e",
        " ",
    ]
)
PLACES = st.sampled_from(["s3://bucket", "s3://other-bucket", "file://"])


def _accepted(text: str) -> Prefix | None:
    try:
        return canonical(text)
    except Forbidden:
        return None


@given(PLACES, st.lists(st.one_of(SEGMENTS, HOSTILE, st.text(max_size=6)), max_size=5), st.booleans())
def test_accepted_prefix_has_one_spelling_and_one_meaning(place: str, segments: list[str], slash: bool) -> None:
    text = "/".join([place, *segments]) + "/" * slash
    prefix = _accepted(text)
    if prefix is None:
        return
    spelled = str(prefix)
    assert canonical(spelled) == prefix
    assert spelled in (text, f"{text}/")
    assert all(segment.strip(".") and segment.strip() == segment for segment in prefix.path[:-1].split("/"))
    assert not set(prefix.path) & set("*?%\\$&#;\"'<>|{}[]^`")
    assert ".." not in unicodedata.normalize("NFKC", spelled)
    assert unicodedata.normalize("NFKC", spelled).count("/") == spelled.count("/")
    assert spelled.isprintable()
    # A second decoding changes nothing.
    assert quote(spelled, safe=spelled) == spelled or prefix.scheme == "file"


@given(PLACES, st.lists(SEGMENTS, min_size=1, max_size=4), HOSTILE, st.integers(0, 4))
@example("s3://bucket", ["a"], "..", 1)
def test_one_hostile_segment_makes_a_prefix_invalid(
    place: str, segments: list[str], hostile: str, position: int
) -> None:
    segments.insert(min(position, len(segments)), hostile)
    assert _accepted("/".join([place, *segments]) + "/") is None


@given(st.lists(SEGMENTS, min_size=1, max_size=3), st.text(PLAIN + "/*%?\\\0", min_size=1, max_size=20))
def test_prefix_contains_exactly_the_objects_below_it(segments: list[str], rest: str) -> None:
    prefix = _accepted("/".join(["s3://bucket", *segments]))
    if prefix is None:
        return
    assert not prefix.has(f"{str(prefix)[:-1]}{rest}") or rest.startswith("/")
    assert prefix.has(f"{prefix}{rest}") == (_accepted(f"file:///x/{rest}") is not None and not rest.endswith("/"))
    assert not prefix.has(str(prefix))
    assert not prefix.has(f"s3://bucket2/{prefix.path}x")
    assert not prefix.has(f"{prefix}../x")


@given(st.text())
def test_any_text_is_a_valid_prefix_or_refused(text: str) -> None:
    prefix = _accepted(text)
    assert prefix is None or str(prefix).startswith(("s3://", "file:///"))


def test_prefix_outside_the_object_root_is_refused() -> None:
    inside = ["s3://bucket/root/b/", "s3://bucket/root/a", "s3://bucket/root/a/"]
    assert [str(prefix) for prefix in canonical_all(inside, "s3://bucket/root")] == [
        "s3://bucket/root/a/",
        "s3://bucket/root/b/",
    ]
    for outside in ("s3://bucket/rootless/", "s3://bucket/other/", "s3://elsewhere/root/a/", "file:///root/a/"):
        with pytest.raises(Forbidden, match="objects_url"):
            canonical_all([outside], "s3://bucket/root")
