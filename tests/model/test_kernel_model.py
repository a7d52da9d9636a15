"""The kernel's real SQL against a model of its guarantees, with calls, crashes and time in any order.

A failure ends with the shortest example that leads to it and a `@reproduce_failure` line that repeats it.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.dispatchers import World
from tests.model.planted_faults import FAULTS, Fault
from tests.model.state_machine import KernelMachine

_EXAMPLES = os.environ.get("INTERLOCK_MODEL_EXAMPLES")
"""If unset: the same examples every time, for CI. If set: this many examples, different each time."""


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

    # Hypothesis calls its argument to create a machine; only the annotation asks for a class.
    factory: Any = lambda: KernelMachine(world)  # noqa: E731
    run_state_machine_as_test(factory, settings=settings(**profile | more))


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_calls_crashes_and_time_in_any_order_match_the_model(world: World) -> None:
    drive(world, int(_EXAMPLES or 80))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_machine_finds(world: World, monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    fault.plant(world, monkeypatch)
    with pytest.raises(AssertionError, match=fault.shows):
        drive(world, 300, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False)
