"""The learning problem of the notebooks and of bench/lag.py, so small that everything can be counted.

A prompt's answers are the 256 sequences of 4 tokens from a vocabulary of 4. The policy is a table: a row of 4 logits
for each of the 85 beginnings of a sequence. Rewards are random numbers in [0, 1]; learning starts at pi_ref. So the
target pi_ref exp(r / beta) / Z, log Z and every KL divergence are sums of 256 terms: nothing is sampled or estimated.

`learn` trains one prompt by any loss, on answers that the policy of `lag` updates ago wrote. `World` holds many
prompts, behind the interface that notebooks/fake_clock.py needs.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baselines import Answers, frozen_kl_loss, rloo_loss, tba_prime_loss, vtrace_loss
from buffer import Trajectory
from loss import log_target, tb_loss, tb_residual, vargrad_log_z

VOCABULARY, LENGTH = 4, 4
CLIP = 8.0  # largest importance weight of a whole answer
OPTIMIZERS = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}


# --- sequences and the policy over them -----------------------------------------------------------------------------


def all_sequences() -> tuple[Tensor, Tensor]:
    """Tokens [256, 4], and for each its row in the policy's table [256, 4]."""
    tokens = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
    rows = []
    for t in range(LENGTH):
        prefix = sum((tokens[:, i] * VOCABULARY ** (t - 1 - i) for i in range(t)), torch.zeros(len(tokens)).long())
        rows.append(sum(VOCABULARY**i for i in range(t)) + prefix)
    return tokens, torch.stack(rows, 1)


TOKENS, ROWS = all_sequences()
STATES = sum(VOCABULARY**t for t in range(LENGTH))  # 85


def token_log_probabilities(table: Tensor) -> Tensor:
    """[B, 85, 4] logits -> [B, 256, 4]: log-probability of each token of each sequence, nats."""
    return table.log_softmax(-1).flatten(1)[:, ROWS * VOCABULARY + TOKENS]


def log_probabilities(table: Tensor) -> Tensor:
    """[B, 85, 4] logits -> [B, 256] log-probabilities of all sequences, nats."""
    return token_log_probabilities(table).sum(-1)


def letters(tokens) -> str:
    """A sequence in letters: `0 1 3 0` -> `abda`."""
    return "".join("abcd"[int(t)] for t in tokens)


def exact_log_z(log_ref: Tensor, reward: Tensor, beta: float) -> Tensor:
    """log of the sum over all sequences of pi_ref exp(r / beta). [B, 256] x 2 -> [B]"""
    return (log_ref + reward / beta).logsumexp(-1)


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) over all sequences, nats. [B, 256] x 2 -> [B]"""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def exact_critic(log_pi: Tensor, shaped: Tensor) -> Tensor:
    """Expected shaped reward from each of the 85 beginnings on, if pi writes the rest. [B, 256] x 2 -> [B, 85]

    The sequences are in order, so those with one beginning are neighbours.
    """
    values = []
    for t in range(LENGTH):
        p, ahead = (x.view(len(x), VOCABULARY**t, -1) for x in (log_pi, shaped))  # [B, beginnings, ways to go on]
        values.append((p.softmax(-1) * ahead).sum(-1))
    return torch.cat(values, 1)


def effective_share(log_ratio: Tensor) -> Tensor:
    """Effective sample size over the number of samples, 1/K to 1: (sum w)^2 / (K sum w^2). [..., K] -> [...]"""
    return (2 * log_ratio.logsumexp(-1) - (2 * log_ratio).logsumexp(-1)).exp() / log_ratio.shape[-1]


def worth(log_pi: Tensor, log_ref: Tensor, reward: Tensor, beta: float) -> Tensor:
    """J of a policy: mean reward minus beta times the KL from the reference. [B, 256] x 3 -> [B], reward units."""
    return (log_pi.exp() * reward).sum(-1) - beta * kl(log_pi, log_ref)


def fooling(target: Tensor, drawn: Tensor) -> Tensor:
    """A policy that has the target's probabilities for the `drawn` answers alone; all others share the rest evenly.

    TB on these answers can't tell it from the target. target: [256] nats; drawn: [K] indices -> [256] nats
    """
    seen = torch.zeros(len(target), dtype=torch.bool).index_fill(0, drawn, True)
    rest = target[~seen].logsumexp(0) - (~seen).sum().log()
    return torch.where(seen, target, rest)


@dataclass
class Problem:
    """B prompts: the start of learning, and the rewards."""

    table: Tensor  # [B, 85, 4] logits of pi_ref
    reward: Tensor  # [B, 256]

    @property
    def log_ref(self) -> Tensor:  # [B, 256]
        return log_probabilities(self.table)


def problem(seeds: int) -> Problem:
    """One random prompt for each seed: its reference policy, then its rewards."""
    generators = [torch.Generator().manual_seed(seed) for seed in range(seeds)]
    tables = [torch.randn(STATES, VOCABULARY, generator=g) for g in generators]
    return Problem(torch.stack(tables), torch.stack([torch.rand(len(TOKENS), generator=g) for g in generators]))


# --- losses ---------------------------------------------------------------------------------------------------------


def look_up(prompts, drawn, token_pi, token_mu, log_ref, reward, critic, beta, clip=CLIP) -> Answers:
    """The answers `drawn` [P, K] to the `prompts` [P], from tables over all sequences [B, 256, ...]."""
    at = prompts.unsqueeze(1), drawn
    return Answers(
        log_pi=token_pi.sum(-1)[at],
        log_mu=token_mu.sum(-1)[at],
        log_ref=log_ref[at],
        reward=reward[at],
        token_pi=token_pi[at],
        token_mu=token_mu[at],
        lengths=torch.full(drawn.shape, LENGTH),
        values=critic[prompts.view(-1, 1, 1), ROWS[drawn]],
        beta=beta,
        clip=clip,
    )


def frozen_is_loss(a: Answers) -> Tensor:
    """The frozen-KL policy gradient with the importance weights of TBA'."""
    shaped = a.shaped_reward(a.log_mu)
    weight = (a.log_pi - a.log_mu).detach().exp().clamp(max=a.clip)
    return -(weight * (shaped - shaped.mean(1, keepdim=True)) * a.log_pi).mean()


