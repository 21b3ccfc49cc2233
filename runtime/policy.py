"""The Hugging Face model that is trained, and its frozen copy pi_ref: loading, padding, log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from runtime.files import ConfigError, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from buffer import Trajectory


@dataclass
class Tokens:
    """N prompts with one answer each, padded to rectangles: prompts on the left, answers on the right.

    So every answer starts at column L, and logits are needed for the answers' columns only.
    """

    ids: Tensor  # [N, L + T] int64
    mask: Tensor | None  # [N, L + T] int64, 0 on the prompts' padding; None where no prompt is padded
    start: int  # L
    lengths: Tensor  # [N] int64, tokens of each answer


def collate(prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], pad: int, device: str = "cpu") -> Tokens:
    """Pad prompts [L_i] and answers [T_i] to rectangles. Any token may be the pad.

    Raises:
        ValueError: when a prompt is empty.
    """
    if not all(map(len, prompts)):
        raise ValueError("a prompt is empty: nothing predicts the first token of its answer")
    lengths = [len(r) for r in responses]
    start, width = max(map(len, prompts)), max(1, *lengths)
    ids = np.full((len(prompts), start + width), pad, np.int64)
    mask = np.ones_like(ids)
    for row, mask_row, prompt, response in zip(ids, mask, prompts, responses, strict=True):
        row[start - len(prompt) : start] = prompt
        row[start : start + len(response)] = response
        mask_row[: start - len(prompt)] = 0
    padded = bool((mask == 0).any())
    # Padding on the right needs no mask: attention is causal, so no answer token ever sees it.
    to = {"device": device}
    return Tokens(
        torch.as_tensor(ids, **to), torch.as_tensor(mask, **to) if padded else None, start, torch.tensor(lengths, **to)
    )


def micro_batches(groups: list[list[Trajectory]], max_tokens: int) -> list[list[list[Trajectory]]]:
    """Split a batch into parts of whole groups, each at most `max_tokens` padded tokens (but at least one group)."""
    parts: list[list[list[Trajectory]]] = []
    prompt = answer = 0
    for group in groups:
        longest_prompt, longest_answer = max(len(t.prompt) for t in group), max(len(t.response) for t in group)
        width = max(prompt, longest_prompt) + max(answer, longest_answer)
        if parts and width * len(group) * (len(parts[-1]) + 1) <= max_tokens:
            parts[-1].append(group)
            prompt, answer = max(prompt, longest_prompt), max(answer, longest_answer)
        else:
            parts.append([group])
            prompt, answer = longest_prompt, longest_answer
    return parts


def unique_rows(prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]) -> tuple[list[int], list[int]]:
    """Rows to compute when answers repeat: the first row of each kind [U], and the kind of each row [N].

    Compute values for the first rows only. `values[row_of]` are then the values of all rows, with the same gradients.
    Short answers repeat a lot: of 16 answers to a two-digit addition, 2 to 4 differ.
    """
    kinds: dict[tuple[bytes, bytes], int] = {}
    row_of = [kinds.setdefault((p.tobytes(), r.tobytes()), len(kinds)) for p, r in zip(prompts, responses, strict=True)]
    first = dict(zip(reversed(row_of), reversed(range(len(row_of))), strict=True))
    return [first[u] for u in range(len(kinds))], row_of


def padded(rows: Sequence[np.ndarray], like: Tensor) -> Tensor:
    """Ragged rows [<=T] as one tensor with the shape [N, T] and device of `like`, filled up with 0."""
    full = np.zeros(tuple(like.shape), np.float32)
    for line, row in zip(full, rows, strict=True):
        line[: len(row)] = row
    return torch.as_tensor(full, device=like.device)


def answer_logprobs(
    model: PreTrainedModel,
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    pad: int,
    temperature: float,
    states: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`logprobs_and_states` of N answers; equal answers to equal prompts pass through the model once.

    Returns:
        [N, T] nats, [N] lengths, [N, T, H] or None.
    """
    unique, row_of = unique_rows(prompts, responses)
    tokens = collate([prompts[i] for i in unique], [responses[i] for i in unique], pad, model.device)
    token_logp, hidden = logprobs_and_states(model, tokens, temperature, states)
    return token_logp[row_of], tokens.lengths[row_of], hidden[row_of] if states else None


