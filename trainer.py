"""The trainer: draw a batch, log-probabilities, loss, backward, step, publish.

`Learner` is one update on one batch, from top to bottom. `Trainer` is the loop around it, the same for every `--sync`:
sync.py says where batches come from. A new objective is one more entry of OBJECTIVES, and of config.py's `loss`.

Departures from the published code: weights are fp32 under bf16 autocast, a micro-batch holds whole groups, and metrics
are those of the whole update.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from baselines import Answers, frozen_kl_loss, grpo_loss, rloo_loss, tba_prime_loss, vtrace_loss
from loss import sequence_logprobs, tb_loss
from runtime import checkpoint
from runtime.checks import Alarm, check_finite, per_token
from runtime.evaluation import Evaluator
from runtime.files import JsonLines, bookkeeping, keep_rows_before, read_json
from runtime.metrics import Board, Clock, EventLog, batch_metrics
from runtime.policy import answer_logprobs, checkpoint_layers, load_policy, micro_batches, named_weights, padded
from runtime.served_buffer import RemoteBuffer, pack
from runtime.summary import training_summary
from runtime.weights import make_publisher
from sync import BATCHES, BarrierBatches, Batch, EagerBatches, OnPolicyBatches, backlog
from tasks import load_task

if TYPE_CHECKING:
    from multiprocessing.managers import BaseProxy

    from transformers import PreTrainedModel

    from config import Config
    from runtime.child import Child

log = logging.getLogger("tba_min.trainer")
PROGRESS = ("trained", "staleness_sum", "staleness_max", "accuracies", "seconds_before")  # a Trainer's, in checkpoints

OBJECTIVES: dict[str, Callable[[Answers, Config], Tensor]] = {
    "tb": lambda a, c: tb_loss(a.log_pi, a.log_ref, a.reward, a.beta, a.log_z),
    "tba_prime": lambda a, c: tba_prime_loss(a.log_pi, a.log_mu, a.log_ref, a.reward, a.beta, a.clip),
    "rloo": lambda a, c: rloo_loss(a.log_pi, a.reward),
    "grpo": lambda a, c: grpo_loss(a.token_pi, a.token_mu, a.reward, a.lengths, dr=c.dr_grpo),
    "frozen_kl": lambda a, c: frozen_kl_loss(a.log_pi, a.log_mu, a.log_ref, a.reward, a.beta),
    "vtrace": lambda a, c: vtrace_loss(a.token_pi, a.token_mu, a.values, a.reward, a.lengths),
}


# --- one update -----------------------------------------------------------------------------------------------------


class Learner:
    """Policy, optimizer, and one update by the objective that the configuration names.

    Args:
        model: the policy, fp32 master weights.
        config: loss and its options, lr and its schedule, beta and its schedule, temperature, micro_batch_tokens.
        pad: token id for padding; any will do.
        clock: where the time goes.
    """

    def __init__(self, model: PreTrainedModel, config: Config, pad: int, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.model, self.config, self.pad, self.step = model, config, pad, 0
        self.alarm = Alarm()
        self.head: torch.nn.Linear | None = None  # V(x), reward units: log Z(x) = V / beta, or the critic of vtrace
        if config.loss == "vtrace" or (config.loss == "tb" and config.log_z == "learned"):
            self.head = torch.nn.Linear(model.config.hidden_size, 1).to(model.device)
            torch.nn.init.zeros_(self.head.weight)
        # TBA' moves its reference. The log pi_ref that searchers stored is then stale, so the trainer keeps its own.
        self.reference = copy.deepcopy(model).requires_grad_(False) if config.loss == "tba_prime" else None
        if config.gradient_checkpointing:
            checkpoint_layers(model)
        groups = [{"params": list(model.parameters()), "weight_decay": config.weight_decay}]
        if self.head is not None:
            groups.append({"params": list(self.head.parameters()), "weight_decay": 0.0})
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, fused=model.device.type == "cuda")

    def update(self, groups: Batch) -> dict[str, float]:
        """One optimizer step on P groups of K; returns metrics of the whole update (docs/runs.md defines each).

        Raises:
            FloatingPointError: when the loss is not finite (the text names step, prompt and values), or the gradient.
        """
        beta, lr = self._prepare(groups)
        sums: Counter[str] = Counter()
        with self.clock.span("forward, backward"):
            for part in micro_batches(groups, self.config.micro_batch_tokens):
                share = len(part) / len(groups)
                loss, metrics = self._loss(self._answers(part, beta), part)
                (share * loss).backward()
                sums.update({name: share * value for name, value in metrics.items()})
        with self.clock.span("step"):
            clip = self.config.grad_clip or float("inf")
            sums["grad_norm"] = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip))
            if not np.isfinite(sums["loss"] + sums["grad_norm"]):
                raise FloatingPointError(f"update {self.step}: loss {sums['loss']}, gradient norm {sums['grad_norm']}")
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        sums["mismatch"] = sums["mismatch"] / sums["fresh"] if sums["fresh"] else None
        if sums.pop("fresh"):
            self.alarm(sums["mismatch"], self.step)
        self.step += 1
        return dict(sums) | {"beta": beta, "lr": lr}

    def _prepare(self, groups: Batch) -> tuple[float, float]:
        """Beta and learning rate of this update; head and reference as they should be before it."""
        beta, lr = self.config.beta_at(self.step), self.config.lr_at(self.step)
        for group, rate in zip(self.optimizer.param_groups, (lr, self.config.lr_head), strict=False):
            group["lr"] = rate
        if self.head is not None and self.step == 0:  # log Z is far from 0 at small beta: start at the mean reward
            self.head.bias.data.fill_(float(np.mean([t.reward for group in groups for t in group])))
        if self.reference is not None and self.step % self.config.ref_reset_every == 0:
            self.reference.load_state_dict(self.model.state_dict())
        return beta, lr

    def _answers(self, groups: Batch, beta: float) -> Answers:
        """Log-probabilities of a batch's answers, and all else that a loss may look at."""
        for group in groups:
            if len({t.prompt_id for t in group}) != 1:
                raise ValueError(f"a group mixes the prompts {sorted({t.prompt_id for t in group})}")
        shape, flat = (len(groups), len(groups[0])), [t for group in groups for t in group]  # (P, K), [P*K]
        tokens = ([t.prompt for t in flat], [t.response for t in flat], self.pad)
        temperature, states_too = self.config.temperature, self.head is not None
        token_pi, lengths, states = answer_logprobs(self.model, *tokens, temperature, states_too)  # [P*K, T], [P*K]
        log_ref, reward = torch.tensor([[t.log_ref, t.reward] for t in flat], device=self.model.device).T  # [P*K] each
        if self.reference is not None:
            with torch.no_grad():
                log_ref = sequence_logprobs(*answer_logprobs(self.reference, *tokens, temperature)[:2])
        token_mu = padded([t.log_mu for t in flat], token_pi)  # [P*K, T]
        answers = Answers(
            log_pi=sequence_logprobs(token_pi, lengths).view(shape),
            log_mu=token_mu.sum(1).view(shape),
            log_ref=log_ref.view(shape),
            reward=reward.view(shape),
            token_pi=token_pi.view(*shape, -1),
            token_mu=token_mu.view(*shape, -1),
            lengths=lengths.view(shape),
            beta=beta,
        )
        if states is not None:
            answers.values = self.head(states).view(*shape, -1)  # [P, K, T] reward units
            answers.log_z = answers.values[:, :, 0].mean(1) / beta  # [P]; K times the same prompt
        return answers

    def _loss(self, a: Answers, groups: Batch) -> tuple[Tensor, dict[str, float]]:
        """The loss, scaled so that its gradient is in reward units at every beta, and metrics."""
        loss = OBJECTIVES[self.config.loss](a, self.config)
        # beta / 2 times TB's gradient is the policy gradient of reward - beta KL (baselines.py), as the others' are
        scale = a.beta / 2 if self.config.loss == "tb" else 1.0
        check_finite(loss, a, groups, self.step)
        with torch.no_grad():
            is_vargrad = self.config.loss == "tb" and a.log_z is None
            balance = loss if is_vargrad else tb_loss(a.log_pi, a.log_ref, a.reward, a.beta)
            fresh = torch.tensor([[t.policy_version == t.version_last == self.step for t in g] for g in groups])
            fresh = fresh.to(loss)  # [P, K] 1 where these very weights wrote the answer
            metrics = {
                "fresh": fresh.mean(),
                "mismatch": (fresh * per_token(a.log_pi, a.log_mu, a.lengths)).mean(),
                "loss": loss,
                "imbalance": a.beta**2 * balance,
                "kl_ref": (a.log_pi - a.log_ref).mean(),
                "log_ratio_mu": (a.log_pi - a.log_mu).abs().mean(),
            }
        return scale * loss, {name: float(value.detach()) for name, value in metrics.items()}

    def state_dict(self) -> dict:
        """All but the policy itself: optimizer, head, reference, the number of updates."""
        parts = {"head": self.head, "reference": self.reference}
        states = {name: part.state_dict() for name, part in parts.items() if part is not None}
        return {"step": self.step, "optimizer": self.optimizer.state_dict()} | states

    def load_state_dict(self, state: dict) -> None:
        self.step = state["step"]
        self.optimizer.load_state_dict(state["optimizer"])
        for name, part in (("head", self.head), ("reference", self.reference)):
            if part is not None:
                part.load_state_dict(state[name])


