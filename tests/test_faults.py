"""Faults that are really injected into whole runs: killed, stopped and raising processes, bad data, full disks.

The shorter ones use `--engine hf`, which starts in seconds; those where the engine matters are slow and use vLLM.
"""

import dataclasses
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
from conftest import ENDLESS, ROOT, SHORT

import tba_min
from runtime import checkpoint
from runtime.checkpoint import all_in, load_buffer
from runtime.child import Raised
from runtime.files import read_jsonl
from runtime.metrics import Board
from runtime.policy import load_policy
from runtime.served_buffer import unpack
from runtime.supervisor import Supervisor
from tasks.start_model import make_model, make_tokenizer

TIMES = {"seconds", "seconds_after", "busy_trainer", "busy_searchers"}  # of a row; the rest must repeat
BAD = """
import time
class Bad:
    train = validation = heldout = [f"{i}+1=" for i in range(10, 60)]
    def reward(self, prompt, answer):
        ACT
        return float(len(answer) % 2)
    def is_right(self, prompt, answer):
        return len(answer) > 4
def make_task():
    return Bad()
"""


def bad_task(folder, act: str) -> str:
    (folder / "bad.py").write_text(BAD.replace("ACT", act))
    return f"{folder / 'bad.py'}:make_task"


def running(job):
    """Wait until it trains; its processes."""
    return job.wait_for(lambda j: len(j.rows()) > 3 and j.family())


def checkpoints(job) -> list:
    return all_in(job.out / "checkpoints")


def searcher_rows(job, i=0) -> list[dict]:
    path = job.out / f"searcher-{i}.jsonl"
    return read_jsonl(path) if path.exists() else []  # one may still be starting


# --- a child dies -------------------------------------------------------------------------------------------------


def assert_goes_on_after(job, kill, incarnation=1):
    """After `kill()` searcher 0 comes back, trains on, and nothing that was handed over is lost."""
    before = job.rows()[-1]["generated"]
    kill()
    back = job.wait_for(lambda j: [r for r in searcher_rows(j) if r["incarnation"] == incarnation], 200)
    assert back[0]["generated"] >= before - 64
    assert back[0]["version"] > 0  # fresh weights, not those of the start
    trained = len(job.rows())
    job.wait_for(lambda j: len(j.rows()) > trained + 20)
    family = job.family()
    job.interrupt()
    assert job.wait(60) == 130, job.text
    job.assert_nothing_left(family)
    assert job.text.count("started again (1 of --max-restarts 5)") == 1
    summary = job.summary()
    assert summary["restarts"] == 1 and 0 <= summary["trajectories_lost"] <= 64
    uids = [t.uid for t in unpack(load_buffer(checkpoints(job)[-1])["trajectories"])]
    assert len(set(uids)) == len(uids) and {u[1] for u in uids} == {0, 1}
    assert_every_prompt_came_once(job)
    assert [r["step"] for r in job.rows()] == list(range(len(job.rows())))


