"""Operators: their names, their lookup, and the built-in ones."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from interlock.wire.attempts import Event
from interlock.workers import OperatorNotFound, TaskCanceled, TaskContext, TaskFailed, catalogue, operator, operators
from interlock.workers.operators import resolve
from interlock.workers.protocol import Assignment, Work


class Recorded:
    """Records the calls of an operator to the process around it."""

    def __init__(self, *, canceled: bool = False) -> None:
        self.progressed: list[float] = []
        self.emitted: list[Event] = []
        self._canceled = canceled

    def progress(self, slot: int, fraction: float, text: str | None) -> None:
        self.progressed.append(fraction)

    def emit(self, slot: int, events: list[Event]) -> int:
        self.emitted += events
        return len(events)

    def canceled(self, slot: int) -> bool:
        return self._canceled

    def paused(self, slot: int) -> bool:
        return False


def context(link: Recorded | None = None, *, attempt: int = 1, config: bytes = b"{}") -> TaskContext:
    work = Work(
        operator="test",
        job=("dag", "job"),
        run_id=uuid4(),
        attempt=attempt,
        config=config,
        inputs=[b'{"dataset": "a"}'],
        outputs=[],
    )
    return TaskContext(work, Assignment(slot=1, task_id=uuid4(), index=7, payload=b"null"), link or Recorded())


OWN = """
from interlock.workers import operator

@operator
def double(payload, ctx):
    return payload * 2

@operator("given.name")
def other(payload, ctx):
    return payload

def undeclared(payload, ctx):
    return payload
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Gives this process a folder with a user's module. Returns the name of the module."""
    name = f"operators_{uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(OWN)
    (tmp_path / f"{name}_broken.py").write_text(f"raise RuntimeError('half written')\n{OWN}")
    monkeypatch.syspath_prepend(str(tmp_path))
    operators.give(catalogue.sources([str(tmp_path)]))
    yield name
    operators.give(())


def test_operator_is_found_by_module_or_by_registered_name(module: str) -> None:
    # Both modules of the folder declare the two short names, so neither name is usable.
    assert resolve(f"{module}:double")(21, context()) == 42
    assert resolve(f"{module}:other")(21, context()) == 21
    with pytest.raises(OperatorNotFound, match="no operator 'double'"):
        resolve("double")


def test_short_name_is_found_if_only_one_function_declares_it(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}_broken.py").unlink()
    operators.give(catalogue.sources([str(tmp_path)]))
    assert resolve("double")(21, context()) == 42
    assert resolve("given.name")("same", context()) == "same"


def test_name_of_a_built_in_operator_is_reserved() -> None:
    with pytest.raises(ValueError, match="'echo' is the name of a built-in operator"):
        operator("echo")(lambda payload, ctx: None)


def test_coroutine_function_is_refused_as_an_operator() -> None:
    async def later(payload: Any, ctx: TaskContext) -> None: ...

    with pytest.raises(OperatorNotFound, match="plain function"):
        operator(later)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nobody", "no operator 'nobody'"),
        ("no.such.module:function", "no operator"),
        ("{module}:undeclared", "no operator .* nearest names are"),
        ("{module}:doubl", "nearest names are {module}:double"),
        ("{module}_broken:double", "RuntimeError: half written"),
    ],
)
def test_unknown_name_error_says_what_is_missing(name: str, why: str, module: str) -> None:
    with pytest.raises(OperatorNotFound, match=why.format(module=module)):
        resolve(name.format(module=module))


def test_echo_returns_its_payload() -> None:
    assert resolve("echo")({"a": [1, None]}, context()) == {"a": [1, None]}


def test_sleep_reports_progress_until_the_end() -> None:
    link = Recorded()
    assert resolve("sleep")({"seconds": 0.001}, context(link)) == {"seconds": 0.001}
    assert link.progressed[-1] == 1.0


def test_sleep_stops_when_its_task_is_canceled() -> None:
    with pytest.raises(TaskCanceled):
        resolve("sleep")({"seconds": 3600}, context(Recorded(canceled=True)))


@pytest.mark.parametrize("payload", [None, 3, {}, {"seconds": "long"}])
def test_sleep_without_seconds_fails_with_advice(payload: Any) -> None:
    with pytest.raises(TaskFailed, match="seconds") as failure:
        resolve("sleep")(payload, context())
    assert failure.value.error_class == "BadPayload"


def test_fail_raises_the_requested_error() -> None:
    with pytest.raises(TaskFailed, match="out of cheese") as failure:
        resolve("fail")({"error_class": "Redo", "message": "out of cheese"}, context())
    assert failure.value.error_class == "Redo"


def test_fail_succeeds_after_the_given_number_of_times() -> None:
    payload = {"message": "not yet", "times": 2}
    for attempt in (1, 2):
        with pytest.raises(TaskFailed):
            resolve("fail")(payload, context(attempt=attempt))
    assert resolve("fail")(payload, context(attempt=3)) == {"attempt": 3}


def test_fail_can_exit_by_code_or_signal() -> None:
    for payload, status in (({"exit_code": 9}, 9 << 8), ({"signal": "SIGTERM"}, int(signal.SIGTERM))):
        pid = os.fork()
        if pid == 0:
            resolve("fail")(payload, context())
        assert os.waitpid(pid, 0)[1] == status


def test_python_calls_the_configured_function(module: str) -> None:
    config = f'{{"function": "{module}:double"}}'.encode()
    assert resolve("python")("ab", context(config=config)) == "abab"


@pytest.mark.parametrize("config", [b"{}", b'{"function": 3}', b'{"function": "echo"}'])
def test_python_without_a_function_fails_with_advice(config: bytes) -> None:
    with pytest.raises(OperatorNotFound, match="module:function"):
        resolve("python")(None, context(config=config))


def test_context_describes_the_attempt() -> None:
    ctx = context(attempt=2, config=b'{"depth": 3}')
    assert (ctx.attempt, ctx.index, ctx.dag, ctx.job, ctx.operator) == (2, 7, "dag", "job", "test")
    assert ctx.config == {"depth": 3}
    assert ctx.inputs == [{"dataset": "a"}]


def test_progress_is_clamped_between_0_and_1() -> None:
    link = Recorded()
    for fraction in (-1, 0.5, 7):
        context(link).progress(fraction)
    assert link.progressed == [0.0, 0.5, 1.0]


def test_events_are_validated_before_they_are_emitted() -> None:
    bad = Event(dataset_uuid=uuid4(), dataset_version=uuid4(), partition_key="")
    link = Recorded()
    with pytest.raises(ValueError, match="partition_key"):
        context(link).emit([bad])
    with pytest.raises(ValueError, match="partition_key"):
        context(link).commit(events=[bad])
    assert link.emitted == []
