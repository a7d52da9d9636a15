"""Generates documentation from the code: `.venv/bin/python -m tests.docs.generate`. A test compares the result."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import typer
from pydantic_core import PydanticUndefined

from interlock.settings import BUILT_IN_RUNTIMES, Runtime, RuntimeKind, Settings
from tests.docs.package_graph import drawing

DOCS = Path(__file__).parents[2] / "docs"
COMMAND = ".venv/bin/python -m tests.docs.generate"

_NOTE = f"<!-- Generated: change the code, then run `{COMMAND}`. -->\n"

# Settings

_SETTINGS = f"""{_NOTE}
# Settings

A value comes from the first of these that sets it:

1. an option of the command line, if there is one;
2. the environment: `INTERLOCK_` and the name in capitals;
3. `interlock.toml` in the working directory, or the file in `INTERLOCK_CONFIG`;
4. the default.

`interlock config` prints every setting with its value and its origin; secrets are masked. An invalid value or an
unknown name stops the process at startup, with a message that says what to write.

```toml
# interlock.toml
gateway = "0.0.0.0:7070"
gateway_url = "https://interlock.example:7070"
tls_cert = "/etc/interlock/tls.crt"
tls_key = "/etc/interlock/tls.key"
retention_days = 30
```

In addition, `INTERLOCK_FAILPOINTS` arms failpoints in tests; see [CONTRIBUTING](../CONTRIBUTING.md#failpoints).
"""

_GROUPS = {
    "dir": "Folder and stores",
    "gateway": "Listeners",
    "gateway_url": "Clients and workers: addresses of the servers",
    "keys_dir": "Capability tokens",
    "sync_threshold": "Jobs and tasks",
    "queue_direct": "Queues",
    "relay_seconds": "Background loops: delay after a pass without work",
    "worker_concurrency": "Workers",
    "spark_master": "Spark",
    "log_level": "Logs",
}
"""The first setting of each group, and the group's heading."""

_RUNTIMES = """
## Runtimes

A runtime defines where jobs run and their default policy. Built in:

"""

_OWN_RUNTIMES = """
`queue`: a worker receives its tasks from a queue. `inline`: the dispatcher runs them itself. `invoke`: the dispatcher
calls a runner, which `interlock up` starts, or which `runner_url` or `runner_lambda` names: [untrusted
code](untrusted-code.md). `interlock up` starts a worker for `platform` and one for `spark`, but none for `udf`: its
tasks wait for your own worker.

`runtimes` adds runtimes or replaces built-in ones. Every gateway, dispatcher and worker must have the same ones.

```toml
[runtimes.gpu]
queue = "gpu"             # default: the runtime's name
lease_seconds = 120
timeout_seconds = 7200
memory_mb = 8192          # address space of each child process
```

In the environment: `INTERLOCK_RUNTIMES='{"gpu": {"timeout_seconds": 7200}}'`. Start its worker with
`interlock serve worker --runtime gpu`.

| key | default | |
|---|---|---|
"""

_RUNTIME_KEYS = {
    "kind": "`queue`, `inline` or `invoke`",
    "queue": "name of its queue; if empty, the name of the runtime",
    "alias_of": "another name for that runtime",
    "lease_seconds": "how long a worker keeps a task without heartbeats",
    "timeout_seconds": "maximum duration of an attempt",
    "memory_mb": "limit of the address space of each child process, in MiB; unset: no limit",
    "image": "container image, for deployments that start workers by image; Interlock does not read it",
}


def settings_page() -> str:
    return (
        _SETTINGS
        + "".join(_settings_group(title, names) for title, names in _settings_groups())
        + _RUNTIMES
        + _table(["runtime", "kind", "queue", "lease", "timeout", "memory"], map(_runtime_row, BUILT_IN_RUNTIMES))
        + _OWN_RUNTIMES
        + "".join(_row([f"`{key}`", _default(Runtime, key), text]) for key, text in _RUNTIME_KEYS.items())
    )


def _settings_groups() -> Iterator[tuple[str, list[str]]]:
    """Settings in the order of their class, under the heading of the last one that opens a group."""
    names = list(Settings.model_fields)
    starts = [names.index(name) for name in _GROUPS]
    for title, start, end in zip(_GROUPS.values(), starts, [*starts[1:], len(names)], strict=True):
        yield title, names[start:end]


def _settings_group(title: str, names: list[str]) -> str:
    return f"\n## {title}\n\n" + _table(["setting", "environment", "default", "meaning"], map(_setting_row, names))


def _setting_row(name: str) -> list[str]:
    field = Settings.model_fields[name]
    return [f"`{name}`", f"`INTERLOCK_{name.upper()}`", _default(Settings, name), field.description or ""]


def _default(model: type[Settings] | type[Runtime], name: str) -> str:
    field = model.model_fields[name]
    value = field.get_default(call_default_factory=True, validated_data={})
    if value in (None, "", PydanticUndefined) or value == {}:
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value.value if isinstance(value, Enum) else _number(value)}`"


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _runtime_row(name: str) -> list[str]:
    runtime = BUILT_IN_RUNTIMES[name]
    if runtime.alias_of is not None:
        return [f"`{name}`", f"alias of `{runtime.alias_of}`", "", "", "", ""]
    queue = f"`{runtime.queue or name}`" if runtime.kind is RuntimeKind.QUEUE else ""
    memory = f"{runtime.memory_mb} MiB" if runtime.memory_mb else ""
    times = [f"{seconds:g} s" for seconds in (runtime.lease_seconds, runtime.timeout_seconds)]
    return [f"`{name}`", runtime.kind.value, queue, *times, memory]


# Command line

_CLI = f"""{_NOTE}
# Command line

`make install` installs the command as `.venv/bin/interlock`. Every command has `--help` with an example.

- **Output.** Commands print tables for people; `--output json` prints the API's reply, for programs. Colours are used
  only on a terminal; `NO_COLOR` is respected.
- **Exit codes.** 0 success, 1 failure, 2 wrong usage. An error is one sentence on stderr; `--verbose` adds a traceback.
- **Server.** `INTERLOCK_GATEWAY_URL` and `INTERLOCK_API_KEY` select the server and the key. If they are unset, commands
  use the `interlock up` that runs in `--dir`.
- **Completion.** `interlock --install-completion` installs it for your shell.

"""

_LEFT_OUT = {"--help", "--install-completion", "--show-completion"}


def cli_page() -> str:
    from interlock.cli.app import app

    commands = [found for found in cli_commands(typer.main.get_command(app), "interlock") if found[1].params]
    index = _table(["command", ""], ([_link(path), _first_sentence(command)] for path, command in leaves(commands)))
    return _CLI + index + "".join(_command(path, command) for path, command in leaves(commands))


def cli_commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields every command and group with its path. Any: Typer has no public name for their classes."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from cli_commands(child, f"{path} {name}")


def leaves(commands: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [(path, command) for path, command in commands if not hasattr(command, "commands")]


def _link(path: str) -> str:
    return f"[`{path}`](#{path.replace(' ', '-')})"


def _first_sentence(command: Any) -> str:
    paragraph = (command.help or "").split("\n\n")[0]
    return " ".join(paragraph.split())


def _command(path: str, command: Any) -> str:
    context = typer.Context(command, info_name=path)
    usage = " ".join(command.collect_usage_pieces(context))
    parts = [f"\n## {path}\n\n{command.help}\n\n```\n{path} {usage}\n```\n"]
    rows = list(_parameters(command, context))
    if rows:
        parts.append("\n" + _table(["option", ""], rows))
    if command.epilog:
        parts.append(f"\n```sh\n{_example(command.epilog)}\n```\n")
    return "".join(parts)


def _parameters(command: Any, context: Any) -> Iterator[list[str]]:
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and not _LEFT_OUT & set(parameter.opts):
            name, text = record
            yield [f"`{name}`", text.replace("  ", " ")]


def _example(epilog: str) -> str:
    return epilog.removeprefix("Example:\n\n").replace("\n\n", "\n").replace(r"\[", "[")


# Markdown


def _table(columns: list[str], rows: Any) -> str:
    return _row(columns) + "|" + "---|" * len(columns) + "\n" + "".join(map(_row, rows))


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |\n"


PAGES = {"settings.md": settings_page, "cli.md": cli_page}


def architecture() -> str:
    """Returns docs/architecture.md with the drawing of the packages as they are now."""
    before, begin, rest = (DOCS / "architecture.md").read_text().partition("<!-- drawing: begin -->\n")
    _, end, after = rest.partition("<!-- drawing: end -->")
    return f"{before}{begin}{drawing()}\n{end}{after}"


def main() -> None:
    for name, page in {**PAGES, "architecture.md": architecture}.items():
        (DOCS / name).write_text(page())
        sys.stdout.write(f"wrote {DOCS / name}\n")


if __name__ == "__main__":
    main()
