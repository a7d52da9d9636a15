"""The gate of the operator `sql`: one SELECT over the inputs, and nothing that reaches further.

Spark's own parser reads the text, and the gate walks the unresolved plan before anything is analysed: analysis alone
would open files, ask catalogs and send requests. Every class in the plan must be on a list, every relation an input or
a CTE in scope, every function on the list of `sql_functions`. A class that a later Spark adds is refused.

`${…}` is refused in the text, even within strings: Spark's parser replaces it by settings and by the environment of
its process.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pyspark.errors import ParseException
from pyspark.sql import SparkSession

from interlock.pipeline.built_in import sql_sizes
from interlock.pipeline.built_in.plan_listing import Node, TooComplex, parse
from interlock.pipeline.built_in.sql_functions import FUNCTIONS, TABLE_FUNCTIONS, VALUES_WITHOUT_PARENTHESES
from interlock.pipeline.built_in.sql_patterns import like_problem
from interlock.pipeline.built_in.sql_sizes import FACTORS, HIGHER_ORDER, MAX_GROWTH, SUMMED
from interlock.pipeline.failures import BadConfig

MAX_LENGTH: Final = 100_000
MAX_EXPANDED: Final = 200_000
"""Nodes of the plan once every CTE stands in each place that names it."""
MAX_LAMBDAS: Final = 3
_TOO_COMPLEX: Final = "The query is too long or nested too deeply: take it apart."
_SEE: Final = "See docs/built-in-operators.md#sql."


class UnsafeQuery(BadConfig):
    """The query says more than a query may."""


def checked(spark: SparkSession, query: str, inputs: Collection[str]) -> Any:
    """Returns the unresolved plan, in the JVM. Raises UnsafeQuery, and BadConfig for a text that is no statement."""
    _check_text(query)
    try:
        plan, root = parse(spark, query)
    except TooComplex:
        raise UnsafeQuery(_TOO_COMPLEX) from None
    except ParseException as error:
        raise BadConfig(f"The query cannot be read: {first_sentence(error)}") from None
    gate = _Gate(is_exact=spark.conf.get("spark.sql.caseSensitive") == "true")
    try:
        gate.plan(root, {gate.name(name): _Size(1, 1) for name in inputs})
    except RecursionError:
        raise UnsafeQuery(_TOO_COMPLEX) from None
    return plan


def _check_text(query: str) -> None:
    if len(query) > MAX_LENGTH:
        raise UnsafeQuery(f"The query is longer than {MAX_LENGTH} characters: write a shorter one.")
    if "${" in query:
        raise UnsafeQuery(f"Spark would replace ${{…}} by its own settings: write concat('$', '{{'). {_SEE}")
    if not query.isprintable() and any(not (one.isprintable() or one in " \t\r\n") for one in query):
        raise UnsafeQuery(f"The query has a character that cannot be printed: leave it out, or write chr(…). {_SEE}")


def first_sentence(error: Exception) -> str:
    """The first line of Spark's message, without its number, its plan and its copy of the text."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line.split("] ", 1)[-1].split(" SQLSTATE: ", 1)[0].split("; line ", 1)[0]


def _folded(name: str) -> str:
    """Names that differ in ASCII case alone are one name; Spark folds at least these."""
    return "".join(one.lower() if one.isascii() else one for one in name)


def _classes(package: str, names: str) -> frozenset[str]:
    return frozenset(f"{package}{name}" for name in names.split())


