"""Masks the values of secrets in everything that leaves a process that runs operators.

In results, errors, progress texts and events of a task, the secrets of this task are masked. Printed lines go to the
worker's log; in them, all secrets that the process ever got are masked.

This catches accidents: an exception that quotes a URL, a result that contains the headers. An operator that leaks a
value on purpose can encode it; only binding the secret to its hosts prevents that.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final
from urllib.parse import quote, quote_plus, unquote, urlsplit

import msgspec

from interlock.wire.access import SHORTEST
from interlock.workers import protocol

MASK: Final = "[secret]"
_PART: Final = 4
"""Shortest truncated part of a value that is masked, in characters."""


class Redactor:
    """Masks values in text, in the encodings that are common there."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        self._values: set[str] = set()
        self._forms: list[str] = []
        self._heads = re.compile("(?!)")
        self.add(values)

    def __bool__(self) -> bool:
        return bool(self._values)

    def add(self, values: Iterable[str]) -> None:
        fresh = {value for value in values if len(value) >= SHORTEST} - self._values
        if fresh:
            self._values |= fresh
            self._forms = sorted({form for value in self._values for form in _forms(value)})
            self._heads = re.compile("|".join(sorted({re.escape(_head(form)) for form in self._forms})), re.IGNORECASE)

    def text(self, text: str) -> str:
        """Masks values, including those that are truncated at the end of the text."""
        if not self._values:
            return text
        parts, at = [], 0
        while found := self._heads.search(text, at):
            start = found.start()
            parts += [text[at:start], MASK]
            at = max(found.end(), start + max(_common(form, text, start) for form in self._forms))
        masked = "".join([*parts, text[at:]])
        body = masked.removesuffix("…")
        cut = max(_overlap(body, form) for form in self._forms)
        return masked if cut < _PART else body[:-cut] + MASK + masked[len(body) :]

    def line(self, line: str) -> str:
        """Masks values, and also the end of a value at the start of the line, since output comes in pieces."""
        masked = self.text(line)
        cut = max((_overlap(form, masked) for form in self._forms), default=0)
        return masked if cut < _PART else MASK + masked[cut:]

    def json(self, document: bytes) -> bytes:
        """Masks values in strings, names and numbers of a document. Returns it unchanged if it contains none."""
        if not self._values:
            return document
        value = msgspec.json.decode(document)
        masked = self.value(value)
        return document if masked == value else msgspec.json.encode(masked)

    def value(self, value: Any) -> Any:
        """Masks values in a decoded JSON document, hence Any."""
        match value:
            case str():
                return self.text(value)
            case dict():
                return {self.text(name): self.value(one) for name, one in value.items()}
            case list():
                return [self.value(one) for one in value]
            case bool() | None:
                return value
        return MASK if self._heads.search(str(value)) else value


def _forms(value: str) -> set[str]:
    """Returns the value unchanged, line by line, and as encoded in URLs, JSON, Python, base64 and hex."""
    data = value.encode()
    escaped = msgspec.json.encode(value).decode()[1:-1]
    forms = {value, *value.splitlines(), quote(value), quote(value, safe=""), quote_plus(value), escaped}
    forms |= {json.dumps(value)[1:-1], ascii(value)[1:-1], repr(value)[1:-1], repr(data)[2:-1]}
    forms |= {data.hex(), data.hex(" "), *_base64(data)}
    return {form for form in forms if len(form) >= SHORTEST}


