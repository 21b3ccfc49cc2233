"""The recorded stream comes back as it was kept, buffers draw from it, and the judge names a wrong sampler's fault."""

import numpy as np
import pytest

from buffer import ReplayBuffer, Trajectory
from notebooks.saved_run import SAVED
from notebooks.stream import arrivals, as_text, gathered, judge, keep_stream, over_time, read_stream, replay, replays
from runtime.served_buffer import pack


def trajectories(n: int) -> list[Trajectory]:
    """Groups of 4 for prompts 0, 1, ...; versions 0, 0, 1, 1, 2, 2; rewards 0, 1, 0, 1."""
    rng = np.random.default_rng(0)
    out = []
    for i in range(n):
        tokens = rng.integers(1, 60, size=rng.integers(1, 6)).astype(np.int32)
        what = (np.array([1], np.int32), tokens, "stop", float(i % 2), -1.5, np.zeros(len(tokens), np.float32))
        out.append(Trajectory((0, 0, i), i // 4, *what, i // 8, i // 8 + 1, 0))
    return out


def test_a_stream_comes_back(tmp_path):
    there = trajectories(20)
    keep_stream(pack(there), ["a", "b"], tmp_path / "stream.npz")
    back, prompts = read_stream(tmp_path / "stream.npz")
    assert prompts == ["a", "b"] and len(back) == 20
    for x, y in zip(there, back, strict=True):
        assert x.response.tolist() == y.response.tolist()
        names = ("prompt_id", "reward", "log_ref", "policy_version", "version_last")
        assert [getattr(x, n) for n in names] == [getattr(y, n) for n in names]


def test_a_stream_arrives_in_groups_and_is_drawn_from():
    there = trajectories(24)
    came = [(update, [len(g) for g in groups]) for update, groups in arrivals(there)]
    assert came == [(0, []), (1, [4, 4]), (2, [4, 4]), (3, [4, 4])]
    rows = replay(there, ReplayBuffer(100, 100, 2), 2, 4, m=1.0)
    assert [r["update"] for r in rows] == [1, 2, 3]
    assert [len(r["stored_ages"]) for r in rows] == [8, 16, 24]
    assert [set(r["drawn_ages"]) for r in rows] == [{1}] * 3  # the newest two groups only
    assert sorted(set(rows[-1]["stored_ages"])) == [1, 2, 3]
    assert rows[-1]["stored_reward"] == 0.5
    every = replay(there, ReplayBuffer(100, 100, 2), 2, 4, m=1.0, every=2)
    assert [r["update"] for r in every] == [2]


def test_replays_differ_in_their_draws_alone():
    there = trajectories(80)
    lives = replays(there, 3, {"capacity": 100, "per_prompt": 100, "recent_groups": 2}, 2, 4, 0.0)
    assert len(lives) == 3 and "stored_ages" in lives[0][0] and "stored_ages" not in lives[1][0]
    x, drawn = over_time(lives, "drawn_ages")
    assert x == list(range(1, 11)) and len(drawn) == 3 and drawn[0] != drawn[1] != drawn[2]
    assert over_time(lives, "stored_ages")[1] == [[1 + i / 2 for i in range(10)]]
    assert over_time(lives, "stored_reward", 4) == (x[3:], [[0.5] * 7])
    assert len(gathered(lives, "drawn_ages", 8)) == 3 * 2 * 8 and len(gathered(lives, "stored_ages", 9)) == 80


def test_the_saved_stream_is_a_run_that_learns():
    stream, prompts = read_stream(SAVED / "stream.npz")
    assert len(prompts) == 256 and len(stream) > 10_000
    versions = np.array([t.policy_version for t in stream])
    rewards = np.array([t.reward for t in stream])
    assert set(rewards) == {0.0, 1.0}
    assert rewards[versions < 5].mean() < rewards[versions > 100].mean() - 0.1
    assert all(t.policy_version <= t.version_last for t in stream)
    right = next(t for t in stream if t.reward)
    text = as_text(right, prompts)
    assert int(text[:2]) + int(text[3:5]) == int(text[6:9]) and text.endswith(f"by version {right.policy_version}")


# --- the judge --------------------------------------------------------------------------------------------------------


def sampler(coin: str = "each", by: str = "prompt", again: bool = False, share: float = 1.0):
    """The rule, or one of the mistakes that students make."""

    def draw(groups, by_prompt, recent, from_pool, rng):
        if from_pool:
            return groups[-1 - (rng.choice(recent) if by != "newest" else int(recent * rng.random() ** 2))]
        known = groups if by == "group" else by_prompt[list(by_prompt)[rng.choice(len(by_prompt))]]
        if by == "outside":
            known = [group for group in known if group in groups[:-recent]] or groups[:-recent]
        return known[0 if by == "first" else rng.choice(len(known))]

    def mine(groups, p, m, recent, rng):
        by_prompt: dict = {}
        for group in groups:
            by_prompt.setdefault(group[0].prompt_id, []).append(group)
        coins = rng.random(p) < m * share
        if coin == "one":
            coins[:] = coins[0]
        batch = []
        while len(batch) < p:
            from_pool = rng.random() < m if coin == "anew" else coins[len(batch)]
            group = draw(groups, by_prompt, recent, from_pool, rng)
            if again or all(group[0].prompt_id != g[0].prompt_id for g in batch):
                batch.append(group)
        return batch

    return mine


TESTS = ["different prompts", "as many from", "a coin for each prompt", "all of the newest", "all older prompts alike"]


WRONG = [  # a sampler's mistake, and the test that it fails
    ({}, None),
    ({"again": True}, 0),
    ({"share": 0.8}, 1),
    ({"coin": "one"}, 2),
    ({"by": "newest"}, 3),
    ({"by": "group"}, 4),
    ({"by": "first"}, 4),
]
CASES = [(*w, m) for w in WRONG for m in (0.3, 0.75)] + [({"coin": "anew"}, 1, 0.75), ({"by": "outside"}, 1, 0.3)]


@pytest.mark.parametrize("wrong, fails, m", CASES)
def test_the_judge_names_the_fault(wrong, fails, m, capsys):
    stream, _ = read_stream(SAVED / "stream.npz")
    groups = [group for _, groups in arrivals(stream) for group in groups][:380]
    verdict = judge(sampler(**wrong), groups, 16, m, 32, draws=1000)
    failed = [test for test, passed in verdict.items() if not passed]
    assert (not failed) if fails is None else any(TESTS[fails] in test for test in failed)
    said = capsys.readouterr().out
    assert said.count("NO ") == len(failed)


def test_the_judge_waits_for_a_sampler(capsys):
    assert judge(None, [], 16, 0.5, 32) == {} and "first" in capsys.readouterr().out
