"""Strict JSON, which Postgres, Python and Spark read alike; and JSON pointers into it.

A quick check by msgspec and byte searches proves most texts strict, in 11 µs per KB. The complete check by `json` and
its hooks, in Python, takes 30 µs per KB; it runs for the others and finds the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

_INDEX: Final = re.compile("[0-9]{1,9}")
_MAX_CHARACTERS: Final = 1000
_MAX_BYTES: Final = 2000
"""Keys are part of index entries, which PostgreSQL limits to about 2,700 bytes."""


def pointed(value: Any, pointer: str) -> str | None:
    """Returns the scalar at a JSON pointer as text, or None if there is no scalar.

    Raises ValueError if it is too long or is not valid text.
    """
    found = resolved(value, pointer)
    return None if isinstance(found, dict | list) else as_key(found)


def resolved(value: Any, pointer: str) -> Any:
    """Returns the value at a JSON pointer, or None."""
    for part in pointer.split("/")[1:]:
        token = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and _INDEX.fullmatch(token) and int(token) < len(value):
            value = value[int(token)]
        else:
            value = value.get(token) if isinstance(value, dict) else None
    return value


def as_key(value: Any) -> str | None:
    """Returns a scalar as text, or None for null. Raises ValueError with the reason if it cannot be a key."""
    if value is None:
        return None
    if isinstance(value, dict | list):
        raise ValueError("is a list or an object")  # noqa: TRY004 - invalid payload, not a type error of the program
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if len(text) > _MAX_CHARACTERS or len(text.encode()) > _MAX_BYTES:
        raise ValueError(f"has more than {_MAX_CHARACTERS} characters or {_MAX_BYTES} bytes")
    if "\x00" in text:
        raise ValueError("has a NUL character")
    return text


MAX_DEPTH: Final = 512
"""Python's parsers fail at about 1,000 stack frames, and the caller already uses some of them."""
MAX_DIGITS: Final = 4000
"""Python converts integers of up to 4,300 digits; `numeric` stores up to 16,383 digits after the decimal point."""
_FARTHEST_EXPONENT: Final = 10_000
_LONG: Final = b"0" * MAX_DIGITS
_FAR: Final = re.compile(rb"e-?0000")
"""Finds numbers that need a closer check, after `_DIGITS` mapped every digit to 0, every sign to - and every E to e.
The same search by regular expressions in the text itself takes 10 to 22 µs per KB instead of 4."""
_DIGITS: Final = bytes.maketrans(b"123456789+E", b"000000000-e")
_MANTISSA: Final = re.compile(rb"(?:^|[\s:,\[]-?)[0-9.]+$")
_LOOKBACK: Final = 30
_NUMBER: Final = re.compile(r"-?(?P<digits>[0-9.]*)(?:[eE](?P<exponent>[+-]?[0-9]+))?")
_SHORT: Final = 60
_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*"')
_BRACKETS: Final = re.compile(rb"[\[\]{}]")


class NotStrict(ValueError):
    """Raised for JSON that cannot be stored, or that readers would interpret differently. The message is a clause."""


class RepeatedKey(NotStrict):
    """Raised for an object with a duplicate key."""

    def __init__(self, key: str) -> None:
        super().__init__(f"an object has the key {_shown(key)} twice")


def first_not_strict(raws: Sequence[bytes | msgspec.Raw]) -> tuple[int, NotStrict] | None:
    """Returns the index of the first text that is not strict, with the reason. Returns None if all are strict."""
    if _all_plain(raws):
        return None
    for place, raw in enumerate(raws):
        try:
            require_strict(raw)
        except NotStrict as error:
            return place, error
    return None


def require_strict(raw: bytes | msgspec.Raw) -> None:
    """Raises NotStrict unless all readers interpret this JSON text the same way."""
    if not _all_plain([raw]):
        try:
            value = json.loads(
                bytes(raw).decode(),
                object_pairs_hook=_unique,
                parse_int=_number,
                parse_float=_number,
                parse_constant=_reject_constant,
            )
        except NotStrict:
            raise
        except UnicodeDecodeError:
            raise NotStrict("it is not UTF-8") from None
        except RecursionError:
            raise NotStrict(_TOO_DEEP) from None
        except ValueError as error:
            raise NotStrict(f"it is not JSON: {error}") from None
        _walk(value)


