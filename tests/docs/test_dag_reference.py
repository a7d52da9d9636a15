"""Every field of a DAG file is documented, and every documented field exists."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec
import pytest

from interlock.dags.definition import (
    DEFAULTABLE,
    JOB_FIELDS,
    Input,
    JobOutput,
    Output,
    Partition,
    Publication,
    Published,
    Source,
)
from interlock.dags.fields import EXAMPLES
from interlock.dags.parser import DAG_FIELDS
from interlock.dags.where import columns, parse
from interlock.wire.jobs import Scaling
from tests.support.documentation import read, rows, spans

PAGE = "docs/dags.md"
PARTS: dict[str, Mapping[str, object]] = {
    "DAG": DAG_FIELDS,
    "job": JOB_FIELDS,
    **{
        struct.__name__: {field.encode_name: field for field in msgspec.structs.fields(struct)}
        for struct in (Source, Partition, Input, JobOutput, Published, Output, Publication, Scaling)
    },
}


@pytest.mark.parametrize("part", PARTS)
def test_every_field_is_documented_and_has_an_example(part: str) -> None:
    assert PARTS[part].keys() - set(spans(read(PAGE))) == set()
    assert PARTS[part].keys() - EXAMPLES.keys() == set()


def test_every_documented_field_exists() -> None:
    known = set().union(*PARTS.values())
    in_tables = {row[0].strip("`") for row in rows(read(PAGE)) if row[0].startswith("`")}
    assert len(in_tables) > 30
    assert in_tables - known == set()


def test_every_choice_is_documented() -> None:
    enums = {field.type for part in PARTS.values() for field in part.values() if _is_choice(field)}  # type: ignore[attr-defined]
    assert len(enums) > 6
    assert {str(choice) for enum in enums for choice in enum} - set(spans(read(PAGE))) == set()


def _is_choice(field: object) -> bool:
    found = getattr(field, "type", None)
    return isinstance(found, type) and issubclass(found, StrEnum)


def test_every_default_is_documented() -> None:
    (row,) = [row for row in rows(read(PAGE)) if row[0] == "`defaults`"]
    policy = {field for field in DEFAULTABLE if f"`{field}`" not in row[1]}
    table = read(PAGE).partition("### Retries and time limits")[2].partition("###")[0]
    assert policy == {cells[0].strip("`") for cells in rows(table) if cells[0].startswith("`")}


def test_every_condition_on_the_page_parses() -> None:
    section = read(PAGE).partition("## where")[2].partition("## Versions")[0]
    kinds = {row[0]: row[1] for row in rows(section) if row[0]}
    for kind in ("comparison", "list", "range", "pattern", "absence", "boolean column"):
        for condition in spans(kinds[kind]):
            assert columns(parse(condition))
    for literal in spans(kinds["literal"].partition(", with")[0]):
        assert columns(parse(f"a = {literal}")) == {"a"}
