"""The SQL gate: accepts one SELECT on granted relations, and nothing that reaches further.

DuckDB itself parses the text (`json_serialize_sql`), so no second parser can disagree with it. The gate checks the tree
against allowlists of node types and their fields, functions and types. A relation name must be granted, or be a CTE in
scope at that point. Everything else is rejected, including anything that a later DuckDB adds to its trees.

`parse` may take long or crash on a malicious text, so call it in a process that can be killed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import duckdb
import msgspec

from interlock.errors import InvalidQuery
from interlock.query.sql_functions import FUNCTIONS, TABLE_FUNCTIONS, TYPES
from interlock.query.sql_pushdown import Filter, filters_of, folded, plain

MAX_LENGTH: Final = 100_000
MAX_TREE: Final = 32 << 20
"""Maximum size of the parsed statement in bytes."""
_SEE: Final = "See docs/query.md."

Node = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scan:
    """The data that a statement reads of one relation, over all its references."""

    columns: frozenset[str] | None
    """Names in lower case, possibly including columns of other relations; None for all columns."""
    filters: tuple[Filter, ...] = ()
    """Conditions that hold for every relevant row. Empty if the relation is referenced twice."""


@dataclass(frozen=True, slots=True)
class Statement:
    sql: str
    scans: Mapping[str, Scan]
    """Scans by granted name."""


def check(sql: str, relations: Collection[str], columns: Collection[str] = ()) -> Statement:
    """Checks a statement. Raises InvalidQuery. `columns` are the known column names of all relations."""
    return judge(sql, parse(sql), relations, columns)


def check_text(sql: str) -> None:
    """Checks the text before it is parsed."""
    if not sql.strip():
        raise InvalidQuery(f"The statement is empty: write one SELECT. {_SEE}")
    if len(sql) > MAX_LENGTH:
        raise InvalidQuery(
            f"The statement has {len(sql)} characters, and the limit is {MAX_LENGTH}: write a shorter one."
        )
    if odd := _ODD_CHARACTER.search(sql):
        raise InvalidQuery(
            f"The character U+{ord(odd[0]):04X} is not allowed in a statement: remove it, or write it with chr(…)."
        )


_ODD_CHARACTER: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


def bare_connection() -> duckdb.DuckDBPyConnection:
    """Opens a connection without threads, files and extensions, which can parse and can be forked."""
    connection = duckdb.connect(":memory:", config=_GLOBAL)
    for name, value in _OF_SESSION.items():
        connection.execute(f"set {name} = {value}")
    return connection


_GLOBAL: Final[dict[str, str | bool | int | float | list[str]]] = {
    "threads": 1,
    "async_threads": 0,
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "allow_persistent_secrets": "false",
    "enable_external_file_cache": "false",
}
_OF_SESSION: Final = {
    "python_enable_replacements": "false",
    "enable_progress_bar": "false",
    "max_expression_depth": "250",
}


def parse(sql: str, connection: duckdb.DuckDBPyConnection | None = None) -> bytes:
    """Returns the tree as DuckDB serializes it. Raises InvalidQuery for an invalid text."""
    check_text(sql)
    asked = connection or bare_connection()
    try:
        row = asked.execute("select json_serialize_sql(?::varchar)", [sql]).fetchone()
    except duckdb.Error as error:
        raise InvalidQuery(f"The statement cannot be parsed: {_first_line(error)}") from None
    finally:
        if connection is None:
            asked.close()
    return str(row[0]).encode() if row else b""


def judge(sql: str, tree: bytes, relations: Collection[str], columns: Collection[str] = ()) -> Statement:
    """Checks a tree from `parse`. Raises InvalidQuery."""
    check_text(sql)
    if len(tree) > MAX_TREE:
        raise InvalidQuery("The parsed statement is too large: write a shorter one.")
    try:
        parsed: Any = msgspec.json.decode(tree)
    except (msgspec.DecodeError, RecursionError):
        raise InvalidQuery("The statement is nested too deeply: split it with WITH.") from None
    try:
        return _Gate(sql, relations, columns).judged(parsed)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        # A tree of an unknown shape must not pass.
        raise InvalidQuery(f"The parsed statement has an unknown form ({type(error).__name__}).") from error


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0][:500]


# Allowed tree nodes

_PLACE: Final = "type class alias query_location query_location_length"


def _fields(names: str) -> frozenset[str]:
    return frozenset(f"{_PLACE} {names}".split())


_QUERIES: Final = {
    "SELECT_NODE": _fields(
        "modifiers cte_map select_list from_table where_clause group_expressions group_sets aggregate_handling having "
        "sample qualify"
    ),
    "SET_OPERATION_NODE": _fields("modifiers cte_map setop_type left right setop_all children"),
    "RECURSIVE_CTE_NODE": _fields("modifiers cte_map cte_name union_all left right aliases key_targets"),
}
_RELATIONS: Final = {
    "BASE_TABLE": _fields("sample schema_name table_name column_name_alias catalog_name at_clause qualified_name"),
    "EMPTY": _fields("sample"),
    "EXPRESSION_LIST": _fields("sample expected_names expected_types values"),
    "JOIN": _fields(
        "sample left right condition join_type ref_type using_columns delim_flipped duplicate_eliminated_columns "
        "is_implicit nearest_approx nearest_count nearest_order_type ranking_expression"
    ),
    "PIVOT": _fields("sample source aggregates unpivot_names pivots groups column_name_alias include_nulls"),
    "SUBQUERY": _fields("sample subquery column_name_alias"),
    "TABLE_FUNCTION": _fields("sample function column_name_alias with_ordinality"),
}
_MODIFIERS: Final = {
    "DISTINCT_MODIFIER": _fields("distinct_on_targets"),
    "LIMIT_MODIFIER": _fields("limit offset limit_type"),
    "LIMIT_PERCENT_MODIFIER": _fields("limit offset"),
    "ORDER_MODIFIER": _fields("orders"),
    "ORDER_DEFAULT": _fields("expression null_order"),
    "ASCENDING": _fields("expression null_order"),
    "DESCENDING": _fields("expression null_order"),
}
_NODES: Final = _QUERIES | _RELATIONS | _MODIFIERS
_EXPRESSIONS: Final = {
    "BETWEEN": _fields("input lower upper"),
    "CASE": _fields("case_checks else_expr"),
    "CAST": _fields("child try_cast type_expr"),
    "COLLATE": _fields("child collation"),
    "COLUMN_REF": _fields("column_names"),
    "COMPARISON": _fields("left right"),
    "CONJUNCTION": _fields("children"),
    "CONSTANT": _fields("literal value"),
    "FUNCTION": _fields(
        "function_name schema filter order_bys distinct is_operator export_state catalog arguments qualified_name"
    ),
    "LAMBDA": _fields("lhs expr syntax_type"),
    "LAMBDA_REF": _fields("lambda_idx column_name"),
    "OPERATOR": _fields("children"),
    "STAR": _fields("relation_name exclude_list replace_list columns expr qualified_exclude_list rename_list"),
    "SUBQUERY": _fields("subquery_type subquery child comparison_type"),
    "TYPE": _fields("catalog schema type_name children qualified_name"),
    "WINDOW": _fields(
        "function_name schema catalog partitions orders start end start_expr end_expr offset_expr default_expr "
        "ignore_nulls filter_expr exclude_clause distinct arg_orders has_ignore_nulls arguments qualified_name"
    ),
}
_OPERATOR_NAMES: Final = """
    ARRAY_CONSTRUCTOR ARRAY_EXTRACT ARRAY_SLICE COMPARE_IN COMPARE_NOT_IN GROUPING_FUNCTION OPERATOR_COALESCE
    OPERATOR_IS_NOT_NULL OPERATOR_IS_NULL OPERATOR_NOT OPERATOR_NULLIF OPERATOR_TRY OPERATOR_UNPACK STRUCT_EXTRACT