def on_policy_gradient(a: Answers) -> Tensor:
    """REINFORCE with the current KL in its reward and the group mean as baseline: textbook RL on fresh answers."""
    k = a.reward.shape[1]
    return rloo_loss(a.log_pi, a.shaped_reward(a.log_pi)) * ((k - 1) / k)


def vtrace_with_kl(a: Answers) -> Tensor:
    """V-trace with the current KL in its reward, so that its on-policy optimum is TB's."""
    return vtrace_loss(a.token_pi, a.token_mu, a.values, a.shaped_reward(a.log_pi), a.lengths)


LOSSES: dict[str, Callable[[Answers], Tensor]] = {  # on fresh answers all but V-trace have one gradient
    "TB": lambda a: a.beta / 2 * tb_loss(a.log_pi, a.log_ref, a.reward, a.beta),
    "policy gradient": on_policy_gradient,
    "clipped IS": lambda a: tba_prime_loss(a.log_pi, a.log_mu, a.log_ref, a.reward, a.beta, a.clip),
    "frozen KL": lambda a: frozen_kl_loss(a.log_pi, a.log_mu, a.log_ref, a.reward, a.beta),
    "frozen KL + IS": frozen_is_loss,
    "V-trace": vtrace_with_kl,
}


# --- learning -------------------------------------------------------------------------------------------------------


@dataclass
class Course:
    """The record of B rows that learn: one entry per update."""

    loss: Tensor  # [updates, B] TB loss of the drawn answers, nats squared, whichever loss was minimised
    kl: Tensor  # [updates, B] exact KL(pi || target) before the update, nats
    log_z: Tensor  # [updates, B] VarGrad's estimate
    log_ratio: Tensor  # [updates, B, K] log pi - log mu of the drawn answers
    log_pi: Tensor  # [B, 256] at the end
    table: Tensor  # [B, 85, 4] logits at the end
    untrained: Tensor  # [B] KL at the start


