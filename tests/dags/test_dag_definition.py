"""Definitions compared with each other: hashes, dependencies, and the reach of a change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.dags.definition import Dag, canonical, content_hash, dag_of, job_hash
from interlock.dags.lineage import compare, consumers, cycles, downstream, upstream
from tests.dags.test_dag_parser import SOURCE, reactive, with_jobs
from tests.support.dags import block, documents, problems_of, valid

TWO = with_jobs(SOURCE, reactive("outputs: [x]"))


def test_layout_comments_order_and_defaults_do_not_change_the_hash() -> None:
    reordered = with_jobs(reactive("outputs: [x]"), SOURCE) + "# a comment\n"
    spelt_out = with_jobs(SOURCE, reactive("outputs: [{name: x, storage: parquet}], max_attempts: 3, wait_for: all"))
    by_default = with_jobs(SOURCE, reactive("outputs: [x]"), defaults="{max_attempts: 3, priority: normal}")
    hashes = {content_hash(valid(text)) for text in (TWO, reordered, spelt_out, by_default)}
    assert len(hashes) == 1


def test_spellings_of_a_condition_or_a_duration_do_not_change_the_hash() -> None:
    def with_edge(condition: str, age: str) -> str:
        edge = f'{{from: {{job: s, output: o}}, where: "{condition}"}}'
        return with_jobs(SOURCE, f"{{name: r, operator: echo, inputs: [{edge}], max_queue_age: {age}}}")

    assert content_hash(valid(with_edge("a=1 and(b!=2)", "90m"))) == content_hash(
        valid(with_edge("a = 1 AND b <> 2", "1h30m"))
    )


def test_order_of_outputs_is_part_of_the_definition() -> None:
    def with_outputs(outputs: str) -> str:
        return content_hash(valid(with_jobs(SOURCE, reactive(f"outputs: [{outputs}]"))))

    assert with_outputs("a, b") != with_outputs("b, a")


def test_job_hash_covers_only_its_own_definition() -> None:
    other_source = with_jobs(SOURCE.replace("echo", "sleep"), reactive("outputs: [x]"))
    before, after = valid(TWO), valid(other_source)
    assert job_hash(before.jobs[0]) != job_hash(after.jobs[0])
    assert job_hash(before.jobs[1]) == job_hash(after.jobs[1])
    assert len(job_hash(before.jobs[0])) == 64


def test_canonical_form_names_every_default() -> None:
    text = canonical(valid(TWO)).decode()
    assert '"max_attempts":3' in text
    assert '"storage":"parquet"' in text
    assert text.index('"name":"r"') < text.index('"name":"s"')


def test_published_name_that_moves_to_another_job_changes_its_readers() -> None:
    def publishing(job: str) -> str:
        reader = "{name: z, operator: echo, inputs: [{from: {dataset: p}}]}"
        return with_jobs(
            SOURCE, SOURCE.replace("name: s", "name: t"), reader, publish=f"{{p: {{from: {{job: {job}, output: o}}}}}}"
        )

    change = compare(valid(publishing("s")), valid(publishing("t")))
    assert change.changed == {"z"}
    assert change.rebuilt == {"z"}
    assert compare(valid(publishing("s")), valid(publishing("s"))).rebuilt == set()


# Compared with naive models


def _naive_reach(edges: set[tuple[str, str]]) -> dict[str, set[str]]:
    """Computes the transitive closure by repetition."""
    closure = set(edges)
    while True:
        more = {(a, d) for a, b in closure for c, d in closure if b == c} - closure
        if not more:
            return {name: {b for a, b in closure if a == name} for edge in edges for name in edge}
        closure |= more


def _edges(written: dict[str, Any]) -> set[tuple[str, str]]:
    return {(edge["from"]["job"], job["name"]) for job in written["jobs"] for edge in job.get("inputs", [])}


@given(documents(), st.data())
@settings(deadline=None, max_examples=40)
def test_downstream_is_the_naive_closure(written: dict[str, Any], data: st.DataObject) -> None:
    dag = valid(block(written))
    names = [job.name for job in dag.jobs]
    start = set(data.draw(st.lists(st.sampled_from(names))))
    reach = _naive_reach(_edges(written))
    expected = {end for name in start for end in reach.get(name, set())} - start
    assert downstream(dag, start) == expected
    assert {(name, end) for name, ends in consumers(dag).items() for end in ends} == _edges(written)
    assert {(name, job.name) for job in dag.jobs for name in upstream(dag, job)} == _edges(written)


@given(documents(), st.data())
@settings(deadline=None, max_examples=40)
def test_change_reaches_changed_jobs_and_their_naive_closure(written: dict[str, Any], data: st.DataObject) -> None:
    changed = copy.deepcopy(written)
    touched = data.draw(st.sets(st.sampled_from([job["name"] for job in written["jobs"]])))
    for job in changed["jobs"]:
        if job["name"] in touched:
            job["config"] = {**job.get("config", {}), "changed": "by the test"}
    change = compare(valid(block(written)), valid(block(changed)))
    reach = _naive_reach(_edges(written))
    behind = {end for name in touched for end in reach.get(name, set())} - touched
    assert (change.changed, change.downstream) == (frozenset(touched), frozenset(behind))
    assert not change.added | change.removed
    assert change.rebuilt == touched | behind


@given(documents())
@settings(deadline=None, max_examples=40)
def test_added_and_removed_jobs_are_reported(written: dict[str, Any]) -> None:
    without = with_jobs("{name: only, operator: echo, activation: source, source: {kind: manual}}")
    dag, small = valid(block(written)), valid(without)
    names = {job.name for job in dag.jobs}
    change = compare(small, dag)
    assert change.added == names - {"only"}
    assert change.removed == {"only"} - names
    assert compare(dag, small).removed == names - {"only"}


_digraphs = st.integers(1, 7).flatmap(
    lambda count: st.sets(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))).map(
        lambda edges: (count, {(f"j{a}", f"j{b}") for a, b in edges})
    )
)


@given(_digraphs)
def test_cycles_are_found_where_a_job_reaches_itself(
    graph: tuple[int, set[tuple[str, str]]],
) -> None:
    count, edges = graph
    followers = {f"j{n}": sorted(b for a, b in edges if a == f"j{n}") for n in range(count)}
    reach = _naive_reach(edges)
    knotted = {name for name in followers if name in reach.get(name, set())}
    found = cycles(followers)
    for cycle in found:
        assert all(pair in edges for pair in zip(cycle, [*cycle[1:], cycle[0]], strict=True))
        assert len(set(cycle)) == len(cycle)
    assert bool(found) == bool(knotted)
    # A cycle is reported per strongly connected component: jobs that reach each other.
    assert len(found) == len(
        {frozenset({name} | (reach[name] & {n for n in knotted if name in reach[n]})) for name in knotted}
    )


@given(_digraphs)
@settings(deadline=None, max_examples=60)
def test_file_is_refused_for_cycles_exactly_when_it_has_some(graph: tuple[int, set[tuple[str, str]]]) -> None:
    count, edges = graph
    jobs = []
    for n in range(count):
        inputs = [{"from": {"job": a, "output": "o"}} for a, b in sorted(edges) if b == f"j{n}"]
        kind = {"inputs": inputs} if inputs else {"activation": "source", "source": {"kind": "manual"}}
        jobs.append({"name": f"j{n}", "operator": "echo", "outputs": ["o"], **kind})
    reach = _naive_reach(edges)
    found = problems_of(block({"name": "d", "jobs": jobs}))
    assert bool(found) == any(name in reach[name] for name in reach)
    assert all("form a cycle" in problem.what or "reads its own output" in problem.what for problem in found)


# Parsing the canonical form, and the effect of a change


@given(documents())
@settings(deadline=None, max_examples=60)
def test_canonical_form_decodes_to_the_same_definition(written: dict[str, Any]) -> None:
    dag = valid(block(written))
    again = dag_of(canonical(dag))
    assert canonical(again) == canonical(dag)
    assert {job.name: job for job in again.jobs} == {job.name: job for job in dag.jobs}
    assert compare(dag, again).rebuilt | compare(dag, again).tuned == frozenset()


TUNED = ["priority: bulk", "max_attempts: 9", "max_queue_depth: 7", "max_queue_age: 3m", "timeout_seconds: 5"]
TUNED += ["scaling: {max_concurrency: 2}", "heartbeat_timeout_seconds: 9", "non_retryable: [Oops]", "jitter: 0.5"]
REBUILT = ["config: {a: 1}", "wait_for: any", "execution_strategy: PerUpdate", "runtime: udf", "outputs: [x, y]"]
REBUILT += ["update_strategy: append, unique_key: [a]"]


def _with(more: str) -> Dag:
    source = "{name: s, operator: echo, activation: source, source: {kind: manual}, outputs: [o]}"
    job = f"{{name: j, operator: echo, inputs: [{{from: {{job: s, output: o}}}}]{more}}}"
    return valid(f"name: d\njobs: [{source}, {job}]")


@pytest.mark.parametrize("field", TUNED)
def test_fields_about_task_execution_are_tuning(field: str) -> None:
    change = compare(_with(""), _with(f", {field}"))
    assert change.tuned == {"j"}
    assert not change.rebuilt


@pytest.mark.parametrize("field", REBUILT)
def test_fields_about_outputs_cause_a_rebuild(field: str) -> None:
    change = compare(_with(""), _with(f", {field}"))
    assert change.changed == {"j"}
    assert not change.tuned


def test_only_the_kind_of_a_source_causes_a_rebuild() -> None:
    cron = "name: d\njobs: [{name: s, operator: echo, activation: source, source: {kind: cron, schedule: '%s'}}]"
    change = compare(valid(cron % "@daily"), valid(cron % "@hourly"))
    assert change.tuned == {"s"}
    assert not change.rebuilt
    manual = valid("name: d\njobs: [{name: s, operator: echo, activation: source, source: {kind: manual}}]")
    assert compare(valid(cron % "@daily"), manual).changed == {"s"}
