"""Loading of settings: turns invalid values into one-sentence errors, and reports the origin of each value."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from interlock.errors import ConfigurationError
from interlock.settings.combined import Settings, config_file


def load(**overrides: Any) -> Settings:
    """Returns the effective settings. Raises ConfigurationError with a sentence that names an invalid value."""
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
        return f"Unknown setting {name!r}; `interlock config` lists all settings."
    message = first["msg"].removeprefix("Value error, ")
    return f"Setting {name!r} (INTERLOCK_{name.upper()}) is invalid: {message}." if name else f"Settings: {message}."


def origins(settings: Settings, **overrides: Any) -> dict[str, str]:
    """Returns the origin of the value of each setting."""
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
