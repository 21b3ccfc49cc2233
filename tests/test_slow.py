"""What `make test` has no time for: the promise of README's first screen, and every loss in every mode."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow
QUICK = ["--gpus", "0", "--engine", "hf", "--steps", "6", "--prompts-per-batch", "4", "--samples-per-prompt", "4"]
QUICK += ["--eval-every", "3", "--eval-prompts", "50", "--in-flight", "64", "--decay-steps", "0"]
QUICK += ["--task", "tests/checksum.py:make_task"]
LOSSES = {
    "tb": [],
    "tb, learned log Z": ["--log-z", "learned"],
    "tba_prime": ["--loss", "tba_prime", "--ref-reset-every", "2"],
    "rloo": ["--loss", "rloo"],
    "grpo": ["--loss", "grpo"],
    "dr. grpo": ["--loss", "grpo", "--dr-grpo"],
    "frozen_kl": ["--loss", "frozen_kl"],
    "vtrace": ["--loss", "vtrace"],
}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_default_run_learns_addition(start_job, seed):
    job = start_job("--seed", seed, "--gpus", 0)
    assert job.wait(600) == 0, job.text
    summary = job.summary()
    assert 0.25 <= summary["accuracy_before"] <= 0.45
    assert summary["accuracy_after"] >= 0.95, summary["evaluations"]
    assert json.loads((job.out / "config.json").read_text())["eval_prompts"] >= 500
    assert len(summary["evaluations"]) > 3
    assert summary["engine"] == "vllm" and summary["trajectories_generated"] > 0
    job.assert_nothing_left()


@pytest.mark.parametrize("sync", ["eager", "barrier", "onpolicy"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_in_every_mode(start_job, tiny_folder, loss, sync):
    job = start_job(*QUICK, "--sync", sync, "--model", tiny_folder, *LOSSES[loss])
    assert job.wait() == 0, job.text
    rows = job.rows()
    assert len(rows) == 6 and all(r["grad_norm"] > 0 for r in rows)
    assert len({r["loss"] for r in rows}) > 1
    job.assert_nothing_left()


def test_the_start_model_is_what_its_command_makes(tmp_path):
    """Seeded: made twice it is the same model, bit for bit."""
    import torch

    from runtime.policy import load_policy
    from tasks.addition import Addition, teach

    task, threads = Addition(), torch.get_num_threads()
    torch.set_num_threads(1)  # sums in another order are other sums
    for name in ("a", "b"):
        teach(task, Path(tmp_path / name), 3)
    torch.set_num_threads(threads)
    a, b = load_policy(tmp_path / "a"), load_policy(tmp_path / "b")
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_two_minutes_of_random_faults():
    command = [
        sys.executable,
        "-m",
        "bench.soak",
        "--minutes",
        "2",
        "--engine",
        "hf",
        "--pause",
        "8",
        "--accuracy",
        "0.6",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout[done.stdout.index("\n{") :])
    assert found["faults"] >= 3 and found["updates"] > 50
    assert found["updates_all_there_once"] and found["trained_as_many"] and found["no_uid_twice"]
    assert found["left_in_dev_shm"] == []
