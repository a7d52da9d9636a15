"""The OpenAPI documents: the routes as Litestar describes them, the bodies as the decoder itself does.

Litestar's own reading of the structs loses what makes a request valid: unknown fields that are refused, limits of
optional values, patterns of list items, structs that travel as arrays.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from litestar import Request
from litestar.openapi.plugins import JsonRenderPlugin

from interlock import wire
from interlock.api.examples import with_examples

Document = dict[str, Any]

_REFERENCE = re.compile(r"#/components/schemas/(\w+)")
_TEXT = {"schema": {"type": "string"}}
_EVERYWHERE = {"X-Request-Id": _TEXT | {"required": True, "description": "In the log lines of the request."}}
_BY_STATUS = {
    "405": {"Allow": _TEXT | {"required": True, "description": "What the path does take."}},
    "429": {"Retry-After": _TEXT | {"required": True, "description": "Seconds."}},
}


class DocumentPlugin(JsonRenderPlugin):
    """Serves the document of this module."""

    def render(self, request: Request[Any, Any, Any], openapi_schema: Document) -> bytes:
        return super().render(request, exact(openapi_schema))


def exact(document: Document) -> Document:
    # A body that a handler describes by itself is named only where it is referred to.
    named = {*document["components"]["schemas"], *_REFERENCE.findall(str(document["paths"]))}
    components = document["components"] | {"schemas": _schemas(sorted(named))}
    paths = {path: _path(path, item) for path, item in document["paths"].items()}
    return document | {"components": components, "paths": paths}


def _schemas(names: Sequence[str]) -> Document:
    types = [getattr(wire, name) for name in names]
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
