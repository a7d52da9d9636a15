"""DAG files for tests: random valid ones, and a simple YAML writer."""

from __future__ import annotations

import copy
import json
from datetime import UTC
from typing import Any

from hypothesis import strategies as st

from interlock.dags.definition import Dag
from interlock.dags.parser import Vocabulary, examine
from interlock.dags.where import (
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
)
from interlock.dags.yaml_nodes import Problem
from tests.support.system import System

VOCABULARY = Vocabulary(frozenset({"platform", "spark", "udf", "dispatcher"}))


def problems_of(text: str | bytes, vocabulary: Vocabulary = VOCABULARY) -> list[Problem]:
    content = text if isinstance(text, bytes) else text.encode()
    dag, problems = examine(content, "dag.yaml", vocabulary)
    assert (dag is None) == bool(problems)
    return problems


def valid(text: str | bytes, vocabulary: Vocabulary = VOCABULARY) -> Dag:
    content = text if isinstance(text, bytes) else text.encode()
    dag, problems = examine(content, "dag.yaml", vocabulary)
    assert dag is not None, "\n".join(map(str, problems))
    return dag


def block(value: Any, indent: int = 0) -> str:
    """Writes YAML in block style, with leaves as JSON. Any: it is a document."""
    pad = " " * indent
    if isinstance(value, dict) and value:
        return "".join(
            f"{pad}{json.dumps(key, ensure_ascii=False)}:{_nested(inner, indent)}" for key, inner in value.items()
        )
    if isinstance(value, list) and value:
        return "".join(f"{pad}-{_nested(inner, indent)}" for inner in value)
    return f"{pad}{json.dumps(value, ensure_ascii=False)}\n"


def _nested(value: Any, indent: int) -> str:
    if isinstance(value, dict | list) and value:
        return "\n" + block(value, indent + 2)
    return f" {json.dumps(value, ensure_ascii=False)}\n"


# Conditions

# Without invisible characters, and without the two that YAML does not allow.
_letters = st.characters(exclude_categories=("Cc", "Cf", "Cs", "Zl", "Zp"), exclude_characters="\ufffe\uffff")
_texts = st.text(_letters, max_size=12)
_column = st.builds(Column, st.text(_letters, min_size=1, max_size=12))
_literal = st.one_of(
    st.builds(Literal, st.just(LiteralKind.STRING), _texts),
    st.builds(Literal, st.just(LiteralKind.INTEGER), st.integers(-(10**20), 10**20)),
    st.builds(Literal, st.just(LiteralKind.DECIMAL), st.decimals(allow_nan=False, allow_infinity=False, places=3)),
    st.builds(Literal, st.just(LiteralKind.BOOLEAN), st.booleans()),
    st.builds(Literal, st.just(LiteralKind.DATE), st.dates()),
    st.builds(Literal, st.just(LiteralKind.TIMESTAMP), st.datetimes()),
    st.builds(Literal, st.just(LiteralKind.TIMESTAMP), st.datetimes(timezones=st.just(UTC))),
)
_value = _column | _literal
_predicate = st.one_of(
    _column,
    st.builds(Comparison, st.sampled_from(["=", "<>", "<", "<=", ">", ">="]), _column, _value),
    st.builds(Comparison, st.sampled_from(["=", "<"]), _literal, _column),
    st.builds(OneOf, _column, st.lists(_literal, min_size=1, max_size=4).map(tuple), st.booleans()),
    st.builds(Between, _column, _value, _value, st.booleans()),
    st.builds(Like, _column, _texts.map(lambda text: text.replace("\\", "")), st.booleans()),
    st.builds(IsNull, _column, st.booleans()),
)


def _flat(connective: type[AllOf] | type[AnyOf], parts: list[Condition]) -> Condition:
    flat: list[Condition] = []
    for part in parts:
        flat.extend(part.conditions if isinstance(part, AllOf | AnyOf) and type(part) is connective else [part])
    return connective(tuple(flat))


conditions: st.SearchStrategy[Condition] = st.recursive(
    _predicate,
    lambda inner: st.one_of(
        st.builds(Not, inner),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: _flat(AllOf, parts)),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: _flat(AnyOf, parts)),
    ),
    max_leaves=12,
)


# DAGs

