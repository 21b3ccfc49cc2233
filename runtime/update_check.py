"""A searcher's check of its own engine: does vLLM follow a weight update, with this model and on this machine?

Other weights go the way of every update. vLLM's log-probabilities of a few tokens must then be those of Hugging Face's
code. So no list of architectures is needed: what vLLM loads otherwise, or computes otherwise, is refused by name before
anything is learned from it. It costs two updates and eight tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from runtime.files import ConfigError
from runtime.policy import collate, named_weights, response_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from runtime.engine import VllmEngine

MOST = {
    torch.float32: 5e-4
}  # nats per token on average, at temperature 1; 1e-7 to 1e-5 is healthy, faults had 4e-3 to 5
MOST_IN_BF16 = 0.1  # 7e-3 is healthy
PROMPTS, BEGINNING, TOKENS = 4, 64, 8  # prompts that are used, tokens of each prompt, tokens of each answer


def check_updates(
    engine: VllmEngine, reference: PreTrainedModel, prompts: Sequence[np.ndarray], temperature: float
) -> None:
    """Refuse a model whose weight updates vLLM does not follow. At its end the engine has the weights of `reference`.

    Args:
        reference: the model of the engine's folder.
        prompts: the task's.
        temperature: of the engine's sampling.

    Raises:
        ConfigError: when the log-probabilities differ.
    """
    weights = dict(_other_weights(reference, engine.dtype))
    engine.load_weights(list(weights.items()), engine.version)
    found = _difference(engine, reference, weights, [p[:BEGINNING] for p in prompts[:PROMPTS]], temperature)
    most = MOST.get(engine.dtype, MOST_IN_BF16) / min(1.0, temperature)
    if not found <= most:  # NaN too
        raise ConfigError(
            f"--engine vllm: after a weight update vLLM's log-probabilities of {type(reference).__name__} differ from "
            f"Hugging Face's by {found:.2g} nats per token (at most {most:.2g} may be); use --engine hf"
        )
    engine.load_weights(named_weights(reference), engine.version)


def _difference(
    engine: VllmEngine, reference: PreTrainedModel, weights: dict, prompts: list[np.ndarray], temperature: float
) -> float:
    """Between log-probabilities by vLLM, and by Hugging Face's code with `weights`: nats per token, on average."""
    with engine.short_answers(TOKENS):
        groups = engine.generate(prompts, 1)
    answers = [group[0] for group in groups]
    tokens = collate(prompts, [a.tokens for a in answers], 0, reference.device)

    def forward(ids: torch.Tensor, **options: object):
        return torch.func.functional_call(reference, weights, (ids,), options)

    with torch.no_grad():
        logp = response_logprobs(forward, tokens, temperature).float().cpu().numpy()  # [N, T]
    return float(np.mean(np.concatenate([np.abs(logp[i, : len(a.tokens)] - a.log_mu) for i, a in enumerate(answers)])))


def _other_weights(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights that differ from the model's in every parameter, by about a tenth; zeros differ too."""
    noise = torch.Generator(model.device).manual_seed(0)
    for name, p in named_weights(model):
        scale = 0.1 * float(p.square().mean().sqrt()) or 0.02
        yield name, (p + scale * torch.randn(p.shape, generator=noise, device=p.device)).to(dtype)
