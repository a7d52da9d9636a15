"""Decides which tasks may share a process, so that operators find no secrets of another org or of the platform."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

from interlock.workers.operators import runs_users_code

if TYPE_CHECKING:
    from interlock.workers.claimed_tasks import Lease


class Tenancy:
    """The kinds of tasks that a process was assigned, which decide what it may be assigned next.

    An operator can search the memory of its process, and can leave a thread there that searches it later. If two tasks
    must not share a process, neither may therefore come first.
    """

    def __init__(self) -> None:
        self._orgs: set[UUID] = set()
        self._private = False
        self._credentials = False
        self._users_code = False

    def admits(self, lease: Lease) -> bool:
        if (self._private or lease.private) and not self._orgs <= {lease.org_id}:
            return False
        credentials = self._credentials or lease.credentials
        return not credentials or not (self._users_code or runs_users_code(lease.work.operator))

    def add(self, lease: Lease) -> None:
        self._orgs.add(lease.org_id)
        self._private |= lease.private
        self._credentials |= lease.credentials
        self._users_code |= runs_users_code(lease.work.operator)
