"""Measurements that each process makes of itself: spans of time, counters for others to read, events in order.

A `Clock` adds up where a process's wall time goes. `Board` is the shared notice board: one row of numbers per process.
Only its own process writes a row, any process reads it. There is no lock, because a killed process would never free it.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from runtime.files import JsonLines, as_json, bookkeeping, read_json, write_whole

if TYPE_CHECKING:
    from buffer import Trajectory


class Clock:
    """Wall time of one process in named spans. Spans whose name starts with `wait` are idle time.

    Args:
        limit: the timeline keeps that many of the newest spans; the sums include all.
    """

    def __init__(self, limit: int = 200_000) -> None:
        self.seconds: dict[str, float] = {}
        self.spans: deque[tuple[str, float, float, int]] = deque(maxlen=limit)  # name, start, end (time.time()), track
        self.inside: tuple[str, float] | None = None  # the outermost span that is open: name, start
        self._began = 0.0
        self._before: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the body of a with statement as `name`."""
        start, outer = time.time(), self.inside
        self.inside = outer or (name, start)
        try:
            yield
        finally:
            self.inside = outer
            self.add(name, start, time.time())

    def add(self, name: str, start: float, end: float, track: int = 0) -> None:
        """Add a span that has ended. Tracks above 0 are other threads, each with its own span names."""
        self.seconds[name] = self.seconds.get(name, 0.0) + end - start
        self.spans.append((name, start, end, track))

    def begin(self) -> None:
        """Begin the RL phase: `counted`, `waits` and `busy` start here."""
        self._began, self._before = time.time(), dict(self.seconds)

    def counted(self) -> dict[str, float]:
        """Seconds by span name since `begin`; empty before it."""
        return {name: s - self._before.get(name, 0.0) for name, s in self.seconds.items()} if self._began else {}

    def waits(self) -> dict[str, float]:
        """Seconds waited since `begin`, by cause."""
        return {name: s for name, s in self.counted().items() if name.startswith("wait") and s > 0}

    def since_begin(self) -> float:
        """Seconds since `begin`; 0 before it."""
        return time.time() - self._began if self._began else 0.0

    def busy(self) -> float:
        """Share of the time since `begin` that was not spent waiting, 0 to 1; NaN before it: not measured."""
        spent = self.since_begin()
        return 1 - sum(self.waits().values()) / spent if spent > 0 else math.nan


class Board:
    """Numbers that every process may read; only process i writes row i.

    Rows: 0 is the parent, 1 the trainer, 2 the buffer's Manager, 3 a maker of start models, 4 + i searcher i.
    """

    PARENT, TRAINER, BUFFER, MAKER, SEARCHERS = 0, 1, 2, 3, 4
    FIELDS = (
        "alive",  # time.time() of the last sign of life, seconds
        "stop",  # parent: 1 when all processes must end
        "rl_start",  # trainer: time.time() of the first batch; 0 before
        "generated",  # searcher: trajectories generated; like all its counts, over all incarnations
        "handed_over",  # searcher: trajectories given to the buffer
        "tokens",  # searcher: tokens of these trajectories
        "truncated",  # searcher: answers that were cut off at --max-new-tokens
        "undecodable",  # searcher: answers that are not valid text (U+FFFD in them)
        "bad_rewards",  # searcher: rewards that were not finite or took too long, and count as 0
        "version",  # trainer: published; searcher: loaded
        "trained",  # trainer: trajectories trained, repeated ones counted each time
        "mismatch",  # searcher: largest |log pi - log mu| by the same weights, nats per token (runtime/checks.py)
        "busy",  # share of the RL phase in which the process did not wait, 0 to 1; NaN before it is measured
        "sync",  # barrier, number of a sync: wanted (trainer), open (parent), reached (searcher)
        "go",  # parent: number of the last sync that is over (barrier)
    )
    COUNTS = ("generated", "handed_over", "tokens", "truncated", "undecodable", "bad_rewards")

    def __init__(self, ctx: BaseContext, searchers: int) -> None:
        self.searchers = searchers
        self._cells = ctx.RawArray("d", (self.SEARCHERS + searchers) * len(self.FIELDS))
        for row in range(self.SEARCHERS + searchers):
            self.set(row, "busy", math.nan)

    @classmethod
    def row(cls, name: str) -> int:
        """The row of a process by its name."""
        rows = {"parent": cls.PARENT, "trainer": cls.TRAINER, "buffer": cls.BUFFER, "start-model": cls.MAKER}
        return cls.SEARCHERS + int(name.removeprefix("searcher-")) if name.startswith("searcher-") else rows[name]

    def _index(self, row: int, field: str) -> int:
        return row * len(self.FIELDS) + self.FIELDS.index(field)

    def get(self, row: int, field: str) -> float:
        return self._cells[self._index(row, field)]

    def set(self, row: int, field: str, value: float) -> None:
        self._cells[self._index(row, field)] = value

    def of_searchers(self, field: str) -> list[float]:
        return [self.get(self.SEARCHERS + i, field) for i in range(self.searchers)]

    @property
    def stopping(self) -> bool:
        return self.get(self.PARENT, "stop") > 0


