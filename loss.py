"""The trajectory-balance (TB) objective: pure functions, tensors in and tensors out.

Notation: P prompts x with K answers y each; `log_pi` = log pi_theta(y|x) of the policy that is trained, `log_ref` the
same of the frozen reference, both summed over the answer's tokens, in nats; `reward` r(x, y) is divided by `beta`.

    loss = mean over [P, K] of (log Z(x) + log pi_theta(y|x) - log pi_ref(y|x) - r(x, y) / beta)^2

It is zero for every answer exactly when pi_theta(y|x) = pi_ref(y|x) exp(r(x, y) / beta) / Z(x), the policy with the
best reward minus beta * KL(pi_theta || pi_ref). That holds whoever wrote the answers: no importance weight, no critic.
Source: TBA (arXiv 2503.18929), section 3.2, equations 4 and 5; Malkin et al. 2022 (arXiv 2201.13259).
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _TokenLogprobs(torch.autograd.Function):
    """log softmax(logits / temperature) at the given tokens, tile by tile, so that no second [N, T, V] is ever held
    but the gradient itself. Saved for backward are the logits, which live anyhow, and one number a token.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)  # fp32, float64 where the logits are
        log_norm = torch.empty(tokens.shape, dtype=wide, device=logits.device)  # [N, T]
        for tile in _tiles(logits):
            log_norm[tile] = (logits[tile].to(wide) / temperature).logsumexp(-1)
        ctx.save_for_backward(logits, tokens, log_norm)
        ctx.temperature = temperature
        return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).to(wide) / temperature - log_norm

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, tokens, log_norm = ctx.saved_tensors
        grad = (grad / ctx.temperature).unsqueeze(-1)  # [N, T, 1]
        out = torch.empty_like(logits)
        for tile in _tiles(logits):  # d log p(token) / d logits = (one-hot(token) - p) / temperature
            p = (logits[tile].to(log_norm.dtype) / ctx.temperature).sub_(log_norm[tile].unsqueeze(-1)).exp_()
            out[tile] = p.mul_(-grad[tile]).scatter_add_(-1, tokens[tile].unsqueeze(-1), grad[tile])
        return out, None, None


def _tiles(logits: Tensor) -> Iterator[tuple[slice, slice]]:
    """Cut [N, T] into rectangles, each with at most 1/256 of the logits or 2^18 of them (but at least one row)."""
    n, t, v = logits.shape
    most = max(logits.numel() // 256, 2**18) // max(v, 1)  # tokens
    wide = max(1, min(t, most))
    high = max(1, most // wide)
    return ((slice(i, i + high), slice(j, j + wide)) for i in range(0, n, high) for j in range(0, t, wide))


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each given token at the sampling temperature, in fp32 (float64 for float64 logits).

    With its gradient, which has the logits' dtype, it needs one copy of the logits beside them, not several.

    Args:
        logits: [N, T, V], those that predict `tokens`, any floating dtype.
        tokens: [N, T] int64.
        temperature: the logits are divided by it.

    Returns:
        [N, T] nats.

    Raises:
        ValueError: when the shapes are others.
    """
    if logits.ndim != 3 or tokens.shape != logits.shape[:2]:
        raise ValueError(f"need [N, T, V] and [N, T], got {tuple(logits.shape)} and {tuple(tokens.shape)}")
    return _TokenLogprobs.apply(logits, tokens, temperature)


def sequence_logprobs(token_logp: Tensor, lengths: Tensor) -> Tensor:
    """Log-probability of each answer: the sum over its own tokens. [N, T], [N] -> [N] nats.

    The mask comes from the lengths, never from token ids: an end-of-sequence token counts even where the padding is
    the same token. What stands in padded positions, NaN included, does not matter; an empty answer gives 0.
    """
    if token_logp.ndim != 2 or lengths.shape != token_logp.shape[:1]:
        raise ValueError(f"need [N, T] and [N], got {tuple(token_logp.shape)} and {tuple(lengths.shape)}")
    inside = torch.arange(token_logp.shape[1], device=token_logp.device) < lengths.unsqueeze(1)  # [N, T]
    return token_logp.masked_fill(~inside, 0.0).sum(1)


def vargrad_log_z(log_pi: Tensor, log_ref: Tensor, reward: Tensor, beta: float) -> Tensor:
    """VarGrad's estimate of log Z(x): what would balance the group on average. [P, K] x 3 -> [P] nats, detached.

    TBA equation 4: mean over the K answers of log pi_ref + r / beta - log pi_theta. Detaching it leaves the gradient
    of the loss unchanged, because the residuals of a group sum to zero.
    """
    return (log_ref + reward / beta - log_pi).mean(1).detach()


def tb_residual(log_pi: Tensor, log_ref: Tensor, reward: Tensor, log_z: Tensor, beta: float) -> Tensor:
    """How far each trajectory is out of balance: log Z + log pi_theta - log pi_ref - r / beta. -> [P, K] nats."""
    return log_z.unsqueeze(1) + log_pi - log_ref - reward / beta


def tb_loss(log_pi: Tensor, log_ref: Tensor, reward: Tensor, beta: float, log_z: Tensor | None = None) -> Tensor:
    """Trajectory balance: the mean squared residual over [P, K]. TBA equation 5.

    Args:
        log_pi, log_ref, reward: [P, K], a row for each prompt.
        beta: KL coefficient, above 0.
        log_z: [P] learned log partition function, which gets a gradient too (the mean residual of its prompt draws
            it to VarGrad's estimate); None estimates it by VarGrad.

    Returns:
        Scalar, nats squared. At small beta, values of 1e3 to 1e4 are normal; beta^2 * loss is in reward units.

    Raises:
        ValueError: when the shapes are not [P, K], or beta is not above 0.
    """
    if log_pi.ndim != 2 or log_pi.shape != log_ref.shape or log_pi.shape != reward.shape:
        shapes = [tuple(t.shape) for t in (log_pi, log_ref, reward)]
        raise ValueError(f"log_pi, log_ref and reward must all be [P, K], got {shapes}")
    if not beta > 0:
        raise ValueError(f"beta must be above 0, got {beta}")
    if log_z is None:
        log_z = vargrad_log_z(log_pi, log_ref, reward, beta)
    elif log_z.shape != log_pi.shape[:1]:
        raise ValueError(f"log_z must be [P] = [{log_pi.shape[0]}], got {tuple(log_z.shape)}")
    return tb_residual(log_pi, log_ref, reward, log_z, beta).square().mean()