def response_logprobs(model: PreTrainedModel, tokens: Tokens, temperature: float) -> Tensor:
    """log pi of each answer token given prompt and answer so far. -> [N, T] nats; padded positions hold anything."""
    return logprobs_and_states(model, tokens, temperature, states=False)[0]


def logprobs_and_states(model, tokens: Tokens, temperature: float, states: bool = True) -> tuple[Tensor, Tensor | None]:
    """log pi of each answer token [N, T], and the last hidden state before each, [N, T, H]; the first is the prompt's.

    The states are detached and fp32: heads that read them (log Z, critic) do not change the policy.
    """
    extra = {}
    if tokens.mask is not None:
        extra = {"attention_mask": tokens.mask, "position_ids": (tokens.mask.cumsum(1) - 1).clamp(min=0)}
    answers = tokens.ids[:, tokens.start :]  # [N, T]
    keep = answers.shape[1] + 1  # the prompt's last token predicts the answer's first
    with torch.autocast(answers.device.type, torch.bfloat16, enabled=answers.is_cuda):  # weights stay fp32
        out = model(tokens.ids, use_cache=False, logits_to_keep=keep, output_hidden_states=states, **extra)
    logp = token_logprobs(out.logits[:, :-1], answers, temperature)  # from [N, T, V]
    return logp, out.hidden_states[-1][:, tokens.start - 1 : -1].detach().float() if states else None


# --- log-probabilities of tokens ------------------------------------------------------------------------------------


