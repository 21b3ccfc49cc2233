"""The estimate of memory against what torch's profiler counts, on the CPU: one update of models of several shapes."""

import dataclasses
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from buffer import Trajectory
from config import Config, ConfigError
from runtime import memory, preview
from runtime.files import INDEX, check_model_files
from runtime.memory import GIB, Shape, fit, needs, read_shape, remedy, shape_of, step_parts
from trainer import Learner

ROOT = Path(__file__).parents[1]
PROMPT, ANSWER = 8, 24  # tokens
VOCABULARY = 512


def llama(hidden=128, inner=256, layers=2, heads=4, kv=4, vocabulary=VOCABULARY, tied=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocabulary}
    heads = {"num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": hidden // heads}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied)).eval()


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=128, n_layer=3, n_head=4, n_positions=64)).eval()


def qwen2():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "vocab_size": VOCABULARY}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()


MODELS = {
    "llama": llama,
    "more layers": lambda: llama(layers=6),
    "wide": lambda: llama(hidden=192, inner=384, heads=6, kv=6),
    "large feed-forward": lambda: llama(inner=1024),
    "grouped keys": lambda: llama(layers=4, kv=1),
    "large vocabulary": lambda: llama(vocabulary=4096),
    "tied": lambda: llama(vocabulary=2048, tied=True),
    "gpt2": gpt2,
    "qwen2": qwen2,
}


def a_batch(groups, k=4):
    rng = np.random.default_rng(0)

    def one(p, i):
        prompt, answer = (rng.integers(2, VOCABULARY, n).astype(np.int32) for n in (PROMPT, ANSWER))
        log_mu = np.full(ANSWER, -1.0, np.float32)
        return Trajectory((0, 0, p * k + i), p, prompt, answer, "stop", float(rng.random()), -9.0, log_mu, 0, 0, 0)

    return [[one(p, i) for i in range(k)] for p in range(groups)]


def peak(work):
    """Most bytes of tensors that live at one time while `work` runs, over those that were there before."""
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profiler:
        work()
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    assert len(events) > 100 and most > 0
    return most


def measured_and_estimated(model, monkeypatch, bf16, **options):
    """An update of two micro-batches, so that gradients of earlier ones are there at the peak."""
    if bf16:  # as on a GPU
        autocast = torch.autocast
        monkeypatch.setattr(torch, "autocast", lambda device, dtype, enabled: autocast(device, dtype, enabled=True))
    tokens = 2 * 4 * (PROMPT + ANSWER)  # two groups
    c = Config(samples_per_prompt=4, micro_batch_tokens=tokens, max_new_tokens=ANSWER, decay_steps=0, **options)
    learner = Learner(model, c, 0)
    learner.update(a_batch(1))  # Adam's memory is there now
    shape = shape_of(model.config.to_dict(), sum(p.numel() for p in model.parameters()))
    return peak(lambda: learner.update(a_batch(4))), sum(step_parts(shape, c, PROMPT, bf16).values())


EACH = [(name, True) for name in MODELS] + [("llama", False), ("gpt2", False), ("grouped keys", False)]


@pytest.mark.parametrize(
    "name, bf16",
    [pytest.param(n, b, marks=[] if i % 3 == 0 else pytest.mark.slow) for i, (n, b) in enumerate(EACH)],
    ids=[f"{n}, {'bf16' if b else 'fp32'}" for n, b in EACH],
)
def test_the_estimate_of_an_update_is_near_what_is_counted(monkeypatch, name, bf16):
    got, want = measured_and_estimated(MODELS[name](), monkeypatch, bf16)
    assert 0.85 < want / got < 1.35, f"{want / 2**20:.1f} MiB estimated, {got / 2**20:.1f} counted"