_PLANS: Final = _classes(
    "plans.logical.",
    """Aggregate Distinct Except Filter Generate GlobalLimit Intersect Join LateralJoin LocalLimit LocalRelation
    Offset OneRowRelation Pivot Project RepartitionByExpression Sort SubqueryAlias Union UnresolvedWith
    Unpivot Window WithWindowDefinition""",
) | _classes(
    "analysis.",
    """UnresolvedHaving UnresolvedInlineTable UnresolvedQualify UnresolvedRelation UnresolvedSubqueryColumnAliases
    UnresolvedTVFAliases UnresolvedTableValuedFunction""",
)
_EXPRESSIONS: Final = _classes(
    "expressions.",
    """Add Alias And Ascending$ AttributeReference BitwiseAnd BitwiseNot BitwiseOr BitwiseXor CaseWhen Cast Coalesce
    Concat CreateNamedStruct Cube CurrentRow$ Descending$ Divide EqualNullSafe EqualTo Exists ExprId
    GreaterThan GreaterThanOrEqual GroupingSets ILike If In InSubquery IntegralDivide IsNotNull IsNull
    LambdaFunction LateralSubquery LessThan LessThanOrEqual Like LikeAll LikeAny ListQuery Literal MultiAlias
    Multiply NamePlaceholder$ Not NotLikeAll NotLikeAny NullsFirst$ NumericEvalContext NullsLast$ Or Overlay
    RLike RangeFrame$ Remainder Rollup RowFrame$ ScalarSubquery ShiftLeft ShiftRight ShiftRightUnsigned
    SortOrder SpecifiedWindowFrame StringLocate StringTrim StringTrimLeft StringTrimRight Substring Subtract
    TimestampAdd TimestampDiff UnaryMinus UnaryPositive UnboundedFollowing$ UnboundedPreceding$
    UnresolvedNamedLambdaVariable UnspecifiedFrame$ WindowExpression WindowSpecDefinition
    UnresolvedWindowExpression WindowSpecReference IsUnknown$$anon$1 IsNotUnknown$$anon$2
    aggregate.AggregateExpression aggregate.AnyValue aggregate.Complete$ aggregate.First aggregate.Last""",
) | _classes(
    "analysis.",
    """UnresolvedAlias UnresolvedAttribute UnresolvedExtractValue UnresolvedFunction UnresolvedGenerator
    UnresolvedOrdinal UnresolvedStar UnresolvedStarExceptOrReplace UnresolvedWithinGroup""",
)
_PARTS: Final = _classes(
    "plans.",
    """Cross$ FullOuter$ Inner$ LeftAnti$ LeftOuter$ LeftSemi$ NaturalJoin RightOuter$ UsingJoin logical.JoinHint""",
) | _classes(
    "", "AliasIdentifier FunctionIdentifier seq map type null scala.None$ scala.Some scala.Tuple2 scala.Tuple3"
)
_VALUES: Final = _classes("java.lang.", "Boolean Byte Character Double Float Integer Long Short String") | _classes(
    "",
    """java.math.BigDecimal java.util.UUID scala.Enumeration$Val org.apache.spark.sql.types.Decimal
    org.apache.spark.sql.types.Metadata org.apache.spark.unsafe.types.CalendarInterval
    org.apache.spark.unsafe.types.UTF8String expressions.GenericInternalRow [B""",
)
_ALLOWED: Final = _PLANS | _EXPRESSIONS | _PARTS | _VALUES
_KEEPING: Final = _classes(
    "plans.logical.", "Except Filter GlobalLimit Intersect Join LocalLimit Offset RepartitionByExpression Sort Union"
) | {"analysis.UnresolvedHaving", "analysis.UnresolvedQualify"}
"""Plans that hand on the columns below them: what they compute themselves is not part of their rows."""
_PATTERNS: Final = {"expressions.Like": "like", "expressions.ILike": "ilike", "expressions.RLike": "rlike"}
_PATTERN_LISTS: Final = _classes("expressions.", "LikeAll LikeAny NotLikeAll NotLikeAny")
_HIDDEN_COLUMN: Final = "_metadata"
"""Paths, sizes and times of the files of an input, as a column that Spark does not list."""


@dataclass(frozen=True, slots=True)
class _Size:
    growth: int
    """How many times larger than a value of the inputs a value may be."""
    nodes: int


_Scope = Mapping[str, _Size]


