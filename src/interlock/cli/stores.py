"""Where the stores are, for commands that look at them directly: from the settings, else from a running `up`."""

from __future__ import annotations

from typing import Final

import msgspec

from interlock.settings import Settings

STORES: Final = ("state", "data", "valkey")


def store_urls(settings: Settings) -> dict[str, str]:
    """By store; without those that are embedded and not running."""
    given = {name: getattr(settings, f"{name}_url") for name in STORES}
    running = endpoints(settings)
    urls = {name: url.get_secret_value() if url else running.get(f"{name}_url") for name, url in given.items()}
    return {name: url for name, url in urls.items() if url}


def endpoints(settings: Settings) -> dict[str, str]:
    """What the `up` of this folder has left; empty when none runs."""
    file = settings.dir / "endpoints.json"
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, str])
    except msgspec.MsgspecError:
        return {}
