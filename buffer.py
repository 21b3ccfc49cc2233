"""The replay buffer: what searchers wrote, and what the trainer draws.

Trajectories are kept by prompt. A batch is P prompts with K answers each: with probability m a prompt comes from the
recency pool, otherwise from all that is stored, its answers then drawn uniformly or by a softmax of their reward
(TBA, section 3.1). A Manager serves the buffer to the other processes; one lock guards it, and nothing in it waits.

Departures from the paper: the recency pool of `eager` is the newest groups rather than the last sync's, because no
sync ever happens there; deduplication is an option, and so is a limit on staleness.
"""

import os
import threading
from collections import OrderedDict
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
    version_last: int  # ... the last token
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
    for uid, row in zip(head["uid"].tolist(), head.tolist(), strict=True):
        _, prompt_id, reason, reward, log_ref, first, last, searcher, n, t = row
        tokens = (prompts[p : p + n].copy(), responses[r : r + t].copy(), reason, reward, log_ref)
        out.append(Trajectory(tuple(uid), prompt_id, *tokens, log_mu[r : r + t].copy(), first, last, searcher))
        p, r = p + n, r + t
    return out


def reward_probs(rewards: np.ndarray, inverse_temperature: float) -> np.ndarray:
    """softmax(inverse_temperature * rewards), safe for huge and negative rewards. [n] -> [n]"""
    z = inverse_temperature * np.asarray(rewards, np.float64)
    e = np.exp(z - z.max())
    return e / e.sum()


class Bag:
    """Keys that can be put in, taken out and drawn at random, each in constant time."""

    def __init__(self, keys: Sequence = ()) -> None:
        self.keys = list(keys)
        self._place = {key: i for i, key in enumerate(self.keys)}

    def add(self, key) -> None:
        self._place[key] = len(self.keys)
        self.keys.append(key)

    def remove(self, key) -> None:
        place, last = self._place.pop(key), self.keys.pop()
        if last != key:  # the last one takes its place
            self.keys[place], self._place[last] = last, place

    def in_random_order(self, rng: np.random.Generator) -> Iterator:
        """All keys, shuffled only as far as they are asked for (Fisher-Yates)."""
        moved: dict[int, int] = {}
        for i in range(len(self.keys)):
            j = int(rng.integers(i, len(self.keys)))
            yield self.keys[moved.get(j, j)]
            moved[j] = moved.get(i, i)


