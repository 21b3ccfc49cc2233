"""The replay buffer: what it keeps, what it draws and how often, and that other processes see the same."""

import dataclasses
import itertools
import multiprocessing
import pickle
import random
import sys
import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer import ReplayBuffer, Trajectory, reward_probs
from runtime.child import prepare_buffer
from runtime.metrics import Board
from runtime.served_buffer import RemoteBuffer, pack, serve, unpack

COUNTER = itertools.count()


def trajectory(prompt_id=0, uid=None, response=(3, 1), reward=0.0, **other):
    """A trajectory with a uid of its own."""
    response = np.array(response, np.int32)
    values = {
        "uid": (0, 0, next(COUNTER)) if uid is None else (0, 0, uid),
        "prompt_id": prompt_id,
        "prompt": np.array([5, prompt_id % 7], np.int32),
        "response": response,
        "finish_reason": "stop",
        "reward": reward,
        "log_ref": -1.5,
        "log_mu": np.linspace(-1, 0, len(response), dtype=np.float32),
        "policy_version": 3,
        "version_last": 4,
        "searcher": 0,
    }
    return Trajectory(**values | other)


def group(prompt_id, uids, **other):
    return [trajectory(prompt_id, uid, **other) for uid in uids]


def uids(trajectories):
    return [t.uid[2] for t in trajectories]


def same(a, b):
    """Whether two trajectories agree in every field, bit for bit and in type."""
    for field in dataclasses.fields(Trajectory):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, np.ndarray):
            if x.dtype != y.dtype or x.shape != y.shape or x.tobytes() != y.tobytes():
                return False
        elif type(x) is not type(y) or x != y:
            return False
    return True


def assert_same_batches(a, b):
    assert [uids(g) for g in a] == [uids(g) for g in b]
    for x, y in zip(itertools.chain(*a), itertools.chain(*b), strict=True):
        assert same(x, y)


# --- pack, unpack ---------------------------------------------------------------------------------------------------

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=9)
floats = st.floats(allow_nan=False)
versions = st.integers(0, 2**40)


@st.composite
def any_trajectory(draw):
    response = draw(tokens)
    log_mu = draw(st.lists(st.floats(-100, 0, width=32), min_size=len(response), max_size=len(response)))
    return Trajectory(
        draw(st.tuples(st.integers(0, 99), st.integers(0, 99), versions)),
        draw(versions),
        np.array(draw(tokens), np.int32),
        np.array(response, np.int32),
        draw(st.sampled_from(["stop", "length"])),
        draw(floats),
        draw(floats),
        np.array(log_mu, np.float32),
        draw(versions),
        draw(versions),
        draw(st.integers(0, 99)),
    )


@given(st.lists(any_trajectory(), max_size=6))
def test_unpacking_gives_back_what_was_packed(trajectories):
    back = unpack(pickle.loads(pickle.dumps(pack(trajectories))))
    assert len(back) == len(trajectories)
    assert all(same(a, b) for a, b in zip(trajectories, back, strict=True))


def test_unpacked_arrays_hold_no_others_bytes():
    """A view would keep the whole batch in memory for as long as one trajectory of it is stored."""
    for t in unpack(pack(group(0, [1, 2, 3]))):
        assert t.prompt.base is None and t.response.base is None and t.log_mu.base is None


# --- what is kept ---------------------------------------------------------------------------------------------------


def test_groups_are_formed_by_prompt_not_by_place():
    store = ReplayBuffer(100, 100)
    store.add([trajectory(i % 3, uid=i) for i in range(12)])  # 0 1 2 0 1 2 ...
    for _ in range(20):
        for drawn in store.sample(3, 4, recency_prob=0.5):
            assert len({t.prompt_id for t in drawn}) == 1
            assert sorted(uids(drawn)) == [drawn[0].prompt_id + 3 * j for j in range(4)]
    assert store.stats()["prompts"] == 3


