"""Trajectory balance (TB): pure functions, tensors in and tensors out.

A batch is P prompts x with K answers y each. For each answer, all [P, K]:

    log_pi   log pi_theta(y|x) under the policy that is trained, summed over the answer's tokens, in nats
    log_ref  log pi_ref(y|x) under the frozen reference, the same sum
    reward   r(x, y), the task's score; it is divided by beta, the KL coefficient

    loss = mean over [P, K] of (log Z(x) + log pi_theta(y|x) - log pi_ref(y|x) - r(x, y) / beta)^2

Over all possible answers, the loss is zero exactly where pi_theta is the target: the policy with the best value of
reward - beta * KL(pi_theta || pi_ref). Anybody may have written them, if they cover what pi_theta would write: TB needs
no importance weight, no critic.
Source: TBA (arXiv 2503.18929), section 3.2, equations 4 and 5; Malkin et al. 2022 (arXiv 2201.13259).
"""

import torch
from torch import Tensor


def answer_mask(lengths: Tensor, width: int) -> Tensor:
    """True on an answer's own tokens, its end-of-sequence token included. [...] lengths -> [..., width]

    The mask comes from lengths, never from token ids: the padding may be the end-of-sequence token itself.
    """
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(-1)


def sequence_logprobs(token_logp: Tensor, lengths: Tensor) -> Tensor:
    """Log-probability of each answer: the sum over its own tokens. [N, T], [N] -> [N] nats.

    Padded positions may hold anything, NaN included. An empty answer gives 0.
    """
    if token_logp.ndim != 2 or lengths.shape != token_logp.shape[:1]:
        raise ValueError(f"need [N, T] and [N], got {tuple(token_logp.shape)} and {tuple(lengths.shape)}")
    inside = answer_mask(lengths, token_logp.shape[1])  # [N, T]
    return token_logp.masked_fill(~inside, 0.0).sum(1)


def vargrad_log_z(log_pi: Tensor, log_ref: Tensor, reward: Tensor, beta: float) -> Tensor:
    """VarGrad's estimate of log Z(x): it makes the group's mean residual zero. [P, K] x 3 -> [P] nats, detached.

    TBA equation 4. d loss / d log Z is proportional to the sum of the group's residuals. That sum is zero here, so
    detaching the estimate leaves the gradient of the loss unchanged.
    """
    return (log_ref + reward / beta - log_pi).mean(1).detach()


def tb_residual(log_pi: Tensor, log_ref: Tensor, reward: Tensor, log_z: Tensor, beta: float) -> Tensor:
    """How far each answer is out of balance: log Z + log pi_theta - log pi_ref - r / beta. -> [P, K] nats."""
    return log_z.unsqueeze(1) + log_pi - log_ref - reward / beta


def tb_loss(log_pi: Tensor, log_ref: Tensor, reward: Tensor, beta: float, log_z: Tensor | None = None) -> Tensor:
    """Trajectory balance: the mean squared residual over [P, K]. TBA equation 5.

    Args:
        log_pi, log_ref, reward: [P, K], a row for each prompt.
        beta: KL coefficient, above 0.
        log_z: [P] learned log partition function. It gets a gradient too, which draws it to VarGrad's estimate.
            None: estimate it by VarGrad.

    Returns:
        Scalar, nats squared. At small beta, values of 1e3 to 1e4 are normal; beta^2 * loss is in reward units squared.

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


def log_target(log_ref: Tensor, reward: Tensor, beta: float) -> Tensor:
    """The policy at which TB is zero, where all answers can be listed: log pi_ref exp(r / beta) / Z. -> [P, answers]"""
    return (log_ref + reward / beta).log_softmax(-1)
