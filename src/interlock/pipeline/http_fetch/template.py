"""Bodies made of the payload: a JSON value in whose strings `{{field}}` stands for a field.

Fields are put into the value, and the whole is written as JSON afterwards: whatever a payload holds, it stays where it
was put.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from interlock.pipeline.failures import BadConfig
from interlock.workers.context import TaskFailed

_FIELD: Final = re.compile(r"\{\{\s*([^{}]*?)\s*\}\}")
_PATH: Final = re.compile(r"[^.\s]+(\.[^.\s]+)*")
_DEEPEST: Final = 50


def check(template: Any, depth: int = 0) -> None:
    """Raises BadConfig."""
    if depth > _DEEPEST:
        raise BadConfig(f"body is more than {_DEEPEST} levels deep.")
    if isinstance(template, str):
        for found in _FIELD.finditer(template):
            if not _PATH.fullmatch(found[1]):
                raise BadConfig("body has {{…}} that names no field: write {{field}}, or {{field.of.field}}.")
    for part in _parts(template):
        check(part, depth + 1)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, list) else []


def rendered(template: Any, payload: dict[str, Any]) -> bytes:
    """The body as JSON. Raises TaskFailed when the payload lacks a field."""
    return msgspec.json.encode(_filled(template, payload))


def _filled(template: Any, payload: dict[str, Any]) -> Any:
    match template:
        case str():
            return _string(template, payload)
        case dict():
            return {_text(_string(name, payload)): _filled(value, payload) for name, value in template.items()}
        case list():
            return [_filled(value, payload) for value in template]
    return template


def _string(template: str, payload: dict[str, Any]) -> Any:
    alone = _FIELD.fullmatch(template)
    if alone is not None:
        return _field(alone[1], payload)
    return _FIELD.sub(lambda found: _text(_field(found[1], payload)), template)


def _text(value: Any) -> str:
    """Within a text: strings as they are, everything else as JSON says it."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _field(path: str, payload: dict[str, Any]) -> Any:
    value: Any = payload
    for name in path.split("."):
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            raise TaskFailed(f"The payload has no field {path!r}, which the body of the request needs.", "BadPayload")
    return value
