"""Telemetry events as consumers in other languages see them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest

from interlock.bus.telemetry import rows_of
from interlock.wire.bus_events import CATALOGUE, EVENT_TYPES, LegacyKeyUsed, decoded, encoded, event_type

EXAMPLES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("catalogue.json").read_text())


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example["event"])
def test_event_has_exactly_the_members_of_the_catalogue(example: dict[str, Any]) -> None:
    event = decoded(json.dumps(example))
    assert type(event) is EVENT_TYPES[example["event"]]
    assert event_type(event) == example["event"]
    assert json.loads(encoded(event)) == example


def test_every_event_and_member_has_an_example() -> None:
    for kind in CATALOGUE:
        of_kind = [set(example) for example in EXAMPLES if EVENT_TYPES[example["event"]] is kind]
        assert set().union(*of_kind) == {field.encode_name for field in msgspec.structs.fields(kind)} | {"event"}


def test_events_become_one_row_per_tenant_in_order() -> None:
    one, two = UUID(int=1), UUID(int=2)
    rows = rows_of(
        [(org, LegacyKeyUsed(version_id=f"hmac-v{n}", source="acme/billing")) for n, org in enumerate((one, two, one))]
    )
    assert (rows.org_ids, rows.events_in) == ([one, two], [2, 1])
    assert [event["version_id"] for event in json.loads(rows.events[0])] == ["hmac-v0", "hmac-v2"]