def learn(
    loss: str,
    start: Problem,
    beta: float,
    lags: Tensor,
    rates: list[float],
    updates: int,
    k: int = 16,
    optimizer: str = "adam",
    critic_is_exact: bool = False,
    clip: float = CLIP,
    critic_rate: float = 0.05,
    seed: int = 1,
    same: Tensor | None = None,
) -> Course:
    """Train B rows at once: they share nothing but the clock.

    Every update learns from k answers by the policy of `lag` updates ago (by the start, while there is none so old).

    Args:
        lags: [B] int64, trainer updates.
        rates: learning rates; each takes an equal share of the rows, in order.
        critic_is_exact: V-trace gets the present policy's `exact_critic` in place of one that learns.
        clip: largest importance weight of a whole answer, for losses that have one.
        critic_rate: learning rate of V-trace's critic.
        seed: of the draws.
        same: [B, k] sequences from which every update learns, whoever wrote them; None: fresh ones.
    """
    rows = torch.arange(len(lags))
    tables = [part.clone().requires_grad_() for part in start.table.chunk(len(rates))]
    critic = torch.zeros(len(lags), STATES, requires_grad=loss == "V-trace" and not critic_is_exact)
    groups = [{"params": [table], "lr": rate} for table, rate in zip(tables, rates, strict=True)]
    if critic.requires_grad:
        groups.append({"params": [critic], "lr": critic_rate})
    stepper = OPTIMIZERS[optimizer](groups, lr=0.0)
    draws = torch.Generator().manual_seed(seed)
    log_ref, target = start.log_ref, log_target(start.log_ref, start.reward, beta)
    history = torch.empty(updates, *start.table.shape)  # the policy before each update
    notes: dict[str, list[Tensor]] = {"loss": [], "kl": [], "log_z": [], "log_ratio": []}
    for step in range(updates):
        table = torch.cat(tables)
        history[step] = table.detach()
        token_pi, token_mu = (token_log_probabilities(t) for t in (table, history[(step - lags).clamp(min=0), rows]))
        log_pi, log_mu = token_pi.sum(-1), token_mu.sum(-1)  # [B, 256]
        if critic_is_exact:
            critic = exact_critic(log_pi.detach(), start.reward - beta * (log_pi.detach() - log_ref))
        mu = log_mu.exp().nan_to_num(1.0)  # diverged rows run on; nobody uses them
        drawn = torch.multinomial(mu, k, replacement=True, generator=draws) if same is None else same  # [B, K]
        answers = look_up(rows, drawn, token_pi, token_mu, log_ref, start.reward, critic, beta, clip)
        stepper.zero_grad()
        (LOSSES[loss](answers) * len(lags)).backward()  # a sum over rows: each has its own gradient
        stepper.step()
        _note(notes, answers, log_pi.detach(), target)
    table = torch.cat(tables).detach()
    return Course(
        **{name: torch.stack(rows) for name, rows in notes.items()},
        log_pi=log_probabilities(table),
        table=table,
        untrained=kl(log_ref, target),
    )


@torch.no_grad()
def _note(notes: dict[str, list[Tensor]], a: Answers, log_pi: Tensor, target: Tensor) -> None:
    log_z = vargrad_log_z(a.log_pi, a.log_ref, a.reward, a.beta)
    residual = tb_residual(a.log_pi, a.log_ref, a.reward, log_z, a.beta)
    notes["log_z"].append(log_z)
    notes["loss"].append(residual.square().mean(1))
    notes["log_ratio"].append(a.log_pi.detach() - a.log_mu)
    notes["kl"].append(kl(log_pi, target))


def gradient(loss: str, table: Tensor, p: Problem, drawn: Tensor, beta: float) -> Tensor:
    """Gradient of a loss with respect to the table, on the given sequences, as if pi had just written them.

    table: [85, 4]; p: one prompt; drawn: [K] indices of sequences -> [85, 4]
    """
    table = table.clone().requires_grad_()
    token_pi = token_log_probabilities(table.unsqueeze(0))
    here, nothing = torch.zeros(1, dtype=torch.long), torch.zeros(1, STATES)
    look = token_pi, token_pi.detach(), p.log_ref, p.reward, nothing, beta
    return torch.autograd.grad(LOSSES[loss](look_up(here, drawn.unsqueeze(0), *look)), table)[0]


def by_lag(
    loss: str, lags: list[int], seeds: int, beta: float, rate: float, updates: int, last: int = 100, **options
) -> tuple[Tensor, Course]:
    """Train at every lag with every seed.

    Returns:
        Final KL [lags, seeds], the mean of the `last` updates; and the Course, whose rows are lag by lag.
    """
    start = repeated(problem(seeds), len(lags))
    course = learn(loss, start, beta, torch.tensor(lags).repeat_interleave(seeds), [rate], updates, **options)
    return final_kl(course, last).view(len(lags), seeds), course


