"""A clock and an engine for tests of schedules: real searchers, syncs and buffers, without time, models or chance."""

import heapq
import itertools
import queue
import threading
from types import SimpleNamespace

import numpy as np
import torch

from runtime.engine import Answer, Engine
from searcher import Searcher


class FakeTime:
    """Takes the place of the modules `time`, `threading` and `queue`. Time passes only when everybody sleeps.

    One thread runs at a time, until it sleeps; then the one that is due next. So a schedule is the same every time.
    """

    def __init__(self, limit: float) -> None:
        self.now, self.limit = 0.0, limit  # seconds
        self.errors: list[BaseException] = []
        self._due: list = []  # heap of (wake time, tie-breaker, event)
        self._order = itertools.count()
        self._threads: list[threading.Thread] = []
        self.Queue, self.Empty, self.Full = lambda maxsize: FakeQueue(self, maxsize), queue.Empty, queue.Full

    def time(self) -> float:
        return self.now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        if self.errors or self.now > self.limit:
            raise TimeoutError(f"somebody else failed, or nothing came in {self.limit} s of fake time")
        event = self._wait_until(self.now + seconds)
        self._wake_next()
        event.wait()

    def _wait_until(self, when: float) -> threading.Event:
        event = threading.Event()
        heapq.heappush(self._due, (when, next(self._order), event))
        return event

    def _wake_next(self) -> None:
        if self._due:
            self.now, _, event = heapq.heappop(self._due)
            event.set()

    def Thread(self, target, args=(), **_):  # noqa: N802 - the name in `threading`
        turn = self._wait_until(self.now)

        def body() -> None:
            turn.wait()
            try:
                target(*args)
            except BaseException as error:
                self.errors.append(error)
            finally:
                self._wake_next()

        self._threads.append(threading.Thread(target=body, daemon=True))
        return self._threads[-1]

    def run(self, *targets) -> None:
        """Run functions as threads until all of them, and those that they start, have ended; raises what they raise."""
        for target in targets:
            self.Thread(target).start()
        self._wake_next()
        for thread in self._threads:  # grows while it is read
            thread.join()
        if self.errors:
            raise self.errors[0]


class FakeQueue:
    """queue.Queue in fake time."""

    def __init__(self, clock: FakeTime, maxsize: int) -> None:
        self.clock, self.maxsize, self.items = clock, maxsize, []

    def empty(self) -> bool:
        return not self.items

    def _poll(self, ready, timeout: float, error: type[Exception]) -> None:
        end = self.clock.now + timeout
        while not ready():
            if self.clock.now >= end:
                raise error
            self.clock.sleep(0.001)

    def get(self, timeout: float):
        self._poll(lambda: self.items, timeout, queue.Empty)
        return self.items.pop(0)

    def put(self, item, timeout: float) -> None:
        self._poll(lambda: len(self.items) < self.maxsize, timeout, queue.Full)
        self.items.append(item)


class FakeEngine(Engine):
    """Writes a token a step for each running answer; a step takes as long as `seconds()` says.

    Its weights are one number, which must be their version.
    """

    def __init__(self, clock: FakeTime, slots: int, rng, longest: int, seconds) -> None:
        self.clock, self.slots, self.rng, self.longest, self.seconds = clock, slots, rng, longest, seconds
        self.version = 0
        self.running: list[SimpleNamespace] = []  # answers, the first `slots` of them at work
        self.groups: dict[int, list] = {}

    @property
    def in_flight(self) -> int:
        return len(self.running)

    def add(self, key: int, prompt: np.ndarray, n: int, greedy: bool = False) -> None:
        lengths = self.rng.integers(1, self.longest + 1, n)
        answers = [SimpleNamespace(length=int(length), versions=[], key=key) for length in lengths]
        self.groups[key] = answers
        self.running += answers

    def load_weights(self, named_tensors, version=None) -> None:
        ((_, value),) = named_tensors
        assert int(value) == version > self.version
        self.version = version

    def step(self):
        if self.running:
            self.clock.sleep(self.seconds())
        for answer in self.running[: self.slots]:
            answer.versions.append(self.version)
        self.running = [a for a in self.running if len(a.versions) < a.length]
        done = [key for key, group in self.groups.items() if all(len(a.versions) == a.length for a in group)]
        return [(key, [self._answer(a) for a in self.groups.pop(key)]) for key in done]

    def _answer(self, a) -> Answer:
        tokens, log_mu = np.zeros(a.length, np.int32), np.array(a.versions, np.float32)
        return Answer(tokens, log_mu, "stop", a.versions[0], a.versions[-1])


class NoCheck:
    """Takes the place of runtime/checks.py's SamplerCheck."""

    alarm = SimpleNamespace(largest=None)

    def forget(self) -> None:
        pass

    def pulled(self, version, named_tensors) -> None:
        pass

    def __call__(self, trajectories) -> None:
        pass


class FakeSearcher(Searcher):
    """A searcher without a reference model; log_mu of its answers is the version that wrote each token."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.check = NoCheck()

    def _log_ref(self, pairs) -> list[float]:
        return [0.0 for _ in pairs]


class FakeTask:
    """Tokenizer and task in one."""

    def __init__(self, prompts: int) -> None:
        self.train = [f"{i}=" for i in range(prompts)]

    def encode(self, prompts: list[str]) -> list[np.ndarray]:
        return [np.array([1, 2], np.int32) for _ in prompts]

    def decode(self, answers) -> list[str]:
        return ["" for _ in answers]

    def reward(self, prompt: str, answer: str) -> float:
        return 1.0


def weights_of(version: int) -> list[tuple[str, torch.Tensor]]:
    return [("version", torch.tensor([float(version)]))]
