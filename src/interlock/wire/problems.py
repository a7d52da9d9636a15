"""What a refusal says."""

from __future__ import annotations

from msgspec import Struct


class DagProblem(Struct, frozen=True):
    """What is wrong with a DAG file, where, and what to write instead. Lines and columns count from 1."""

    line: int
    column: int
    message: str
    suggestion: str


class Problem(Struct, frozen=True, omit_defaults=True):
    """RFC 9457. `code` is stable; `detail` is for people."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    request_id: str = ""
    stale: str | None = None
    retry_after_ms: int | None = None
    errors: list[str] | None = None
    problems: list[DagProblem] | None = None
