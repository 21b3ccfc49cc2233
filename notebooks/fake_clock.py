"""The three ways to synchronise, played event by event on a clock that jumps: no process, no waiting, no noise.

Trainer and searchers are generators. Each yields its next task with its (fake) seconds, or a condition to wait for.
`FakeClock` puts these events in order and keeps spans like runtime/metrics.py's Clock. The buffer, its draws, the replay
ratio, a searcher's share of a sync and the order of prompts are the project's own functions. Only the pauses are written
anew: the loops of sync.py wait with threads and sleeps, which a generator can't play (tests/test_schedules.py plays them
in fake time).

Departures from the real job:

- `onpolicy` has two forms. `--sync onpolicy` is one process in which all devices write and train together, and nobody
  waits: set `together` to their speed as a multiple of one device's. With `together=0`, the default, it is what textbooks
  draw: N + 1 devices write the batch, and one of them trains on it while the others wait.
- Groups in flight cost `generate` seconds each, as if a searcher wrote one after the other. So the engine is full from
  the first second, and none of it idles while a round's last answers end (a real engine's does).
- All tokens of an answer come from the weights that began it; in a real `eager` run the weights change under way.
- Reward, log pi_ref, drawing and handing over take no time, processes do not slow each other down, and the next batch
  is not fetched ahead.
"""

import heapq
import itertools
import json
from collections import Counter, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import numpy as np

from buffer import ReplayBuffer, Trajectory
from runtime.metrics import trace_events
from runtime.prompts import prompt_stream
from sync import brings_enough, may_update

