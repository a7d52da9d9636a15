"""Tests of the daily operators. They need a Java and nothing of the platform."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from sales import by_product, enrich

from interlock.spark.testing import run

BERLIN = "daily Europe/Berlin"


@pytest.mark.parametrize(("day", "hours"), [("2026-11-18", 24), ("2026-03-29", 23), ("2026-10-25", 25)])
def test_day_has_the_orders_of_its_hours(day: str, hours: int) -> None:
    rows = run(enrich, config={"orders_per_hour": 4}, partition=BERLIN, dates=day).rows
    assert len(rows) == 4 * hours
    assert min(row["sold_at"] for row in rows).astimezone(UTC).hour in {22, 23}


def test_revenue_is_added_up_by_product() -> None:
    moment = datetime(2026, 11, 18, 12, tzinfo=UTC)
    sales: list[dict[str, Any]] = [
        {"sold_at": moment, "product": "tea", "gross": 119, "net": 100},
        {"sold_at": moment, "product": "tea", "gross": 238, "net": 200},
        {"sold_at": moment, "product": "cup", "gross": 12, "net": 10},
    ]
    rows = run(by_product, sales=sales, partition=BERLIN, dates="2026-11-18").rows
    assert sorted((row["product"], row["orders"], row["revenue"]) for row in rows) == [("cup", 1, 10), ("tea", 2, 300)]
