"""The replay buffer: what searchers wrote, and what the trainer draws.

Trajectories are kept by prompt. A batch is P prompts with K answers each: with probability m a prompt comes from the
recency pool, otherwise from all that is stored, its answers then drawn uniformly or by a softmax of their reward
(TBA, section 3.1). A Manager serves the buffer to the other processes; one lock guards it, and nothing in it waits.

Departures from the paper: the recency pool of `eager` is the newest groups rather than the last sync's, because no
sync ever happens there; deduplication is an option.
"""

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.managers import BaseManager

import numpy as np


@dataclass(frozen=True, eq=False, slots=True)
class Trajectory:
    """One answer to one prompt, with all that is known about it."""

    uid: tuple[int, int, int]  # searcher, its incarnation, a counter
    prompt_id: int
    prompt: np.ndarray  # [L] int32, token ids
    response: np.ndarray  # [T] int32, token ids, the end-of-sequence token included
    finish_reason: str  # "stop": ended by itself; "length": cut off
    reward: float
    log_ref: float  # log pi_ref(y|x), nats
    log_mu: np.ndarray  # [T] float32, log-probability of each token when it was sampled, nats
    policy_version: int  # trainer step whose weights wrote the first token
    version_last: int  # ... the newest weights that may have written a token
    searcher: int


HEAD = np.dtype(
    [("uid", "i8", 3), ("prompt_id", "i8"), ("finish_reason", "U6"), ("reward", "f8"), ("log_ref", "f8")]
    + [("policy_version", "i8"), ("version_last", "i8"), ("searcher", "i4"), ("prompt_len", "i4"), ("len", "i4")]
)


