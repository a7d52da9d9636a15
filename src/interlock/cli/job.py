"""`interlock job`: submits tasks, adds to open runs, shows, pauses, reruns, cancels and deletes jobs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interlock.cli.conventions import (
    CursorOption,
    FolderOption,
    LimitOption,
    Output,
    OutputOption,
    ask,
    collect,
    command,
    group,
    some_id,
    usage,
)
from interlock.cli.output import console, present, sheet, table
from interlock.cli.progress import uploaded
from interlock.cli.run import follow, run_rows, run_table
from interlock.wire.base import Priority
from interlock.wire.jobs import JobPage, ListFormat, RunPage

if TYPE_CHECKING:
    from msgspec import Raw
    from rich.console import RenderableType

    from interlock.client import Client
    from interlock.wire.jobs import JobAccepted, JobRequest, JobView
from interlock.cli.conventions import YesOption
from interlock.cli.output import confirm
from interlock.wire.jobs import RerunRequest

if TYPE_CHECKING:
    from interlock.client import Client
from typing import TYPE_CHECKING

from interlock.cli.run import run_sheet

if TYPE_CHECKING:
    from rich.console import RenderableType

    from interlock.client import Client
    from interlock.wire.jobs import TasksAdded

app = group("Jobs: an operator with its config, and the tasks submitted to it.")

JobName = Annotated[
    str, typer.Argument(help="A job's name, dag/job, its id, or a unique prefix of the id.", metavar="JOB")
]
RunOfJob = Annotated[
    str | None,
    typer.Option(
        "--run",
        parser=some_id,
        help="A run of the job; default: the newest. A unique prefix is enough",
        show_default=False,
    ),
]


# Options of `submit`
_Operator = Annotated[
    str | None,
    typer.Option(help="Name of an operator, or module:function. Not needed for an existing named job."),
]
_Task = Annotated[list[str] | None, typer.Option("--task", help="A payload, as JSON; repeatable.")]
_Tasks = Annotated[
    str | None, typer.Option("--tasks", help="File with one JSON payload per line; - for stdin.", metavar="FILE")
]
_File = Annotated[
    Path | None,
    typer.Option("--file", exists=True, dir_okay=False, help="A list of any length to upload; may be gzip or zstd."),
]
_Form = Annotated[
    ListFormat | None,
    typer.Option("--format", help="Format of --file. Default: by its extension, or jsonl.", show_default=False),
]
_OpenRun = Annotated[bool, typer.Option("--open", help="Allow more tasks later: see `interlock job add` and `close`.")]
_Config = Annotated[str | None, typer.Option(help="Config of the operator, as a JSON object, or @FILE.")]
_Name = Annotated[str | None, typer.Option(help="Name of the job, for repeated submissions.")]
_Runtime = Annotated[str | None, typer.Option(help="Runtime of the job. Default: platform")]
_Priority = Annotated[Priority, typer.Option(help="normal runs before bulk.")]
_MaxAttempts = Annotated[int | None, typer.Option(min=1, max=1000, help="Attempts per task. Default: 3")]
_Backoff = Annotated[
    float | None, typer.Option("--backoff-seconds", min=0, help="Delay before the first retry. Default: 1")
]
_Lease = Annotated[
    float | None,
    typer.Option("--lease-seconds", help="How long a worker keeps a task without heartbeats. Default: runtime's"),
]
_Timeout = Annotated[
    float | None, typer.Option("--timeout-seconds", help="Maximum duration of an attempt. Default: runtime's")
]
_NonRetryable = Annotated[list[str] | None, typer.Option(help="Error class that is not retried; repeatable.")]
_MaxConcurrency = Annotated[int | None, typer.Option(min=1, help="Maximum number of running tasks of the job.")]
_RunConcurrency = Annotated[int | None, typer.Option(min=1, help="Maximum number of running tasks of this run.")]
_Rate = Annotated[
    float | None,
    typer.Option("--rate-per-second", help="Maximum number of tasks per --rate-key that start per second."),
]
_RateKey = Annotated[
    str | None, typer.Option(help="Key for --rate-per-second: host (of the payload's url), or a JSON pointer.")
]
_Tolerated = Annotated[
    float | None,
    typer.Option("--tolerated-failure-share", help="Share of tasks that may fail permanently before the run fails."),
]
_Deadline = Annotated[
    float | None, typer.Option("--deadline-seconds", help="Seconds from now after which the run fails.")
]
_Retention = Annotated[
    float | None,
    typer.Option("--retention-days", help="How long the ended run is kept. Default: the setting, 14"),
]
_DedupeBy = Annotated[
    str | None, typer.Option(help="JSON pointer into the payload, such as /id: equal values are one task.")
]
_Update = Annotated[bool, typer.Option("--update", help="Update the named job to these options.")]
_IdempotencyKey = Annotated[str | None, typer.Option(help="Submitting again with the same key has no effect.")]
_Watch = Annotated[bool, typer.Option("--watch", "-w", help="Wait until the run has ended.")]


@command(
    app,
    "submit",
    example="interlock job submit --operator echo --task '{\"n\": 1}' --task '{\"n\": 2}' --watch\n"
    "interlock job submit --name nightly --operator my_module:clean --tasks tasks.jsonl --max-attempts 5\n"
    "seq 100 | interlock job submit --operator echo --tasks -\n"
    "interlock job submit --operator http_fetch --file urls.txt --format lines --watch",
)
def submit(
    operator: _Operator = None,
    task: _Task = None,
    tasks: _Tasks = None,
    file: _File = None,
    form: _Form = None,
    open_run: _OpenRun = False,
    config: _Config = None,
    name: _Name = None,
    runtime: _Runtime = None,
    priority: _Priority = Priority.NORMAL,
    max_attempts: _MaxAttempts = None,
    backoff: _Backoff = None,
    lease: _Lease = None,
    timeout: _Timeout = None,
    non_retryable: _NonRetryable = None,
    max_concurrency: _MaxConcurrency = None,
    run_concurrency: _RunConcurrency = None,
    rate: _Rate = None,
    rate_key: _RateKey = None,
    tolerated: _Tolerated = None,
    deadline: _Deadline = None,
    retention: _Retention = None,
    dedupe_by: _DedupeBy = None,
    update: _Update = False,
    idempotency_key: _IdempotencyKey = None,
    watch: _Watch = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Submit tasks to an operator, all or none. With --watch, exit code 1 means that some did not complete."""
    policy = {
        "max_attempts": max_attempts,
        "backoff_seconds": backoff,
        "lease_seconds": lease,
        "timeout_seconds": timeout,
        "non_retryable": non_retryable,
    }
    request = _request(
        tasks=payloads_of(task or [], tasks, needed=file is None and not open_run),
        policy=policy,
        operator=operator,
        name=name,
        runtime=runtime,
        config=_config(config),
        scaling=None if max_concurrency is None else {"max_concurrency": max_concurrency},
        limits=_limits(run_concurrency, rate, rate_key, tolerated, deadline),
        retention_days=retention,
        priority=priority,
        dedupe_by=dedupe_by,
        update=update,
        open=open_run or None,
    )
    if file is not None and (request.tasks or open_run):
        raise usage("--file cannot be combined with --task, --tasks or --open")

    async def work(client: Client) -> None:
        whole = request if file is None else await uploaded(client, request, file, form, quiet=output is Output.JSON)
        accepted = await client.submit_request(whole, idempotency_key=idempotency_key)
        if not watch:
            present(accepted, output, accepted_sheet)
            return
        await follow(client, accepted.run_id, output)

    ask(folder, work)


