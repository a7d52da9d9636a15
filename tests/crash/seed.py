"""All random decisions of crash tests derive from one seed: `make crash SEED=n` repeats them."""

from __future__ import annotations

import os
import random

SEED = int(os.environ.get("INTERLOCK_CRASH_SEED") or random.SystemRandom().randrange(2**31))
KILLS = int(os.environ.get("INTERLOCK_CRASH_KILLS") or 8)
"""Number of random blows per test: small by default for CI, `make crash KILLS=200` for a long run."""
ROUNDS = max(1, KILLS // 40)
"""How often a test repeats a scenario that is not random: once in CI."""
TIMEOUT = 300 + 15 * KILLS
"""Timeout of one test, in seconds."""


def random_for(purpose: str) -> random.Random:
    """Returns a separate generator for each purpose, so that a test alone behaves as it does among all others."""
    return random.Random(f"{SEED}:{purpose}")


def replay(test: str) -> str:
    kills = f" KILLS={KILLS}" if "INTERLOCK_CRASH_KILLS" in os.environ else ""
    return f"make crash SEED={SEED}{kills} PYTEST_ARGS='-k {test}'"