def test_the_oldest_go_first_when_the_buffer_is_full():
    store = ReplayBuffer(5, 100)
    store.add(group(0, [0, 1, 2]))
    store.add(group(1, [3, 4]))
    store.add(group(0, [5]) + group(2, [6]))
    assert uids(store.contents()) == [2, 3, 4, 5, 6]
    assert store.stats() == {
        "stored": 5,
        "prompts": 3,
        "added": 7,
        "evicted": 2,
        "expired": 0,
        "duplicates": 0,
        "drawn": 0,
        "fell_back": 0,
    }
    store.add(group(2, range(7, 20)))  # more than it can hold
    assert uids(store.contents()) == [15, 16, 17, 18, 19]
    assert store.stats()["prompts"] == 1


def test_the_oldest_of_a_prompt_go_first_when_the_prompt_is_full():
    store = ReplayBuffer(100, 3)
    store.add(group(0, [0, 1]) + group(1, [2, 3]))
    store.add(group(0, [4, 5]))
    assert uids(store.contents()) == [1, 2, 3, 4, 5]
    assert store.stats()["evicted"] == 1


def test_dedup_keeps_the_newest_copy_of_an_answer():
    store = ReplayBuffer(100, 100, dedup=True)
    store.add([trajectory(0, 0, (3, 1)), trajectory(0, 1, (4, 1)), trajectory(1, 2, (3, 1))])
    store.add([trajectory(0, 3, (3, 1)), trajectory(0, 4, (3, 1)), trajectory(0, 5, (3, 1, 1))])
    assert uids(store.contents()) == [1, 2, 4, 5]  # another prompt's same answer stays
    assert store.stats()["duplicates"] == 2 and store.stats()["evicted"] == 0
    off = ReplayBuffer(100, 100)
    off.add([trajectory(0, 0, (3, 1)), trajectory(0, 1, (3, 1))])
    assert uids(off.contents()) == [0, 1]


def test_dedup_makes_a_renewed_answer_the_youngest():
    store = ReplayBuffer(2, 100, dedup=True)
    store.add([trajectory(0, 0, (3, 1)), trajectory(0, 1, (4, 1))])
    store.add([trajectory(0, 2, (3, 1))])
    store.add([trajectory(0, 3, (5, 1))])
    assert uids(store.contents()) == [2, 3]


@pytest.mark.parametrize("dedup", [False, True])
def test_what_is_sent_twice_inflates_nothing(dedup):
    """Neither the store nor the recency pool, whose chance of being drawn would be wrong otherwise."""
    store = ReplayBuffer(100, 100, dedup=dedup)
    sent = [[trajectory(p, 10 * p + i, (3 + i, 1)) for i in range(2)] for p in range(3)]
    for g in sent:
        store.add(g)
    for _ in range(7):
        store.add(sent[0])
    assert len(store.contents()) == 6 and store.stats()["added"] == 6 and store.stats()["duplicates"] == 14
    counts = Counter(store.sample(1, 2, recency_prob=1.0)[0][0].prompt_id for _ in range(3000))
    assert_frequencies(counts, {p: 1 / 3 for p in range(3)})


def test_with_dedup_known_answers_do_not_inflate_the_recency_pool():
    """The published code counts them, and then draws at negative indices."""
    store = ReplayBuffer(100, 100, dedup=True)
    for n in range(50):
        store.add([trajectory(0, 2 * n, (3, 1)), trajectory(0, 2 * n + 1, (4, 1))])
    store.add([trajectory(1, 1000, (3, 1)), trajectory(1, 1001, (4, 1))])
    assert len(store.state_dict()["recent"]) == 2
    counts = Counter(store.sample(1, 2, recency_prob=1.0)[0][0].prompt_id for _ in range(3000))
    assert_frequencies(counts, {0: 1 / 2, 1: 1 / 2})


