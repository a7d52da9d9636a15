"""Dependencies between the jobs of a DAG, and the difference between two definitions."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from interlock.dags.definition import Dag, Input, Job, JobOutput, Published, build_hash, job_hash


def producer(dag: Dag, edge: Input) -> JobOutput | None:
    """Returns the output of this DAG that an input reads; None for a dataset of another DAG."""
    if isinstance(edge.from_, JobOutput):
        return edge.from_
    publication = dag.publish.get(edge.from_.dataset)
    return publication.from_ if publication else None


def external_names(dag: Dag) -> list[str]:
    """Returns the names of inputs that other DAGs must publish."""
    names = {edge.from_.dataset for job in dag.jobs for edge in job.inputs if isinstance(edge.from_, Published)}
    return sorted(names - dag.publish.keys())


def upstream(dag: Dag, job: Job) -> frozenset[str]:
    """Returns the jobs of this DAG that a job reads from."""
    return frozenset(found.job for edge in job.inputs if (found := producer(dag, edge)))


def consumers(dag: Dag) -> dict[str, list[str]]:
    """Maps each job to the jobs that read one of its outputs."""
    found: dict[str, list[str]] = {job.name: [] for job in dag.jobs}
    for job in dag.jobs:
        for name in sorted(upstream(dag, job)):
            found[name].append(job.name)
    return found


def downstream(dag: Dag, names: Iterable[str]) -> frozenset[str]:
    """Returns all direct and indirect readers of these jobs, without the jobs themselves."""
    followers = consumers(dag)
    start = frozenset(names)
    seen: set[str] = set()
    waiting = deque(sorted(start & followers.keys()))
    while waiting:
        for name in followers[waiting.popleft()]:
            if name not in seen:
                seen.add(name)
                waiting.append(name)
    return frozenset(seen) - start


def in_order(dag: Dag) -> list[str]:
    """Returns the jobs, each after the jobs that it reads from. The jobs of a cycle are in any order."""
    followers: dict[str, list[str]] = {job.name: [] for job in dag.jobs}
    for job in dag.jobs:
        for name in sorted(upstream(dag, job) & followers.keys()):
            followers[name].append(job.name)
    return _by_finish(followers)[::-1]


def depth(dag: Dag, names: Collection[str]) -> int:
    """Returns how many of these jobs lie on the longest chain of dependencies."""
    followers = consumers(dag)
    deepest: dict[str, int] = {}
    for name in _by_finish(followers):
        below = max((deepest[follower] for follower in followers[name]), default=0)
        deepest[name] = below + (name in names)
    return max(deepest.values(), default=0)


@dataclass(frozen=True, slots=True)
class Change:
    """The difference between two definitions, as job names."""

    added: frozenset[str]
    changed: frozenset[str]
    """Jobs with different outputs, or that read a published name which now comes from another job."""
    downstream: frozenset[str]
    """Unchanged jobs downstream of an added or changed one."""
    removed: frozenset[str]
    tuned: frozenset[str] = frozenset()
    """Jobs whose tasks run differently but produce the same outputs."""

    @property
    def rebuilt(self) -> frozenset[str]:
        """Returns the jobs whose datasets get a new version."""
        return self.added | self.changed | self.downstream


def compare(old: Dag, new: Dag) -> Change:
    before, after = _fingerprints(old), _fingerprints(new)
    added = frozenset(after.keys() - before.keys())
    changed = frozenset(name for name in after.keys() & before.keys() if before[name] != after[name])
    behind = downstream(new, added | changed)
    hashes = {job.name: job_hash(job) for job in old.jobs}
    differing = {job.name for job in new.jobs if hashes.get(job.name, job_hash(job)) != job_hash(job)}
    return Change(
        added=added,
        changed=changed,
        downstream=behind,
        removed=frozenset(before.keys() - after.keys()),
        tuned=frozenset(differing - added - changed - behind),
    )


def _fingerprints(dag: Dag) -> Mapping[str, object]:
    """Combines a job's own definition with the outputs of its inputs: a published name may move to another job."""
    return {job.name: (build_hash(job), [producer(dag, edge) for edge in job.inputs]) for job in dag.jobs}


def cycles(followers: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Returns one cycle, as job names in order, per strongly connected component. A job may be its own cycle."""
    found = []
    for knot in _knots(followers):
        start = min(knot)
        if len(knot) > 1 or start in followers[start]:
            found.append(_way_back(start, knot, followers))
    return sorted(found)


def _way_back(start: str, knot: set[str], followers: Mapping[str, Iterable[str]]) -> list[str]:
    """Returns the shortest path from a job back to itself within its component."""
    came_from: dict[str, str] = {}
    waiting = deque([start])
    while start not in came_from:
        current = waiting.popleft()
        for name in followers[current]:
            if name in knot and name not in came_from:
                came_from[name] = current
                waiting.append(name)
    way = [start]
    while (before := came_from[way[-1]]) != start:
        way.append(before)
    return [start, *reversed(way[1:])]


def _knots(followers: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """Returns strongly connected components (Kosaraju). Not recursive: a DAG may be deeper than Python's stack."""
    backwards: dict[str, list[str]] = {name: [] for name in followers}
    for name, targets in followers.items():
        for target in targets:
            backwards[target].append(name)
    knots, placed = [], set[str]()
    for name in reversed(_by_finish(followers)):
        if name not in placed:
            knot = _reach(name, backwards, placed)
            placed |= knot
            knots.append(knot)
    return knots


def _by_finish(followers: Mapping[str, Iterable[str]]) -> list[str]:
    """Returns names in depth-first postorder: each name after all names reachable from it."""
    finished: list[str] = []
    seen: set[str] = set()
    for root in followers:
        if root in seen:
            continue
        seen.add(root)
        path = [(root, iter(followers[root]))]
        while path:
            name, rest = path[-1]
            following = next((target for target in rest if target not in seen), None)
            if following is None:
                finished.append(name)
                path.pop()
            else:
                seen.add(following)
                path.append((following, iter(followers[following])))
    return finished


def _reach(start: str, edges: Mapping[str, Iterable[str]], barred: set[str]) -> set[str]:
    reached = {start}
    waiting = [start]
    while waiting:
        for name in edges[waiting.pop()]:
            if name not in reached and name not in barred:
                reached.add(name)
                waiting.append(name)
    return reached
