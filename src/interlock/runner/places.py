"""How many invocations run at once, and as whom.

When the runner is root, each place has a user of its own, from a range that no person or service has. A lock file says
which runner of this machine has which.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from interlock.errors import ConfigurationError, TooManyRequests

RETRY_SECONDS: Final = 1.0
MOST_USERS: Final = 180
"""From the first on; beyond them begin those that systemd hands out."""
_LOCKS: Final = Path("/run/interlock-runner")


class Places:
    def __init__(self, users: list[int]) -> None:
        """One place per user; 0 for places that have none of their own."""
        self._free = users
        self._total = len(users)

    @property
    def taken(self) -> int:
        return self._total - len(self._free)

    @contextmanager
    def one(self) -> Iterator[int]:
        if not self._free:
            raise TooManyRequests(f"All {self._total} places of this runner are taken.", retry_after=RETRY_SECONDS)
        user = self._free.pop()
        try:
            yield user
        finally:
            self._free.append(user)


def users_for(places: int, first: int) -> list[int]:
    """Held until this process ends, however it does."""
    if os.getuid() != 0:
        return [0] * places
    _LOCKS.mkdir(mode=0o700, exist_ok=True)
    found = list[int]()
    for user in range(first, first + MOST_USERS):
        if len(found) == places:
            break
        if _take(user):
            found.append(user)
    if len(found) < places:
        raise ConfigurationError(
            f"Users {first} to {first + MOST_USERS - 1} are those of other runners on this machine, all but "
            f"{len(found)}: set runner_concurrency to at most that, or another runner_first_user."
        )
    return found


def _take(user: int) -> bool:
    handle = os.open(_LOCKS / str(user), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return False
    return True
