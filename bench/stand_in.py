"""An engine and a reference that only sleep, as long as a GPU of a given speed would take (bench/scale.py)."""

import time
from collections import deque

import numpy as np

from runtime.engine import Answer, Engine


class StandIn(Engine):
    """Answers of four tokens, group after group, at `rate` per second; the host's own work overlaps with the sleep."""

    def __init__(self, rate: float, seed: int) -> None:
        self.rate, self.rng, self.waiting, self.next = rate, np.random.default_rng(seed), deque(), 0.0
        self.version = 0

    @property
    def in_flight(self) -> int:
        return sum(n for _, n in self.waiting)

    def add(self, key: int, prompt: np.ndarray, n: int, greedy: bool = False) -> None:
        self.waiting.append((key, n))

    def load_weights(self, named_tensors, version: int | None = None) -> None:
        self.version = self.version + 1 if version is None else version

    def step(self) -> list[tuple[int, list[Answer]]]:
        key, n = self.waiting.popleft()
        now = time.time()
        self.next = max(self.next, now - n / self.rate) + n / self.rate
        time.sleep(max(0.0, self.next - now))
        tokens = self.rng.integers(2, 12, size=(n, 4), dtype=np.int32)
        return [
            (key, [Answer(row.copy(), np.full(4, -1.0, np.float32), "stop", *(2 * [self.version])) for row in tokens])
        ]


def log_ref(searcher, pairs: list) -> list[float]:
    """In place of Searcher._log_ref: the engine's time includes it."""
    return [-4.0] * len(pairs)
