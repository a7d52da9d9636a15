"""JSON-RPC 2.0: bytes in, bytes out. An invalid request gets an answer that describes the error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import msgspec
import structlog

log = structlog.get_logger()

_LARGEST_ID: Final = 2**63
_VERSION: Final = "2.0"


class Code(IntEnum):
    PARSE_ERROR = -32700
    INVALID_REQUEST = -32600
    METHOD_NOT_FOUND = -32601
    INVALID_PARAMS = -32602
    INTERNAL_ERROR = -32603
    SERVER_ERROR = -32000
    """The node cannot answer this, for example logs of an unknown block."""
    RESPONSE_TOO_LARGE = -32003
    LIMIT_EXCEEDED = -32005


class RpcError(Exception):
    def __init__(self, code: Code, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data


@dataclass(frozen=True, slots=True)
class Method:
    """A method with its number of arguments. Any: it takes and returns JSON values, and validates them itself."""

    call: Callable[..., Any]
    required: int = 0
    optional: int = 0

    def __call__(self, arguments: list[Any]) -> Any:
        if len(arguments) < self.required:
            raise RpcError(Code.INVALID_PARAMS, f"missing value for required argument {len(arguments)}")
        limit = self.required + self.optional
        if len(arguments) > limit:
            raise RpcError(Code.INVALID_PARAMS, f"too many arguments, want at most {limit}")
        return self.call(*arguments)


@dataclass(frozen=True, slots=True)
class Limits:
    batch: int = 1_000
    """Maximum number of calls in one batch."""
    response_bytes: int = 64 * 1024 * 1024
    """Once a batch's answer exceeds this size, its remaining calls are refused: one request must not exhaust memory."""


class _Call(msgspec.Struct, frozen=True):
    method: str
    arguments: list[Any]
    id: Any
    is_notification: bool


class Endpoint:
    def __init__(self, methods: Mapping[str, Method], limits: Limits | None = None) -> None:
        self._methods = methods
        self._limits = limits or Limits()

    def answer(self, body: bytes) -> bytes | None:
        """Returns the response to one HTTP body, or None if it contains only notifications."""
        try:
            document = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return _failed(None, RpcError(Code.PARSE_ERROR, f"parse error: {error}"))
        return self._batch(document) if isinstance(document, list) else self._one(document)

    def _batch(self, documents: list[Any]) -> bytes | None:
        if not documents:
            return _failed(None, RpcError(Code.INVALID_REQUEST, "empty batch"))
        if len(documents) > self._limits.batch:
            sentence = f"batch of {len(documents)} calls is over the limit of {self._limits.batch}"
            return _failed(None, RpcError(Code.LIMIT_EXCEEDED, sentence, {"limit": self._limits.batch}))
        answers, size = list[bytes](), 0
        for document in documents:
            answer = self._one(document, is_too_late=size > self._limits.response_bytes)
            if answer is not None:
                answers.append(answer)
                size += len(answer)
        return b"[" + b",".join(answers) + b"]" if answers else None

    def _one(self, document: Any, *, is_too_late: bool = False) -> bytes | None:
        try:
            call = _parsed(document)
        except RpcError as error:
            return _failed(_id_of(document), error)
        try:
            if is_too_late:
                raise RpcError(Code.RESPONSE_TOO_LARGE, "response too large: send fewer calls in one batch")
            answer = msgspec.json.encode({"jsonrpc": _VERSION, "id": call.id, "result": self._result(call)})
        except RpcError as error:
            answer = _failed(call.id, error)
        except Exception:
            log.exception("devchain.method_failed", method=call.method)
            answer = _failed(call.id, RpcError(Code.INTERNAL_ERROR, "internal error; see the server's log"))
        return None if call.is_notification else answer

    def _result(self, call: _Call) -> Any:
        method = self._methods.get(call.method)
        if method is None:
            shown = call.method if len(call.method) <= 100 else call.method[:100] + "…"
            raise RpcError(Code.METHOD_NOT_FOUND, f"the method {shown} does not exist/is not available")
        return method(call.arguments)


def _parsed(document: Any) -> _Call:
    if not isinstance(document, dict):
        raise RpcError(Code.INVALID_REQUEST, "invalid request: a call must be an object")
    if document.get("jsonrpc") != _VERSION:
        raise RpcError(Code.INVALID_REQUEST, 'invalid request: "jsonrpc" must be "2.0"')
    method = document.get("method")
    if not isinstance(method, str):
        raise RpcError(Code.INVALID_REQUEST, 'invalid request: "method" must be a string')
    if not _is_id(document.get("id")):
        raise RpcError(Code.INVALID_REQUEST, 'invalid request: "id" must be a string, a number or null')
    arguments = document.get("params", [])
    if not isinstance(arguments, list | dict):
        raise RpcError(Code.INVALID_REQUEST, 'invalid request: "params" must be an array')
    if isinstance(arguments, dict):
        raise RpcError(Code.INVALID_PARAMS, "non-array args: parameters must be an array")
    return _Call(method, arguments, document.get("id"), "id" not in document)


def _is_id(value: Any) -> bool:
    """True for ids that can be returned unchanged."""
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return -_LARGEST_ID <= value < _LARGEST_ID
    return value is None or isinstance(value, str | float)


def _id_of(document: Any) -> Any:
    found = document.get("id") if isinstance(document, dict) else None
    return found if _is_id(found) else None


def _failed(id_: Any, error: RpcError) -> bytes:
    reason: dict[str, Any] = {"code": int(error.code), "message": error.message}
    if error.data is not None:
        reason["data"] = error.data
    return msgspec.json.encode({"jsonrpc": _VERSION, "id": id_, "error": reason})
