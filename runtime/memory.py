"""The GPU memory that a run needs, computed from the model's config.json before anything starts, without torch.

The trainer's peak comes when a micro-batch's gradients are added to those of earlier ones. The bytes per token that a
layer keeps for the backward pass were counted with torch's profiler on Llamas of several shapes; tests/test_memory.py
counts them again. Attention is assumed to keep no scores, as with torch's fused kernels. Also assumed, not counted:
half a GiB for each process's CUDA context, 1 GiB for vLLM's workspace, three characters of a prompt per token.
"""

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path

from config import Config
from runtime.files import ConfigError, named_weight_files, read_json, safetensors_header

GIB = 2**30
CONTEXT = GIB // 2  # assumed: CUDA's own memory on a device, for each process that uses it
WORKSPACE = GIB  # assumed: vLLM's memory besides weights and cache
CHARACTERS = 3  # assumed: characters of a prompt per token
MOST = 0.85  # largest share of a device that vLLM gets


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that matter here."""

    parameters: int
    layers: int
    hidden: int
    inner: int  # width of the feed-forward part
    kv: int  # width of a token's keys, or values, in one layer
    vocabulary: int
    computed: int = 0  # parameters that a token passes through, where only some experts do; 0: all

    @property
    def per_token(self) -> int:
        """Parameters that take part in the computation of a token."""
        return self.computed or self.parameters


# config.json's names of one entry, in different architectures
NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "vocabulary": ("vocab_size",),
}
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_top_k", "moe_k")


def _entry(config: dict, names: tuple[str, ...]) -> int:
    """The first of these entries that is there; 0 where none is. Some models list a value for each layer."""
    value = next((config[n] for n in names if config.get(n)), 0)
    return int(max(value) if isinstance(value, list) else value)


def shape_of(config: dict, parameters: int | None = None, of_experts: int | None = None) -> Shape:
    """The shape in a Hugging Face config.json. Parameters that are not given are counted as for a Llama.

    Args:
        of_experts: how many of the parameters belong to experts.

    Raises:
        ConfigError: when it lacks an entry that every causal language model has.
    """
    config = config.get("text_config") or config
    got = {name: _entry(config, options) for name, options in NAMES.items()}
    if missing := [name for name, value in got.items() if not value]:
        raise ConfigError(f"the model's config.json has no {NAMES[missing[0]][0]}")
    layers, hidden, heads, vocabulary = (got[k] for k in ("layers", "hidden", "heads", "vocabulary"))
    head = config.get("head_dim") or hidden // heads
    kv = head * (config.get("num_key_value_heads") or heads)
    inner = _entry(config, ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")) or 4 * hidden
    experts, chosen = _entry(config, EXPERTS), _entry(config, CHOSEN)
    inner_of_expert = _entry(config, ("moe_intermediate_size",)) or inner
    if parameters is None:
        gated = 2 if "n_embd" in config else 3
        of_experts = layers * experts * gated * hidden * inner_of_expert
        layer = 2 * hidden * heads * head + 2 * hidden * kv + (0 if experts else gated * hidden * inner) + 2 * hidden
        ends = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
        parameters = layers * layer + ends + hidden + of_experts
    if not experts or not chosen or not of_experts:
        return Shape(parameters, layers, hidden, inner, kv, vocabulary)
    computed = parameters - of_experts + of_experts * chosen // experts
    return Shape(parameters, layers, hidden, max(inner, chosen * inner_of_expert), kv, vocabulary, computed)


def read_shape(folder: Path) -> Shape:
    """The shape of the model in a folder; its parameters are counted in the files that are loaded, if those exist."""
    config, files = read_json(folder / "config.json"), named_weight_files(folder)
    if not files or not all(path.is_file() for path in files):  # a dry run downloads config.json alone
        return shape_of(config)
    tensors = {name: t for path in files for name, t in safetensors_header(path).items()}
    sizes = {name: math.prod(t["shape"]) for name, t in tensors.items() if _is_parameter(name, t)}
    if config.get("tie_word_embeddings") or (config.get("text_config") or {}).get("tie_word_embeddings"):
        embeddings = {size for name, size in sizes.items() if re.search("embed_|wte|word_emb", name)}
        saved_twice = {name for name in sizes if name.endswith(HEADS) and sizes[name] in embeddings}
        sizes = {name: size for name, size in sizes.items() if name not in saved_twice}
    of_experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return shape_of(config, sum(sizes.values()) or None, of_experts)


HEADS = ("lm_head.weight", "embed_out.weight")  # names of output layers


def _is_parameter(name: str, tensor: dict) -> bool:
    """Not so: masks and tables that older files hold too, as GPT-2's and Pythia's `attention.bias` [1, 1, L, L]."""
    computed = name.endswith(("inv_freq", "masked_bias")) or len(tensor["shape"]) > 3
    return tensor["dtype"] in ("F64", "F32", "F16", "BF16") and not computed


# --- what a process needs -------------------------------------------------------------------------------------------

Parts = dict[str, int]  # purpose -> bytes


def micro_batch(c: Config, prompt: int) -> tuple[int, int]:
    """Tokens of the trainer's largest micro-batch, and how many of them need logits. prompt: tokens of the longest."""
    tokens = max(c.micro_batch_tokens, c.K * (prompt + c.max_new_tokens))  # one group at least
    answers = tokens // (prompt + c.max_new_tokens)
    return tokens, answers * (c.max_new_tokens + 1)