def test_the_recency_pool_does_not_outgrow_the_store():
    """Also where nobody ever starts it anew."""
    store = ReplayBuffer(6, 4)
    for n in range(200):
        store.add(group(n % 7, [2 * n, 2 * n + 1]))
    assert sorted(u[2] for _, g in store.state_dict()["recent"] for u in g) == uids(store.contents())


# --- how often what is drawn ----------------------------------------------------------------------------------------


def assert_frequencies(counts, probabilities):
    """Counts of independent draws agree with the exact distribution.

    Each cell must lie within 5 standard errors of its expectation. Were the seeds not fixed, a right sampler would
    fail with a chance below 6e-7 a cell, 1e-4 for all cells of this file. With some 10,000 draws, 5 standard errors are
    .025 at most: much less than what the mistakes one can think of would move.
    """
    n = sum(counts.values())
    assert sum(probabilities.values()) == pytest.approx(1)
    assert set(counts) <= {cell for cell, p in probabilities.items() if p > 0}
    for cell, p in probabilities.items():
        assert abs(counts[cell] - n * p) <= 5 * (n * p * (1 - p)) ** 0.5 + 1e-9, (cell, counts[cell] / n, p)


def pair_probabilities(prompts, pool, m, chosen=()):
    """Exact probability of each set of two prompts: one after the other, from the pool with probability m."""
    if len(chosen) == 2:
        return Counter({frozenset(chosen): 1.0})
    left, recent = [[p for p in ps if p not in chosen] for ps in (prompts, pool)]
    total = Counter()
    for share, candidates in ((m if recent else 0.0, recent), (1 - m if recent else 1.0, left)):
        for p in candidates:
            for pair, probability in pair_probabilities(prompts, pool, m, (*chosen, p)).items():
                total[pair] += share / len(candidates) * probability
    return total


