"""Decodes request bodies once, from bytes directly into wire structs."""

from __future__ import annotations

import typing
from collections.abc import Generator, Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec
from litestar._openapi.schema_generation import SchemaCreator
from litestar.dto import AbstractDTO, DTOFieldDefinition
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.spec import Reference, Schema
from litestar.typing import FieldDefinition

from interlock.errors import BadRequest, UnsupportedMediaType
from interlock.strict_json import NotStrict, require_unique_keys

T = TypeVar("T")


@cache
def _decoder(model: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(model)


def decode(body: bytes, model: Any) -> Any:
    """Decodes the body, or raises BadRequest with a message that names the invalid field.

    Duplicate keys are rejected at any depth: a proxy in front might have used the first value, and we would use the
    last one.
    """
    try:
        decoded = _decoder(model).decode(body)
        require_unique_keys(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, NotStrict) as error:
        raise BadRequest(f"The request body is not valid: {error}.", code="invalid_request") from None
    return decoded


def require_json(media_types: Sequence[str]) -> None:
    """Raises unless the media type is JSON. A missing type is accepted as JSON."""
    for media_type in media_types:
        essence = media_type.partition(";")[0].strip().lower()
        if essence != "application/json" and not (essence.startswith("application/") and essence.endswith("+json")):
            raise UnsupportedMediaType("The Content-Type of the body is not JSON; send `application/json`.")


class BodyDTO(AbstractDTO[T]):
    """Decodes directly into the struct.

    Litestar would first parse into dicts: 64 µs instead of 20 µs for a body with 100 payloads, which then are no longer
    the text that was sent.
    """

    def decode_bytes(self, value: bytes) -> Any:
        require_json(self.asgi_connection.headers.getall("content-type", []))
        return decode(value, self.model_type)

    @classmethod
    def create_for_field_definition(
        cls, field_definition: FieldDefinition, handler_id: str, backend_cls: Any = None
    ) -> None:
        """Does nothing: the struct is the model."""

    @classmethod
    def create_openapi_schema(
        cls,
        field_definition: FieldDefinition,
        handler_id: str,  # noqa: ARG003 - signature of the base class
        schema_creator: SchemaCreator,
    ) -> Reference | Schema:
        return schema_creator.for_field_definition(field_definition)

    @classmethod
    def generate_field_definitions(cls, model_type: type[Any]) -> Generator[DTOFieldDefinition, None, None]:  # noqa: ARG003
        yield from ()

    @classmethod
    def detect_nested_field(cls, field_definition: FieldDefinition) -> bool:  # noqa: ARG003
        return False


@cache
def _body_of(function: Any) -> Any:
    """Returns the type of the `data` parameter, or None without a body.

    Cached, because resolving annotations is slow.
    """
    return typing.get_type_hints(function).get("data")


def takes_a_body(handler: HTTPRouteHandler) -> bool:
    return _body_of(handler.fn) is not None


def decode_directly(handler: HTTPRouteHandler) -> None:
    """Installs the direct decoder on a handler with a `data` parameter."""
    model = _body_of(handler.fn)
    if model is not None:
        handler.dto = BodyDTO.__class_getitem__(model)
        handler.return_dto = None
