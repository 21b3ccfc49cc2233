"""A sampler that computes another policy than the trainer is noticed, whatever is wrong with it, and whenever."""

import dataclasses

import numpy as np
import pytest
import torch
from conftest import SHORT

from buffer import Trajectory
from config import Config
from runtime.checks import LIMIT, Alarm, SamplerCheck
from runtime.engine import HfEngine, Sampling
from runtime.policy import load_policy
from trainer import Learner

PROMPT = np.array([3, 12, 4, 16], np.int32)

FAULTS = {
    "the MLPs' weights": lambda m: [layer.mlp.down_proj.weight.mul_(1.3) for layer in m.model.layers],
    "a stale output layer": lambda m: m.lm_head.weight.mul_(1.5),
    "a stale embedding": lambda m: m.model.embed_tokens.weight.copy_(m.model.embed_tokens.weight.roll(1, 0)),
    "one layer's attention": lambda m: m.model.layers[1].self_attn.v_proj.weight.mul_(3.0),
    "a norm": lambda m: m.model.norm.weight.mul_(1.4),
}


def strong(folder):
    """The tiny model with larger weights, so that its layers matter."""
    model = load_policy(str(folder), trainable=True)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4.0 if p.ndim == 2 else 1.0)
    return model


def answers(model, temperature=1.0, version=0) -> list[Trajectory]:
    sampling = Sampling(temperature, 8, (1,), len(PROMPT), 64)
    torch.manual_seed(0)
    written = HfEngine(model, sampling, 0).generate([PROMPT], 16)[0]
    known = {"reward": 0.0, "log_ref": 0.0, "policy_version": version, "version_last": version, "searcher": 0}
    return [
        Trajectory((0, 0, i), 0, PROMPT, a.tokens, a.finish_reason, log_mu=a.log_mu, **known)
        for i, a in enumerate(written)
    ]


@pytest.mark.parametrize("fault", [None, *FAULTS, "temperature"])
def test_both_sides_see_a_wrong_sampler(tiny_folder, caplog, fault):
    model, sampler = strong(tiny_folder), strong(tiny_folder)
    if fault in FAULTS:
        with torch.no_grad():
            FAULTS[fault](sampler)
    written = answers(sampler, 1.5 if fault == "temperature" else 1.0)
    row = Learner(model, Config(grad_clip=0.0, lr=1e-12), 0).update([written])
    check = SamplerCheck(load_policy(str(tiny_folder)), 1.0)  # the reference has other weights than those it compares
    check.pulled(0, [(name, p.detach()) for name, p in strong(tiny_folder).named_parameters()])
    check(written)
    for mismatch in (row["mismatch"], check.alarm.largest):
        assert (mismatch > LIMIT) if fault else (mismatch < 1e-5)
    assert caplog.text.count("sampler and trainer disagree") == (2 if fault else 0)


def test_only_answers_of_these_very_weights_are_compared(tiny_folder):
    model = strong(tiny_folder)
    learner = Learner(model, Config(grad_clip=0.0, lr=1e-12, micro_batch_tokens=1), 0)
    learner.step = 3
    fresh, old = answers(model, version=3), answers(model, temperature=3.0, version=2)
    mixed = [dataclasses.replace(t, policy_version=2, version_last=3) for t in answers(model, temperature=3.0)]
    groups = [fresh[:8], old[:8], mixed[:8]]
    assert learner.update(groups)["mismatch"] < 1e-5
    learner.step = 5
    assert learner.update(groups)["mismatch"] is None
    assert learner.alarm.largest < 1e-5


def test_the_alarm_is_given_once_and_the_largest_kept(caplog):
    alarm = Alarm()
    for value in (0.01, 0.2, 0.3, 0.001):
        alarm(value, 7)
    assert alarm.largest == 0.3 and caplog.text.count("disagree") == 1 and "version 7" in caplog.text


TASK = """
import sys
sys.path.insert(0, ROOT + "/tests")
from checksum import make_task as make
from runtime import engine

def spoil(model):
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data.mul_(30)
    model.lm_head.weight.data.mul_(2)

def make_task():
    if getattr(engine.HfEngine, "usual", None) is None and "searcher" in sys.modules:
        engine.HfEngine.usual = engine.HfEngine.METHOD
        def spoiled(self, *args, **options):
            self.usual(*args, **options)
            spoil(self.model)
        engine.HfEngine.METHOD = spoiled
    return make()
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["__init__", "load_weights"])
def test_a_run_with_a_wrong_sampler_says_so(start_job, tiny_folder, tmp_path, method):
    """The task's file spoils the engine of the searcher's process: from its start, or at its first update."""
    from conftest import ROOT

    (tmp_path / "spoils.py").write_text(TASK.replace("METHOD", method).replace("ROOT", repr(str(ROOT))))
    task = ["--task", f"{tmp_path}/spoils.py:make_task"]
    job = start_job(*SHORT, "--engine", "hf", "--steps", 30, "--model", tiny_folder, *task)
    assert job.wait() == 0, job.text
    assert "sampler and trainer disagree" in job.text and job.summary()["mismatch"] > LIMIT
    first = job.rows()[0]["mismatch"]
    assert (first > LIMIT) if method == "__init__" else (first < 1e-4)
