"""The replay buffer: searchers add trajectories, the trainer draws batches.

A batch is P prompts with K answers each (TBA, section 3.1). With probability m a prompt comes from the recency pool,
otherwise from all that is stored; its answers are then drawn uniformly, or by a softmax of their reward. A Manager
serves the buffer to the other processes (runtime/served_buffer.py). One lock guards it. No method waits for data.

Departures from the paper: in `eager`, where no sync ever happens, the recency pool is the newest groups instead of the
last sync's. Deduplication is an option, and so is a limit on staleness.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False, slots=True)
class Trajectory:
    """One answer to one prompt, its scores, and who wrote it."""

    uid: tuple[int, int, int]  # searcher, how often it was started again (its incarnation), S * place + its number
    prompt_id: int
    prompt: np.ndarray  # [L] int32, token ids
    response: np.ndarray  # [T] int32, token ids, the end-of-sequence token included
    finish_reason: str  # "stop": ended by itself; "length": cut off
    reward: float
    log_ref: float  # log pi_ref(y|x), nats
    log_mu: np.ndarray  # [T] float32, log-probability of each token when it was sampled, nats
    policy_version: int  # trainer updates behind the weights that wrote the first token
    version_last: int  # ... the last token
    searcher: int


# --- which answers: the reward part of TBA's section 3.1 ------------------------------------------------------------


def reward_probs(rewards: Sequence[float] | np.ndarray, inverse_temperature: float) -> np.ndarray:
    """softmax(inverse_temperature * rewards), safe for huge and negative rewards. [n] -> [n]"""
    z = inverse_temperature * np.asarray(rewards, np.float64)
    e = np.exp(z - z.max())
    return e / e.sum()


def draw_by_reward(
    rewards: Sequence[float] | np.ndarray, k: int, inverse_temperature: float, rng: np.random.Generator
) -> np.ndarray:
    """Draw k of n answers one after the other, each by `reward_probs` of those that are left. [n] -> [min(k, n)] places

    This is Gumbel top-k: the same distribution (a test compares them) in one pass, and no probability underflows.
    """
    scores = inverse_temperature * np.asarray(rewards, np.float64) + rng.gumbel(size=len(rewards))
    return np.argsort(-scores)[:k]


# --- the buffer -----------------------------------------------------------------------------------------------------


class Bag(dict):
    """A dictionary whose keys can also be drawn at random; all in constant time. Change it by `[key] =` and `del`."""

    def __init__(self, items: dict | None = None) -> None:
        super().__init__(items or {})
        self.reorder(self)

    def reorder(self, order: Iterable[int]) -> None:
        """Draw from the keys in this order; it may name others too."""
        self.order = [key for key in order if key in self]
        self._place = {key: place for place, key in enumerate(self.order)}

    def __setitem__(self, key: int, value: dict) -> None:
        if key not in self:
            self._place[key] = len(self.order)
            self.order.append(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: int) -> None:
        super().__delitem__(key)
        place, last = self._place.pop(key), self.order.pop()
        if last != key:  # the last one takes its place
            self.order[place], self._place[last] = last, place

    def in_random_order(self, rng: np.random.Generator) -> Iterator[int]:
        """All keys, shuffled only as far as they are asked for (Fisher-Yates)."""
        moved: dict[int, int] = {}
        for i in range(len(self.order)):
            j = int(rng.integers(i, len(self.order)))
            yield self.order[moved.get(j, j)]
            moved[j] = moved.get(i, i)


def _put(index: dict, key: int, name: tuple | bytes, t: Trajectory) -> None:
    """index[key][name] = t, where index[key] may be missing."""
    if key not in index:
        index[key] = {}
    index[key][name] = t


def _take(index: dict, key: int | None, name: tuple | bytes) -> None:
    """Undo `_put`; nothing happens where `key` has left already."""
    if key in index:
        del index[key][name]
        if not index[key]:
            del index[key]


class ReplayBuffer:
    """D_global, in the paper's words: trajectories by prompt, bounded per prompt and in total; the oldest go first.

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
        self._stored: OrderedDict[tuple, tuple[Trajectory, int | None]] = OrderedDict()  # uid -> it, its group's number
        # ... oldest first, and three indices of it, each key -> {uid: trajectory}, oldest first:
        self._prompts = Bag()  # prompt_id (with dedup an answer's name is its tokens, not its uid)
        self._recent = Bag()  # the recency pool: number of a group
        self._versions: dict[int, dict[tuple, Trajectory]] = {}  # policy_version
        self._next_group = 0
        self._counts = {"added": 0, "evicted": 0, "expired": 0, "duplicates": 0, "drawn": 0, "fell_back": 0}

    # --- adding -----------------------------------------------------------------------------------------------

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Take in trajectories; those of one prompt in one call are one group of the recency pool."""
        with self._lock:
            groups: dict[int, int] = {}  # prompt_id -> number of its group
            for t in trajectories:
                if t.uid in self._stored:  # sent twice
                    self._counts["duplicates"] += 1
                    continue
                if t.prompt_id not in groups:
                    groups[t.prompt_id], self._next_group = self._next_group, self._next_group + 1
                self._store(t, groups[t.prompt_id])
                self._counts["added"] += 1
            self._make_room()

    def start_pool(self) -> None:
        """Empty the recency pool: what is added from now on is "the last sync's" (barrier)."""
        with self._lock:
            self._recent = Bag()

    def _name(self, t: Trajectory) -> tuple | bytes:
        return t.response.tobytes() if self.dedup else t.uid

    def _store(self, t: Trajectory, group: int | None) -> None:
        if group is not None:  # first: removing an older copy may empty this group, which would come back as the newest
            _put(self._recent, group, t.uid, t)
        copy = self._prompts.get(t.prompt_id, {}).get(self._name(t))
        if copy is not None:
            self._remove(copy.uid)
            self._counts["duplicates"] += 1
        self._stored[t.uid] = (t, group)
        _put(self._prompts, t.prompt_id, self._name(t), t)
        _put(self._versions, t.policy_version, t.uid, t)
        answers = self._prompts[t.prompt_id]
        if len(answers) > self.per_prompt:
            self._evict(next(iter(answers.values())).uid)

    def _make_room(self) -> None:
        while self.recent_groups is not None and len(self._recent) > self.recent_groups:
            del self._recent[next(iter(self._recent))]
        while len(self._stored) > self.capacity:
            self._evict(next(iter(self._stored)))

    def _evict(self, uid: tuple) -> None:
        self._remove(uid)
        self._counts["evicted"] += 1

    def _remove(self, uid: tuple) -> None:
        t, group = self._stored.pop(uid)
        _take(self._prompts, t.prompt_id, self._name(t))
        _take(self._versions, t.policy_version, uid)
        _take(self._recent, group, uid)

    def _expire(self, min_version: int) -> None:
        for version in [v for v in self._versions if v < min_version]:
            for uid in list(self._versions[version]):
                self._remove(uid)
                self._counts["expired"] += 1

    # --- drawing: section 3.1 ---------------------------------------------------------------------------------

    def sample(
        self,
        num_prompts: int,
        k: int,
        recency_prob: float = 0.0,
        inverse_temperature: float = 0.0,
        min_version: int = 0,
    ) -> list[list[Trajectory]] | None:
        """Draw `num_prompts` distinct prompts with `k` answers each, or None while fewer prompts are stored.

        Args:
            recency_prob: m, the probability that a prompt comes from the recency pool.
            inverse_temperature: of the softmax of rewards by which the other prompts' answers are drawn; 0: uniformly.
            min_version: before the draw, remove answers whose first token older weights wrote.
        """
        with self._lock:
            if min_version > 0:
                self._expire(min_version)
            if len(self._prompts) < num_prompts:
                return None
            self._counts["drawn"] += num_prompts * k
            drawn = self._draw_prompts(num_prompts, recency_prob)
            return [self._draw_answers(prompt, recent, k, inverse_temperature) for prompt, recent in drawn.items()]

    def _draw_prompts(self, num_prompts: int, recency_prob: float) -> dict[int, list[Trajectory]]:
        """Which prompts: each comes with probability m from the recency pool, otherwise uniformly from all.

        Returns prompt_id -> the recent group that was drawn, which is empty for the others.
        """
        recent = (list(self._recent[group].values()) for group in self._recent.in_random_order(self._rng))
        prompts = self._prompts.in_random_order(self._rng)
        drawn: dict[int, list[Trajectory]] = {}
        for from_pool in self._rng.random(num_prompts) < recency_prob:
            group = next((g for g in recent if g[0].prompt_id not in drawn), []) if from_pool else []
            self._counts["fell_back"] += bool(from_pool and not group)
            prompt = group[0].prompt_id if group else next(p for p in prompts if p not in drawn)
            drawn[prompt] = group
        return drawn

    def _draw_answers(
        self, prompt: int, recent: list[Trajectory], k: int, inverse_temperature: float
    ) -> list[Trajectory]:
        """Which answers: k of the recent group, uniformly. Where it has too few, the prompt's other answers.

        All without replacement. A prompt that holds fewer than k gives all of them, and some again at random.
        """
        if len(recent) >= k:
            return self._draw(recent, k, 0.0)
        known = set(recent)
        others = [t for t in self._prompts[prompt].values() if t not in known]
        answers = recent + self._draw(others, k - len(recent), 0.0 if recent else inverse_temperature)
        return answers + [answers[i] for i in self._rng.integers(len(answers), size=k - len(answers))]

    def _draw(self, answers: list[Trajectory], k: int, inverse_temperature: float) -> list[Trajectory]:
        if inverse_temperature == 0:
            places = self._rng.permutation(len(answers))[:k]
        else:
            places = draw_by_reward([t.reward for t in answers], k, inverse_temperature, self._rng)
        return [answers[i] for i in places]

    # --- looking, saving --------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """How many are stored (trajectories, prompts), and how many were ever added, evicted (no room), expired (too
        old), duplicates (replaced by a newer copy, or sent twice), drawn, and fell back (prompts that the recency pool
        should have given and had not)."""
        with self._lock:
            return {"stored": len(self._stored), "prompts": len(self._prompts)} | self._counts

    def contents(self) -> list[Trajectory]:
        """All that is stored, oldest first."""
        with self._lock:
            return [t for t, _ in self._stored.values()]

    def state_dict(self) -> dict:
        """All that a resumed run needs."""
        with self._lock:
            return {
                "trajectories": [t for t, _ in self._stored.values()],
                "prompts": list(self._prompts.order),
                "recent": [(group, list(self._recent[group])) for group in self._recent.order],
                "next_number": self._next_group,
                "counts": dict(self._counts),
                "rng": self._rng.bit_generator.state,
            }

    def load_state_dict(self, state: dict) -> None:
        """Become the buffer that `state` was taken from: the next draws are those that it would make.

        This buffer's own bounds hold: what is too much for them is left out.
        """
        fresh = ReplayBuffer(self.capacity, self.per_prompt, self.recent_groups, self.dedup)
        group_of = {uid: group for group, uids in state["recent"] for uid in uids}
        for t in state["trajectories"]:
            fresh._store(t, group_of.get(t.uid))
        fresh._recent = Bag({group: fresh._recent[group] for group in sorted(fresh._recent)})  # oldest first
        fresh._make_room()
        fresh._prompts.reorder(state["prompts"])
        fresh._recent.reorder(group for group, _ in state["recent"])
        fresh._next_group, fresh._counts = state["next_number"], fresh._counts | state["counts"]
        fresh._rng.bit_generator.state = state["rng"]
        with self._lock:
            self.__dict__.update(fresh.__dict__ | {"_lock": self._lock})
