"""What notebooks read is what was kept: runs and streams, thinned out."""

import json

import numpy as np
import pytest

from buffer import ReplayBuffer, Trajectory
from notebooks.saved_run import (
    SAVED,
    arrivals,
    as_text,
    gathered,
    keep,
    keep_stream,
    over_time,
    read_run,
    read_stream,
    replay,
)
from runtime.served_buffer import pack

RUNS = ["default", "m_0", "huge_k", "small_beta"]


@pytest.mark.parametrize("name", RUNS)
def test_the_saved_runs_are_whole_small_and_anonymous(name):
    path = SAVED / f"{name}.json"
    run = read_run(path)
    assert len(run.rows) == run.summary["steps"] == run.config["steps"]
    assert run.accuracy[0][0] == 0 and run.accuracy[-1][0] == run.summary["steps"]
    batch = run.config["prompts_per_batch"] * run.config["samples_per_prompt"]
    assert sum(run.ages.values()) == batch * len(run.rows)
    mean = sum(age * n for age, n in run.ages.items()) / sum(run.ages.values())
    assert mean == pytest.approx(run.summary["staleness_mean"], rel=1e-3)
    assert len(run.answers) == 8 and bool(run.trace) == (name == "default")
    assert path.stat().st_size < 60_000
    for hint in ("/home", "/tmp"):
        assert hint not in path.read_text()


def test_all_that_is_saved_is_less_than_300_kilobytes():
    assert sum(p.stat().st_size for p in SAVED.iterdir()) < 300_000


def test_keeping_a_run_twice_changes_nothing(tmp_path):
    run = read_run(SAVED / "default.json")
    keep(run, tmp_path / "again.json", timeline=True)
    again = read_run(tmp_path / "again.json")
    assert again.rows == run.rows and again.ages == run.ages and again.accuracy == run.accuracy
    assert again.trace == run.trace and again.answers == run.answers
    json.loads((tmp_path / "again.json").read_text())


def trajectories(n: int) -> list[Trajectory]:
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
    there = trajectories(24)  # groups of 4 for prompts 0 to 5, versions 0, 0, 1, 1, 2, 2, each an update later
    came = [(update, [len(g) for g in groups]) for update, groups in arrivals(there)]
    assert came == [(0, []), (1, [4, 4]), (2, [4, 4]), (3, [4, 4])]
    rows = replay(there, ReplayBuffer(100, 100, 2), 2, 4, m=1.0)
    assert [r["held"] for r in rows] == [8, 16, 24] and [r["update"] for r in rows] == [1, 2, 3]
    assert [set(r["drawn_ages"]) for r in rows] == [{1}] * 3  # the newest two groups only
    assert sorted(set(rows[-1]["stored_ages"])) == [1, 2, 3]
    assert rows[-1]["stored_reward"] == 0.5
    assert over_time(rows, "stored_reward", 2) == ([2, 3], [0.5, 0.5])
    assert over_time(rows, "stored_ages") == ([1, 2, 3], [1.0, 1.5, 2.0])
    assert len(gathered(rows, "drawn_ages", 1)) == 16
    every = replay(there, ReplayBuffer(100, 100, 2), 2, 4, m=1.0, every=2)
    assert [r["update"] for r in every] == [2]


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
