"""The `where` language: the meaning of conditions, and everything it rejects."""

from __future__ import annotations

import time
from datetime import UTC, date, datetime
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.dags.where import (
    MAX_DEPTH,
    MAX_LENGTH,
    AllOf,
    AnyOf,
    Between,
    Column,
    Comparison,
    Condition,
    IsNull,
    Like,
    Literal,
    LiteralKind,
    Not,
    OneOf,
    columns,
    parse,
    sql,
)
from interlock.errors import InvalidWhere
from tests.support.dags import conditions

A, B, C = Column("a"), Column("b"), Column("c")


def _integer(value: int) -> Literal:
    return Literal(LiteralKind.INTEGER, value)


def _string(value: str) -> Literal:
    return Literal(LiteralKind.STRING, value)


ONE = Comparison("=", A, _integer(1))
TWO = Comparison("=", B, _integer(2))
THREE = Comparison("=", C, _integer(3))


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("a = 1", ONE),
        ("a=1", ONE),
        ("\ta\n=\r1 ", ONE),
        ("a != 1", Comparison("<>", A, _integer(1))),
        ("1 < a", Comparison("<", _integer(1), A)),
        ("a >= b", Comparison(">=", A, B)),
        ("a = 1 AND b = 2 OR c = 3", AnyOf((AllOf((ONE, TWO)), THREE))),
        ("a = 1 AND (b = 2 OR c = 3)", AllOf((ONE, AnyOf((TWO, THREE))))),
        ("(a = 1) and ((b = 2) and c = 3)", AllOf((ONE, TWO, THREE))),
        ("NOT a = 1 AND b = 2", AllOf((Not(ONE), TWO))),
        ("not not flag", Not(Not(Column("flag")))),
        ("a IN ('x', 1, TRUE)", OneOf(A, (_string("x"), _integer(1), Literal(LiteralKind.BOOLEAN, True)), False)),
        ("a NOT IN (1)", OneOf(A, (_integer(1),), True)),
        ("a BETWEEN 1 AND b AND b = 2", AllOf((Between(A, _integer(1), B, False), TWO))),
        ("a NOT BETWEEN -1 AND +2", Between(A, _integer(-1), _integer(2), True)),
        ("a LIKE 'x%'", Like(A, "x%", False)),
        ("a not like ''", Like(A, "", True)),
        ("a IS NULL", IsNull(A, False)),
        ("a IS NOT NULL", IsNull(A, True)),
        ("\"Order\" = 'it''s'", Comparison("=", Column("Order"), _string("it's"))),
        ('"say ""hi""" = 1', Comparison("=", Column('say "hi"'), _integer(1))),
        ("a = 1.50", Comparison("=", A, Literal(LiteralKind.DECIMAL, Decimal("1.50")))),
        ("a = -2e3", Comparison("=", A, Literal(LiteralKind.DECIMAL, Decimal("-2E3")))),
        ("a = '日本 …'", Comparison("=", A, _string("日本 …"))),
        ("date = DATE '2024-02-29'", Comparison("=", Column("date"), Literal(LiteralKind.DATE, date(2024, 2, 29)))),
        (
            "timestamp > timestamp '2024-01-01 02:00:00.5+02:00'",
            Comparison(
                ">", Column("timestamp"), Literal(LiteralKind.TIMESTAMP, datetime(2024, 1, 1, 0, 0, 0, 500_000, UTC))
            ),
        ),
        (
            "a > TIMESTAMP '2024-01-01T02:00:00'",
            Comparison(">", A, Literal(LiteralKind.TIMESTAMP, datetime(2024, 1, 1, 2, 0))),  # noqa: DTZ001 - without a zone
        ),
    ],
)
def test_condition_has_the_meaning_of_sql(text: str, condition: Condition) -> None:
    assert parse(text) == condition


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("a!=1", '"a" <> 1'),
        ("a=1 and(b=2 or not(c=3 and a=1))", '"a" = 1 AND ("b" = 2 OR NOT ("c" = 3 AND "a" = 1))'),
        ("ts >= TIMESTAMP '2024-01-01T01:00:00+01:00'", "\"ts\" >= TIMESTAMPTZ '2024-01-01 00:00:00+00:00'"),
        ("a not in ('x''y',2)", "\"a\" NOT IN ('x''y', 2)"),
        ("A = true", '"A" = TRUE'),
    ],
)
def test_canonical_text_has_one_spelling(text: str, canonical: str) -> None:
    assert sql(parse(text)) == canonical


