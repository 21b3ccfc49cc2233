"""The display of a run in the terminal: one table with a row per evaluation and a live last row.

When the output is not a terminal (a log file, CI), the same rows are printed as lines.
"""

import sys
import time

from config import Config

COLUMNS = {  # heading -> width
    "update": 6,
    "seconds": 7,
    "β²·loss": 8,
    "reward": 6,
    "held-out": 8,
    "staleness": 9,
    "traj/s": 6,
    "trainer busy": 12,
    "searchers busy": 14,
    "left": 6,
}


class Screen:
    """Progress of a run. Call `say` for events, `row` for each update, `tick` often, `close` at the end."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.accuracy: float | None = None
        self._rows: list[list[str]] = []  # at evaluations
        self._now: list[str] | None = None
        self._previous = (0.0, 0)  # seconds, trained: for the rate
        self._rate = 0.0
        self._drawn = self._printed = 0.0
        self._live = None
        self._started = time.time()
        self._terminal = sys.stdout.isatty()

    def say(self, text: str) -> None:
        """Show an event, in words."""
        if self._live:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def row(self, row: dict) -> None:
        """Show an update's metrics."""
        seconds = row["seconds_after"]
        if seconds - self._previous[0] > 0.5:
            self._rate = (row["trained"] - self._previous[1]) / (seconds - self._previous[0])
            self._previous = (seconds, row["trained"])
        evaluated = "accuracy" in row
        self.accuracy = row.get("accuracy", self.accuracy)
        searchers = " ".join(f"{b:.0%}" for b in row["busy_searchers"]) or "-"
        self._now = [
            str(row["step"] + 1),
            f"{seconds:.1f}",
            f"{row['imbalance']:.4f}",
            f"{row['reward']:.3f}",
            f"{self.accuracy:.3f}" if evaluated else "",
            f"{row['staleness']:.1f}",
            f"{self._rate:.0f}",
            f"{row['busy_trainer']:.0%}",
            searchers,
            self._left(row["step"] + 1, seconds),
        ]
        if evaluated:
            self._rows.append(self._now)
        if not self._terminal and (evaluated or time.time() - self._printed > 5):
            if not self._printed:
                print("  ".join(h.rjust(w) for h, w in COLUMNS.items()))
            self._printed = time.time()
            print("  ".join(c.rjust(w) for c, w in zip(self._now, COLUMNS.values(), strict=True)), flush=True)

    def _left(self, step: int, seconds: float) -> str:
        left = seconds / step * (self.config.steps - step)
        if self.config.max_seconds:
            left = min(left, self.config.max_seconds - seconds)
        return f"{max(0, left):.0f} s"

    def tick(self) -> None:
        """Redraw, a few times per second: the seconds so far, and from the first update on the table."""
        if not self._terminal or time.time() - self._drawn < 0.25:
            return
        from rich.live import Live

        self._drawn = time.time()
        if self._live is None:
            self._live = Live(auto_refresh=False)
            self._live.start()
        shown = f"... {time.time() - self._started:.0f} s" if self._now is None else self._table()
        self._live.update(shown, refresh=True)

    def _table(self):
        from rich.table import Table

        table = Table(box=None, header_style="bold")
        for heading in COLUMNS:
            table.add_column(heading, justify="right")
        for row in self._rows[-15:]:
            table.add_row(*row)
        if not self._rows or self._rows[-1] is not self._now:
            table.add_row(*self._now, style="dim")
        return table

    def close(self) -> None:
        """Draw the last table, which stays on the screen."""
        if self._live:
            self._drawn = 0.0
            self.tick()
            self._live.stop()
            self._live = None
