"""The gate of the operator `sql`: accepts one SELECT over the inputs, and refuses everything that reaches further.

Spark's own parser reads the text. The gate walks the unresolved plan before Spark analyses it, since analysis alone
would open files, query catalogs and send requests. Every class in the plan must be on an allowlist, every relation must
be an input or a CTE in scope, and every function must be listed in `sql_functions`. A class that a later version of
Spark adds is therefore refused.

The gate refuses `${…}` in the text, even within strings, because Spark's parser replaces it with settings and
environment variables of its process.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pyspark.errors import ParseException
from pyspark.sql import SparkSession

from interlock.spark.built_in import sql_sizes
from interlock.spark.built_in.plan_listing import Node, TooComplex, parse
from interlock.spark.built_in.sql_sizes import FACTORS, HIGHER_ORDER, MAX_GROWTH, SUMMED, like_problem
from interlock.workers.failures import BadConfig

MAX_LENGTH: Final = 100_000
MAX_EXPANDED: Final = 200_000
"""Nodes of the plan after every reference to a CTE is replaced by its definition."""
MAX_LAMBDAS: Final = 3
_TOO_COMPLEX: Final = "The query is too long or nested too deeply: split it into several jobs."
_SEE: Final = "See docs/built-in-operators.md#sql."


class UnsafeQuery(BadConfig):
    """The query uses something that the gate does not allow."""


def checked(spark: SparkSession, query: str, inputs: Collection[str]) -> Any:
    """Returns the unresolved plan, which stays in the JVM. Raises UnsafeQuery, or BadConfig for a syntax error."""
    _check_text(query)
    try:
        plan, root = parse(spark, query)
    except TooComplex:
        raise UnsafeQuery(_TOO_COMPLEX) from None
    except ParseException as error:
        raise BadConfig(f"The query does not parse: {first_sentence(error)}") from None
    gate = _Gate(is_exact=spark.conf.get("spark.sql.caseSensitive") == "true")
    try:
        gate.plan(root, {gate.name(name): _Size(1, 1) for name in inputs})
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
"""Plans that pass on the columns of the plans below them: the values that they compute are not part of their rows."""
_PATTERNS: Final = {"expressions.Like": "like", "expressions.ILike": "ilike", "expressions.RLike": "rlike"}
_PATTERN_LISTS: Final = _classes("expressions.", "LikeAll LikeAny NotLikeAll NotLikeAny")
_HIDDEN_COLUMN: Final = "_metadata"
"""A hidden column of Spark with paths, sizes and times of the files of an input."""


@dataclass(frozen=True, slots=True)
class _Size:
    growth: int
    """Largest size of a value, as a multiple of the values of the inputs."""
    nodes: int


_Scope = Mapping[str, _Size]


@dataclass(slots=True)
class _Gate:
    """Walks a plan and measures it on the way."""

    is_exact: bool
    """Names of relations are case-sensitive: a setting of the session."""
    lambdas: int = 0
    aliases: list[dict[str, int]] = field(default_factory=lambda: [{}])
    """Growth of the columns named so far by the enclosing SELECT lists, innermost last."""

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

    def _bounded(self, node: Node, growth: int, nodes: int) -> _Size:
        if growth > MAX_GROWTH:
            raise self._refused(
                node, f"a value could become more than {MAX_GROWTH} times as large as the values of the inputs"
            )
        if nodes > MAX_EXPANDED:
            raise self._refused(
                node,
                f"the plan has more than {MAX_EXPANDED} nodes after WITH is expanded: refer to its names less often",
            )
        return _Size(growth, nodes)

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
        return self._bounded(node, size.growth, size.nodes + nodes)

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
            # A later column of the same SELECT may refer to it.
            self.aliases[-1][_folded(node.fields[1].text or "")] = growth
        return self._bounded(node, growth, 1 + sum(one.nodes for one in sizes))

    def _column(self, node: Node, scope: _Scope) -> _Size:
        names = [_folded(one) for one in node.fields[0].names()]
        if len(names) == 1 and names[0] in VALUES_WITHOUT_PARENTHESES:
            raise self._refused(node, f"{names[0]} is a function; qualify a column of that name with its relation")
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
            raise self._refused(node, "a function must not be qualified with a catalog or schema")
        name = _folded(parts[0])
        if name not in known:
            raise self._refused(node, f"the function {parts[0][:100]}(…) is not allowed here")
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
