"""The display of a run in the terminal: one table with a row per evaluation and a live last row.

When the output is not a terminal (a log file, CI), the same rows are printed as lines. The log file has them in both
cases. A narrow terminal shows fewer columns, never a part of a value.
"""

import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Iterable

from config import Config
from runtime.files import bookkeeping
from runtime.streams import can_show

COLUMNS = {  # heading -> width, and which columns stay longest where there is little room
    "update": (6, 0),
    "seconds": (7, 3),
    "β²·loss": (8, 5),
    "reward": (6, 1),
    "held-out": (8, 2),
    "staleness": (9, 6),
    "traj/s": (6, 7),
    "trainer busy": (12, 8),
    "searchers busy": (14, 9),
    "left": (6, 4),
}
LISTED = 4  # searchers whose shares are listed; of more, the range
log = logging.getLogger("table")  # run.log has its records, the terminal has not


class Screen:
    """Progress of a run. Call `say` for events, `row` for each update, `tick` often, `close` at the end.

    An error in the display is reported and goes no further.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.accuracy: float | None = None
        self._rows: list[list[str]] = []  # at evaluations
        self._now: list[str] | None = None
        self._previous = (0.0, 0)  # seconds, trained: for the rate
        self._rate = math.nan
        self._drawn = self._printed = 0.0
        self._live = None
        self._started = time.time()
        self._headings = [h if can_show(h) else "imbalance" for h in COLUMNS]
        self._is_terminal = sys.stdout.isatty()
        self._redraws = self._is_terminal and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")

    def say(self, text: str) -> None:
        """Show an event, in words."""
        with bookkeeping("the display"):
            if self._live:
                self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                print(text, flush=True)

    def row(self, row: dict) -> None:
        """Show an update's metrics."""
        with bookkeeping("the display"):
            self._row(row)

    def _row(self, row: dict) -> None:
        seconds = row["seconds_after"]
        if seconds - self._previous[0] > 0.5:
            self._rate = (row["trained"] - self._previous[1]) / (seconds - self._previous[0])
            self._previous = (seconds, row["trained"])
        evaluated = "accuracy" in row
        self.accuracy = row.get("accuracy", self.accuracy)
        self._now = [
            str(row["step"] + 1),
            f"{seconds:.1f}",
            f"{row['imbalance']:.4f}",
            f"{row['reward']:.3f}",
            f"{self.accuracy:.3f}" if evaluated else "",
            f"{row['staleness']:.1f}",
            "-" if math.isnan(self._rate) else f"{self._rate:.0f}",
            share(row["busy_trainer"]),
            shares(row["busy_searchers"]),
            self._left(row["step"] + 1, seconds),
        ]
        if evaluated:
            self._rows.append(self._now)
        if evaluated or time.time() - self._printed > 5:
            self._print(first=not self._printed)
            self._printed = time.time()

    def _print(self, first: bool) -> None:
        """Put the newest row into the log file, and on an output that can't be redrawn."""
        for line in lines([list(COLUMNS), self._now])[0 if first else -1 :]:
            log.info("%s", line)
        if not self._redraws:
            room = shutil.get_terminal_size().columns if self._is_terminal else 0
            for line in lines([self._headings, self._now], room)[0 if first else -1 :]:
                print(line, flush=True)

    def _left(self, step: int, seconds: float) -> str:
        left = seconds / step * (self.config.steps - step)
        if self.config.max_seconds:
            left = min(left, self.config.max_seconds - seconds)
        return f"{max(0, left):.0f} s"

    def tick(self) -> None:
        """Redraw, a few times per second: the seconds so far, and from the first update on the table."""
        if self._redraws and time.time() - self._drawn >= 0.25:
            self._drawn = time.time()
            with bookkeeping("the display"):
                self._draw()

    def _draw(self) -> None:
        from rich.live import Live
        from rich.text import Text

        if self._live is None:
            live = Live(auto_refresh=False)
            live.start()
            self._live = live
        size = self._live.console.size
        if self._now is None:
            table = Text(f"... {time.time() - self._started:.0f} s")
        else:
            rows = [*self._rows, self._now] if self._now not in self._rows[-1:] else self._rows
            rows = rows[-min(16, max(1, size.height - 4)) :]
            shown = lines([self._headings, *rows], size.width)
            heading, values = shown[: -len(rows)], shown[-len(rows) :]
            table = Text.assemble(("\n".join(heading), "bold"), "\n", "\n".join(values))
        table.no_wrap, table.overflow = True, "crop"
        self._live.update(table, refresh=True)

    def close(self) -> None:
        """Draw the last table, which stays on the screen."""
        if self._live:
            with bookkeeping("the display"):
                self._draw()
            with bookkeeping("the display"):
                self._live.stop()
            self._live = None


def share(busy: float | None) -> str:
    """A share of the time, 0 to 1; "-" where it was not measured."""
    return "-" if busy is None or math.isnan(busy) else f"{busy:.0%}"


def shares(busy: list[float | None]) -> str:
    """The searchers' shares; those of many as a range."""
    if len(busy) <= LISTED:
        return " ".join(map(share, busy)) or "-"
    known = [b for b in busy if b is not None and not math.isnan(b)]
    return f"{share(min(known))} to {share(max(known))}" if known else "-"


def lines(rows: list[list[str]], room: int = 0) -> list[str]:
    """A table as lines, the headings first: all columns, or as many whole ones as `room` characters have place for.

    Where there is no place for all, the headings take two lines.
    """
    heading, *values = rows
    if not room or sum(_widths(rows)) + 2 * len(heading) - 2 <= room:
        return _joined(rows, _widths(rows) if room else [w for w, _ in COLUMNS.values()], range(len(heading)), 2)
    upper, _, lower = zip(*(h.rpartition(" ") for h in heading), strict=True)
    rows = [[*upper], [*lower], *values]
    widths, shown, used = _widths(rows), [], -1
    for i in sorted(range(len(widths)), key=[rank for _, rank in COLUMNS.values()].__getitem__):
        used += 1 + widths[i]
        if used > room and shown:
            break
        shown.append(i)
    table = _joined(rows, widths, sorted(shown), 1)
    return table if table[0].strip() else table[1:]


def _widths(rows: list[list[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _joined(rows: list[list[str]], widths: list[int], columns: Iterable[int], between: int) -> list[str]:
    return [(" " * between).join(row[i].rjust(widths[i]) for i in columns) for row in rows]