@pytest.mark.parametrize("m", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("pool", [1, 3])
def test_prompts_come_from_the_recency_pool_with_probability_m(m, pool):
    store = ReplayBuffer(100, 100, recent_groups=pool, seed=1)
    for prompt in range(6):
        store.add(group(prompt, [10 * prompt, 10 * prompt + 1]))
    counts = Counter(frozenset(g[0].prompt_id for g in store.sample(2, 2, m)) for _ in range(10_000))
    assert_frequencies(counts, pair_probabilities(range(6), range(6 - pool, 6), m))


def test_prompts_are_uniform_however_many_answers_they_have_and_whoever_left():
    """Also when prompts leave and come back, which is when a list that is drawn from gets out of order."""
    store = ReplayBuffer(24, 100, seed=2)
    for prompt in [0, 1, 2, 3, 4, 0, 1]:
        store.add(group(prompt, [next(COUNTER) for _ in range(5)]))
    stored = Counter(t.prompt_id for t in store.contents())
    assert stored == {0: 5, 1: 5, 2: 4, 3: 5, 4: 5}
    counts = Counter(store.sample(1, 2)[0][0].prompt_id for _ in range(10_000))
    assert_frequencies(counts, {p: 1 / len(stored) for p in stored})


def test_what_the_recency_pool_lacks_is_counted():
    store = ReplayBuffer(100, 100)
    store.add(group(0, [0]) + group(1, [1]) + group(2, [2]))
    store.sample(3, 1, recency_prob=1.0)
    assert store.stats()["fell_back"] == 0
    store.start_pool()
    store.add(group(3, [3]))
    store.sample(3, 1, recency_prob=1.0)  # one of three from the pool
    store.sample(3, 1, recency_prob=0.0)  # none was asked for
    assert store.stats()["fell_back"] == 2


def test_a_recent_draw_is_uniform_over_groups_and_stays_inside_one():
    store = ReplayBuffer(100, 100, recent_groups=3, seed=3)
    for prompt, ids in [(0, [0, 1, 2]), (1, [10, 11, 12]), (0, [3, 4, 5]), (0, [6, 7, 8])]:
        store.add(group(prompt, ids))  # the first is pushed out of the pool
    counts = Counter(frozenset(uids(store.sample(1, 2, 1.0)[0])) for _ in range(10_000))
    pairs = [frozenset(pair) for g in ([10, 11, 12], [3, 4, 5], [6, 7, 8]) for pair in itertools.combinations(g, 2)]
    assert_frequencies(counts, {pair: 1 / 9 for pair in pairs})


def test_answers_are_uniform_without_replacement():
    store = ReplayBuffer(100, 100, seed=4)
    store.add(group(0, range(5), reward=1.0))
    counts = Counter(frozenset(uids(store.sample(1, 3)[0])) for _ in range(10_000))
    assert_frequencies(counts, {frozenset(c): 1 / 10 for c in itertools.combinations(range(5), 3)})


def plackett_luce(weights, k):
    """Probability of each set of k items drawn one after the other in proportion to their weights."""
    total = Counter()
    for order in itertools.permutations(range(len(weights)), k):
        p, left = 1.0, sum(weights)
        for i in order:
            p, left = p * weights[i] / left, left - weights[i]
        total[frozenset(order)] += p
    return total


@pytest.mark.parametrize("inverse_temperature", [0.5, 2.0])
@pytest.mark.parametrize("k", [1, 3])
def test_reward_softmax_without_replacement_is_plackett_luce(inverse_temperature, k):
    rewards = [0.0, 1.0, -0.7, 0.4, 1.0]
    store = ReplayBuffer(100, 100, seed=5)
    store.add([trajectory(0, i, reward=r) for i, r in enumerate(rewards)])
    draws = (store.sample(1, k, 0.0, inverse_temperature)[0] for _ in range(15_000))
    counts = Counter(frozenset(uids(drawn)) for drawn in draws)
    weights = [float(np.exp(inverse_temperature * r)) for r in rewards]
    assert_frequencies(counts, plackett_luce(weights, k))
    np.testing.assert_allclose(reward_probs(rewards, inverse_temperature), np.array(weights) / sum(weights))


def test_recent_answers_are_drawn_uniformly_whatever_their_reward():
    store = ReplayBuffer(100, 100, seed=6)
    store.add([trajectory(0, i, reward=float(i)) for i in range(3)])
    counts = Counter(uids(store.sample(1, 1, 1.0, 5.0)[0])[0] for _ in range(6000))
    assert_frequencies(counts, {i: 1 / 3 for i in range(3)})


@pytest.mark.filterwarnings("error")
def test_huge_and_negative_rewards_overflow_nothing():
    rewards = [1e6, -1e6, 1e6, 0.0, -1e6]
    probs = reward_probs(np.array(rewards), 1.0)
    assert probs.tolist() == [0.5, 0.0, 0.5, 0.0, 0.0]
    np.testing.assert_allclose(reward_probs([-1e6, -1e6 - 1], 1.0), [1 / (1 + np.exp(-1)), 1 / (1 + np.e)])
    store = ReplayBuffer(100, 100)
    store.add([trajectory(0, i, reward=r) for i, r in enumerate(rewards)])
    counts = Counter()
    for _ in range(2000):
        drawn = store.sample(1, 3, 0.0, 1.0)[0]
        assert len(set(uids(drawn))) == 3 and {0, 2, 3} == set(uids(drawn))  # the best three, for certain
        counts[uids(store.sample(1, 1, 0.0, 1.0)[0])[0]] += 1
    assert_frequencies(counts, {0: 1 / 2, 2: 1 / 2})


# --- batches --------------------------------------------------------------------------------------------------------


def test_fewer_than_k_stored_are_all_drawn_and_some_again():
    store = ReplayBuffer(100, 100, seed=7)
    store.add(group(0, range(3)))
    again = Counter()
    for m, inverse_temperature in [(0.0, 0.0), (0.0, 2.0), (1.0, 0.0)] * 1000:
        drawn = uids(store.sample(1, 4, m, inverse_temperature)[0])
        assert len(drawn) == 4 and set(drawn) == {0, 1, 2}
        again[next(u for u, n in Counter(drawn).items() if n == 2)] += 1
    assert_frequencies(again, {i: 1 / 3 for i in range(3)})


def test_a_recent_group_thinner_than_k_is_drawn_whole_and_filled_up():
    """Without replacement as long as the prompt holds K; what is recent is never passed over."""
    store = ReplayBuffer(100, 100, recent_groups=1, seed=8)
    store.add(group(0, range(4)))
    store.add(group(0, [10, 11]))
    counts = Counter()
    for _ in range(5000):
        drawn = uids(store.sample(1, 3, 1.0)[0])
        assert {10, 11} < set(drawn) and len(set(drawn)) == 3
        counts[(set(drawn) - {10, 11}).pop()] += 1
    assert_frequencies(counts, {i: 1 / 4 for i in range(4)})


def test_no_batch_while_there_are_too_few_prompts():
    store = ReplayBuffer(100, 100)
    assert store.sample(1, 2) is None
    store.add(group(0, range(9)) + group(1, range(10, 19)))
    assert store.sample(3, 2) is None and store.sample(3, 2, 1.0) is None
    assert store.stats()["drawn"] == 0
    assert len(store.sample(2, 2)) == 2
    assert store.stats()["drawn"] == 4


@pytest.mark.parametrize("m", [0.0, 0.5, 1.0])
def test_the_prompts_of_a_batch_are_distinct(m):
    store = ReplayBuffer(1000, 100, recent_groups=6)
    for n in range(20):
        store.add(group(n % 5, [2 * n, 2 * n + 1]))  # the pool holds prompts twice
    for p in (1, 3, 5):
        for _ in range(50):
            batch = store.sample(p, 2, m)
            assert len({g[0].prompt_id for g in batch}) == len(batch) == p


def test_start_pool_leaves_only_what_comes_after():
    """barrier: m is the probability of a draw from the last sync's data."""
    store = ReplayBuffer(100, 100)
    store.add(group(0, [0, 1]))
    store.start_pool()
    assert store.sample(1, 2, 1.0)[0][0].prompt_id == 0  # an empty pool: from all that is stored
    store.add(group(1, [2, 3]))
    store.add(group(2, [4, 5]))
    counts = Counter(store.sample(1, 2, 1.0)[0][0].prompt_id for _ in range(2000))
    assert_frequencies(counts, {1: 1 / 2, 2: 1 / 2})
    assert {store.sample(1, 2, 0.0)[0][0].prompt_id for _ in range(100)} == {0, 1, 2}
    assert len(store.contents()) == 6


# --- eviction and the recency pool, by schedules at random ----------------------------------------------------------


class Plain:
    """What a ReplayBuffer stores and holds recent, in lists that are searched from end to end."""

    def __init__(self, capacity, per_prompt, recent_groups, dedup):
        self.capacity, self.per_prompt, self.recent_groups, self.dedup = capacity, per_prompt, recent_groups, dedup
        self.stored, self.recent = [], []

    def add(self, trajectories):
        fresh = []
        for t in trajectories:
            if t.uid in [s.uid for s in self.stored]:
                continue
            if self.dedup:
                copies = [s for s in self.stored if s.prompt_id == t.prompt_id and list(s.response) == list(t.response)]
                self.stored = [s for s in self.stored if s not in copies]
            self.stored.append(t)
            fresh.append(t)
            of_prompt = [s for s in self.stored if s.prompt_id == t.prompt_id]
            if len(of_prompt) > self.per_prompt:
                self.stored.remove(of_prompt[0])
        # a group that doesn't live any more is none: it takes no place in the pool
        self.recent = [g for g in ([t for t in g if t in self.stored] for g in self.recent) if g]
        for prompt in dict.fromkeys(t.prompt_id for t in fresh):
            self.recent.append([t for t in fresh if t.prompt_id == prompt and t in self.stored])
        self.recent = [g for g in self.recent if g]
        if self.recent_groups is not None:
            self.recent = self.recent[-self.recent_groups :]
        self.stored = self.stored[-self.capacity :]
        self.recent = [g for g in ([t for t in g if t in self.stored] for g in self.recent) if g]


@given(
    st.integers(1, 14),
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(1, 4)),
    st.booleans(),
    st.randoms(use_true_random=False),
)
@settings(max_examples=150, deadline=None)
def test_any_schedule_of_adding_and_drawing(capacity, per_prompt, recent_groups, dedup, chance: random.Random):
    """What is drawn is stored, of one prompt a group, K each; the pool is what lives of the newest groups."""
    store = ReplayBuffer(capacity, per_prompt, recent_groups, dedup, seed=chance.randrange(100))
    plain = Plain(capacity, per_prompt, recent_groups, dedup)
    for _ in range(chance.randrange(1, 25)):
        what = chance.random()
        if what < 0.6:
            sent = [
                trajectory(chance.randrange(4), chance.randrange(200), (chance.randrange(3), 1))
                for _ in range(chance.randrange(6))
            ]
            store.add(sent)
            plain.add(sent)
        elif what < 0.65:
            store.start_pool()
            plain.recent = []
        elif what < 0.75:
            state = pickle.loads(pickle.dumps(store.state_dict()))
            store = ReplayBuffer(capacity, per_prompt, recent_groups, dedup)
            store.load_state_dict(state)
            assert uids(store.contents()) == uids(plain.stored)
        else:
            check_draw(store, plain, chance.randrange(1, 4), chance.randrange(2, 5), chance.choice([0.0, 0.5, 1.0]))
        assert uids(store.contents()) == uids(plain.stored)
        stats = store.stats()
        assert stats["stored"] == len(plain.stored) <= capacity
        assert stats["prompts"] == len({t.prompt_id for t in plain.stored})
        assert stats["added"] - stats["evicted"] <= stats["stored"] + stats["duplicates"]
        assert [[u[2] for u in g] for _, g in sorted(store.state_dict()["recent"])] == [uids(g) for g in plain.recent]