class ReplayBuffer:
    """D_global: trajectories grouped by prompt, bounded per prompt and in total, the oldest out first.

    Adding and drawing take the same time however much is stored.

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
        self.capacity, self.per_prompt, self.recent_groups, self.dedup = capacity, per_prompt, recent_groups, dedup
        self._rng = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self._stored: OrderedDict[tuple, Trajectory] = OrderedDict()  # uid -> trajectory, oldest first
        self._groups: dict[int, dict] = {}  # prompt_id -> {uid or answer: trajectory}, oldest first
        self._prompts = Bag()  # keys of _groups
        self._versions: dict[int, set[tuple]] = {}  # policy_version -> uids
        self._recent: OrderedDict[int, dict[tuple, Trajectory]] = OrderedDict()  # the recency pool, oldest group first:
        self._pool = Bag()  # a group's number -> what is stored of it, by uid; its keys again, for drawing;
        self._number: dict[tuple, int] = {}  # and the other way round, uid -> its group's number
        self._next_number = 0
        self._counts = {"added": 0, "evicted": 0, "expired": 0, "duplicates": 0, "drawn": 0}

    # --- adding -----------------------------------------------------------------------------------------------

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Take in trajectories; those of one prompt in one call are one group of the recency pool."""
        with self._lock:
            groups: dict[int, list[Trajectory]] = {}
            for t in trajectories:
                if t.uid in self._stored:  # sent twice
                    self._counts["duplicates"] += 1
                    continue
                self._store(t)
                self._counts["added"] += 1
                groups.setdefault(t.prompt_id, []).append(t)
            for group in groups.values():
                self._pool_group(self._next_number, [t for t in group if self._stored.get(t.uid) is t])
                self._next_number += 1
            while len(self._stored) > self.capacity:
                self._evict(next(iter(self._stored.values())))

    def start_pool(self) -> None:
        """Empty the recency pool: what is added from now on is "the last sync's" (barrier)."""
        with self._lock:
            self._recent, self._pool, self._number = OrderedDict(), Bag(), {}

    def _key(self, t: Trajectory):
        return t.response.tobytes() if self.dedup else t.uid

    def _store(self, t: Trajectory) -> None:
        old = self._groups.get(t.prompt_id, {}).get(self._key(t))
        if old is not None:
            self._remove(old)
            self._counts["duplicates"] += 1
        if t.prompt_id not in self._groups:
            self._groups[t.prompt_id] = {}
            self._prompts.add(t.prompt_id)
        group = self._groups[t.prompt_id]
        group[self._key(t)] = self._stored[t.uid] = t
        self._versions.setdefault(t.policy_version, set()).add(t.uid)
        if len(group) > self.per_prompt:
            self._evict(next(iter(group.values())))

    def _evict(self, t: Trajectory) -> None:
        self._remove(t)
        self._counts["evicted"] += 1

    def _remove(self, t: Trajectory) -> None:
        del self._stored[t.uid]
        self._versions[t.policy_version].remove(t.uid)
        if not self._versions[t.policy_version]:
            del self._versions[t.policy_version]
        group = self._groups[t.prompt_id]
        del group[self._key(t)]
        if not group:
            del self._groups[t.prompt_id]
            self._prompts.remove(t.prompt_id)
        number = self._number.pop(t.uid, None)
        if number is not None:  # the recency pool never holds what is stored no more
            del self._recent[number][t.uid]
            if not self._recent[number]:
                self._unpool(number)

    def _expire(self, min_version: int) -> None:
        for version in [v for v in self._versions if v < min_version]:
            self._counts["expired"] += len(self._versions[version])
            for uid in list(self._versions[version]):
                self._remove(self._stored[uid])

    def _pool_group(self, number: int, group: list[Trajectory]) -> None:
        if not group:
            return
        self._recent[number] = {t.uid: t for t in group}
        self._number |= dict.fromkeys(self._recent[number], number)
        self._pool.add(number)
        if self.recent_groups is not None and len(self._recent) > self.recent_groups:
            self._unpool(next(iter(self._recent)))

    def _unpool(self, number: int) -> None:
        for uid in self._recent.pop(number):
            del self._number[uid]
        self._pool.remove(number)

    # --- drawing ----------------------------------------------------------------------------------------------

    def sample(
        self,
        num_prompts: int,
        k: int,
        recency_prob: float = 0.0,
        inverse_temperature: float = 0.0,
        min_version: int = 0,
    ) -> list[list[Trajectory]] | None:
        """Draw `num_prompts` distinct prompts with `k` answers each, or None while fewer prompts are stored.

        Each prompt comes with probability `recency_prob` from the recency pool, with answers of one group there
        (and older ones only where that group has too few), otherwise uniformly from all prompts, with answers by
        `reward_probs`. Answers are drawn without replacement, unless a prompt holds fewer than `k`: then all of them,
        and again at random. What weights below `min_version` wrote leaves the buffer first.
        """
        with self._lock:
            if min_version > 0:
                self._expire(min_version)
            if len(self._prompts.keys) < num_prompts:
                return None
            recent = (list(self._recent[number].values()) for number in self._pool.in_random_order(self._rng))
            prompts = self._prompts.in_random_order(self._rng)
            drawn: dict[int, list[Trajectory]] = {}
            for from_pool in self._rng.random(num_prompts) < recency_prob:
                group = next((g for g in recent if g[0].prompt_id not in drawn), []) if from_pool else []
                if group:
                    drawn[group[0].prompt_id] = self._answers(group[0].prompt_id, group, k, 0.0)
                else:
                    prompt = next(p for p in prompts if p not in drawn)
                    drawn[prompt] = self._answers(prompt, [], k, inverse_temperature)
            self._counts["drawn"] += num_prompts * k
            return list(drawn.values())

    def _answers(self, prompt: int, recent: list[Trajectory], k: int, inverse_temperature: float) -> list[Trajectory]:
        if len(recent) >= k:
            return self._pick(recent, k, inverse_temperature)
        known = set(recent)
        older = [t for t in self._groups[prompt].values() if t not in known]
        answers = recent + self._pick(older, k - len(recent), inverse_temperature)
        return answers + [answers[i] for i in self._rng.integers(len(answers), size=k - len(answers))]

    def _pick(self, candidates: list[Trajectory], k: int, inverse_temperature: float) -> list[Trajectory]:
        """k of the candidates without replacement, or all of them where they are fewer."""
        n = len(candidates)
        if inverse_temperature == 0:
            picks = self._rng.permutation(n)[:k]
        else:  # Gumbel top-k is softmax without replacement, and cannot underflow
            rewards = np.array([t.reward for t in candidates], np.float64)
            picks = np.argsort(-(inverse_temperature * rewards + self._rng.gumbel(size=n)))[:k]
        return [candidates[i] for i in picks]

    # --- looking, saving --------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Trajectories and prompts stored; trajectories added, evicted for want of room, expired (too old to be trained
        on), replaced by a newer copy, drawn so far."""
        with self._lock:
            return {"stored": len(self._stored), "prompts": len(self._prompts.keys)} | self._counts

    def contents(self) -> list[Trajectory]:
        """All that is stored, oldest first."""
        with self._lock:
            return list(self._stored.values())

    def state_dict(self) -> dict:
        """All that a resumed run needs, in plain arrays and numbers."""
        with self._lock:
            stored = list(self._stored.values())
            state = {
                "prompts": list(self._prompts.keys),  # in the order that the next draws depend on
                "recent": [(number, list(self._recent[number])) for number in self._pool.keys],
                "next_number": self._next_number,
                "counts": dict(self._counts),
                "rng": self._rng.bit_generator.state,
            }
        return {"trajectories": pack(stored)} | state  # packing takes long; others may go on meanwhile

    def load_state_dict(self, state: dict) -> None:
        """Take the place of the buffer that `state` was taken from: the next draws are those that it would make.

        This buffer's own bounds hold: what is too much for them is left out.
        """
        fresh = ReplayBuffer(self.capacity, self.per_prompt, self.recent_groups, self.dedup)
        fresh.add(unpack(state["trajectories"]))
        fresh.start_pool()
        fresh._prompts = Bag([prompt for prompt in state["prompts"] if prompt in fresh._groups])
        recent = dict(state["recent"])
        for number in sorted(recent):  # oldest first
            fresh._pool_group(number, [fresh._stored[uid] for uid in recent[number] if uid in fresh._stored])
        fresh._pool = Bag([number for number in recent if number in fresh._recent])
        fresh._next_number, fresh._counts = state["next_number"], dict(state["counts"])
        fresh._rng.bit_generator.state = state["rng"]
        with self._lock:
            self.__dict__.update(fresh.__dict__ | {"_lock": self._lock})


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
    "Buffer",
    _Server,
    exposed=["pid", "add_packed", "sample_packed", "start_pool", "stats", "state_dict", "load_state_dict"],
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

    def state_dict(self) -> dict:
        return self._proxy.state_dict()


def serve(ctx, initializer: Callable, initargs: tuple, **options) -> tuple[BufferManager, object]:
    """Start the Manager's process and one buffer in it; returns both, and the caller must keep both."""
    manager = BufferManager(ctx=ctx)
    manager.start(initializer, initargs)
    return manager, manager.Buffer(**options)
