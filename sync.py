"""The three ways to synchronise (`--sync`), side by side: the part of the trainer, of a searcher, and of the parent.

             trainer                          searcher                              parent
  eager      draws up to two batches ahead    keeps its engine full, hands over     nothing
             while it learns; publishes       groups as they finish, takes new
             every k updates                  weights between two engine steps
  barrier    calls a sync before update 0,    writes rounds into D_local; at a      empties the recency pool and
             k, 2k ..., and when there is     sync merges it, loads the weights,    opens the sync; ends it when all
             too little to train on; waits    and waits for the end                 searchers that live have merged
             for its end                      (it brings its share of P prompts)
  onpolicy   generates a batch itself with    none                                  nothing
             the newest weights, learns
             from it once, forgets it

`barrier` is the paper's protocol (arXiv 2503.18929, section 3.1). `eager` is ours: nobody ever waits for a sync. A step
of vLLM is one token of each answer; a step of `hf` is a batch to its end. The signals of `barrier` are numbers on the
notice board, where each process writes its own row. The trainer's "sync" is the sync that it wants, the parent's the
one that is open, a searcher's the last one that it took part in. The parent's "go" is the last one that has ended.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from buffer import ReplayBuffer, Trajectory
from runtime.metrics import Board

if TYPE_CHECKING:
    from multiprocessing.managers import BaseProxy

    from config import Config
    from runtime.child import Child
    from runtime.engine import Engine
    from runtime.metrics import Clock
    from runtime.served_buffer import RemoteBuffer
    from runtime.weights import SharedWeights

Batch = list[list[Trajectory]]  # P groups of K


# --- rules that the modes share -------------------------------------------------------------------------------------


def backlog(config: Config, generated: float, trained: float) -> float:
    """Updates that the replay ratio allows at once, without another answer. Below 1 the trainer starves.

    generated, trained: trajectories so far; those that are trained again count each time.
    """
    return (config.replay_ratio * generated - trained) / config.batch_size


def may_update(config: Config, generated: float, trained: float) -> bool:
    """Whether the replay ratio allows the next update. The first one of all is free."""
    return trained == 0 or backlog(config, generated, trained) >= 1


def draw(buffer: ReplayBuffer | RemoteBuffer, config: Config, step: int) -> Batch | None:
    """A batch for update `step` by the configuration's rule, or None while there are too few prompts."""
    rule = (config.recency_prob, config.reward_inverse_temperature)
    oldest = step - config.max_staleness if config.max_staleness else 0
    return buffer.sample(config.prompts_per_batch, config.K, *rule, oldest)


class Generates(Protocol):
    """A Searcher (searcher.py), as far as it is used here."""

    config: Config
    clock: Clock
    engine: Engine
    generated: int

    def beat(self) -> None: ...
    def pull(self, weights: SharedWeights) -> bool: ...
    def refill(self, limit: int) -> None: ...
    def step(self) -> list[Trajectory]: ...
    def round(self, prompts: int) -> list[Trajectory]: ...
    def state_dict(self) -> dict: ...


class Reports(Protocol):
    """A searcher's Report (searcher.py), and its row of the board."""

    board: Board
    row: int

    def __call__(self, handed_over: int) -> None: ...


class _FromSearchers:
    """The part that `eager` and `barrier` share; `progress` is that of a resumed run's checkpoint."""

    def __init__(self, buffer: RemoteBuffer, config: Config, child: Child, progress: dict | None = None) -> None:
        self.buffer, self.config, self.child, self.board, self.clock = buffer, config, child, child.board, child.clock
        self.late = self._syncs = 0

    def generated(self) -> int:
        return int(sum(self.board.of_searchers("generated")))

    def state_dict(self) -> dict:
        return {name: self.board.of_searchers(name) for name in Board.COUNTS}


# --- eager: nobody pauses -------------------------------------------------------------------------------------------


class EagerBatches(_FromSearchers):
    """The trainer: a thread draws batches ahead; one waits in the queue, and one in the thread.

    `late` counts batches that could have been ready and were not. The clock records each wait under its cause.
    """

    def __init__(self, buffer: RemoteBuffer, config: Config, child: Child, progress: dict | None = None) -> None:
        super().__init__(buffer, config, child)
        progress = progress or {}
        self._step, self._trained = progress.get("step", 0), progress.get("trained", 0)  # at the next draw
        self._given = 0  # batches
        self._ready: queue.Queue = queue.Queue(maxsize=1)
        threading.Thread(target=self._fetch, daemon=True, name="prefetch").start()

    def next(self, step: int) -> Batch | None:
        """The next batch. Raises what the thread raised."""
        start, waited = time.time(), self._ready.empty()
        while not self.board.stopping:
            self.child.beat()
            try:
                batch, cause = self._ready.get(timeout=0.1)
            except queue.Empty:
                continue
            if isinstance(batch, Exception):
                raise batch
            if waited:
                self.clock.add(f"wait for {cause}", start, time.time())
                self.late += cause == "prefetch" and self._given > 0
            self._given += 1
            return batch
        return None

    def _fetch(self) -> None:
        c, cause = self.config, "prefetch"  # what holds the next batch up
        try:
            while not self.board.stopping:
                allowed = may_update(c, self.generated(), self._trained)
                start = time.time()
                batch = draw(self.buffer, c, self._step) if allowed else None
                if batch is None:
                    cause = "prompts" if allowed else "answers"
                    time.sleep(0.002)
                    continue
                self.clock.add("sample", start, time.time(), track=1)
                self._step, self._trained = self._step + 1, self._trained + c.batch_size
                self._put((batch, cause))
                cause = "prefetch"
        except Exception as error:  # handed to next(), which raises it in the trainer
            self._put((error, "nothing"))

    def _put(self, item: tuple) -> None:
        while not self.board.stopping:
            try:
                return self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue


