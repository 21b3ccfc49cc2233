"""What a process tells of itself: spans of time, counters that others may read, JSONL files.

A `Clock` adds up where a process's wall time goes. `Board` is the shared notice board: one row of numbers a process,
each written by one process only and read by any, without locks, because the lock of a killed process stays taken.
"""

import json
import os
import time
from contextlib import contextmanager
from pathlib import Path


class Clock:
    """Wall time of one process by what it was spent on, as named spans.

    Args:
        limit: most spans that are kept for the timeline; the sums go on beyond it.
    """

    def __init__(self, limit: int = 200_000) -> None:
        self.seconds: dict[str, float] = {}
        self.spans: list[tuple[str, float, float]] = []  # name, start, end: time.time(), seconds
        self._limit = limit

    @contextmanager
    def span(self, name: str):
        """Time the body of a with statement as `name`; names that start with `wait` are idle time."""
        start = time.time()
        try:
            yield
        finally:
            end = time.time()
            self.seconds[name] = self.seconds.get(name, 0.0) + end - start
            if len(self.spans) < self._limit:
                self.spans.append((name, start, end))

    def waited(self) -> float:
        """Seconds spent in spans whose name starts with `wait`."""
        return sum(s for name, s in self.seconds.items() if name.startswith("wait"))


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


def merge_timeline(out: Path) -> Path:
    """Put the spans of all processes into `timeline.json`, the Chrome trace format (Perfetto opens it)."""
    events = []
    for row, path in enumerate(
        sorted(out.glob("*.spans.json"), key=lambda p: (p.name != "trainer.spans.json", p.name))
    ):
        name = path.name.removesuffix(".spans.json")
        events.append({"name": "process_name", "ph": "M", "pid": row, "args": {"name": name}})
        for span, start, end in json.loads(path.read_text()):
            microseconds = {"ts": round(start * 1e6), "dur": round((end - start) * 1e6)}
            events.append({"name": span, "ph": "X", "pid": row, "tid": 0, **microseconds})
        path.unlink()
    place = out / "timeline.json"
    place.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return place


def read_jsonl(path: Path) -> list[dict]:
    """The rows of a JSONL file; a last line that was cut off is left out."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