def test_columns_are_those_that_the_condition_reads() -> None:
    text = "a = 1 AND (b IN (2) OR NOT c IS NULL) AND d BETWEEN e AND 9 AND f LIKE 'a' AND g AND 'b' = h"
    assert columns(parse(text)) == set("abcdefgh")


@given(conditions)
def test_canonical_text_parses_to_the_same_tree_and_to_itself(condition: Condition) -> None:
    text = sql(condition)
    if len(text) > MAX_LENGTH:
        return
    again = parse(text)
    assert again == condition
    assert sql(again) == text


@given(st.text(max_size=60))
def test_garbage_is_parsed_or_refused_with_its_position(text: str) -> None:
    _refused_or_canonical(text)


_PIECES = [
    *("a", "b", '"c d"', "'x'", "1", "-2.5", "(", ")", ",", "=", "<>", "<", "AND", "OR", "NOT", "IN", "BETWEEN"),
    *("LIKE", "IS", "NULL", "TRUE", "DATE", "TIMESTAMP", "'2024-01-01'", "SELECT", "--", "/*", ";", "::", ".", "\x00"),
]


@given(st.lists(st.sampled_from(_PIECES), max_size=20))
def test_any_tokens_are_parsed_or_refused_with_their_position(pieces: list[str]) -> None:
    _refused_or_canonical(" ".join(pieces))


def _refused_or_canonical(text: str) -> None:
    outcome = _outcome(text)
    if isinstance(outcome, InvalidWhere):
        assert 1 <= outcome.position <= len(text) + 1
        assert outcome.detail
    else:
        assert parse(sql(outcome)) == outcome
        assert columns(outcome)


def _outcome(text: str) -> Condition | InvalidWhere:
    try:
        return parse(text)
    except InvalidWhere as error:
        return error