def assert_every_prompt_came_once(job):
    """What was begun and never handed over was begun again, and nothing came twice; places as in runtime/prompts.py."""
    state = load_buffer(checkpoints(job)[-1])
    (low, above), in_flight = state["done"], 64 // 4
    written = Counter(uid[2] // 4 for uid in state["trajectories"][0]["uid"].tolist())
    assert set(written.values()) == {4} or state["counts"]["evicted"]  # S answers of each group
    assert max(written.values()) == 4 and set(written) <= {*range(low), *above}
    assert max([low, *above]) - low <= 3 * in_flight  # the gaps are what was in flight at the end
    if not state["counts"]["evicted"]:
        assert set(written) == {*range(low), *above}


@pytest.mark.parametrize("sync", ["eager", pytest.param("barrier", marks=pytest.mark.slow)])
def test_a_killed_searcher_is_started_again(start_job, tiny_folder, sync):
    job = start_job(*ENDLESS, "--sync", sync, "--model", tiny_folder)
    running(job)
    assert_goes_on_after(job, lambda: os.kill(job.pids()["searcher-0"], signal.SIGKILL))
    assert "searcher-0 was killed by SIGKILL" in job.text


@pytest.mark.slow
def test_what_a_dead_searcher_had_not_handed_over_is_counted(start_job, tiny_folder):
    """barrier with one sync only: all that is written after it stays in D_local."""
    args = ["--sync", "barrier", "--sync-every", 100_000, "--replay-ratio", 1e9]
    job = start_job(*ENDLESS, *args, "--model", tiny_folder)
    job.wait_for(lambda j: [r for r in searcher_rows(j) if r["generated"] > r["handed_over"] + 128])
    os.kill(job.pids()["searcher-0"], signal.SIGKILL)
    back = job.wait_for(lambda j: [r for r in searcher_rows(j) if r["incarnation"] == 1])
    job.interrupt()
    assert job.wait(60) == 130, job.text
    lost = job.summary()["trajectories_lost"]
    assert lost == back[0]["generated"] - 64 - back[0]["handed_over"] > 128  # 64 are its first round


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_vllm_searcher_that_dies_or_hangs_is_started_again(start_job, tiny_folder, signum):
    job = start_job(*ENDLESS, "--engine", "vllm", "--heartbeat-timeout", 5, "--model", tiny_folder)
    running(job)
    assert_goes_on_after(job, lambda: os.kill(job.pids()["searcher-0"], signum))
    how = "was killed by SIGKILL" if signum == signal.SIGKILL else "hung (5 s without a sign of life)"
    assert f"searcher-0 {how}" in job.text


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["eager", "barrier"])
def test_the_others_go_on_while_one_is_started_again(start_job, tiny_folder, sync):
    job = start_job(*ENDLESS, "--sync", sync, "--searchers", 2, "--replay-ratio", 0.5, "--model", tiny_folder)
    job.wait_for(lambda j: j.rows() and searcher_rows(j, 1) and searcher_rows(j, 0))
    old = job.pids()["searcher-1"]
    os.kill(old, signal.SIGKILL)
    job.wait_for(lambda j: j.pids()["searcher-1"] != old)
    os.kill(job.pids()["searcher-1"], signal.SIGSTOP)  # its start takes as long as this test wants
    at = len(job.rows())
    job.wait_for(lambda j: len(j.rows()) > at + 20)
    os.kill(job.pids()["searcher-1"], signal.SIGCONT)
    job.wait_for(lambda j: [r for r in searcher_rows(j, 1) if r["incarnation"] == 1 and r["handed_over"] > 0])
    family = job.family()
    job.interrupt()
    assert job.wait(60) == 130, job.text
    job.assert_nothing_left(family)


@pytest.mark.slow
def test_a_searcher_that_dies_again_and_again_ends_the_run(start_job, tiny_folder):
    job = start_job(*ENDLESS, "--max-restarts", 0, "--model", tiny_folder)
    family = running(job)
    os.kill(job.pids()["searcher-0"], signal.SIGKILL)
    assert job.wait(30) == 1, job.text
    job.assert_nothing_left(family)
    assert "searcher-0 was killed by SIGKILL, and --max-restarts 0 allows no further start" in job.text
    assert job.summary()["outcome"] == "failed" and checkpoints(job)  # what was learnt is kept


@pytest.mark.parametrize("victim", ["trainer", "buffer"])
@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_dead_or_hanging_trainer_or_buffer_ends_the_run(start_job, tiny_folder, victim, signum):
    job = start_job(*ENDLESS, "--checkpoint-every", 5, "--heartbeat-timeout", 3, "--model", tiny_folder)
    family = running(job)
    job.wait_for(checkpoints)
    os.kill(job.pids()[victim], signum)
    assert job.wait(40) == 1, job.text
    job.assert_nothing_left(family)
    how = f"{victim} was killed by SIGKILL" if signum == signal.SIGKILL else f"{victim} hangs: no sign of life for 3 s"
    assert job.text.count(f"tba_min: the run failed: {how}") == 1 and "Traceback" not in job.text
    assert f"--resume {job.out}` goes on from step-" in job.text
    if victim == "trainer" and signum == signal.SIGKILL:
        assert_resumes(start_job, job)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["trainer", "buffer"])
def test_in_the_syncs_of_barrier_too_the_dead_one_is_named(start_job, tiny_folder, victim):
    job = start_job(*ENDLESS, "--sync", "barrier", "--checkpoint-every", 5, "--model", tiny_folder)
    family = running(job)
    job.wait_for(checkpoints)
    os.kill(job.pids()[victim], signal.SIGKILL)
    assert job.wait(40) == 1, job.text
    job.assert_nothing_left(family)
    assert job.text.count(f"tba_min: the run failed: {victim} was killed by SIGKILL") == 1
    assert "Traceback" not in job.text and f"--resume {job.out}` goes on from step-" in job.text


