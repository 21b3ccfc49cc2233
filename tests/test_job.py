"""The whole job with real vLLM searchers, shortened; and how it ends when something goes wrong."""

import json
import math
import shutil
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import ROOT, SHORT, Job

from config import cores
from runtime.files import read_jsonl
from runtime.plots import SPANS
from runtime.summary import CURES

SUMMARY = """task model engine sync seed steps accuracy_before accuracy_after seconds_total seconds_rl
    trajectories_generated trajectories_trained staleness_mean staleness_max busy_trainer busy_searchers""".split()
WORK = {"import", "load", "generate", "reward", "log pi_ref", "hand over", "pull weights"}
WORK |= {"sample", "forward, backward", "step", "publish", "evaluate"}
WAITS = {"eager": {"wait for start"}, "barrier": {"wait for sync"}, "onpolicy": set()}


@pytest.fixture(scope="module")
def eager_job(tmp_path_factory, tiny_folder):
    """Real vLLM, updates in flight, answers of 1 to 24 tokens, more of them asked for than there are places."""
    args = ["--steps", 60, "--in-flight", 10, "--max-new-tokens", 24, "--max-staleness", 5, "--sync-every", 2]
    args += ["--event-log", "--recency-prob", 0.5, "--max-seconds", 0, "--model", tiny_folder]
    job = Job(tmp_path_factory.mktemp("eager") / "run", *SHORT, *args)
    job.seen = job.wait_for(lambda j: j.rows() and j.family())
    job.wait()
    yield job
    job.end()
    shutil.rmtree(job.tmp, ignore_errors=True)


