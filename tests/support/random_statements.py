"""Random SELECT statements for the gates of Spark SQL and DuckDB: nested, oddly named, and often out of bounds.

Relations are mostly granted ones, sometimes planted secrets. Keywords serve as aliases, quoted and unquoted. Set
operators, FROM before SELECT, VALUES and subqueries occur wherever the grammar may allow them; comments and letter
case vary. Dialects add clauses of their own, and expressions and queries that try to become too large. Not every text
is a statement: the caller's parser decides.

The statements of a test are the same in every run, unless INTERLOCK_SQL_EXAMPLES asks for a number of random ones.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from hypothesis import HealthCheck, settings

KEYWORDS = [
    "is",
    "distinct",
    "from",
    "union",
    "select",
    "where",
    "values",
    "table",
    "lateral",
    "not",
    "left",
    "in",
    "as",
    "with",
    "on",
    "all",
    "group",
    "by",
    "limit",
]
SEPARATORS = [" "] * 20 + ["\n", "\t", " /* from secret */ ", " -- select * from secret\n", "/**/"]
COMMANDS = [
    "select {column} distinct from {relation}",
    "select 1 union from {relation}",
    "select is distinct from {relation}",
    "from {relation}",
    "from {relation} select {column}",
    "table {relation}",
    "values ({value}), ({value})",
    "select {column} {alias} from {relation} {alias}, {relation}",
    "select * from {relation} where {value} is not distinct from {value}",
]


@dataclass(frozen=True)
class Dialect:
    granted: Sequence[str]
    secret: Sequence[str]
    columns: Sequence[str]
    functions: Sequence[str]
    quote: str
    """Quote character of names."""
    odd: float
    """Share of aliases that are unquoted keywords."""
    relations: Sequence[str] = ()
    """Templates of relations: {relation}, {query}, {value}, {column}, {alias} and {count} are replaced."""
    clauses: Sequence[str] = ()
    """Templates of what may follow the relation of a SELECT."""
    values: Sequence[str] = ()
    """Templates of expressions."""


ASKED = int(os.environ.get("INTERLOCK_SQL_EXAMPLES", "0"))
"""Number of random statements of a long run; 0 for the fixed ones of the suite."""


def examples(default: int) -> settings:
    """Returns the settings of a test: `default` fixed statements, or as many random ones as asked for."""
    return settings(
        max_examples=ASKED or default,
        deadline=None,
        derandomize=not ASKED,
        suppress_health_check=list(HealthCheck),
        database=None,
    )


class Writer:
    def __init__(self, random: Random, dialect: Dialect) -> None:
        self._random, self._dialect = random, dialect
        self._names = list(dialect.granted)

    def statement(self) -> str:
        words = self.query(3).split(" ")
        return "".join(word + self._random.choice(SEPARATORS) for word in words).strip(" ")

    # Queries

    def query(self, depth: int) -> str:
        shape = self._random.randrange(10)
        if depth > 0 and shape == 0:
            return self._with(depth)
        if depth > 0 and shape <= 3:
            operator = self._word(self._random.choice(["union", "union all", "intersect", "except"]))
            left, right = self.query(depth - 1), self.query(depth - 1)
            return self._random.choice([f"{left} {operator} {right}", f"( {left} ) {operator} ( {right} )"])
        if shape == 4:
            return self._command(depth)
        return self._select(depth)

    def _with(self, depth: int) -> str:
        before = list(self._names)
        definitions = []
        for _ in range(self._random.choice([1, 1, 2, 3])):
            name = self._random.choice(["x", "y", "secret", "is", *self._dialect.granted])
            definitions.append(f"{name} as ( {self.query(depth - 1)} )")
            self._names.append(name)
        text = f"with {' , '.join(definitions)} {self.query(depth - 1)}"
        self._names = before
        return text

    def _command(self, depth: int) -> str:
        return self._filled(self._random.choice(COMMANDS), depth, secrets=0.5)

    def _filled(self, template: str, depth: int, secrets: float = 0.1) -> str:
        """Replaces each {word} of a template by a text of that kind."""
        kinds: dict[str, Callable[[], str]] = {
            "relation": lambda: (
                self._random.choice(self._dialect.secret)
                if self._random.random() < secrets
                else self._relation(depth - 1)
            ),
            "query": lambda: self.query(depth - 1),
            "value": lambda: self._value(depth - 1),
            "column": self._column,
            "alias": self._alias,
            "count": lambda: self._random.choice(["1", "3", "9", "100", "9999", "2000000000"]),
        }
        return re.sub("{([a-z]+)}", lambda found: kinds[found[1]](), template)

    def _select(self, depth: int) -> str:
        listed = [f"{self._value(depth - 1)} {self._named()}" for _ in range(self._random.randint(1, 2))]
        text = f"{self._word('select')} {' , '.join(listed)} {self._word('from')} {self._relation(depth - 1)}"
        if self._random.random() < 0.4:
            text += f" {self._named()}"
        if self._random.random() < 0.3:
            text += f" {self._random.choice([',', 'join', 'cross join', ', lateral'])} {self._relation(depth - 1)}"
        if self._dialect.clauses and self._random.random() < 0.3:
            text += f" {self._filled(self._random.choice(self._dialect.clauses), depth)}"
        if self._random.random() < 0.4:
            text += f" where {self._condition(depth - 1)}"
        if self._random.random() < 0.15:
            text += f" order by {self._value(depth - 1)}"
        if self._random.random() < 0.1:
            text += f" limit {self._value(depth - 1)}"
        return text

    def _relation(self, depth: int) -> str:
        chance = self._random.random()
        if depth > 0 and chance < 0.3:
            return f"( {self.query(depth - 1)} ) {self._alias()}"
        if self._dialect.relations and self._random.random() < 0.15:
            return self._filled(self._random.choice(self._dialect.relations), depth)
        if chance < 0.4:
            return f"( values ( {self._value(depth - 1)} ) ) {self._alias()}"
        if chance < 0.5:
            return self._random.choice(self._dialect.secret)
        name = self._random.choice(self._names)
        return self._random.choice([name, name.upper(), self._quoted(name)])

    # Values

    def _condition(self, depth: int) -> str:
        left, right = self._value(depth), self._value(depth)
        operator = self._random.choice(["=", "is distinct from", "is not distinct from", "<", "and", "or"])
        text = f"{left} {operator} {right}"
        if depth > 0 and self._random.random() < 0.4:
            text = f"{left} {self._random.choice(['in', 'not in'])} ( {self.query(depth - 1)} )"
        elif depth > 0 and self._random.random() < 0.3:
            text = f"exists ( {self.query(depth - 1)} )"
        return text

    def _value(self, depth: int) -> str:
        chance = self._random.random()
        if depth > 0 and self._dialect.values and self._random.random() < 0.2:
            return self._filled(self._random.choice(self._dialect.values), depth)
        if depth <= 0 or chance < 0.5:
            return self._random.choice([self._column(), "1", "'from secret'", "null"])
        if chance < 0.65:
            return f"( {self.query(depth - 1)} )"
        if chance < 0.8:
            return f"{self._random.choice(self._dialect.functions)} ( {self._value(depth - 1)} )"
        if chance < 0.9:
            return f"case when {self._condition(depth - 1)} then {self._value(depth - 1)} end"
        return f"sum( {self._value(depth - 1)} ) over ( order by {self._value(depth - 1)} )"

    def _column(self) -> str:
        return self._random.choice([*self._dialect.columns, "is", "1"])

    # Names

    def _named(self) -> str:
        return self._random.choice(["", f"as {self._alias()}", self._alias()])

    def _alias(self) -> str:
        if self._random.random() < self._dialect.odd:
            return self._word(self._random.choice(KEYWORDS))
        return self._random.choice(["t", "u", self._quoted(self._random.choice(KEYWORDS))])

    def _quoted(self, name: str) -> str:
        return f"{self._dialect.quote}{name}{self._dialect.quote}"

    def _word(self, word: str) -> str:
        return self._random.choice([word, word.upper(), word.title()])