@pytest.mark.parametrize(
    "error", [EOFError(), BrokenPipeError(), ConnectionResetError()], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("has_died", [True, False])
def test_a_broken_line_to_the_buffer_is_told_in_one_line(monkeypatch, tmp_path, error, has_died):
    """In `barrier` the parent itself calls the buffer; it may meet the broken line before it hears of the death."""
    run = object.__new__(tba_min.Run)
    run.config, run.out, run.result, run.interrupts = tba_min.Config(sync="barrier"), tmp_path, None, 0
    run.children, run.board, run.buffer, run.absent = mock.Mock(), mock.Mock(), mock.Mock(), set()
    run.children.is_gone.side_effect = lambda name, patience: has_died and name == "buffer"
    run.children.how_it_ended.return_value = "was killed by SIGKILL"
    run.children.printed.return_value = "it printed nothing"
    monkeypatch.setattr(tba_min, "lead_sync", mock.Mock(side_effect=error))
    cause = (
        "buffer was killed by SIGKILL; "
        if has_died
        else "the buffer's process does not answer: " + type(error).__name__
    )
    with pytest.raises(tba_min.Failed, match=cause):
        run._watch()


def assert_resumes(start_job, job):
    """It goes on with buffer and counters, and no update is missing or done twice."""
    last = checkpoints(job)[-1]
    done, stored = int(last.name[5:]), len(load_buffer(last)["trajectories"][0])
    assert stored > 0
    again = start_job("--steps", done + 30, resume=job.out)
    assert again.wait() == 0, again.text
    again.assert_nothing_left()
    assert [r["step"] for r in again.rows()] == list(range(done + 30))
    summary, rows = again.summary(), again.rows()
    assert summary["resumed_from"] == str(last) and summary["steps"] == done + 30
    assert rows[done]["trained"] == 16 * (done + 1) and rows[done]["generated"] >= rows[done - 1]["generated"] - 64
    assert any(int(age) > 0 for age in rows[done]["ages"])  # drawn from what the first part of the run had stored
    end = load_buffer(checkpoints(again)[-1])
    uids = [t.uid for t in unpack(end["trajectories"])]
    assert len(set(uids)) == len(uids) > stored and {u[1] for u in uids} == {0, 1}
    assert_every_prompt_came_once(again)
    assert end["counts"]["duplicates"] == 0


@pytest.mark.slow
def test_a_killed_parent_leaves_no_vllm(start_job, tiny_folder):
    job = start_job(*ENDLESS, "--engine", "vllm", "--model", tiny_folder)
    family = running(job)
    job.process.kill()
    job.wait(30)
    job.assert_nothing_left(family)


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["eager", "onpolicy"])
def test_slow_is_not_dead(start_job, tmp_path, sync):
    """Each step of the engine, evaluation, and first reward takes longer than a process may be silent."""
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 3, "num_attention_heads": 8}
    wide |= {"num_key_value_heads": 8, "head_dim": 128}
    small = make_model()
    type(small)(type(small.config)(**small.config.to_dict() | wide)).save_pretrained(tmp_path / "wide")  # 50M
    make_tokenizer().save_pretrained(tmp_path / "wide")
    task = bad_task(tmp_path, "self.slept = getattr(self, 'slept', None) or time.sleep(5) or True")
    args = ["--engine", "hf", "--sync", sync, "--steps", 3, "--in-flight", 256, "--eval-every", 2, "--max-seconds", 0]
    args += ["--heartbeat-timeout", 2, "--reward-timeout", 0, "--checkpoint-every", 2, "--prompts-per-batch", 16]
    job = start_job(*SHORT, *args, "--task", task, "--model", tmp_path / "wide")
    assert job.wait(400) == 0, job.text
    assert "started again" not in job.text and job.summary()["restarts"] == 0
    seconds = [r["seconds"]["generate"] for r in searcher_rows(job)] if sync == "eager" else [9]
    assert max(seconds) > 2, "this test was not slow"


# --- the first error is the one to show ---------------------------------------------------------------------------