def check_draw(store, plain, p, k, m):
    batch = store.sample(p, k, m)
    prompts = {t.prompt_id for t in plain.stored}
    if len(prompts) < p:
        assert batch is None
        return
    assert len(batch) == p and len({g[0].prompt_id for g in batch}) == p
    from_pool = 0
    for drawn in batch:
        assert len(drawn) == k and len({t.prompt_id for t in drawn}) == 1
        of_prompt = [t.uid for t in plain.stored if t.prompt_id == drawn[0].prompt_id]
        assert {t.uid for t in drawn} <= set(of_prompt)
        assert len({t.uid for t in drawn}) == min(k, len(of_prompt))
        recent = [{t.uid for t in g} for g in plain.recent if g[0].prompt_id == drawn[0].prompt_id]
        ids = {t.uid for t in drawn}
        from_pool += any(ids <= g or g <= ids for g in recent)
    if m == 1.0:
        assert from_pool >= min(p, len({g[0].prompt_id for g in plain.recent}))


# --- seeds, saving --------------------------------------------------------------------------------------------------


def filled(seed=0, dedup=False):
    """A buffer with a history: full, prompts that left and came back, part of the generator used up."""
    store = ReplayBuffer(60, 10, recent_groups=8, dedup=dedup, seed=seed)
    chance = random.Random(9)
    for n in range(80):
        prompt = chance.randrange(12)
        store.add([trajectory(prompt, 4 * n + i, (chance.randrange(9), 1), chance.random()) for i in range(4)])
        store.sample(2, 4, 0.5, 1.0)
    return store


