"""A searcher: generate answers, score them, take log pi_ref, hand them to the buffer.

`Searcher` is all between a generation engine and trajectories. sync.py has the loop around it. In `eager` the loop goes
step by step and keeps the engine full; in `barrier` and `onpolicy` it goes round by round.

Departure from the published code: a trajectory is stamped with the versions of the weights that wrote its first and its
last token, not with the trainer's clock, which would understate staleness.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from buffer import Trajectory
from loss import sequence_logprobs
from runtime import cuda_ipc
from runtime.checks import SamplerCheck
from runtime.engine import Answer
from runtime.files import JsonLines
from runtime.loading import Parts, load_parts
from runtime.metrics import Board, Clock, EventLog
from runtime.policy import collate, response_logprobs, unique_rows
from runtime.prompts import Places, prompt_stream
from runtime.report import Report
from runtime.served_buffer import RemoteBuffer
from runtime.weights import SharedWeights, ask_for
from sync import SEARCHER_LOOPS, backlog
from tasks import reward_of

if TYPE_CHECKING:
    from multiprocessing.managers import BaseProxy

    from config import Config
    from runtime.child import Child

log = logging.getLogger("tba_min.searcher")
SHOWN = 5  # bad rewards that are shown before they are only counted


class Searcher:
    """All between a generation engine and trajectories.

    Args:
        parts: engine, reference, task, tokenizer (runtime/loading.py).
        index, incarnation: who it is, and how often it was started again.
        clock: where the time goes.
        beat: called often, as a sign of life.
        events: where pulls and answers are logged (--event-log).
        state: Searcher.state_dict() to go on from.
        done: places in the stream of prompts (runtime/prompts.py) whose answers have been handed over.
    """

    COUNTS = ("generated", "tokens", "truncated", "undecodable", "bad_rewards")  # on the notice board too

    def __init__(
        self,
        parts: Parts,
        config: Config,
        index: int,
        incarnation: int,
        clock: Clock,
        beat: Callable[[], None] = lambda: None,
        events: EventLog | None = None,
        state: dict | None = None,
        done: Places | None = None,
    ) -> None:
        self.engine, self.reference, self.task, self.tokenizer = parts
        self.config, self.uid, self.clock, self.beat = config, (index, incarnation), clock, beat
        self.events = events or EventLog(None)
        self.check = SamplerCheck(self.reference, config.temperature)
        self.steps = 0  # of the engine
        self._prompts: dict[int, np.ndarray] = {}  # prompt_id -> token ids
        self._begun: dict[int, int] = {}  # place in the stream of prompts, of a running group -> prompt_id
        state = state or {}
        for name in self.COUNTS:
            setattr(self, name, state.get(name, 0))
        self._next = state.get("begun", 0)  # place
        prompts, shared_by = len(self.task.train), config.searchers or 1
        self._stream = prompt_stream(prompts, config.seed, index, shared_by, done or Places(self._next))

    def state_dict(self) -> dict:
        """Counts, and the place in the stream of prompts; nothing may be in flight."""
        return {"begun": self._next} | {name: getattr(self, name) for name in self.COUNTS}

    @property
    def version(self) -> int:
        """Version of the weights that the engine has loaded."""
        return self.engine.version

    def pull(self, weights: SharedWeights) -> bool:
        """Load newer weights, if there are any; False where running answers must end first."""
        if weights.version <= self.version:
            return True
        if not self.config.inflight_updates and self.engine.in_flight:
            return False
        with self.clock.span("pull weights"):
            self.check.forget()
            version, tensors = weights.read()
            self.engine.load_weights(tensors, version)
            self.check.pulled(version, tensors)
        self.events.write("pull", engine_step=self.steps, version=version)
        return True

    def refill(self, limit: int) -> None:
        """Ask the engine for groups of S answers until at least `limit` answers are in flight.

        Groups are added whole, so up to S - 1 answers exceed the limit. They fill the places that become free.
        """
        if self.engine.in_flight >= limit:
            return
        with self.clock.span("add requests"):
            while self.engine.in_flight < limit:
                self._add()

    def _add(self) -> None:
        place, prompt_id = next(self._stream)
        self._begun[place], self._next = prompt_id, place + 1
        self.engine.add(place, self._tokens(prompt_id), self.config.S)
        self.events.write("add", engine_step=self.steps, key=place)

    def step(self) -> list[Trajectory]:
        """One step of the engine; returns the groups that finished, scored."""
        self.beat()
        with self.clock.span("generate"):
            finished = self.engine.step()
        self.steps += 1
        if not finished:
            return []
        groups = [(place, self._begun.pop(place), answers) for place, answers in finished]
        self.generated += sum(len(answers) for _, _, answers in groups)
        trajectories = self._score(groups)
        self.check(trajectories)
        answers = [[t.uid[2], len(t.response), t.policy_version, t.version_last] for t in trajectories]
        self.events.write("finish", engine_step=self.steps, keys=[key for key, _ in finished], answers=answers)
        return trajectories

    def round(self, prompts: int) -> list[Trajectory]:
        """Generate and score groups for that many prompts, and let the engine run empty."""
        with self.clock.span("add requests"):
            for _ in range(prompts):
                self._add()
        trajectories: list[Trajectory] = []
        while self.engine.in_flight:
            trajectories += self.step()
        return trajectories

    def _tokens(self, prompt_id: int) -> np.ndarray:
        if prompt_id not in self._prompts:
            (self._prompts[prompt_id],) = self.tokenizer.encode([self.task.train[prompt_id]])
        return self._prompts[prompt_id]

    def _score(self, groups: list[tuple[int, int, list[Answer]]]) -> list[Trajectory]:
        """Score groups of (place, prompt_id, answers)."""
        flat = [(prompt_id, a) for _, prompt_id, answers in groups for a in answers]
        counters = [place * self.config.S + j for place, _, answers in groups for j in range(len(answers))]
        with self.clock.span("reward"):
            texts = self.tokenizer.decode([a.tokens for _, a in flat])
            rewards = [self._reward(i, text) for (i, _), text in zip(flat, texts, strict=True)]
        with self.clock.span("log pi_ref"):
            log_ref = self._log_ref([(self._tokens(i), a.tokens) for i, a in flat])
        rows = zip(counters, flat, rewards, log_ref, strict=True)
        return [self._trajectory((*self.uid, n), i, a, reward, ref) for n, (i, a), reward, ref in rows]

    def _trajectory(self, uid: tuple, prompt_id: int, answer: Answer, reward: float, log_ref: float) -> Trajectory:
        """An answer with its scores; counted."""
        self.tokens += len(answer.tokens)
        self.truncated += answer.finish_reason == "length"
        content = (self._tokens(prompt_id), answer.tokens, answer.finish_reason)
        versions = (answer.version_first, answer.version_last)
        return Trajectory(uid, prompt_id, *content, reward, log_ref, answer.log_mu, *versions, self.uid[0])

    def _reward(self, prompt_id: int, text: str) -> float:
        """The task's reward, or 0 where it is no finite number or takes too long. Such cases are counted and logged."""
        self.beat()
        self.undecodable += "\ufffd" in text
        prompt = self.task.train[prompt_id]
        reward, problem = reward_of(self.task, prompt, text, self.config.reward_timeout)
        if problem:
            self.bad_rewards += 1
            if self.bad_rewards <= SHOWN:
                more = "; more of that is only counted" if self.bad_rewards == SHOWN else ""
                log.warning("the reward of prompt %r, answer %r %s: it counts as 0%s", prompt, text, problem, more)
        return reward

    @torch.inference_mode()
    def _log_ref(self, pairs: list[tuple[np.ndarray, np.ndarray]]) -> list[float]:
        """log pi_ref(y|x) in nats of each (prompt, answer), in micro-batches of those that differ."""
        longest = max(len(p) + len(r) for p, r in pairs)
        size = max(1, self.config.micro_batch_tokens // longest)
        unique, row_of = unique_rows(*zip(*pairs, strict=True))
        log_ref: list[float] = []
        for i in range(0, len(unique), size):
            prompts, responses = zip(*(pairs[j] for j in unique[i : i + size]), strict=True)
            tokens = collate(prompts, responses, 0, self.reference.device)
            logp = response_logprobs(self.reference, tokens, self.config.temperature)
            log_ref += sequence_logprobs(logp, tokens.lengths).tolist()
        return [log_ref[row] for row in row_of]


# --- the process ----------------------------------------------------------------------------------------------------


def main(
    child: Child, config: Config, folder: str, out: Path, index: int, incarnation: int, address: str, proxy: BaseProxy
) -> None:
    """Body of a searcher's process (runtime/child.py starts it).

    Args:
        address: local socket at which the trainer hands out the weights.
    """
    board, row = child.board, Board.SEARCHERS + index
    state = {name: int(board.get(row, name)) for name in Searcher.COUNTS}  # an earlier incarnation's
    buffer = RemoteBuffer(proxy)
    done = buffer.handed_over()  # all else comes again: that an earlier incarnation, or a run before, left unfinished
    events = EventLog(out / f"events-searcher-{index}.jsonl" if config.event_log else None)
    events.write("start", incarnation=incarnation)
    parts = load_parts(child, config, folder, index, incarnation)
    searcher = Searcher(parts, config, index, incarnation, child.clock, child.beat, events, state, done)

    def waiting() -> bool:
        child.beat()
        return not board.stopping

    with child.clock.span("wait for start"):
        weights = ask_for(address, waiting, config.weights, child.device)
    if weights is None:
        return
    searcher.pull(weights)
    if child.device != "cpu":
        log.info("searcher %d gets its weights %s", index, cuda_ipc.measured(weights))
    child.tell("ready")
    log.info("searcher %d is ready after %.0f s (%s)", index, time.time() - child.started, config.engine)
    report = Report(searcher, board, row, JsonLines(out / f"searcher-{index}.jsonl"), backlog)
    SEARCHER_LOOPS[config.sync](searcher, weights, buffer, report)
