"""Request bodies decoded once, from bytes, straight into wire structs."""

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


def decode(body: bytes, model: Any, *, repeated_keys: bool = False) -> Any:
    """Returns the struct, or raises with a sentence that names the field that is wrong.

    A key that an object has twice is refused, at any depth, unless the caller judges the parts by themselves: a proxy
    in front of us may have read its first value and we would read its last.
    """
    try:
        decoded = _decoder(model).decode(body)
        if not repeated_keys:
            require_unique_keys(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, NotStrict) as error:
        raise BadRequest(f"The request body is not valid: {error}.", code="invalid_request") from None
    return decoded


def require_json(media_types: Sequence[str]) -> None:
    """A body without a type is taken for JSON; one that says it is something else was meant for somebody else."""
    for media_type in media_types:
        essence = media_type.partition(";")[0].strip().lower()
        if essence != "application/json" and not (essence.startswith("application/") and essence.endswith("+json")):
            raise UnsupportedMediaType("The body is not JSON by its Content-Type; send `application/json`.")


class BodyDTO(AbstractDTO[T]):
    """Litestar would parse JSON into dicts and convert those; raw payloads and speed both want the direct way."""

    def decode_bytes(self, value: bytes) -> Any:
        require_json(self.asgi_connection.headers.getall("content-type", []))
        return decode(value, self.model_type)

    @classmethod
    def create_for_field_definition(
        cls, field_definition: FieldDefinition, handler_id: str, backend_cls: Any = None
    ) -> None:
        """Nothing to prepare: the struct is the model."""

    @classmethod
    def create_openapi_schema(
        cls,
        field_definition: FieldDefinition,
        handler_id: str,  # noqa: ARG003 - the base class' signature
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
    """What its `data` is to be; None where it takes no body. Remembered: evaluating annotations takes long."""
    return typing.get_type_hints(function).get("data")


def takes_a_body(handler: HTTPRouteHandler) -> bool:
    return _body_of(handler.fn) is not None


def decode_directly(handler: HTTPRouteHandler) -> None:
    """Gives a handler with a `data` parameter the direct decoder."""
    model = _body_of(handler.fn)
    if model is not None:
        handler.dto = BodyDTO.__class_getitem__(model)
        handler.return_dto = None