"""
_OPERATORS: Final = frozenset(_OPERATOR_NAMES.split())
_RECORDS: Final = {
    "arguments": frozenset({"name", "expression"}),
    "case_checks": frozenset({"when_expr", "then_expr"}),
    "entries": frozenset({"alias", "star_expr", "values"}),
    "key": frozenset({"catalog", "schema", "table", "column"}),
    "literal": frozenset({"kind", "text"}),
    "pivots": frozenset({"entries", "pivot_expressions", "unpivot_names", "pivot_enum"}),
    "qualified_exclude_list": frozenset({"catalog", "schema", "table", "column"}),
    "qualified_name": frozenset({"path"}),
    "rename_list": frozenset({"key", "value"}),
    "replace_list": frozenset({"key", "value"}),
    "sample": frozenset({"is_percentage", "method", "repeatable", "sample_rate", "sample_size", "seed"}),
    "sample_size": frozenset({"is_null", "type", "value"}),
    "subquery": frozenset({"named_param_map", "node"}),
    "type": frozenset({"id", "type_info"}),
    "value": frozenset({"is_null", "type", "value"}),
}
"""Fields of objects that have no class or type, by the name of the field that contains them."""

_INSTEAD: Final = {
    "SHOW_REF": "DESCRIBE, SHOW and SUMMARIZE are not allowed: the response lists the columns with their types",
    "PARAMETER": "parameters are not allowed: write the value itself",
    "POSITIONAL_REFERENCE": "#1 is not allowed: write the name of the column",
    "DEFAULT": "DEFAULT is not allowed in a query",
    "INSERT_QUERY_NODE": "INSERT is not allowed: a query only reads",
    "UPDATE_QUERY_NODE": "UPDATE is not allowed: a query only reads",
    "DELETE_QUERY_NODE": "DELETE is not allowed: a query only reads",
    "MERGE_INTO_QUERY_NODE": "MERGE is not allowed: a query only reads",
}
_VALUE_FUNCTIONS: Final = frozenset(
    {"current_user", "session_user", "user", "current_role", "current_catalog", "current_schema", "current_database"}
)
"""DuckDB interprets an unknown column with one of these names as a function call."""
_CTE_NAME: Final = re.compile(r"[^\W\d]\w*")
"""A name that cannot be interpreted as a file or an address in any scope."""


@dataclass(slots=True)
class _Reading:
    """References to one relation, found by the walk."""

    places: int = 0
    filters: list[Filter] = field(default_factory=list)


@dataclass(slots=True)
class _Gate:
    sql: str
    granted: Collection[str]
    columns: Collection[str]
    names: dict[str, str] = field(default_factory=dict)
    """Granted names by their case-folded form."""
    known: frozenset[str] = frozenset()
    """Column names of the relations."""
    read: dict[str, _Reading] = field(default_factory=dict)
    mentioned: set[str] = field(default_factory=set)
    """Referenced columns, in lower case."""
    alone: set[str] = field(default_factory=set)
    """Columns referenced without a qualifier."""
    whole: bool = False
    """True if an expression uses all columns of a relation."""
    aliases: set[str] = field(default_factory=set)
    at: int = 0

    def judged(self, parsed: Any) -> Statement:
        self.names = {folded(name): name for name in self.granted}
        self.known = frozenset(map(folded, self.columns))
        self._walk(self._only_statement(parsed))
        # The name of a relation used as a column means the whole row, as a struct.
        whole = self.whole or bool(self.alone & self.aliases)
        columns = None if whole else frozenset(self.mentioned)
        return Statement(
            self.sql,
            {
                name: Scan(columns, tuple(reading.filters) if reading.places == 1 else ())
                for name, reading in self.read.items()
            },
        )

    def _refused(self, sentence: str) -> InvalidQuery:
        where = ""
        if 0 <= self.at <= len(self.sql.encode()):
            before = self.sql.encode()[: self.at].decode("utf-8", "ignore")
            where = f" at line {before.count(chr(10)) + 1}, column {len(before) - before.rfind(chr(10))}"
        return InvalidQuery(f"The statement is refused{where}: {sentence}. {_SEE}")

    def _only_statement(self, parsed: Any) -> Node:
        self.at = -1
        if not isinstance(parsed, dict) or parsed.get("error") is not False:
            raise self._unreadable(parsed)
        statements = parsed.get("statements")
        if not isinstance(statements, list) or len(statements) != 1:
            raise self._refused("it must be exactly one SELECT, without another statement after a semicolon")
        statement: Node = statements[0]
        if statement.get("named_param_map"):
            raise self._refused("parameters are not allowed: write the value itself")
        if extra := statement.keys() - {"node", "named_param_map"}:
            raise self._refused(f"{min(extra)} is not allowed")
        node: Node = statement["node"]
        return node

    def _unreadable(self, parsed: Any) -> InvalidQuery:
        if not isinstance(parsed, dict):
            return self._refused("its parsed form is unknown")
        if parsed.get("error_type") == "not implemented":
            return self._refused(
                "only SELECT is allowed, not ATTACH, COPY, SET, PRAGMA, INSTALL, LOAD, CALL, EXPLAIN or any statement "
                "that writes; PIVOT needs IN (…) with its values"
            )
        position = str(parsed.get("position", ""))
        self.at = int(position) if position.isdigit() else -1
        message = str(parsed.get("error_message", "")).split("\n", 1)[0][:300]
        return self._refused(message or "it cannot be parsed")

    # The walk uses its own stack, because a tree may be deeper than Python's recursion limit

    def _walk(self, root: Node) -> None:
        stack: list[tuple[Any, str, frozenset[str]]] = [(root, "node", frozenset())]
        while stack:
            value, place, scope = stack.pop()
            if isinstance(value, list):
                stack.extend((item, place, scope) for item in value if isinstance(item, dict | list))
            else:
                stack.extend(
                    (item, name, inner)
                    for item, name, inner in self._step(value, place, scope)
                    if isinstance(item, dict | list)
                )

    def _step(self, node: Node, place: str, scope: frozenset[str]) -> Iterator[tuple[Any, str, frozenset[str]]]:
        """Checks one node and yields its children, each with the CTEs in scope."""
        location = node.get("query_location")
        if isinstance(location, int) and location < len(self.sql) * 4:
            self.at = location
        if "class" in node:
            self._expression(node)
        elif isinstance(node.get("type"), str):
            self._node(node, scope)
            if node["type"] in _QUERIES:
                return self._query(node, scope)
        else:
            self._record(node, place)
        return ((value, name, scope) for name, value in node.items())

    def _query(self, node: Node, scope: frozenset[str]) -> Iterator[tuple[Any, str, frozenset[str]]]:
        inner = scope
        for entry in node["cte_map"]["map"]:
            name, defined = str(entry["key"]), entry["value"]
            self._cte(name, entry, defined)
            yield defined["query_node"], "query_node", inner
            inner |= {folded(name)}
            for of_keys in ("key_targets", "payload_aggregates"):
                yield defined.get(of_keys), of_keys, inner
        if node["type"] == "SELECT_NODE":
            self._note_filters(node, inner)
        own = frozenset({folded(str(node["cte_name"]))}) if node["type"] == "RECURSIVE_CTE_NODE" else frozenset()
        for name, value in node.items():
            if name != "cte_map":
                # Only the recursive part sees the CTE that it defines.
                yield value, name, inner | own if name in ("right", "key_targets") else inner

    def _cte(self, name: str, entry: Node, defined: Node) -> None:
        if not _CTE_NAME.fullmatch(name):
            raise self._refused("a name after WITH must consist of letters, digits and _")
        self._fields(entry, frozenset({"key", "value"}), "WITH")
        self._fields(
            defined,
            frozenset({"aliases", "materialized", "key_targets", "payload_aggregates", "query_node"}),
            "WITH",
        )

    # Rules

    def _fields(self, node: Node, known: frozenset[str], what: str) -> None:
        for name, value in node.items():
            if name not in known and value not in (None, False, "", 0, [], {}):
                raise self._refused(f"{name} of {what} is not supported: remove it")

    def _node(self, node: Node, scope: frozenset[str]) -> None:
        kind = str(node["type"])
        known = _NODES.get(kind)
        if known is None:
            raise self._refused(_INSTEAD.get(kind, f"{kind} is not allowed in a query"))
        self._fields(node, known, kind)
        if kind == "BASE_TABLE":
            self._relation(node, scope)
        elif kind == "TABLE_FUNCTION":
            self._table_function(node)
        natural = kind == "JOIN" and node["ref_type"] == "NATURAL"
        renamed = kind != "SUBQUERY" and node.get("column_name_alias")
        if natural or renamed or kind == "PIVOT":
            self.whole = True
        self.mentioned.update(folded(str(name)) for name in node.get("using_columns") or ())

    def _relation(self, node: Node, scope: frozenset[str]) -> None:
        name = str(node["table_name"])
        if node["schema_name"] or node["catalog_name"] or list(node["qualified_name"]["path"]) != [name]:
            raise self._refused("a relation must be named without schema and catalog")
        if node["at_clause"]:
            raise self._refused("AT (…) is not allowed: each relation has only one state")
        self.aliases |= {folded(name), folded(str(node["alias"] or name))}
        if folded(name) in scope:
            return
        granted = self.names.get(folded(name))
        if granted is None:
            known = ", ".join(sorted(self.granted)[:20]) or "none"
            refused = self._refused(f"{_short(name)} is not a relation of this query; available: {known}")
            raise UnknownRelation(refused.detail, name)
        self.read.setdefault(granted, _Reading()).places += 1

    def _table_function(self, node: Node) -> None:
        function = node["function"]
        name = str(function.get("function_name", ""))
        if function.get("class") != "FUNCTION" or folded(name) not in TABLE_FUNCTIONS:
            raise self._refused(
                f"{_short(name)}(…) is not allowed in FROM: a query reads only its relations and UNNEST(…), not files "
                "or other table functions"
            )

    def _expression(self, node: Node) -> None:
        kind = str(node["class"])
        known = _EXPRESSIONS.get(kind)
        if known is None:
            raise self._refused(_INSTEAD.get(kind, f"{kind} is not allowed in a query"))
        self._fields(node, known, kind)
        match kind:
            case "FUNCTION" | "WINDOW":
                self._function(node)
            case "OPERATOR" if node["type"] not in _OPERATORS:
                raise self._refused(f"{node['type']} is not allowed in a query")
            case "COLUMN_REF":
                self._column(node)
            case "STAR":
                self.whole = True
            case "TYPE":
                self._type(node)
            case "COLLATE" if not re.fullmatch(r"[A-Za-z_.]{1,64}", str(node["collation"])):
                raise self._refused("this collation is unknown")
            case _:
                pass

    def _function(self, node: Node) -> None:
        name = str(node["function_name"])
        if node["schema"] or node["catalog"] or list(node["qualified_name"]["path"]) != [name]:
            raise self._refused("a function must be named without schema and catalog")
        if folded(name) not in FUNCTIONS:
            raise self._refused(f"{_short(name)}(…) is not a function that a query may call")
        if node.get("export_state"):
            raise self._refused("EXPORT_STATE is not allowed: finish the aggregation")

    def _column(self, node: Node) -> None:
        names = [folded(str(name)) for name in node["column_names"]]
        if len(names) == 1 and names[0] in _VALUE_FUNCTIONS and names[0] not in self.known:
            raise self._refused(f"{names[0]} is not a column of the relations")
        self.mentioned.update(names)
        if len(names) == 1:
            self.alone.add(names[0])

    def _type(self, node: Node) -> None:
        name = str(node["type_name"])
        if node["schema"] or node["catalog"] or list(node["qualified_name"]["path"]) != [name]:
            raise self._refused("a type must be named without schema and catalog")
        if folded(name) not in TYPES:
            raise self._refused(f"{_short(name)} is not a type that a query may use")

    def _record(self, node: Node, place: str) -> None:
        known = _RECORDS.get(place)
        if known is None:
            raise self._refused(f"{place} is not supported: remove it")
        self._fields(node, known, place)
        if node.get("pivot_enum"):
            raise self._refused("PIVOT needs IN (…) with its values")
        if node.get("named_param_map"):
            raise self._refused("parameters are not allowed: write the value itself")

    # Columns and filters of each relation

    def _note_filters(self, select: Node, scope: frozenset[str]) -> None:
        for name, found in filters_of(select):
            granted = None if folded(name) in scope else self.names.get(folded(name))
            if granted is not None:
                self.read.setdefault(granted, _Reading()).filters.extend(found)


class UnknownRelation(InvalidQuery):
    """Raised for a relation that is not granted, with its name as the statement has it."""

    def __init__(self, detail: str, name: str) -> None:
        super().__init__(detail)
        self.name = name


def _short(name: str) -> str:
    return plain(name[:80])
