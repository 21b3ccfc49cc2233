"""The losses that TB is compared with: policy gradients and V-trace, on the conventions of loss.py.

Notation as there: P prompts x K answers y, T token positions; everything in nats but `reward`. `log_mu` is the
log-probability under the policy that wrote the answer. Sequence losses take [P, K]; token losses take [P, K, T] with
lengths [P, K] and ignore the padding, NaN included. Each loss is a scalar to minimise; only its gradient has a meaning:
advantages and weights are constants.

TB belongs to the same family. For any answers, whoever wrote them, the gradient of (beta / 2) * tb_loss is that of

    - mean over [P, K] of A log pi,   A = R - its group mean,   R = r - beta (log pi - log pi_ref), current pi, detached

So `rloo_loss(log_pi, R)` has that gradient times K / (K - 1); `tba_prime_loss` adds an importance weight. The others
leave a part of R out, or take it from the policy that wrote the answer.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from loss import answer_mask


@dataclass
class Answers:
    """All that a loss may look at: P groups of K answers, T token positions. trainer.py makes it, and the notebooks."""

    log_pi: Tensor  # [P, K] nats
    log_mu: Tensor  # [P, K] nats
    log_ref: Tensor  # [P, K] nats
    reward: Tensor  # [P, K]
    token_pi: Tensor  # [P, K, T] nats
    token_mu: Tensor  # [P, K, T] nats
    lengths: Tensor  # [P, K] tokens of each answer
    beta: float
    log_z: Tensor | None = None  # [P] learned log Z, nats
    values: Tensor | None = None  # [P, K, T] the critic's value before each token, reward units
    clip: float = 8.0  # largest importance weight of a whole answer

    def shaped_reward(self, log_p: Tensor) -> Tensor:
        """Reward less beta times the distance of `log_p` from pi_ref, a constant. [P, K] -> [P, K]"""
        return self.reward - self.beta * (log_p - self.log_ref).detach()


def _check(form: str, **tensors: Tensor) -> None:
    """Refuse tensors that are not all of the given form: `[P, K]`, `[P, K, T]` or `[N, T]`."""
    shapes = [tuple(t.shape) for t in tensors.values()]
    if len(set(shapes)) != 1 or len(shapes[0]) != form.count(",") + 1:
        raise ValueError(f"{', '.join(tensors)} must all be {form}, got {shapes}")


def _check_each(form: str, shape: torch.Size, **tensors: Tensor) -> None:
    """Refuse tensors that are not of the given shape, whose form is `[P, K]` or `[N]`."""
    for name, tensor in tensors.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} must be {form} = {list(shape)}, got {tuple(tensor.shape)}")


def _centred(x: Tensor) -> Tensor:
    """x less its group's mean, [P, K]; exactly 0 where a group's values are equal."""
    x = x - x[:, :1]
    return x - x.mean(1, keepdim=True)


def rloo_loss(log_pi: Tensor, reward: Tensor) -> Tensor:
    """REINFORCE with a leave-one-out baseline: -mean over [P, K] of (r_i - mean of the other r_j) log pi_i.

    log_pi, reward: [P, K], K at least 2; the loss is in reward units times nats. Its optimum is the highest reward:
    subtract beta (log_pi - log_ref).detach() from the reward for that of TB (and then it is TB: see above).
    Source: Ahmadian et al. 2024 (arXiv 2402.14740).
    It needs answers by the current policy: it corrects for nothing.
    """
    _check("[P, K]", log_pi=log_pi, reward=reward)
    k = reward.shape[1]
    if k < 2:
        raise ValueError(f"rloo_loss needs at least 2 answers per prompt, got K = {k}")
    advantage = _centred(reward).detach() * (k / (k - 1))  # = r_i - mean of the others
    return -(advantage * log_pi).mean()


def frozen_kl_loss(log_pi: Tensor, log_mu: Tensor, log_ref: Tensor, reward: Tensor, beta: float) -> Tensor:
    """Policy gradient whose KL term was computed when the answer was written: -mean over [P, K] of A log pi,
    A = R - its group mean, R = r - beta (log mu - log pi_ref).

    All [P, K], the loss is in reward units times nats. While mu is pi, its gradient is beta / 2 times TB's, and its
    optimum is TB's. The older mu is, the staler is the KL term: the policy drifts too far before it is pulled back.
    Source: PPO-style RLHF puts KL into the reward like this (Ouyang et al. 2022, arXiv 2203.02155); the contrast with
    TB is TBA's (arXiv 2503.18929, section 3.2), which takes log pi anew in every update.
    It needs answers by the current policy, or by one that is close to it, and their log mu.
    """
    _check("[P, K]", log_pi=log_pi, log_mu=log_mu, log_ref=log_ref, reward=reward)
    advantage = _centred(reward - beta * (log_mu - log_ref)).detach()
    return -(advantage * log_pi).mean()


def tba_prime_loss(
    log_pi: Tensor, log_mu: Tensor, log_ref: Tensor, reward: Tensor, beta: float, clip: float = 8.0
) -> Tensor:
    """TBA', TB as a policy gradient with an importance weight: -mean over [P, K] of min(pi / mu, clip) A log pi,
    A = R - its group mean, R = r - beta (log pi - log pi_ref), weight and A detached.

    All [P, K], the loss is in reward units times nats. The trainer resets pi_ref to pi every rho updates; then the
    optimum moves on towards the highest reward.
    Source: TBA (arXiv 2503.18929), appendix A and section 6.
    It needs log mu, and log pi_ref under a reference that changes.
    """
    _check("[P, K]", log_pi=log_pi, log_mu=log_mu, log_ref=log_ref, reward=reward)
    advantage = _centred(reward - beta * (log_pi - log_ref)).detach()
    weight = (log_pi - log_mu).detach().exp().clamp(max=clip)
    return -(weight * advantage * log_pi).mean()


def grpo_loss(
    log_pi: Tensor, log_mu: Tensor, reward: Tensor, lengths: Tensor, clip: float = 0.2, dr: bool = False
) -> Tensor:
    """GRPO: -mean over [P, K] of 1/length * sum over tokens of min(rho A, clip(rho, 1 - clip, 1 + clip) A),
    rho = pi / mu of a token, A = (r - group mean) / (group std + 1e-4); Dr. GRPO (`dr`) has neither std nor 1/length.

    log_pi, log_mu: [P, K, T]; reward, lengths: [P, K]; the loss has no unit (Dr. GRPO: reward units). Its optimum is
    the highest reward: the KL term, which Dr. GRPO drops, is left out. A group of equal rewards has no gradient.
    Source: Shao et al. 2024 (arXiv 2402.03300), equation 3; Liu et al. 2025 (arXiv 2503.20783).
    It needs log mu of every token, and a mu close to pi: a clipped token teaches nothing.
    """
    _check("[P, K, T]", log_pi=log_pi, log_mu=log_mu)
    _check_each("[P, K]", log_pi.shape[:2], reward=reward, lengths=lengths)
    advantage = _centred(reward).detach()
    if not dr:
        advantage = advantage / (advantage.square().mean(1, keepdim=True).sqrt() + 1e-4)
    advantage = advantage.unsqueeze(-1)  # [P, K, 1]
    inside = answer_mask(lengths, log_pi.shape[-1])
    ratio = (log_pi - log_mu).masked_fill(~inside, 0.0).exp()  # [P, K, T]
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    answers = gain.masked_fill(~inside, 0.0).sum(-1)  # [P, K]
    return -(answers if dr else answers / lengths.clamp(min=1)).mean()


class VTrace(NamedTuple):
    """Value targets and policy-gradient advantages, [N, T], 0 in the padding."""

    targets: Tensor
    advantages: Tensor


@torch.no_grad()
def vtrace(
    log_rho: Tensor,
    values: Tensor,
    bootstrap: Tensor,
    rewards: Tensor,
    discounts: Tensor,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
    lengths: Tensor | None = None,
) -> VTrace:
    """IMPALA's V-trace, by a scan from a sequence's end to its start; detached.

    v_t - V_t = delta_t + discount_t c_t (v_{t+1} - V_{t+1}), delta_t = rho_t (r_t + discount_t V_{t+1} - V_t),
    rho = min(clip_rho, pi / mu), c = min(clip_c, pi / mu); advantage_t = rho_t (r_t + discount_t v_{t+1} - V_t).

    Args:
        log_rho: [N, T] log pi - log mu of each action, nats.
        values, rewards: [N, T] V of the state before the action, and the action's reward; reward units.
        bootstrap: [N] V of the state behind the last action.
        discounts: [N, T]; 0 where the episode ends with the action.
        clip_rho, clip_c: rho-bar and c-bar. The first sets the optimum, the second only the speed.
        lengths: [N] actions of each sequence; None is T for all.

    Source: Espeholt et al. 2018 (arXiv 1802.01561), equation 1, remark 1 and section 4.2.
    It needs log mu of every token and a critic.
    """
    _check("[N, T]", log_rho=log_rho, values=values, rewards=rewards, discounts=discounts)
    n, width = values.shape
    lengths = torch.full((n,), width, device=values.device) if lengths is None else lengths
    _check_each("[N]", values.shape[:1], bootstrap=bootstrap, lengths=lengths)
    inside = answer_mask(lengths, width)
    values = torch.where(inside, values, bootstrap.unsqueeze(1))  # so that bootstrap follows the last action
    rewards, discounts = rewards.masked_fill(~inside, 0.0), discounts.masked_fill(~inside, 0.0)
    ratio = log_rho.masked_fill(~inside, 0.0).exp()
    rho, c = ratio.clamp(max=clip_rho), ratio.clamp(max=clip_c)

    following = torch.cat([values[:, 1:], bootstrap.unsqueeze(1)], 1)  # V_{t+1}
    delta = (rho * (rewards + discounts * following - values)).masked_fill(~inside, 0.0)
    correction, corrections = torch.zeros_like(bootstrap), []  # v_{t+1} - V_{t+1}
    for t in reversed(range(width)):
        correction = delta[:, t] + discounts[:, t] * c[:, t] * correction
        corrections.append(correction)
    targets = values + torch.stack(corrections[::-1], 1) if width else values
    following = torch.cat([targets[:, 1:], bootstrap.unsqueeze(1)], 1)  # v_{t+1}
    advantages = rho * (rewards + discounts * following - values)
    return VTrace(targets.masked_fill(~inside, 0.0), advantages.masked_fill(~inside, 0.0))


def vtrace_loss(
    log_pi: Tensor, log_mu: Tensor, values: Tensor, reward: Tensor, lengths: Tensor, critic: float = 0.5
) -> Tensor:
    """Actor and critic, token by token: mean over [P, K] of the sum over tokens of
    -advantage * log pi + critic * (target - V)^2, with V-trace's targets and advantages (constants).

    log_pi, log_mu, values: [P, K, T], values in reward units; reward, lengths: [P, K]. An answer's reward comes with
    its last token, where the episode ends; no discount. The optimum is the highest reward: for that of TB subtract
    beta (log_pi - log_ref).detach() from the reward. Left out: IMPALA's entropy bonus.
    Source: Espeholt et al. 2018 (arXiv 1802.01561), section 4.2.
    It needs log mu of every token and a critic.
    """
    _check("[P, K, T]", log_pi=log_pi, log_mu=log_mu, values=values)
    _check_each("[P, K]", log_pi.shape[:2], reward=reward, lengths=lengths)
    outside = ~answer_mask(lengths, log_pi.shape[-1])  # [P, K, T]
    log_pi, log_mu, values = (x.masked_fill(outside, 0.0) for x in (log_pi, log_mu, values))
    last = torch.arange(log_pi.shape[-1], device=lengths.device) == lengths.unsqueeze(-1) - 1  # an answer's last token
    rewards = torch.where(last, reward.unsqueeze(-1), 0.0)
    discounts = torch.where(last, 0.0, torch.ones_like(rewards))
    flat = [x.flatten(0, 1) for x in (log_pi - log_mu, values, rewards, discounts)]  # each [N = P*K, T]
    end = torch.zeros_like(reward).flatten()  # V behind the last token: nothing comes any more
    result = vtrace(flat[0], flat[1], end, flat[2], flat[3], lengths=lengths.flatten())
    targets, advantages = (x.view_as(values) for x in result)
    return (critic * (targets - values).square() - advantages * log_pi).sum(-1).mean()
