"""How much memory there is to share out among the servers."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import psutil

_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


def memory_mib() -> int:
    """The machine's memory, or a container's share of it."""
    total = psutil.virtual_memory().total
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.is_file() else ""
    return (min(total, int(limit)) if limit.isdecimal() else total) // (1024 * 1024)
