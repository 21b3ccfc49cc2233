"""Checks of a run's numbers while it goes on: that the loss is finite, and that sampler and trainer agree.

The searchers' engine and the trainer's model are two programs that compute the same policy. Nothing else in a run would
notice that they do not: TB learns from any sampler, only worse.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from loss import sequence_logprobs
from runtime.policy import collate, response_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from baselines import Answers
    from buffer import Trajectory

log = logging.getLogger("tba_min.checks")
LIMIT = 0.05  # nats per token; on a CPU engines differ by 1e-6 in fp32, by 7e-3 in bf16
EVERY = 5.0  # seconds between a searcher's comparisons
MOST = 16  # answers in one


def check_finite(loss: Tensor, a: Answers, groups: list[list[Trajectory]], step: int) -> None:
    """Refuse a loss that is not finite.

    Raises:
        FloatingPointError: names update, prompt and values.
    """
    if torch.isfinite(loss):
        return
    values = (a.log_pi, a.log_ref, a.reward)
    size = torch.stack([x.detach().abs().nan_to_num(torch.inf, torch.inf) for x in values]).amax((0, 2))  # [P]
    p = int(size.argmax())  # the first that is not finite, otherwise the largest
    log_pi, log_ref, reward = ([round(v, 3) for v in x[p].tolist()] for x in values)
    raise FloatingPointError(
        f"update {step}: the loss is {float(loss.detach())}; prompt {groups[p][0].prompt_id} has "
        f"log_pi {log_pi}, log_ref {log_ref}, reward {reward}"
    )


class Alarm:
    """Says once that sampler and trainer disagree, and keeps the largest mismatch."""

    def __init__(self) -> None:
        self.largest: float | None = None  # nats per token; None: never measured

    def __call__(self, mismatch: float, version: int) -> None:
        if mismatch > LIMIT >= (self.largest or 0.0):
            log.warning(
                "sampler and trainer disagree: log-probabilities of answers by version %d differ by %.3g nats per "
                "token, more than %g: the engine computes another policy than the trainer",
                version,
                mismatch,
                LIMIT,
            )
        self.largest = max(mismatch, self.largest or 0.0)


def per_token(log_pi: Tensor, log_mu: Tensor, lengths: Tensor) -> Tensor:
    """|log pi - log mu| of answers, in nats per token; all of one shape."""
    return (log_pi - log_mu).abs() / lengths.clamp(min=1)


class SamplerCheck:
    """A searcher's own check: now and then it computes log pi of its answers by the weights that it pulled for them.

    The reference model lends its layers to these weights, so that no second model is needed.
    """

    def __init__(self, reference: PreTrainedModel, temperature: float) -> None:
        self.reference, self.temperature = reference, temperature
        self.alarm = Alarm()
        self._due = 0.0  # time.monotonic()
        self.forget()

    def forget(self) -> None:
        """Drop the weights, before others come."""
        self._version, self._weights = -1, {}

    def pulled(self, version: int, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Keep the weights if a comparison is due."""
        if time.monotonic() >= self._due:
            self._version, self._weights = version, dict(named_tensors)

    @torch.inference_mode()
    def __call__(self, trajectories: Sequence[Trajectory]) -> None:
        """Compare, if some of these answers were written by the kept weights alone."""
        if self._version < 0:
            return
        mine = [t for t in trajectories if t.policy_version == t.version_last == self._version][:MOST]
        if not mine:
            return
        tokens = collate([t.prompt for t in mine], [t.response for t in mine], 0, self.reference.device)

        def policy(*args: Tensor, **options: object):
            return functional_call(self.reference, self._weights, args, options)

        log_pi = sequence_logprobs(response_logprobs(policy, tokens, self.temperature), tokens.lengths)
        log_mu = torch.tensor(np.array([t.log_mu.sum() for t in mine]), device=log_pi.device)
        self.alarm(float(per_token(log_pi, log_mu, tokens.lengths).mean()), self._version)
        self._due = time.monotonic() + EVERY
        self.forget()
