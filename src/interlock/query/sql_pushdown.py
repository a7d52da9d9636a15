"""Filter pushdown: finds conditions of a parsed SELECT that hold for every relevant row of a relation.

They allow the engine to skip files and to read parts of tables. DuckDB applies all conditions again, so the result may
be incomplete, but it must be true. The module finds comparisons of a column with a literal in WHERE clauses, combined
with AND, on relations that are combined by inner joins only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Final, Literal

Node = Mapping[str, Any]
Operator = Literal["=", "<", "<=", ">", ">=", "in", "is null", "is not null"]
Value = int | Decimal | str

_COMPARISONS: Final[dict[str, Operator]] = {
    "COMPARE_EQUAL": "=",
    "COMPARE_LESSTHAN": "<",
    "COMPARE_LESSTHANOREQUALTO": "<=",
    "COMPARE_GREATERTHAN": ">",
    "COMPARE_GREATERTHANOREQUALTO": ">=",
}
_MIRRORED: Final[dict[Operator, Operator]] = {"=": "=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_MAX_VALUES: Final = 1_000


@dataclass(frozen=True, slots=True)
class Typed:
    """A literal with its type: `DATE '2024-01-31'`."""

    type: str
    text: str


@dataclass(frozen=True, slots=True)
class Filter:
    column: str
    """The name as written."""
    operator: Operator
    values: tuple[Value | Typed, ...] = ()


def filters_of(select: Node) -> list[tuple[str, list[Filter]]]:
    """Returns the filters of each relation, by its name in FROM."""
    tables = _joined(select.get("from_table"))
    if not tables:
        return []
    conditions = [found for node in _conjuncts(select.get("where_clause")) for found in _filters(node)]
    alone = len(tables) == 1
    aliases = [folded(str(table["alias"] or table.get("table_name", ""))) for table in tables]
    return [
        (
            str(table["table_name"]),
            [
                condition
                for qualifier, condition in conditions
                if (qualifier is None and alone) or (qualifier == alias and aliases.count(alias) == 1)
            ],
        )
        for table, alias in zip(tables, aliases, strict=True)
        if table["type"] == "BASE_TABLE" and not table["sample"] and not table["column_name_alias"]
    ]


def folded(name: str) -> str:
    """Folds a name as DuckDB compares names: only ASCII letters are case-insensitive."""
    return name.translate(_LOWER)


_LOWER: Final = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}


def plain(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def _joined(table: Node | None) -> list[Node]:
    """Returns the relations of a FROM with inner joins only; an empty list if there is another join.

    A subquery in FROM counts as a relation, because an unqualified name may be one of its columns.
    """
    found: list[Node] = []
    stack = [table]
    while stack:
        node = stack.pop()
        if node is None:
            return []
        if node["type"] != "JOIN":
            found.append(node)
        elif node["join_type"] == "INNER" and node["ref_type"] in ("REGULAR", "CROSS") and not node["sample"]:
            stack += [node["left"], node["right"]]
        else:
            return []
    return found


def _conjuncts(where: Node | None) -> Iterator[Node]:
    stack = [where] if where else []
    while stack:
        node = stack.pop()
        if node["class"] == "CONJUNCTION" and node["type"] == "CONJUNCTION_AND":
            stack.extend(node["children"])
        else:
            yield node


def _filters(node: Node) -> list[tuple[str | None, Filter]]:
    match node["class"]:
        case "COMPARISON" if node["type"] in _COMPARISONS:
            operator = _COMPARISONS[node["type"]]
            return _compared(node["left"], operator, [node["right"]]) or _compared(
                node["right"], _MIRRORED[operator], [node["left"]]
            )
        case "BETWEEN":
            return _compared(node["input"], ">=", [node["lower"]]) + _compared(node["input"], "<=", [node["upper"]])
        case "OPERATOR":
            return _of_operator(node["type"], node["children"])
        case _:
            return []


def _of_operator(kind: str, children: list[Node]) -> list[tuple[str | None, Filter]]:
    if kind == "COMPARE_IN" and 1 < len(children) <= _MAX_VALUES:
        return _compared(children[0], "in", children[1:])
    if kind == "OPERATOR_IS_NULL":
        return _compared(children[0], "is null", [])
    if kind == "OPERATOR_IS_NOT_NULL":
        return _compared(children[0], "is not null", [])
    return []


def _compared(column: Node, operator: Operator, operands: list[Node]) -> list[tuple[str | None, Filter]]:
    if column["class"] != "COLUMN_REF" or not 1 <= len(column["column_names"]) <= 2:
        return []
    values = [_value(operand) for operand in operands]
    known = tuple(value for value in values if value is not None)
    if len(known) < len(values):
        return []
    *qualifier, name = (str(part) for part in column["column_names"])
    return [(folded(qualifier[0]) if qualifier else None, Filter(name, operator, known))]


def _value(node: Node) -> Value | Typed | None:
    if node["class"] == "CONSTANT":
        return _literal(node.get("literal") or {})
    if node["class"] == "CAST" and not node["try_cast"] and node["child"]["class"] == "CONSTANT":
        text = _literal(node["child"].get("literal") or {})
        kind = node["type_expr"]
        if isinstance(text, str) and not kind.get("children"):
            return Typed(str(kind.get("type_name", "")).lower(), text)
    return None


def _literal(literal: Node) -> Value | None:
    """Returns the value, or None for types that are not compared here; floats are ambiguous."""
    kind, text = literal.get("kind"), str(literal.get("text", ""))
    try:
        if kind == "INTEGER":
            return int(text)
        if kind in ("DECIMAL", "NUMERIC"):
            return Decimal(text)
    except (ValueError, InvalidOperation):
        return None
    return text if kind == "STRING" else None