def test_with_gradient_checkpointing_too(monkeypatch):
    got, want = measured_and_estimated(llama(layers=6), monkeypatch, True, gradient_checkpointing=True)
    assert 0.85 < want / got < 1.5, f"{want / 2**20:.1f} MiB estimated, {got / 2**20:.1f} counted"
    without, _ = measured_and_estimated(llama(layers=6), monkeypatch, True)
    assert got < 0.6 * without


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_counted_from_the_configuration(tmp_path, name):
    model = MODELS[name]()
    count = sum(p.numel() for p in model.parameters())
    values = json.loads(model.config.to_json_string(use_diff=False))
    assert shape_of(values).parameters == pytest.approx(count, rel=0.03)
    model.save_pretrained(tmp_path)
    assert read_shape(tmp_path).parameters == count  # exact, where the files are there


# --- which files, which tensors -------------------------------------------------------------------------------------


def mixtral(tied=False):
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    more = {"num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": tied}
    return MixtralForCausalLM(MixtralConfig(**sizes, **more, num_attention_heads=2, num_key_value_heads=2))


def saved(folder, model, shards=False):
    """A model's folder; in many shards with an index, or in one file."""
    model.save_pretrained(folder, max_shard_size="200KB" if shards else "5GB")
    assert (folder / INDEX).exists() == shards
    return sum(p.numel() for p in model.parameters())


def all_tensors(folder):
    from safetensors.torch import load_file

    return {name: t for path in folder.glob("model*.safetensors") for name, t in load_file(path).items()}


@pytest.mark.parametrize(
    "beside",
    ["consolidated.safetensors", "adapter_model.safetensors", "model.fp16.safetensors", "original/model.safetensors",
     "model-00099-of-00001.safetensors", "copy of model-00001-of-00002.safetensors", "damaged.safetensors"],
)  # fmt: skip
@pytest.mark.parametrize("shards", [False, True])
def test_files_that_are_not_loaded_do_not_count(tmp_path, beside, shards):
    count = saved(tmp_path, llama(), shards)
    (tmp_path / beside).parent.mkdir(exist_ok=True)
    if beside.startswith("damaged"):
        (tmp_path / beside).write_bytes(b"no header")
    else:
        save_file(all_tensors(tmp_path), tmp_path / beside)
    check_model_files(tmp_path)
    assert read_shape(tmp_path).parameters == count


def test_what_transformers_loads_is_what_counts(tmp_path):
    """model.safetensors comes before the index, and a name in config.json before both."""
    from runtime.policy import load_policy

    count = saved(tmp_path, llama(), shards=True)
    save_file({"nothing": torch.zeros(3)}, tmp_path / "other.safetensors")
    assert read_shape(tmp_path).parameters == count
    save_file(all_tensors(tmp_path), tmp_path / "model.safetensors")
    for shard in tmp_path.glob("model-*"):
        shard.write_bytes(b"damaged, and not read")
    check_model_files(tmp_path)
    assert read_shape(tmp_path).parameters == count
    assert sum(p.numel() for p in load_policy(str(tmp_path)).parameters()) == count
    os.rename(tmp_path / "model.safetensors", tmp_path / "mine.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"transformers_weights": "mine.safetensors"}))
    check_model_files(tmp_path)
    assert read_shape(tmp_path).parameters == count
    assert sum(p.numel() for p in load_policy(str(tmp_path)).parameters()) == count


@pytest.mark.parametrize("fault", ["missing", "cut off", "wrong name", "no map", "no JSON", "empty map"])
def test_a_shard_that_the_index_names_is_checked(tmp_path, fault):
    saved(tmp_path, llama(), shards=True)
    index, shard = tmp_path / INDEX, sorted(tmp_path.glob("model-*"))[1]
    words = {"missing": rf"lacks {shard.name}, which .*index.json names \(1 of \d+ missing", "no JSON": "is damaged"}
    words |= {"cut off": rf"{shard.name} is damaged", "wrong name": "lacks model-1.safetensors"}
    if fault == "missing":
        shard.unlink()
    elif fault == "cut off":
        shard.write_bytes(shard.read_bytes()[:-10])
    elif fault == "wrong name":
        index.write_text(index.read_text().replace(shard.name, "model-1.safetensors"))
    else:
        index.write_text({"no map": "{}", "no JSON": "{", "empty map": '{"weight_map": {}}'}[fault])
    with pytest.raises(ConfigError, match=words.get(fault, "has no weight_map that names files")):
        check_model_files(tmp_path)


@pytest.mark.parametrize("name", ["consolidated.safetensors", "adapter_model.safetensors", "pytorch_model.bin"])
def test_a_folder_without_weights_that_are_loaded_is_refused(tmp_path, name):
    saved(tmp_path, llama())
    os.rename(tmp_path / "model.safetensors", tmp_path / name)
    with pytest.raises(
        ConfigError,
        match=r"no \*.safetensors that are loaded \(model.safetensors, or what .*index.json",
    ):
        check_model_files(tmp_path)


def test_a_tied_weight_that_is_saved_twice_counts_once(tmp_path):
    count = saved(tmp_path, llama(tied=True))
    tensors = all_tensors(tmp_path)
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors"
    )
    assert read_shape(tmp_path).parameters == count


