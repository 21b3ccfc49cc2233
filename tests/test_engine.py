"""Both engines against a fresh Hugging Face forward: what they say of their own log-probabilities, and new weights."""

import copy
import os

import numpy as np
import pytest
import torch
from conftest import SHORT

from runtime.engine import HfEngine, Sampling, VllmEngine
from runtime.files import ConfigError
from runtime.inside_vllm import import_vllm
from runtime.policy import collate, load_policy, named_weights, response_logprobs
from tasks.start_model import make_model

STOP, TEMPERATURE, LONGEST = 1, 0.6, 40
RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(2, 60, n).astype(np.int32) for n in (3, 40, 17, 40, 9, 33)]  # two longer than a cache block


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("model")
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(4)  # far from uniform, so that stops happen and temperature matters
    model.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory):
    torch.manual_seed(1)
    model, place = make_model(), tmp_path_factory.mktemp("tied")
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = True
    type(model)(config).save_pretrained(place)
    return place


def sampling(in_flight=64):
    return Sampling(TEMPERATURE, max_new_tokens=12, stop_ids=(STOP,), max_prompt=LONGEST, in_flight=in_flight)


@pytest.fixture(scope="module", params=["vllm", "vllm with prefix caching", "hf"])
def engine(request, folder):
    if request.param == "hf":
        return HfEngine(load_policy(folder), sampling(), pad=0)
    return VllmEngine(folder, sampling(), enable_prefix_caching="prefix" in request.param)


def largest_difference(engine, model, n=8, at=TEMPERATURE):
    """Between the engine's log-probabilities and the model's forward, at the sampling temperature, in nats."""
    groups = engine.generate(PROMPTS, n)
    flat = [(p, a) for p, group in zip(PROMPTS, groups, strict=True) for a in group]
    tokens = collate([p for p, _ in flat], [a.tokens for _, a in flat], 0)
    with torch.no_grad():
        logp = response_logprobs(model, tokens, at).numpy()
    return max(np.abs(logp[i, : len(a.tokens)] - a.log_mu).max() for i, (_, a) in enumerate(flat))


def shaken(model, seed):
    """Other weights, far enough away to change what is generated."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return model


def test_log_mu_and_weights_after_each_push(engine, folder):
    model = load_policy(folder)
    engine.load_weights(named_weights(model))
    assert largest_difference(engine, model) < 1e-5
    greedy = [a[0].tokens.tolist() for a in engine.generate(PROMPTS, 1, greedy=True)]
    for push in range(3):
        before = copy.deepcopy(model)
        shaken(model, push)
        engine.load_weights(named_weights(model))
        assert largest_difference(engine, model) < 1e-5
        assert largest_difference(engine, before) > 1e-2  # the test would see weights that stayed
    assert greedy != [a[0].tokens.tolist() for a in engine.generate(PROMPTS, 1, greedy=True)]


def test_answers_end_where_they_say(engine):
    answers = [a for group in engine.generate(PROMPTS, 16) for a in group]
    assert {a.finish_reason for a in answers} == {"stop", "length"}
    for a in answers:
        assert len(a.tokens) == len(a.log_mu) <= 12
        assert STOP not in a.tokens[:-1]
        assert (a.tokens[-1] == STOP) == (a.finish_reason == "stop")
        assert a.finish_reason == "stop" or len(a.tokens) == 12


def test_greedy_is_the_models_own_choice(engine, folder):
    model = load_policy(folder)
    engine.load_weights(named_weights(model))
    for prompt, (answer,) in zip(PROMPTS, engine.generate(PROMPTS, 1, greedy=True), strict=True):
        ids = torch.tensor(prompt.tolist())
        for token in answer.tokens:
            logits = model(ids[None]).logits[0, -1]
            assert logits.max() - logits[token] < 1e-4
            ids = torch.cat([ids, torch.tensor([int(token)])])


def test_streaming_hands_back_each_group_once(engine):
    wanted, got = {}, {}
    for key in range(10):
        engine.add(key, PROMPTS[key % len(PROMPTS)], 4)
        wanted[key] = 4
        if key % 3 == 2:
            got |= {k: len(v) for k, v in engine.step()}
    while engine.in_flight:
        for key, answers in engine.step():
            assert key not in got
            got[key] = len(answers)
    assert got == wanted
    assert engine.step() == []


def test_samples_follow_the_models_distribution(engine, folder):
    """First tokens of many answers against softmax(logits / T): a chi-square-like bound on each frequency."""
    model = load_policy(folder)
    engine.load_weights(named_weights(model))
    n = 2048
    counts = np.zeros(64)
    for _ in range(n // 64):
        for a in engine.generate(PROMPTS[:1], 64)[0]:
            counts[a.tokens[0]] += 1
    with torch.no_grad():
        logits = model(torch.tensor(PROMPTS[0].tolist())[None]).logits[0, -1]
    p = torch.softmax(logits / TEMPERATURE, -1).numpy()
    assert np.all(np.abs(counts / n - p) < 5 * np.sqrt(p * (1 - p) / n) + 5 / n)


def test_updates_between_steps_reach_requests_that_start_later(engine, folder):
    """In-flight update: running requests go on, a request that starts afterwards is the new weights' own."""
    model = load_policy(folder)
    engine.load_weights(named_weights(model))
    engine.add(1, PROMPTS[1], 4)
    finished = dict(engine.step())
    shaken(model, 11)
    if getattr(engine, "caches_prefixes", False):
        with pytest.raises(RuntimeError, match="kept its prefix cache"):
            engine.load_weights(named_weights(model))
        while engine.in_flight:
            engine.step()
        return
    engine.load_weights(named_weights(model))
    engine.add(2, PROMPTS[1], 4)
    while engine.in_flight:
        finished |= dict(engine.step())
    tokens = collate([PROMPTS[1]] * 4, [a.tokens for a in finished[2]], 0)
    with torch.no_grad():
        logp = response_logprobs(model, tokens, TEMPERATURE).numpy()
    assert max(np.abs(logp[i, : len(a.tokens)] - a.log_mu).max() for i, a in enumerate(finished[2])) < 1e-5
    assert len(finished[1]) == 4


