"""Files that no row of a statement can come from are not even opened."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from interlock.access.query.jobs import DataFile
from interlock.access.sql_pushdown import Filter, folded


def pruned(files: Iterable[DataFile], filters: Sequence[Filter]) -> list[DataFile]:
    wanted = [one for one in filters if one.operator != "is not null"]
    return [file for file in files if all(_may_match(file, one) for one in wanted)]


def _may_match(file: DataFile, condition: Filter) -> bool:
    bounds = {folded(name): values for name, values in file.bounds.items()}.get(folded(condition.column))
    if bounds is None:
        return True
    if condition.operator == "is null":
        return False
    low, high = bounds
    numbers = [value for value in condition.values if isinstance(value, int)]
    if len(numbers) < len(condition.values):
        return True
    return any(_overlaps(condition.operator, number, low, high) for number in numbers)


def _overlaps(operator: str, number: int, low: int, high: int) -> bool:
    match operator:
        case "=" | "in":
            return low <= number <= high
        case "<":
            return low < number
        case "<=":
            return low <= number
        case ">":
            return high > number
        case ">=":
            return high >= number
        case _:
            return True
