"""The gate of the operator `sql`: accepts one SELECT over the inputs, and refuses everything that reaches further.

Spark's own parser reads the text. The gate walks the unresolved plan before Spark analyses it, since analysis alone
would open files, query catalogs and send requests. Every class in the plan must be on an allowlist, every relation must
be an input or a CTE in scope, and every function must be listed in `sql_functions`. A class that a later version of
Spark adds is therefore refused.

The gate refuses `${…}` in the text, even within strings, because Spark's parser replaces it with settings and
environment variables of its process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Final

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from interlock.spark.built_in import sql_sizes
from interlock.spark.built_in.plan_listing import Node, TooComplex, parse
from interlock.spark.built_in.sql_sizes import FACTORS, HIGHER_ORDER, MAX_GROWTH, MULTIPLIED, SUMMED, like_problem
from interlock.workers.failures import BadConfig

MAX_LENGTH: Final = 100_000
MAX_EXPANDED: Final = 200_000
"""Nodes of the plan after Spark has replaced references to CTEs, `*`, grouping sets and sliding windows by what they
stand for. Spark takes about 10 s to plan that many."""
PLAN_WEIGHT: Final = 100
"""Nodes that a relation or a clause counts for: Spark takes about as long to resolve it as 100 expressions."""
WEIGHTS: Final = {
    "expressions.Exists": 1000,
    "expressions.ListQuery": 1000,
    "expressions.ScalarSubquery": 1000,
    "expressions.WindowSpecDefinition": 500,
}
"""Nodes that these expressions count for: Spark compares every subquery, and every window, with all others."""
MAX_COLUMNS: Final = 10_000
"""Columns of a plan, in which each field of a struct counts."""
MAX_INLINED: Final = 50_000
"""Nodes of an expression after each column in it is replaced by the expression that computes it. Spark does that when
it moves a filter into a subquery: `SELECT a + a AS a FROM (…)` doubles the filter at each level."""
MAX_GROUPING_SETS: Final = 4096
MAX_LAMBDAS: Final = 3
_TOO_COMPLEX: Final = "The query is too long or nested too deeply: split it into several jobs."
_SEE: Final = "See docs/built-in-operators.md#sql."


class UnsafeQuery(BadConfig):
    """The query uses something that the gate does not allow."""


def checked(spark: SparkSession, query: str, inputs: Mapping[str, StructType]) -> Any:
    """Returns the unresolved plan, which stays in the JVM. Raises UnsafeQuery, or BadConfig for a syntax error."""
    _check_text(query)
    try:
        plan, root = parse(spark, query)
    except TooComplex as problem:
        raise UnsafeQuery(f"The query is refused: {problem}. {_SEE}") from None
    except PySparkException as error:
        raise BadConfig(f"The query does not parse: {first_sentence(error)}") from None
    gate = _Gate(is_exact=spark.conf.get("spark.sql.caseSensitive") == "true")
    try:
        gate.plan(root, {gate.name(name): _input_size(columns) for name, columns in inputs.items()})
    except RecursionError:
        raise UnsafeQuery(_TOO_COMPLEX) from None
    return plan


def _check_text(query: str) -> None:
    if len(query) > MAX_LENGTH:
        raise UnsafeQuery(f"The query has {len(query)} characters, at most {MAX_LENGTH} are allowed.")
    if "${" in query:
        raise UnsafeQuery(
            f"The query contains ${{, which Spark would replace with its settings: write concat('$', '{{'). {_SEE}"
        )
    if not query.isprintable() and any(not (one.isprintable() or one in " \t\r\n") for one in query):
        raise UnsafeQuery(f"The query has a non-printable character: remove it, or write chr(…). {_SEE}")


def first_sentence(error: Exception) -> str:
    """Returns the first line of Spark's message, without its error class, plan and copy of the query."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line.split("] ", 1)[-1].split(" SQLSTATE: ", 1)[0].split("; line ", 1)[0]


def _folded(name: str) -> str:
    """Folds ASCII case. Names that differ only in it are equal to Spark, which folds at least these letters."""
    return "".join(one.lower() if one.isascii() else one for one in name)


def _classes(package: str, names: str) -> frozenset[str]:
    return frozenset(f"{package}{name}" for name in names.split())