def batches(store, n=15):
    """n draws with more added in between."""
    out = []
    for i in range(n):
        out += store.sample(4, 4, 0.5, 1.0)
        store.add(group(i % 13, [10_000 + 4 * i + j for j in range(4)], response=(i % 5, 1), reward=0.1 * i))
    return out


def test_a_seed_fixes_the_draws():
    assert_same_batches(batches(filled(seed=1)), batches(filled(seed=1)))
    assert [uids(g) for g in batches(filled(seed=1))] != [uids(g) for g in batches(filled(seed=2))]


@pytest.mark.parametrize("dedup", [False, True])
def test_a_loaded_state_goes_on_exactly_like_the_one_it_was_taken_from(dedup):
    store = filled(dedup=dedup)
    state = pickle.loads(pickle.dumps(store.state_dict()))
    other = ReplayBuffer(60, 10, recent_groups=8, dedup=dedup, seed=77)
    other.add(group(3, range(5000, 5020)))  # all of it makes way
    other.load_state_dict(state)
    assert other.stats() == store.stats()
    assert_same_batches([other.contents()], [store.contents()])
    assert_same_batches(batches(other), batches(store))
    assert other.stats() == store.stats()


def test_a_saved_state_is_a_copy():
    store = filled()
    state = store.state_dict()
    before = pickle.dumps(state)
    batches(store)
    assert pickle.dumps(state) == before


