"""`operator: udf`: validates and pins a job's configuration for user code."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from interlock.archives import BOOTSTRAP, Language

UDF: Final = "udf"
"""The operator name, independent of the code in the bundle."""
DIGEST: Final = "sha256:"
_LANGUAGES: Final = ("python", "node", "bootstrap")
_REFERENCE: Final = re.compile(r"sha256:[0-9a-f]{64}|[A-Za-z0-9](?!.*\.\.)[A-Za-z0-9._-]{0,99}")
_ENTRYPOINT: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Bundle:
    """The facts of a bundle that a job needs."""

    sha256: str
    modules: Mapping[str, Language]


def bundle_key(org_id: UUID, sha256: str) -> str:
    return f"bundles/{org_id}/{sha256}.zip"


def config_problem(config: Mapping[str, Any]) -> str | None:
    """Returns the problem of a configuration as a clause, without looking at the bundle."""
    reference, entrypoint = config.get("bundle"), config.get("entrypoint")
    if not isinstance(reference, str) or not _REFERENCE.fullmatch(reference):
        return "udf needs a bundle, by its name or as sha256: and 64 hexadecimal digits"
    if entrypoint == BOOTSTRAP:
        return None
    if not isinstance(entrypoint, str) or not _ENTRYPOINT.fullmatch(entrypoint) or len(entrypoint) > 500:
        return "udf needs an entrypoint such as module.handler, or bootstrap"
    if config.get("language", "python") not in _LANGUAGES:
        return f"language of udf must be one of {', '.join(_LANGUAGES)}"
    return None


def bundle_problem(config: Mapping[str, Any], bundles: Mapping[str, Bundle]) -> str | None:
    """Returns the problem of the named bundle as a clause. The configuration itself must be valid."""
    bundle = bundles.get(config["bundle"])
    if bundle is None:
        return f"there is no bundle {config['bundle']!r}"
    module = module_of(config["entrypoint"])
    if module not in bundle.modules:
        return f"bundle {config['bundle']!r} has no module {module!r} for the entrypoint"
    if bundle.modules[module] == "python" and module.split(".")[0] in sys.stdlib_module_names:
        return f"module {module!r} of the entrypoint is also in Python's standard library, which would be loaded"
    if config.get("language") not in (None, bundle.modules[module]):
        return f"the entrypoint is in {bundle.modules[module]}, not in {config['language']}"
    return None


def pinned(config: Mapping[str, Any], bundles: Mapping[str, Bundle]) -> dict[str, Any]:
    """Replaces the bundle's name by its digest, so that a job's code never changes when the name moves."""
    bundle = bundles[config["bundle"]]
    language = bundle.modules[module_of(config["entrypoint"])]
    return {**config, "bundle": f"{DIGEST}{bundle.sha256}", "language": language}


def module_of(entrypoint: str) -> str:
    return entrypoint if entrypoint == BOOTSTRAP else entrypoint.rpartition(".")[0]


def references(configs: Iterable[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Returns the bundle names and digests of all valid configurations."""
    called = {config["bundle"] for config in configs if config_problem(config) is None}
    digests = {name.removeprefix(DIGEST) for name in called if name.startswith(DIGEST)}
    return sorted(name for name in called if not name.startswith(DIGEST)), sorted(digests)
