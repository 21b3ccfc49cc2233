"""What a process tells of itself: spans of time, counters that others may read, JSONL files.

A `Clock` adds up where a process's wall time goes. `Board` is the shared notice board: one row of numbers a process,
each written by one process only and read by any, without locks, because the lock of a killed process stays taken.
"""

import json
import os
import time
from collections import deque
from pathlib import Path


class Clock:
    """Wall time of one process by what it was spent on, as named spans. Spans whose name starts with `wait` are idle.

    Args:
        limit: spans that are kept for the timeline, the newest ones; the sums hold all.
    """

    def __init__(self, limit: int = 200_000) -> None:
        self.seconds: dict[str, float] = {}
        self.spans: deque[tuple[str, float, float, int]] = deque(maxlen=limit)  # name, start, end (time.time()), track
        self._began = 0.0
        self._before: dict[str, float] = {}

    def span(self, name: str) -> "Span":
        """Time the body of a with statement as `name`."""
        return Span(self, name)

    def add(self, name: str, start: float, end: float, track: int = 0) -> None:
        """A span that has ended. Tracks above 0 are other threads, each with span names of its own."""
        self.seconds[name] = self.seconds.get(name, 0.0) + end - start
        self.spans.append((name, start, end, track))

    def begin(self) -> None:
        """The RL phase begins: `counted`, `waits` and `busy` are from here on."""
        self._began, self._before = time.time(), dict(self.seconds)

    def counted(self) -> dict[str, float]:
        """Seconds by span name since `begin`; nothing before it."""
        return {name: s - self._before.get(name, 0.0) for name, s in self.seconds.items()} if self._began else {}

    def waits(self) -> dict[str, float]:
        """Seconds waited since `begin`, by cause."""
        return {name: s for name, s in self.counted().items() if name.startswith("wait") and s > 0}

    def busy(self) -> float:
        """Share of the time since `begin` that was not waited, 0 to 1; 0 before it."""
        spent = time.time() - self._began if self._began else 0.0
        return 1 - sum(self.waits().values()) / spent if spent > 0 else 0.0


class Span:
    """A span under way: `with clock.span(name)`."""

    __slots__ = ("_clock", "_name", "_start")

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        self._start = time.time()

    def __exit__(self, *_) -> None:
        self._clock.add(self._name, self._start, time.time())


class Board:
    """Numbers that every process may read; row i is written by process i alone.

    Rows: 0 is the parent, 1 the trainer, 2 the buffer's Manager, 3 a maker of start models, 4 + i searcher i.
    """

    PARENT, TRAINER, BUFFER, MAKER, SEARCHERS = 0, 1, 2, 3, 4
    FIELDS = (
        "alive",  # time.time() of the last sign of life, seconds
        "stop",  # parent: 1 when all shall end
        "rl_start",  # trainer: time.time() of the first batch; 0 before
        "generated",  # searcher: trajectories generated, by all its incarnations, as all counts are
        "handed_over",  # searcher: trajectories given to the buffer
        "tokens",  # searcher: tokens of what it generated
        "truncated",  # searcher: answers that were cut off at their longest
        "undecodable",  # searcher: answers that are not valid text (U+FFFD in them)
        "bad_rewards",  # searcher: rewards that were not finite or took too long, and count as 0
        "version",  # trainer: published; searcher: loaded
        "trained",  # trainer: trajectories trained, repeated ones counted each time
        "busy",  # share of the RL phase in which the process did not wait, 0 to 1
        "sync",  # trainer: sync wished for; parent: sync under way; searcher: sync arrived at (barrier)
        "go",  # parent: sync that is over (barrier)
    )
    COUNTS = ("generated", "handed_over", "tokens", "truncated", "undecodable", "bad_rewards")

    def __init__(self, ctx, searchers: int) -> None:
        self.searchers = searchers
        self._cells = ctx.RawArray("d", (self.SEARCHERS + searchers) * len(self.FIELDS))

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


class JsonLines:
    """A file of one JSON object a line, each on disk as soon as it is written."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a", encoding="utf-8")

    def write(self, row: dict) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()


def keep_rows_before(path: Path, step: int) -> None:
    """Drop the rows of a metrics file from update `step` on: a resumed run does these updates again."""
    rows = [row for row in read_jsonl(path) if row["step"] < step] if path.exists() else []
    path.with_suffix(".new").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(path.with_suffix(".new"), path)


class EventLog:
    """What happened in one process, in order, for `--event-log`; without a path nothing is written."""

    def __init__(self, path: Path | None) -> None:
        self._file = JsonLines(path) if path else None

    def write(self, event: str, **values) -> None:
        if self._file:
            self._file.write({"event": event} | values)


def backlog(config, generated: float, trained: float) -> float:
    """Updates that the replay ratio allows at once, without another answer: 0 is a starved trainer."""
    return (config.replay_ratio * generated - trained) / (config.prompts_per_batch * config.K)


def save_spans(clock: Clock, path: Path) -> None:
    """Leave a process's spans for `merge_timeline`."""
    path.with_suffix(".new").write_text(json.dumps({"spans": list(clock.spans), "waits": clock.waits()}))
    os.replace(path.with_suffix(".new"), path)  # whole or not at all: the parent's patience ends


def merge_timeline(out: Path) -> dict[str, dict[str, float]]:
    """Put the spans of all processes into `timeline.json`, the Chrome trace format (Perfetto opens it).

    Returns the seconds that each process waited in the RL phase, by cause.
    """
    events, waits = [], {}
    paths = sorted(out.glob("*.spans.json"), key=lambda p: (p.name != "trainer.spans.json", p.name))
    for row, path in enumerate(paths):
        name, saved = path.name.removesuffix(".spans.json"), json.loads(path.read_text())
        waits[name] = saved["waits"]
        events.append({"name": "process_name", "ph": "M", "pid": row, "args": {"name": name}})
        for span, start, end, track in saved["spans"]:
            microseconds = {"ts": round(start * 1e6), "dur": round((end - start) * 1e6)}
            events.append({"name": span, "ph": "X", "pid": row, "tid": track, **microseconds})
        path.unlink()
    (out / "timeline.json").write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return waits


def read_jsonl(path: Path) -> list[dict]:
    """The rows of a JSONL file; a last line that was cut off is left out."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