# --- the loop -------------------------------------------------------------------------------------------------------


@dataclass
class Trainer:
    """The training loop around a Learner."""

    child: Child  # the process: board, clock, messages to the parent
    config: Config
    out: Path
    learner: Learner
    evaluate: Evaluator
    policy: checkpoint.Policy  # as checkpoints have it
    batches: EagerBatches | BarrierBatches | OnPolicyBatches  # where batches come from
    publish: Callable[[list[tuple[str, Tensor]], int], None]  # called with (named weights, version) every k updates
    accuracies: list[tuple[int, float, float]] = field(default_factory=list)  # trainer update, seconds of RL, accuracy
    staleness_sum: float = 0.0  # over updates
    staleness_max: float = 0.0
    trained: int = 0  # trajectories
    seconds_before: float = 0.0  # of RL, before the run was resumed
    rl_start: float = 0.0

    def __post_init__(self) -> None:
        self.clock: Clock = self.child.clock
        self.file = JsonLines(self.out / "metrics.jsonl")
        self.events = EventLog(self.out / "events-trainer.jsonl" if self.config.event_log else None)

    def run(self) -> dict:
        """Train until --steps, --max-seconds or the parent's stop; returns the summary."""
        if not self.accuracies:
            self._evaluate()
        while self._goes_on():
            batch = self.batches.next(self.learner.step)
            if batch is None:
                break
            if not self.rl_start:
                self._start_clock()
            self._update(batch)
            due = self.config.checkpoint_every and self.learner.step % self.config.checkpoint_every == 0
            if due and (problem := self.checkpoint()[1]):  # that is no reason to end: the next one may succeed
                log.error("the checkpoint of update %d was not written: %s", self.learner.step, problem)
        facts = {"busy_trainer": self.clock.busy(), "waits_trainer": self.clock.waits()}
        if self.rl_start and self.accuracies[-1][0] != self.learner.step and not self.child.board.stopping:
            self._evaluate()
        facts |= {"late_prefetches": self.batches.late, "threads": torch.get_num_threads()}
        facts["mismatch"] = max([self.learner.alarm.largest or 0.0, *self.child.board.of_searchers("mismatch")]) or None
        facts["buffer"] = {} if self.config.sync == "onpolicy" else self.batches.buffer.stats()
        return training_summary(self._progress(), self.config, self.clock, self.child.board.stopping, **facts)

    def seconds(self) -> float:
        """Seconds of RL, those before a resume included."""
        return self.seconds_before + (time.time() - self.rl_start if self.rl_start else 0.0)

    def _start_clock(self) -> None:
        self.rl_start = time.time()
        self.clock.begin()
        self.child.board.set(Board.TRAINER, "rl_start", self.rl_start)

    def _goes_on(self) -> bool:
        limit = self.seconds_before + (self.config.max_seconds or float("inf"))  # a resumed run's limit begins anew
        return self.learner.step < self.config.steps and self.seconds() <= limit and not self.child.board.stopping

    def _update(self, batch: Batch) -> None:
        """Learn from a batch, publish when it is time to, write a line of metrics."""
        step = self.learner.step
        row = {"step": step, "seconds": self.seconds()} | batch_metrics(batch, step)
        self.events.write("train", step=step, uids=[[int(n) for n in t.uid] for group in batch for t in group])
        row |= self._learn(batch)
        if self.learner.step % self.config.sync_every == 0:
            self._publish(self.learner.step)
        self.trained += sum(map(len, batch))
        self.staleness_sum += row["staleness"]
        self.staleness_max = max(self.staleness_max, row["staleness_max"])
        if self.config.eval_every and self.learner.step % self.config.eval_every == 0:
            row["accuracy"] = self._evaluate()
        self._report(row)

    def _learn(self, batch: Batch) -> dict[str, float]:
        try:
            return self.learner.update(batch)
        except FloatingPointError as error:
            place = self.out / f"bad-batch-{self.learner.step}.npz"
            with bookkeeping(place.name):
                np.savez(place, *pack([t for group in batch for t in group]))
            raise FloatingPointError(f"{error}; the batch is kept in {place}") from error

    def _publish(self, version: int) -> None:
        with self.clock.span("publish"):
            self.publish(named_weights(self.learner.model), version)
        self.child.board.set(Board.TRAINER, "version", version)
        self.events.write("publish", version=version)

    def _report(self, row: dict) -> None:
        board = self.child.board
        generated, waited = self.batches.generated(), sum(self.clock.waits().values())
        row |= {"trained": self.trained, "generated": generated, "waited": waited, "seconds_after": self.seconds()}
        row |= {"busy_trainer": self.clock.busy(), "busy_searchers": board.of_searchers("busy")}
        row["backlog"] = backlog(self.config, generated, self.trained)
        board.set(Board.TRAINER, "busy", row["busy_trainer"])
        board.set(Board.TRAINER, "trained", self.trained)
        self.child.beat()
        self.file.write(row)
        self.child.tell("row", row)

    def _evaluate(self) -> float:
        with self.clock.span("evaluate"):
            accuracy = self.evaluate()
        self.accuracies.append((self.learner.step, self.seconds(), accuracy))
        self.child.tell("accuracy", {"accuracy": accuracy, "prompts": len(self.evaluate.prompts)})
        return accuracy

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def _progress(self) -> dict:
        kept = {name: getattr(self, name) for name in PROGRESS}
        now = {"step": self.learner.step, "seconds_before": self.seconds(), "source": self.batches.state_dict()}
        return kept | now

    def _state(self) -> checkpoint.State:
        buffer = None if self.config.sync == "onpolicy" else self.batches.buffer.packed_state()
        return self.learner.state_dict(), buffer, self._progress()

    def rehearse_checkpoint(self) -> None:
        """Try the first save before the first update; ConfigError when it fails."""
        with self.clock.span("checkpoint"):
            checkpoint.rehearse(self.out / "checkpoints", self.policy, self._state)

    def checkpoint(self) -> tuple[Path | None, str | None]:
        """Write a checkpoint of this moment (runtime/checkpoint.py): its folder, or else what went wrong."""
        with self.clock.span("checkpoint"):
            rest = (self.config.keep_checkpoints, self.policy, self._state)
            return checkpoint.save(self.out / "checkpoints", self.learner.step, *rest)

    def resume(self, folder: Path) -> None:
        """Go on from a checkpoint; the policy has been loaded from it already."""
        learner, progress = checkpoint.restore(folder)
        self.learner.load_state_dict(learner)
        for name in PROGRESS:
            setattr(self, name, progress[name])