def by_training(
    loss: str, lag: int, rates: list[float], seeds: int, beta: float, marks: list[float], seed: int = 1
) -> Tensor:
    """Train at every learning rate, each for the same training: its updates times its rate.

    Args:
        marks: amounts of training, rising; a rate makes mark / rate updates.

    Returns:
        KL [rates, marks, seeds]: the mean over the last tenth of the training before each mark.
    """
    lags, found = torch.full((seeds,), lag), []
    for rate in rates:
        ends = [round(mark / rate) for mark in marks]
        course = learn(loss, problem(seeds), beta, lags, [rate], ends[-1], seed=seed)
        found.append(torch.stack([course.kl[end - max(end // 10, 1) : end].mean(0) for end in ends]))
    return torch.stack(found)


def repeated(p: Problem, times: int) -> Problem:
    """All prompts, repeated several times."""
    return Problem(p.table.repeat(times, 1, 1), p.reward.repeat(times, 1))


def final_kl(course: Course, last: int = 100) -> Tensor:
    """KL to the target at the end, mean of the `last` updates [B]; infinite for rows that diverged."""
    return course.kl[-last:].mean(0).nan_to_num(torch.inf, torch.inf)


# --- how noisy a gradient is ----------------------------------------------------------------------------------------


def scores(table: Tensor) -> Tensor:
    """Gradient of every sequence's log-probability with respect to the table. [85, 4] -> [256, 340]"""
    out = torch.zeros(len(TOKENS), STATES, VOCABULARY)
    p, place = table.softmax(-1), torch.arange(len(TOKENS))
    for t in range(LENGTH):
        out[place, ROWS[:, t]] -= p[ROWS[:, t]]
        out[place, ROWS[:, t], TOKENS[:, t]] += 1.0
    return out.flatten(1)


def gradient_noise(
    table: Tensor, reward: Tensor, log_ref: Tensor, beta: float, k: int, baseline: str, groups: int = 400, seed: int = 0
) -> float:
    """Variance of the TB gradient over groups of k fresh answers, as a multiple of the mean gradient's squared length.

    Args:
        table, reward, log_ref: [85, 4], [256], [256] of one prompt.
        baseline: in place of log Z: "VarGrad" (the group's mean; times k / (k - 1), so that the mean is the exact
            gradient), "exact log Z", or "zero".
    """
    log_pi, s = log_probabilities(table.unsqueeze(0))[0], scores(table)
    u = log_ref + reward / beta - log_pi  # [256]
    exact = s.T @ (log_pi.exp() * -u)  # a constant log Z adds nothing to the mean
    drawn = torch.multinomial(log_pi.exp(), groups * k, True, generator=torch.Generator().manual_seed(seed))
    drawn = drawn.view(groups, k)
    if baseline == "VarGrad":
        residual = (u[drawn].mean(1, keepdim=True) - u[drawn]) * (k / (k - 1))
    else:
        log_z = exact_log_z(log_ref, reward, beta) if baseline == "exact log Z" else 0.0
        residual = log_z - u[drawn]
    weight = torch.zeros(groups, len(u)).scatter_add_(1, drawn, residual / k)  # of each sequence in each group
    gradient = weight @ s  # [groups, 340]
    return float((gradient - exact).square().sum(1).mean() / exact.square().sum())


def directions(
    table: Tensor, log_mu: Tensor, p: Problem, beta: float, clip: float, k: int = 16, groups: int = 400, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Where the gradients of "clipped IS" point, on groups of k answers that mu wrote; a row for each prompt.

    Args:
        table: [B, 85, 4] of the policies pi.
        log_mu: [B, 256] of the policies that wrote.
        p: the B prompts.
        clip: largest weight. Towards 0 all weights become equal, and the direction is TB's.

    Returns:
        Degrees between the mean gradient (exact) and that of -J [B]; and the gradients' noise [B]: the root mean square
        of their distance from the mean (sampled), as a multiple of the mean's length.
    """
    draws, found = torch.Generator().manual_seed(seed), []
    log_ref, log_pi = p.log_ref, log_probabilities(table)
    for i in range(len(table)):
        s, pi, mu = scores(table[i]), log_pi[i].exp(), log_mu[i].exp()
        shaped = p.reward[i] - beta * (log_pi[i] - log_ref[i])  # [256]
        weight = (pi / mu).clamp(max=clip) / min(clip, 1.0)  # only the direction counts
        exact = s.T @ (pi * -shaped)  # [340]
        mean = s.T @ (mu * weight * ((mu * shaped).sum() - shaped)) * ((k - 1) / k)  # the group's mean has all k
        drawn = torch.multinomial(mu, groups * k, True, generator=draws).view(groups, k)
        push = weight[drawn] * (shaped[drawn].mean(1, keepdim=True) - shaped[drawn]) / k  # [groups, k]
        gradients = torch.zeros(groups, len(mu)).scatter_add_(1, drawn, push) @ s  # [groups, 340]
        cosine = torch.cosine_similarity(mean, exact, dim=0).clamp(-1, 1)
        noise = (gradients - mean).square().sum(1).mean().sqrt() / mean.norm()
        found.append(torch.stack([cosine.acos().rad2deg(), noise]))
    angle, noise = torch.stack(found, 1)
    return angle, noise


# --- many prompts, for the fake clock -------------------------------------------------------------------------------


class World:
    """A policy for `prompts` prompts that learns by TB, and its published versions.

    Args:
        prompts: how many; their seeds in `problem` are 0, 1, ... for `seed` 0, the following ones for 1, ...
        beta, rate: KL coefficient, Adam's learning rate.
    """

    def __init__(
        self, prompts: int = 16, beta: float = 0.25, rate: float = 0.02, seed: int = 0, loss: str = "TB"
    ) -> None:
        everything = problem(prompts * (seed + 1))
        self.prompts, self.beta, self.loss = prompts, beta, loss
        self.reward = everything.reward[-prompts:]
        self.table = everything.table[-prompts:].clone().requires_grad_()
        with torch.no_grad():
            self.log_ref = log_probabilities(self.table)
            self.target = log_target(self.log_ref, self.reward, beta)
        self.stepper = torch.optim.Adam([self.table], lr=rate)
        self.versions: dict[int, Tensor] = {}  # version -> token log-probabilities [prompts, 256, 4]
        self.draws = torch.Generator().manual_seed(seed)
        self.publish(0)

    def publish(self, version: int) -> None:
        """Keep the present policy under a number."""
        with torch.no_grad():
            self.versions[version] = token_log_probabilities(self.table)

    def write(self, prompt: int, version: int, k: int) -> list[dict]:
        """k answers to a prompt by a published policy: their fields of a Trajectory."""
        token_mu = self.versions[version][prompt]  # [256, 4]
        drawn = torch.multinomial(token_mu.sum(1).exp(), k, replacement=True, generator=self.draws).tolist()
        return [
            {
                "prompt": np.array([prompt], np.int32),
                "response": TOKENS[i].numpy().astype(np.int32),
                "finish_reason": "stop",
                "reward": float(self.reward[prompt, i]),
                "log_ref": float(self.log_ref[prompt, i]),
                "log_mu": token_mu[i].numpy(),
            }
            for i in drawn
        ]

    def learn(self, groups: list[list[Trajectory]]) -> dict[str, float]:
        """One update on P groups of K; the metrics are those before the update."""
        prompts = torch.tensor([group[0].prompt_id for group in groups])
        tokens = torch.from_numpy(np.array([[t.response for t in group] for group in groups])).long()  # [P, K, 4]
        drawn = (tokens * VOCABULARY ** torch.arange(LENGTH - 1, -1, -1)).sum(-1)  # [P, K]
        token_pi = token_log_probabilities(self.table)
        log_pi = token_pi.sum(-1)  # [prompts, 256]
        token_mu = torch.zeros_like(token_pi)
        token_mu[prompts.unsqueeze(1), drawn] = torch.tensor(np.array([[t.log_mu for t in g] for g in groups]))
        critic = torch.zeros(self.prompts, STATES)
        answers = look_up(prompts, drawn, token_pi, token_mu, self.log_ref, self.reward, critic, self.beta)
        self.stepper.zero_grad()
        LOSSES[self.loss](answers).backward()
        self.stepper.step()
        notes: dict[str, list[Tensor]] = {"loss": [], "kl": [], "log_z": [], "log_ratio": []}
        _note(notes, answers, log_pi.detach(), self.target)
        return {
            "imbalance": float(self.beta**2 * notes["loss"][0].mean()),
            "kl": float(notes["kl"][0].mean()),
            "reward": float(answers.reward.mean()),
        }
