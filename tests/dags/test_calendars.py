"""Time partitions: hours, days and months of real time zones, with their changes of the clocks."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.calendars import BadDate, Calendar, Every, Misaligned, calendar_of, seconds_of, split_dates

BERLIN = "Europe/Berlin"
ZONES = [
    "UTC",
    BERLIN,
    "America/New_York",
    "America/St_Johns",  # clocks went back at 00:01
    "America/Havana",  # midnight occurs twice
    "America/Sao_Paulo",  # midnight was skipped
    "Asia/Kolkata",  # half an hour off UTC
    "Asia/Kathmandu",  # 45 minutes off UTC, changed by 15 minutes
    "Asia/Pyongyang",  # changed by 30 minutes
    "Australia/Lord_Howe",  # summer time of 30 minutes
    "Pacific/Apia",  # 2011-12-30 does not exist
    "Pacific/Kwajalein",  # 1993-08-21 does not exist
]
CHANGES = [
    seconds_of(datetime.fromisoformat(f"{moment}+00:00"))
    for moment in [
        "2026-03-29T01:00",
        "2026-10-25T01:00",
        "2026-03-08T07:00",
        "2026-11-01T06:00",
        "2010-11-07T02:31",
        "2026-04-04T15:00",
        "2026-10-03T15:30",
        "2011-12-30T10:00",
        "1993-08-21T12:00",
        "2018-11-04T03:00",
        "2018-05-04T15:00",
        "1985-12-31T18:30",
    ]
]

calendars = st.builds(Calendar, st.sampled_from(list(Every)), st.sampled_from(ZONES))
anywhere = st.integers(seconds_of(datetime(1971, 1, 1, tzinfo=UTC)), seconds_of(datetime(2500, 1, 1, tzinfo=UTC)))
near_changes = st.builds(lambda change, off: change + off, st.sampled_from(CHANGES), st.integers(-100_000, 100_000))
positions = anywhere | near_changes


@given(calendars, positions)
def test_partitions_tile_the_axis_without_gaps_or_overlaps(calendar: Calendar, position: int) -> None:
    start, end = calendar.partition(position)
    assert start <= position <= end
    assert calendar.partition(start) == calendar.partition(end) == (start, end)
    assert calendar.partition(end + 1)[0] == end + 1
    assert calendar.partition(start - 1)[1] == start - 1
    assert calendar.aligned(start, end)


@given(calendars, positions, st.integers(0, 30))
def test_dates_of_a_range_parse_back_to_it(calendar: Calendar, position: int, more: int) -> None:
    start, end = calendar.partition(position)
    for _ in range(more):
        end = calendar.partition(end + 1)[1]
    dates = calendar.dates(start, end)
    assert calendar.range_of(dates.first, dates.last) == (start, end)
    split = split_dates(str(dates))
    assert split is not None
    assert calendar.range_of(*split) == (start, end)


@given(calendars, positions, positions)
def test_later_partitions_have_later_dates(calendar: Calendar, one: int, other: int) -> None:
    first, second = sorted([calendar.partition(one), calendar.partition(other)])
    labels = [calendar.dates(*each).first for each in (first, second)]
    if first[0] != second[0]:
        # An hour that occurs twice sorts by its offset, which decreases.
        assert labels[0][:13] <= labels[1][:13]
        assert labels[0] != labels[1]


@given(st.sampled_from(ZONES), positions)
def test_days_and_hours_nest_in_months(zone: str, position: int) -> None:
    hourly, daily, monthly = (Calendar(every, zone) for every in Every)
    assert daily.partition(hourly.partition(position)[0])[0] <= hourly.partition(position)[0]
    day = daily.partition(position)
    assert hourly.aligned(*day)
    assert daily.aligned(*monthly.partition(position))


@given(calendars, st.lists(positions, min_size=2, max_size=2).map(sorted))
def test_range_is_cut_into_adjacent_partitions(calendar: Calendar, bounds: list[int]) -> None:
    start, end = bounds[0], min(bounds[1], bounds[0] + 5_000_000)
    found = list(calendar.partitions(start, end))
    assert found[0][0] <= start
    assert found[-1][1] >= end
    assert all(one[1] + 1 == other[0] for one, other in pairwise(found))


@pytest.mark.parametrize(("day", "hours"), [("2026-03-29", 23), ("2026-10-25", 25), ("2026-11-18", 24)])
def test_local_day_of_berlin_has_its_hours(day: str, hours: int) -> None:
    start, end = Calendar(Every.DAILY, BERLIN).range_of(day)
    assert len(list(Calendar(Every.HOURLY, BERLIN).partitions(start, end))) == hours
    assert end - start + 1 == hours * 3600


@given(st.dates(date(1971, 1, 1), date(2400, 12, 31)))
def test_months_have_the_lengths_of_the_calendar(day: date) -> None:
    start, end = Calendar(Every.MONTHLY).range_of(f"{day:%Y-%m}")
    following = (day.replace(day=1) + timedelta(days=32)).replace(day=1)
    assert end - start + 1 == (following - day.replace(day=1)).days * 86_400


def test_leap_day_exists_only_in_leap_years() -> None:
    daily = Calendar(Every.DAILY)
    assert daily.dates(*daily.range_of("2028-02-29")).first == "2028-02-29"
    with pytest.raises(BadDate, match=r"'2026-02-29' is not a date that exists"):
        daily.range_of("2026-02-29")
    assert len(list(daily.partitions(*Calendar(Every.MONTHLY).range_of("2028-02")))) == 29


def test_repeated_hour_is_two_partitions_with_their_offsets() -> None:
    hourly = Calendar(Every.HOURLY, BERLIN)
    both = hourly.range_of("2026-10-25T02")
    found = [hourly.dates(*each).first for each in hourly.partitions(*both)]
    assert found == ["2026-10-25T02+02:00", "2026-10-25T02+01:00"]
    assert hourly.range_of("2026-10-25T01Z") == hourly.range_of("2026-10-25T02+01:00")


def test_month_and_day_select_all_partitions_in_them() -> None:
    daily = Calendar(Every.DAILY, BERLIN)
    assert daily.range_of("2026-11") == daily.range_of("2026-11-01", "2026-11-30")
    hourly = Calendar(Every.HOURLY, BERLIN)
    assert hourly.range_of("2026-10-25") == daily.range_of("2026-10-25")


@pytest.mark.parametrize(
    ("calendar", "text", "says"),
    [
        ("daily UTC", "yesterday", "'yesterday' is not a date: write one such as 2026-11-18"),
        ("daily UTC", "2026-13-01", "not a date that exists"),
        ("daily UTC", "0007-01-01", "write a date from 1900 to 2999"),
        ("daily UTC", "2026-11-18T06", "the partitions are daily: write 2026-11-18"),
        ("monthly UTC", "2026-11-18", "the partitions are monthly: write 2026-11"),
        ("hourly Europe/Berlin", "2026-03-29T02", "whose clocks skip it: write 2026-03-29T03"),
        ("hourly Asia/Kolkata", "2026-11-18T06Z", "not a full hour in Asia/Kolkata: write 2026-11-18T11"),
        ("daily Pacific/Apia", "2011-12-30", "does not exist in Pacific/Apia"),
    ],
)
def test_bad_date_says_what_to_write(calendar: str, text: str, says: str) -> None:
    with pytest.raises(BadDate, match=says.replace("+", r"\+")):
        calendar_of(calendar).range_of(text)


def test_misaligned_integers_name_the_whole_partitions() -> None:
    with pytest.raises(Misaligned, match=r"5-9 does not begin and end with a day of UTC: write 1970-01-01"):
        Calendar(Every.DAILY).check(5, 9)
    with pytest.raises(Misaligned, match="write dates, such as 2026-11-18"):
        Calendar(Every.DAILY).check(5, 2**62)


def test_interval_has_instants_in_its_zone_and_excludes_its_end() -> None:
    daily = Calendar(Every.DAILY, BERLIN)
    interval = daily.interval(*daily.range_of("2026-10-25"))
    assert interval.start == datetime(2026, 10, 25, tzinfo=ZoneInfo(BERLIN))
    assert interval.end - interval.start == timedelta(days=1)  # wall-clock time
    assert interval.end.astimezone(UTC) - interval.start.astimezone(UTC) == timedelta(hours=25)
    assert interval.start in interval
    assert interval.end not in interval
    assert (str(interval), interval.date) == ("2026-10-25", date(2026, 10, 25))


@given(calendars, positions)
def test_file_names_have_no_character_that_a_store_interprets(calendar: Calendar, position: int) -> None:
    suffix = calendar.file_suffix(*calendar.partition(position))
    assert set(suffix) <= set("0123456789-_TZ")


def test_files_of_a_day_are_named_by_it() -> None:
    daily = Calendar(Every.DAILY, BERLIN)
    assert daily.file_suffix(*daily.range_of("2026-11-01")) == "2026-11-01_2026-11-01"


def test_unknown_time_zone_is_reported() -> None:
    with pytest.raises(BadDate, match="does not know the time zone 'Mars/Base'"):
        Calendar(Every.DAILY, "Mars/Base").partition(0)
