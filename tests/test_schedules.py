"""Asynchrony in fake time: real searchers, syncs, buffer and weights under schedules that no machine would repeat."""

import multiprocessing
from types import SimpleNamespace

import numpy as np
import pytest
from fake import FakeEngine, FakeSearcher, FakeTask, FakeTime, weights_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import searcher as searcher_module
import sync
from buffer import ReplayBuffer
from config import Config
from runtime import metrics
from runtime.loading import Parts
from runtime.metrics import Board, Clock
from runtime.report import Report
from runtime.weights import SharedWeights
from sync import SEARCHER_LOOPS, BarrierBatches, EagerBatches, barrier_searcher, lead_sync

CONFIG = {"gpus": 0, "samples_per_prompt": 4, "generate_per_prompt": 4, "prompts_per_batch": 4, "recent_groups": 8}
PROMPTS = 60


class NoFile:
    def write(self, row) -> None:
        pass


class FakeRun:
    """Trainer, parent and searchers in one fake time; `ages` has the staleness of each update's answers."""

    def __init__(self, monkeypatch, config: Config, steps: int, seed: int, slow=(0.05, 0.02), longest: int = 6) -> None:
        self.config, self.steps, self.rng = config, steps, np.random.default_rng(seed)
        self.time = FakeTime(limit=600.0)
        for module in (sync, metrics, searcher_module):
            for name in ("time", "threading", "queue"):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, self.time)
        self.update_seconds, self.step_seconds = slow
        self.board = Board(multiprocessing.get_context("spawn"), config.searchers)
        pool = None if config.sync == "barrier" else config.recent_groups
        self.buffer = ReplayBuffer(config.buffer_capacity, config.per_prompt_capacity, pool, seed=seed)
        self.weights = SharedWeights.like(weights_of(0))
        self.weights.publish(weights_of(0), 0)
        self.ages: list[set[int]] = []
        self.drawn: list[int] = []  # trajectories generated when each update's batch was given out
        self.reports: list[Report] = []
        self.longest = longest

    def go(self) -> "FakeRun":
        searchers = [lambda i=i: self.search(i) for i in range(self.config.searchers)]
        self.time.run(self.train, self.parent, *searchers)
        return self

    def take(self, most: float) -> float:
        """Seconds that something takes: anything up to `most`."""
        return most * (0.1 + 0.9 * self.rng.random())

    def train(self) -> None:
        clock, make = Clock(), BarrierBatches if self.config.sync == "barrier" else EagerBatches
        child = SimpleNamespace(board=self.board, clock=clock, beat=lambda: None)
        source = make(self.buffer, self.config, child)
        try:
            for step in range(self.steps):
                batch = source.next(step)
                assert [len(group) for group in batch] == [self.config.K] * self.config.prompts_per_batch
                self.ages.append({step - t.policy_version for group in batch for t in group})
                self.drawn.append(source.generated())
                self.time.sleep(self.take(self.update_seconds))
                if (step + 1) % self.config.sync_every == 0:
                    self.weights.publish(weights_of(step + 1), step + 1)
        finally:
            self.board.set(Board.PARENT, "stop", 1)
        self.clock, self.source = clock, source

    def parent(self) -> None:
        while not self.board.stopping:
            lead_sync(self.board, self.buffer, absent=set())
            self.time.sleep(0.001)

    def search(self, i: int) -> None:
        config, task, rng = self.config, FakeTask(PROMPTS), np.random.default_rng([7, i])
        engine = FakeEngine(self.time, config.in_flight, rng, self.longest, lambda: self.take(self.step_seconds))
        one = FakeSearcher(Parts(engine, None, task, task), config, i, 0, Clock())
        self.reports.append(Report(one, self.board, Board.SEARCHERS + i, NoFile(), sync.backlog))
        SEARCHER_LOOPS[config.sync](one, self.weights, self.buffer, self.reports[-1])


def config(**options) -> Config:
    given = {"searchers": 2, "in_flight": 16} | CONFIG | options
    return Config(**given)


def test_barrier_k_2_m_1_learns_from_answers_of_age_2_and_3_only(monkeypatch):
    run = FakeRun(monkeypatch, config(sync="barrier", sync_every=2, recency_prob=1.0, replay_ratio=100.0), 20, seed=0)
    run.go()
    assert run.ages[:2] == [{0}, {1}]  # before any update there is only version 0
    assert run.ages[2:] == [{2}, {3}] * 9


@pytest.mark.parametrize("k", [1, 3, 5])
def test_barrier_ages_are_those_of_the_sync_before(monkeypatch, k):
    run = FakeRun(monkeypatch, config(sync="barrier", sync_every=k, recency_prob=1.0, replay_ratio=100.0), 4 * k, 0)
    run.go()
    assert run.ages[k:] == [{k + i} for i in range(k)] * 3


@pytest.mark.parametrize("slow", [(0.001, 0.02), (0.2, 0.001)])
@pytest.mark.parametrize(
    ("searchers", "in_flight", "k", "m"), [(1, 4, 2, 1.0), (1, 8, 1, 0.6), (3, 4, 4, 1.0), (2, 16, 2, 1.0)]
)
def test_barrier_honours_m_however_little_a_searcher_writes_at_once(monkeypatch, searchers, in_flight, k, m, slow):
    """A round of one or two groups is less than a batch of P = 4 prompts: a sync waits until there are P."""
    given = {"searchers": searchers, "in_flight": in_flight, "sync_every": k, "recency_prob": m}
    run = FakeRun(monkeypatch, config(sync="barrier", replay_ratio=2.0, **given), 6 * k, 1, slow).go()
    assert run.buffer.stats()["fell_back"] == 0
    if m == 1:
        assert max(map(max, run.ages)) <= 2 * k - 1