def eager_searcher(searcher: Generates, weights: SharedWeights, buffer: RemoteBuffer, report: Reports) -> None:
    """A searcher: keep the engine full, hand groups over as they finish, take new weights between two steps."""
    while not report.board.stopping:
        if searcher.pull(weights):
            searcher.refill(searcher.config.in_flight)
        finished = searcher.step()
        if finished:
            with searcher.clock.span("hand over"):
                buffer.add(finished)
        report(len(finished))


# --- barrier: every k updates all pause, merge and take new weights -------------------------------------------------


class BarrierBatches(_FromSearchers):
    """The trainer: before update 0, k, 2k ... it calls a sync and waits for its end."""

    def next(self, step: int) -> Batch | None:
        c = self.config
        if step % c.sync_every == 0 or not self._syncs:  # a resumed run starts with one too
            self._sync()
        while not self.board.stopping:
            if may_update(c, self.generated(), step * c.batch_size):  # D_local counts as generated
                with self.clock.span("sample"):
                    batch = draw(self.buffer, c, step)
                if batch is not None:
                    return batch
            self._sync()  # too little yet: let the searchers bring more
        return None

    def _sync(self) -> None:
        self._syncs += 1
        self.board.set(Board.TRAINER, "sync", self._syncs)
        with self.clock.span("wait for sync"):
            _wait_for_end(self._syncs, self.board, self.child.beat)


def brings_enough(d_local: list[Trajectory], config: Config, index: int) -> bool:
    """Whether D_local has its share of a batch's P prompts, or no room for more.

    All searchers together then bring the P prompts that a batch may need from the recency pool: m is honoured.
    """
    share = len(range(index, config.prompts_per_batch, config.searchers)) if config.recency_prob else 0
    return len(d_local) >= config.buffer_capacity or len({t.prompt_id for t in d_local}) >= share


def barrier_searcher(searcher: Generates, weights: SharedWeights, buffer: RemoteBuffer, report: Reports) -> None:
    """A searcher: write rounds into D_local; at a sync merge it, load the new weights, wait until all have done so."""
    board, row = report.board, report.row
    index = row - board.SEARCHERS
    board.set(row, "sync", board.get(Board.PARENT, "go"))  # a searcher that starts late skips the syncs that have ended
    d_local: list[Trajectory] = []
    prompts = max(1, searcher.config.in_flight // searcher.config.S)
    while not board.stopping:
        d_local = (d_local + searcher.round(prompts))[-searcher.config.buffer_capacity :]
        report(0)
        sync = board.get(Board.PARENT, "sync")
        if sync > board.get(row, "sync") and brings_enough(d_local, searcher.config, index):
            with searcher.clock.span("hand over"):
                buffer.add(d_local)
            report(len(d_local))
            d_local = []
            searcher.pull(weights)
            board.set(row, "sync", sync)
            with searcher.clock.span("wait for sync"):
                _wait_for_end(sync, board, searcher.beat)


def lead_sync(board: Board, buffer: BaseProxy, absent: set[int]) -> None:
    """The parent, again and again: open the sync that the trainer wants; end it when all searchers have merged.

    Nobody waits for the `absent` ones, which are being started again.
    """
    wanted, opened = board.get(Board.TRAINER, "sync"), board.get(Board.PARENT, "sync")
    present = [sync for i, sync in enumerate(board.of_searchers("sync")) if i not in absent]
    if wanted > opened:
        buffer.start_pool()  # "the most recent data" is what this sync brings
        board.set(Board.PARENT, "sync", wanted)
    elif opened > board.get(Board.PARENT, "go") and present and min(present) >= opened:
        board.set(Board.PARENT, "go", opened)


def _wait_for_end(sync: float, board: Board, beat: Callable[[], None]) -> None:
    while board.get(Board.PARENT, "go") < sync and not board.stopping:
        beat()
        time.sleep(0.001)


# --- onpolicy: one process generates and learns in turn -------------------------------------------------------------


class OnPolicyBatches:
    """The trainer: generate a batch with the newest weights in this process, learn from it once, forget it.

    Args:
        weights: the policy's named weights as they are when it is called.
    """

    late = 0  # nothing is drawn ahead

    def __init__(self, searcher: Generates, weights: Callable[[], list], config: Config, board: Board) -> None:
        self.searcher, self.weights, self.config, self.board = searcher, weights, config, board

    def next(self, step: int) -> Batch | None:
        c, clock, engine = self.config, self.searcher.clock, self.searcher.engine
        if step > engine.version:
            with clock.span("pull weights"):
                engine.load_weights(self.weights(), step)
        buffer = ReplayBuffer(c.buffer_capacity, c.per_prompt_capacity, dedup=c.dedup, seed=c.seed + step)
        while not self.board.stopping:
            written = self.searcher.round(c.prompts_per_batch)
            with clock.span("hand over"):
                buffer.add(written)
            with clock.span("sample"):
                batch = draw(buffer, c, step)
            if batch is not None:
                return batch
        return None

    def generated(self) -> int:
        return self.searcher.generated

    def state_dict(self) -> dict:
        return self.searcher.state_dict()


BATCHES: dict[str, type] = {"eager": EagerBatches, "barrier": BarrierBatches}
SEARCHER_LOOPS: dict[str, Callable] = {"eager": eager_searcher, "barrier": barrier_searcher}
