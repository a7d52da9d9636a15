"""Dispatcher operators that convert ranges into other ranges. They process scopes only, no data.

`range_splitter` cuts a partition into aligned chunks. `range_aggregator` turns a stream into aligned ranges, each
emitted once the stream has passed its end, and combines partitions into larger ranges, each emitted once it is
complete, in any order of arrival. Its progress is durable and is committed together with the emitted events.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

import msgspec
from msgspec import Struct, field

from interlock.calendars import BadDate, calendar_of
from interlock.dags.checks import PARTITION, range_problem
from interlock.dags.partitioning import AGGREGATOR, SPLITTER
from interlock.tasks.inline_runtime import Call, InlineOperator, OperatorFailed, Reaction
from interlock.wire.attempts import Event, WriteGrant

STEP: Final = 5000
"""Ranges emitted in one transaction."""

_BEYOND: Final = 2**63
_LOWEST: Final = -(2**62)

Range = tuple[int, int]
"""Start and end, both inclusive."""


class _Scope(Struct):
    """The fields of a task's payload that the range operators use."""

    start: int
    end: int
    cursor: int | None = None
    """Set for a stream."""
    changed_start: int | None = None
    changed_end: int | None = None


class _Progress(Struct):
    """`next` is the first position without an emitted range. `there` has the known partitions as disjoint ranges."""

    next: int
    there: list[Range] = field(default_factory=list)


Cut = Callable[[int], Range]
"""Returns the aligned range that contains a position: a multiple of a size, or a partition of a calendar."""


def every(size: int) -> Cut:
    return lambda position: (position - position % size, position - position % size + size - 1)


def chunks(start: int, end: int, cut: Cut) -> Iterator[Range]:
    """Cuts at aligned positions, so that overlapping ranges are always cut at the same ones."""
    for first, last in touched_ranges(start, end, cut):
        yield max(first, start), min(last, end)


def whole_ranges(start: int, end: int, cut: Cut) -> Iterator[Range]:
    """Yields the aligned ranges that lie entirely between `start` and `end`."""
    for first, last in touched_ranges(start, end, cut):
        if last > end:
            return
        if first >= start:
            yield first, last


def touched_ranges(start: int, end: int, cut: Cut) -> Iterator[Range]:
    """Yields the aligned ranges that have at least one position between `start` and `end`."""
    while start <= end:
        found = cut(start)
        yield found
        start = found[1] + 1


async def split(call: Call) -> Reaction:
    cut = _cut(_config(SPLITTER, call))
    scope = _scope(call)
    begin = scope.start if call.place is None else call.place
    found = _some(chunks(begin, scope.end, cut))
    reached = found[-1][1] + 1
    return Reaction(
        result={"up_to": reached - 1},
        events=_events(_output(call), found),
        place=reached if reached <= scope.end else None,
    )


async def aggregate(call: Call) -> Reaction:
    config = _config(AGGREGATOR, call)
    cut = _cut(config)
    scope = _scope(call)
    first = _LOWEST if PARTITION in config else next(whole_ranges(config.get("start", 0), _BEYOND, cut))[0]
    progress = msgspec.convert(call.state, _Progress) if call.state is not None else _Progress(first)
    if scope.cursor is None and scope.changed_start is None:
        return _gather(call, scope, cut, first, progress)
    if scope.changed_start is not None and scope.changed_end is not None:
        return _emit_again(call, scope.changed_start, scope.changed_end, cut, first, progress.next)
    if PARTITION in config:
        raise OperatorFailed("BadScope", "range_aggregator makes time partitions of partitions, not of a stream.")
    found = _some(whole_ranges(progress.next, scope.end, cut))
    reached = found[-1][1] + 1 if found else progress.next
    return Reaction(
        result={"next": reached},
        events=_events(_output(call), found),
        state={"next": reached} if found else None,
        place=reached if cut(reached)[1] <= scope.end else None,
    )


def _gather(call: Call, scope: _Scope, cut: Cut, first: int, progress: _Progress) -> Reaction:
    """Records a new or rewritten partition, and emits the ranges it touches that are complete."""
    there = merged([*progress.there, (scope.start, scope.end)])
    begin = max(scope.start, first) if call.place is None else call.place
    touched = _some(touched_ranges(begin, scope.end, cut))
    reached = touched[-1][1] + 1 if touched else begin
    found = [each for each in touched if _within(each, there)]
    return Reaction(
        result={"told": len(found)},
        events=_events(_output(call), found),
        state={"next": progress.next, "there": there} if there != progress.there else None,
        place=reached if touched and reached <= scope.end else None,
    )


def merged(ranges: list[Range]) -> list[Range]:
    """Merges overlapping and adjacent ranges, in order."""
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


def _emit_again(call: Call, start: int, end: int, cut: Cut, first: int, emitted_to: int) -> Reaction:
    """Emits again the ranges that a rewritten part of the stream touches. Later ranges are emitted as usual."""
    begin = max(start, first) if call.place is None else call.place
    found = _some(touched_ranges(begin, min(end, emitted_to - 1), cut))
    reached = found[-1][1] + 1 if found else begin
    return Reaction(
        result={"again": len(found)},
        events=_events(_output(call), found),
        place=reached if found and reached <= min(end, emitted_to - 1) else None,
    )


def _cut(config: Mapping[str, Any]) -> Cut:
    return calendar_of(config[PARTITION]).partition if PARTITION in config else every(config["size"])


def _some(ranges: Iterator[Range]) -> list[Range]:
    """Returns the ranges of one step."""
    try:
        return list(islice(ranges, STEP))
    except BadDate as error:
        raise OperatorFailed("BadScope", f"The scope has no place in the calendar: {error}.") from None


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
        raise OperatorFailed("NoOutput", "The job has no output for its ranges; declare one under `outputs`.")
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