def test_a_loaded_pool_still_knows_which_group_is_the_oldest():
    """Also where the oldest group's first answer has left, so that another group has the oldest answer."""
    store = ReplayBuffer(100, 1, recent_groups=2)
    store.add(group(0, [0]) + group(1, [1]) + group(0, [2]))  # 0 makes way for 2
    other = ReplayBuffer(100, 1, recent_groups=2)
    other.load_state_dict(store.state_dict())
    for one in (store, other):
        one.add(group(2, [3]))
        assert sorted(u[2] for _, g in one.state_dict()["recent"] for u in g) == [1, 3]


def test_a_smaller_buffer_loads_what_it_can_hold():
    state = filled().state_dict()
    small = ReplayBuffer(7, 3, recent_groups=2)
    small.load_state_dict(state)
    assert len(small.contents()) == 7 and uids(small.contents())[-1] == 4 * 80 - 1
    assert len(small.state_dict()["recent"]) <= 2
    stored = set(uids(small.contents()))
    for _ in range(50):
        assert {u for g in small.sample(2, 3, 0.5) for u in uids(g)} <= stored


# --- threads and processes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("each", [300, pytest.param(1500, marks=pytest.mark.slow)])  # groups of a writer
@pytest.mark.parametrize("capacity", [10**6, 60])  # room for all; or one goes out for each that comes in
def test_threads_that_add_and_draw_at_once_lose_nothing(capacity, each):
    store, writers = ReplayBuffer(capacity, 10**6, recent_groups=32), 4
    errors, done = [], threading.Event()

    def write(w):
        for n in range(each):
            store.add(group(n % 40, [w * 10**6 + 4 * n + i for i in range(4)]))

    def read():
        while not done.is_set():
            for drawn in store.sample(8, 4, 0.5, 1.0) or []:
                if len(drawn) != 4 or len({t.prompt_id for t in drawn}) != 1:
                    errors.append(drawn)

    def guarded(work, *args):
        try:
            work(*args)
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # switch threads as often as can be
    try:
        threads = [threading.Thread(target=guarded, args=(write, w)) for w in range(writers)]
        readers = [threading.Thread(target=guarded, args=(read,)) for _ in range(2)]
        for thread in threads + readers:
            thread.start()
        for thread in threads:
            thread.join(60)
        done.set()
        for thread in readers:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    sent = {w * 10**6 + i for w in range(writers) for i in range(4 * each)}
    left, stats = uids(store.contents()), store.stats()
    assert len(left) == len(set(left)) == stats["stored"] == min(capacity, len(sent)) and set(left) <= sent
    assert stats["added"] == len(sent) and stats["evicted"] == len(sent) - len(left) and stats["duplicates"] == 0


