"""The start of the next scan: the mark, or the beginning if a full scan is cheap or the last one was long ago."""

from __future__ import annotations

import pytest

from interlock.stores.low_water import LowWater


class Scans:
    """A queue with positions 0, 1, 2 …, and a clock that only scans advance. A full scan may take longer."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.whole_seconds = 0.0
        self.water: LowWater[int] = LowWater(0, lambda place: place - 2, timer=lambda: self.now)

    def scan(self, reached: int | None, *, skipped: bool = False) -> int:
        """Returns the position where the scan began."""
        with self.water.look() as look:
            self.now += self.whole_seconds if look.since == 0 else 0.001
            look.reached, look.skipped = reached, skipped
        return look.since

    def slow_down(self) -> None:
        """Makes full scans take one second, and runs three of them so that the cost is known."""
        self.whole_seconds = 1.0
        for _ in range(3):
            assert self.scan(10) == 0


@pytest.fixture
def scans() -> Scans:
    return Scans()


def test_cheap_scans_start_at_the_beginning(scans: Scans) -> None:
    assert [scans.scan(place) for place in (10, 20, 30, 40, 50)] == [0, 0, 0, 0, 0]


def test_expensive_scan_starts_just_below_the_mark(scans: Scans) -> None:
    scans.slow_down()
    assert [scans.scan(place) for place in (20, 30, 25)] == [8, 18, 28]
    assert scans.scan(None) == 23


def test_scan_without_findings_does_not_move_the_mark(scans: Scans) -> None:
    scans.slow_down()
    assert [scans.scan(None), scans.scan(None)] == [8, 8]


def test_failed_scan_does_not_move_the_mark(scans: Scans) -> None:
    scans.slow_down()
    with pytest.raises(ZeroDivisionError), scans.water.look() as look:
        look.reached = 1 // 0
    assert scans.scan(None) == 8


def test_single_slow_scan_changes_nothing(scans: Scans) -> None:
    for seconds in (0.001, 5.0, 5.0):
        scans.whole_seconds = seconds
        assert scans.scan(10) == 0
    assert scans.scan(10) == 0


def test_pass_without_a_scan_does_not_count_as_cheap(scans: Scans) -> None:
    for _ in range(3):
        scans.whole_seconds = 0.0
        scans.scan(None, skipped=True)
        scans.whole_seconds = 1.0
        scans.scan(10)
    assert scans.scan(10) == 8


def test_full_scans_take_a_fiftieth_of_the_time(scans: Scans) -> None:
    scans.slow_down()
    begun = scans.now
    wholes = 0
    while scans.now < begun + 1000:
        scans.now += 0.1
        wholes += scans.scan(10) == 0
    assert 15 <= wholes <= 20


def test_scans_start_at_the_beginning_again_once_they_are_cheap(scans: Scans) -> None:
    scans.slow_down()
    scans.now += 60
    scans.whole_seconds = 0.001
    assert [scans.scan(20), scans.scan(30)] == [0, 0]