SCHEDULES = {
    "mode": st.sampled_from(["barrier", "eager"]),
    "k": st.integers(1, 4),
    "searchers": st.integers(1, 3),
    "in_flight": st.sampled_from([4, 10, 16]),
    "limit": st.sampled_from([None, 0, 2]),  # updates above the least staleness that can be asked for
    "inflight_updates": st.booleans(),
    "ratio": st.sampled_from([0.5, 1.0, 4.0]),
    "slow": st.sampled_from([(0.05, 0.02), (0.002, 0.02), (0.05, 0.001)]),
    "longest": st.sampled_from([1, 8]),
    "seed": st.integers(0, 10**6),
}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(**SCHEDULES)
def test_any_schedule_loses_nothing_stores_nothing_twice_and_keeps_its_limits(
    monkeypatch, mode, k, searchers, in_flight, limit, inflight_updates, ratio, slow, longest, seed
):
    oldest = 0 if limit is None else max(1, k - 1) + limit
    c = config(
        sync=mode, sync_every=k, searchers=searchers, in_flight=in_flight, max_staleness=oldest, seed=seed % 1000,
        inflight_updates=inflight_updates, replay_ratio=ratio, buffer_capacity=10**6, per_prompt_capacity=10**6,
    )  # fmt: skip
    with monkeypatch.context() as patch:
        run = FakeRun(patch, c, 10, seed, slow, longest).go()
    assert len(run.ages) == 10 and all(min(ages) >= 0 for ages in run.ages)
    if oldest:
        assert max(map(max, run.ages)) <= oldest
    size = c.prompts_per_batch * c.K
    assert all((i + 1) * size <= ratio * drawn for i, drawn in enumerate(run.drawn) if i)
    stats, handed_over = run.buffer.stats(), [report.handed_over for report in run.reports]
    assert stats["duplicates"] == stats["evicted"] == 0
    assert stats["stored"] + stats["expired"] == stats["added"] == sum(handed_over)
    for report in run.reports:
        one, index = report.searcher, report.searcher.uid[0]
        stored = [t.uid[2] for t in run.buffer.contents() if t.searcher == index]
        places = {n // c.S for n in stored}  # in the stream of prompts
        assert all(place % PROMPTS % searchers == index for place in places)
        if not oldest:  # all that it wrote
            assert sorted(stored) == sorted(place * c.S + j for place in places for j in range(c.S))
            assert len(stored) == report.handed_over
        if mode == "eager":
            assert report.handed_over == one.generated
    for t in run.buffer.contents():
        assert (t.policy_version, t.version_last) == (t.log_mu[0], t.log_mu[-1])
        if mode == "barrier" or not inflight_updates:
            assert t.policy_version == t.version_last


def test_in_flight_updates_do_cross_running_answers(monkeypatch):
    """What the test above would not see: that running answers are ever written by two versions."""
    run = FakeRun(monkeypatch, config(), 20, seed=3, slow=(0.02, 0.01), longest=20).go()
    assert any(t.policy_version < t.version_last for t in run.buffer.contents())


def test_a_starved_trainer_says_what_it_waited_for(monkeypatch):
    run = FakeRun(monkeypatch, config(replay_ratio=1.0), 12, seed=0, slow=(0.0001, 0.1)).go()
    waits = {name: s for name, s in run.clock.seconds.items() if name.startswith("wait")}
    assert waits["wait for answers"] > 0.5 and set(waits) <= {
        "wait for answers",
        "wait for prompts",
        "wait for prefetch",
    }
    run = FakeRun(monkeypatch, config(replay_ratio=100.0, max_staleness=1), 12, 0, slow=(0.0001, 0.1)).go()
    assert run.clock.seconds["wait for prompts"] > 0.5 and "wait for answers" not in run.clock.seconds
    run = FakeRun(monkeypatch, config(replay_ratio=100.0), 12, 0, slow=(1.0, 0.01)).go()
    assert sum(s for name, s in run.clock.seconds.items() if name.startswith("wait")) < 0.5  # for the first batch alone
    assert run.source.late == 0


def test_a_searcher_that_comes_late_merges_at_the_next_sync_and_not_before():
    """barrier: one that was started again has nothing to give to the syncs that went on without it."""
    board = Board(multiprocessing.get_context("spawn"), 1)
    row, merged = Board.SEARCHERS, []
    for field in ("sync", "go"):
        board.set(Board.PARENT, field, 5)
    board.set(row, "sync", 2)  # where its earlier incarnation was

    class Late:
        config, clock, rounds = config(searchers=1, in_flight=4, recency_prob=0.0), Clock(), 0

        def round(self, prompts):
            self.rounds += 1
            if self.rounds == 3:
                board.set(Board.PARENT, "sync", 6)
                board.set(Board.PARENT, "go", 6)
            if self.rounds == 5:
                board.set(Board.PARENT, "stop", 1)
            return [SimpleNamespace(prompt_id=self.rounds)]

        def pull(self, weights):
            pass

        def beat(self):
            pass

    class Quiet:
        row = Board.SEARCHERS

        def __init__(self):
            self.board = board

        def __call__(self, handed_over):
            pass

    buffer = SimpleNamespace(add=merged.append)
    barrier_searcher(Late(), None, buffer, Quiet())
    assert [[t.prompt_id for t in group] for group in merged] == [[1, 2, 3]] and board.get(row, "sync") == 6