def _limits(
    concurrency: int | None, rate: float | None, key: str | None, tolerated: float | None, deadline: float | None
) -> dict[str, Any]:
    if (rate is None) != (key is None):
        raise usage("--rate-per-second and --rate-key must be given together")
    given = {
        "max_concurrency": concurrency,
        "rate": None if rate is None else {"key": key, "per_second": rate},
        "tolerated_failure_share": tolerated,
        "deadline_seconds": deadline,
    }
    return {name: value for name, value in given.items() if value is not None}


def _request(*, tasks: list[Raw], policy: dict[str, Any], **options: Any) -> JobRequest:
    """Builds the request by decoding it, so that an invalid value is refused here, with the wire format's error."""
    import msgspec

    from interlock.wire.jobs import JobRequest

    given = {name: value for name, value in options.items() if value is not None}
    given["policy"] = {name: value for name, value in policy.items() if value is not None}
    try:
        shape = msgspec.convert(given | {"tasks": []}, JobRequest)
    except msgspec.ValidationError as error:
        raise usage(str(error)) from None
    return msgspec.structs.replace(shape, tasks=tasks)


def payloads_of(given: list[str], file: str | None, *, needed: bool = True) -> list[Raw]:
    payloads = [_json(text, f"--task {number}") for number, text in enumerate(given, 1)]
    if file is not None:
        payloads += [_json(line, f"line {number} of {file}") for number, line in _lines(file)]
    if needed and not payloads:
        raise usage("There are no tasks: give --task JSON, --tasks FILE with one JSON payload per line, or --file FILE")
    return payloads


