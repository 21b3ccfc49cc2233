"""Weight updates while vLLM writes: what was sampled, with which keys and values, under which version."""

import copy

import numpy as np
import pytest
import torch

from runtime.engine import HfEngine, Sampling, VllmEngine
from runtime.policy import collate, load_policy, named_weights, response_logprobs
from tasks.start_model import make_model

TEMPERATURE, LONGEST, STEPS = 0.7, 24, 10
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(2, 60, n).astype(np.int32) for n in (36, 5, 21)]  # one longer than a cache block


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(5)
    place, model = tmp_path_factory.mktemp("model"), make_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(4)  # far from uniform: old and new weights differ by nats
    model.config.eos_token_id = model.generation_config.eos_token_id = None  # all answers are as long as they may be
    model.save_pretrained(place)
    return place


def shaken(model):
    torch.manual_seed(8)
    new = copy.deepcopy(model)
    with torch.no_grad():
        for p in new.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return new


def updated_in_flight(folder, recompute_kv):
    """Groups 0 to 2 run when the weights change after STEPS tokens, groups 3 to 5 start afterwards."""
    sampling = Sampling(TEMPERATURE, LONGEST, (), max(map(len, PROMPTS)), in_flight=24)
    engine, old = VllmEngine(folder, sampling, recompute_kv=recompute_kv), load_policy(folder)
    new = shaken(old)
    for key, prompt in enumerate(PROMPTS):
        engine.add(key, prompt, 4)
    for _ in range(STEPS):
        assert engine.step() == []
    engine.load_weights(named_weights(new), 7)
    for key, prompt in enumerate(PROMPTS):
        engine.add(3 + key, prompt, 4)
    finished = {}
    while engine.in_flight:
        finished |= dict(engine.step())
    assert set(finished) == set(range(6))
    return old, new, finished


@torch.no_grad()
def mixed_logprobs(old, new, prompt, tokens):
    """log-probability of each token when the keys and values of all but the last of `STEPS` tokens are the old ones."""
    ids = torch.tensor([*prompt.tolist(), *tokens.tolist()])[None]
    written = len(prompt) + STEPS - 1  # positions whose keys and values the old weights computed
    before = old(ids[:, :written], use_cache=True)
    after = new(ids[:, written:], past_key_values=before.past_key_values, use_cache=True)
    logits = torch.cat([before.logits, after.logits], 1)[0, len(prompt) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def difference(model, prompt, answers, part=slice(None)):
    """Largest difference between log_mu and the model's own forward, in nats."""
    tokens = collate([prompt] * len(answers), [a.tokens for a in answers], 0)
    with torch.no_grad():
        logp = response_logprobs(model, tokens, TEMPERATURE).numpy()
    return max(np.abs(logp[i, : len(a.tokens)] - a.log_mu)[part].max() for i, a in enumerate(answers))


@pytest.mark.parametrize("recompute_kv", [False, True])
def test_an_update_in_flight(folder, recompute_kv):
    old, new, finished = updated_in_flight(folder, recompute_kv)
    for key, prompt in enumerate(PROMPTS):
        running, later = finished[key], finished[3 + key]
        assert {(a.version_first, a.version_last) for a in running} == {(0, 7)}
        assert {(a.version_first, a.version_last) for a in later} == {(7, 7)}
        assert all(len(a.tokens) == len(a.log_mu) == LONGEST for a in running + later)
        assert difference(new, prompt, later) < 1e-5  # a request that starts later is a fresh engine's
        assert difference(old, prompt, running, slice(STEPS)) < 1e-5  # what was written stays as it was sampled
        assert difference(new, prompt, running, slice(STEPS)) > 1e-2
        ahead = difference(new, prompt, running, slice(STEPS, None))
        if recompute_kv:
            assert ahead < 1e-5
        else:
            assert ahead > 1e-2  # old keys and values do matter, and log_mu is still what was sampled:
            for a in running:
                assert np.abs(mixed_logprobs(old, new, prompt, a.tokens) - a.log_mu).max() < 1e-5


def test_keys_and_values_that_vllm_keeps_are_an_error(folder, monkeypatch):
    sampling = Sampling(TEMPERATURE, LONGEST, (), max(map(len, PROMPTS)), in_flight=8)
    engine, model = VllmEngine(folder, sampling, recompute_kv=True), load_policy(folder)
    monkeypatch.setattr(engine._engine, "reset_prefix_cache", lambda **_: False)
    with pytest.raises(RuntimeError, match="did not reset the keys and values"):
        engine.load_weights(named_weights(model), 1)


def test_transformers_answers_name_the_version_that_wrote_them(folder):
    engine = HfEngine(load_policy(folder), Sampling(TEMPERATURE, 4, (), 36, in_flight=4), pad=0)
    engine.add(0, PROMPTS[0], 4)
    engine.add(1, PROMPTS[1], 4)
    first = dict(engine.step())
    engine.load_weights(named_weights(shaken(engine.model)), 5)
    second = dict(engine.step())
    assert {(a.version_first, a.version_last) for a in first[0]} == {(0, 0)}
    assert {(a.version_first, a.version_last) for a in second[1]} == {(5, 5)}