@dataclass(slots=True)
class _Gate:
    """Walks a plan and measures it on the way."""

    is_exact: bool
    """Relations are told apart by case: a setting of the session."""
    lambdas: int = 0
    aliases: list[dict[str, int]] = field(default_factory=lambda: [{}])
    """Growth of the columns that the SELECT lists around this place have named so far, innermost last."""

    def name(self, text: str | None) -> str:
        return (text or "") if self.is_exact else _folded(text or "")

    def plan(self, node: Node, scope: _Scope) -> _Size:
        """Checks a node of any class: a plan, an expression, or a part of one."""
        if node.kind not in _ALLOWED:
            raise self._refused(node, f"{_shown(node.kind)} has no place in a query")
        if node.kind == "java.lang.String" and _folded(node.text or "") == _HIDDEN_COLUMN:
            raise self._refused(node, f"the name {_HIDDEN_COLUMN} is refused: it tells about files")
        match node.kind:
            case "plans.logical.UnresolvedWith":
                return self._with(node, scope)
            case "analysis.UnresolvedRelation":
                return self._relation(node, scope)
            case (
                "analysis.UnresolvedFunction"
                | "analysis.UnresolvedTableValuedFunction"
                | "analysis.UnresolvedGenerator"
            ):
                return self._call(node, scope)
            case "analysis.UnresolvedAttribute":
                return self._column(node, scope)
        self._check_pattern(node)
        return self._plan(node, scope) if node.kind in _PLANS else self._expression(node, scope)

    def _refused(self, node: Node, sentence: str) -> UnsafeQuery:
        place = f" at {node.place}" if node.place else ""
        return UnsafeQuery(f"The query is refused{place}: {sentence}. {_SEE}")

    def _bounded(self, node: Node, growth: int, nodes: int) -> _Size:
        if growth > MAX_GROWTH:
            raise self._refused(
                node, f"a value may become more than {MAX_GROWTH} times as large as those of the inputs"
            )
        if nodes > MAX_EXPANDED:
            raise self._refused(node, "the query is too large where names of WITH are replaced by what they stand for")
        return _Size(growth, nodes)

    # Relations

    def _with(self, node: Node, scope: _Scope) -> _Size:
        body, definitions, recursive = node.fields
        if recursive.text != "false":
            raise self._refused(node, "recursion is refused")
        inner = dict(scope)
        nodes = 0
        for definition in definitions.fields:
            name, defined, levels = definition.fields
            if levels.kind != "scala.None$":
                raise self._refused(node, "recursion is refused")
            size = self.plan(defined, inner)
            # From here on, and not within itself: there the name would be a table of the catalog.
            inner[self.name(name.text)] = size
            nodes += size.nodes
        size = self.plan(body, inner)
        return self._bounded(node, size.growth, size.nodes + nodes)

    def _relation(self, node: Node, scope: _Scope) -> _Size:
        parts, options, streaming = node.fields
        names = parts.names()
        size = scope.get(self.name(names[0])) if len(names) == 1 else None
        if size is None:
            known = ", ".join(sorted(scope)) or "none"
            shown = ".".join(names)[:100]
            raise self._refused(
                node, f"{shown} is neither an input nor named by WITH before this place; there are {known}"
            )
        if options.text != "0" or streaming.text != "false":
            raise self._refused(node, "a relation has no options and is no stream")
        return size

    # Plans and expressions

    def _plan(self, node: Node, scope: _Scope) -> _Size:
        """Columns of a plan are made of those of the plans below it."""
        self.aliases.append({})
        below, made, nodes = 1, 1, 1
        for one in _inside(node):
            size = self.plan(one, scope)
            nodes += size.nodes
            if one.kind in _PLANS:
                below = max(below, size.growth)
            else:
                made = max(made, size.growth)
        self.aliases.pop()
        size = self._bounded(node, below * made, nodes)
        return _Size(below, nodes) if node.kind in _KEEPING else size

    def _expression(self, node: Node, scope: _Scope) -> _Size:
        sizes = [self.plan(one, scope) for one in node.fields]
        together = sum if node.kind in ("expressions.Concat", "expressions.Overlay") else max
        growth = together([1, *(one.growth for one in sizes)])
        if node.kind == "expressions.Alias":
            # A later column of the same SELECT may name it.
            self.aliases[-1][_folded(node.fields[1].text or "")] = growth
        return self._bounded(node, growth, 1 + sum(one.nodes for one in sizes))

    def _column(self, node: Node, scope: _Scope) -> _Size:
        names = [_folded(one) for one in node.fields[0].names()]
        if len(names) == 1 and names[0] in VALUES_WITHOUT_PARENTHESES:
            raise self._refused(node, f"{names[0]} is a function; write the relation in front of a column of that name")
        self._expression(node, scope)
        return _Size(self.aliases[-1].get(names[-1], 1), 1)

    def _check_pattern(self, node: Node) -> None:
        problem = None
        if node.kind in _PATTERNS:
            problem = sql_sizes.pattern_problem(_PATTERNS[node.kind], node.fields[1])
        elif node.kind in _PATTERN_LISTS:
            found = (like_problem(one.text or "") for one in node.fields[1].fields)
            problem = next((one for one in found if one is not None), None)
        if problem is not None:
            raise self._refused(node, problem)

    # Functions

    def _call(self, node: Node, scope: _Scope) -> _Size:
        name = self._function(node)
        arguments = node.fields[1].fields
        if problem := sql_sizes.call_problem(name, arguments):
            raise self._refused(node, problem)
        if name in HIGHER_ORDER:
            self._check_lambdas(node, name, arguments)
        self.lambdas += name in HIGHER_ORDER
        sizes = [self.plan(one, scope) for one in arguments]
        others = [self.plan(one, scope) for one in node.fields[2:]]
        self.lambdas -= name in HIGHER_ORDER
        growth = self._grown(name, arguments, [one.growth for one in sizes])
        return self._bounded(node, growth, 1 + sum(one.nodes for one in [*sizes, *others]))

    def _function(self, node: Node) -> str:
        known = FUNCTIONS if node.kind == "analysis.UnresolvedFunction" else TABLE_FUNCTIONS
        named = node.fields[0]
        if named.kind == "FunctionIdentifier":
            parts = [named.fields[0].text or ""]
            qualified = any(one.kind != "scala.None$" for one in named.fields[1:])
        else:
            parts, qualified = named.names(), len(named.fields) != 1
        if qualified:
            raise self._refused(node, "a function has no catalog in front of it")
        name = _folded(parts[0])
        if name not in known:
            raise self._refused(node, f"{parts[0][:100]}(…) is no function that a query may call here")
        return name

    @staticmethod
    def _grown(name: str, arguments: list[Node], sizes: list[int]) -> int:
        own = sum(sizes) if name in SUMMED else max([1, *sizes])
        if name in HIGHER_ORDER:
            own = 1
            for size in sizes:
                own *= size
        if name in TABLE_FUNCTIONS and arguments and _calls(arguments[0], "sequence"):
            return 1  # one number per row
        return max(own, 1) * sql_sizes.count_of(name, arguments)

    def _check_lambdas(self, node: Node, name: str, arguments: list[Node]) -> None:
        if self.lambdas >= MAX_LAMBDAS:
            raise self._refused(node, f"functions over arrays are nested at most {MAX_LAMBDAS} deep")
        if name in ("aggregate", "reduce") and len(arguments) > 2 and _multiplies(arguments[2]):
            raise self._refused(node, f"{name} may name what it has so far only once beside a function that adds to it")


