"""Addresses of the stores, for commands that access them directly: from the settings or a running `interlock up`."""

from __future__ import annotations

from typing import Final

import msgspec

from interlock.settings import Settings

STORES: Final = ("state", "data", "valkey")


def store_urls(settings: Settings) -> dict[str, str]:
    """Returns URLs by store, without embedded stores that are not running."""
    given = {name: getattr(settings, f"{name}_url") for name in STORES}
    running = endpoints(settings)
    urls = {name: url.get_secret_value() if url else running.get(f"{name}_url") for name, url in given.items()}
    return {name: url for name, url in urls.items() if url}


def endpoints(settings: Settings) -> dict[str, str]:
    """Returns the endpoints that the `interlock up` of this folder has recorded; empty if none is running."""
    file = settings.dir / "endpoints.json"
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, str])
    except msgspec.MsgspecError:
        return {}