class EventLog:
    """The events of one process, in order, for `--event-log`. Without a path it writes nothing."""

    def __init__(self, path: Path | None) -> None:
        self._file = JsonLines(path) if path else None

    def write(self, event: str, **values: object) -> None:
        if self._file:
            self._file.write({"event": event} | values)


def batch_metrics(groups: list[list[Trajectory]], step: int) -> dict:
    """Metrics of a batch as it was drawn: reward, answer length, staleness in trainer updates, distinct answers."""
    flat = [t for group in groups for t in group]
    staleness = [step - t.policy_version for t in flat]
    distinct = sum(len({t.response.tobytes() for t in group}) for group in groups)
    return {
        "reward": float(np.mean([t.reward for t in flat])),
        "tokens": float(np.mean([len(t.response) for t in flat])),
        "truncated": float(np.mean([t.finish_reason == "length" for t in flat])),
        "staleness": float(np.mean(staleness)),
        "staleness_max": float(max(staleness)),
        "ages": dict(sorted(Counter(staleness).items())),
        "distinct": distinct / len(flat),
    }


# --- the timeline of a run ------------------------------------------------------------------------------------------


def trace_events(spans: dict[str, Iterable[tuple[str, float, float, int]]]) -> list[dict]:
    """Each process's spans (name, start, end, track), in seconds, as events of the Chrome trace format: a row each."""
    events: list[dict] = []
    for row, (process, its_spans) in enumerate(spans.items()):
        events.append({"name": "process_name", "ph": "M", "pid": row, "args": {"name": process}})
        for name, start, end, track in its_spans:
            microseconds = {"ts": round(start * 1e6), "dur": round((end - start) * 1e6)}
            events.append({"name": name, "ph": "X", "pid": row, "tid": track, **microseconds})
    return events


def save_spans(clock: Clock, path: Path) -> None:
    """Save a process's spans for the timeline, completely or not at all: the parent may kill the process."""
    with bookkeeping(path.name):
        write_whole(path, as_json({"spans": list(clock.spans), "waits": clock.waits()}))


def read_spans(out: Path) -> dict[str, dict]:
    """The spans and waits that the processes of a run saved, by process; the trainer's first."""
    paths = sorted(out.glob("*.spans.json"), key=lambda p: (p.name != "trainer.spans.json", p.name))
    saved = {}
    for path in paths:
        with bookkeeping(path.name):
            saved[path.name.removesuffix(".spans.json")] = read_json(path)
    return saved


def merge_timeline(out: Path, saved: dict[str, dict] | None = None) -> None:
    """Put the spans of all processes into `timeline.json`, the Chrome trace format (Perfetto opens it)."""
    saved = read_spans(out) if saved is None else saved
    events = trace_events({name: left["spans"] for name, left in saved.items()})
    try:
        write_whole(out / "timeline.json", as_json({"traceEvents": events, "displayTimeUnit": "ms"}))
    finally:  # on a full disk too: what follows needs room
        for path in out.glob("*.spans.json"):
            path.unlink()