def _base64(data: bytes) -> Iterator[str]:
    """Yields encodings of the data alone, and of its inner part after other bytes, as in `user:password`.

    Three bytes become four characters, so there are three alignments. A character that also encodes a neighboring byte
    is left out.
    """
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        yield encode(data).decode().rstrip("=")
        for before in range(3):
            first, last = -(-before * 8 // 6), (before + len(data)) * 8 // 6
            yield encode(bytes(before) + data).decode()[first:last]


def _head(form: str) -> str:
    """Returns the prefix that identifies a value: long enough to be rare in other text."""
    return form[: max(SHORTEST, len(form) // 4)]


def _common(form: str, text: str, at: int) -> int:
    """Returns the length of the common prefix of `form` and the text from `at` on, ignoring case."""
    if text[at : at + len(form)].casefold() == form.casefold():
        return len(form)
    pairs = zip(form, text[at : at + len(form)], strict=False)
    return next((size for size, (one, other) in enumerate(pairs) if one.casefold() != other.casefold()), len(text) - at)


def _overlap(first: str, second: str) -> int:
    """Returns the length of the longest proper prefix of `second` with which `first` ends."""
    if len(second) < _PART:
        return 0
    window = first[-(len(second) - 1) :]
    at = window.find(second[:_PART])
    while at >= 0:
        if second.startswith(window[at:]):
            return len(window) - at
        at = window.find(second[:_PART], at + 1)
    return 0


class Redaction:
    """The secrets that a process got, by unanswered slot."""

    def __init__(self) -> None:
        self._ever = Redactor()
        self._by_slot: dict[int, Redactor] = {}

    def given(self, assign: protocol.Assign) -> None:
        work = assign.work
        values = [one.value for one in work.secrets if one.value is not None] + list(work.environment.values())
        redactor = Redactor([*values, *_passwords(work)])
        if redactor:
            self._ever.add([*values, *_passwords(work)])
            self._by_slot |= dict.fromkeys((task.slot for task in assign.tasks), redactor)

    def line(self, line: str) -> str:
        return self._ever.line(line)

    def cleaned(self, messages: list[protocol.ToWrapper]) -> list[protocol.ToWrapper]:
        return [self._cleaned(message) for message in messages] if self._ever else messages

    def _cleaned(self, message: protocol.ToWrapper) -> protocol.ToWrapper:
        replace = msgspec.structs.replace
        match message:
            case protocol.Finished():
                own = self._by_slot.pop(message.slot, None)
                return message if own is None else _finished(message, own)
            case protocol.Raised():
                own = self._by_slot.pop(message.slot, None) or Redactor()
                return replace(message, error_class=own.text(message.error_class), message=own.text(message.message))
            case protocol.Stopped():
                self._by_slot.pop(message.slot, None)
            case protocol.GivenBack() | protocol.Outdated():
                for slot in message.slots:
                    self._by_slot.pop(slot, None)
            case protocol.Progressed():
                own = self._by_slot.get(message.slot)
                return message if own is None or message.text is None else replace(message, text=own.text(message.text))
            case protocol.Emit():
                own = self._by_slot.get(message.slot)
                return message if own is None else replace(message, events=_structs(message.events, own))
            case protocol.Printed():
                return replace(message, line=self._ever.line(message.line))
            case protocol.Traced() | protocol.Spent():
                return self._without_slot(message)
        return message

    def _without_slot(self, message: protocol.Traced | protocol.Spent) -> protocol.ToWrapper:
        if isinstance(message, protocol.Spent):
            return msgspec.structs.replace(message, reason=self._ever.text(message.reason))
        frames, text = self._ever.text(message.frames), self._ever.text(message.text)
        return msgspec.structs.replace(message, frames=frames, text=text)


def _passwords(work: protocol.Work) -> list[str]:
    """Returns the passwords of the platform that the process gets, with the URLs that contain them."""
    urls = [work.data_url, work.state_url, work.outbound.proxy if work.outbound else None]
    parts = [(url, urlsplit(url).password) for url in urls if url is not None]
    return [text for url, password in parts if password for text in (url, unquote(password), password)]


def _finished(message: protocol.Finished, own: Redactor) -> protocol.Finished:
    return msgspec.structs.replace(
        message,
        result=own.json(message.result),
        events=_structs(message.events, own),
        outputs=_structs(message.outputs, own),
    )


def _structs(items: list[Any], own: Redactor) -> list[Any]:
    """Masks the texts of events or outputs, hence Any. Ids and positions cannot contain a value."""
    return [
        msgspec.structs.replace(
            item,
            **{name: own.text(text) for name in item.__struct_fields__ if isinstance(text := getattr(item, name), str)},
        )
        for item in items
    ]