CHILDREN = """
import ctypes, os, sys, time

class Unsayable(Exception):
    def __init__(self, a, b):  # can't be unpickled
        self.lock = __import__("threading").Lock()  # can't be pickled
    def __str__(self):
        raise RuntimeError("no")

class Child:
    def at(self, when):
        time.sleep(max(0, when - time.time()))

def value_error(): raise ValueError("v" * 10)
def key_error(): raise KeyError("k")
def refused(): raise ConnectionRefusedError("the trainer is gone")
def huge(): raise ValueError("h" * 3_000_000)
def unsayable(): raise Unsayable(1, 2)
def ends(): sys.exit(0)
def wrong_input():
    from runtime.files import ConfigError
    raise ConfigError("--model: wrong")
def crash():
    print("native code speaks its last words", flush=True)
    os.abort()
def silent(): os._exit(1)
def waits(): time.sleep(60)

def main(child, act, when):
    time.sleep(max(0, when - time.time()))
    globals()[act]()
"""
FIRST = {  # who does what how many seconds after the start: {name: (act, seconds)} -> the failure, its traceback
    "both at once": (
        {"trainer": ("value_error", 0), "searcher-0": ("key_error", 0)},
        ".* raised .*; then .* raised ", "Error",
    ),
    "searcher, then trainer": (
        {"trainer": ("value_error", 0.1), "searcher-0": ("key_error", 0)},
        "searcher-0 raised KeyError: 'k'; then trainer raised ValueError: vvvvvvvvvv$", "KeyError",
    ),
    "trainer, then two because of it": (
        {"trainer": ("value_error", 0), "searcher-0": ("refused", 0.1), "searcher-1": ("refused", 0.2)},
        "trainer raised ValueError: v*; then searcher-0 raised ConnectionRefusedError", "ValueError",
    ),
    "because of a trainer that says nothing": (
        {"trainer": ("silent", 0), "searcher-0": ("refused", 0.1)},
        "trainer ended with exit code 1; it printed nothing$", None,
    ),
    "a crash in native code": (
        {"trainer": ("crash", 0), "searcher-0": ("refused", 0.1)},
        "trainer was killed by SIGABRT; the last line that it printed, in .*: native code speaks its last words$", None,
    ),
    "larger than a pipe": (
        {"trainer": ("huge", 0), "searcher-0": ("refused", 0.2)},
        "trainer raised ValueError: h", "hhh",
    ),
    "no text, no pickle": (
        {"trainer": ("unsayable", 0)},
        "trainer raised Unsayable, whose text raised RuntimeError$", "Unsayable",
    ),
    "a task that exits": ({"trainer": ("ends", 0)}, "trainer raised SystemExit: 0$", "SystemExit"),
    "no such module": ({"trainer": (None, 0)}, "trainer raised ModuleNotFoundError: No module named 'no", "nowhere"),
    "wrong input, told by all": (
        {"trainer": ("wrong_input", 0), "searcher-0": ("wrong_input", 0)},
        "--model: wrong$", None,
    ),
    "two searchers, two errors, then one again": (
        {"trainer": ("waits", 0), "searcher-0": ("key_error", 0), "searcher-1": ("value_error", 0)},
        "searcher-. raised the same again: .*", "KeyError",
    ),
}  # fmt: skip


SLOWLY = [pytest.param(name, marks=pytest.mark.slow) for name in [*FIRST][1:]]


@pytest.mark.parametrize("name", [*FIRST][:1] + SLOWLY)
def test_the_first_error_is_the_one_to_show(tmp_path, monkeypatch, caplog, name):
    """Real processes without models, under the parent's real rules."""
    acts, expected, traceback = FIRST[name]
    (tmp_path / "children.py").write_text(CHILDREN)
    monkeypatch.syspath_prepend(tmp_path)
    ctx = multiprocessing.get_context("spawn")
    run = object.__new__(tba_min.Run)
    run.config, run.out, run.result, run.interrupts = tba_min.Config(sync="eager", searchers=2), tmp_path, None, 0
    run.board, run.errors, run.log, run.restarts = Board(ctx, 2), {}, logging.getLogger("tba_min"), 0
    run.lost, run.absent, run.incarnations = [0, 0], set(), [0, 0]
    when = time.time() + 2.5  # all have started by then
    run.children = Supervisor(ctx, tmp_path, run.board, ctx.Queue(), run._heard, run._raised, run._died, 120)

    def start(i: int | str) -> None:
        child = f"searcher-{i}" if isinstance(i, int) else i
        act, seconds = acts[child]
        run.children.spawn(child, "children" if act else "nowhere", {}, "cpu", (act, when + seconds))

    run._start_searcher = start
    for child in acts:
        start(int(child[9:]) if child.startswith("searcher") else child)
    with caplog.at_level(logging.ERROR), pytest.raises(tba_min.Failed) as failed:
        while time.time() < when + 30:
            run.children.listen(0.05)
    run.children.stop(lambda: 0.0)
    text = "\n".join(record.getMessage() for record in caplog.records if record.name == "tba_min")
    assert re.match(expected, str(failed.value)), failed.value
    assert len(str(failed.value)) < 50_000 and len(text) < 50_000
    shown = 2 if name.startswith("two searchers") else bool(traceback)
    assert text.count("Traceback (most recent") == shown and (traceback is None or traceback in text), text
    if name == "both at once":
        assert str(failed.value).split()[0] == text.split(":")[0]


