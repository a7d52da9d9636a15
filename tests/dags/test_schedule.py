"""Cron schedules compared with a model that walks minute by minute and does not use UTC offsets."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import takewhile
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.dags.definition import CatchUp
from interlock.dags.schedules import Cron, Schedule, source_of

MINUTE = timedelta(minutes=1)
ZONES = ["UTC", "Europe/Paris", "America/New_York", "Australia/Lord_Howe", "America/Sao_Paulo", "Asia/Kolkata"]
CHANGES = {
    "UTC": ["2025-03-30T00:30"],
    "Europe/Paris": ["2025-03-30T01:00", "2025-10-26T01:00"],
    "America/New_York": ["2025-03-09T07:00", "2025-11-02T06:00"],
    "Australia/Lord_Howe": ["2025-04-05T15:00", "2025-10-04T15:30"],
    "America/Sao_Paulo": ["2018-11-04T03:00", "2019-02-17T02:00"],
    "Asia/Kolkata": ["2025-06-01T00:00"],
}
"""Instants of clock changes, or some other instant for zones without any."""


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def _matches(field: str, value: int, low: int) -> bool:
    for part in field.split(","):
        span, _, step = part.partition("/")
        first, _, last = span.partition("-")
        if span == "*":
            inside, start = True, low
        else:
            start = int(first)
            inside = start <= value <= int(last or first)
        if inside and (value - start) % int(step or 1) == 0:
            return True
    return False


def matches(expression: str, wall: datetime) -> bool:
    minute, hour, day, month, weekday = expression.split()
    return (
        _matches(minute, wall.minute, 0)
        and _matches(hour, wall.hour, 0)
        and _matches(day, wall.day, 1)
        and _matches(month, wall.month, 1)
        and _matches(weekday, wall.isoweekday() % 7, 0)
    )


def walked(expression: str, zone: str, first: datetime, last: datetime) -> list[datetime]:
    """Returns every start from `first` to `last`: wall-clock times that occur, and those that are skipped."""
    found: list[datetime] = []
    seen: set[datetime] = set()
    moment = first - timedelta(hours=3)  # a wall-clock time from shortly before may occur again
    wall = moment.astimezone(ZoneInfo(zone)).replace(tzinfo=None, fold=0)
    while moment <= last:
        shown = moment.astimezone(ZoneInfo(zone)).replace(tzinfo=None, fold=0)
        leapt = []
        while wall + MINUTE < shown:
            wall += MINUTE
            leapt.append(wall)
        new = [minute for minute in (*leapt, shown) if minute not in seen]
        if moment >= first and any(matches(expression, minute) for minute in new):
            found.append(moment)
        seen.update(new)
        wall = shown
        moment += MINUTE
    return found


fields = st.sampled_from(["*", "*/5", "*/7", "0", "30", "0,30", "5-55/10", "15", "59"])
hours = st.sampled_from(["*", "*/2", "0", "1", "2", "3", "1-3", "0,23", "2,14"])
expressions = st.builds(
    "{} {} {} * {}".format, fields, hours, st.sampled_from(["*", "*", "1-10"]), st.sampled_from(["*", "*"])
)


@st.composite
def windows(draw: st.DrawFn) -> tuple[str, datetime, datetime]:
    zone = draw(st.sampled_from(ZONES))
    change = at(draw(st.sampled_from(CHANGES[zone])))
    first = change + MINUTE * draw(st.integers(-300, 120))
    return zone, first, first + MINUTE * draw(st.integers(0, 400))


@settings(max_examples=150, deadline=None)
@given(expressions, windows())
def test_starts_match_a_walk_through_every_minute(expression: str, window: tuple[str, datetime, datetime]) -> None:
    zone, first, last = window
    expected = walked(expression, zone, first, last)
    schedule = Schedule(expression, zone)
    forward, moment = [], first - MINUTE / 2
    while (start := schedule.after(moment)) is not None and start <= last:
        forward.append(start)
        moment = start
    assert forward == expected
    assert list(takewhile(lambda start: start >= first, schedule.back_from(last)))[::-1] == expected


@settings(max_examples=60, deadline=None)
@given(expressions, windows(), st.data())
def test_polling_interval_does_not_change_the_starts(
    expression: str, window: tuple[str, datetime, datetime], data: st.DataObject
) -> None:
    zone, first, last = window
    cron = Cron(Schedule(expression, zone), timedelta(seconds=1), CatchUp.ALL, 10_000)
    looks = sorted(data.draw(st.lists(st.datetimes(_naive(first), _naive(last)), max_size=8)))
    made, since = [], first - MINUTE / 2
    for look in [*(look.replace(tzinfo=UTC) for look in looks), last]:
        due = cron.due(since, look)
        made += due
        since = due[-1] if due else since
    assert made == walked(expression, zone, first, last)


def _naive(moment: datetime) -> datetime:
    return moment.replace(tzinfo=None)


@pytest.mark.parametrize(
    ("zone", "after", "start"),
    [
        ("Europe/Paris", "2025-03-29T12:00", "2025-03-30T01:00"),  # 02:30 is skipped, so it starts at 03:00
        ("Europe/Paris", "2025-03-30T01:00", "2025-03-31T00:30"),
        ("Europe/Paris", "2025-10-25T12:00", "2025-10-26T00:30"),  # the first 02:30
        ("Europe/Paris", "2025-10-26T00:30", "2025-10-27T01:30"),  # and not the second
        ("Europe/Paris", "2025-10-26T01:10", "2025-10-27T01:30"),
        ("Pacific/Apia", "2011-12-29T13:00", "2011-12-30T10:00"),  # a whole day is skipped
    ],
)
def test_time_in_a_clock_change_starts_once_a_day(zone: str, after: str, start: str) -> None:
    assert Schedule("30 2 * * *", zone).after(at(after)) == at(start)


NOW = at("2025-06-01T12:00:30")


@pytest.mark.parametrize(
    ("catch_up", "starts"),
    [
        (CatchUp.NONE, ["12:00"]),
        (CatchUp.LATEST, ["11:50", "12:00"]),
        (CatchUp.ALL, ["11:20", "11:30", "11:40", "11:50", "12:00"]),
    ],
)
def test_missed_starts_follow_the_catch_up_setting(catch_up: CatchUp, starts: list[str]) -> None:
    cron = Cron(Schedule("*/10 * * * *"), timedelta(minutes=1), catch_up, 100)
    assert cron.due(at("2025-06-01T11:10"), NOW) == [at(f"2025-06-01T{start}") for start in starts]


def test_catch_up_is_limited_to_the_newest_starts() -> None:
    cron = Cron(Schedule("* * * * *"), timedelta(days=366), CatchUp.NONE, 3)
    year_ago = NOW - timedelta(days=366)
    assert cron.due(year_ago, NOW) == [at(f"2025-06-01T{start}") for start in ("11:58", "11:59", "12:00")]


def test_clock_set_back_repeats_no_start() -> None:
    cron = Cron(Schedule("* * * * *"), timedelta(minutes=1), CatchUp.ALL, 100)
    assert cron.due(NOW, NOW - timedelta(hours=1)) == []


def test_finished_schedule_has_no_next_start() -> None:
    assert Schedule("0 0 31 2 *").after(NOW) is None
    assert list(Schedule("0 0 31 2 *").back_from(NOW)) == []


def test_source_is_decoded_from_the_registry_document() -> None:
    source = source_of({"kind": "cron", "schedule": "@daily", "timezone": "Europe/Paris", "misfire_grace": "90s"})
    assert (source.schedule, source.misfire_grace, source.catch_up) == ("@daily", 90, CatchUp.LATEST)