def drive(store):
    """Fill a buffer from packed adds, and draw; what comes of it, in plain values."""
    for n in range(30):
        store.add(group(n % 9, [4 * n + i for i in range(4)], response=range(n % 4), reward=0.1 * n))
    drawn = [store.sample(3, 4, 0.5, 2.0) for _ in range(20)]
    return [pack([t for g in batch for t in g]) for batch in drawn], store.stats(), store.sample(100, 4)


def visitor(proxy, answer):
    """Body of a second process."""
    answer.send(drive(RemoteBuffer(proxy)))
    answer.close()


def test_a_served_buffer_is_the_same_buffer_from_another_process():
    ctx = multiprocessing.get_context("spawn")
    options = {"capacity": 100, "per_prompt": 10, "recent_groups": 6, "seed": 3}
    manager, proxy = serve(ctx, prepare_buffer, (Board(ctx, 0),), **options)
    try:
        receiving, sending = ctx.Pipe(duplex=False)
        process = ctx.Process(target=visitor, args=(proxy, sending))
        process.start()
        sending.close()
        assert receiving.poll(60), "the second process said nothing"
        drawn, stats, too_many = receiving.recv()
        process.join(60)
        local = ReplayBuffer(**options)
        want_drawn, want_stats, _ = drive(local)
        assert process.exitcode == 0 and too_many is None and stats == want_stats
        for got, want in zip(drawn, want_drawn, strict=True):
            for a, b in zip(got, want, strict=True):
                assert a.dtype == b.dtype and a.tobytes() == b.tobytes()
        assert_same_batches(RemoteBuffer(proxy).sample(5, 4, 1.0), local.sample(5, 4, 1.0))  # what it left, seen here
        other = ReplayBuffer(**options)
        state = proxy.packed_state()
        other.load_state_dict(state | {"trajectories": unpack(state["trajectories"])})
        assert_same_batches([other.contents()], [local.contents()])
        assert proxy.pid() not in (process.pid, multiprocessing.current_process().pid)
    finally:
        manager.shutdown()


# --- too old to be trained on ---------------------------------------------------------------------------------------


def test_what_is_too_old_leaves_the_buffer_and_is_never_drawn():
    buffer = ReplayBuffer(1000, 100, recent_groups=4, seed=0)
    for prompt in range(8):
        buffer.add([trajectory(prompt, 10 * prompt + i, policy_version=prompt) for i in range(4)])
    for oldest in (0, 3, 5):
        for _ in range(20):
            groups = buffer.sample(3, 4, 0.5, 0.0, oldest)
            assert min(t.policy_version for group in groups for t in group) >= oldest
        stats = buffer.stats()
        assert (stats["expired"], stats["stored"], stats["prompts"]) == (4 * oldest, 32 - 4 * oldest, 8 - oldest)
    assert buffer.sample(4, 4, 0.5, 0.0, 5) is None  # three prompts are left
    buffer.add([trajectory(0, 500, policy_version=4), trajectory(0, 501, policy_version=9)])  # one came too late
    assert {t.uid[2] for group in buffer.sample(4, 4, 1.0, 0.0, 5) for t in group if t.prompt_id == 0} == {501}
    assert buffer.stats()["expired"] == 21


def test_a_restored_buffer_knows_what_is_too_old():
    buffer = ReplayBuffer(1000, 100, seed=0)
    buffer.add([trajectory(i % 4, i, policy_version=i % 3) for i in range(24)])
    other = ReplayBuffer(1000, 100)
    other.load_state_dict(buffer.state_dict())
    assert all(t.policy_version == 2 for group in other.sample(4, 2, 0.0, 0.0, 2) for t in group)
    assert other.stats()["expired"] == 16