def _inside(node: Node) -> list[Node]:
    """The plans and expressions of a plan, out of the sequences and options that hold them."""
    found: list[Node] = []
    for one in node.fields:
        found.extend(_inside(one) if one.kind in _PARTS and one.fields else [one])
    return found


def _all(node: Node) -> list[Node]:
    return [node, *(below for one in node.fields for below in _all(one))]


def _calls(node: Node, name: str) -> bool:
    return node.kind == "analysis.UnresolvedFunction" and [_folded(one) for one in node.fields[0].names()] == [name]


def _multiplies(function: Node) -> bool:
    """Tells if a lambda may double its first variable: with each element, its value would double again."""
    if function.kind != "expressions.LambdaFunction":
        return False
    everything = _all(function.fields[0])
    called = {_folded(one.fields[0].names()[-1]) for one in everything if one.kind == "analysis.UnresolvedFunction"}
    grows = called & (SUMMED | FACTORS.keys() | {"repeat", "lpad", "rpad", "replace", "regexp_replace", "array_repeat"})
    grows |= {one.kind for one in everything if one.kind == "expressions.Concat"}
    variables = function.fields[1].fields
    name = _folded(variables[0].fields[0].names()[-1]) if variables else ""
    named = [one for one in everything if one.kind.endswith(("UnresolvedAttribute", "LambdaVariable"))]
    uses = sum(_folded(one.fields[0].names()[0]) == name for one in named)
    return bool(called & HIGHER_ORDER) or (bool(grows) and uses > 1) or bool(grows & (FACTORS.keys() | {"repeat"}))


def _shown(kind: str) -> str:
    return kind.rsplit(".", 1)[-1].removesuffix("$").removeprefix("Unresolved")
