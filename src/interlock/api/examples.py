"""Examples of the OpenAPI document: requests as somebody would send them, and what a gateway has replied to them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

Document = dict[str, Any]


@cache
def _examples() -> dict[str, Document]:
    """By method and path."""
    found: dict[str, Document] = json.loads((resources.files("interlock.api") / "examples.json").read_text())
    return found


def with_examples(method: str, path: str, operation: Document) -> Document:
    given = _examples().get(f"{method.upper()} {path}")
    if given is None:
        return operation
    replies = given.get("replies", {})
    responses = {
        status: _shown(response, replies[status]) if status in replies else response
        for status, response in operation["responses"].items()
    }
    if "requestBody" not in operation or "requests" not in given:
        return operation | {"responses": responses}
    return operation | {"requestBody": _shown(operation["requestBody"], given["requests"]), "responses": responses}


def _shown(body: Document, values: Mapping[str, Any]) -> Document:
    examples = {name: {"value": value} for name, value in values.items()}
    return body | {"content": {kind: content | {"examples": examples} for kind, content in body["content"].items()}}
