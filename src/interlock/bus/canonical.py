"""Canonical JSON of RFC 8785, fast: what signatures of commands are made over.

The reference is the `rfc8785` package, which walks a value in Python. Encoding sorted keys by msgspec gives the same
bytes for nearly everything, at a tenth of the cost; where it might not, the reference decides. Tests hold the two
against each other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import rfc8785

from interlock.strict_json import MOST_DEPTH, NotStrict, opened, require_depth

_ASTRAL: Final = re.compile(rb"[\xf0-\xf4]")
"""RFC 8785 sorts by UTF-16, where characters beyond the basic plane come before some within it."""
_ZEROS: Final = bytes(48 if 48 <= byte <= 57 else 32 for byte in range(256))
"""Every digit a zero and all else a blank: a long number is found as a text then, faster than by any pattern."""
_LONG: Final = b"0" * 16
"""An integer that a double may not hold exactly has at least so many digits."""

_SAFE: Final = 2**53 - 1
_EXPONENT: Final = 10**21
"""From here on a double is written with an exponent."""


class NotCanonical(ValueError):
    """No JSON, or one that different readers would read differently. Says what is wrong with it."""


def canonical(raw: bytes | msgspec.Raw) -> bytes:
    """The canonical form of one JSON value.

    Refuses what has no canonical form: a key that comes twice, an integer that no double is written as, a number that
    is not finite.
    """
    try:
        form = _encoder.encode(_decoder.decode(raw))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise NotCanonical(_sentence(error)) from None
    text = bytes(raw)
    if _may_be_deep(text):
        _require_depth(text)
    # A text that is its own form has no key twice: the form has none.
    if form != text:
        if b"\\" in text:
            refuse_twins(text)
        elif text.count(b":") != form.count(b":"):
            # Without escapes every string is in both texts as it is: a colon that is missing belonged to a key.
            raise NotCanonical(_TWICE)
    if _needs_care(form):
        return _by_reference(text)
    return form


def all_canonical(raws: Sequence[msgspec.Raw]) -> list[bytes] | None:
    """The canonical form of each of these JSON values, which hold no escape; None where any of them needs a closer
    look. That a key comes twice is not seen here: the form has fewer colons then."""
    text = b"[%b]" % b",".join(raws)
    try:
        values = _values.decode(text)
        whole = _encoder.encode(values)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if _needs_care(whole) or any(map(_may_be_deep, raws)):
        return None
    return [bytes(raw) for raw in raws] if whole == text else [_encoder.encode(value) for value in values]


def _may_be_deep(raw: bytes | msgspec.Raw) -> bool:
    return len(raw) > MOST_DEPTH and opened(bytes(raw)) > MOST_DEPTH


def _require_depth(text: bytes) -> None:
    """What is accepted here is read again by others, with less of Python's stack left."""
    try:
        require_depth(text)
    except NotStrict as error:
        raise NotCanonical(str(error)) from None


def _needs_care(form: bytes) -> bool:
    return _LONG in form.translate(_ZEROS) or not (form.isascii() or _ASTRAL.search(form) is None)


def refuse_twins(text: bytes) -> None:
    """A key that comes twice is read by some as its first value, and by others as its last."""
    try:
        json.loads(text, object_pairs_hook=_pairs)
    except RecursionError as error:
        raise NotCanonical(_sentence(error)) from None
    except ValueError as error:
        raise NotCanonical(str(error)) from None


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    whole = dict(pairs)
    if len(whole) != len(pairs):
        raise NotCanonical(_TWICE)
    return whole


def _by_reference(text: bytes) -> bytes:
    try:
        return rfc8785.dumps(json.loads(text, parse_int=_integer))
    except NotCanonical:
        raise
    except (rfc8785.CanonicalizationError, ValueError, RecursionError) as error:
        raise NotCanonical(_sentence(error)) from None


def _integer(literal: str) -> int | float:
    """A large one must be what its double is written as. Others are not read as they are written by every reader."""
    number = int(literal)
    if abs(number) <= _SAFE:
        return number
    if abs(number) >= _EXPONENT or rfc8785.dumps(float(number)) != literal.encode():
        raise NotCanonical("an integer is beyond what a double holds exactly: send it as a string")
    return float(number)


def _number(literal: str) -> msgspec.Raw:
    """A fraction or an exponent, as ECMAScript writes it."""
    try:
        return msgspec.Raw(rfc8785.dumps(float(literal)))
    except rfc8785.FloatDomainError:
        raise NotCanonical(f"{literal[:40]} is beyond what a double can hold") from None


def _sentence(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error) or type(error).__name__


_TWICE: Final = "an object has the same key twice"
_decoder: Final = msgspec.json.Decoder(float_hook=_number)
_values: Final = msgspec.json.Decoder(list[Any], float_hook=_number)
_encoder: Final = msgspec.json.Encoder(order="sorted")
