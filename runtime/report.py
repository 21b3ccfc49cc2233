"""What a searcher reports of itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from runtime.files import JsonLines
from runtime.metrics import Board

if TYPE_CHECKING:
    from searcher import Searcher


class Report:
    """Counters of a searcher: to the notice board when it is called, to its JSONL file about once per second.

    Args:
        backlog: sync.backlog.
    """

    def __init__(
        self, searcher: Searcher, board: Board, row: int, file: JsonLines, backlog: Callable[..., float]
    ) -> None:
        self.searcher, self.board, self.row, self.file, self.backlog = searcher, board, row, file, backlog
        self.handed_over = int(board.get(row, "handed_over"))
        self._written, self._began = 0.0, False

    def __call__(self, handed_over: int) -> None:
        s, now = self.searcher, time.time()
        self.handed_over += handed_over
        if not self._began and self.board.get(Board.TRAINER, "rl_start"):
            self._began = True
            s.clock.begin()
        values = {"handed_over": self.handed_over, "version": s.version, "busy": s.clock.busy()}
        values["mismatch"] = s.check.alarm.largest or 0.0
        values |= {name: getattr(s, name) for name in s.COUNTS}
        for field, value in values.items():
            self.board.set(self.row, field, value)
        if now - self._written > 1:
            self._written = now
            seconds = {name: round(v, 3) for name, v in s.clock.seconds.items()}
            published, trained = (self.board.get(Board.TRAINER, field) for field in ("version", "trained"))
            left = self.backlog(s.config, sum(self.board.of_searchers("generated")), trained)
            pace = {"behind": published - s.version, "backlog": left}
            self.file.write({"time": now, "incarnation": s.uid[1]} | values | pace | {"seconds": seconds})