@pytest.mark.slow
@pytest.mark.parametrize("_", range(3))
def test_trainer_and_searcher_raise_together(start_job, tiny_folder, tmp_path, _):
    """The trainer's evaluation and a searcher's reward meet, and both raise."""
    (tmp_path / "bad.py").write_text(
        BAD.replace("import time", "import pathlib, time\nHERE = pathlib.Path(__file__).parent\n"
        "def meet(me):\n    (HERE / me).touch()\n    while len(list(HERE.glob('met-*'))) < 2: pass\n"
        "    raise ValueError(me)")
        .replace("ACT", "meet('met-searcher')").replace("return len(answer) > 4", "meet('met-trainer')")
    )  # fmt: skip
    args = ["--reward-timeout", 0, "--model", tiny_folder, "--task", f"{tmp_path / 'bad.py'}:make_task"]
    job = start_job(*SHORT, "--engine", "hf", *args)
    assert job.wait(90) == 1
    job.assert_nothing_left()
    why = job.summary()["why"]
    assert job.text.count("Traceback") == 1 and f"tba_min: the run failed: {why}" in job.text
    assert re.fullmatch(r"(trainer|searcher-0) raised ValueError: met-\w+; then (trainer|searcher-0) raised .*", why)
    assert job.summary()["ended_by"] == "a failure" and job.summary()["advice"] is None


# --- errors in what the user brings -------------------------------------------------------------------------------


def test_an_error_in_a_reward_is_shown_once_and_ends_the_run(start_job, tiny_folder, tmp_path):
    task = bad_task(tmp_path, 'raise KeyError("no such grader")')
    job = start_job(*SHORT, "--engine", "hf", "--model", tiny_folder, "--task", task)
    assert job.wait(90) == 1
    job.assert_nothing_left()
    assert job.text.count("Traceback") == 1
    assert "in grading prompt '" in job.text and "+1=', answer '" in job.text
    assert "searcher-0 ended with exit code 1: started again" in job.text
    assert "the run failed: searcher-0 raised the same again: KeyError: 'no such grader'" in job.text
    summary = job.summary()
    assert (summary["ended_by"], summary["bottleneck"], summary["advice"]) == ("a failure", None, None)
    assert summary["busy_searchers"] == [None] and summary["busy_trainer"] is None
    assert not any(word in job.text for word in ("more searchers", "100%", "stop from outside"))


@pytest.mark.slow
def test_a_reward_that_fails_once_is_forgiven(start_job, tiny_folder, tmp_path):
    flag = tmp_path / "failed"
    task = bad_task(tmp_path, f'import os; os.path.exists(r"{flag}") or (open(r"{flag}", "w"), 1 / 0)')
    job = start_job(*SHORT, "--engine", "hf", "--model", tiny_folder, "--task", task)
    assert job.wait(90) == 0, job.text
    job.assert_nothing_left()
    assert "ZeroDivisionError" in job.text and job.summary()["restarts"] == 1


def test_bad_rewards_and_answers_are_counted(start_job, tiny_folder, tmp_path):
    """NaN, infinite, and endless rewards; answers at their longest; texts that are none."""
    act = "if prompt == '10+1=' or prompt == '11+1=': return float('nan' if answer < '5' else 'inf')\n"
    act += "        if prompt == '12+1=' and answer < '1':\n            while True: pass"
    task = bad_task(tmp_path, act)
    args = ["--reward-timeout", 0.05, "--max-new-tokens", 2, "--replay-ratio", 0.5, "--steps", 60]
    job = start_job(*SHORT, *args, "--engine", "hf", "--model", tiny_folder, "--task", task)
    assert job.wait(90) == 0, job.text
    job.assert_nothing_left()
    summary = job.summary()
    assert summary["bad_rewards"] > 10 and summary["truncated"] > summary["trajectories_generated"] / 2
    assert "is nan: it counts as 0" in job.text + (job.out / "run.log").read_text()
    assert "only counted" in job.text and job.text.count("it counts as 0") == 5
    rewards = [t.reward for t in unpack(load_buffer(checkpoints(job)[-1])["trajectories"])]
    assert np.isfinite(rewards).all() and set(rewards) == {0.0, 1.0}


