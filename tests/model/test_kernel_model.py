"""The kernel's real SQL against a model of its promises, in whatever order calls, crashes and time may come.

A failure ends with the shortest story that leads to it and a `@reproduce_failure` line that repeats just that.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.faults import FAULTS, Fault
from tests.model.machine import KernelMachine
from tests.model.world import World

_EXAMPLES = os.environ.get("INTERLOCK_MODEL_EXAMPLES")
"""Unset: the same examples every time, for CI. Set: as many, and different ones each time."""


def drive(world: World, examples: int, **more: Any) -> None:
    profile: dict[str, Any] = {
        "max_examples": examples,
        "stateful_step_count": 50,
        "derandomize": _EXAMPLES is None,
        "database": None,
        "deadline": None,
        "print_blob": True,
        "suppress_health_check": list(HealthCheck),
    }

    # Hypothesis calls what it is given to make a machine, and asks for a class only in its annotation.
    factory: Any = lambda: KernelMachine(world)  # noqa: E731
    run_state_machine_as_test(factory, settings=settings(**profile | more))


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_calls_crashes_and_time_in_any_order_leave_what_the_model_says(world: World) -> None:
    drive(world, int(_EXAMPLES or 80))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_the_machine_finds(world: World, monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    fault.plant(world, monkeypatch)
    with pytest.raises(AssertionError, match=fault.shows):
        drive(world, 300, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False)
