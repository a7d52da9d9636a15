"""The report on an invocation: an exhausted resource is named with its limit."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Final, Literal

from interlock.untrusted.runner.cgroups import Hits
from interlock.untrusted.runner.contract import Limits
from interlock.untrusted.runner.in_sandbox.job import (
    EXIT_BAD_BUNDLE,
    EXIT_DISK_FULL,
    EXIT_NOT_REPORTED,
    EXIT_OUT_OF_MEMORY,
    EXIT_PROCESS_LIMIT,
    EXIT_WALLS,
    Ending,
)
from interlock.untrusted.runner.sandbox import Ended
from interlock.wire.bundles import RunnerReport

Outcome = Literal["exited", "signaled", "timeout", "oom", "refused", "bad_bundle"]

_NEARLY_FULL: Final = 1 << 16
_NO_HITS: Final = Hits(memory=False, processes=False)


def of(ended: Ended, limits: Limits, hits: Hits | None) -> RunnerReport:
    report = _of(ended, limits, hits or _NO_HITS)
    return RunnerReport(
        outcome=report.outcome,
        exit_code=ended.ending.exit_code if ended.ending else None,
        signal=_signal_of(ended.ending),
        cause=report.cause,
        detail=report.detail,
        stderr_tail=ended.tail,
    )


def timed_out(limits: Limits) -> RunnerReport:
    detail = f"The code exceeded its timeout of {limits.timeout_seconds:g} s and was killed."
    return RunnerReport(outcome="timeout", cause="timeout", detail=detail)


def refused(cause: str, detail: str) -> RunnerReport:
    return RunnerReport(outcome="refused", cause=cause, detail=detail)


def bad_bundle(detail: str) -> RunnerReport:
    return RunnerReport(outcome="bad_bundle", cause="bad_bundle", detail=detail)


def _of(ended: Ended, limits: Limits, hits: Hits) -> RunnerReport:
    if ended.overdrawn:
        return _disk_full(limits, "signaled")
    if ended.ending is None:
        return _without_ending(ended, limits, hits)
    if ended.ending.signal is not None:
        return _signaled(ended.ending.signal, limits, hits)
    return _exited(ended.ending, limits, hits)


def _without_ending(ended: Ended, limits: Limits, hits: Hits) -> RunnerReport:
    """The keeper sent no report: the walls could not be built, or it was killed with all other processes."""
    if hits.memory:
        return _out_of_memory(limits)
    if ended.code in (EXIT_WALLS, 1):
        return refused("no_confinement", "The walls around the code could not be built: see the runner's log.")
    detail = "The process that supervised the code was killed from outside."
    return RunnerReport(outcome="signaled", cause="signal", detail=detail)


def _signaled(number: int, limits: Limits, hits: Hits) -> RunnerReport:
    if number == signal.SIGKILL and hits.memory:
        return _out_of_memory(limits)
    if number == signal.SIGXCPU:
        return _ended("signaled", "cpu_limit", f"The code exceeded its limit of {limits.cpu_seconds} s of CPU time.")
    if number == signal.SIGXFSZ:
        return _disk_full(limits, "signaled")
    return _ended("signaled", "signal", f"The code was killed by {_name(number)}.")


def _exited(ending: Ending, limits: Limits, hits: Hits) -> RunnerReport:
    code = ending.exit_code or 0
    known: dict[int, Callable[[Limits], RunnerReport]] = {
        EXIT_OUT_OF_MEMORY: _out_of_memory,
        EXIT_DISK_FULL: _disk_full,
        EXIT_PROCESS_LIMIT: _too_many_processes,
    }
    if code in known:
        return known[code](limits)
    if code == EXIT_WALLS:
        return refused("no_confinement", "The code's privileges could not be dropped before it ran: see the output.")
    if code == EXIT_BAD_BUNDLE:
        return bad_bundle("The bundle lacks what its job refers to: see the output.")
    if code == EXIT_NOT_REPORTED:
        return _ended("exited", "not_reported", "The code ended, but the dispatcher did not accept its outcome.")
    return _plain_exit(code, ending, limits, hits)


def _plain_exit(code: int, ending: Ending, limits: Limits, hits: Hits) -> RunnerReport:
    """Uses the kernel's counters: a program that fails rarely reports why."""
    if code and hits.memory:
        return _out_of_memory(limits)
    if code and hits.processes:
        return _too_many_processes(limits)
    if code and min(ending.disk_free, ending.files_free * _NEARLY_FULL) < _NEARLY_FULL:
        return _disk_full(limits)
    return _ended("exited", "exit_code", f"The code ended with exit code {code}.")


def _out_of_memory(limits: Limits) -> RunnerReport:
    return _ended("oom", "out_of_memory", f"The code exceeded its memory limit of {limits.memory_mb} MiB.")


def _disk_full(limits: Limits, outcome: Outcome = "exited") -> RunnerReport:
    return _ended(outcome, "disk_full", f"The code exceeded its disk limit of {limits.disk_mb} MiB.")


def _too_many_processes(limits: Limits) -> RunnerReport:
    detail = f"The code exceeded its limit of {limits.processes} processes and threads."
    return _ended("exited", "fork_limit", detail)


def _ended(outcome: Outcome, cause: str, detail: str) -> RunnerReport:
    return RunnerReport(outcome=outcome, cause=cause, detail=detail)


def _signal_of(ending: Ending | None) -> str | None:
    return None if ending is None or ending.signal is None else _name(ending.signal)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