class _TokenLogprobs(torch.autograd.Function):
    """log softmax(logits / temperature) at the given tokens.

    Works tile by tile: the gradient is the only other [N, T, V] tensor. Backward needs the logits, which exist anyway,
    and one number per token.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)  # fp32; float64 for float64 logits
        log_norm = torch.empty(tokens.shape, dtype=dtype, device=logits.device)  # [N, T]
        for tile in _tiles(logits):
            log_norm[tile] = (logits[tile].to(dtype) / temperature).logsumexp(-1)
        ctx.save_for_backward(logits, tokens, log_norm)
        ctx.temperature = temperature
        return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).to(dtype) / temperature - log_norm

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, tokens, log_norm = ctx.saved_tensors
        grad = (grad / ctx.temperature).unsqueeze(-1)  # [N, T, 1]
        logits_grad = torch.empty_like(logits)
        for tile in _tiles(logits):  # d log p(token) / d logits = (one-hot(token) - p) / temperature
            p = (logits[tile].to(log_norm.dtype) / ctx.temperature).sub_(log_norm[tile].unsqueeze(-1)).exp_()
            logits_grad[tile] = p.mul_(-grad[tile]).scatter_add_(-1, tokens[tile].unsqueeze(-1), grad[tile])
        return logits_grad, None, None


def _tiles(logits: Tensor) -> Iterator[tuple[slice, slice]]:
    """Cut [N, T] into rectangles. Each has at most 1/256 of the logits, or 2^18 of them, but at least one token's."""
    n, t, v = logits.shape
    tokens = max(logits.numel() // 256, 2**18) // max(v, 1)
    columns = max(1, min(t, tokens))
    rows = max(1, tokens // columns)
    return ((slice(i, i + rows), slice(j, j + columns)) for i in range(0, n, rows) for j in range(0, t, columns))


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each given token at the sampling temperature, in fp32 (float64 for float64 logits).

    Its gradient has the logits' dtype. Forward and backward together need one copy of the logits, not several.

    Args:
        logits: [N, T, V], those that predict `tokens`, any floating dtype.
        tokens: [N, T] int64.
        temperature: the logits are divided by it.

    Returns:
        [N, T] nats.

    Raises:
        ValueError: when the shapes differ from these.
    """
    if logits.ndim != 3 or tokens.shape != logits.shape[:2]:
        raise ValueError(f"need [N, T, V] and [N, T], got {tuple(logits.shape)} and {tuple(tokens.shape)}")
    return _TokenLogprobs.apply(logits, tokens, temperature)


# --- loading --------------------------------------------------------------------------------------------------------


def load_policy(
    folder: str, device: str = "cpu", trainable: bool = False, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a causal language model in fp32 (master weights; autocast computes in bf16 on a GPU).

    Raises:
        ConfigError: when a weight is not finite.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    options = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    _check_padding(folder, config.get_text_config())
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        options["attn_implementation"] = "eager"  # torch's fused kernel, the default, leaves Gemma 2's soft cap out
    model = AutoModelForCausalLM.from_pretrained(folder, **options).to(device)
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise ConfigError(f"--model {folder}: its weight {name} is not finite everywhere")
    return model.eval().requires_grad_(trainable)  # eval: dropout would make log pi a random number


def _check_padding(folder: str, config: PreTrainedConfig) -> None:
    pad, rows = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", None)
    if pad is not None and rows is not None and pad >= rows:  # transformers gives it to torch, which asserts
        raise ConfigError(
            f"{folder}/config.json: pad_token_id is {pad}, and vocab_size {rows}; it must be below, or null"
        )


def checkpoint_layers(model: PreTrainedModel) -> None:
    """From now on each layer keeps only its input for the backward pass, and computes the rest again there.

    transformers' own switch does nothing in eval mode, which `load_policy` chooses.

    Raises:
        ConfigError: when the model's layers do not support it.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(f"--gradient-checkpointing: {type(model).__name__} does not support it; leave it out")
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward)


def _recomputed(forward: Callable, *args, **kwargs):
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def load_tokenizer(folder: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of the model's folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


def check_prompts(prompts: Sequence[str], lengths: Sequence[int], model: PreTrainedModel, max_new_tokens: int) -> None:
    """Refuse prompts without a token, and prompts that are too long for the model.

    Raises:
        ConfigError: one line that names the prompt, its length in tokens, and the model's limit.
    """
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or float("inf")
    for prompt, length in zip(prompts, lengths, strict=True):
        shown = prompt if len(prompt) < 40 else prompt[:37] + "..."
        if length == 0:
            raise ConfigError(f"--task: the prompt {shown!r} has no token, so nothing predicts its answer")
        if length + max_new_tokens > longest:
            raise ConfigError(
                f"--task: the prompt {shown!r} has {length} tokens; with --max-new-tokens {max_new_tokens} "
                f"that is more than the {longest} that the model takes"
            )


def stop_tokens(folder: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of the tokens that end an answer: all that generation config, configuration and tokenizer name.

    Only what stands in the files counts: the default of transformers' configuration class belongs to another model.

    Raises:
        ConfigError: when there is none, or an entry is no id.
    """
    ids: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        if (path := Path(folder) / file).exists():
            values = read_json(path)
            parts = [values, values.get("text_config")]
            for part in (p for p in parts if isinstance(p, dict)):
                ids |= _ids(part.get("eos_token_id"), path)
    ids |= _ids(tokenizer.eos_token_id, Path(folder) / "tokenizer_config.json")
    if not ids:
        raise ConfigError(
            f"--model {folder}: no end-of-sequence token, so answers would never end; "
            "set eos_token_id in generation_config.json, or the tokenizer's eos_token"
        )
    return sorted(ids)


def _ids(value: object, path: Path) -> set[int]:
    """The ids in an entry of a model's file: a number or a list of them; null and -1 mean none."""
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int for i in listed):
        raise ConfigError(f"{path}: eos_token_id is {value!r}; it must be a token id, or a list of them")
    return {i for i in listed if i >= 0}


def named_weights(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """The weights that are published: every parameter under its Hugging Face name, tied ones once."""
    return [(name, p.detach()) for name, p in model.named_parameters()]