def test_masks_and_tables_in_a_file_are_no_parameters(tmp_path):
    """Older files of GPT-2 and Pythia have a mask of [1, 1, L, L] in every layer."""
    count = saved(tmp_path, gpt2())
    more = {"transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64), "h.0.attention.bias": torch.ones(64, 64).bool()}
    more |= {"h.0.attn.masked_bias": torch.tensor(-1e4), "rotary_emb.inv_freq": torch.ones(16)}
    save_file(all_tensors(tmp_path) | more, tmp_path / "model.safetensors")
    assert read_shape(tmp_path).parameters == count


def test_a_token_passes_through_some_experts_only(tmp_path):
    model = mixtral()
    count = saved(tmp_path, model)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    shape, counted = read_shape(tmp_path), shape_of(model.config.to_dict())
    assert shape.parameters == count and shape.per_token == count - experts * 6 // 8
    assert counted.parameters == pytest.approx(count, rel=0.03)
    assert counted.per_token == pytest.approx(shape.per_token, rel=0.03)
    lines = preview.work(shape, Config(decay_steps=0), 8, None)
    assert f"{6 * shape.per_token / 1e9:.2g} GFLOP per token" in lines[0] and "some experts do not" in lines[1]
    assert shape_of(llama().config.to_dict()).computed == 0


# --- whether it fits ------------------------------------------------------------------------------------------------

ONE_B = Shape(1_100_000_000, 22, 2048, 5632, 256, 32_000)  # a Llama such as TinyLlama and Rho-1B
SIZED = {"engine": "vllm", "max_new_tokens": 256, "in_flight": 128, "eval_prompts": 128, "decay_steps": 0}


def sized(**options):
    return dataclasses.replace(Config(**SIZED), gpus=2, searchers=1, **options)


def test_each_part_is_counted_once():
    parts = memory.trainer_parts(ONE_B, sized(), 100)
    p = ONE_B.parameters
    assert parts["weights, fp32"] == 4 * p and parts["Adam"] == 8 * p and parts["gradients"] == 4 * p
    assert parts["two snapshots"] == 4 * p and parts["weights cast to bf16"] == 2 * p
    assert parts["CUDA contexts of 2 process(es)"] == 2 * memory.CONTEXT
    many = memory.trainer_parts(ONE_B, dataclasses.replace(sized(), gpus=16, searchers=15), 100)
    assert many["CUDA contexts of 16 process(es)"] == 16 * memory.CONTEXT
    assert sum(many.values()) - sum(parts.values()) == 14 * memory.CONTEXT


@pytest.mark.parametrize(
    "more, parts",
    [
        ({"loss": "tba_prime"}, {"reference": 4}),
        ({"engine": "hf"}, {"two snapshots": 8}),
        ({"weights": "shared-memory"}, {"two snapshots": 0}),
        ({"sync": "onpolicy"}, {"two snapshots": 0}),
    ],
)
def test_options_change_what_is_needed(more, parts):
    got = memory.trainer_parts(ONE_B, sized(**more), 100)
    for name, factor in parts.items():
        assert got.get(name, 0) == factor * ONE_B.parameters


@pytest.mark.parametrize("option", ["micro_batch_tokens", "max_new_tokens", "samples_per_prompt"])
def test_more_of_it_never_needs_less(option):
    sizes = [sum(memory.trainer_parts(ONE_B, sized(**{option: n}), 100).values()) for n in (8, 64, 512, 4096, 32768)]
    assert sizes == sorted(sizes) and sizes[-1] > sizes[0]


def test_it_fits_or_is_refused_with_numbers_and_what_would_help():
    c = sized()
    exact = needs(ONE_B, c, 100, 10**12)["the trainer"]
    fit(ONE_B, c, 100, exact)
    with pytest.raises(ConfigError) as caught:
        fit(ONE_B, c, 100, exact - 1)
    text = str(caught.value)
    assert re.fullmatch(r"the trainer needs about [\d.]+ GiB of [\d.]+: use .*", text)
    assert text.endswith("use --gradient-checkpointing or --micro-batch-tokens 2048")


@pytest.mark.parametrize("total", [24, 28, 32, 40, 48])
@pytest.mark.parametrize("gpus", [1, 2])
def test_what_is_said_to_help_does(total, gpus):
    """The options that a refusal names are applied, one after another where it says `and`."""
    c = dataclasses.replace(sized(micro_batch_tokens=32768), gpus=gpus)
    if max(needs(ONE_B, c, 100, total * GIB).values()) <= total * GIB:
        fit(ONE_B, c, 100, total * GIB)
        return
    text = remedy(ONE_B, c, 100, total * GIB)
    if "smaller model" in text:
        smallest_job = {"gradient_checkpointing": True, "micro_batch_tokens": 8192, "eval_prompts": 32}
        least = needs(ONE_B, dataclasses.replace(c, weights="shared-memory", **smallest_job), 100, total * GIB)
        assert max(least.values()) > total * GIB
        return
    for choice in text.removeprefix("use ").split(" or "):
        changed = c
        for option in choice.split(" and "):
            name, _, value = option.removeprefix("--").partition(" ")
            kind = {"weights": str}.get(name, int)
            changed = dataclasses.replace(changed, **{name.replace("-", "_"): kind(value) if value else True})
        fit(ONE_B, changed, 100, total * GIB)


def test_what_never_fits_is_said_to():
    with pytest.raises(ConfigError, match="alone take 16.4; take a smaller model, or GPUs with more memory$"):
        fit(ONE_B, sized(), 100, 8 * GIB)


def test_vllm_gets_what_the_others_leave_and_the_log_says_how_much():
    c = dataclasses.replace(sized(micro_batch_tokens=4096), gpus=1)
    trainer, searcher = (sum(f(ONE_B, c, 100).values()) for f in (memory.trainer_parts, memory.searcher_parts))
    share, lines = fit(ONE_B, c, 100, 80 * GIB)
    assert 0 < share < memory.MOST
    assert trainer + searcher + share * 80 * GIB <= 80 * GIB < trainer + searcher + (share + 0.01) * 80 * GIB
    text = lines[-1]
    assert text.startswith(f"vLLM: {share:.2f} of 80.0 GiB, which leaves ") and "(--in-flight 128)" in text
    answers = int(re.search(r"about ([\d,]+) answers", text)[1].replace(",", ""))
    assert sum(memory.vllm_parts(ONE_B, c, 100, answers).values()) <= share * 80 * GIB
    alone, lines = fit(ONE_B, sized(), 100, 80 * GIB)  # on a GPU of its own
    assert alone > share
    given, lines = fit(ONE_B, sized(vllm_memory=0.3), 100, 80 * GIB)
    assert given == 0.3 and "0.30 of 80.0" in lines[-1]
    with pytest.raises(ConfigError, match="a searcher needs about .*--vllm-memory 0$"):
        fit(ONE_B, sized(vllm_memory=0.95), 100, 80 * GIB)


def test_without_vllm_or_a_known_gpu_there_is_no_share():
    assert fit(ONE_B, sized(engine="hf", in_flight=32), 100, 80 * GIB)[0] == 0
    share, lines = fit(ONE_B, sized(), 100, None)
    assert share == 0 and lines[-1].startswith("memory of the GPUs: not known")


@pytest.mark.parametrize("values", [{}, {"hidden_size": 8}, {"n_layer": 2, "n_embd": 8, "n_head": 2}])
def test_a_configuration_that_says_too_little_is_refused(values):
    with pytest.raises(ConfigError, match="the model's config.json has no"):
        shape_of(values)


# --- README ---------------------------------------------------------------------------------------------------------


def llama_like(layers, hidden, inner, heads, kv, vocabulary, tied):
    values = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocabulary}
    return values | {"num_attention_heads": heads, "num_key_value_heads": kv, "tie_word_embeddings": tied}


