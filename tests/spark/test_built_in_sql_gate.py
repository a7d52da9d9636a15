"""What the text of a query may say. No Spark is needed for that: the gate stands before it."""

from __future__ import annotations

import pytest

from interlock.pipeline.built_in.sql_gate import UnsafeQuery, checked

INPUTS = ("logs", "Blocks")

ALLOWED = [
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
]

REFUSED = {
    # Other statements, and more than one
    "DROP TABLE logs": "begins with SELECT",
    "SELECT 1; DROP TABLE logs": "second statement",
    "SET spark.sql.x = 1": "begins with SELECT",
    "FROM logs SELECT *": "begins with SELECT",
    "VALUES (1)": "begins with SELECT",
    "TABLE secret": "begins with SELECT",
    "WITH a AS (SELECT 1) INSERT INTO secret SELECT * FROM a": "followed by SELECT",
    "WITH a AS (SELECT 1) FROM a INSERT INTO secret SELECT *": "followed by SELECT",
    "BEGIN SELECT 1; END": "second statement",
    "EXECUTE IMMEDIATE 'DROP TABLE x'": "begins with SELECT",
    "": "begins with SELECT",
    # Other relations
    "SELECT * FROM secret": "secret is neither an input",
    "SELECT * FROM logs, secret": "secret is neither",
    "SELECT * FROM logs JOIN secret": "secret is neither",
    "SELECT * FROM logs l, (SELECT * FROM secret) s": "secret is neither",
    "SELECT * FROM logs WHERE a = (SELECT max(a) FROM secret)": "secret is neither",
    "SELECT * FROM logs UNION SELECT * FROM secret": "secret is neither",
    "SELECT * FROM (secret)": "secret is neither",
    "SELECT * FROM ((logs), secret)": "secret is neither",
    "SELECT * FROM logs.secret": "neither an input",
    "SELECT * FROM spark_catalog.default.logs": "neither an input",
    "SELECT * FROM parquet.`/etc/passwd`": "parquet is neither",
    "SELECT * FROM `parquet`.`s3a://bucket/key`": "neither an input",
    "SELECT * FROM text.`/proc/self/environ`": "text is neither",
    "SELECT * FROM (TABLE secret)": "TABLE has no place",
    "SELECT * FROM (FROM secret SELECT *)": "begins with SELECT",
    "SELECT * FROM logs UNION (FROM secret)": "begins with SELECT",
    "SELECT * FROM IDENTIFIER('sec' || 'ret')": "IDENTIFIER has no place",
    "SELECT * FROM `identifier`('secret')": "no relation",
    "SELECT * FROM STREAM secret": "STREAM has no place",
    "SELECT * FROM logs VERSION AS OF 1, secret": "secret is neither",
    "SELECT * FROM logs@v1": "versions of tables",
    "SELECT * FROM python_worker_logs()": "no relation",
    "SELECT * FROM logs |> JOIN secret": "pipe",
    # Names that WITH gives do not count before or within themselves, nor from deeper down
    "WITH secret AS (SELECT * FROM secret) SELECT * FROM secret": "secret is neither",
    "WITH a AS (SELECT * FROM secret), secret AS (SELECT 1) SELECT * FROM a": "secret is neither",
    "SELECT * FROM (WITH secret AS (SELECT 1) SELECT * FROM secret) a, secret": "WITH stands at the beginning",
    "WITH RECURSIVE a AS (SELECT * FROM a) SELECT * FROM a": "recursion",
    "WITH a(x) AS (SELECT 1) SELECT * FROM a": "columns are named",
    # Spark takes keywords for aliases, where that makes sense of a text
    "SELECT * FROM logs AS where, secret": "secret is neither",
    "SELECT * FROM logs where, secret": "secret is neither",
    "SELECT * FROM logs where (a), secret": "secret is neither",
    "SELECT * FROM logs limit, secret": "secret is neither",
    "SELECT * FROM logs group, secret": "secret is neither",
    "SELECT * FROM logs order, secret": "secret is neither",
    "SELECT * FROM logs union, secret": "secret is neither",
    "SELECT * FROM logs window, secret": "secret is neither",
    "SELECT * FROM logs lateral, secret": "secret is neither",
    "SELECT * FROM logs select, secret": "SELECT has no place here",
    "SELECT * FROM VALUES (1) AS t, secret": "VALUES stands in parentheses",
    "SELECT * FROM logs, VALUES (1) AS t, secret": "VALUES stands in parentheses",
    "SELECT DISTINCT FROM secret": "secret is neither",
    "SELECT 1 AS from FROM secret": "FROM is neither",
    # Functions and scripts
    "SELECT java_method('java.lang.System', 'exit', 1)": "java_method",
    "SELECT `java_method`('java.lang.System', 'exit', 1)": "java_method",
    "SELECT JAVA_METHOD /* */ ('java.lang.System', 'exit', 1)": "JAVA_METHOD",
    "SELECT system.builtin.reflect('java.lang.System', 'getenv')": "no catalog in front",
    "SELECT try_reflect('a', 'b')": "try_reflect",
    "SELECT input_file_name() FROM logs": "input_file_name",
    "SELECT from_protobuf(a, 'M', '/etc/descriptor') FROM logs": "from_protobuf",
    "SELECT rand(), a FROM logs": "rand",
    "SELECT my_registered_udf(a) FROM logs": "my_registered_udf",
    "SELECT current_user FROM logs": "current_user has no place",
    "SELECT TRANSFORM(a) USING 'cat' AS b FROM logs": "scripts are refused",
    "SELECT * FROM (MAP a USING 'cat' AS b FROM logs)": "neither an input",
    "SELECT IDENTIFIER('java_' || 'method')('a', 'b')": "IDENTIFIER has no place",
    # What Spark would see otherwise than the gate
    "SELECT '${env:HOME}' FROM logs": "own settings",
    "SELECT '${spark.hadoop.fs.s3a.secret.key}'": "own settings",
    "SELECT r'\\' FROM secret --'": "raw strings",
    'SELECT "a" FROM logs': "depends on a setting",
    "SELECT /*+ broadcast(logs) */ * FROM logs": "hint",
    "SELECT 1 /* a /* b */ FROM logs": "comment within a comment",
    "SELECT 1 /* FROM logs": "without an end",
    "SELECT a:b FROM logs": "paths are refused",
    "SELECT :name": "parameters",
    "SELECT ?": "parameters",
    "SELECT {logs}": "braces",
    "SELECT\u00a01": "U+00A0",
    "SELECT 1\x00": "U+0000",
    "SELECT é FROM logs": "'é' has no place",
    "SELECT 'a FROM logs": "no end",
    "SELECT (1 FROM logs": "no end",
    "SELECT 1) FROM (SELECT 2": "closes nothing",
}


@pytest.mark.parametrize("query", ALLOWED)
def test_a_query_over_the_inputs_passes(query: str) -> None:
    assert checked(query, INPUTS)


@pytest.mark.parametrize(("query", "why"), REFUSED.items())
def test_what_reaches_further_is_refused_with_its_place(query: str, why: str) -> None:
    with pytest.raises(UnsafeQuery) as refused:
        checked(query, INPUTS)
    assert why in str(refused.value)
    assert "line 1, column" in str(refused.value)


def test_comments_are_gone_from_what_spark_sees() -> None:
    query = "SELECT a -- one ' quote\n  , b /* two\n lines */ FROM logs"
    assert checked(query, INPUTS) == "SELECT a , b FROM logs"


def test_a_place_is_told_by_line_and_column() -> None:
    with pytest.raises(UnsafeQuery, match="line 3, column 6"):
        checked("SELECT *\nFROM logs\nJOIN secret ON true", INPUTS)


def test_the_longest_query_is_checked_at_once() -> None:
    checked("SELECT " + ", ".join(["a"] * 30_000) + " FROM logs", INPUTS)
    with pytest.raises(UnsafeQuery, match="longer than"):
        checked("SELECT " + "a" * 100_000, INPUTS)
