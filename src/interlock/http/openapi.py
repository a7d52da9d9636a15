"""The OpenAPI documents: routes from Litestar, body schemas from the msgspec decoder.

Litestar's own schemas of the structs lose constraints: rejected unknown fields, limits of optional values, patterns of
list items, structs that are encoded as arrays.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module, resources
from pkgutil import iter_modules
from typing import Any

import msgspec
from litestar import Request
from litestar.openapi.plugins import JsonRenderPlugin

from interlock import schemas, wire

Document = dict[str, Any]

_REFERENCE = re.compile(r"#/components/schemas/(\w+)")
_TEXT = {"schema": {"type": "string"}}
_EVERYWHERE = {"X-Request-Id": _TEXT | {"required": True, "description": "The id in log lines of this request."}}
_BY_STATUS = {
    "405": {"Allow": _TEXT | {"required": True, "description": "Methods that the path supports."}},
    "429": {"Retry-After": _TEXT | {"required": True, "description": "Seconds until a retry is useful."}},
}


class DocumentPlugin(JsonRenderPlugin):
    """Serves the document that `exact` builds."""

    def render(self, request: Request[Any, Any, Any], openapi_schema: Document) -> bytes:
        return super().render(request, exact(openapi_schema))


def exact(document: Document) -> Document:
    # Bodies that handlers document themselves appear only as references.
    named = {*document["components"]["schemas"], *_REFERENCE.findall(str(document["paths"]))}
    components = document["components"] | {"schemas": _schemas(sorted(named))}
    paths = {path: _path(path, item) for path, item in document["paths"].items()}
    return document | {"components": components, "paths": paths}


def model(name: str) -> type:
    """Returns the type of a body by its name, which is unique on the wire."""
    return _models()[name]


@cache
def _models() -> dict[str, type]:
    modules = [schemas, *(import_module(f"interlock.wire.{each.name}") for each in iter_modules(wire.__path__))]
    return {name: found for module in modules for name, found in vars(module).items() if isinstance(found, type)}


def _schemas(names: Sequence[str]) -> Document:
    types = [model(name) for name in names]
    _, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    return schemas


def _path(path: str, item: Document) -> Document:
    return {
        method: with_examples(method, path, operation | {"responses": _responses(operation)})
        for method, operation in item.items()
    }


def _responses(operation: Document) -> Document:
    return {
        status: response | {"headers": _EVERYWHERE | _BY_STATUS.get(status, {})}
        for status, response in operation["responses"].items()
    }


@cache
def _examples() -> dict[str, Document]:
    """Returns the examples by method and path."""
    found: dict[str, Document] = json.loads((resources.files("interlock.http") / "openapi_examples.json").read_text())
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
