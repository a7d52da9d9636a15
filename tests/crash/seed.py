"""What a crash test decides by chance comes from one number: `make crash SEED=n` decides the same again."""

from __future__ import annotations

import os
import random

SEED = int(os.environ.get("INTERLOCK_CRASH_SEED") or random.SystemRandom().randrange(2**31))
KILLS = int(os.environ.get("INTERLOCK_CRASH_KILLS") or 8)
"""How many random blows a test deals; CI's number by default, `make crash KILLS=200` for a long run."""
ROUNDS = max(1, KILLS // 40)
"""How often a test goes through a scene that is not random: once in CI."""
TIMEOUT = 300 + 15 * KILLS
"""Seconds for one test."""


def dice(purpose: str) -> random.Random:
    """Dice of its own for each purpose: one test alone is the same as that test among all."""
    return random.Random(f"{SEED}:{purpose}")


def replay(test: str) -> str:
    kills = f" KILLS={KILLS}" if "INTERLOCK_CRASH_KILLS" in os.environ else ""
    return f"make crash SEED={SEED}{kills} PYTEST_ARGS='-k {test}'"
