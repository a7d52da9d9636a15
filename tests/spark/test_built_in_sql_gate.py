"""The gate of the operator `sql`: statements over the inputs pass, all others are refused before analysis."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from interlock.spark.built_in import plan_listing
from interlock.spark.built_in.sql_gate import UnsafeQuery, checked
from interlock.spark.built_in.sql_sizes import like_problem, regex_problem
from interlock.workers.failures import BadConfig

INPUTS = dict.fromkeys(["logs", "Blocks"], StructType().add("a", "integer").add("b", "string"))

ALLOWED = [
    *(Path(__file__).parent / "data" / "honest.sql").read_text().splitlines(),
    "SELECT * FROM logs",
    "select `a`, 'it''s', 'tab\\t' FROM `logs` where a between 1 and 2.5e3 -- why\n order by a, b limit 3",
    "SELECT l.a, b.c FROM logs AS l JOIN blocks b USING (block_number) LEFT JOIN logs x ON x.a = l.a",
    "SELECT a FROM logs, blocks WHERE logs.a IS DISTINCT FROM blocks.a GROUP BY a, b HAVING count(*) > 1",
    "WITH big AS (SELECT * FROM logs), few AS (SELECT * FROM big) SELECT * FROM few UNION ALL SELECT * FROM logs",
    "SELECT * FROM (SELECT a, row_number() OVER (PARTITION BY b ORDER BY c DESC, d) AS n FROM logs) AS t WHERE n = 1",
    "SELECT cast(a AS decimal(38,0)), a::string, x'ff', map('k', 1)['k'], transform(b, v -> v + 1) FROM logs",
    "SELECT extract(year FROM t), trim(BOTH 'x' FROM a), date '2026-01-01', interval 1 day FROM logs",
    "SELECT k, v FROM logs LATERAL VIEW explode(m) t AS k, v",
    "SELECT * FROM logs, LATERAL explode(items) AS t(item)",
    "SELECT * FROM logs JOIN (VALUES (1, 'a'), (2, 'b')) AS names(id, name) ON names.id = logs.a",
    "SELECT sum(a) FILTER (WHERE a > 0) FROM logs WHERE a IN (SELECT a FROM blocks) AND EXISTS (SELECT 1 FROM blocks)",
    "SELECT a FROM logs WINDOW w AS (PARTITION BY a ORDER BY b), v AS (ORDER BY c)",
    "SELECT /* not a hint */ a FROM (logs) PIVOT (sum(a) FOR b IN ('x', 'y'))",
    "SELECT id FROM range(10)",
    "SELECT logs.`table`, logs.set FROM logs",
    "SELECT 1 AS one;\n",
    "SELECT '{braces} ; -- and /* such */' FROM logs",
    "SELECT DISTINCT FROM secret",  # the column `from`, called secret
    "SELECT * FROM (WITH logs AS (SELECT 1 AS x) SELECT x FROM logs) AS a, logs",
    # Within the limits
    "SELECT window(b, '1 hour 30 minutes', '1 minute'), session_window(b, concat(a, ' s')) FROM logs",
    "SELECT a FROM logs GROUP BY CUBE(" + ", ".join(f"a + {number}" for number in range(12)) + ")",
    "SELECT a FROM logs GROUP BY GROUPING SETS ((a), ROLLUP(a, b)), ROLLUP(a, b)",
    "SELECT *, * FROM (SELECT *, * FROM (SELECT *, struct(*) AS s FROM logs))",
    "WITH t0 AS (SELECT *, struct(*) AS c FROM logs), "
    + ", ".join(f"t{n} AS (SELECT coalesce(a, b, b, b, b) AS a, b, c FROM t{n - 1})" for n in range(1, 30))
    + " SELECT * FROM t29",
    "SELECT from_json(b, 'a array<struct<x: int, y: map<string, int>>>').a, variant_get(b, '$.x', 'int') FROM logs",
    "SELECT collect_list(id) FROM range(0, 1000000, 10, 4)",
    "SELECT /* a /* b */ */ '/* c' FROM logs",
]

REFUSED = {
    # Other statements, and more than one
    "DROP TABLE logs": "DropTable",
    "SELECT 1; DROP TABLE logs": "Syntax error",
    "SET spark.sql.x = 1": "SetCommand",
    "SHOW TABLES": "ShowTables",
    "DESCRIBE secret": "is not allowed in a query",
    "EXPLAIN SELECT 1": "ExplainCommand",
    "CACHE TABLE logs": "is not allowed in a query",
    "ADD JAR 'http://127.0.0.1/x.jar'": "is not allowed in a query",
    "WITH a AS (SELECT 1) INSERT INTO secret SELECT * FROM a": "InsertIntoStatement",
    "WITH a AS (SELECT 1) FROM a INSERT INTO secret SELECT *": "InsertIntoStatement",
    "FROM logs INSERT INTO secret SELECT * INSERT INTO other SELECT *": "InsertIntoStatement",
    "INSERT OVERWRITE DIRECTORY '/tmp/x' USING csv SELECT 1": "is not allowed in a query",
    "CREATE TEMPORARY VIEW v AS SELECT 1": "is not allowed in a query",
    "BEGIN SELECT 1; END": "CompoundBody",
    "EXECUTE IMMEDIATE 'DROP TABLE x'": "ExecuteImmediate",
    "DECLARE VARIABLE x INT DEFAULT 1": "is not allowed in a query",
    "SET VARIABLE x = 1": "is not allowed in a query",
    "CALL system.procedure()": "is not allowed in a query",
    "": "empty statement",
    # Other relations
    "SELECT * FROM secret": "secret is neither an input",
    "TABLE secret": "secret is neither",
    "SELECT * FROM logs, secret": "secret is neither",
    "SELECT * FROM logs JOIN secret": "secret is neither",
    "SELECT * FROM logs l, (SELECT * FROM secret) s": "secret is neither",
    "SELECT * FROM logs UNION SELECT * FROM secret": "secret is neither",
    "SELECT * FROM (secret)": "secret is neither",
    "SELECT * FROM logs.secret": "neither an input",
    "SELECT * FROM spark_catalog.default.logs": "neither an input",
    "SELECT * FROM global_temp.logs": "neither an input",
    "SELECT * FROM system.builtin.logs": "neither an input",
    "SELECT * FROM parquet.`/etc/passwd`": "parquet./etc/passwd is neither",
    "SELECT * FROM `parquet`.`s3a://bucket/key`": "neither an input",
    "SELECT * FROM text.`/proc/self/environ`": "neither an input",
    "SELECT * FROM json.`webhdfs://127.0.0.1:9/x`": "neither an input",
    "SELECT * FROM (TABLE secret)": "secret is neither",
    "SELECT * FROM (FROM secret SELECT *)": "secret is neither",
    "SELECT * FROM logs UNION (FROM secret)": "secret is neither",
    "SELECT * FROM IDENTIFIER('sec' || 'ret')": "IDENTIFIER.* is not allowed",
    "SELECT * FROM IDENTIFIER('secret')": "IDENTIFIER.* is not allowed",
    "SELECT * FROM IDENTIFIER('csv.`/etc/passwd`')": "IDENTIFIER.* is not allowed",
    "SELECT * FROM `identifier`('secret')": "the function .* is not allowed",
    "SELECT * FROM STREAM secret": "NamedStreamingRelation",
    "SELECT * FROM STREAM(logs)": "NamedStreamingRelation",
    "SELECT * FROM logs VERSION AS OF 1": "RelationTimeTravel",
    "SELECT * FROM logs TIMESTAMP AS OF '2020-01-01'": "RelationTimeTravel",
    "SELECT * FROM logs@v1": "RelationTimeTravel",
    "SELECT * FROM logs WITH (path = '/etc/passwd')": "options and streaming are not allowed",
    "SELECT * FROM python_worker_logs()": "the function .* is not allowed",
    "SELECT * FROM read_files('/etc/passwd')": "the function .* is not allowed",
    "SELECT * FROM logs |> JOIN secret": "secret is neither",
    "SELECT * FROM logs TABLESAMPLE (10 PERCENT)": "Sample",
    # Subqueries in every position
    "SELECT (SELECT max(a) FROM secret)": "secret is neither",
    "SELECT * FROM logs WHERE a = (SELECT max(a) FROM secret)": "secret is neither",
    "SELECT * FROM logs WHERE a IN (SELECT a FROM secret)": "secret is neither",
    "SELECT * FROM logs WHERE EXISTS (SELECT 1 FROM secret)": "secret is neither",
    "SELECT a FROM logs GROUP BY a HAVING max(b) > (SELECT 1 FROM secret)": "secret is neither",
    "SELECT a FROM logs ORDER BY (SELECT 1 FROM secret)": "secret is neither",
    "SELECT a FROM logs LIMIT (SELECT 1 FROM secret)": "secret is neither",
    "SELECT a FROM logs OFFSET (SELECT 1 FROM secret)": "secret is neither",
    "SELECT a FROM logs JOIN blocks ON a = (SELECT 1 FROM secret)": "secret is neither",
    "SELECT a FROM logs, LATERAL (SELECT * FROM secret)": "secret is neither",
    "SELECT sum(a) FILTER (WHERE a IN (SELECT 1 FROM secret)) FROM logs": "secret is neither",
    "SELECT sum(a) OVER (PARTITION BY (SELECT 1 FROM secret)) FROM logs": "secret is neither",
    "SELECT a FROM logs WINDOW w AS (ORDER BY (SELECT 1 FROM secret))": "secret is neither",
    "SELECT transform(a, x -> (SELECT 1 FROM secret)) FROM logs": "secret is neither",
    "SELECT CASE WHEN a THEN (SELECT 1 FROM secret) END FROM logs": "secret is neither",
    "SELECT * FROM VALUES ((SELECT 1 FROM secret))": "secret is neither",
    "SELECT * FROM range((SELECT 1 FROM secret))": "must be integer literals",
    "SELECT * FROM logs PIVOT (sum(a) FOR b IN ((SELECT 1 FROM secret)))": "secret is neither",
    "SELECT * FROM logs LATERAL VIEW explode((SELECT array(1) FROM secret)) t AS x": "secret is neither",
    "SELECT a FROM logs GROUP BY GROUPING SETS ((a, (SELECT 1 FROM secret)))": "secret is neither",
    "SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY (SELECT 1 FROM secret)) FROM logs": "secret is neither",
    "SELECT * EXCEPT (a) FROM secret": "secret is neither",
    "WITH a AS (SELECT * FROM secret) SELECT 1": "secret is neither",
    # Names of WITH are not in scope before or within their definition, nor outside their subquery
    "WITH secret AS (SELECT * FROM secret) SELECT * FROM secret": "secret is neither",
    "WITH a AS (SELECT * FROM secret), secret AS (SELECT 1) SELECT * FROM a": "secret is neither",
    "SELECT * FROM (WITH secret AS (SELECT 1) SELECT * FROM secret) a, secret": "secret is neither",
    "SELECT (WITH secret AS (SELECT 1) SELECT * FROM secret), 1 FROM secret": "secret is neither",
    "WITH RECURSIVE a AS (SELECT * FROM a) SELECT * FROM a": "recursive WITH is not allowed",
    # Spark reads keywords as names if the statement parses only that way
    "SELECT is DISTINCT FROM csv.`/etc/passwd`": "csv./etc/passwd is neither",
    "SELECT is NOT DISTINCT FROM secret": "secret is neither|Syntax error",
    "SELECT * FROM (SELECT 1 UNION FROM secret)": "secret is neither",
    "SELECT * FROM logs WHERE a IN (SELECT 1 EXCEPT FROM text.`/etc/passwd`)": "text./etc/passwd is neither",
    "SELECT 1 INTERSECT FROM secret": "secret is neither",
    "SELECT * FROM logs AS where, secret": "secret is neither",
    "SELECT * FROM logs where, secret": "secret is neither",
    "SELECT * FROM logs where (a), secret": "secret is neither",
    "SELECT * FROM logs limit, secret": "secret is neither",
    "SELECT * FROM logs group, secret": "secret is neither",
    "SELECT * FROM logs order, secret": "secret is neither",
    "SELECT * FROM logs window, secret": "secret is neither",
    "SELECT * FROM logs select, secret": "secret is neither",
    "SELECT * FROM VALUES (1) AS t, secret": "secret is neither",
    "SELECT 1 AS from FROM secret": "secret is neither",
    # Functions and scripts
    "SELECT java_method('java.lang.System', 'exit', 1)": "java_method",
    "SELECT `java_method`('java.lang.System', 'exit', 1)": "java_method",
    "SELECT JAVA_METHOD /* */ ('java.lang.System', 'exit', 1)": "JAVA_METHOD",
    "SELECT system.builtin.reflect('java.lang.System', 'getenv')": "must not be qualified with a catalog",
    "SELECT builtin.abs(1)": "must not be qualified with a catalog",
    "SELECT try_reflect('a', 'b')": "try_reflect",
    "SELECT input_file_name() FROM logs": "input_file_name",
    "SELECT from_protobuf(a, 'M', '/etc/descriptor') FROM logs": "from_protobuf",
    "SELECT rand(), a FROM logs": "rand",
    "SELECT my_registered_udf(a) FROM logs": "my_registered_udf",
    "SELECT current_user FROM logs": "current_user is a function",
    "SELECT current_date, a FROM logs": "current_date is a function",
    "SELECT _metadata.file_path FROM logs": "_metadata",
    "SELECT logs._METADATA FROM logs": "_metadata",
    "SELECT _metadata.* FROM logs": "_metadata",
    "SELECT _metadata.* EXCEPT (file_name) FROM logs": "_metadata",
    "SELECT 1 FROM logs JOIN blocks USING (_metadata)": "_metadata",
    "SELECT TRANSFORM(a) USING 'cat' AS b FROM logs": "ScriptTransformation",
    "SELECT * FROM (MAP a USING 'cat' AS b FROM logs)": "ScriptTransformation",
    "SELECT IDENTIFIER('java_' || 'method')('a', 'b')": "IDENTIFIER.* is not allowed",
    "SELECT IDENTIFIER('java_method')('a', 'b')": "IDENTIFIER.* is not allowed",
    # Substitutions, hints and parameters
    "SELECT '${env:HOME}' FROM logs": "replace with its settings",
    "SELECT '${spark.hadoop.fs.s3a.secret.key}'": "replace with its settings",
    "SELECT /*+ broadcast(logs) */ * FROM logs": "Hint",
    "SELECT /*+ repartition(1000000) */ * FROM logs": "Hint",
    "SELECT a:b FROM logs": "SemiStructuredExtract",
    "SELECT :name": "NamedParameter",
    "SELECT ?": "PosParameter",
    "SELECT 1\x00": "non-printable character",
    "SELECT\u00a01": "non-printable character",
    "SELECT '\ud800'": "non-printable character",
    "SELECT (1 FROM logs": "Syntax error",
    "SELECT 1) FROM (SELECT 2": "Syntax error",
    # Sizes
    "SELECT repeat('a', 1000000000)": "the count of repeat must be an integer literal of at most 10000",
    "SELECT repeat('a', a) FROM logs": "the count of repeat must be an integer literal of at most 10000",
    "SELECT space(2147483647)": "at most 10000",
    "SELECT rpad('a', 2147483647, 'b'), 1": "at most 10000",
    "SELECT array_repeat('a', 1000000000)": "at most 10000",
    "SELECT array_insert(array(1), 2000000000, 1)": "at most 10000",
    "SELECT explode(sequence(1, 1000000000))": "at most 10000 apart",
    "SELECT sequence(a, b) FROM logs": "at most 10000 apart",
    "SELECT sequence(TIMESTAMP'2020-01-01', TIMESTAMP'2030-01-01', INTERVAL 1 SECOND)": "at most 10000 apart",
    "SELECT stack(2147483647, 1)": "at most 10000",
    "SELECT format_string('%2000000000d', 1)": "widths",
    "SELECT printf(a, 1) FROM logs": "widths",
    "SELECT format_number(1.5, 2000000000)": "digits",
    "SELECT approx_count_distinct(a, 0.000000001) FROM logs": "must be a literal of at least",
    "SELECT histogram_numeric(a, 2000000000) FROM logs": "bins",
    "SELECT repeat(repeat(repeat('a', 9999), 9999), 9999)": "times as large",
    "SELECT * FROM (SELECT repeat(a, 9999) AS a FROM logs) WHERE length(repeat(a, 9999)) > 1": "times as large",
    "SELECT aggregate(arr, 'a', (acc, x) -> concat(acc, acc)) FROM logs": "only once",
    "SELECT reduce(arr, array(1), (acc, x) -> flatten(transform(array(1, 2), y -> acc))) FROM logs": "only once",
    "SELECT filter(a, b -> filter(a, c -> filter(a, d -> filter(a, e -> 1)))) FROM logs": "may be nested at most 3",
    "SELECT replace(a, 'a', b) FROM logs": "replacement",
    "SELECT array_join(array_repeat('', 10000), repeat('x', 10000))": "times as large",
    "SELECT array_join(array_repeat('', 10000), 'SEPARATOR')": "times as large",
    "SELECT concat_ws(repeat('x', 10000), array_repeat('', 10000))": "times as large",
    "SELECT repeat('SEPARATOR', 10000)": "times as large",
    "SELECT repeat(X'BINARY', 10000)": "times as large",
    "SELECT format_string('FORMAT', format_string('FORMAT', b)) FROM logs": "times as large",
    "SELECT levenshtein(repeat('a', 10000), repeat('b', 10000))": "times as large",
    "SELECT trim(repeat('a', 10000) FROM repeat('b', 10000))": "times as large",
    "SELECT array_except(sequence(1, 10000), sequence(1, 10000))": "times as large",
    "SELECT * FROM range(10000000000)": "at most 10000000 apart",
    "SELECT collect_list(id) FROM range(-10000000000, 1)": "at most 10000000 apart",
    "SELECT * FROM range(0, 10, 1, 2000000000)": "number of partitions",
    # Spark's parser evaluates such a row by itself unless spark.sql.parser.eagerEvalOfUnresolvedInlineTable is off
    "SELECT * FROM VALUES ('aaa' RLIKE '(a+)+b')": "repeats a group",
    # Columns, grouping sets and windows
    "SELECT window(b, '100000 seconds', '1 second') FROM logs": "at most 100 times the second",
    "SELECT window(b, '101 seconds', interval 1 second) FROM logs": "durations of window must be literals",
    "SELECT window(b, concat('1', ' day')) FROM logs": "durations of window must be literals",
    "SELECT window(b, '1 fortnight') FROM logs": "durations of window must be literals",
    "SELECT window(b, 1000000, 1) FROM logs": "at most 100 times the second",
    "SELECT 1 FROM logs GROUP BY CUBE(MANY)": "more than 4096 grouping sets",
    "SELECT 1 FROM logs GROUP BY MANY WITH CUBE": "more than 4096 grouping sets",
    "SELECT 1 FROM logs GROUP BY ROLLUP(MANY), ROLLUP(MANY), ROLLUP(MANY), ROLLUP(MANY)": "4096 grouping sets",
    "SELECT 1 FROM logs GROUP BY CUBE(a, b), GROUPING SETS(MANY), ROLLUP(MANY), ROLLUP(MANY)": "4096 grouping sets",
    "SELECT 1 FROM logs GROUP BY GROUPING SETS (CUBE(MANY, MANY))": "CUBE within GROUPING SETS",
    "SELECT 1 FROM logs GROUP BY GROUPING SETS ((a), ROLLUP(b), cube (MANY, MANY))": "CUBE within GROUPING SETS",
    # Schemas, formats and numbers
    "SELECT 1234567890123456789012345678901234567890": "does not parse: Decimal precision 40",
    "SELECT from_json(b, 'a ARRAYS') FROM logs": "schema of from_json must be a literal with at most 60",
    "SELECT from_json(b, b) FROM logs": "schema of from_json must be a literal",
    "SELECT from_json(b, schema_of_json('{}')) FROM logs": "schema of from_json must be a literal",
    "SELECT from_json(b, 'a int /* /* */ */') FROM logs": "no comment",
    "SELECT 1 /* /* /* /* /* /* */ */ */ */ */ */": "nested at most 5 deep",
    "SELECT from_csv(b, 'a ARRAYS') FROM logs": "schema of from_csv",
    "SELECT variant_get(b, '$.x', 'ARRAYS') FROM logs": "schema of variant_get",
    "SELECT try_variant_get(b, '$.x', concat('in', 't')) FROM logs": "schema of try_variant_get",
    "SELECT to_char(a, repeat('9', 10000)) FROM logs": "format of to_char must be a literal",
    "SELECT date_format(b, b) FROM logs": "format of date_format must be a literal",
    "SELECT try_to_timestamp(b, concat('y', b)) FROM logs": "format of try_to_timestamp must be a literal",
    "SELECT from_unixtime(a, 'SEPARATOR') FROM logs": "at most 1000 characters",
    # Patterns
    "SELECT a RLIKE '(a+)+b' FROM logs": "repeats a group",
    "SELECT a RLIKE b FROM logs": "must be a string literal",
    "SELECT a RLIKE concat('(a+)', '+b') FROM logs": "must be a string literal",
    "SELECT regexp_replace(a, '(a|b)*c', '') FROM logs": "repeats a group",
    "SELECT regexp_extract(a, '.*.*.*.*.*x', 0) FROM logs": "backtrack",
    "SELECT split(a, '(a*)*') FROM logs": "repeats a group",
    "SELECT str_to_map(a, ',', '(=+)+') FROM logs": "repeats a group",
    "SELECT regexp_count(a, 'a{1,2000}') FROM logs": "at most 1000 times",
    "SELECT a LIKE '%a%a%a%a%a%a%b' FROM logs": "percent signs",
    "SELECT a LIKE ANY ('x', '%a%a%a%a%a%a%b') FROM logs": "percent signs",
    "SELECT a LIKE b FROM logs": "must be a string literal",
}


@pytest.mark.parametrize("query", ALLOWED)
def test_statement_over_the_inputs_passes(spark: SparkSession, query: str) -> None:
    assert checked(spark, query, INPUTS) is not None


LONG_PARTS = {
    "SEPARATOR": "x" * 80_000,
    "BINARY": "ff" * 40_000,
    "FORMAT": "%1$s" * 5_000,
    "ARRAYS": "array<" * 3_000 + "int" + ">" * 3_000,
    "MANY": ", ".join(f"a + {number}" for number in range(14)),
}
"""Words of refused statements that stand for longer texts."""


@pytest.mark.parametrize(("query", "why"), REFUSED.items())
def test_statement_that_reaches_further_is_refused(spark: SparkSession, query: str, why: str) -> None:
    for word, text in LONG_PARTS.items():
        query = query.replace(word, text)
    with pytest.raises(BadConfig, match=why):
        checked(spark, query, INPUTS)


def _nested(levels: int, outer: str) -> str:
    return "SELECT * FROM logs" if levels == 0 else outer.format(_nested(levels - 1, outer))


WIDE = {
    "stars": _nested(16, "SELECT *, * FROM ({})"),
    "stars of structs": _nested(16, "SELECT s.*, s.* FROM (SELECT struct(*) AS s FROM ({}))"),
    "structs of columns": _nested(16, "SELECT struct(s, s) AS s FROM (SELECT struct(*) AS s FROM ({}))"),
    "joins": "SELECT * FROM ({0}) AS t, ({0}) AS u, ({0}) AS v".format(_nested(11, "SELECT *, * FROM ({})")),
    "outer columns": _nested(15, "SELECT * FROM ({}) AS l, LATERAL (SELECT l.*)"),
    "arguments": _nested(11, "SELECT *, * FROM ({})").replace("*", f"hash({', '.join(['*'] * 120)}), *", 1),
    "JSON": "SELECT s.* FROM (SELECT from_json(b, '" + ",".join(["a int"] * 11_000) + "') AS s FROM logs)",
    "cast": "SELECT cast(a AS struct<" + ",".join(["a:int"] * 11_000) + ">) FROM logs",
    "pivot": "SELECT * FROM logs PIVOT ("
    + ", ".join(f"sum(a) AS s{n}" for n in range(50))
    + " FOR b IN ("
    + ", ".join(f"'{n}'" for n in range(500))
    + "))",
    "unpivot": "SELECT * FROM (SELECT "
    + ", ".join(f"a AS c{n}" for n in range(1_500))
    + " FROM logs) UNPIVOT (v FOR k IN ("
    + ", ".join(f"c{n}" for n in range(1_500))
    + "))",
    "subqueries": "SELECT " + ", ".join(f"(SELECT max(a) + {n} FROM logs)" for n in range(300)),
    "windows": "SELECT " + ", ".join(f"sum(a) OVER (ORDER BY a + {n})" for n in range(600)) + " FROM logs",
    "except": "SELECT * EXCEPT ("
    + ", ".join(f"c{n}" for n in range(2_000))
    + ") FROM (SELECT a, "
    + ", ".join(f"a AS c{n}" for n in range(2_000))
    + " FROM logs)",
    "distinct": "SELECT " + ", ".join(f"count(DISTINCT a + {n})" for n in range(1_500)) + " FROM logs",
    "cube": f"SELECT 1 FROM ({_nested(6, 'SELECT *, * FROM ({})')}) GROUP BY CUBE("
    + ", ".join(f"1 + {n}" for n in range(12))
    + ")",
    "window": f"SELECT window(b, '100 s', '1 s') FROM ({_nested(11, 'SELECT *, * FROM ({})')})".replace(
        " s'", " seconds'"
    ),
    "relations": "WITH t AS (SELECT a FROM logs"
    + " UNION ALL SELECT a FROM logs" * 90
    + ") SELECT a FROM t"
    + " UNION ALL SELECT a FROM t" * 20,
}


INLINED = {
    "subqueries": "SELECT * FROM (" + _nested(25, "SELECT a + a AS a FROM ({})") + ") WHERE a > 1",
    "columns of one SELECT": "SELECT a AS x0, "
    + ", ".join(f"x{n - 1} + x{n - 1} AS x{n}" for n in range(1, 30))
    + " FROM logs",
    "functions": _nested(25, "SELECT hypot(a, a) AS a FROM ({})"),
    "renamed": _nested(25, "SELECT x + x AS a FROM ({}) AS t(x)"),
    "unnamed": _nested(25, "SELECT `(a + a)` + 1 AS a FROM (SELECT a + a FROM ({}))"),
    "union": _nested(25, "SELECT a + a AS a FROM (SELECT 1 AS a UNION ALL {})"),
    "structs": _nested(25, "SELECT s.x AS a FROM (SELECT named_struct('x', a + a) AS s FROM ({}))"),
    "outer columns": "SELECT * FROM ("
    + _nested(25, "SELECT u.a FROM ({}) AS t, LATERAL (SELECT t.a + t.a AS a) AS u")
    + ")",
}


@pytest.mark.parametrize("query", INLINED.values(), ids=INLINED)
def test_expression_that_doubles_when_it_is_inlined_is_refused(spark: SparkSession, query: str) -> None:
    with pytest.raises(UnsafeQuery, match=r"more than 50000 nodes|nodes after"):
        checked(spark, query, INPUTS)


@pytest.mark.parametrize("query", WIDE.values(), ids=WIDE)
def test_statement_that_becomes_too_wide_is_refused(spark: SparkSession, query: str) -> None:
    with pytest.raises(UnsafeQuery, match=r"columns|nodes after"):
        checked(spark, query, INPUTS)


def test_refusal_names_line_and_column(spark: SparkSession) -> None:
    with pytest.raises(UnsafeQuery, match="line 3, column 6"):
        checked(spark, "SELECT *\nFROM logs\nJOIN secret ON true", INPUTS)


def test_names_are_compared_as_the_session_compares_them(spark: SparkSession) -> None:
    assert checked(spark, "SELECT * FROM LOGS", INPUTS) is not None
    exact = spark.newSession()
    exact.conf.set("spark.sql.caseSensitive", "true")
    assert checked(exact, "SELECT * FROM logs", INPUTS) is not None
    with pytest.raises(UnsafeQuery, match="LOGS is neither"):
        checked(exact, "SELECT * FROM LOGS", INPUTS)


DEEP = [
    "SELECT " + "(" * 40_000 + "1" + ")" * 40_000,
    "SELECT " + "(" * 90_000,
    "SELECT " + "not " * 20_000 + "true",
    "SELECT 1" + " + 1" * 20_000,
    "SELECT 1" + " + 1" * 390,
    "SELECT cast(a AS " + "array<" * 10_000 + "int" + ">" * 10_000 + ") FROM logs",
    "SELECT " + "CASE WHEN true THEN " * 2_000 + "1" + " END" * 2_000,
    "SELECT 1 FROM logs" + " JOIN logs" * 3_000,
    "SELECT 1" + " UNION ALL SELECT 1" * 4_000,
    "SELECT * FROM " + "(SELECT * FROM " * 3_000 + "logs" + ")" * 3_000,
]


@pytest.mark.parametrize("query", DEEP, ids=range(len(DEEP)))
def test_deep_statement_is_refused_within_seconds(spark: SparkSession, query: str) -> None:
    began = time.monotonic()
    with pytest.raises(BadConfig):
        checked(spark, query, INPUTS)
    assert time.monotonic() - began < 20
    assert spark.range(1).count() == 1


def test_long_flat_statement_passes(spark: SparkSession) -> None:
    checked(spark, "SELECT " + ", ".join(["a"] * 9_999) + " FROM logs", INPUTS)
    with pytest.raises(UnsafeQuery, match="at most 100000 are allowed"):
        checked(spark, "SELECT " + "a" * 100_000, INPUTS)


def test_nested_with_names_cannot_multiply_the_plan(spark: SparkSession) -> None:
    doubled = ", ".join(f"t{n} AS (SELECT * FROM t{n - 1} a, t{n - 1} b)" for n in range(1, 40))
    with pytest.raises(UnsafeQuery, match="nodes after WITH is expanded"):
        checked(spark, f"WITH t0 AS (SELECT * FROM logs), {doubled} SELECT * FROM t39", INPUTS)


def test_values_do_not_double_through_subqueries_or_earlier_columns(spark: SparkSession) -> None:
    levels = ", ".join(f"t{n} AS (SELECT repeat(x, 2) AS x FROM t{n - 1})" for n in range(1, 40))
    with pytest.raises(UnsafeQuery, match="times as large"):
        checked(spark, f"WITH t0 AS (SELECT a AS x FROM logs), {levels} SELECT * FROM t39", INPUTS)
    columns = ", ".join(f"repeat(x{n - 1}, 2) AS x{n}" for n in range(1, 40))
    with pytest.raises(UnsafeQuery, match="times as large"):
        checked(spark, f"SELECT a AS x0, {columns} FROM logs", INPUTS)


@pytest.mark.parametrize(
    "pattern",
    ["^0x[0-9a-f]{40}$", "a|b", "(ab)?c", r"\d++-\d++-\d++-\d++-\d++", r"^(\w+)\s+(\w+)$", r"\(\*\)", "[^,]*,"],
)
def test_ordinary_pattern_passes(pattern: str) -> None:
    assert regex_problem(pattern) is None


@pytest.mark.parametrize(
    "pattern",
    ["(a*)*", "(a|a)+", "(?:a+){9}", "a*" * 5, "[a-z&&[b]]*", r"\Q(\E", "(?x)a *", "a**", "x" * 1001, "[", "a)*"],
)
def test_pattern_with_catastrophic_backtracking_is_refused(pattern: str) -> None:
    assert regex_problem(pattern) is not None


def test_pattern_of_like_has_few_wildcards() -> None:
    assert like_problem("%a%b%") is None
    assert like_problem("%" * 6) is not None


def test_listing_contains_every_argument_of_every_node(spark: SparkSession) -> None:
    """CTEs and window definitions are included, though Spark does not count them as children of their plan."""
    text = "WITH c AS (SELECT 1 AS in_cte) SELECT a FROM c WINDOW w AS (ORDER BY in_window)"
    _, root = plan_listing.parse(spark, text)
    found, todo = set(), [root]
    while todo:
        node = todo.pop()
        todo.extend(node.fields)
        found.add(node.text)
    assert {"in_cte", "in_window", "c", "w"} <= found