def test_a_loss_that_is_not_finite_stops_the_run(start_job, tiny_folder, tmp_path):
    task = bad_task(tmp_path, "return 1e30 * len(answer)")
    job = start_job(*SHORT, "--engine", "hf", "--sync", "onpolicy", "--model", tiny_folder, "--task", task)
    assert job.wait(90) == 1
    assert "update 0: the loss is" in job.text and "prompt" in job.text
    with np.load(job.out / "bad-batch-0.npz") as kept:
        (trajectories, *_) = (kept[name] for name in kept.files)
    assert len(trajectories) == 16 and (trajectories["reward"] > 1e29).any()
    job.assert_nothing_left()


@pytest.mark.parametrize("fault", [pytest.param("NaN weights", marks=pytest.mark.slow), "a long prompt"])
def test_what_the_model_cannot_take_is_refused_in_one_line(start_job, tiny_folder, tmp_path, fault):
    folder, task = tiny_folder, bad_task(tmp_path, "")
    if fault == "NaN weights":
        folder = tmp_path / "nan"
        shutil.copytree(tiny_folder, folder)
        model = load_policy(folder)
        model.model.layers[1].mlp.up_proj.weight.data[3, 4] = torch.nan
        model.save_pretrained(folder)
        expected = f"--model {folder}: its weight model.layers.1.mlp.up_proj.weight is not finite everywhere"
    else:
        text = (tmp_path / "bad.py").read_text().replace('"{i}+1="', '"{i}" + "+1" * 40 + "="')
        (tmp_path / "bad.py").write_text(text)
        expected = "has 83 tokens; with --max-new-tokens 8 that is more than the 64 that the model takes"
    job = start_job(*SHORT, "--engine", "hf", "--model", folder, "--task", task)
    assert job.wait(60) == 1
    assert job.text.count(expected) == 1 and "Traceback" not in job.text
    assert "started again" not in job.text
    job.assert_nothing_left()


def test_an_error_that_was_told_is_not_told_again_while_the_run_ends(caplog):
    """Trainer and searcher refuse the same prompt; which of them is heard before the end is chance."""
    run = object.__new__(tba_min.Run)
    run.children, run.interrupts, run.result, run.unsaved = SimpleNamespace(ending=True), 0, None, None
    run.log = logging.getLogger("tba_min")
    run.errors = {"trainer": ("--task x.py", "")}
    run._raised(
        [Raised(1.0, "searcher-0", "--task x.py: its prompt is long"), Raised(2.0, "searcher-1", "OSError: no")]
    )
    told = [(r.name, r.message) for r in caplog.records]
    assert told[0] == ("others", "while ending, searcher-0 raised --task x.py: its prompt is long")
    assert told[1] == ("tba_min", "while ending, searcher-1 raised OSError: no")


# --- checkpoints --------------------------------------------------------------------------------------------------


def without_times(rows):
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["--log-z learned --threads 1", "--loss tba_prime"])
def test_onpolicy_with_hf_repeats_and_resumes_bit_by_bit(start_job, tiny_folder, loss):
    """Two runs with one seed are the same run; and so is one that was killed and resumed on the way."""
    args = [*SHORT, "--engine", "hf", "--sync", "onpolicy", "--max-seconds", 0, "--model", tiny_folder, *loss.split()]
    args += ["--steps", 40, "--checkpoint-every", 6, "--ref-reset-every", 4]
    whole, broken = start_job(*args), start_job(*args)  # at once: nothing in them depends on time
    broken.wait_for(lambda j: checkpoints(j) and len(j.rows()) > 8)
    os.kill(broken.pids()["trainer"], signal.SIGKILL)
    assert broken.wait() == 1 and whole.wait() == 0, whole.text
    last = int(checkpoints(broken)[-1].name[5:])
    assert 6 <= last < 40
    expected, first = without_times(whole.rows()), without_times(broken.rows())
    assert len(first) >= last and first == expected[: len(first)]
    again = start_job(resume=broken.out)
    assert again.wait() == 0, again.text
    again.assert_nothing_left()
    assert without_times(again.rows()) == expected
    a, b = (load_policy(checkpoints(job)[-1]) for job in (whole, again))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert [e[2] for e in whole.summary()["evaluations"]] == [e[2] for e in again.summary()["evaluations"]]


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def change(key, value):
    def act(path):
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

    return act


