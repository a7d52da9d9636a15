"""What the archive keeps of an accepted command.

Accepted is what was answered 202: delivered at once, or handed on to be. What became of it afterwards is telemetry.
"""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from msgspec import UNSET, Raw, Struct, UnsetType


class ArchivedCommand(Struct, frozen=True, kw_only=True, gc=False):
    command_id: UUID
    source: str
    """`org/service`."""
    target: str
    name: str
    timestamp: datetime
    """As it was signed."""
    version_id: str
    """Of the key that it was signed with."""
    accepted_at: datetime
    payload: Raw
    replay_id: UUID | UnsetType = UNSET
    replay_reason: str | UnsetType = UNSET
