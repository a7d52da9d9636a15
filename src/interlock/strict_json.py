"""JSON that every later reader reads alike: Postgres `jsonb`, Python, Spark.

A payload is stored as the text that came and is read much later, next to payloads of other orgs: in a claim, in a
background loop, in an export. A text that one of these readers refuses, or reads differently, is refused on arrival:

- a number that is not finite as a double, has too many digits, or an exponent that `numeric` cannot hold;
- a NUL character or half of a surrogate pair, which Postgres text cannot hold;
- an object with the same key twice, which some read as its first value and others as its last;
- nesting deeper than `MOST_DEPTH`.

Decoding and encoding by msgspec clears nearly every text. The rest is read by the standard library, slower, which also
finds the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

MOST_DEPTH: Final = 512
"""Python's readers give up at about 1,000 frames, of which the caller has used some."""
MOST_DIGITS: Final = 4000
"""Python converts integers of up to 4,300 digits; `numeric` has room for 16,383 behind the point."""
_FARTHEST_EXPONENT: Final = 10_000
_LONG: Final = b"0" * MOST_DIGITS
_FAR: Final = re.compile(rb"e-?0000")
"""Numbers that need a closer look, in a text where every digit is 0, every sign - and every E e."""
_DIGITS: Final = bytes.maketrans(b"123456789+E", b"000000000-e")
_MANTISSA: Final = re.compile(rb"(?:^|[\s:,\[]-?)[0-9.]+$")
_LOOKED_BACK: Final = 30
_NUMBER: Final = re.compile(r"-?(?P<digits>[0-9.]*)(?:[eE](?P<exponent>[+-]?[0-9]+))?")
_SHORT: Final = 60
_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*"')
_BRACKETS: Final = re.compile(rb"[\[\]{}]")


class NotStrict(ValueError):
    """Raised for JSON that cannot be stored, or that readers would read differently. The text is a clause."""


class RepeatedKey(NotStrict):
    """Raised for an object that has the same key twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"an object has the key {_shown(key)} twice")


def first_not_strict(raws: Sequence[bytes | msgspec.Raw]) -> tuple[int, NotStrict] | None:
    """The first of these JSON texts that is not strict, by its place, and the reason; None when all of them are."""
    if _all_plain(raws):
        return None
    for place, raw in enumerate(raws):
        try:
            require_strict(raw)
        except NotStrict as error:
            return place, error
    return None


def require_strict(raw: bytes | msgspec.Raw) -> None:
    """Raises NotStrict unless every reader reads this JSON text alike."""
    if not _all_plain([raw]):
        try:
            value = json.loads(
                bytes(raw).decode(),
                object_pairs_hook=_unique,
                parse_int=_number,
                parse_float=_number,
                parse_constant=_no,
            )
        except NotStrict:
            raise
        except UnicodeDecodeError:
            raise NotStrict("it is not UTF-8") from None
        except RecursionError:
            raise NotStrict(_DEEP) from None
        except ValueError as error:
            raise NotStrict(f"it is not JSON: {error}") from None
        _walk(value)


def require_unique_keys(body: bytes, *, top_only: bool = False) -> None:
    """Raises RepeatedKey for a repeated key, at any depth or in the outermost object; judges nothing else."""
    if _has_as_many_colons(body):
        return
    outermost: list[tuple[str, Any]] = []

    def remember(pairs: list[tuple[str, Any]]) -> None:
        outermost[:] = pairs  # the last one to be complete

    try:
        text = body.decode("utf-8", "surrogateescape")
        json.loads(text, object_pairs_hook=remember if top_only else _unique, parse_int=str, parse_float=str)
        _unique(outermost)
    except RecursionError:
        raise NotStrict(_DEEP) from None
    except RepeatedKey:
        raise
    except ValueError as error:
        raise NotStrict(f"it is not JSON: {error}") from None


def _has_as_many_colons(body: bytes) -> bool:
    """A colon that is missing from what was decoded belonged to a repeated key, unless one was written as an escape."""
    if b"\\u003a" in body or b"\\u003A" in body:
        return False
    try:
        return body.count(b":") == _encoder.encode(_decoder.decode(body)).count(b":")
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False


def _all_plain(raws: Sequence[bytes | msgspec.Raw]) -> bool:
    """Whether all of these texts are strict, as far as that is quick to tell; False asks for a closer look."""
    if not is_plain(b"[%b]" % b",".join(raws)):
        return False
    return all(opened(bytes(raw)) <= MOST_DEPTH for raw in raws if len(raw) > MOST_DEPTH)


def is_plain(text: bytes) -> bool:
    """Whether a JSON text is strict but for its depth, as far as that is quick to tell."""
    if b"\\u0000" in text or not _has_as_many_colons(text):
        return False
    digits = text.translate(_DIGITS)
    return _LONG not in digits and not any(_is_number(text, far.start()) for far in _FAR.finditer(digits))


def _is_number(text: bytes, at: int) -> bool:
    """Whether the `e` there may belong to a number: hashes and escapes have digits behind an e, too."""
    return _MANTISSA.search(text[max(0, at - _LOOKED_BACK) : at]) is not None


def require_depth(text: bytes) -> None:
    """Raises NotStrict for a JSON text that is nested deeper than `MOST_DEPTH`."""
    depth = 0
    for bracket in _BRACKETS.findall(_STRING.sub(b"", text)):
        depth += 1 if bracket in b"[{" else -1
        if depth > MOST_DEPTH:
            raise NotStrict(_DEEP)


def opened(text: bytes) -> int:
    """Brackets and braces that are opened, those in strings included: no text is nested deeper."""
    return text.count(b"[") + text.count(b"{")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    whole = dict(pairs)
    if len(whole) != len(pairs):
        seen: set[str] = set()
        raise RepeatedKey(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return whole


def _number(literal: str) -> float:
    found = _NUMBER.fullmatch(literal)
    exponent = int(found["exponent"] or 0) if found and len(found["exponent"] or "") < _SHORT else _FARTHEST_EXPONENT
    if found is None or len(found["digits"]) > MOST_DIGITS or abs(exponent) >= _FARTHEST_EXPONENT:
        raise NotStrict(f"the number {_shown(literal)} has too many digits")
    value = float(literal)
    if ("." in literal or exponent) and value in (float("inf"), float("-inf")):
        raise NotStrict(f"the number {_shown(literal)} is beyond what a double can hold")
    return value


def _no(literal: str) -> float:
    raise NotStrict(f"{literal} is not a JSON number")


def _walk(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(MOST_DEPTH + 1):
        inside: list[Any] = []
        nested = False
        for each in level:
            if isinstance(each, str):
                _require_text(each)
            elif isinstance(each, dict):
                nested = True
                inside += [*each.keys(), *each.values()]
            elif isinstance(each, list):
                nested = True
                inside += each
        if not nested:
            return
        level = inside
    raise NotStrict(_DEEP)


def _require_text(text: str) -> None:
    if "\x00" in text:
        raise NotStrict("a string has a NUL character (\\u0000)")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise NotStrict("a string has half of a surrogate pair") from None


def _shown(text: str) -> str:
    return ascii(text if len(text) <= _SHORT else f"{text[:_SHORT]}…")


_DEEP: Final = f"it is nested more than {MOST_DEPTH} levels deep"
_decoder: Final = msgspec.json.Decoder()
_encoder: Final = msgspec.json.Encoder()