DAMAGES = {
    "a file cut short": ("checkpoints/step-12/trainer.pt", cut, "bytes where"),
    "a flipped bit": ("checkpoints/step-12/model.safetensors", flip, "SHA-256"),
    "a flipped bit in the buffer": ("checkpoints/step-12/buffer.npz", flip, "SHA-256"),
    "a missing file": ("checkpoints/step-12/progress.json", os.unlink, "is missing"),
    "a cut manifest": ("checkpoints/step-12/manifest.json", cut, "is damaged"),
    "a later format": ("checkpoints/step-12/manifest.json", change("format", 99), "of format 99"),
    "a cut config": ("config.json", cut, "is damaged"),
    "another version's config": ("config.json", change("velocity", 3), "another version or damaged"),
    "a config with a wrong type": ("config.json", change("steps", "many"), "steps is 'many'"),
    "a config of another program": ("config.json", lambda p: p.write_text('{"model_type": "llama"}'), "or a model's"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_run_is_refused_in_one_line(finished, tmp_path, capsys, name):
    file, damage, expected = DAMAGES[name]
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    damage(out / file)
    assert tba_min.main(["--resume", str(out), "--steps", "20"]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and str(out / file) in text and expected in text
    assert (f"--resume {out}/checkpoints/step-8 goes on" in text) == file.startswith("checkpoints")


def test_a_run_goes_on_from_one_of_its_checkpoints_and_a_limit_of_time_begins_anew(start_job, finished, tmp_path):
    """From update 8 of 12, elsewhere, with a limit that is shorter than what the run has used already."""
    shutil.copytree(finished, tmp_path / "run")
    progress = tmp_path / "run" / "checkpoints" / "step-8" / "progress.json"
    progress.write_text(json.dumps(json.loads(progress.read_text()) | {"seconds_before": 1000.0}))
    manifest = progress.with_name("manifest.json")
    described = json.loads(manifest.read_text())
    described["files"]["progress.json"] = checkpoint._describe(progress)
    manifest.write_text(json.dumps(described))
    job = start_job("--max-seconds", 300, resume=progress.parent)
    job.out = tmp_path / "run"
    assert job.wait() == 0, job.text
    assert [row["step"] for row in job.rows()] == list(range(12)) and job.rows()[8]["seconds"] >= 1000
    assert job.summary()["ended_by"] == "--steps" and job.summary()["resumed_from"] == str(progress.parent)
    aside = job.out / "checkpoints" / "aside-1"
    assert sorted(p.name for p in aside.iterdir()) == ["metrics.jsonl", "step-12"] and str(aside) in job.text
    job.assert_nothing_left()


def test_what_a_run_was_started_with_stays(finished, capsys):
    assert tba_min.main(["--resume", str(finished), "--loss", "grpo"]) == 2
    assert "--loss grpo: the run to resume has tb" in capsys.readouterr().err
    assert tba_min.main(["--resume", str(finished / "nothing")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [cut, lambda p: p.write_bytes(b"no such thing"), lambda p: p.write_bytes(b"")])
def test_a_damaged_model_is_refused_in_one_line(tiny_folder, tmp_path, capsys, damage):
    shutil.copytree(tiny_folder, tmp_path / "model")
    damage(tmp_path / "model" / "model.safetensors")
    assert tba_min.main([*SHORT, "--engine", "hf", "--model", str(tmp_path / "model")]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and str(tmp_path / "model" / "model.safetensors") in text and "damaged" in text


@pytest.mark.slow
def test_a_full_disk_leaves_the_checkpoint_before(start_job, tiny_folder):
    """The trainer may write no file above 2 MB for a while: the optimizer's state has 2.8 MB."""
    job = start_job(*ENDLESS, "--checkpoint-every", 10, "--keep-checkpoints", 3, "--model", tiny_folder)
    job.wait_for(checkpoints)
    trainer = psutil.Process(job.pids()["trainer"])
    trainer.rlimit(psutil.RLIMIT_FSIZE, (2_000_000, psutil.RLIM_INFINITY))
    job.wait_for(lambda j: "was not written" in j.printed())
    kept = checkpoints(job)
    done = len(job.rows())
    job.wait_for(lambda j: len(j.rows()) > done + 20)  # it goes on
    assert checkpoints(job) == kept and not list((job.out / "checkpoints").glob(".writing-*"))
    trainer.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
    job.wait_for(lambda j: checkpoints(j) != kept)
    trainer.rlimit(psutil.RLIMIT_FSIZE, (2_000_000, psutil.RLIM_INFINITY))
    family = job.family()
    job.interrupt()
    assert job.wait(60) == 1, job.text  # what was learnt since could not be saved: that is a failure
    job.assert_nothing_left(family)
    assert "the last checkpoint was not written" in job.text
    assert_resumes(start_job, job)


@pytest.mark.slow
def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(start_job, tiny_folder):
    for _ in range(5):
        job = start_job(*ENDLESS, "--checkpoint-every", 1, "--model", tiny_folder)
        job.wait_for(lambda j: len(checkpoints(j)) > 1)
        pid, root = job.pids()["trainer"], job.out / "checkpoints"
        while not list(root.glob(".writing-*/manifest.json")):
            pass
        os.kill(pid, signal.SIGKILL)
        assert job.wait(30) == 1
        if list(root.glob(".writing-*")):
            break
    else:
        pytest.fail("no kill fell into the writing of a checkpoint")
    assert_resumes(start_job, job)
    assert not list(root.glob(".writing-*"))


@pytest.mark.slow
def test_one_run_a_folder(start_job, tiny_folder, capsys):
    job = start_job(*ENDLESS, "--checkpoint-every", 5, "--model", tiny_folder)
    job.wait_for(checkpoints)
    assert tba_min.main(["--resume", str(job.out)]) == 2
    assert "a run is at work in this folder" in capsys.readouterr().err
    job.interrupt()
    assert job.wait(60) == 130
    assert len(checkpoints(job)) == 2  # --keep-checkpoints


# --- signals ------------------------------------------------------------------------------------------------------


def test_ctrl_c_while_a_process_is_being_started_is_not_lost():
    code = """
import os, signal
from runtime.child import uninterrupted
got = []
signal.signal(signal.SIGINT, lambda *_: got.append(1))
with uninterrupted():
    os.kill(os.getpid(), signal.SIGINT)
    assert not got
assert got
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_ctrl_z_is_no_hang(start_job, tiny_folder):
    """The whole run is stopped for longer than the heartbeat's timeout, and then goes on as if nothing had been."""
    job = start_job(*ENDLESS, "--heartbeat-timeout", 3, "--model", tiny_folder)
    family = running(job)
    for process in family:
        process.suspend()
    time.sleep(5)
    for process in reversed(family):
        process.resume()
    done = len(job.rows())
    job.wait_for(lambda j: len(j.rows()) > done + 20)
    job.interrupt()
    assert job.wait(60) == 130, job.text
    assert job.summary()["restarts"] == 0
    job.assert_nothing_left(family)


# --- long runs ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ten_thousand_updates_need_no_more_than_five_thousand(start_job, tiny_folder):
    """Resident memory, open files, threads of every process, and /dev/shm."""
    args = [*ENDLESS, "--steps", 10_000, "--prompts-per-batch", 2, "--samples-per-prompt", 2, "--max-new-tokens", 2]
    args += ["--eval-every", 1000, "--buffer-capacity", 500, "--per-prompt-capacity", 8, "--replay-ratio", 1e9]
    job = start_job(*args, "--model", tiny_folder)
    seen: list[tuple[int, dict]] = []

    job.wait_for(lambda j: j.rows())

    def look(j):
        seen.append((len(j.rows()), measure(j)))
        time.sleep(1)
        return seen[-1][0] >= 9_500

    job.wait_for(look, 900)
    family = job.family()
    assert job.wait() == 0, job.text
    job.assert_nothing_left(family)
    for name in seen[-1][1]:
        early = [m[name] for n, m in seen if 2_500 < n < 5_000 and name in m]
        late = [m[name] for n, m in seen if n > 7_500 and name in m]
        rss, files, threads = (max(column) for column in zip(*early, strict=True))
        assert max(m[0] for m in late) < 1.05 * rss + 15e6, name  # bounded lists fill: spans of the timeline
        assert max(m[1] for m in late) <= files + 2 and max(m[2] for m in late) <= threads + 1, name


def measure(job) -> dict[str, tuple[int, int, int]]:
    """Of each process by name: resident bytes, open files, threads; and of /dev/shm its number of files."""
    out = {"/dev/shm": (0, len(os.listdir("/dev/shm")), 0)}
    for name, pid in job.pids().items():
        try:
            process = psutil.Process(pid)
            out[name] = (process.memory_info().rss, process.num_fds(), process.num_threads())
        except psutil.Error:  # it ends
            continue
    return out


def test_the_configuration_survives_its_file(tmp_path):
    import config

    default = config.resolve(config.Config(gpus=0, engine="hf"))
    for changed in (default, dataclasses.replace(default, beta=1, out="x", max_seconds=3)):
        config.save(changed, tmp_path / "config.json")
        assert config.load(tmp_path / "config.json") == changed
