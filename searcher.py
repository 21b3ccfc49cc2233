"""A searcher: generate answers, score them, take log pi_ref, hand them to the buffer. It never waits for the trainer.

In `eager` (the default) it drives the engine step by step, keeps it full, hands over groups as they finish, and takes
newer weights between two decode steps. In `barrier` (the paper's protocol) it generates in rounds, keeps what it wrote
in D_local, and merges it when the parent calls a sync. `onpolicy` uses `Searcher.round` inside the trainer's process.

Departure from the published code: a trajectory is stamped with the versions of the weights that wrote its first and its
last token, not with the trainer's clock, which would understate staleness.
"""

import logging
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from buffer import RemoteBuffer, Trajectory
from loss import sequence_logprobs
from runtime import cuda_ipc
from runtime.engine import Answer, Engine, HfEngine, Sampling, VllmEngine, import_vllm
from runtime.metrics import Board, Clock, EventLog, JsonLines, backlog
from runtime.policy import check_prompts, collate, distinct, load_policy, response_logprobs
from runtime.weights import SharedWeights, ask_for
from tasks import reward_of

log = logging.getLogger("tba_min.searcher")
SHOWN = 5  # bad rewards that are shown before they are only counted


def prompt_stream(count: int, seed: int, searcher: int, searchers: int, start: int = 0) -> Iterator[int]:
    """Prompt ids for ever: each pass over all of them is shuffled anew, and the searchers share it out.

    The first `start` are left out: those that an earlier incarnation asked for.
    """
    epoch, start = divmod(start, len(range(searcher, count, searchers)))
    while True:
        order = np.random.default_rng([seed, epoch]).permutation(count)
        yield from order[searcher::searchers][start:].tolist()
        epoch, start = epoch + 1, 0


