"""The settings as they are given, a bad one told in a sentence, and where each came from."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from interlock.errors import ConfigurationError
from interlock.settings.whole import Settings, config_file


def load(**overrides: Any) -> Settings:
    """The effective settings; a bad value becomes one sentence that names it and says what to write."""
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        raise ConfigurationError(_sentence(error)) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{config_file()} is not valid TOML: {error}") from None


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"There is no setting {name!r}; `interlock config` lists them all."
    message = first["msg"].removeprefix("Value error, ")
    return f"Setting {name!r} (INTERLOCK_{name.upper()}) is wrong: {message}." if name else f"Settings: {message}."


def origins(settings: Settings, **overrides: Any) -> dict[str, str]:
    """For each setting, where its value came from."""
    path = config_file()
    in_file = tomllib.loads(path.read_text()) if path.is_file() else {}
    return {name: _origin(name, overrides, in_file, path) for name in type(settings).model_fields}


def _origin(name: str, overrides: dict[str, Any], in_file: dict[str, Any], path: Path) -> str:
    if overrides.get(name) is not None:
        return "command line"
    variable = f"INTERLOCK_{name.upper()}"
    if any(key.upper() == variable or key.upper().startswith(f"{variable}__") for key in os.environ):
        return f"environment ({variable})"
    return str(path) if name in in_file else "default"