def _lines(file: str) -> list[tuple[int, str]]:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise usage(f"--tasks {file} cannot be read: {error}") from None
    return [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def _json(text: str, place: str) -> Raw:
    import msgspec

    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise usage(f"{place} is not JSON: {error}") from None
    return msgspec.Raw(text.strip())


def _config(text: str | None) -> dict[str, Any] | None:
    import msgspec

    if text is None:
        return None
    try:
        source = Path(text[1:]).read_text() if text.startswith("@") else text
        return msgspec.json.decode(source, type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise usage(f"--config must be a JSON object, or @FILE with one: {error}") from None


def accepted_sheet(accepted: JobAccepted) -> RenderableType:
    return sheet(
        [
            ("job", accepted.job_id),
            ("run", accepted.run_id),
            ("state", accepted.state),
            ("tasks", accepted.total),
            ("duplicates", accepted.deduplicated or None),
            ("try", f"interlock run watch {accepted.run_id}"),
        ]
    )


@command(app, "show", example="interlock job show nightly")
def show(job: JobName, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Show a job, its policy and its newest run."""
    present(ask(folder, lambda client: client.job(job)), output, job_sheet)


def job_sheet(job: JobView) -> RenderableType:
    import msgspec

    policy = msgspec.to_builtins(job.policy)
    scaling = msgspec.to_builtins(job.scaling)
    return sheet(
        [
            ("job", job.job_id),
            ("name", job.name),
            ("dag", job.dag_name),
            ("operator", job.operator),
            ("runtime", job.runtime),
            ("priority", job.priority),
            ("config", job.config),
            ("policy", ", ".join(f"{name} {value}" for name, value in policy.items() if value not in (None, []))),
            ("scaling", ", ".join(f"{name} {value}" for name, value in scaling.items() if value is not None) or None),
            ("created", job.created_at),
            *(run_rows(job.run) if job.run else []),
        ]
    )


@command(app, "list", example="interlock job list --limit 20")
def list_jobs(
    limit: LimitOption = 50,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show jobs, newest first."""

    async def work(client: Client) -> JobPage:
        jobs, following = await collect(client.job_page, lambda page: page.jobs, cursor, limit)
        return JobPage(jobs=jobs, next_cursor=following)

    present(ask(folder, work), output, _jobs)


def _name(job: JobView) -> str | None:
    return f"{job.dag_name}/{job.name}" if job.dag_name else job.name


def _jobs(page: JobPage) -> RenderableType:
    rows = [
        (job.job_id, _name(job), job.operator, job.runtime, job.state, job.run and job.run.total, job.created_at)
        for job in page.jobs
    ]
    columns = ("job", "name", "operator", "runtime", "newest run", "tasks", "created")
    return table(columns, rows, empty="There are no jobs; `interlock job submit` creates one.")


@command(app, "runs", example="interlock job runs nightly")
def runs(
    job: JobName,
    limit: LimitOption = 50,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show the runs of a job, newest first."""

    async def work(client: Client) -> RunPage:
        found, following = await collect(
            lambda at, size: client.run_page(job, at, size), lambda page: page.runs, cursor, limit
        )
        return RunPage(runs=found, next_cursor=following)

    present(ask(folder, work), output, run_table)


@command(app, "logs", example="interlock job logs nightly\ninterlock job logs tokens/activity --follow")
def logs(
    job: JobName,
    run: RunOfJob = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Also print what tasks print from now on.")] = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show the newest lines that the tasks of a job printed. With -o json, one line of JSON each."""
    from interlock.cli.logs import print_job_log

    count = ask(folder, lambda client: print_job_log(client, job, run=run, follow=follow, output=output))
    if not count and output is Output.TABLE:
        console().print("The tasks of this job have printed nothing.")


@command(app, "pause", example="interlock job pause nightly")
def pause(job: JobName, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Pause the runs of a job. Running tasks continue; no others start."""
    present(ask(folder, lambda client: client.pause_job(job)), output, job_sheet)


@command(app, "resume", example="interlock job resume nightly")
def resume(job: JobName, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Resume the paused runs of a job."""
    present(ask(folder, lambda client: client.resume_job(job)), output, job_sheet)


@command(
    app,
    "rerun",
    example="interlock job rerun nightly --failed --watch\n"
    "interlock job rerun nightly --error-class DiskFull --first 0 --last 9999",
)
def rerun(
    job: JobName,
    run: RunOfJob = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only tasks that failed permanently.")] = False,
    canceled: Annotated[bool, typer.Option("--canceled", help="Only canceled tasks.")] = False,
    error_class: Annotated[
        str | None, typer.Option(help="Only tasks whose last attempt failed with this error class.", show_default=False)
    ] = None,
    first: Annotated[int, typer.Option(min=0, help="First index.")] = 0,
    last: Annotated[int | None, typer.Option(min=0, help="Last index, inclusive.", show_default=False)] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Wait until the new run has ended.")] = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Run tasks of a run again, as a new run: all of them, or those that match the filters."""
    statuses: list[Any] = [name for name, wanted in (("Failed", failed), ("Canceled", canceled)) if wanted]
    if error_class is not None and not statuses:
        statuses = ["Failed"]
    request = RerunRequest(run=run, status=statuses, error_class=error_class, first=first, last=last)

    async def work(client: Client) -> None:
        accepted = await client.results.rerun(job, request)
        if watch:
            await follow(client, accepted.run_id, output)
        else:
            present(accepted, output, accepted_sheet)

    ask(folder, work)


@command(app, "cancel", example="interlock job cancel nightly --yes")
def cancel(
    job: JobName, yes: YesOption = False, output: OutputOption = Output.TABLE, folder: FolderOption = None
) -> None:
    """Cancel the runs of a job that have not ended; running tasks are asked to stop."""
    confirm(f"Cancel all tasks of job {job} that have not ended?", yes=yes)
    present(ask(folder, lambda client: client.cancel_job(job)), output, job_sheet)


@command(app, "delete", example="interlock job delete nightly --yes")
def delete(
    job: JobName, yes: YesOption = False, output: OutputOption = Output.TABLE, folder: FolderOption = None
) -> None:
    """Delete a job with its runs, tasks and results, in whatever state they are."""
    confirm(f"Delete job {job} with all its runs, tasks and results?", yes=yes)
    gone = ask(folder, lambda client: client.delete_job(job))
    present(
        gone, output, lambda job: f"Job {job.job_id} is deleted; the rest of its data is removed in the background."
    )


@command(app, "add", example="interlock job add found --task '{\"n\": 3}'\nseq 100 | interlock job add found --tasks -")
def add(
    job: JobName,
    task: Annotated[list[str] | None, typer.Option("--task", help="A payload, as JSON; repeatable.")] = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", help="File with one JSON payload per line; - for stdin.", metavar="FILE")
    ] = None,
    idempotency_key: Annotated[str | None, typer.Option(help="Adding again with the same key has no effect.")] = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Add tasks to a run that was submitted with --open, all or none."""
    payloads = payloads_of(task or [], tasks)

    async def work(client: Client) -> TasksAdded:
        return await client.lists.add(job, payloads, idempotency_key=idempotency_key)

    present(ask(folder, work), output, _added)


def _added(added: TasksAdded) -> RenderableType:
    last = added.first_index + added.added - 1
    return sheet([("run", added.run_id), ("added", added.added), ("indexes", f"{added.first_index} to {last}")])


@command(app, "close", example="interlock job close found")
def close(job: JobName, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Close a run: it gets no more tasks and ends with its last one."""
    present(ask(folder, lambda client: client.lists.close(job)), output, run_sheet)