RESULTS = Path(__file__).resolve().parent.parent / "bench" / "results"
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
    pull: float | None = None  # seconds to load them, where they differ from those to publish them
    in_flight: int = 1  # groups that a searcher has begun; in barrier it looks for a sync when all of them are finished
    together: float = 0.0  # onpolicy: one process, so many times as fast as one device; 0: all write, one trains
    buffer_capacity: int = 100_000  # trajectories
    recency_prob: float = 0.75  # m
    replay_ratio: float = 1.0  # most trajectories trained per trajectory written
    seed: int = 0

    @property
    def batch_size(self) -> int:
        """Trajectories of an update."""
        return self.prompts_per_batch * self.answers

    @property
    def loading(self) -> float:
        """Seconds to load weights."""
        return self.transfer if self.pull is None else self.pull

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
    uses: Counter  # uid -> how often it was trained on, where it was
    seconds: float

    def idle(self, process: str) -> float:
        """Share of the time that a process waited, 0 to 1."""
        return sum(end - start for what, start, end in self.spans[process] if what.startswith("wait")) / self.seconds

    def idle_searchers(self) -> float:
        """The same, mean over the searchers; 0 without any."""
        waits = [self.idle(name) for name in self.spans if name != "trainer"]
        return float(np.mean(waits)) if waits else 0.0

    @property
    def never(self) -> float:
        """Share of the answers written that are never trained on, 0 to 1."""
        return 1 - len(self.uses) / self.written

    @property
    def reuse(self) -> float:
        """How often an answer is trained on, if it is trained on at all: 1 or more."""
        return self.uses.total() / len(self.uses)

    @property
    def lost(self) -> float:
        """Share of the searchers' time without a result, 0 to 1: they wait, or write answers that are never trained on."""
        idle = self.idle_searchers()
        return idle + (1 - idle) * self.never

    @property
    def written_per_trained(self) -> float:
        """Answers written per answer trained, where one that is trained again counts each time."""
        return self.written / (len(self.updates) * self.setting.batch_size)

    def age(self, skip: int = 0) -> float:
        """Mean age of the answers trained on, in updates, without the first `skip` updates."""
        return float(np.mean([u.ages for u in self.updates[skip:]]))

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
    reported: int = 0  # of these, those that the replay ratio counts: a searcher reports when it can hand over
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
        self.uses: Counter = Counter()
        self.buffer = self._empty(0)

    def _empty(self, seed: int) -> ReplayBuffer:
        recent = 2 * self.setting.prompts_per_batch if self.setting.sync == "eager" else None
        capacity = self.setting.buffer_capacity
        return ReplayBuffer(capacity, capacity, recent, seed=self.setting.seed + seed)

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
        enough = may_update(s, self.reported, len(self.updates) * s.batch_size)
        return enough and self.buffer.stats()["prompts"] >= s.prompts_per_batch

    def _learn(self) -> Process:
        """Draw, update, and publish every k updates (one process has nobody to publish for)."""
        s, step, start = self.setting, len(self.updates), self.clock.now
        groups = self.buffer.sample(s.prompts_per_batch, s.answers, s.recency_prob)
        yield "forward, backward", s.train / (s.together or 1)
        flat = [t for group in groups for t in group]
        self.uses.update(t.uid for t in flat)
        ages = [step - t.policy_version for t in flat]
        stamped = [step - self.stamps[t.uid] for t in flat]
        self.updates.append(Update(step, start, self.clock.now, ages, stamped, self.world.learn(groups)))
        if (step + 1) % s.k == 0:
            if not s.together:
                yield "publish", s.transfer
            self.world.publish(step + 1)
            self.published = step + 1

    # --- eager: nobody pauses -------------------------------------------------------------------------------------

    def eager_trainer(self) -> Process:
        for _ in range(self.setting.updates):
            yield "wait for data", self._ready
            yield from self._learn()

    def eager_searcher(self, i: int) -> Process:
        version, begun = 0, deque()
        while True:
            if self.published > version:
                version = self.published
                yield "pull weights", self.setting.loading
            while len(begun) < self.setting.in_flight:
                begun.append((next(self.streams[i])[1], version))
            yield "generate", self._seconds(i)
            self.buffer.add(self._group(i, *begun.popleft()))
            self.reported += self.setting.answers

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
            for _ in range(self.setting.in_flight):
                prompt = next(self.streams[i])[1]
                yield "generate", self._seconds(i)
                d_local += self._group(i, prompt, version)
            self.reported += self.setting.in_flight * self.setting.answers
            if self.wanted > self.arrived[i] and brings_enough(d_local, self.setting, i):
                self.buffer.add(d_local)
                d_local = []
                if self.published > version:
                    version = self.published
                    yield "pull weights", self.setting.loading
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
                yield "pull weights", self.setting.loading
            yield from self._write_some(i, version)

    def _write_some(self, i: int, version: int) -> Process:
        while self.left:
            self.left -= 1
            self.writing += 1
            prompt = next(self.stream)[1]
            yield "generate", self._seconds(i)
            self.buffer.add(self._group(i, prompt, version))
            self.writing -= 1

    def onpolicy_alone(self) -> Process:
        """One process that does everything in turn."""
        s = self.setting
        for step in range(s.updates):
            if step:
                yield "pull weights", s.loading
            self.buffer = self._empty(step)
            while self.buffer.stats()["prompts"] < s.prompts_per_batch:
                for _ in range(s.prompts_per_batch):
                    prompt = next(self.stream)[1]
                    yield "generate", self._seconds(0) / s.together
                    self.buffer.add(self._group(0, prompt, step))
            yield from self._learn()

    def _work_left(self) -> bool:
        return self.left > 0

    def _all_written(self) -> bool:
        return not self.left and not self.writing


def play_all(
    setting: Setting, world: Callable = Nothing, options: dict | None = None, k: int = 4, **changes
) -> dict[str, Story]:
    """The same setting, with `changes`, in all three modes, each in a new world; barrier syncs every k updates."""
    out = {}
    for sync, every in (("onpolicy", 1), ("barrier", k), ("eager", 1)):
        out[sync] = play(replace(setting, sync=sync, k=every, **changes), world(**(options or {})))
    return out


