"""The three ways to synchronise, played event by event on a clock that jumps: no process, no waiting, no noise.

Trainer and searchers are generators. Each yields its next task with its (fake) seconds, or a condition to wait for.
`FakeClock` puts these events in order and keeps spans like runtime/metrics.py's Clock. The buffer, its draws, the replay
ratio and the order of prompts are the project's own functions. Only the pauses are written anew, in 70 lines: the loops
of sync.py wait with threads and sleeps, which a generator can't play (tests/test_schedules.py plays them in fake time).

Departures from the real job: a searcher writes one group at a time (a real one has many in flight), reward and
log pi_ref take no time, and the next batch is not fetched ahead. Here, `onpolicy` writes on all N + 1 devices and
trains on one of them; `--sync onpolicy` is one process.
"""

import heapq
import itertools
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace

import numpy as np

from buffer import ReplayBuffer, Trajectory
from runtime.metrics import trace_events
from runtime.prompts import prompt_stream
from sync import may_update

Process = Generator[tuple[str, float | Callable[[], bool]], None, None]


class FakeClock:
    """Runs generators in the order of fake time. Each yields (what, seconds), or (what, a condition to wait for)."""

    def __init__(self) -> None:
        self.now = 0.0
        self.spans: dict[str, list[tuple[str, float, float]]] = {}  # process -> (name, start, end), fake seconds
        self._events: list[tuple] = []  # (when, tie-breaker, process, what, since, generator)
        self._waiting: list[tuple] = []  # (process, what, since, condition, generator)
        self._ended: set[str] = set()
        self._count = itertools.count()

    def run(self, processes: dict[str, Process], until: str = "trainer") -> None:
        """Play until the process `until` ends; the spans of the others are cut off there.

        Raises:
            RuntimeError: when everyone waits for everyone.
        """
        self.spans = {name: [] for name in processes}
        for name, process in processes.items():
            self._resume(name, process)
        while until not in self._ended:
            if self._wake():
                continue
            if not self._events:
                raise RuntimeError(f"at {self.now} s everyone waits: {[(w[0], w[1]) for w in self._waiting]}")
            self.now, _, name, what, since, process = heapq.heappop(self._events)
            self._note(name, what, since)
            self._resume(name, process)
        for _, _, name, what, since, _ in self._events:
            self._note(name, what, since)
        for name, what, since, _, _ in self._waiting:
            self._note(name, what, since)

    def _resume(self, name: str, process: Process) -> None:
        try:
            what, how_long = next(process)
        except StopIteration:
            self._ended.add(name)
            return
        if callable(how_long):
            self._waiting.append((name, what, self.now, how_long, process))
        else:
            heapq.heappush(self._events, (self.now + how_long, next(self._count), name, what, self.now, process))

    def _wake(self) -> bool:
        """Resume the first process whose condition holds."""
        for i, (name, what, since, condition, process) in enumerate(self._waiting):
            if condition():
                del self._waiting[i]
                self._note(name, what, since)
                self._resume(name, process)
                return True
        return False

    def _note(self, name: str, what: str, since: float) -> None:
        if self.now > since:
            self.spans[name].append((what, since, self.now))


@dataclass(frozen=True)
class Setting:
    """The processes, their rule, and the seconds of each task."""

    sync: str = "eager"  # eager, barrier, onpolicy
    searchers: int = 3  # N
    k: int = 1  # trainer updates between publications
    updates: int = 20
    prompts: int = 16  # in all
    prompts_per_batch: int = 8  # P
    answers: int = 8  # K, in a group
    generate: float = 1.0  # mean seconds of a searcher for a group
    spread: float = 0.5  # of this time: standard deviation of its logarithm; 0: always the same
    train: float = 2.0  # seconds of an update
    transfer: float = 0.1  # seconds to publish weights, and again to load them
    recency_prob: float = 0.75  # m
    replay_ratio: float = 1.0  # most trajectories trained per trajectory written
    seed: int = 0

    @property
    def batch_size(self) -> int:
        """Trajectories of an update."""
        return self.prompts_per_batch * self.answers

    @property
    def limit(self) -> float:
        """Seconds of an update when neither side ever waits: the longer of writing a batch and training on it."""
        writing = self.prompts_per_batch * self.generate / self.searchers / self.replay_ratio
        return max(writing, self.train)


@dataclass
class Update:
    """One update of the trainer, like a row of metrics.jsonl."""

    step: int
    start: float
    end: float
    ages: list[int]  # step - policy_version of each trajectory: right, by the weights that wrote it
    stamped: list[int]  # step - the trainer's count of updates when it was finished: wrong
    metrics: dict[str, float]