@pytest.mark.parametrize("mode", ["eager", "barrier", pytest.param("onpolicy", marks=pytest.mark.slow)])
def test_the_whole_job(request, start_job, tiny_folder, mode):
    searchers, steps = 0 if mode == "onpolicy" else 1, 60 if mode == "eager" else 12
    if mode == "eager":
        job = request.getfixturevalue("eager_job")
    else:
        args = ["--sync", mode, "--sync-every", 2, "--recency-prob", 1.0, "--event-log"]
        job = start_job(*SHORT, *args, "--model", tiny_folder)
        job.seen = job.wait_for(lambda j: j.rows() and j.family())
    assert job.wait() == 0, job.text
    job.assert_nothing_left(job.seen)
    rows, summary = job.rows(), job.summary()
    assert [r["step"] for r in rows] == list(range(steps))
    assert all(math.isfinite(r["loss"]) and r["grad_norm"] > 0 for r in rows)
    assert set(SUMMARY) <= set(summary) and summary["outcome"] == "completed" and summary["steps"] == steps
    assert summary["trajectories_trained"] == steps * 16 <= 2 * summary["trajectories_generated"] + 16
    assert len(summary["busy_searchers"]) == searchers
    ages = {(r["step"], r["staleness"], r["staleness_max"]) for r in rows}
    if mode == "onpolicy":
        assert all(age == oldest == 0 for _, age, oldest in ages)
    elif mode == "barrier":  # k = 2, m = 1: written with the weights of the sync before the last one
        assert all(oldest <= 3 for _, _, oldest in ages)
        assert {oldest for step, _, oldest in ages if step >= 2} == {2, 3}
    else:
        assert all(0 <= age <= step for step, age, _ in ages)
    for i in range(searchers):
        assert (job.out / f"searcher-{i}.jsonl").read_text()
    expected = {"parent", "trainer"} | ({"buffer", "searcher-0"} if searchers else set())
    trace = json.loads((job.out / "timeline.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in trace if e["ph"] == "M"} == expected - {"parent", "buffer"}
    spans = [e for e in trace if e["ph"] == "X"]
    assert WORK | WAITS[mode] <= {e["name"] for e in spans} <= set(SPANS) | set(CURES) | {"wait for start"}
    assert sum(e["name"] == "forward, backward" for e in spans) == steps and all(e["dur"] >= 0 for e in spans)
    for name in ("accuracy", "loss", "staleness", "timeline"):
        assert (job.out / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    for text in ("held-out accuracy before RL", "busy", str(job.out)):
        assert text in job.text
    assert set(job.pids()) == expected
    assert_fair_threads(json.loads((job.out / "config.json").read_text()), summary, searchers)
    if mode == "onpolicy":  # each answer is learnt from once, at once
        trained = [e["uids"] for e in read_jsonl(job.out / "events-trainer.jsonl") if e["event"] == "train"]
        assert sorted(uid for uids in trained for uid in uids) == [[0, 0, c] for c in range(12 * 16)]
        assert summary["trajectories_generated"] == 12 * 16
    log = (job.out / "run.log").read_text()
    assert "the trainer is ready" in log and (mode == "onpolicy" or "searcher-0" in log)


def assert_fair_threads(config, summary, searchers):
    """onpolicy has as many threads in its one process as the others have in all."""
    processes = 1 + searchers
    assert summary["threads"] == config["threads"] == max(1, cores() // processes)


@pytest.mark.slow
def test_two_searchers_share_the_work(start_job, tiny_folder):
    job = start_job(*SHORT, "--steps", 100_000, "--max-seconds", 0, "--searchers", 2, "--model", tiny_folder)
    files = [job.out / f"searcher-{i}.jsonl" for i in range(2)]
    job.wait_for(lambda j: all(f.exists() and any(r["handed_over"] for r in read_jsonl(f)) for f in files), 200)
    family = job.family()
    job.interrupt()
    assert job.wait(60) == 130, job.text
    job.assert_nothing_left(family)
    assert len(job.summary()["busy_searchers"]) == 2
    trace = json.loads((job.out / "timeline.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in trace if e["ph"] == "M"} == {"trainer", "searcher-0", "searcher-1"}


def test_a_trained_policy_loads_everywhere(finished, tiny_folder):
    checkpoint = finished / "checkpoints" / "step-12"
    assert sorted(p.name for p in (finished / "checkpoints").iterdir()) == ["step-12", "step-8"]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from runtime.engine import Sampling, VllmEngine

    tokenizer, before = AutoTokenizer.from_pretrained(checkpoint), AutoModelForCausalLM.from_pretrained(tiny_folder)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert any((a != b).any() for a, b in zip(model.parameters(), before.parameters(), strict=True))
    prompt = np.array(tokenizer.encode("37+58="), np.int32)
    assert tokenizer.decode(prompt) == "37+58="
    engine = VllmEngine(checkpoint, Sampling(1.0, 4, (tokenizer.eos_token_id,), 6, 8))
    (answer,) = engine.generate([prompt], 1, greedy=True)[0]
    with torch.no_grad():
        own = model(torch.tensor(prompt.tolist())[None]).logits[0, -1].log_softmax(-1)
    assert abs(float(own[answer.tokens[0]]) - answer.log_mu[0]) < 1e-4


def test_a_figure_is_redrawn_from_the_folder(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    for png in (tmp_path / "run" / "figures").iterdir():
        png.unlink()
    command = [sys.executable, "-m", "runtime.plots", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stdout.split()) == 4, done.stderr
    assert len(list((tmp_path / "run" / "figures").iterdir())) == 4


def test_what_is_recorded_is_what_was_used(finished):
    config = json.loads((finished / "config.json").read_text())
    assert config["sync"] == "eager" and config["gpus"] == 0 and config["generate_per_prompt"] == 4
    assert config["engine"] == "hf" and None not in [v for k, v in config.items() if k != "resume"]


@pytest.mark.parametrize("engine", [pytest.param("vllm", marks=pytest.mark.slow), "hf"])
def test_ctrl_c(start_job, tiny_folder, engine):
    job = start_job(*SHORT, "--steps", 100_000, "--max-seconds", 0, "--engine", engine, "--model", tiny_folder)
    family = job.wait_for(lambda j: len(j.rows()) > 3 and j.family())
    job.interrupt()
    started = time.time()
    assert job.wait(30) == 130, job.text
    assert time.time() - started < 15  # a hang; the five seconds that README promises are measured, not asserted
    job.assert_nothing_left(family)
    assert job.summary()["outcome"] == "interrupted"
    assert list((job.out / "checkpoints").iterdir())
    assert "Traceback" not in job.text


def test_ctrl_c_twice(start_job, tiny_folder):
    job = start_job(*SHORT, "--steps", 100_000, "--max-seconds", 0, "--engine", "hf", "--model", tiny_folder)
    family = job.wait_for(lambda j: len(j.rows()) > 3 and j.family())
    job.interrupt()
    time.sleep(0.05)
    job.interrupt()
    assert job.wait(30) == 130, job.text
    job.assert_nothing_left(family)


def test_ctrl_c_while_the_start_model_is_made(start_job, tmp_path):
    job = start_job("--gpus", 0, "--cache", tmp_path / "cache")
    family = job.wait_for(lambda j: list((tmp_path / "cache").glob(".making-*")) and j.family())
    job.interrupt()
    assert job.wait(30) == 130, job.text
    job.assert_nothing_left(family)
    assert not list((tmp_path / "cache").iterdir())
    assert "start model ready" not in job.text


def test_the_time_limit(start_job, tiny_folder):
    job = start_job(*SHORT, "--steps", 100_000, "--max-seconds", 1, "--engine", "hf", "--model", tiny_folder)
    assert job.wait() == 0, job.text
    assert job.summary()["ended_by"] == "--max-seconds" and job.summary()["outcome"] == "completed"
    job.assert_nothing_left()


def test_ctrl_c_while_starting(start_job, tiny_folder):
    job = start_job(*SHORT, "--model", tiny_folder)
    family = job.wait_for(lambda j: (j.out / "pids.json").exists() and "trainer" in j.pids() and j.family())
    job.interrupt()
    assert job.wait(30) == 130, job.text
    job.assert_nothing_left(family)


def test_a_killed_parent_leaves_nobody(start_job, tiny_folder):
    job = start_job(*SHORT, "--steps", 100_000, "--max-seconds", 0, "--engine", "hf", "--model", tiny_folder)
    family = job.wait_for(lambda j: len(j.rows()) > 3 and j.family())
    job.process.kill()
    job.wait(30)
    job.assert_nothing_left(family)


@pytest.mark.parametrize("m", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_ages_of_what_is_drawn(start_job, tiny_folder, m):
    """End to end: m = 1 draws from the newest 8 groups of 4 only, m = 0 from all that was ever stored."""
    args = ["--recency-prob", m, "--recent-groups", 8, "--steps", 60, "--replay-ratio", 1, "--max-seconds", 0]
    job = start_job(*SHORT, *args, "--event-log", "--engine", "hf", "--model", tiny_folder)
    assert job.wait() == 0, job.text
    trained = [e["uids"] for e in read_jsonl(job.out / "events-trainer.jsonl") if e["event"] == "train"]
    counters = [[counter for _, _, counter in uids] for uids in trained]
    spans = [max(c) - min(c) for c in counters]  # of one searcher's count of what it wrote
    assert len(spans) == 60 and all(len(c) == 16 for c in counters)
    if m == 1:
        # an engine's batch has 64 answers, and two groups of one prompt in it are one group of the pool
        assert np.median(spans) < 8 * 4 and max(spans) < 2 * 64
        assert max(map(max, counters)) > 60 * 16 // 2  # and these do move on
    else:
        assert np.mean([span > 8 * 4 for span in spans[30:]]) > 0.9
        assert np.mean([min(c) < 200 for c in counters[30:]]) > 0.5  # from the run's beginning, to its end
    assert all(0 <= int(age) <= r["step"] for r in job.rows() for age in r["ages"])


def replayed(events: list[dict], slots: int, group: int) -> dict[int, tuple[int, int]]:
    """Versions of each answer's first and last token, recounted from the log of one searcher: counter -> (first, last).

    First come, first served, a token a step: what waits for a place, and which weights are loaded at each step, follow
    from the order of additions and pulls and from the answers' lengths. Ends at the first group that never finished.
    """
    finished = {}  # key -> answers, [counter, tokens, first, last] each
    for e in (e for e in events if e["event"] == "finish"):
        finished |= {key: e["answers"][i * group : (i + 1) * group] for i, key in enumerate(e["keys"])}
    waiting, running, out, version = [], [], {}, 0
    at = {s: [e for e in events if e["event"] in ("add", "pull") and e["engine_step"] == s] for s in range(10_000)}
    for step in range(10_000):
        for e in at[step]:
            if e["event"] == "pull":
                version = e["version"]
            elif e["key"] in finished:
                waiting += [{"counter": c, "left": tokens} for c, tokens, *_ in finished[e["key"]]]
            else:  # from here on, places are taken by answers of unknown length
                return out | {a["counter"]: (a["first"], None) for a in running}
        while waiting and len(running) < slots:
            running.append(waiting.pop(0) | {"first": version})
        for a in running:
            a["left"] -= 1
            if not a["left"]:
                out[a["counter"]] = (a["first"], version)
        running = [a for a in running if a["left"]]
    return out


def test_recorded_staleness_is_that_of_a_replay_of_the_event_log_and_keeps_its_limit(eager_job):
    job = eager_job
    searcher = read_jsonl(job.out / "events-searcher-0.jsonl")
    versions = replayed(searcher, slots=10, group=4)
    recorded = {c: (f, last) for e in searcher if e["event"] == "finish" for c, _, f, last in e["answers"]}
    assert len(versions) > 100
    for counter, (first, last) in versions.items():
        assert recorded[counter][0] == first and last in (None, recorded[counter][1]), counter
    assert sum(first < last for first, last in recorded.values()) > 20  # updates did cross running answers
    rows, covered = job.rows(), 0
    for e in (e for e in read_jsonl(job.out / "events-trainer.jsonl") if e["event"] == "train"):
        counters = [counter for _, _, counter in e["uids"]]
        if all(c in versions for c in counters):
            ages = Counter(e["step"] - versions[c][0] for c in counters)
            row = rows[e["step"]]
            assert {int(age): n for age, n in row["ages"].items()} == ages
            assert (row["staleness_max"], row["staleness"]) == (max(ages), mean_of(ages))
            covered += 1
    assert covered > 40
    oldest = [max(map(int, row["ages"])) for row in rows]
    assert max(oldest) == 5  # reached, never passed
    summary = job.summary()
    assert set(summary["waits"]) == {"trainer", "searcher-0"} and summary["threads"] == 1
    assert summary["advice"] in job.text


def mean_of(ages: Counter) -> float:
    return sum(age * n for age, n in ages.items()) / ages.total()


@pytest.mark.slow
def test_two_runs_at_once(start_job, tiny_folder):
    jobs = [start_job(*SHORT, "--engine", "hf", "--model", tiny_folder, "--seed", s) for s in (0, 1)]
    while any(job.process.poll() is None for job in jobs):
        for job in jobs:
            job.family()  # notes the shared memory in use
        time.sleep(0.1)
    assert [job.wait() for job in jobs] == [0, 0], jobs[0].text + jobs[1].text
    for job in jobs:
        job.assert_nothing_left()
        assert job.summary()["steps"] == 12
