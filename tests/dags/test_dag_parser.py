"""DAG files: all problems are reported together, each with its position and a fix."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.dags.checks import BUILT_IN, NOT_ON_SPARK, ON_SPARK
from interlock.dags.definition import (
    Activation,
    CatchUp,
    ExecutionStrategy,
    JobOutput,
    OnConflict,
    Published,
    SourceKind,
    Storage,
    UpdateStrategy,
    canonical,
    content_hash,
    document,
)
from interlock.dags.parser import Vocabulary, examine, examine_file, read
from interlock.dags.partitioning import RANGES
from interlock.dags.yaml_nodes import MAX_PROBLEMS
from interlock.errors import InvalidDag
from interlock.settings import load
from interlock.spark import operators as spark
from interlock.tasks.inline_runtime import OPERATORS
from interlock.untrusted.bundles import UDF
from interlock.wire.base import Priority
from interlock.workers import operators as workers
from tests.support.dags import VOCABULARY, block, documents, problems_of, valid

CHAIN = Path(__file__).parents[2] / "examples" / "dags" / "chain.yaml"

SOURCE = "{name: s, activation: source, source: {kind: manual}, operator: echo, outputs: [o]}"


def with_jobs(*jobs: str, **more: str) -> str:
    """Puts one job on each line, from line 3 on, followed by the other fields of the DAG."""
    lines = ["name: d", "jobs:", *(f"  - {job}" for job in jobs), *(f"{key}: {text}" for key, text in more.items())]
    return "\n".join(lines) + "\n"


def reactive(more: str = "", name: str = "r") -> str:
    return f"{{name: {name}, operator: echo, inputs: [{{from: {{job: s, output: o}}}}]{', ' if more else ''}{more}}}"


# The example


def test_shipped_example_is_valid_and_read_as_expected() -> None:
    dag, problems = examine_file(CHAIN, Vocabulary.of(load()))
    assert dag is not None, problems
    follow, transfers = dag.jobs
    assert (follow.activation, follow.runtime, follow.operator) == (Activation.SOURCE, "platform", "block_follower")
    assert follow.source is not None
    assert follow.source.kind is SourceKind.ALWAYS_ON
    assert [output.name for output in follow.outputs] == ["blocks", "transactions", "logs"]
    assert follow.config == {"rpc_url": "http://127.0.0.1:8545", "start_block": 0}
    assert (transfers.activation, transfers.execution_strategy) == (
        Activation.REACTIVE,
        ExecutionStrategy.PER_PARTITION,
    )
    assert transfers.inputs[0].from_ == JobOutput(job="follow", output="logs")
    assert str(transfers.inputs[0].where).startswith('"topic0" = \'0xddf252ad')
    assert (transfers.max_queue_depth, transfers.max_queue_age, transfers.scaling.max_concurrency) == (1000, 600, 4)
    assert (transfers.policy.max_attempts, transfers.policy.lease_seconds) == (3, 60.0)
    assert dag.publish["chain_transfers"].from_ == JobOutput(job="transfers", output="transfers")


def test_defaults_apply_to_jobs_without_their_own_value() -> None:
    text = with_jobs(
        "{name: s, activation: source, source: {kind: manual}, operator: echo, outputs: [o], max_attempts: 9}",
        reactive("max_queue_depth: null"),
        defaults="{max_attempts: 5, timeout_seconds: 7, priority: bulk, runtime: udf, max_queue_depth: 10}",
    )
    first, second = valid(text).jobs
    assert (first.policy.max_attempts, second.policy.max_attempts) == (9, 5)
    assert (first.policy.timeout_seconds, first.priority, first.runtime) == (7.0, Priority.BULK, "udf")
    assert (first.max_queue_depth, second.max_queue_depth) == (10, None)


def test_every_part_of_a_job_is_read() -> None:
    text = with_jobs(
        "{name: s, activation: source, operator: 'a.b:c.d', outputs: [o, {name: p, storage: postgres}], "
        "source: {kind: cron, schedule: '0  6 * * 1-5', timezone: Europe/Paris, catch_up: all, misfire_grace: 1h30m}}",
        "{name: r, operator: sql, runtime: spark, wait_for: any, update_strategy: append, unique_key: id, "
        "outputs: [q], "
        "inputs: [{from: {job: s, output: o}, where: 'a=1'}, {from: {dataset: elsewhere}}], "
        "scaling: {key: /host, max_concurrency_per_key: 2}, non_retryable: [Bad], jitter: 0}",
        reactive(
            "outputs: [{name: b, storage: buffered, unique_key: [x, y], on_conflict: update, "
            "columns: {x: bigint, y: 'DECIMAL(20, 3)  NOT NULL', z: string}}]",
            name="t",
        ),
    )
    source, appending, buffering = valid(text).jobs
    assert source.source is not None
    assert (source.source.schedule, source.source.timezone) == ("0 6 * * 1-5", "Europe/Paris")
    assert (source.source.catch_up, source.source.misfire_grace) == (CatchUp.ALL, 5400)
    assert [output.storage for output in source.outputs] == [Storage.PARQUET, Storage.POSTGRES]
    assert (appending.update_strategy, appending.unique_key) == (UpdateStrategy.APPEND, ("id",))
    assert appending.inputs[0].where == '"a" = 1'
    assert appending.inputs[1].from_ == Published(dataset="elsewhere")
    assert (appending.scaling.key, appending.policy.non_retryable) == ("/host", ["Bad"])
    assert buffering.outputs[0].unique_key == ("x", "y")
    assert buffering.outputs[0].columns == {"x": "bigint", "y": "decimal(20,3) not null", "z": "string"}
    assert buffering.outputs[0].on_conflict is OnConflict.UPDATE


def test_yaml_1_1_booleans_stay_text() -> None:
    text = with_jobs(SOURCE[:-1] + ", config: {on: yes, time: 12:30:45, day: 2024-01-01, n: 0x1f, e: 1e3, no: ~}}")
    config = valid(text).jobs[0].config
    assert config == {"on": "yes", "time": "12:30:45", "day": "2024-01-01", "n": 31, "e": 1000.0, "no": None}


# Problems and their positions

_AT_JOB = len("  - ") + 1
_BUFFERED = "outputs: [{name: a, storage: buffered, unique_key: [x]"
_KEYED = f"{_BUFFERED}, columns:"


@pytest.mark.parametrize(
    ("job", "part", "what", "instead"),
    [
        ("{operator: echo, activation: source, source: {kind: manual}}", "{", "a job has no name", "name:"),
        ("{name: x, activation: source, source: {kind: manual}}", "{", "job 'x' has no operator", "operator: sql"),
        (reactive("outptus: [a]"), "outptus", "has no field 'outptus'", "write outputs"),
        (reactive("retries: 3"), "retries", "has no field 'retries'", "write max_attempts"),
        (reactive("lease_seconds: 3"), "lease_seconds", "has no field", "write heartbeat_timeout_seconds"),
        (reactive("max_attempts: three"), "three", "max_attempts is invalid: must be int, got str", "max_attempts: 3"),
        (reactive("max_attempts: 0"), "0}", "must be int >= 1", "write max_attempts: 3"),
        (reactive("max_attempts: true"), "true", "must be int, got bool", "write max_attempts: 3"),
        (reactive("timeout_seconds: -1"), "-1", "must be float > 0.0", "write timeout_seconds: 3600"),
        (reactive("priority: high"), "high", "priority cannot be the text 'high'", "write normal or bulk"),
        (reactive("priority: Bulk"), "Bulk", "priority cannot be the text 'Bulk'", "write bulk"),
        (reactive("priority: [bulk]"), "[bulk]", "priority cannot be a list", "write normal or bulk"),
        (reactive("runtime: sparc"), "sparc", "runtime 'sparc' is not a known runtime", "write spark"),
        (reactive("runtime: xyz"), "xyz", "is not a known runtime", "write one of dispatcher, platform, spark, udf"),
        (reactive("runtime: 7"), "7", "runtime must be text, not the number '7'", "write runtime: platform"),
        (reactive("runtime: spark"), "spark", "operator echo of job 'r' does not run on Spark", "runtime: platform"),
        ("{name: x, operator: sql, activation: source, source: {kind: manual}}", "{", "runs only on Spark", "spark"),
        (reactive("config: [1]"), "[1]", "config must be a mapping, not a list", "name: value"),
        (reactive("config: ~"), "~", "config has no value", "or remove the field"),
        (reactive("config: {n: 012}"), "012", "'012' has a leading zero", "quote it"),
        (reactive("config: {n: 99999999999999999999}"), "9999", "does not fit into 64 bits", "quote it"),
        (reactive("config: {n: .nan}"), ".nan", "is not a finite number", "quote it"),
        (reactive("config: {n: 1e999}"), "1e999", "is not a finite number", "quote it"),
        (reactive('config: {n: "\\0"}'), '"\\0"', "control character U+0000", "remove it"),
        (reactive("max_queue_age: 10"), "10}", "max_queue_age must be text", "write max_queue_age: 10m"),
        (reactive("max_queue_age: 10 minutes"), "10 min", "is not a duration", "90s, 10m, 2h, 1d or 1h30m"),
        (reactive("max_queue_age: 0s"), "0s", "is out of range", "from 1s to 366d"),
        (reactive("max_queue_age: ''"), "''", "is not a duration", "10m"),
        (reactive("scaling: {max_concurency: 1}"), "max_con", "scaling has no field", "write max_concurrency"),
        (reactive("scaling: {key: host}"), "host}", "key is invalid", "write key: /host"),
        (reactive("scaling: 4"), "4}", "scaling must be a mapping", "name: value"),
        (reactive("outputs: logs"), "logs", "outputs must be a list, not the text 'logs'", "outputs: [blocks, logs]"),
        (reactive("outputs: [a/b]"), "a/b", "output 'a/b' is not a valid name", "letters"),
        (reactive("outputs: [a..b]"), "a..b", "is not a valid name", "single dots"),
        (reactive("outputs: [a, a]"), "a]", "duplicate output name 'a'", "another name"),
        (reactive("outputs: [{storage: parquet}]"), "{storage", "an output has no name", "name: transfers"),
        (reactive("outputs: [{name: a, storage: parket}]"), "parket", "storage cannot be", "write parquet"),
        (
            reactive("outputs: [{name: a, storage: buffered, columns: {x: int}}]"),
            "[{name: a",
            "requires a unique_key",
            "identify a row",
        ),
        (reactive(f"{_BUFFERED}}}]"), "[{name: a", "has storage: buffered but no columns", "write columns: {"),
        (
            reactive(f"{_KEYED} {{x: int}}}}], runtime: spark").replace("operator: echo", "operator: 'm:f'"),
            "[{name: a",
            "does not write batches",
            "storage: parquet",
        ),
        (reactive(f"{_KEYED} {{y: int}}}}]"), "[{name: a", "'x', which is not one of its columns", "one of y"),
        (reactive(f"{_KEYED} {{x: double}}}}]"), "[{name: a", "uses column 'x' of type double", "decimal"),
        (reactive(f"{_KEYED} {{x: int, y: uuid}}}}]"), "y: uuid", "'y' has an unsupported type", "write one of bigint"),
        (reactive(f"{_KEYED} {{x: int, y: 'decimal(39,0)'}}}}]"), "y: 'dec", "has an unsupported type", "decimal(p,s)"),
        (reactive(f"{_KEYED} {{x: int, y: }}}}]"), "y: }", "has an unsupported type", "write one of"),
        (
            reactive(f"{_KEYED} {{x: int, X: int}}}}]"),
            "X: int",
            "duplicate column 'X': column names are case-insensitive",
            "another name",
        ),
        (reactive(f"{_KEYED} {{x: int, org_id: int}}}}]"), "org_id", "has a reserved name", "choose a name"),
        (reactive(f"{_KEYED} {{x: int, _y: int}}}}]"), "_y", "has a reserved name", "choose a name"),
        (reactive(f"{_KEYED} {{x: int}}, on_conflict: replace}}]"), "replace", "on_conflict", "nothing or"),
        (
            reactive("outputs: [{name: a, columns: {x: int}}]"),
            "[{name: a",
            "have no effect with storage: parquet",
            "storage: buffered",
        ),
        (reactive("update_strategy: append, outputs: [a]"), "append", "requires a unique_key", "identify a row"),
        (reactive("update_strategy: append"), "append", "requires a unique_key", "identify a row"),
        (reactive("unique_key: [a]"), "[a]", "has no effect with update_strategy: replace", "append"),
        (reactive("update_strategy: append, unique_key: [a, a]"), "[a, a]", "has a duplicate column", "once"),
        (reactive("update_strategy: append, unique_key: 5"), "5", "must be a list of column names", "write unique_key"),
        (reactive("source: {kind: manual}"), "{kind", "but its activation is reactive", "add activation: source"),
        (
            "{name: a/b, operator: echo, activation: source, source: {kind: manual}}",
            "a/b",
            "is not a valid name",
            "letters",
        ),
        (reactive(name="a" * 101), "aaa", "is a name of 101 characters", "at most 100"),
        (
            "{name: .., operator: echo, activation: source, source: {kind: manual}}",
            "..",
            "is not a valid name",
            "letters",
        ),
        (
            "{name: 'a:b', operator: echo, activation: source, source: {kind: manual}}",
            "'a:b'",
            "is not a valid name",
            "letters",
        ),
        ("{name: x, operator: echo}", "{", "job 'x' has no inputs", "or activation: source"),
        (
            "{name: x, operator: ech, activation: source, source: {kind: manual}}",
            "ech,",
            "is not a known operator",
            "write echo",
        ),
        (
            "{name: x, operator: 'a b', activation: source, source: {kind: manual}}",
            "'a b'",
            "is not an operator name",
            "module:",
        ),
        (
            "{name: x, operator: 'm:', activation: source, source: {kind: manual}}",
            "'m:'",
            "is not an operator name",
            "module:",
        ),
        (
            "{name: x, operator: zzzz, activation: source, source: {kind: manual}}",
            "zzzz",
            "is not a known operator",
            "one of",
        ),
        ("{name: x, operator: echo, activation: source}", "{", "has activation: source but no source", "source: {"),
        ("{name: x, operator: echo, activation: source, source: {}}", "{}", "source has no kind", "write kind: cron"),
        ("text", "text", "a job must be a mapping, not the text 'text'", "name: value"),
    ],
)  # fmt: skip
def test_invalid_job_is_reported_with_position_and_fix(job: str, part: str, what: str, instead: str) -> None:
    found = problems_of(with_jobs(SOURCE, job))
    assert [problem for problem in found if what in problem.what and instead in problem.instead], found
    assert (4, _AT_JOB + job.index(part)) in [(problem.line, problem.column) for problem in found], found
    assert len(found) == 1, found


@pytest.mark.parametrize(
    ("source", "what", "instead"),
    [
        ("{kind: cron}", "cron needs a schedule", 'schedule: "0 6 * * *"'),
        ("{kind: crom}", "kind cannot be the text 'crom'", "write cron"),
        ("{kind: cron, schedule: '61 * * * *'}", "has a field out of range", "minute 0-59"),
        ("{kind: cron, schedule: '0 0 30 2 *'}", "has a day that does not exist in any month", "a date that exists"),
        ("{kind: cron, schedule: '* * * * * *'}", "is not a cron schedule", "five fields"),
        ("{kind: cron, schedule: '@reboot'}", "is not a cron schedule", "@daily"),
        ("{kind: cron, schedule: 'R * * * *'}", "is a random schedule", "instead of H or R"),
        ("{kind: cron, schedule: often}", "is not a cron schedule", "five fields"),
        ("{kind: cron, schedule: '@daily', timezone: Europe/Pari}", "is not a known time zone", "write Europe/Paris"),
        (
            "{kind: cron, schedule: '@daily', timezone: ../../etc/passwd}",
            "is not a known time zone",
            "time zone database",
        ),
        ("{kind: cron, schedule: '@daily', misfire_grace: 5}", "misfire_grace must be text", "misfire_grace: 1m"),
        ("{kind: manual, schedule: '@daily'}", "of kind manual cannot have schedule", "remove it"),
        ("{kind: cron, schedule: '@daily', auth: hmac}", "of kind cron cannot have auth", "remove it"),
        ("{kind: webhook, auth: basic}", "auth cannot be the text 'basic'", "write hmac or token"),
    ],
)
def test_invalid_source_is_reported(source: str, what: str, instead: str) -> None:
    found = problems_of(with_jobs(f"{{name: x, operator: echo, activation: source, source: {source}}}"))
    assert len(found) == 1, found
    assert (what in found[0].what, instead in found[0].instead) == (True, True), found


@pytest.mark.parametrize(
    ("edge", "what", "instead"),
    [
        ("{from: {job: t, output: o}}", "unknown job 't'", "the jobs are r, s"),
        ("{from: {job: S, output: o}}", "unknown job 'S'", "write s"),
        ("{from: {job: s, output: oo}}", "job 's' has no output 'oo'", "write o"),
        ("{from: {job: s, output: zzz}}", "job 's' has no output 'zzz'", "its outputs are o"),
        ("{from: {job: r, output: o}}", "job 'r' has no output 'o'", "add outputs: [o] to the job"),
        ("{from: {job: s}}", "from has no output", "write output: logs"),
        ("{from: {job: s, output_index: 0}}", "from has no field 'output_index'", "write output"),
        ("{from: s}", "from must be a mapping", "name: value"),
        ("{form: {job: s, output: o}}", "an input has no field 'form'", "write from"),
        ("{from: {job: s, output: o, dataset: d}}", "both a job and a dataset", "{ job, output } or { dataset }"),
        ("{from: {dataset: a/b}}", "is not a valid name", "letters"),
        ("{from: {job: s, output: o}, where: 'f(a) = 1'}", "is invalid at character 1: function f", "comparisons"),
        ("{from: {job: s, output: o}, where: 'a = 1; b'}", "at character 6: a second statement", "one condition"),
        ("{from: {job: s, output: o}, where: 5}", "where must be text", "severity"),
    ],
)
def test_invalid_edge_is_reported(edge: str, what: str, instead: str) -> None:
    found = problems_of(with_jobs(SOURCE, f"{{name: r, operator: echo, inputs: [{edge}]}}"))
    assert any(what in problem.what and instead in problem.instead for problem in found), found
    assert {problem.line for problem in found} == {4}


def test_job_that_reads_its_own_output_is_reported_once() -> None:
    itself = "{name: x, operator: echo, outputs: [o], inputs: [{from: {job: x, output: o}}]}"
    (found,) = problems_of(with_jobs(itself))
    assert "reads its own output" in found.what


def test_cycle_is_reported_completely_also_through_published_names() -> None:
    text = with_jobs(
        "{name: a, operator: echo, outputs: [o], inputs: [{from: {job: c, output: o}}]}",
        "{name: b, operator: echo, outputs: [o], inputs: [{from: {dataset: of_a}}]}",
        "{name: c, operator: echo, outputs: [o], inputs: [{from: {job: b, output: o}}]}",
        "{name: d, operator: echo, inputs: [{from: {job: c, output: o}}]}",
        publish="{of_a: {from: {job: a, output: o}}}",
    )
    (found,) = problems_of(text)
    assert found.what == "the jobs form a cycle: a → b → c → a"
    assert (found.line, found.column) == (3, 61)


def test_source_with_inputs_is_reported() -> None:
    both = (
        "{name: x, operator: echo, activation: source, source: {kind: manual}, inputs: [{from: {job: s, output: o}}]}"
    )
    (found,) = problems_of(with_jobs(SOURCE, both))
    assert "has activation: source, so it cannot have inputs" in found.what


def test_duplicate_names_are_reported_with_the_first_line() -> None:
    text = with_jobs(SOURCE, SOURCE, publish="{p: {from: {job: s, output: o}}, p: {from: {job: s, output: o}}}")
    job, publication = problems_of(text)
    assert "job name 's' is already used on line 3" in job.what
    assert "duplicate key 'p', first used on line 5" in publication.what


@pytest.mark.parametrize(
    ("publish", "what"),
    [
        ("{p: {from: {job: s, output: x}}}", "job 's' has no output 'x'"),
        ("{p: {from: {job: x, output: o}}}", "unknown job 'x'"),
        ("{p: {from: {dataset: q}}}", "from has no field 'dataset'"),
        ("{p: {}}", "published 'p' has no from"),
        ("{a b: {from: {job: s, output: o}}}", "'a b' is not a valid name"),
        ("[p]", "publish must be a mapping"),
        ("{p: s}", "published 'p' must be a mapping"),
    ],
)
def test_invalid_publication_is_reported(publish: str, what: str) -> None:
    found = problems_of(with_jobs(SOURCE, publish=publish))
    assert any(what in problem.what for problem in found), found
    assert {problem.line for problem in found} == {4}


def test_dataset_of_another_dag_is_checked_if_published_names_are_known() -> None:
    text = with_jobs("{name: r, operator: echo, inputs: [{from: {dataset: pricse}}]}")
    valid(text)
    known = Vocabulary(VOCABULARY.runtimes, datasets=frozenset({"prices"}))
    (found,) = problems_of(text, known)
    assert (found.what, found.instead) == ("no DAG publishes 'pricse'", "write prices")
    (found,) = problems_of(text.replace("pricse", "transfers"), known)
    assert found.instead == "deploy the DAG that publishes it first; published datasets: prices"
    valid(text.replace("pricse", "prices"), known)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("name: d", "the DAG has no jobs"),
        ("jobs: []", "the DAG has no name"),
        ("name: d\njobs: []", "jobs is empty"),
        ("name: d\njobs: {}", "jobs must be a list, not a mapping"),
        ("name: d\njobs:", "jobs has no value"),
        ("- 1", "a DAG must be a mapping, not a list"),
        ("just text", "a DAG must be a mapping, not the text 'just text'"),
        ("name: d\ndefaults: 5\njobs: [" + SOURCE + "]", "defaults must be a mapping"),
        ("name: d\ndefaults:\njobs: [" + SOURCE + "]", "defaults has no value"),
        ("name: d\ndefaults: {name: x}\njobs: [" + SOURCE + "]", "defaults has no field 'name'"),
        ("name: d\nversion: 2\njobs: [" + SOURCE + "]", "the DAG has no field 'version'"),
    ],
)
def test_file_that_is_not_a_dag_is_reported(text: str, what: str) -> None:
    assert any(what in problem.what for problem in problems_of(text)), problems_of(text)


def test_all_problems_are_reported_in_file_order() -> None:
    text = with_jobs(reactive("prority: bulk"), "{name: s, operator: ech}", reactive("jitter: 2", "q"), publish="[]")
    found = problems_of(text)
    assert [problem.line for problem in found] == sorted(problem.line for problem in found)
    assert {3, 4, 5, 6} == {problem.line for problem in found}
    assert str(found[0]).startswith("dag.yaml:3:")
    assert "; write priority" in "\n".join(map(str, found))


def test_one_invalid_field_causes_no_follow_up_problems() -> None:
    broken = "{name: s, activation: source, source: {kind: manual}, operator: nope, outputs: [o], jitter: 9}"
    assert len(problems_of(with_jobs(broken, reactive()))) == 2
    unread = "{name: s, activation: source, source: {kind: manual}, operator: echo, outputs: 5}"
    assert len(problems_of(with_jobs(unread, reactive()))) == 1


def test_reading_raises_one_error_with_all_problems() -> None:
    with pytest.raises(InvalidDag) as refused:
        read(with_jobs("{name: x}", "{name: y}").encode(), "d.yaml", VOCABULARY)
    assert len(refused.value.problems) >= 2
    assert refused.value.status == 400
    assert "d.yaml:3:5: job 'x' has no operator" in refused.value.detail


# Hostile files


@pytest.mark.parametrize(
    ("text", "what", "place"),
    [
        ("a: &x [1]\nb: *x\n", "anchor &x is not allowed", (1, 4)),
        ("a: *x\n", "alias *x is not allowed", (1, 4)),
        ("a: !!python/object:os.system x\n", "tag 'tag:yaml.org,2002:python/object:os.system' is not allowed", (1, 4)),
        ("a: !!binary aGk=\n", "tag 'tag:yaml.org,2002:binary' is not allowed", (1, 4)),
        ("a: ! x\n", "tag '!' is not allowed", (1, 4)),
        ("? [a]\n: b\n", "a key must be text", (1, 3)),
        ("a: 1\n<<: {b: 2}\n", "merge key << is not allowed", (2, 1)),
        ("a: 1\n---\nb: 2\n", "a second document starts here", (2, 1)),
        ("a: [1\nb: 2\n", "invalid YAML", (2, 2)),
        ("a: 'x\n", "invalid YAML", (2, 1)),
        ("a: b: c\n", "invalid YAML", (1, 5)),
        ("\ta: 1\n", "invalid YAML", (1, 1)),
        ("", "the file is empty", (1, 1)),
        ("# nothing\n", "the file is empty", (1, 1)),
        ("a: 1\nb: \x07\n", "control character U+0007", (2, 4)),
        ("a: 1\nb: " + "[" * 60 + "]" * 60, "nesting is deeper than 50 levels", (2, 53)),
    ],
)
def test_unneeded_yaml_features_are_refused(text: str, what: str, place: tuple[int, int]) -> None:
    found = [problem for problem in problems_of(text) if what in problem.what]
    assert found, problems_of(text)
    assert (found[0].line, found[0].column) == place


@pytest.mark.parametrize(
    ("content", "what", "place"),
    [
        (b"name: d\nx: \xff\n", "byte 0xff is not valid UTF-8", (2, 4)),
        ("name: d".encode("utf-16"), "byte 0xff is not valid UTF-8", (1, 1)),
        (b"\xc3", "byte 0xc3 is not valid UTF-8", (1, 1)),
    ],
)
def test_file_that_is_not_utf_8_is_refused(content: bytes, what: str, place: tuple[int, int]) -> None:
    (found,) = problems_of(content)
    assert (found.what, (found.line, found.column)) == (what, place)


def test_byte_order_mark_is_accepted() -> None:
    assert valid(b"\xef\xbb\xbf" + with_jobs(SOURCE).encode()).name == "d"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(with_jobs(SOURCE) + "#" * 5_000_000, id="5 MB"),
        pytest.param("a: " + "[" * 400_000, id="brackets"),
        pytest.param("- " * 400_000, id="nested lists"),
        pytest.param("{a: " * 200_000, id="nested mappings"),
        pytest.param("a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\nd: [*c,*c]\n", id="laughs"),
        pytest.param("jobs: [" + "{name: x}, " * 5_000 + "]", id="5,000 wrong jobs"),
        pytest.param("jobs: [" + ", ".join(f"{{nam{n}: x}}" for n in range(5_000)) + "]", id="5,000 misspelt"),
        pytest.param("a" * 900_000 + ": 1", id="a long key"),
        pytest.param(with_jobs(SOURCE)[:-1] + "\n" + "".join(f"k{n}: 1\n" for n in range(10_000)), id="10,000 keys"),
    ],
)
def test_oversized_input_is_refused_within_seconds(text: str) -> None:
    started = time.process_time()
    found = problems_of(text)
    assert time.process_time() - started < 15
    assert 0 < len(found) <= MAX_PROBLEMS + 1


def test_file_that_is_too_large_is_not_parsed() -> None:
    (found,) = problems_of(b"\xff" * 5_000_000)
    assert "larger than 1,000,000 bytes" in found.what


def test_file_is_read_only_up_to_the_size_limit(tmp_path: Path) -> None:
    (found,) = examine_file(Path("/dev/zero"), VOCABULARY)[1]
    assert "larger than" in found.what
    (missing,) = examine_file(tmp_path / "absent.yaml", VOCABULARY)[1]
    assert "cannot be read: No such file" in missing.what
    (folder,) = examine_file(tmp_path, VOCABULARY)[1]
    assert "cannot be read: Is a directory" in folder.what


def test_long_chain_is_read_and_long_cycle_is_found() -> None:
    edges = [
        f"{{name: j{n}, operator: echo, outputs: [o], inputs: [{{from: {{job: j{n - 1}, output: o}}}}]}}"
        for n in range(1, 1000)
    ]
    head = "{name: j0, activation: source, source: {kind: manual}, operator: echo, outputs: [o]}"
    assert len(valid(with_jobs(head, *edges)).jobs) == 1000
    closed = "{name: j0, operator: echo, outputs: [o], inputs: [{from: {job: j999, output: o}}]}"
    (found,) = problems_of(with_jobs(closed, *edges))
    assert "j0 → j1 → j2" in found.what
    assert "j998 → j999 → j0" in found.what


def test_message_has_no_terminal_control_characters() -> None:
    found = problems_of(with_jobs(reactive('"\\e[31m": 1')))
    assert "\x1b" not in "\n".join(map(str, found))


# Random DAGs


@given(documents())
@settings(deadline=None, max_examples=40)
def test_random_valid_dag_is_read_and_its_canonical_form_reads_the_same(written: dict[str, Any]) -> None:
    dag = valid(block(written))
    again = valid(canonical(dag))
    assert document(again) == document(dag)
    assert content_hash(again) == content_hash(dag)
    assert content_hash(valid(json.dumps(written, ensure_ascii=False))) == content_hash(dag)
    for job, given_job in zip(dag.jobs, written["jobs"], strict=True):
        assert (job.name, job.operator) == (given_job["name"], given_job["operator"])
        assert job.config == given_job.get("config", {})
        assert len(job.inputs) == len(given_job.get("inputs", []))


_SNIPPETS = [
    "&a ",
    "*a",
    "!!int ",
    "- ",
    ": ",
    "\n",
    "  ",
    "{",
    "}",
    "[",
    "]",
    "'",
    '"',
    "#",
    "null",
    "5",
    "é",
    "\t",
    "|\n",
    "---\n",
]
_ways = st.sampled_from(["insert", "delete", "repeat", "swap"])
_mutations = st.lists(
    st.tuples(_ways, st.integers(0), st.integers(0, 40), st.sampled_from(_SNIPPETS)),
    min_size=1,
    max_size=6,
)  # fmt: skip


def _mutated(text: str, how: str, at: int, length: int, snippet: str) -> str:
    at %= len(text) + 1
    match how:
        case "insert":
            return text[:at] + snippet + text[at:]
        case "delete":
            return text[:at] + text[at + length :]
        case "repeat":
            return text[: at + length] + text[at:]
        case _:
            return text[at:] + text[:at]


@given(_mutations)
@settings(deadline=None, max_examples=100)
def test_mutation_of_a_valid_file_is_read_or_refused_but_never_crashes(
    mutations: list[tuple[str, int, int, str]],
) -> None:
    text = CHAIN.read_text()
    for mutation in mutations:
        text = _mutated(text, *mutation)
    for problem in problems_of(text):
        assert 1 <= problem.line <= text.count("\n") + 2
        assert problem.column >= 1
        assert problem.what
        assert problem.instead


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(content: bytes) -> None:
    assert problems_of(content)


@given(documents(), st.data())
@settings(deadline=None, max_examples=40)
def test_any_value_replaced_by_another_is_read_or_refused(written: dict[str, Any], data: st.DataObject) -> None:
    paths = list(_paths(written))
    path = data.draw(st.sampled_from(paths))
    strange: Any = data.draw(
        st.sampled_from([None, True, 0, -1, 1.5, "", "x", "a/b", [], [1], {}, {"x": 1}, [[]], "\u2028"])
    )
    _put(written, path, strange)
    examine(block(written).encode(), "dag.yaml", VOCABULARY)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Any:
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    for key, child in inner:
        yield from _paths(child, (*path, key))


def _put(value: Any, path: tuple[Any, ...], strange: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = strange


@given(st.text("0123456789*/,-#?LWHR @abcdefghijklmnopqrstuvwxyz", max_size=20))
def test_any_text_as_schedule_is_accepted_or_refused(text: str) -> None:
    source = {"kind": "cron", "schedule": text}
    job = {"name": "x", "operator": "echo", "activation": "source", "source": source}
    examine(block({"name": "d", "jobs": [job]}).encode(), "dag.yaml", VOCABULARY)


def test_built_in_operators_of_workers_and_dispatcher_are_known() -> None:
    assert OPERATORS.keys() <= BUILT_IN
    assert set(spark.BUILT_IN) == ON_SPARK
    assert ON_SPARK | NOT_ON_SPARK | RANGES | {UDF} == BUILT_IN
    assert workers.reserved() <= BUILT_IN