def require_unique_keys(body: bytes, *, top_only: bool = False) -> None:
    """Raises RepeatedKey for a duplicate key at any depth, or only in the outermost object. Checks nothing else."""
    if _has_as_many_colons(body):
        return
    outermost: list[tuple[str, Any]] = []

    def remember(pairs: list[tuple[str, Any]]) -> None:
        outermost[:] = pairs  # the outermost object completes last

    try:
        text = body.decode("utf-8", "surrogateescape")
        json.loads(text, object_pairs_hook=remember if top_only else _unique, parse_int=str, parse_float=str)
        _unique(outermost)
    except RecursionError:
        raise NotStrict(_TOO_DEEP) from None
    except RepeatedKey:
        raise
    except ValueError as error:
        raise NotStrict(f"it is not JSON: {error}") from None


def _has_as_many_colons(body: bytes) -> bool:
    """Compares the number of colons before and after decoding: a missing colon belonged to a duplicate key.

    Returns False if a colon is written as an escape, because then the comparison proves nothing.
    """
    if b"\\u003a" in body or b"\\u003A" in body:
        return False
    try:
        return body.count(b":") == _encoder.encode(_decoder.decode(body)).count(b":")
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False


def _all_plain(raws: Sequence[bytes | msgspec.Raw]) -> bool:
    """Returns True if a quick check proves all texts strict. False means that a closer check is needed."""
    if not is_plain(b"[%b]" % b",".join(raws)):
        return False
    return all(opened(bytes(raw)) <= MAX_DEPTH for raw in raws if len(raw) > MAX_DEPTH)


def is_plain(text: bytes) -> bool:
    """Returns True if a quick check proves a text strict, except for its depth."""
    if b"\\u0000" in text or not _has_as_many_colons(text):
        return False
    digits = text.translate(_DIGITS)
    return _LONG not in digits and not any(_is_number(text, far.start()) for far in _FAR.finditer(digits))


def _is_number(text: bytes, at: int) -> bool:
    """Returns True if the `e` at this offset may belong to a number. Hashes and escapes also have digits after an e."""
    return _MANTISSA.search(text[max(0, at - _LOOKBACK) : at]) is not None


def require_depth(text: bytes) -> None:
    """Raises NotStrict for a JSON text nested deeper than `MAX_DEPTH`."""
    depth = 0
    for bracket in _BRACKETS.findall(_STRING.sub(b"", text)):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise NotStrict(_TOO_DEEP)


def opened(text: bytes) -> int:
    """Counts opening brackets and braces, including those in strings: an upper bound of the nesting depth."""
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
    if found is None or len(found["digits"]) > MAX_DIGITS or abs(exponent) >= _FARTHEST_EXPONENT:
        raise NotStrict(f"the number {_shown(literal)} has too many digits")
    value = float(literal)
    if ("." in literal or exponent) and value in (float("inf"), float("-inf")):
        raise NotStrict(f"the number {_shown(literal)} does not fit into a double")
    return value


def _reject_constant(literal: str) -> float:
    raise NotStrict(f"{literal} is not a JSON number")


def _walk(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
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
    raise NotStrict(_TOO_DEEP)


def _require_text(text: str) -> None:
    if "\x00" in text:
        raise NotStrict("a string contains a NUL character (\\u0000)")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise NotStrict("a string contains an unpaired surrogate") from None


def _shown(text: str) -> str:
    return ascii(text if len(text) <= _SHORT else f"{text[:_SHORT]}…")


_TOO_DEEP: Final = f"it is nested more than {MAX_DEPTH} levels deep"
_decoder: Final = msgspec.json.Decoder()
_encoder: Final = msgspec.json.Encoder()
