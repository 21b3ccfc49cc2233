"""Where the trainer's batches come from: the one thing in which the three ways of `--sync` differ for it.

`Prefetch` (eager): the next batch is fetched while this one is learnt. `Barrier` (the paper's protocol): a sync every k
updates, nothing fetched ahead. `OnPolicy`: generate with the newest weights, in the trainer's own process.
"""

import queue
import threading
import time

from buffer import RemoteBuffer, ReplayBuffer, Trajectory
from runtime.engine import HfEngine
from runtime.metrics import Board
from runtime.policy import named_weights

Batch = list[list[Trajectory]]  # P groups of K


class Prefetch:
    """eager: a thread keeps the next batch ready, drawn while the trainer learns from the one before.

    Args:
        child: of the trainer; on its clock waits go by what held the batch up, draws as a track of their own.
        first, trained: update that the first batch is for, and trajectories trained before it (of a resumed run).
    """

    def __init__(self, buffer: RemoteBuffer, config, child, first: int = 0, trained: int = 0) -> None:
        self.buffer, self.config, self.child, self.board, self.clock = buffer, config, child, child.board, child.clock
        self.first, self.trained = first, trained
        self.late = 0  # batches that could have been ready and were not
        self._ready: queue.Queue = queue.Queue(maxsize=1)
        self._drawn = self._given = 0  # batches
        threading.Thread(target=self._fetch, daemon=True, name="prefetch").start()

    def next(self, step: int) -> Batch | None:
        """The next batch; None when the run is being stopped. Raises what the fetching raised."""
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

    def generated(self) -> int:
        """Trajectories that the searchers generated so far."""
        return int(sum(self.board.of_searchers("generated")))

    def state_dict(self) -> dict:
        """Counts of each searcher, which its next incarnation goes on from."""
        return {name: self.board.of_searchers(name) for name in Board.COUNTS}

    def _fetch(self) -> None:
        cause = "prefetch"  # what holds the next batch up
        try:
            while not self.board.stopping:
                may = self._may_draw()
                start = time.time()
                batch = draw(self.buffer, self.config, self.first + self._drawn) if may else None
                if batch is None:
                    cause = "prompts" if may else "answers"
                    time.sleep(0.002)
                    continue
                self.clock.add("sample", start, time.time(), track=1)
                self._drawn += 1
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

    def _may_draw(self) -> bool:
        """Replay ratio: trained <= ratio * generated. The first batch is free."""
        trained = self.trained + (self._drawn + 1) * self.config.prompts_per_batch * self.config.K
        return self._drawn == 0 or trained <= self.config.replay_ratio * self.generated()


class Barrier:
    """The paper's protocol: before update 0, k, 2k, ... a sync, in which the searchers merge and take new weights."""

    late = 0  # nothing is fetched ahead

    def __init__(self, buffer: RemoteBuffer, config, child) -> None:
        self.buffer, self.config, self.child, self.board, self.clock = buffer, config, child, child.board, child.clock
        self._syncs = 0

    def next(self, step: int) -> Batch | None:
        if step % self.config.sync_every == 0 or not self._syncs:  # a resumed run starts with one too
            self._sync()
        size = self.config.prompts_per_batch * self.config.K
        while not self.board.stopping:
            if step == 0 or (step + 1) * size <= self.config.replay_ratio * self.generated():
                with self.clock.span("sample"):
                    batch = draw(self.buffer, self.config, step)
                if batch is not None:
                    return batch
            self._sync()  # too little yet: let the searchers bring more
        return None

    generated, state_dict = Prefetch.generated, Prefetch.state_dict

    def _sync(self) -> None:
        self._syncs += 1
        self.board.set(Board.TRAINER, "sync", self._syncs)
        with self.clock.span("wait for sync"):
            while self.board.get(Board.PARENT, "go") < self._syncs and not self.board.stopping:
                self.child.beat()
                time.sleep(0.001)


class OnPolicy:
    """Generate a batch with the newest weights in this process, learn from it once, forget it."""

    late = 0

    def __init__(self, searcher, model, config, child) -> None:
        self.searcher, self.model, self.config, self.board = searcher, model, config, child.board

    def next(self, step: int) -> Batch | None:
        clock, engine = self.searcher.clock, self.searcher.engine
        if step > engine.version:
            with clock.span("pull weights"):
                if isinstance(engine, HfEngine):  # that one generates with the policy itself
                    engine.version = step
                else:
                    engine.load_weights(named_weights(self.model), step)
        c = self.config
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


def draw(buffer: ReplayBuffer | RemoteBuffer, config, step: int) -> Batch | None:
    """A batch for update `step` by the configuration's rule, or None while there are too few prompts."""
    rule = (config.recency_prob, config.reward_inverse_temperature)
    oldest = step - config.max_staleness if config.max_staleness else 0
    return buffer.sample(config.prompts_per_batch, config.K, *rule, oldest)