@dataclass
class Story:
    """The result of a play."""

    setting: Setting
    spans: dict[str, list[tuple[str, float, float]]]
    updates: list[Update]
    written: int  # trajectories
    seconds: float

    def idle(self, process: str) -> float:
        """Share of the time that a process waited, 0 to 1."""
        return sum(end - start for what, start, end in self.spans[process] if what.startswith("wait")) / self.seconds

    def idle_searchers(self) -> float:
        """The same, mean over the searchers."""
        return float(np.mean([self.idle(name) for name in self.spans if name != "trainer"]))

    @property
    def rate(self) -> float:
        """Trajectories trained per (fake) second."""
        return len(self.updates) * self.setting.batch_size / self.seconds

    def trace(self) -> list[dict]:
        """The spans as events of a Chrome trace, as in a run's timeline.json."""
        return trace_events({name: [(*span, 0) for span in spans] for name, spans in self.spans.items()})


class Nothing:
    """A world without learning: for questions of time alone."""

    def write(self, prompt: int, version: int, k: int) -> list[dict]:
        one = np.zeros(1, np.int32)
        answer = {"prompt": one, "response": one, "finish_reason": "stop", "reward": 0.0, "log_ref": 0.0}
        return [answer | {"log_mu": np.zeros(1, np.float32)}] * k

    def learn(self, groups: list[list[Trajectory]]) -> dict[str, float]:
        return {}

    def publish(self, version: int) -> None:
        pass


@dataclass
class _Play:
    """The shared state of trainer and searchers, and their loops for each mode."""

    setting: Setting
    world: object
    clock: FakeClock = field(default_factory=FakeClock)
    updates: list[Update] = field(default_factory=list)
    published: int = 0  # newest version
    written: int = 0  # trajectories
    wanted: int = 0  # barrier: syncs called by the trainer
    left: int = 0  # onpolicy: groups that nobody has begun to write
    writing: int = 0  # onpolicy: groups being written

    def __post_init__(self) -> None:
        s = self.setting
        self.arrived = [0] * s.searchers  # barrier: syncs joined by each searcher
        self.stamps: dict[tuple, int] = {}  # uid -> the trainer's count of updates when the answer was finished
        self.latencies = [np.random.default_rng([s.seed, i]) for i in range(s.searchers + 1)]  # the last: the trainer's
        self.streams = [prompt_stream(s.prompts, s.seed, i, s.searchers) for i in range(s.searchers)]
        self.stream = prompt_stream(s.prompts, s.seed, 0, 1)  # onpolicy: one, shared by all
        self.buffer = self._empty(0)

    def _empty(self, seed: int) -> ReplayBuffer:
        recent = 2 * self.setting.prompts_per_batch if self.setting.sync == "eager" else None
        return ReplayBuffer(100_000, 100_000, recent, seed=self.setting.seed + seed)

    def _seconds(self, i: int) -> float:
        """Seconds of writer i for its next group: log-normal with the setting's mean."""
        s = self.setting
        return s.generate * float(np.exp(s.spread * self.latencies[i].standard_normal() - s.spread**2 / 2))

    def _group(self, i: int, prompt: int, version: int) -> list[Trajectory]:
        """A finished group, stamped with the weights that wrote it (and, for comparison, by the trainer's clock)."""
        answers = self.world.write(prompt, version, self.setting.answers)
        uids = [(i, 0, self.written + j) for j in range(len(answers))]
        self.written += len(answers)
        self.stamps |= dict.fromkeys(uids, len(self.updates))
        known = {"prompt_id": prompt, "policy_version": version, "version_last": version, "searcher": i}
        return [Trajectory(uid=uid, **known, **answer) for uid, answer in zip(uids, answers, strict=True)]

    def _ready(self) -> bool:
        """Whether a batch may be drawn: enough prompts, and the replay ratio holds (the first batch is free)."""
        s = self.setting
        enough = may_update(s, self.written, len(self.updates) * s.batch_size)
        return enough and self.buffer.stats()["prompts"] >= s.prompts_per_batch

    def _learn(self) -> Process:
        """Draw, update, and publish every k updates."""
        s, step, start = self.setting, len(self.updates), self.clock.now
        groups = self.buffer.sample(s.prompts_per_batch, s.answers, s.recency_prob)
        yield "forward, backward", s.train
        flat = [t for group in groups for t in group]
        ages = [step - t.policy_version for t in flat]
        stamped = [step - self.stamps[t.uid] for t in flat]
        self.updates.append(Update(step, start, self.clock.now, ages, stamped, self.world.learn(groups)))
        if (step + 1) % s.k == 0:
            yield "publish", s.transfer
            self.world.publish(step + 1)
            self.published = step + 1

    # --- eager: nobody pauses -------------------------------------------------------------------------------------

    def eager_trainer(self) -> Process:
        for _ in range(self.setting.updates):
            yield "wait for data", self._ready
            yield from self._learn()

    def eager_searcher(self, i: int) -> Process:
        version = 0
        while True:
            if self.published > version:
                version = self.published
                yield "pull weights", self.setting.transfer
            prompt = next(self.streams[i])[1]
            yield "generate", self._seconds(i)
            self.buffer.add(self._group(i, prompt, version))

    # --- barrier: every k updates all pause, merge, take new weights ----------------------------------------------

    def barrier_trainer(self) -> Process:
        for step in range(self.setting.updates):
            if step % self.setting.k == 0:
                yield from self._sync()
            while not self._ready():
                yield from self._sync()  # too few answers: let the searchers bring more
            yield from self._learn()

    def _sync(self) -> Process:
        self.buffer.start_pool()  # "the most recent data" is this sync's
        self.wanted += 1
        yield "wait for sync", self._all_arrived(self.wanted)

    def _all_arrived(self, sync: int) -> Callable[[], bool]:
        return lambda: min(self.arrived) >= sync

    def barrier_searcher(self, i: int) -> Process:
        version, d_local = 0, []
        while True:
            prompt = next(self.streams[i])[1]
            yield "generate", self._seconds(i)
            d_local += self._group(i, prompt, version)
            if self.wanted > self.arrived[i]:
                self.buffer.add(d_local)
                d_local = []
                if self.published > version:
                    version = self.published
                    yield "pull weights", self.setting.transfer
                self.arrived[i] += 1
                yield "wait for sync", self._all_arrived(self.arrived[i])

    # --- onpolicy: write a batch with the newest weights, learn from it once, forget it ---------------------------

    def onpolicy_trainer(self) -> Process:
        s = self.setting
        for step in range(s.updates):
            self.buffer = self._empty(step)
            while self.buffer.stats()["prompts"] < s.prompts_per_batch:
                self.left = s.prompts_per_batch
                yield from self._write_some(s.searchers, step)
                yield "wait for the slowest", self._all_written
            yield from self._learn()

    def onpolicy_searcher(self, i: int) -> Process:
        version = 0
        while True:
            yield "wait for the trainer", self._work_left
            if len(self.updates) > version:
                version = len(self.updates)
                yield "pull weights", self.setting.transfer
            yield from self._write_some(i, version)

    def _write_some(self, i: int, version: int) -> Process:
        while self.left:
            self.left -= 1
            self.writing += 1
            prompt = next(self.stream)[1]
            yield "generate", self._seconds(i)
            self.buffer.add(self._group(i, prompt, version))
            self.writing -= 1

    def _work_left(self) -> bool:
        return self.left > 0

    def _all_written(self) -> bool:
        return not self.left and not self.writing


