"""Where the trainer's batches come from: the one thing in which the three ways of `--sync` differ for it.

`Prefetch` (eager): the next batch is fetched while this one is learnt. `Barrier` (the paper's protocol): a sync every k
updates, nothing fetched ahead. `OnPolicy`: generate with the newest weights, in the trainer's own process.
"""

import queue
import threading
import time

from buffer import RemoteBuffer, ReplayBuffer, Trajectory
from engine import HfEngine
from metrics import Board
from policy import named_weights

Batch = list[list[Trajectory]]  # P groups of K


class Prefetch:
    """eager: a thread keeps the next batch ready, drawn while the trainer learns from the one before."""

    waits = True

    def __init__(self, buffer: RemoteBuffer, config, child, trained: int = 0) -> None:
        self.buffer, self.config, self.child, self.board = buffer, config, child, child.board
        self._ready: queue.Queue = queue.Queue(maxsize=1)
        self._drawn = trained  # trajectories
        threading.Thread(target=self._fetch, daemon=True, name="prefetch").start()

    def next(self, step: int) -> Batch | None:
        """The next batch; None when the run is being stopped. Raises what the fetching raised."""
        while not self.board.stopping:
            self.child.beat()
            try:
                batch = self._ready.get(timeout=0.1)
            except queue.Empty:
                continue
            if isinstance(batch, Exception):
                raise batch
            return batch
        return None

    def generated(self) -> int:
        """Trajectories that the searchers generated so far."""
        return int(sum(self.board.of_searchers("generated")))

    def state_dict(self) -> dict:
        """Counts of each searcher, which its next incarnation goes on from."""
        return {name: self.board.of_searchers(name) for name in Board.COUNTS}

    def _fetch(self) -> None:
        try:
            while not self.board.stopping:
                batch = draw(self.buffer, self.config) if self._may_draw() else None
                if batch is None:
                    time.sleep(0.002)
                    continue
                self._drawn += sum(map(len, batch))
                while not self.board.stopping:
                    try:
                        self._ready.put(batch, timeout=0.1)
                        break
                    except queue.Full:
                        continue
        except Exception as error:  # handed to next(), which raises it in the trainer
            self._ready.put(error)

    def _may_draw(self) -> bool:
        """Replay ratio: trained <= ratio * generated. The first batch is free."""
        trained = self._drawn + self.config.prompts_per_batch * self.config.K
        return self._drawn == 0 or trained <= self.config.replay_ratio * self.generated()


class Barrier:
    """The paper's protocol: before update 0, k, 2k, ... a sync, in which the searchers merge and take new weights."""

    waits = True

    def __init__(self, buffer: RemoteBuffer, config, child) -> None:
        self.buffer, self.config, self.child, self.board = buffer, config, child, child.board
        self._syncs = 0

    def next(self, step: int) -> Batch | None:
        if step % self.config.sync_every == 0 or not self._syncs:  # a resumed run starts with one too
            self._sync()
        size = self.config.prompts_per_batch * self.config.K
        while not self.board.stopping:
            enough = step == 0 or (step + 1) * size <= self.config.replay_ratio * self.generated()
            batch = draw(self.buffer, self.config) if enough else None
            if batch is not None:
                return batch
            self._sync()  # too little yet: let the searchers bring more
        return None

    generated, state_dict = Prefetch.generated, Prefetch.state_dict

    def _sync(self) -> None:
        self._syncs += 1
        self.board.set(Board.TRAINER, "sync", self._syncs)
        while self.board.get(Board.PARENT, "go") < self._syncs and not self.board.stopping:
            self.child.beat()
            time.sleep(0.001)


class OnPolicy:
    """Generate a batch with the newest weights in this process, learn from it once, forget it."""

    waits = False  # it generates meanwhile

    def __init__(self, searcher, model, config, child) -> None:
        self.searcher, self.model, self.config, self.board = searcher, model, config, child.board

    def next(self, step: int) -> Batch | None:
        clock = self.searcher.clock
        if step > self.searcher.version:
            with clock.span("pull weights"):
                if self.searcher.engine.__class__ is not HfEngine:  # that one generates with the policy itself
                    self.searcher.engine.load_weights(named_weights(self.model))
                self.searcher.version = step
        c = self.config
        buffer = ReplayBuffer(c.buffer_capacity, c.per_prompt_capacity, dedup=c.dedup, seed=c.seed + step)
        while not self.board.stopping:
            buffer.add(self.searcher.round(c.prompts_per_batch))
            batch = draw(buffer, c)
            if batch is not None:
                return batch
        return None

    def generated(self) -> int:
        return self.searcher.generated

    def state_dict(self) -> dict:
        return self.searcher.state_dict()


def draw(buffer: ReplayBuffer | RemoteBuffer, config) -> Batch | None:
    """A batch by the configuration's rule, or None while there are too few prompts."""
    return buffer.sample(config.prompts_per_batch, config.K, config.recency_prob, config.reward_inverse_temperature)