def kept_by_a_layer(s: Shape, bf16: bool) -> int:
    """Bytes per token that a layer keeps for the backward pass; under bf16 autocast the norms still compute in fp32."""
    return 32 * s.hidden + (4 * s.kv + 8 * s.inner if bf16 else 8 * s.kv + 16 * s.inner)


def step_parts(s: Shape, c: Config, prompt: int, bf16: bool = True) -> Parts:
    """An update's memory at its peak, besides weights and optimizer."""
    tokens, with_logits = micro_batch(c, prompt)
    layer = kept_by_a_layer(s, bf16)
    layers = s.layers * 4 * s.hidden + layer if c.gradient_checkpointing else s.layers * layer
    parts = {"gradients": 4 * s.parameters}
    if bf16:
        parts["weights cast to bf16"] = 2 * s.parameters
    parts["activations"] = tokens * (layers + 24 * s.hidden)  # with the layers at both ends
    parts["logits and their gradient"] = with_logits * s.vocabulary * (4 if bf16 else 8)
    return parts


def evaluation_parts(s: Shape, c: Config, prompt: int) -> Parts:
    """The memory of greedy answers to the held-out prompts, in fp32: keys and values, the prompts' pass, logits."""
    rows = min(c.eval_prompts, 512)
    cache = rows * (prompt + c.max_new_tokens) * s.layers * 8 * s.kv
    return {"evaluation": cache + rows * prompt * 4 * (4 * s.hidden + 3 * s.inner) + rows * s.vocabulary * 16}


def trainer_parts(s: Shape, c: Config, prompt: int) -> Parts:
    """The trainer's peak on its GPU."""
    parts = {"weights, fp32": 4 * s.parameters, "Adam": 8 * s.parameters}
    if c.loss == "tba_prime":
        parts["reference"] = 4 * s.parameters
    on_gpu = c.sync != "onpolicy" and c.weights != "shared-memory"
    if on_gpu:
        parts["two snapshots"] = 2 * s.parameters * _engine_bytes(c)
    readers = c.searchers if on_gpu and c.gpus > 1 else 0  # on one shared device, searchers count their own
    parts[f"CUDA contexts of {1 + readers} process(es)"] = (1 + readers) * CONTEXT
    step, evaluation = step_parts(s, c, prompt), evaluation_parts(s, c, prompt)
    return parts | (step if sum(step.values()) > sum(evaluation.values()) else evaluation)


def searcher_parts(s: Shape, c: Config, prompt: int) -> Parts:
    """A searcher's memory besides vLLM: the reference, and for a moment new weights."""
    tokens, with_logits = micro_batch(c, prompt)
    scoring = 2 * s.parameters + tokens * (16 * s.hidden + 6 * s.inner) + with_logits * s.vocabulary * 2
    parts = {"reference, fp32": 4 * s.parameters, "log pi_ref": scoring}
    if c.sync != "onpolicy":
        parts |= {"new weights": s.parameters * _engine_bytes(c), "CUDA context": CONTEXT}
        if c.engine == "hf":
            parts["policy, fp32"] = 4 * s.parameters
    if c.engine == "hf":
        parts["keys and values"] = c.in_flight * (prompt + c.max_new_tokens) * s.layers * 8 * s.kv
    return parts


def vllm_parts(s: Shape, c: Config, prompt: int, answers: int) -> Parts:
    """vLLM's memory, in bf16, to write that many answers at the same time."""
    cache = answers * (prompt + c.max_new_tokens) * s.layers * 4 * s.kv
    return {"weights, bf16": 2 * s.parameters, "workspace": WORKSPACE, "keys and values": cache}


def _engine_bytes(c: Config) -> int:
    return 2 if c.engine != "hf" else 4


