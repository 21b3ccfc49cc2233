"""What notebooks read is what was kept: runs, thinned out, and what a checkpoint's policy makes of its buffer."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_stream import trajectories

from notebooks import saved_run
from notebooks.saved_run import BINS, RUNS, SAVED, SEEDS, bands, keep, look_back, read_saved
from runtime import checkpoint
from runtime.served_buffer import pack


@pytest.mark.parametrize("name", RUNS)
def test_the_saved_runs_are_whole_and_anonymous(name):
    file, options = RUNS[name]
    runs = read_saved(name)
    assert [run.config["seed"] for run in runs] == list(SEEDS)
    for run in runs:
        assert len(run.rows) == run.summary["steps"] == run.config["steps"]
        given = {
            o.removeprefix("--").replace("-", "_"): float(v) for o, v in zip(options[::2], options[1::2], strict=True)
        }
        assert {option: run.config[option] for option in given} == given
        steps, accuracy = run.accuracy
        assert steps == list(range(0, 201, 10)) and run.end == pytest.approx(np.mean(accuracy[-3:]))
        assert [look["step"] for look in run.looks] == list(range(20, 201, 20))
        assert all(0 < look["coverage"] <= 1 and len(look["loss"]) == len(BINS) for look in run.looks)
    text = (SAVED / f"{file}.json").read_text()
    assert len(text) < 60_000
    assert "/home" not in text and "/tmp" not in text


def test_the_default_runs_have_everything():
    for run in read_saved("default"):
        assert sum(run.ages.values()) == run.config["prompts_per_batch"] * run.config["samples_per_prompt"] * 200
        mean = sum(age * n for age, n in run.ages.items()) / sum(run.ages.values())
        assert mean == pytest.approx(run.summary["staleness_mean"], rel=1e-2)
        assert len(run.answers) == 8 and run.trace


def test_all_that_is_saved_is_less_than_300_kilobytes():
    assert {p.name for p in SAVED.iterdir()} == {f"{file}.json" for file, _ in RUNS.values()} | {"stream.npz"}
    assert sum(p.stat().st_size for p in SAVED.iterdir()) < 300_000


def test_keeping_runs_twice_changes_nothing(tmp_path, monkeypatch):
    runs = read_saved("default")
    monkeypatch.setattr(saved_run, "SAVED", tmp_path)
    keep(runs, tmp_path / "default.json", everything=True)
    for run, again in zip(runs, read_saved("default"), strict=True):
        assert again.rows == run.rows and again.ages == run.ages and again.accuracy == run.accuracy
        assert again.trace == run.trace and again.answers == run.answers and again.looks == run.looks
    keep(runs, tmp_path / "default.json", everything=False)
    assert all(run.rows and run.looks and not (run.trace or run.ages or run.answers) for run in read_saved("default"))


def test_a_course_is_the_mean_of_neighbours():
    run = read_saved("default")[0]
    rewards = [row["reward"] for row in run.rows]
    steps, means = run.course("reward", 4)
    assert (steps[0], steps[-1]) == (4, 200) and means[:2] == pytest.approx(
        [np.mean(rewards[:4]), np.mean(rewards[1:5])]
    )
    assert run.mean("reward", 10, 20) == pytest.approx(np.mean(rewards[10:20]))
    x, y = bands(read_saved("default"), "looked", "coverage")
    assert x[0] == 20 and len(y) == len(SEEDS) and y[0][-1] == run.looks[-1]["coverage"]
    assert bands([run], "accuracy")[1] == [run.accuracy[1]]


def test_a_look_back_by_hand(tmp_path, monkeypatch):
    """Six groups of 4, versions 0, 0, 1, 1, 2, 2, the first of them twice; every answer has the same log pi."""
    there = trajectories(24)
    there += [replace(t, uid=(1, 0, i)) for i, t in enumerate(there[:4])]
    place = tmp_path / "step-14"
    place.mkdir()
    state = {"trajectories": pack(there), "recent": []}
    checkpoint.save_buffer(place, state)
    monkeypatch.setattr(saved_run, "_log_pi", lambda folder, stored: [-3.0] * len(stored))
    look = look_back(place, beta=0.5)
    distinct = [len({t.response.tobytes() for t in there if t.prompt_id == prompt}) for prompt in range(6)]
    assert look["step"] == 14 and look["coverage"] == pytest.approx(np.mean(distinct) * np.exp(-3.0))
    # rewards 0, 1, 0, 1 over beta: u = c, c + 2, c, c + 2, whose variance is 1; times beta squared .25
    assert look["loss"] == [None, None, pytest.approx(0.25), None, None, None]  # ages 14, 13 and 12


def test_log_pi_is_the_models(tiny_folder):
    """Against a forward pass of one answer at a time."""
    import torch

    from runtime.policy import load_policy

    folder = tiny_folder
    there = trajectories(6)
    model = load_policy(str(folder))
    with torch.inference_mode():
        for t, found in zip(there, saved_run._log_pi(Path(folder), there), strict=True):
            ids = torch.tensor([*t.prompt, *t.response])[None]
            logits = model(ids).logits[0, len(t.prompt) - 1 : -1].log_softmax(-1)
            want = logits.gather(1, torch.tensor(t.response).long()[:, None]).sum()
            assert found == pytest.approx(float(want), abs=1e-4)