# --- the process ----------------------------------------------------------------------------------------------------


def main(
    child: Child, config: Config, folder: str, out: Path, start: str | None, address: str, buffer_proxy: BaseProxy
) -> None:
    """Body of the trainer's process (runtime/child.py starts it).

    Args:
        folder: the start model, which is the reference too.
        start: checkpoint to go on from, or None.
        address: local socket at which searchers ask for the weight handle.
    """
    torch.manual_seed(config.seed)
    with child.clock.span("load"):
        task, trust = load_task(config.task), config.trust_remote_code
        model = load_policy(start or folder, child.device, trainable=True, trust_remote_code=trust)
        evaluate = Evaluator(model, folder, task, config)
    learner = Learner(model, config, evaluate.text.pad, child.clock)
    progress = read_json(Path(start) / "progress.json") if start else {}
    keep_rows_before(out / "metrics.jsonl", progress.get("step", 0))
    if config.sync == "onpolicy":
        from runtime.loading import load_parts
        from searcher import Searcher

        parts = load_parts(child, config, folder, 0, 0, model if config.engine == "hf" else None)
        generator = Searcher(parts, config, 0, 0, child.clock, child.beat, state=progress.get("source"))
        batches = OnPolicyBatches(generator, lambda: named_weights(model), config, child.board)
    else:
        batches = BATCHES[config.sync](RemoteBuffer(buffer_proxy), config, child, progress)
    policy = checkpoint.Policy(model, Path(folder))
    trainer = Trainer(child, config, out, learner, evaluate, policy, batches, lambda named_tensors, version: None)
    if start:
        trainer.resume(Path(start))
    publisher = None
    if config.sync != "onpolicy":
        publisher = make_publisher(config, model, learner.step)
        publisher.hand_out(address)
        trainer.publish = publisher.publish
    log.info("the trainer is ready after %.0f s", time.time() - child.started)
    trainer.rehearse_checkpoint()
    summary = trainer.run()
    child.tell("saving")
    place, problem = trainer.checkpoint()
    summary["checkpoint"] = place and str(place)
    if problem:
        summary["problem"] = f"the last checkpoint was not written: {problem}"
    child.tell("done", summary)
    if publisher and child.device != "cpu":  # a GPU's memory is freed when this process ends: readers go first
        publisher.wait_for_readers(1.5)  # the parent kills this process after 2 s