# --- whether it fits ------------------------------------------------------------------------------------------------


def needs(s: Shape, c: Config, prompt: int, total: int) -> dict[str, int]:
    """Bytes that are needed on each kind of GPU."""
    trainer, searcher = (sum(f(s, c, prompt).values()) for f in (trainer_parts, searcher_parts))
    if c.engine != "hf":  # room for one group at least
        searcher += max(sum(vllm_parts(s, c, prompt, c.S).values()), int(c.vllm_memory * total))
    if c.gpus == 1 or c.sync == "onpolicy":
        return {"one GPU for trainer and searcher": trainer + searcher}
    return {"the trainer": trainer, "a searcher": searcher}


def fit(s: Shape, c: Config, prompt: int, total: int | None) -> tuple[float, list[str]]:
    """Compare a run's needs with the memory of its GPUs: (vLLM's share of a device, the comparison in words).

    Args:
        prompt: tokens of the longest prompt.
        total: bytes of the smallest GPU; None when that is not known.

    Raises:
        ConfigError: when it can't fit; names the memory needed, the memory there is, and an option that would help.
    """
    trainer, searcher = trainer_parts(s, c, prompt), searcher_parts(s, c, prompt)
    lines = [_line("trainer", trainer), _line("searcher" + " besides vLLM" * (c.engine != "hf"), searcher)]
    if total is None:
        return c.vllm_memory, [
            *lines,
            "memory of the GPUs: not known, so no run can be refused; vLLM gets .85, or .4 of a shared GPU",
        ]
    for who, needed in needs(s, c, prompt, total).items():
        if needed > total:
            raise ConfigError(f"{who} needs about {gib(needed)} GiB of {gib(total)}: {remedy(s, c, prompt, total)}")
    if c.engine != "vllm":
        return 0.0, lines
    shared = c.gpus == 1 or c.sync == "onpolicy"
    beside = sum(searcher.values()) + (sum(trainer.values()) if shared else 0)
    share = c.vllm_memory or min(MOST, math.floor(100 * (total - beside) / total) / 100)
    without = sum(vllm_parts(s, c, prompt, 0).values())
    answers = (share * total - without) / (sum(vllm_parts(s, c, prompt, 1).values()) - without)
    why = (
        "" if c.vllm_memory else f", which leaves {gib(beside)} to the others" if share < MOST else ", the most it gets"
    )
    lines.append(
        f"vLLM: {share:.2f} of {gib(total)} GiB{why}; weights and workspace {gib(without)}, "
        f"then room for the keys and values of about {max(0, answers):,.0f} answers (--in-flight {c.in_flight})"
    )
    return share, lines


def remedy(s: Shape, c: Config, prompt: int, total: int) -> str:
    """The options that make it fit, found by trying: each alone, then together."""
    fewer, few = max(1, c.micro_batch_tokens // 4), min(c.eval_prompts, 32)
    options = [
        ({"gradient_checkpointing": True}, "--gradient-checkpointing"),
        ({"micro_batch_tokens": fewer}, f"--micro-batch-tokens {fewer}"),
        ({"eval_prompts": few}, f"--eval-prompts {few}"),
        ({"weights": "shared-memory"}, "--weights shared-memory"),
        ({"vllm_memory": 0.0}, "--vllm-memory 0"),
    ]
    options = [(dict(change), name) for change, name in options if dataclasses.replace(c, **change) != c]

    def fits(*chosen: tuple[dict, str]) -> bool:
        changes = {field: value for change, _ in chosen for field, value in change.items()}
        return max(needs(s, dataclasses.replace(c, **changes), prompt, total).values()) <= total

    if alone := [option[1] for option in options if fits(option)]:
        return "use " + " or ".join(alone[:2])
    if fits(*options):
        for option in reversed(options):  # leave out options that are not needed
            without = [o for o in options if o is not option]
            options = without if fits(*without) else options
        return "use " + " and ".join(name for _, name in options)
    fixed = gib(16 * s.parameters)
    return f"weights, gradients and Adam alone take {fixed}; take a smaller model, or GPUs with more memory"


def gib(size: float) -> str:
    """Bytes as GiB, with as many digits as are useful."""
    return f"{size / GIB:.1f}" if size >= GIB else f"{size / GIB:.2g}" if size >= GIB / 100 else f"{size / GIB:.1g}"


def _line(who: str, parts: Parts) -> str:
    return f"{who}: about {gib(sum(parts.values()))} GiB ({', '.join(f'{n} {gib(v)}' for n, v in parts.items())})"