PUBLIC = {  # from their config.json
    "Qwen2.5-0.5B": llama_like(24, 896, 4864, 14, 2, 151_936, True),
    "Rho-1B": llama_like(22, 2048, 5632, 32, 4, 32_000, False),
    "Qwen2.5-1.5B": llama_like(28, 1536, 8960, 12, 2, 151_936, True),
    "Qwen2.5-3B": llama_like(36, 2048, 11_008, 16, 2, 151_936, True),
    "Qwen2.5-7B": llama_like(28, 3584, 18_944, 28, 4, 152_064, False),
}
PROMPT_TOKENS = 200


def readme_row(name):
    """GiB of the trainer's GPU without and with --gradient-checkpointing, and of a searcher's; tokens a second."""
    shape, cells = shape_of(PUBLIC[name]), []
    base = Config(max_new_tokens=512, eval_prompts=64, decay_steps=0)
    for checkpointing in (False, True):
        sizes = []
        for gpus in (2, 16):
            c = dataclasses.replace(base, gpus=gpus, searchers=gpus - 1, gradient_checkpointing=checkpointing)
            sizes.append(sum(memory.trainer_parts(shape, c, PROMPT_TOKENS).values()) / GIB)
        cells.append(" / ".join(f"{size:.0f}" for size in sizes))
    c = dataclasses.replace(base, gpus=2, searchers=1, in_flight=64)
    beside = sum(memory.searcher_parts(shape, c, PROMPT_TOKENS).values())
    with_vllm = beside + sum(memory.vllm_parts(shape, c, PROMPT_TOKENS, 64).values())
    rate = 1e14 / (6 * shape.parameters)
    cells += [f"{with_vllm / GIB:.0f}", f"{round(rate, -2):,.0f}"]
    return f"| {name} ({shape.parameters / 1e9:.2g} B) | " + " | ".join(cells) + " |"


@pytest.mark.parametrize("name", PUBLIC)
def test_readmes_table_is_what_is_computed(name):
    assert readme_row(name) in (ROOT / "docs/gpus.md").read_text(), readme_row(name)


def test_readmes_example_of_a_refusal_is_what_is_said():
    c = dataclasses.replace(Config(max_new_tokens=512, eval_prompts=64, decay_steps=0), gpus=2, searchers=1)
    with pytest.raises(ConfigError) as caught:
        fit(shape_of(PUBLIC["Rho-1B"]), c, PROMPT_TOKENS, 48 * GIB)
    assert f"tba_min: --gpus 2: {caught.value}" in (ROOT / "docs/gpus.md").read_text()
