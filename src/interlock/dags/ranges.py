"""Operators of the dispatcher that turn ranges into other ranges. No data passes through them, only scopes.

`range_splitter`: a partition becomes aligned chunks. `range_aggregator`: a stream becomes aligned ranges, each as soon
as the stream has passed its end, and partitions become larger ones, each as soon as all of it is there, in whatever
order they come; what is known of them is durable, and moves with the events that say so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

import msgspec
from msgspec import Struct, field

from interlock.dags.operators import AGGREGATOR, SPLITTER, range_problem
from interlock.kernel.inline import Call, InlineOperator, OperatorFailed, Reaction
from interlock.wire import Event, WriteGrant

STEP: Final = 5000
"""Ranges that are told in one transaction."""

_BEYOND: Final = 2**63

Range = tuple[int, int]
"""Both inclusive."""


class _Scope(Struct):
    """What of a task's payload matters here."""

    start: int
    end: int
    cursor: int | None = None
    """Of a stream."""
    changed_start: int | None = None
    changed_end: int | None = None


class _Progress(Struct):
    """The first position of which no range was told. Of partitions: what is there, as disjoint ranges in order."""

    next: int
    there: list[Range] = field(default_factory=list)


def chunks(start: int, end: int, size: int) -> Iterator[Range]:
    """Cut at every multiple of `size`: whoever splits an overlapping range cuts at the same places."""
    while start <= end:
        last = min(end, start - start % size + size - 1)
        yield start, last
        start = last + 1


def whole_ranges(start: int, end: int, size: int) -> Iterator[Range]:
    """The aligned ranges that lie between `start` and `end`."""
    first = -(-start // size) * size
    return ((at, at + size - 1) for at in range(first, end - size + 2, size))


def touched_ranges(start: int, end: int, size: int) -> Iterator[Range]:
    """The aligned ranges that have a position between `start` and `end`."""
    return ((at, at + size - 1) for at in range(start - start % size, end + 1, size))


async def split(call: Call) -> Reaction:
    size = _config(SPLITTER, call)["size"]
    scope = _scope(call)
    begin = scope.start if call.place is None else call.place
    found = list(islice(chunks(begin, scope.end, size), STEP))
    reached = found[-1][1] + 1
    return Reaction(
        result={"up_to": reached - 1},
        events=_events(_output(call), found),
        place=reached if reached <= scope.end else None,
    )


async def aggregate(call: Call) -> Reaction:
    config = _config(AGGREGATOR, call)
    size, begin = config["size"], config.get("start", 0)
    scope = _scope(call)
    first = -(-begin // size) * size
    progress = msgspec.convert(call.state, _Progress) if call.state is not None else _Progress(first)
    if scope.cursor is None and scope.changed_start is None:
        return _gather(call, scope, size, first, progress)
    if scope.changed_start is not None and scope.changed_end is not None:
        return _tell_again(call, scope.changed_start, scope.changed_end, size, first, progress.next)
    found = list(islice(whole_ranges(progress.next, scope.end, size), STEP))
    reached = found[-1][1] + 1 if found else progress.next
    return Reaction(
        result={"next": reached},
        events=_events(_output(call), found),
        state={"next": reached} if found else None,
        place=reached if reached + size - 1 <= scope.end else None,
    )


def _gather(call: Call, scope: _Scope, size: int, first: int, progress: _Progress) -> Reaction:
    """A partition is there, or again. The ranges that it is a part of are told if nothing of them is missing."""
    there = merged([*progress.there, (scope.start, scope.end)])
    begin = max(scope.start, first) if call.place is None else call.place
    touched = list(islice(touched_ranges(begin, scope.end, size), STEP))
    reached = touched[-1][1] + 1 if touched else begin
    found = [each for each in touched if _within(each, there)]
    return Reaction(
        result={"told": len(found)},
        events=_events(_output(call), found),
        state={"next": progress.next, "there": there} if there != progress.there else None,
        place=reached if touched and reached <= scope.end else None,
    )


def merged(ranges: list[Range]) -> list[Range]:
    """The same positions in as few ranges as possible, in order."""
    found: list[Range] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _within(wanted: Range, there: list[Range]) -> bool:
    at = bisect_right(there, (wanted[0], _BEYOND)) - 1
    return at >= 0 and there[at][1] >= wanted[1]


def _tell_again(call: Call, start: int, end: int, size: int, first: int, told: int) -> Reaction:
    """A part of the stream was rewritten. Ranges that were not told yet will be, in their turn."""
    begin = max(start, first) if call.place is None else call.place
    found = list(islice(touched_ranges(begin, min(end, told - 1), size), STEP))
    reached = found[-1][1] + 1 if found else begin
    return Reaction(
        result={"again": len(found)},
        events=_events(_output(call), found),
        place=reached if found and reached <= min(end, told - 1) else None,
    )


def _scope(call: Call) -> _Scope:
    try:
        return msgspec.convert(call.payload, _Scope)
    except msgspec.ValidationError as error:
        raise OperatorFailed("BadScope", f"The payload is not a scope with start and end: {error}.") from None


def _config(operator: str, call: Call) -> Mapping[str, Any]:
    wrong = range_problem(operator, call.config)
    if wrong:
        raise OperatorFailed("BadConfig", f"{wrong[0].upper()}{wrong[1:]}.")
    return call.config


def _output(call: Call) -> WriteGrant:
    if not call.outputs:
        raise OperatorFailed("NoOutput", "The job has no output to tell ranges of; declare one under `outputs`.")
    return call.outputs[0]


def _events(output: WriteGrant, ranges: list[Range]) -> list[Event]:
    return [
        Event(
            dataset_uuid=output.dataset_uuid,
            dataset_version=output.dataset_version,
            partition_key=f"{start}-{end}",
            start=start,
            end=end,
        )
        for start, end in ranges
    ]


OPERATORS: Final[dict[str, InlineOperator]] = {
    SPLITTER: InlineOperator(split),
    AGGREGATOR: InlineOperator(aggregate, stateful=True),
}
