"""`interlock job`, as a whole: hold it, let it go on, stop it, forget it."""

from __future__ import annotations

from interlock.cli import job_open
from interlock.cli.asking import confirm
from interlock.cli.connection import ask
from interlock.cli.conventions import FolderOption, Output, OutputOption, YesOption, command
from interlock.cli.job import JobName, job_sheet
from interlock.cli.output import present

app = job_open.app


@command(app, "pause", example="interlock job pause nightly")
def pause(job: JobName, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Pause the runs of a job: what runs goes on, nothing else begins."""
    present(ask(folder, lambda client: client.pause_job(job)), output, job_sheet)


@command(app, "resume", example="interlock job resume nightly")
def resume(job: JobName, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Let the paused runs of a job go on."""
    present(ask(folder, lambda client: client.resume_job(job)), output, job_sheet)


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
    """Delete a job with its runs, tasks and results, whatever state they are in."""
    confirm(f"Delete job {job} with all its runs, tasks and results?", yes=yes)
    gone = ask(folder, lambda client: client.delete_job(job))
    present(gone, output, lambda job: f"Job {job.job_id} is deleted; what is left of it goes in the background.")