class Searcher:
    """Everything between an engine and trajectories.

    Args:
        engine: generates; its weights have version 0.
        reference: frozen Hugging Face model pi_ref.
        task, tokenizer: prompts as text, rewards on text.
        config: generate_per_prompt, temperature, micro_batch_tokens, in_flight, inflight_updates.
        stream: prompt ids.
        uid: (searcher, incarnation).
        clock: where the time goes.
        beat: called often, as a sign of life.
        events: where pulls and answers are logged (--event-log).
    """

    COUNTS = ("generated", "tokens", "truncated", "undecodable", "bad_rewards")  # on the board (metrics.py) too

    def __init__(
        self,
        engine: Engine,
        reference,
        task,
        tokenizer,
        config,
        stream: Iterator[int],
        uid: tuple[int, int],
        clock: Clock,
        beat: Callable[[], None] = lambda: None,
        events: EventLog | None = None,
    ) -> None:
        self.engine, self.reference, self.task, self.tokenizer = engine, reference, task, tokenizer
        self.config, self.stream, self.uid, self.clock, self.beat = config, stream, uid, clock, beat
        self.events = events or EventLog(None)
        self.steps = 0  # of the engine
        self.generated = self.tokens = self.truncated = self.undecodable = self.bad_rewards = 0
        self._prompts: dict[int, np.ndarray] = {}  # prompt_id -> token ids
        self._begun: dict[int, int] = {}  # key of a running group -> prompt_id
        self._next_key = self._next_uid = 0

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
            version, tensors = weights.read()
            self.engine.load_weights(tensors, version)
        self.events.write("pull", engine_step=self.steps, version=version)
        return True

    def refill(self, limit: int) -> None:
        """Ask the engine for groups until at least `limit` answers are in flight.

        Up to S - 1 more wait in the engine for a place, so that its batch is full when a part of a group has ended.
        """
        if self.engine.in_flight >= limit:
            return
        with self.clock.span("add requests"):
            while self.engine.in_flight < limit:
                self._add()

    def _add(self) -> None:
        prompt_id = next(self.stream)
        self._begun[self._next_key] = prompt_id
        self.engine.add(self._next_key, self._tokens(prompt_id), self.config.S)
        self.events.write("add", engine_step=self.steps, key=self._next_key)
        self._next_key += 1

    def step(self) -> list[Trajectory]:
        """Generate for a moment; the groups that finished, scored."""
        self.beat()
        with self.clock.span("generate"):
            finished = self.engine.step()
        self.steps += 1
        if not finished:
            return []
        groups = [(self._begun.pop(key), answers) for key, answers in finished]
        self.generated += sum(len(answers) for _, answers in groups)
        out = self._score(groups)
        answers = [[t.uid[2], len(t.response), t.policy_version, t.version_last] for t in out]
        self.events.write("finish", engine_step=self.steps, keys=[key for key, _ in finished], answers=answers)
        return out

    def round(self, prompts: int) -> list[Trajectory]:
        """Generate and score groups for that many prompts, and let the engine run empty."""
        out: list[Trajectory] = []
        with self.clock.span("add requests"):
            for _ in range(prompts):
                self._add()
        while self.engine.in_flight:
            out += self.step()
        return out

    def _tokens(self, prompt_id: int) -> np.ndarray:
        if prompt_id not in self._prompts:
            ids = self.tokenizer.encode(self.task.train[prompt_id], add_special_tokens=False)
            self._prompts[prompt_id] = np.array(ids, np.int32)
        return self._prompts[prompt_id]

    def _score(self, groups: list[tuple[int, list[Answer]]]) -> list[Trajectory]:
        flat = [(prompt_id, a) for prompt_id, answers in groups for a in answers]
        with self.clock.span("reward"):
            texts = self.tokenizer.batch_decode([a.tokens for _, a in flat], skip_special_tokens=True)
            rewards = [self._reward(i, text) for (i, _), text in zip(flat, texts, strict=True)]
        with self.clock.span("log pi_ref"):
            log_ref = self._log_ref([(self._tokens(i), a.tokens) for i, a in flat])
        out = []
        for (prompt_id, answer), reward, ref in zip(flat, rewards, log_ref, strict=True):
            uid = (*self.uid, self._next_uid)
            self._next_uid += 1
            self.tokens += len(answer.tokens)
            self.truncated += answer.finish_reason == "length"
            what = (self._tokens(prompt_id), answer.tokens, answer.finish_reason, reward, ref, answer.log_mu)
            versions = (answer.version_first, answer.version_last)
            out.append(Trajectory(uid, prompt_id, *what, *versions, self.uid[0]))
        return out

    def _reward(self, prompt_id: int, text: str) -> float:
        """The task's reward, or 0 where it is no finite number or takes too long; that is counted and said."""
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

    def state_dict(self) -> dict:
        """What a resumed `onpolicy` run needs: counts and the place in the stream of prompts, nothing in flight."""
        return {"begun": self._next_key, "uid": self._next_uid} | {name: getattr(self, name) for name in self.COUNTS}

    def load_state_dict(self, state: dict) -> None:
        self._next_key, self._next_uid = state["begun"], state["uid"]  # the stream was made to go on from there
        for name in self.COUNTS:
            setattr(self, name, state[name])

    @torch.inference_mode()
    def _log_ref(self, pairs: list[tuple[np.ndarray, np.ndarray]]) -> list[float]:
        """log pi_ref(y|x) in nats of each (prompt, answer), in micro-batches of those that differ."""
        longest = max(len(p) + len(r) for p, r in pairs)
        size = max(1, self.config.micro_batch_tokens // longest)
        first, kind = distinct(*zip(*pairs, strict=True))
        out: list[float] = []
        for i in range(0, len(first), size):
            prompts, responses = zip(*(pairs[j] for j in first[i : i + size]), strict=True)
            tokens = collate(prompts, responses, 0, self.reference.device)
            logp = response_logprobs(self.reference, tokens, self.config.temperature)
            out += sequence_logprobs(logp, tokens.lengths).tolist()
        return [out[d] for d in kind]


def make_engine(config, folder: str, tokenizer, stop_ids: list[int], longest: int, device: str, policy=None) -> Engine:
    """The engine that the configuration names; `policy` is the model that `hf` runs (loaded here when None).

    longest: tokens of the longest prompt.
    """
    s = Sampling(config.temperature, config.max_new_tokens, tuple(stop_ids), longest, config.in_flight, config.seed)
    if config.engine == "hf":
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stop_ids[0]
        return HfEngine(policy or load_policy(folder, device), s, pad)
    memory = config.vllm_memory or (0.4 if config.gpus == 1 or config.sync == "onpolicy" else 0.85)
    return VllmEngine(folder, s, device, memory, config.recompute_kv, trust_remote_code=config.trust_remote_code)


def build(child, config, folder: str, index: int, incarnation: int, policy=None, begun: int = 0) -> Searcher:
    """Load engine, reference, task and tokenizer of searcher `index`; `begun` prompts of its stream are left out."""
    from runtime.policy import load_tokenizer, stop_tokens
    from tasks import load_task

    if config.engine == "vllm":
        with child.clock.span("import"):
            import_vllm(child.device)
    trust = config.trust_remote_code
    with child.clock.span("load"):
        task, tokenizer = load_task(config.task), load_tokenizer(folder, trust)
        reference = load_policy(folder, child.device, trust_remote_code=trust)
        lengths = [len(ids) for ids in tokenizer(task.train, add_special_tokens=False)["input_ids"]]
        check_prompts(task.train, lengths, reference, config.max_new_tokens)
        stop_ids = stop_tokens(folder, tokenizer)
        engine = make_engine(config, folder, tokenizer, stop_ids, max(lengths), child.device, policy)
        # after vLLM, which seeds everything anew
        torch.manual_seed(int(np.random.SeedSequence([config.seed, index, incarnation]).generate_state(1)[0]))
    stream = prompt_stream(len(task.train), config.seed, index, max(1, config.searchers), begun)
    uid = (index, incarnation)
    return Searcher(engine, reference, task, tokenizer, config, stream, uid, child.clock, child.beat)


# --- the process ----------------------------------------------------------------------------------------------------


def main(child, config, folder: str, out, index: int, incarnation: int, address: str, buffer_proxy) -> None:
    """Body of a searcher's process (child.py starts it)."""
    board, row = child.board, Board.SEARCHERS + index
    begun = int(board.get(row, "generated")) // config.S  # an earlier incarnation's; its unfinished groups come again
    searcher = build(child, config, folder, index, incarnation, begun=begun)
    searcher.events = EventLog(out / f"events-searcher-{index}.jsonl" if config.event_log else None)
    searcher.events.write("start", incarnation=incarnation)
    for name in searcher.COUNTS:
        setattr(searcher, name, int(board.get(row, name)))

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
    buffer = RemoteBuffer(buffer_proxy)
    child.tell("ready")
    log.info("searcher %d is ready after %.0f s (%s)", index, time.time() - child.started, config.engine)
    report = Report(searcher, board, row, JsonLines(out / f"searcher-{index}.jsonl"))
    loop = barrier if config.sync == "barrier" else eager
    loop(searcher, weights, buffer, board, row, report)


def eager(searcher: Searcher, weights: SharedWeights, buffer, board: Board, row: int, report: "Report") -> None:
    """Keep the engine full, hand groups over as they finish, take new weights between two decode steps."""
    while not board.stopping:
        if searcher.pull(weights):
            searcher.refill(searcher.config.in_flight)
        finished = searcher.step()
        if finished:
            with searcher.clock.span("hand over"):
                buffer.add(finished)
        report(len(finished))


def barrier(searcher: Searcher, weights: SharedWeights, buffer, board: Board, row: int, report: "Report") -> None:
    """Generate rounds into D_local; at a sync merge it, load the new weights, and wait until all have done so."""
    board.set(row, "sync", board.get(Board.PARENT, "go"))  # syncs that are over need nothing from one that comes late
    d_local: list[Trajectory] = []
    prompts = max(1, searcher.config.in_flight // searcher.config.S)
    while not board.stopping:
        d_local = (d_local + searcher.round(prompts))[-searcher.config.buffer_capacity :]
        report(0)
        sync = board.get(Board.PARENT, "sync")
        if sync > board.get(row, "sync"):
            with searcher.clock.span("hand over"):
                buffer.add(d_local)
            report(len(d_local))
            d_local = []
            searcher.pull(weights)
            board.set(row, "sync", sync)
            with searcher.clock.span("wait for sync"):
                while board.get(Board.PARENT, "go") < sync and not board.stopping:
                    searcher.beat()
                    time.sleep(0.001)


class Report:
    """Counters of a searcher: onto the board after every step, into its JSONL file about once a second."""

    def __init__(self, searcher: Searcher, board: Board, row: int, file: JsonLines) -> None:
        self.searcher, self.board, self.row, self.file = searcher, board, row, file
        self.handed_over = int(board.get(row, "handed_over"))
        self._written, self._began = 0.0, False

    def __call__(self, handed_over: int) -> None:
        s, now = self.searcher, time.time()
        self.handed_over += handed_over
        if not self._began and self.board.get(Board.TRAINER, "rl_start"):
            self._began = True
            s.clock.begin()
        values = {"handed_over": self.handed_over, "version": s.version, "busy": s.clock.busy()}
        values |= {name: getattr(s, name) for name in s.COUNTS}
        for field, value in values.items():
            self.board.set(self.row, field, value)
        if now - self._written > 1:
            self._written = now
            seconds = {name: round(v, 3) for name, v in s.clock.seconds.items()}
            trainer = {field: self.board.get(Board.TRAINER, field) for field in ("version", "trained")}
            generated = sum(self.board.of_searchers("generated"))
            pace = {
                "behind": trainer["version"] - s.version,
                "backlog": backlog(s.config, generated, trainer["trained"]),
            }
            self.file.write({"time": now, "incarnation": s.uid[1]} | values | pace | {"seconds": seconds})
