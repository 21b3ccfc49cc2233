"""Architectures: do vLLM's log-probabilities stay those of Hugging Face's code when all weights change, twice?

    python -m bench.architectures --names qwen2 gemma3      # default: all

Each is a tiny random model, made on the spot. It goes the way of a searcher: vLLM is imported, the reference is loaded,
the engine starts, checks itself, and takes two updates in which every parameter has changed. The figure is the largest
difference between the log-probability that vLLM gave to a token it wrote and that of a fresh forward, in nats.
"""

import copy
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from bench.common import arguments, save, say, table
from runtime.engine import Engine, Sampling, VllmEngine
from runtime.files import ConfigError
from runtime.inside_vllm import import_vllm
from runtime.policy import collate, load_policy, named_weights, response_logprobs
from runtime.update_check import check_updates

VOCABULARY, TEMPERATURE = 101, 0.6  # no multiple of 64: vLLM pads embeddings
SETTINGS = {"temperature": TEMPERATURE, "vocabulary": VOCABULARY}
RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(2, VOCABULARY, n).astype(np.int32) for n in (3, 40, 17, 9)]
IDS = {"bos_token_id": 0, "eos_token_id": 1}
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
PLAIN = {"vocab_size": VOCABULARY, "max_position_embeddings": 128, "pad_token_id": 0, **IDS, **SIZES}
KV = {**PLAIN, "num_key_value_heads": 2}
HEADS = {**KV, "head_dim": 32}
WINDOW = {"sliding_window": 16}
OLD = {"vocab_size": VOCABULARY, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 128, **IDS}
FEW = {"vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, **IDS}
ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
EXPERTS, EXPERT = {"num_experts": 4, "num_experts_per_tok": 2}, {"moe_intermediate_size": 64}

# name -> transformers' configuration class, options. Those with experts come first: vLLM makes groups of processes for
# experts once in a process, with its first model.
ARCHITECTURES: dict[str, tuple[str, dict]] = {
    "mixtral": ("MixtralConfig", {**KV, "num_local_experts": 4, "sliding_window": None}),
    "qwen2_moe": ("Qwen2MoeConfig", {**KV, **EXPERTS, **EXPERT, "shared_expert_intermediate_size": 64}),
    "qwen3_moe": ("Qwen3MoeConfig", {**HEADS, **EXPERTS, **EXPERT}),
    "olmoe": ("OlmoeConfig", {**KV, **EXPERTS}),
    "llama": ("LlamaConfig", KV),
    "llama, tied": ("LlamaConfig", {**KV, "tie_word_embeddings": True}),
    "llama, biases": ("LlamaConfig", {**KV, "attention_bias": True, "mlp_bias": True}),
    "llama 3 (rope)": ("LlamaConfig", {**KV, "rope_parameters": ROPE | {"original_max_position_embeddings": 64}}),
    "qwen2, tied": ("Qwen2Config", {**KV, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", HEADS),
    "mistral": ("MistralConfig", {**KV, **WINDOW}),
    "gemma": ("GemmaConfig", HEADS),
    "gemma2": ("Gemma2Config", {**HEADS, **WINDOW, "query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3TextConfig", {**HEADS, **WINDOW, "query_pre_attn_scalar": 32}),
    "phi": ("PhiConfig", KV),
    "phi3": ("Phi3Config", {**KV, "sliding_window": None}),
    "gpt2": ("GPT2Config", OLD),
    "gpt_neox": ("GPTNeoXConfig", PLAIN),
    "gptj": ("GPTJConfig", {**OLD, "rotary_dim": 16}),
    "gpt_bigcode": ("GPTBigCodeConfig", OLD),
    "olmo": ("OlmoConfig", KV),
    "olmo2": ("Olmo2Config", KV),
    "olmo3": ("Olmo3Config", {**KV, **WINDOW}),
    "opt": ("OPTConfig", {**FEW, "ffn_dim": 192, "word_embed_proj_dim": 128, "max_position_embeddings": 128}),
    "falcon": ("FalconConfig", FEW),
    "bloom": ("BloomConfig", {"vocab_size": VOCABULARY, "hidden_size": 128, "n_layer": 2, "n_head": 4, **IDS}),
    "stablelm": ("StableLmConfig", KV),
    "granite": ("GraniteConfig", {**KV, "embedding_multiplier": 2.0, "logits_scaling": 2.0}),
    "cohere": ("CohereConfig", KV),
    "smollm3": ("SmolLM3Config", KV),
    "starcoder2": ("Starcoder2Config", KV),
    "nemotron": ("NemotronConfig", KV),
    "glm": ("GlmConfig", HEADS),
    "exaone4": ("Exaone4Config", {**KV, **WINDOW}),
    "helium": ("HeliumConfig", HEADS),
}


def make(name: str, folder: Path) -> None:
    """Write a tiny model of that architecture, with random numbers in all parameters."""
    import transformers

    kind, options = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**options)).float()
    changed(model, 0.05).save_pretrained(folder)


@torch.no_grad()
def changed(model: torch.nn.Module, scale: float = 0.1) -> torch.nn.Module:
    """A copy with other numbers in every parameter: biases, norms and embeddings too."""
    new = copy.deepcopy(model)
    for p in new.parameters():
        p.add_(torch.randn_like(p) * scale)
    return new


@torch.no_grad()
def difference(engine: Engine, model: torch.nn.Module, n: int = 2) -> float:
    """Largest difference of the log-probabilities of tokens that the engine writes, in nats."""
    flat = [(p, a) for p, group in zip(PROMPTS, engine.generate(PROMPTS, n), strict=True) for a in group]
    tokens = collate([p for p, _ in flat], [a.tokens for _, a in flat], 0)
    logp = response_logprobs(model, tokens, TEMPERATURE).numpy()
    return max(float(np.abs(logp[i, : len(a.tokens)] - a.log_mu).max()) for i, (_, a) in enumerate(flat))


def searcher_of(folder: str) -> tuple[VllmEngine, torch.nn.Module]:
    """Engine and reference, loaded and checked in the order of a searcher."""
    import_vllm("cpu")
    reference = load_policy(folder)
    engine = VllmEngine(folder, Sampling(TEMPERATURE, 12, (1,), max(map(len, PROMPTS)), 8))
    check_updates(engine, reference, PROMPTS, TEMPERATURE)
    return engine, reference


def measure(name: str) -> dict:
    """A row of results: the differences at the start and after two updates, and from the weights before."""
    with tempfile.TemporaryDirectory() as folder:
        make(name, Path(folder))
        engine, model = searcher_of(folder)
        row = {"architecture": name, "parameters": sum(p.numel() for p in model.parameters())}
        differences, from_before = [difference(engine, model)], []
        for update in range(2):
            torch.manual_seed(1 + update)
            new = changed(model)
            engine.load_weights(named_weights(new))
            differences.append(difference(engine, new))
            from_before.append(difference(engine, model))
            model = new
        load_policy(folder)(torch.tensor([[2, 3]]))  # a model that is loaded later works too
    return row | {"start": differences[0], "updates": max(differences[1:]), "from_before": min(from_before)}


def main() -> None:
    args, began = arguments(__doc__, names=list(ARCHITECTURES)), time.time()
    rows = []
    for name in args.names:
        try:
            rows.append(measure(name))
        except ConfigError as error:
            rows.append({"architecture": name, "refused": str(error)})
        say(began, json.dumps(rows[-1]))
    if not args.quick:
        good = [row["updates"] for row in rows if "updates" in row]
        save("architectures", {"architectures": len(good), "largest": max(good)}, SETTINGS, rows, began)
    print(text(rows))


def text(rows: list[dict], columns: int = 3) -> str:
    """The table, several architectures in a line."""
    cells = [[row["architecture"], f"{row['updates']:.0e}" if "updates" in row else "refused"] for row in rows]
    cells += [["", ""]] * (-len(cells) % columns)
    lines = [sum(cells[i : i + columns], []) for i in range(0, len(cells), columns)]
    return table(["architecture", "nats"] * columns, lines)


if __name__ == "__main__":
    main()