def play_all(setting: Setting, world: Callable = Nothing, options: dict | None = None, **changes) -> dict[str, Story]:
    """The same setting, with `changes`, in all three modes, each in a new world; barrier syncs every 2 updates."""
    out = {}
    for sync, k in (("onpolicy", 1), ("barrier", 2), ("eager", 1)):
        out[sync] = play(replace(setting, sync=sync, k=k, **changes), world(**(options or {})))
    return out


def play(setting: Setting, world=None) -> Story:
    """Play one setting to its end.

    Args:
        world: has `write`, `learn` and `publish`, like World in notebooks/toy.py; None: nothing is learnt.

    Raises:
        ValueError: for a mode that does not exist, or a batch of more prompts than there are.
    """
    if setting.sync not in ("eager", "barrier", "onpolicy"):
        raise ValueError(f"no mode {setting.sync!r}: eager, barrier or onpolicy")
    if setting.sync == "onpolicy" and setting.k != 1:
        raise ValueError(f"onpolicy publishes after every update, k = {setting.k} is none")
    if setting.prompts < setting.prompts_per_batch:
        raise ValueError(f"a batch of {setting.prompts_per_batch} prompts, but there are {setting.prompts}")
    run = _Play(setting, world or Nothing())
    processes: dict[str, Process] = {"trainer": getattr(run, f"{setting.sync}_trainer")()}
    for i in range(setting.searchers):
        processes[f"searcher {i}"] = getattr(run, f"{setting.sync}_searcher")(i)
    run.clock.run(processes)
    return Story(setting, run.clock.spans, run.updates, run.written, run.clock.now)