def pack(trajectories: Sequence[Trajectory]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Lay trajectories out in four flat arrays: pickling those is several times cheaper than the objects."""
    ts = trajectories
    rows = [
        (t.uid, t.prompt_id, t.finish_reason, t.reward, t.log_ref)
        + (t.policy_version, t.version_last, t.searcher, len(t.prompt), len(t.response))
        for t in ts
    ]
    empty = np.zeros(0, np.int32)
    return (
        np.array(rows, HEAD),
        np.concatenate([t.prompt for t in ts] or [empty]).astype(np.int32),
        np.concatenate([t.response for t in ts] or [empty]).astype(np.int32),
        np.concatenate([t.log_mu for t in ts] or [empty]).astype(np.float32),
    )


def unpack(packed: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]) -> list[Trajectory]:
    """The inverse of `pack`. Every array is a copy of its own, so that dropping one frees its bytes."""
    head, prompts, responses, log_mu = packed
    out, p, r = [], 0, 0
    for uid, prompt_id, reason, reward, log_ref, first, last, searcher, n, t in head.tolist():
        tokens = (prompts[p : p + n].copy(), responses[r : r + t].copy(), reason, reward, log_ref)
        out.append(Trajectory(tuple(uid), prompt_id, *tokens, log_mu[r : r + t].copy(), first, last, searcher))
        p, r = p + n, r + t
    return out


def reward_probs(rewards: np.ndarray, inverse_temperature: float) -> np.ndarray:
    """softmax(inverse_temperature * rewards), safe for huge and negative rewards. [n] -> [n]"""
    z = inverse_temperature * np.asarray(rewards, np.float64)
    e = np.exp(z - z.max())
    return e / e.sum()


class ReplayBuffer:
    """D_global: trajectories grouped by prompt, bounded per prompt and in total, the oldest out first.

    Args:
        capacity: trajectories in all.
        per_prompt: trajectories of one prompt.
        recent_groups: groups in the recency pool; None: all that came since the last `start_pool()`.
        dedup: keep only the newest copy of an answer.
        seed: of the draws.
    """

    def __init__(
        self, capacity: int, per_prompt: int, recent_groups: int | None = None, dedup: bool = False, seed: int = 0
    ) -> None:
        self.capacity, self.per_prompt, self.dedup = capacity, per_prompt, dedup
        self._rng = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self._stored: OrderedDict[tuple, Trajectory] = OrderedDict()  # uid -> trajectory, oldest first
        self._groups: dict[int, dict] = {}  # prompt_id -> {uid or answer: trajectory}, oldest first
        self._prompts: list[int] = []  # keys of _groups, for a uniform draw ...
        self._place: dict[int, int] = {}  # ... and where each stands in that list
        self._recent: deque[list[tuple]] = deque(maxlen=recent_groups)  # uids of each group, newest last
        self._counts = {"added": 0, "evicted": 0, "duplicates": 0, "drawn": 0}

    # --- adding -----------------------------------------------------------------------------------------------

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Take in trajectories; those of one prompt in one call are one group of the recency pool."""
        with self._lock:
            groups: dict[int, list[tuple]] = {}
            for t in trajectories:
                if t.uid in self._stored:  # sent twice
                    self._counts["duplicates"] += 1
                    continue
                self._store(t)
                groups.setdefault(t.prompt_id, []).append(t.uid)
            self._recent.extend(groups.values())
            self._counts["added"] += sum(map(len, groups.values()))
            while len(self._stored) > self.capacity:
                self._remove(next(iter(self._stored.values())))
                self._counts["evicted"] += 1

    def start_pool(self) -> None:
        """Empty the recency pool: what is added from now on is "the last sync's" (barrier)."""
        with self._lock:
            self._recent.clear()

    def _key(self, t: Trajectory):
        return t.response.tobytes() if self.dedup else t.uid

    def _store(self, t: Trajectory) -> None:
        group = self._groups.get(t.prompt_id)
        if group is None:
            group = self._groups[t.prompt_id] = {}
            self._place[t.prompt_id] = len(self._prompts)
            self._prompts.append(t.prompt_id)
        old = group.pop(self._key(t), None)
        if old is not None:
            del self._stored[old.uid]
            self._counts["duplicates"] += 1
        group[self._key(t)] = self._stored[t.uid] = t
        if len(group) > self.per_prompt:
            self._remove(next(iter(group.values())))
            self._counts["evicted"] += 1

    def _remove(self, t: Trajectory) -> None:
        del self._stored[t.uid]
        group = self._groups[t.prompt_id]
        del group[self._key(t)]
        if not group:  # forget the prompt: the last one of the list takes its place
            del self._groups[t.prompt_id]
            place, last = self._place.pop(t.prompt_id), self._prompts.pop()
            if last != t.prompt_id:
                self._prompts[place], self._place[last] = last, place

    # --- drawing ----------------------------------------------------------------------------------------------

    def sample(
        self, num_prompts: int, k: int, recency_prob: float = 0.0, inverse_temperature: float = 0.0
    ) -> list[list[Trajectory]] | None:
        """Draw `num_prompts` distinct prompts with `k` answers each, or None while fewer prompts are stored.

        Each prompt comes with probability `recency_prob` from the recency pool, with answers of one group there,
        otherwise uniformly from all prompts, with answers by `reward_probs`. Answers are drawn without
        replacement, unless a prompt holds fewer than `k`.
        """
        with self._lock:
            if len(self._prompts) < num_prompts:
                return None
            recent = self._recent_in_random_order()
            drawn: dict[int, list[Trajectory]] = {}
            for from_pool in self._rng.random(num_prompts) < recency_prob:
                found = next(((p, g) for p, g in recent if p not in drawn), None) if from_pool else None
                if found:
                    drawn[found[0]] = self._answers(*found, k, 0.0)
                else:
                    prompt = self._other_prompt(drawn)
                    drawn[prompt] = self._answers(prompt, None, k, inverse_temperature)
            self._counts["drawn"] += num_prompts * k
            return list(drawn.values())

    def _recent_in_random_order(self) -> Iterator[tuple[int, list[Trajectory]]]:
        pool = list(self._recent)
        for i in self._rng.permutation(len(pool)):
            alive = [self._stored[uid] for uid in pool[i] if uid in self._stored]
            if alive:  # eviction and newer copies may have emptied the group
                yield alive[0].prompt_id, alive

    def _other_prompt(self, drawn: dict) -> int:
        if 2 * len(drawn) < len(self._prompts):  # redraw: fewer than two tries on average
            while (prompt := self._prompts[self._rng.integers(len(self._prompts))]) in drawn:
                pass
            return prompt
        return self._rng.choice([p for p in self._prompts if p not in drawn])

    def _answers(
        self, prompt: int, candidates: list[Trajectory] | None, k: int, inverse_temperature: float
    ) -> list[Trajectory]:
        if candidates is None or len(candidates) < k:
            candidates = list(self._groups[prompt].values())
        n = len(candidates)
        if n < k:  # all of them, and the rest again at random
            picks = np.concatenate([np.arange(n), self._rng.integers(n, size=k - n)])
        elif inverse_temperature == 0:
            picks = self._rng.permutation(n)[:k]
        else:  # Gumbel top-k is softmax without replacement, and cannot underflow
            rewards = np.array([t.reward for t in candidates], np.float64)
            picks = np.argsort(-(inverse_temperature * rewards + self._rng.gumbel(size=n)))[:k]
        return [candidates[i] for i in picks]

    # --- looking, saving --------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Trajectories and prompts stored; trajectories added, evicted, replaced by a newer copy, drawn so far."""
        with self._lock:
            return {"stored": len(self._stored), "prompts": len(self._prompts)} | self._counts

    def contents(self) -> list[Trajectory]:
        """All that is stored, oldest first."""
        with self._lock:
            return list(self._stored.values())

    def state_dict(self) -> dict:
        """All that a resumed run needs, in plain arrays and numbers."""
        with self._lock:
            return {
                "trajectories": pack(list(self._stored.values())),
                "recent": [list(g) for g in self._recent],
                "counts": dict(self._counts),
                "rng": self._rng.bit_generator.state,
            }

    def load_state_dict(self, state: dict) -> None:
        """Take the place of the buffer that `state` was taken from."""
        fresh = ReplayBuffer(self.capacity, self.per_prompt, self._recent.maxlen, self.dedup)
        fresh.add(unpack(state["trajectories"]))
        fresh._recent = deque([[tuple(u) for u in g] for g in state["recent"]], maxlen=self._recent.maxlen)
        fresh._counts = dict(state["counts"])
        fresh._rng.bit_generator.state = state["rng"]
        with self._lock:
            lock = self._lock
            self.__dict__.update(fresh.__dict__)
            self._lock = lock


# --- served to other processes ------------------------------------------------------------------------------------


class _Server(ReplayBuffer):
    """What lives in the Manager's process: the buffer, speaking packed arrays."""

    def pid(self) -> int:
        return os.getpid()

    def add_packed(self, packed: tuple) -> None:
        self.add(unpack(packed))

    def sample_packed(self, *args) -> tuple | None:
        groups = self.sample(*args)
        return None if groups is None else pack([t for group in groups for t in group])


class BufferManager(BaseManager):
    """Serves one ReplayBuffer on a local socket with a random key, each connection in a thread of its own."""


BufferManager.register(
    "Buffer", _Server, exposed=["pid", "add_packed", "sample_packed", "start_pool", "stats", "state_dict"]
)


class RemoteBuffer:
    """The buffer of another process, with the methods of ReplayBuffer that cross a process border."""

    def __init__(self, proxy) -> None:
        self._proxy = proxy

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        self._proxy.add_packed(pack(trajectories))

    def sample(self, num_prompts: int, k: int, *args: float) -> list[list[Trajectory]] | None:
        packed = self._proxy.sample_packed(num_prompts, k, *args)
        if packed is None:
            return None
        flat = unpack(packed)
        return [flat[i : i + k] for i in range(0, len(flat), k)]

    def stats(self) -> dict[str, int]:
        return self._proxy.stats()


def serve(ctx, initializer: Callable, initargs: tuple, **options) -> tuple[BufferManager, object]:
    """Start the Manager's process and one buffer in it; returns both, and the caller must keep both."""
    manager = BufferManager(ctx=ctx)
    manager.start(initializer, initargs)
    return manager, manager.Buffer(**options)