names = st.builds(str.__add__, st.sampled_from("abcXYZ019"), st.text("abcXYZ019_-", max_size=6))
_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _texts,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(_texts.filter(lambda key: key != "<<"), inner, max_size=3)
    ),
    max_leaves=6,
)
_settings: dict[str, st.SearchStrategy[Any]] = {
    "runtime": st.sampled_from(sorted(VOCABULARY.runtimes)),
    "config": st.dictionaries(names, _json, max_size=3),
    "wait_for": st.sampled_from(["all", "any"]),
    "execution_strategy": st.sampled_from(["PerPartition", "PerUpdate"]),
    "max_queue_depth": st.integers(1, 10**6),
    "max_queue_age": st.sampled_from(["30s", "10m", "1h30m", "2d"]),
    "priority": st.sampled_from(["normal", "bulk"]),
    "scaling": st.fixed_dictionaries({}, optional={"max_concurrency": st.integers(1, 100), "key": st.just("/host")}),
    "max_attempts": st.integers(1, 10),
    "backoff_seconds": st.integers(0, 60),
    "jitter": st.floats(0, 1),
    "non_retryable": st.lists(names, max_size=2),
    "heartbeat_timeout_seconds": st.integers(1, 600),
    "timeout_seconds": st.floats(1, 600),
}
_sources = st.one_of(
    st.sampled_from(["always_on", "manual", "command"]).map(lambda kind: {"kind": kind}),
    st.fixed_dictionaries({"kind": st.just("webhook")}, optional={"auth": st.sampled_from(["hmac", "token"])}),
    st.fixed_dictionaries(
        {"kind": st.just("cron"), "schedule": st.sampled_from(["*/5 * * * *", "0 6 * * 1-5", "@daily"])},
        optional={
            "timezone": st.sampled_from(["UTC", "Europe/Paris"]),
            "catch_up": st.sampled_from(["none", "latest", "all"]),
            "misfire_grace": st.just("5m"),
        },
    ),
)


_roles: st.SearchStrategy[dict[str, list[str]]] = st.sampled_from(
    [{}, {"read_roles": ["admin"]}, {"read_roles": ["writer", "reader"]}]
).map(copy.deepcopy)  # a test may modify the drawn value


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """A valid DAG, as in a file. Each job reads only from jobs before it."""
    jobs: list[dict[str, Any]] = []
    for name in draw(st.lists(names, min_size=1, max_size=6, unique=True)):
        jobs.append(draw(_jobs(name, jobs)))
    offered = [(job["name"], _output_name(output)) for job in jobs for output in job["outputs"]]
    published = draw(st.dictionaries(names, st.sampled_from(offered), max_size=3)) if offered else {}
    publish = {
        name: {"from": {"job": job, "output": output}} | draw(_roles) for name, (job, output) in published.items()
    }
    return {"name": draw(names), "jobs": draw(st.permutations(jobs)), "publish": publish}


def _output_name(output: Any) -> str:
    return str(output["name"] if isinstance(output, dict) else output)


@st.composite
def _jobs(draw: st.DrawFn, name: str, before: list[dict[str, Any]]) -> dict[str, Any]:
    settings = draw(st.fixed_dictionaries({}, optional=_settings))
    outputs = draw(st.lists(names, max_size=3, unique=True))
    own = "sql" if settings.get("runtime") == "spark" else "echo"
    operators = [own] if settings.get("runtime") == "dispatcher" else [own, "my.module:function"]
    job = {"name": name, "operator": draw(st.sampled_from(operators)), **settings}
    job["outputs"] = [draw(st.sampled_from([output, {"name": output, "storage": "postgres"}])) for output in outputs]
    offered = [(earlier["name"], _output_name(output)) for earlier in before for output in earlier["outputs"]]
    edges = draw(st.lists(st.sampled_from(offered), max_size=3)) if offered else []
    if not edges:
        return job | {"activation": "source", "source": draw(_sources)}
    inputs = [{"from": {"job": upstream, "output": output}} for upstream, output in edges]
    return job | {"inputs": [edge | draw(_filters) for edge in inputs]}


_filters: st.SearchStrategy[dict[str, str]] = st.sampled_from(
    [{}, {"where": "a = 1 AND b IS NULL"}, {"where": "NOT (x IN ('y', 'z') OR d > DATE '2024-01-31')"}]
)


# Deployed DAGs


async def deploy(system: System, text: str | bytes, **query: Any) -> dict[str, Any]:
    """Deploys through the gateway and returns the reply."""
    reply = await system.user(
        "POST", "/v1/dags", content=text, params=query, headers={"Content-Type": "application/yaml"}
    )
    assert reply.status_code == 200, reply.text
    deployed: dict[str, Any] = reply.json()
    return deployed