_PLANS: Final = _classes(
    "plans.logical.",
    """Aggregate Distinct Except Filter Generate GlobalLimit Intersect Join LateralJoin LocalLimit Offset
    OneRowRelation Pivot Project RepartitionByExpression Sort SubqueryAlias Union UnresolvedWith
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
"""Plans that pass on the columns of the plans below them: the values that they compute are not part of their rows."""
_KEEPING_COLUMNS: Final = (_KEEPING - {"plans.logical.Join"}) | _classes(
    "",
    """plans.logical.Distinct plans.logical.SubqueryAlias plans.logical.WithWindowDefinition
    analysis.UnresolvedSubqueryColumnAliases analysis.UnresolvedTVFAliases""",
)
"""Plans with as many columns as the widest plan below them."""
_ADDING_COLUMNS: Final = _classes("plans.logical.", "Generate Join LateralJoin Pivot Unpivot Window")
"""Plans with all columns of the plans below them, and columns of their own."""
_RENAMING: Final = _classes(
    "",
    """plans.logical.Except plans.logical.Intersect plans.logical.Union analysis.UnresolvedSubqueryColumnAliases
    analysis.UnresolvedTVFAliases""",
)
"""Plans whose columns may have other names than those of the plans below them."""
_SCALARS: Final = _classes(
    "expressions.",
    """Add And BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Divide EqualNullSafe EqualTo Exists GreaterThan
    GreaterThanOrEqual ILike In InSubquery IntegralDivide IsNotNull IsNull LessThan LessThanOrEqual Like LikeAll LikeAny
    Multiply Not NotLikeAll NotLikeAny Or Overlay RLike Remainder ShiftLeft ShiftRight ShiftRightUnsigned SortOrder
    StringLocate StringTrim StringTrimLeft StringTrimRight Substring Subtract TimestampAdd TimestampDiff UnaryMinus
    UnaryPositive""",
)
"""Expressions whose value is never a struct."""
_MULTIPLYING: Final = _classes("expressions.", "StringLocate StringTrim StringTrimLeft StringTrimRight")
_STARS: Final = _classes("analysis.", "UnresolvedStar UnresolvedStarExceptOrReplace")
_PATTERNS: Final = {"expressions.Like": "like", "expressions.ILike": "ilike", "expressions.RLike": "rlike"}
_PATTERN_LISTS: Final = _classes("expressions.", "LikeAll LikeAny NotLikeAll NotLikeAny")
_HIDDEN_COLUMN: Final = "_metadata"
"""A hidden column of Spark with paths, sizes and times of the files of an input."""


@dataclass(frozen=True, slots=True)
class _Size:
    growth: int
    """Largest size of a value, as a multiple of the values of the inputs."""
    nodes: int
    columns: int
    """Columns of a plan, or fields of a value. Nested fields count."""
    widest: int = 1
    """Most fields of one column of a plan."""
    inlined: int = 1
    """Nodes of an expression after its columns are replaced by their expressions."""
    named: Mapping[str, int] = field(default_factory=dict)
    """The same for the columns of a plan; of those that are not listed, under an empty name."""


def _input_size(columns: StructType) -> _Size:
    fields = [_fields(one.dataType) for one in columns.fields]
    named = {_folded(one.name): 1 for one in columns.fields}
    return _Size(1, PLAN_WEIGHT, sum(fields), max(fields, default=1), named=named)


def _fields(kind: DataType) -> int:
    match kind:
        case StructType():
            return sum(_fields(one.dataType) for one in kind.fields)
        case ArrayType():
            return _fields(kind.elementType)
        case MapType():
            return _fields(kind.keyType) + _fields(kind.valueType)
    return 1


_Scope = Mapping[str, _Size]


@dataclass(slots=True)
class _Gate:
    """Walks a plan and measures it on the way."""

    is_exact: bool
    """Names of relations are case-sensitive: a setting of the session."""
    lambdas: int = 0
    aliases: list[dict[str, _Size]] = field(default_factory=lambda: [{}])
    """Sizes of the columns named so far by the enclosing SELECT lists, innermost last."""
    below: list[_Size] = field(default_factory=list)
    """The relations that enclosing clauses read from, innermost last. A subquery may refer to all of them."""
    distinct: int = 0
    """Calls with DISTINCT so far in the innermost SELECT."""

    def name(self, text: str | None) -> str:
        return (text or "") if self.is_exact else _folded(text or "")

    def plan(self, node: Node, scope: _Scope) -> _Size:
        """Checks a node of any class: a plan, an expression, or a part of one."""
        if node.kind not in _ALLOWED:
            raise self._refused(node, f"{_shown(node.kind)} is not allowed in a query")
        if node.kind == "java.lang.String" and _folded(node.text or "") == _HIDDEN_COLUMN:
            raise self._refused(node, f"the name {_HIDDEN_COLUMN} is not allowed: it reveals the files of an input")
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

    def _bounded(self, node: Node, growth: int, nodes: int, columns: int, widest: int = 1) -> _Size:
        if growth > MAX_GROWTH:
            raise self._refused(
                node, f"a value could become more than {MAX_GROWTH} times as large as the values of the inputs"
            )
        if nodes > MAX_EXPANDED:
            raise self._refused(
                node,
                f"the plan has more than {MAX_EXPANDED} nodes after WITH is expanded, with every * and grouping set: "
                "refer to fewer names",
            )
        if columns > MAX_COLUMNS:
            raise self._refused(node, f"there would be more than {MAX_COLUMNS} columns")
        return _Size(growth, nodes, columns, max(widest, 1))

    # Relations

    def _with(self, node: Node, scope: _Scope) -> _Size:
        body, definitions, recursive = node.fields
        if recursive.text != "false":
            raise self._refused(node, "recursive WITH is not allowed")
        inner = dict(scope)
        nodes = 0
        for definition in definitions.fields:
            name, defined, levels = definition.fields
            if levels.kind != "scala.None$":
                raise self._refused(node, "recursive WITH is not allowed")
            size = self.plan(defined, inner)
            # The name is in scope only after its definition: inside it, the name would mean a table of the catalog.
            inner[self.name(name.text)] = size
            nodes += size.nodes
        size = self.plan(body, inner)
        return self._bounded(node, size.growth, size.nodes + nodes, size.columns, size.widest)

    def _relation(self, node: Node, scope: _Scope) -> _Size:
        parts, options, streaming = node.fields
        names = parts.names()
        size = scope.get(self.name(names[0])) if len(names) == 1 else None
        if size is None:
            known = ", ".join(sorted(scope)) or "none"
            shown = ".".join(names)[:100]
            raise self._refused(
                node, f"{shown} is neither an input nor defined by WITH before this point; available: {known}"
            )
        if options.text != "0" or streaming.text != "false":
            raise self._refused(node, "options and streaming are not allowed on a relation")
        return size

    # Plans and expressions

    def _plan(self, node: Node, scope: _Scope) -> _Size:
        """Measures a plan. Its columns are computed from those of the plans below it, so their growths multiply."""
        distinct, self.distinct = self.distinct, 0
        self.aliases.append({})
        inside = _inside(node)
        plans = [self.plan(one, scope) for one in inside if one.kind in _PLANS]
        below = self._below(node, plans)
        self.below.append(below)
        others = [self.plan(one, scope) for one in inside if one.kind not in _PLANS]
        self.below.pop()
        self.aliases.pop()
        nodes = PLAN_WEIGHT + sum(one.nodes for one in [*plans, *others]) + self._copies(node) * below.columns
        # Spark rewrites several DISTINCT aggregates to one column and one copy of the rows for each.
        nodes += self.distinct**2
        self.distinct = distinct
        growth = below.growth * max([1, *(one.growth for one in others)])
        size = self._bounded(node, growth, nodes, *self._columns(node, below, others))
        named = _inlined(node, below.named, [one for one in inside if one.kind not in _PLANS], others)
        kept = below.growth if node.kind in _KEEPING else growth
        return replace(size, growth=kept, inlined=max([1, *named.values()]), named=named)

    @staticmethod
    def _below(node: Node, plans: Sequence[_Size]) -> _Size:
        together = sum if node.kind == "plans.logical.Join" else max
        return _Size(
            max([1, *(one.growth for one in plans)]),
            0,
            together([0, *(one.columns for one in plans)]),
            max([1, *(one.widest for one in plans)]),
            named=_largest([one.named for one in plans]),
        )

    def _columns(self, node: Node, below: _Size, others: Sequence[_Size]) -> tuple[int, int]:
        """Returns the columns of a plan, and the fields of its widest column."""
        if node.kind in _KEEPING_COLUMNS:
            return below.columns, below.widest
        fields = [one.columns for one in others]
        own, widest = sum(fields), max([below.widest, *fields])
        match node.kind:
            case "analysis.UnresolvedInlineTable":
                width = len(node.fields[0].fields)
                own = max(sum(fields[at : at + width]) for at in range(width, len(fields), width))
            case "plans.logical.Pivot":
                values, aggregates = node.fields[2].fields, node.fields[3].fields
                own = len(values) * sum(fields[-len(aggregates) :])
        return own + below.columns * (node.kind in _ADDING_COLUMNS), widest

    def _copies(self, node: Node) -> int:
        """Returns how many times Spark copies all columns: once per grouping set, or per column of UNPIVOT."""
        match node.kind:
            case "plans.logical.Aggregate":
                sets = prod(_grouping_sets(one) for one in node.fields[0].fields)
                if sets > MAX_GROUPING_SETS:
                    raise self._refused(node, f"there would be more than {MAX_GROUPING_SETS} grouping sets")
                return sets if sets > 1 else 0
            case "plans.logical.Unpivot":
                return sum(one.kind == "analysis.UnresolvedAttribute" for one in _all(node.fields[1]))
        return 0

    def _expression(self, node: Node, scope: _Scope) -> _Size:
        if node.kind in _VALUES:
            return _Size(1, 1, 0)
        if node.kind == "type":
            return _Size(1, 1, sql_sizes.fields_of_type(node.text or ""))
        if node.kind == "expressions.Literal":
            return _Size(sql_sizes.literal_growth(node), 1, 1)
        sizes = [self.plan(one, scope) for one in _inside(node)]
        growths = [1, *(one.growth for one in sizes)]
        growth = max(growths)
        if node.kind in ("expressions.Concat", "expressions.Overlay"):
            growth = sum(growths)
        elif node.kind in _MULTIPLYING:
            self._bounded(node, prod(growths), 0, 0)
        together = sum if node.kind == "expressions.CreateNamedStruct" else max
        columns = together([0, *(one.columns for one in sizes)])
        nodes = WEIGHTS.get(node.kind, 1) + sum(one.nodes for one in sizes)
        if node.kind in _STARS:
            columns = sum(one.columns for one in self.below)
            nodes += columns * max(self._widest(), sum(len(one.fields) for one in node.fields[1:2]))
        elif node.kind == "expressions.UnresolvedNamedLambdaVariable":
            columns = 1
        inlined = 1 + sum(one.inlined for one in sizes if one.columns)
        if inlined > MAX_INLINED:
            raise self._refused(node, f"a column would have more than {MAX_INLINED} nodes with its subqueries' columns")
        size = replace(self._bounded(node, growth, nodes, 1 if node.kind in _SCALARS else columns), inlined=inlined)
        if node.kind == "expressions.Alias":
            # A later column of the same SELECT may refer to it.
            self.aliases[-1][_folded(node.fields[1].text or "")] = size
        return size

    def _widest(self) -> int:
        return max([1, *(one.widest for one in self.below)])

    def _column(self, node: Node, scope: _Scope) -> _Size:
        names = [_folded(one) for one in node.fields[0].names()]
        if len(names) == 1 and names[0] in VALUES_WITHOUT_PARENTHESES:
            raise self._refused(node, f"{names[0]} is a function; qualify a column of that name with its relation")
        self._expression(node, scope)
        before = self.aliases[-1].get(names[-1], _Size(1, 1, 1))
        inlined = max([before.inlined, *(_inlined_size(one.named, names) for one in self.below)])
        # Spark may inline a struct into every reference to one of its fields.
        return _Size(before.growth, self._widest(), self._widest(), inlined=inlined)

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
        self.distinct += node.kind == "analysis.UnresolvedFunction" and node.fields[2].text == "true"
        growth = self._grown(name, arguments, [one.growth for one in sizes])
        nodes = 1 + sum(one.nodes for one in [*sizes, *others])
        if name == "window":
            nodes += sql_sizes.windows_per_row(arguments) * sum(one.columns for one in self.below)
        columns = sql_sizes.fields_of_call(name, arguments, [one.columns for one in sizes])
        inlined = 1 + sum(one.inlined for one in sizes)
        if node.kind == "analysis.UnresolvedTableValuedFunction":
            return self._bounded(node, growth, nodes + PLAN_WEIGHT, columns + 2, columns)
        return replace(self._bounded(node, growth, nodes, 1 if name in SCALAR_FUNCTIONS else columns), inlined=inlined)

    def _function(self, node: Node) -> str:
        known = FUNCTIONS if node.kind == "analysis.UnresolvedFunction" else TABLE_FUNCTIONS
        named = node.fields[0]
        if named.kind == "FunctionIdentifier":
            parts = [named.fields[0].text or ""]
            qualified = any(one.kind != "scala.None$" for one in named.fields[1:])
        else:
            parts, qualified = named.names(), len(named.fields) != 1
        if qualified:
            raise self._refused(node, "a function must not be qualified with a catalog or schema")
        name = _folded(parts[0])
        if name not in known:
            raise self._refused(node, f"the function {parts[0][:100]}(…) is not allowed here")
        return name

    @staticmethod
    def _grown(name: str, arguments: list[Node], sizes: list[int]) -> int:
        own = sum(sizes) if name in SUMMED else prod(sizes) if name in MULTIPLIED else max([1, *sizes])
        if name in TABLE_FUNCTIONS and arguments and _calls(arguments[0], "sequence"):
            return 1  # one number per row
        return max(own, 1) * sql_sizes.count_of(name, arguments)

    def _check_lambdas(self, node: Node, name: str, arguments: list[Node]) -> None:
        if self.lambdas >= MAX_LAMBDAS:
            raise self._refused(node, f"functions over arrays may be nested at most {MAX_LAMBDAS} deep")
        if name in ("aggregate", "reduce") and len(arguments) > 2 and _multiplies(arguments[2]):
            raise self._refused(
                node, f"a lambda of {name} that makes its accumulator grow may refer to the accumulator only once"
            )


def _inside(node: Node) -> list[Node]:
    """Returns the plans and expressions of a plan, unpacked from sequences and options."""
    found: list[Node] = []
    for one in node.fields:
        found.extend(_inside(one) if one.kind in _PARTS and one.fields else [one])
    return found


def _largest(several: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: max(one.get(name, 1) for one in several) for name in {name for one in several for name in one}}


def _inlined_size(named: Mapping[str, int], names: Sequence[str]) -> int:
    """Returns the nodes of a column, which may be qualified, or be a field of a struct."""
    return max([named[one] for one in names if one in named] or [named.get("", 1)])


def _inlined(
    node: Node, below: Mapping[str, int], expressions: Sequence[Node], sizes: Sequence[_Size]
) -> Mapping[str, int]:
    """Returns the nodes of each column of a plan after inlining."""
    if node.kind in _KEEPING_COLUMNS - _RENAMING or node.kind == "plans.logical.Join":
        return below
    named: list[Mapping[str, int]] = []
    for one, size in zip(expressions, sizes, strict=True):
        name = ""
        if one.kind == "expressions.Alias":
            name = _folded(one.fields[1].text or "")
        elif one.kind == "analysis.UnresolvedAttribute":
            name = _folded(one.fields[0].names()[-1])
        elif one.kind in _STARS:
            named.append({**below, "": max([1, *below.values()])})
        named.append({name: size.inlined})
    if node.kind == "plans.logical.LateralJoin" or node.kind in _RENAMING:
        return {"": max([1, *below.values(), *(one.inlined for one in sizes)])}
    if node.kind in _ADDING_COLUMNS:
        named.append({**below, "": max([1, *below.values()])})
    return _largest(named)


def _grouping_sets(node: Node) -> int:
    """Returns the number of grouping sets that an element of GROUP BY stands for."""
    match node.kind:
        case "expressions.Cube":
            return 1 << len(node.fields[0].fields)
        case "expressions.Rollup":
            return len(node.fields[0].fields) + 1
        case "expressions.GroupingSets":
            return max(len(node.fields[0].fields), 1)
    return 1


def _all(node: Node) -> list[Node]:
    return [node, *(below for one in node.fields for below in _all(one))]


def _calls(node: Node, name: str) -> bool:
    return node.kind == "analysis.UnresolvedFunction" and [_folded(one) for one in node.fields[0].names()] == [name]


def _multiplies(function: Node) -> bool:
    """Checks if a lambda may multiply its first variable, whose value would then grow exponentially."""
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


_CONDITIONS: Final = """
    coalesce if ifnull nanvl nullif nullifzero nvl nvl2 zeroifnull equal_null ilike isnan isnotnull isnull like
    regexp regexp_like rlike between
    cast try_cast typeof assert_true greatest least
"""
_NUMBERS: Final = """
    abs acos acosh asin asinh atan atan2 atanh bigint bin boolean bround cbrt ceil ceiling conv cos cosh cot csc
    degrees double e exp expm1 factorial float floor hex hypot int ln log log10 log1p log2 mod negative pi pmod
    positive pow power radians rint round sec sign signum sin sinh smallint sqrt tan tanh tinyint try_add
    try_divide try_mod try_multiply try_subtract unhex width_bucket bit_count bit_get getbit shiftleft shiftright
    shiftrightunsigned div
"""
_STRINGS: Final = """
    ascii base64 bit_length btrim char char_length character_length chr concat concat_ws contains decode elt
    encode endswith find_in_set format_number format_string initcap instr is_valid_utf8 lcase left len length
    levenshtein locate lower lpad ltrim make_valid_utf8 mask octet_length overlay position printf regexp_count
    regexp_extract regexp_extract_all regexp_instr regexp_replace regexp_substr repeat replace right rpad rtrim
    sentences soundex space split split_part startswith string substr substring substring_index to_binary to_char
    to_number to_varchar translate trim try_to_binary try_to_number ucase unbase64 upper validate_utf8
    try_validate_utf8 binary parse_url try_parse_url url_decode url_encode try_url_decode crc32 hash md5 sha sha1
    sha2 xxhash64
"""
_TIMES: Final = """
    add_months convert_timezone date date_add date_diff date_format date_from_unix_date date_part date_sub
    date_trunc dateadd datediff datepart day dayname dayofmonth dayofweek dayofyear extract from_unixtime
    from_utc_timestamp hour last_day make_date make_dt_interval make_interval make_timestamp make_timestamp_ltz
    make_timestamp_ntz make_ym_interval minute month monthname months_between next_day quarter second
    session_window timestamp timestamp_micros timestamp_millis timestamp_seconds timestampadd timestampdiff
    to_date to_timestamp to_timestamp_ltz to_timestamp_ntz to_utc_timestamp trunc try_to_timestamp try_to_date
    try_make_timestamp unix_date unix_micros unix_millis unix_seconds weekday weekofyear window window_time year
    to_unix_timestamp
"""
_COLLECTIONS: Final = """
    aggregate array array_append array_compact array_contains array_distinct array_except array_insert
    array_intersect array_join array_max array_min array_position array_prepend array_remove array_repeat
    array_size array_sort array_union arrays_overlap arrays_zip cardinality element_at exists filter flatten
    forall get map map_concat map_contains_key map_entries map_filter map_from_arrays map_from_entries map_keys
    map_values map_zip_with named_struct reduce reverse sequence size slice sort_array str_to_map struct transform
    transform_keys transform_values try_element_at zip_with from_json get_json_object json_array_length
    json_object_keys json_tuple schema_of_json to_json from_csv to_csv is_variant_null parse_json try_parse_json
    try_variant_get variant_get to_variant_object
"""
_AGGREGATES: Final = """
    any any_value approx_count_distinct approx_percentile array_agg avg bit_and bit_or bit_xor bool_and bool_or
    collect_list collect_set corr count count_if covar_pop covar_samp every first first_value grouping grouping_id
    histogram_numeric hll_sketch_agg hll_sketch_estimate hll_union hll_union_agg kurtosis last last_value listagg
    max max_by mean median min min_by mode percentile percentile_approx percentile_cont percentile_disc product
    regr_avgx regr_avgy regr_count regr_intercept regr_r2 regr_slope regr_sxx regr_sxy regr_syy skewness some std
    stddev stddev_pop stddev_samp string_agg sum try_avg try_sum var_pop var_samp variance bitmap_and_agg
    bitmap_bit_position bitmap_bucket_number bitmap_construct_agg bitmap_count bitmap_or_agg
"""
_WINDOWS: Final = "cume_dist dense_rank lag lead nth_value ntile percent_rank rank row_number"
_GENERATORS: Final = "explode explode_outer inline inline_outer posexplode posexplode_outer stack"

TABLE_FUNCTIONS: Final = frozenset([*_GENERATORS.split(), "range"])
"""Functions that may be used as a relation."""

SCALAR_FUNCTIONS: Final = frozenset(" ".join([_NUMBERS, _STRINGS]).split())
"""Functions whose value is never a struct."""

FUNCTIONS: Final = frozenset(
    " ".join([_CONDITIONS, _NUMBERS, _STRINGS, _TIMES, _COLLECTIONS, _AGGREGATES, _WINDOWS, _GENERATORS]).split()
)

VALUES_WITHOUT_PARENTHESES: Final = frozenset(
    [
        "current_catalog",
        "current_database",
        "current_date",
        "current_path",
        "current_schema",
        "current_time",
        "current_timestamp",
        "current_user",
        "localtimestamp",
        "session_user",
        "user",
        "grouping__id",
    ]
)
"""Functions that Spark calls for a bare name if no column has that name."""
