"""`interlock job`: pauses, resumes, reruns, cancels and deletes jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from interlock.cli import job_open
from interlock.cli.connection import ask
from interlock.cli.conventions import FolderOption, Output, OutputOption, YesOption, command
from interlock.cli.job import JobName, accepted_sheet, job_sheet
from interlock.cli.job_results import RunOfJob
from interlock.cli.output import confirm, present
from interlock.cli.run import follow
from interlock.wire import RerunRequest

if TYPE_CHECKING:
    from interlock.client import Client

app = job_open.app


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
