"""Processes that a task starts: they end with the process that started them, however that one ends.

Linux gives the children of a dead process to its nearest living ancestor that asks for them. A run's parent asks, and
kills them when their searcher is gone or the run ends. A child ends its own descendants when it exits, also where the
parent itself was killed. Elsewhere (macOS) nobody gets the orphans: what a killed searcher has started may live on.
"""

import ctypes
import multiprocessing.resource_tracker
import sys
from collections.abc import Iterable

import psutil

PR_SET_CHILD_SUBREAPER = 36


def ask_for_orphans() -> None:
    """From now on, orphans among this process's descendants become its children (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def strangers(known: Iterable[int]) -> list[psutil.Process]:
    """Children of this process, but those in `known` and multiprocessing's resource tracker."""
    known = {*known, multiprocessing.resource_tracker._resource_tracker._pid}
    return [p for p in psutil.Process().children() if p.pid not in known]


def end(processes: list[psutil.Process]) -> None:
    """Kill processes with all their descendants, and collect their exit codes where they are ours."""
    found = {q for p in processes if p.is_running() for q in (p, *_descendants(p))}
    for process in found:
        try:
            process.kill()
        except psutil.NoSuchProcess:  # it has just ended
            continue
    psutil.wait_procs(found, timeout=2.0)


def end_strangers(known: Iterable[int]) -> None:
    """End all strangers, those too that the last ones leave behind; a few rounds, or a fork bomb would keep us."""
    for _ in range(5):
        if not (left := strangers(known)):
            return
        end(left)


def collect(known: Iterable[int]) -> list[psutil.Process]:
    """Collect the exit codes of strangers that have ended, or they fill the table of processes; returns the rest."""
    found = strangers(known)
    psutil.wait_procs([p for p in found if _status(p) == psutil.STATUS_ZOMBIE], timeout=0)
    return [p for p in found if p.is_running()]


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _status(process: psutil.Process) -> str | None:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return None