def play(setting: Setting, world=None) -> Story:
    """Play one setting to its end.

    Args:
        world: has `write`, `learn` and `publish`, like World in notebooks/toy.py; None: nothing is learnt.

    Raises:
        ValueError: for a mode that does not exist, fields that contradict each other, or a batch of more prompts than
            there are.
    """
    if setting.sync not in ("eager", "barrier", "onpolicy"):
        raise ValueError(f"no mode {setting.sync!r}: eager, barrier or onpolicy")
    if setting.sync == "onpolicy" and setting.k != 1:
        raise ValueError(f"onpolicy publishes after every update, k = {setting.k} is none")
    if setting.together and setting.sync != "onpolicy":
        raise ValueError(f"only onpolicy can do everything together, not {setting.sync}")
    if setting.prompts < setting.prompts_per_batch:
        raise ValueError(f"a batch of {setting.prompts_per_batch} prompts, but there are {setting.prompts}")
    run = _Play(setting, world or Nothing())
    if setting.sync == "onpolicy" and setting.together:
        processes: dict[str, Process] = {"trainer": run.onpolicy_alone()}
    else:
        processes = {"trainer": getattr(run, f"{setting.sync}_trainer")()}
        for i in range(setting.searchers):
            processes[f"searcher {i}"] = getattr(run, f"{setting.sync}_searcher")(i)
    run.clock.run(processes)
    return Story(setting, run.clock.spans, run.updates, run.written, run.uses, run.clock.now)


# --- many stories, and other kinds of time --------------------------------------------------------------------------


def by_second(stories: list[Story], metric: str, points: int = 200) -> tuple[np.ndarray, list[np.ndarray]]:
    """A metric of the updates over fake seconds: times [points], and values [stories, points] between the updates.

    The times go from the first update of all to the end of the story that ends first. `metric` is "age" (the mean over
    a batch), or one of those that the world's `learn` returns.
    """
    ends = [[u.end for u in story.updates] for story in stories]
    times = np.linspace(max(e[0] for e in ends), min(e[-1] for e in ends), points)
    return times, [np.interp(times, e, by_update(s, metric)) for e, s in zip(ends, stories, strict=True)]


def by_update(story: Story, metric: str) -> list[float]:
    """The same over updates: [updates]."""
    return [float(np.mean(u.ages)) if metric == "age" else u.metrics[metric] for u in story.updates]


def learn_without_a_clock(world, setting: Setting, age: int = 0, uses: int = 1) -> list[dict[str, float]]:
    """The metrics of updates in which nothing but age and reuse is different.

    Args:
        age: updates between the weights that write a batch and the first update that trains on it.
        uses: how many updates in a row train on the same batch.
    """
    stream, notes, batch = prompt_stream(setting.prompts, setting.seed, 0, 1), [], []
    for step in range(setting.updates):
        if step % uses == 0:
            version = max(0, step - age)
            known = {"uid": (0, 0, step), "policy_version": version, "version_last": version, "searcher": 0}
            prompts = [next(stream)[1] for _ in range(setting.prompts_per_batch)]
            batch = [
                [Trajectory(prompt_id=p, **known, **a) for a in world.write(p, version, setting.answers)]
                for p in prompts
            ]
        notes.append(world.learn(batch))
        world.publish(step + 1)
    return notes


@dataclass(frozen=True)
class Bench:
    """A case of bench/decoupling.py, measured with real processes, and the setting that plays it.

    A trainer and one searcher; the engine keeps `in_flight` answers in flight, all of about the same length.
    """

    seconds: dict[str, float]  # of each row: median over the repeats
    over_limit: dict[str, list[float]]  # the same ÷ the limit of the repeat, for each repeat
    setting: Setting


def bench(case: str) -> Bench:
    """Read the measured seconds of a case, "balanced" or "unbalanced"; the times of the weights are bench/weights.py's."""
    found, weights = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("decoupling", "weights"))
    rows = [row for row in found["rows"] if row["case"] == case]
    names = dict.fromkeys(row["what"] for row in rows)
    seconds = {n: median(row["seconds"] for row in rows if row["what"] == n) for n in names}
    over = {n: [row["over_limit"] for row in rows if row["what"] == n] for n in names}
    small = [row for row in weights["rows"] if row["size"] == "1M"]  # about as large as the bench's model
    config, updates = found["settings"]["cases"][case], found["settings"]["updates"][case]
    prompts, answers = config["prompts_per_batch"], config["samples_per_prompt"]
    setting = Setting(
        searchers=1, updates=updates, prompts=512, prompts_per_batch=prompts, answers=answers, spread=0.0,
        generate=seconds["generation alone"] / (updates * prompts), train=seconds["training alone"] / updates,
        transfer=median(row["publish_ms"] for row in small) / 1000, pull=median(row["pull_ms"] for row in small) / 1000,
        in_flight=config["in_flight"] // answers,
    )  # fmt: skip
    return Bench(seconds, over, setting)