@pytest.mark.parametrize(
    ("text", "position", "sentence"),
    [
        ("", 1, "ends too early"),
        ("a =", 4, "ends too early"),
        ("a = (SELECT 1)", 5, "subqueries are not allowed"),
        ("EXISTS (SELECT 1)", 1, "EXISTS is not allowed"),
        ("a IN (SELECT b FROM c)", 7, "SELECT is not allowed"),
        ("a = ANY ('x')", 5, "ANY is not allowed"),
        ("lower(a) = 'x'", 1, "function lower(…) is not allowed"),
        ("a = pg_sleep(10)", 5, "function pg_sleep(…) is not allowed"),
        ("a = 1 -- b", 7, "comments are not allowed"),
        ("a = 1 /* b */", 7, "comments are not allowed"),
        ("a = 1 # b", 7, "comments are not allowed"),
        ("a = 1; DROP TABLE b", 6, "a second statement is not allowed"),
        ("a = 1 UNION SELECT 2", 7, "UNION is not allowed"),
        ("a::int = 1", 2, "casts and parameters are not allowed"),
        ("CAST(a AS int) = 1", 1, "CAST is not allowed"),
        ("a + 1 = 2", 3, "unexpected character '+'"),
        ("a-1 = 2", 2, "unexpected '-1'"),
        ("a || 'x' = 'y'", 3, "unexpected character '|'"),
        ("a ~ 'x'", 3, "unexpected character '~'"),
        ("a ILIKE 'x'", 3, "ILIKE is not allowed"),
        ("a LIKE 'x' ESCAPE '!'", 12, "ESCAPE is not allowed"),
        ("a LIKE 'x\\%'", 8, "a pattern cannot contain a backslash"),
        ("a LIKE b", 8, "LIKE takes a string"),
        ("CASE WHEN a THEN b END", 1, "CASE is not allowed"),
        ("t.a = 1", 2, "names cannot contain dots"),
        ("a = $1", 5, "parameters are not allowed"),
        ("a = ?", 5, "parameters are not allowed"),
        ("a = $$x$$", 5, "parameters are not allowed"),
        ("`a` = 1", 1, "names are quoted with"),
        ("a = 'x", 5, "this string is not closed"),
        ("a = 'x''", 5, "this string is not closed"),
        ("a = ''x''", 7, "unexpected '"),
        ('"a = 1', 1, "this quoted name is not closed"),
        ('"" = 1', 1, "invalid column name"),
        ("a = E'x'", 5, "is not a literal"),
        ("a = x'41'", 5, "is not a literal"),
        ("a = 1_000", 5, "this is not a number"),
        ("a = 0x10", 5, "this is not a number"),
        ("a = 1e999", 5, "out of range"),
        ("a = " + "9" * 200, 5, "out of range"),
        ("a = NULL", 5, "write IS NULL"),
        ("a IN (1, NULL)", 10, "write IS NULL"),
        ("a IS TRUE", 6, "IS tests only for NULL"),
        ("a IN ()", 7, "unexpected '"),
        ("a IN (b)", 7, "a list may contain only literals"),
        ("1 = 1", 1, "compares no column"),
        ("'a' IN ('a')", 1, "this is not a column"),
        ("TRUE", 1, "this is not a column"),
        ("a = 1 AND", 10, "ends too early"),
        ("(a = 1", 7, "this parenthesis is not closed"),
        ("a = 1)", 6, "unexpected '"),
        ("(a) = 1", 5, "unexpected '"),
        ("a NOT 1", 7, "NOT is not allowed here"),
        ("a = DATE '2023-02-29'", 10, "this is not a date"),
        ("a = TIMESTAMP '2023-01-01'", 15, "this is not a timestamp"),
        ("a = TIMESTAMPTZ '2023-01-01 00:00:00'", 17, "this is not a timestamp"),
        ("a = TIMESTAMP '0001-01-01 00:00:00+14:00'", 15, "this is not a timestamp"),
        ("a \u00a0= 1", 3, "unexpected character U+00A0"),
        ("a = \uff07x\uff07", 5, "unexpected character"),
        ("\u0430 = 1", 1, "unexpected character"),
        ("a = 'x\u202ey'", 7, "invisible character U+202E"),
        ("a = 'x\x00y'", 7, "invisible character U+0000"),
        ('"a\u200b" = 1', 3, "invisible character U+200B"),
        ("a = '\ud800'", 6, "invisible character U+D800"),
    ],
)
def test_text_outside_the_language_is_refused_with_its_position(text: str, position: int, sentence: str) -> None:
    with pytest.raises(InvalidWhere) as refused:
        parse(text)
    assert sentence in refused.value.detail
    assert refused.value.position == position


@pytest.mark.parametrize(
    "text",
    [
        "(" * 100_000 + "a = 1" + ")" * 100_000,
        "(" * 4_000 + "a = 1" + ")" * 4_000,
        "NOT " * 2_000 + "a",
        "'" * 9_999,
        '"' * 9_999,
        "a = 1 OR " * 1_100 + "(",
        "a=1 or " * 1_400 + "a=1",
        "1" * 9_000,
        "a IN (" + "1," * 4_900,
        "-" * 9_999,
        "a = " + "1e" * 4_000,
    ],
    ids=lambda text: text[:12],
)
def test_oversized_condition_is_refused_quickly(text: str) -> None:
    started = time.process_time()
    with pytest.raises(InvalidWhere):
        parse(text)
    assert time.process_time() - started < 2


def test_condition_of_maximum_depth_round_trips() -> None:
    deep = "NOT (" * (MAX_DEPTH // 2) + "a = 1 OR b = 2" + ")" * (MAX_DEPTH // 2)
    assert parse(sql(parse(deep))) == parse(deep)
    with pytest.raises(InvalidWhere, match="nested more than"):
        parse("NOT (" + deep + ")")