def test_tied_embeddings_are_tied_again(tied_folder):
    engine, model = VllmEngine(tied_folder, sampling()), load_policy(tied_folder)
    assert largest_difference(engine, model) < 1e-5
    shaken(model, 3)
    engine.load_weights(named_weights(model))
    assert "lm_head.weight" not in dict(named_weights(model))
    assert largest_difference(engine, model) < 1e-5


# --- the user's shell -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, value, held",
    [
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "1", "0"),
        ("VLLM_CPU_KVCACHE_SPACE", "200", "1"),
        ("VLLM_CPU_KVCACHE_SPACE", "abc", "1"),
        ("VLLM_CONFIGURE_LOGGING", "yes", "0"),
        ("VLLM_LOGGING_CONFIG_PATH", "/nowhere", None),
        ("VLLM_PORT", "tcp://10.0.0.1:80", None),
        ("VLLM_HOST_IP", "10.9.9.9", None),
        ("LOCAL_RANK", "3", None),
        ("VLLM_MAX_N_SEQUENCES", "2", None),
        ("TORCHDYNAMO_DISABLE", "0", "1"),
        ("VLLM_BATCH_INVARIANT", "1", None),
    ],
)
def test_what_must_hold_is_set_and_told(monkeypatch, name, value, held):
    monkeypatch.setenv(name, value)
    (line,) = [line for line in import_vllm("cpu") if "does not use" in line]
    assert f"{name}={value} ({held or 'unset'} here)" in line and os.environ.get(name) == held
    assert not [line for line in import_vllm("cpu") if "does not use" in line]  # settled


def test_what_the_user_may_set_is_kept_and_told(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "all")
    lines = import_vllm("cpu")
    assert any("uses" in line and "VLLM_LOGGING_LEVEL=ERROR" in line for line in lines)
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "all"


@pytest.mark.parametrize(
    "name", ["VLLM_FLOAT32_MATMUL_PRECISION", "VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_BATCH_INVARIANT on a GPU"]
)
def test_what_vllm_cannot_read_is_one_line(monkeypatch, name):
    name, _, gpu = name.partition(" on a ")
    monkeypatch.setenv(name, "abc")
    with pytest.raises(ConfigError, match=f"{name}=abc in your shell: vLLM can't read it .*; unset it"):
        import_vllm("cuda" if gpu else "cpu")


@pytest.mark.slow
def test_a_run_in_a_hostile_shell(start_job, tiny_folder, monkeypatch):
    hostile = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_KVCACHE_SPACE": "200", "TORCHDYNAMO_DISABLE": "0"}
    hostile |= {"VLLM_PORT": "tcp://10.0.0.1:80", "VLLM_HOST_IP": "10.9.9.9", "VLLM_CONFIGURE_LOGGING": "abc"}
    hostile |= {"VLLM_LOGGING_CONFIG_PATH": "/nowhere", "VLLM_WORKER_MULTIPROC_METHOD": "wrong", "LOCAL_RANK": "3"}
    hostile |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_BATCH_INVARIANT": "1", "OMP_NUM_THREADS": "abc"}
    hostile |= {"TRANSFORMERS_VERBOSITY": "abc", "HF_HUB_OFFLINE": "abc", "VLLM_PLUGINS": "", "RANK": "3"}
    for name, value in hostile.items():
        monkeypatch.setenv(name, value)
    job = start_job(*SHORT, "--engine", "vllm", "--model", tiny_folder)
    assert job.wait() == 0, job.text
    assert job.text.count("vLLM does not use these variables of your shell") == 1


def test_a_layer_that_keeps_old_weights_is_an_error(folder):
    engine, model = VllmEngine(folder, sampling()), load_policy(folder)
    with pytest.raises(Exception, match="still have old weights"):
        engine.load_weights([(n, t) for n, t in named_weights(model) if "mlp" not in n])


def test_hf_samples_from_the_whole_vocabulary_whatever_the_folder_says(tmp_path):
    """transformers' default is the best 50 tokens, and a model's folder may name penalties of its own."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, **shape)).eval()
    hostile = GenerationConfig(top_k=5, top_p=0.2, temperature=0.1, do_sample=True, repetition_penalty=3.0)
    model.generation_config = hostile
    engine = HfEngine(model, Sampling(1.0, 4, (1,), LONGEST, 512), pad=0)
    answers = engine.generate(PROMPTS[:1], 512)[0]
    assert len({int(a.tokens[0]) for a in answers}) > 200  # of 1,000 nearly equal ones
    assert largest_difference(engine, model, at=1.0) < 1e-5
    assert model.generation_config is hostile


def test_hf_refuses_a_partial_update(folder):
    engine = HfEngine(load_policy(folder), sampling(), pad=0)
    with pytest.raises(ValueError, match=r"no new weights came for .*lm_head"):
        engine.load_weights([(n, t) for n, t in named_weights(engine.model) if "lm_head" not in n])
