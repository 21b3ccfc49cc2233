"""The trainer: sample a batch, TB loss, optimizer step, publish the weights. It never waits for a searcher's answer.

`Learner` is one update on one batch, whatever the objective; `Trainer` is the loop around it. Where the batches come
from is sync.py's matter, and the only thing in which the three ways of `--sync` differ here.
"""

import copy
import json
import logging
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

import baselines
from buffer import RemoteBuffer, pack
from loss import sequence_logprobs, tb_loss, tb_residual, vargrad_log_z
from runtime import checkpoint, cuda_ipc
from runtime.engine import HfEngine, Sampling
from runtime.metrics import Board, Clock, EventLog, JsonLines, backlog, keep_rows_before
from runtime.policy import (
    check_prompts,
    checkpoint_layers,
    collate,
    distinct,
    load_policy,
    load_tokenizer,
    logprobs_and_states,
    named_weights,
    response_logprobs,
    stop_tokens,
)
from runtime.weights import Publisher, choose
from sync import Barrier, Batch, OnPolicy, Prefetch
from tasks import is_right, load_task

log = logging.getLogger("tba_min.trainer")
PROGRESS = ("trained", "staleness_sum", "staleness_max", "accuracies", "seconds_before")  # a Trainer's, in checkpoints


# --- learning -------------------------------------------------------------------------------------------------------


def micro_batches(groups: Batch, max_tokens: int) -> list[Batch]:
    """Split a batch into parts of whole groups, each at most `max_tokens` padded tokens (but at least one group)."""
    parts: list[Batch] = []
    prompt = answer = 0
    for group in groups:
        prompt_g, answer_g = max(len(t.prompt) for t in group), max(len(t.response) for t in group)
        wider = (max(prompt, prompt_g) + max(answer, answer_g)) * len(group)
        if parts and wider * (len(parts[-1]) + 1) <= max_tokens:
            parts[-1].append(group)
            prompt, answer = max(prompt, prompt_g), max(answer, answer_g)
        else:
            parts.append([group])
            prompt, answer = prompt_g, answer_g
    return parts


def group_tensors(groups: Batch, device) -> tuple[torch.Tensor, torch.Tensor]:
    """log_ref and reward of each trajectory, [P, K] fp32. Groups are checked to be of one prompt each."""
    for group in groups:
        if len({t.prompt_id for t in group}) != 1:
            raise ValueError(f"a group mixes the prompts {sorted({t.prompt_id for t in group})}")
    log_ref = torch.tensor([[t.log_ref for t in g] for g in groups], dtype=torch.float32, device=device)
    reward = torch.tensor([[t.reward for t in g] for g in groups], dtype=torch.float32, device=device)
    return log_ref, reward


class Learner:
    """Policy, optimizer and one update by the objective that the configuration names.

    Args:
        model: the policy, fp32 master weights.
        config: loss and its options, lr and its schedule, beta and its schedule, temperature, micro_batch_tokens.
        pad: token id for padding; any will do.
        clock: where the time goes.
    """

    def __init__(self, model, config, pad: int, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.model, self.config, self.pad, self.step = model, config, pad, 0
        self.head: torch.nn.Linear | None = None  # V(x), reward units: log Z(x) = V / beta, or the critic of vtrace
        if config.loss == "vtrace" or (config.loss == "tb" and config.log_z == "learned"):
            self.head = torch.nn.Linear(model.config.hidden_size, 1).to(model.device)
            torch.nn.init.zeros_(self.head.weight)
        # TBA' moves its reference, so that the log pi_ref which searchers stored is stale
        self.reference = copy.deepcopy(model).requires_grad_(False) if config.loss == "tba_prime" else None
        if config.gradient_checkpointing:
            checkpoint_layers(model)
        fused = model.device.type == "cuda"
        groups = [{"params": list(model.parameters()), "weight_decay": config.weight_decay}]
        if self.head is not None:
            groups.append({"params": list(self.head.parameters()), "weight_decay": 0.0})
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, fused=fused)

    def update(self, groups: Batch) -> dict[str, float]:
        """One optimizer step on P groups of K; returns metrics of the whole update (README defines each).

        Raises:
            FloatingPointError: when the loss is not finite (the text names step, prompt and values), or the gradient.
        """
        beta, lr = self.config.beta_at(self.step), self.config.lr_at(self.step)
        for group, rate in zip(self.optimizer.param_groups, (lr, self.config.lr_head), strict=False):
            group["lr"] = rate
        self._before_update(groups)
        sums: dict[str, float] = {}
        with self.clock.span("forward, backward"):
            for part in micro_batches(groups, self.config.micro_batch_tokens):
                share = len(part) / len(groups)
                loss, metrics = self._loss(part, beta)
                (share * loss).backward()
                for name, value in metrics.items():
                    sums[name] = sums.get(name, 0.0) + share * value
        with self.clock.span("step"):
            clip = self.config.grad_clip or float("inf")
            sums["grad_norm"] = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip))
            if not np.isfinite(sums["loss"] + sums["grad_norm"]):
                raise FloatingPointError(f"update {self.step}: loss {sums['loss']}, gradient norm {sums['grad_norm']}")
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return sums | {"beta": beta, "lr": lr}

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

    def _before_update(self, groups: Batch) -> None:
        if self.head is not None and self.step == 0:  # log Z is far from 0 at small beta: start at the mean reward
            self.head.bias.data.fill_(float(np.mean([t.reward for group in groups for t in group])))
        if self.reference is not None and self.step % self.config.ref_reset_every == 0:
            self.reference.load_state_dict(self.model.state_dict())

    def _loss(self, groups: Batch, beta: float) -> tuple[torch.Tensor, dict[str, float]]:
        """What is minimised, scaled to one size of gradient at every beta, and metrics."""
        device, shape = self.model.device, (len(groups), len(groups[0]))  # P, K
        flat = [t for group in groups for t in group]
        first, kind = distinct([t.prompt for t in flat], [t.response for t in flat])
        tokens = collate([flat[i].prompt for i in first], [flat[i].response for i in first], self.pad, device)
        temperature, need_states = self.config.temperature, self.head is not None
        token_logp, states = logprobs_and_states(self.model, tokens, temperature, need_states)  # [D, T], [D, T, H]
        token_logp, lengths = token_logp[kind], tokens.lengths[kind]  # [P*K, T], [P*K]
        log_pi = sequence_logprobs(token_logp, lengths).view(shape)  # [P, K]
        log_ref, reward = group_tensors(groups, device)
        if self.reference is not None:
            with torch.no_grad():
                ref = response_logprobs(self.reference, tokens, temperature)
                log_ref = sequence_logprobs(ref, tokens.lengths)[kind].view(shape)
        token_mu = pad_sequence([torch.as_tensor(t.log_mu) for t in flat], batch_first=True).to(device)  # [P*K, <=T]
        log_mu = token_mu.sum(1).view(shape)  # padding is 0
        values = self.head(states).squeeze(-1)[kind].view(*shape, -1) if need_states else None  # [P, K, T] reward units
        if self.config.loss == "tb":
            log_z = None if values is None else values[:, :, 0].mean(1) / beta  # [P]; K times the same prompt
            loss = tb_loss(log_pi, log_ref, reward, beta, log_z)
            scaled = beta**2 * loss  # in reward units squared: clipping its gradient means the same at every beta
        else:
            token_logp, token_mu = token_logp.view(*shape, -1), _widen(token_mu, token_logp).view(*shape, -1)
            lengths = lengths.view(shape)
            loss = self._baseline(log_pi, log_mu, log_ref, reward, beta, token_logp, token_mu, values, lengths)
            scaled = 2 * beta * loss  # where one of these is TB, its gradient is then that of beta^2 * tb_loss
        self._check_finite(loss, groups, log_pi, log_ref, reward)
        with torch.no_grad():
            residual = tb_residual(log_pi, log_ref, reward, vargrad_log_z(log_pi, log_ref, reward, beta), beta)
            metrics = {
                "loss": loss,
                "imbalance": beta**2 * residual.square().mean(),
                "kl_ref": (log_pi - log_ref).mean(),
                "log_ratio_mu": (log_pi - log_mu).abs().mean(),
            }
        return scaled, {name: float(value.detach()) for name, value in metrics.items()}

    def _baseline(
        self, log_pi, log_mu, log_ref, reward, beta: float, token_logp, token_mu, values, lengths
    ) -> torch.Tensor:
        """The losses that TB is compared with (baselines.py). [P, K], token_*: [P, K, T]."""
        name, config = self.config.loss, self.config
        if name == "rloo":
            return baselines.rloo_loss(log_pi, reward)
        if name == "frozen_kl":
            return baselines.frozen_kl_loss(log_pi, log_mu, log_ref, reward, beta)
        if name == "tba_prime":
            return baselines.tba_prime_loss(log_pi, log_mu, log_ref, reward, beta)
        if name == "grpo":
            return baselines.grpo_loss(token_logp, token_mu, reward, lengths, dr=config.dr_grpo)
        if name == "vtrace":
            return baselines.vtrace_loss(token_logp, token_mu, values, reward, lengths)
        raise ValueError(f"no loss {name!r}")

    def _check_finite(self, loss: torch.Tensor, groups: Batch, *per_answer: torch.Tensor) -> None:
        if torch.isfinite(loss):
            return
        size = torch.stack([x.detach().abs().nan_to_num(torch.inf) for x in per_answer]).amax((0, 2))  # [P]
        p = int(size.argmax())  # the first that is not finite, otherwise the largest
        log_pi, log_ref, reward = ([round(v, 3) for v in x[p].tolist()] for x in per_answer)
        raise FloatingPointError(
            f"update {self.step}: the loss is {float(loss.detach())}; prompt {groups[p][0].prompt_id} has "
            f"log_pi {log_pi}, log_ref {log_ref}, reward {reward}"
        )


def _widen(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Pad [N, <=T] with zeros to [N, T]."""
    return torch.nn.functional.pad(x, (0, like.shape[1] - x.shape[1]))


def batch_metrics(groups: Batch, step: int) -> dict:
    """Metrics of what was drawn: reward, answer length, staleness in trainer updates, distinct answers."""
    flat = [t for group in groups for t in group]
    staleness = [step - t.policy_version for t in flat]
    distinct = sum(len({t.response.tobytes() for t in group}) for group in groups)
    return {
        "reward": float(np.mean([t.reward for t in flat])),
        "tokens": float(np.mean([len(t.response) for t in flat])),
        "truncated": float(np.mean([t.finish_reason == "length" for t in flat])),
        "staleness": float(np.mean(staleness)),
        "staleness_max": float(max(staleness)),
        "ages": dict(sorted(Counter(staleness).items())),
        "distinct": distinct / len(flat),
    }


class Evaluator:
    """Greedy accuracy on prompts that are never trained on."""

    def __init__(self, model, folder: str, task, config) -> None:
        self.task, self.config = task, config
        self.tokenizer = load_tokenizer(folder, config.trust_remote_code)
        self.prompts = getattr(task, config.eval_split)[: config.eval_prompts]
        ids = self.tokenizer(list(self.prompts), add_special_tokens=False)["input_ids"]
        check_prompts(self.prompts, [len(i) for i in ids], model, config.max_new_tokens)
        self._ids = [np.array(i, np.int32) for i in ids]
        stop = stop_tokens(folder, self.tokenizer)
        sampling = Sampling(1.0, config.max_new_tokens, tuple(stop), max(map(len, ids)), 512)
        pad = self.tokenizer.pad_token_id
        self.engine = HfEngine(model, sampling, stop[0] if pad is None else pad)

    def __call__(self) -> float:
        """Share of prompts that are answered right."""
        answers = [a[0].tokens for a in self.engine.generate(self._ids, 1, greedy=True)]
        texts = self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        limit = self.config.reward_timeout
        return float(np.mean([is_right(self.task, p, t, limit) for p, t in zip(self.prompts, texts, strict=True)]))


# --- the process ----------------------------------------------------------------------------------------------------


class Trainer:
    """The training loop around a Learner.

    Args:
        child: the process's surroundings (board, clock, messages to the parent).
        source: Prefetch, Barrier or OnPolicy.
        publish: called with (named weights, version) every k updates.
    """

    def __init__(self, child, config, out: Path, learner: Learner, evaluate: Evaluator, source, publish) -> None:
        self.child, self.config, self.out = child, config, out
        self.learner, self.evaluate, self.source, self.publish = learner, evaluate, source, publish
        self.clock: Clock = child.clock
        self.file = JsonLines(out / "metrics.jsonl")
        self.accuracies: list[tuple[int, float, float]] = []  # trainer update, seconds of RL, accuracy
        self.staleness_sum = self.staleness_max = 0.0  # over updates
        self.trained = 0
        self.seconds_before = 0.0  # of RL, before the run was resumed
        self.rl_start = 0.0
        self.events = EventLog(out / "events-trainer.jsonl" if config.event_log else None)

    def run(self) -> dict:
        """Train to the end of the steps, the time or the patience of the parent; returns the summary."""
        if not self.accuracies:
            self._evaluate()
        while self.learner.step < self.config.steps and not self.child.board.stopping and not self._time_is_up():
            batch = self.source.next(self.learner.step)
            if batch is None:
                break
            if not self.rl_start:
                self._start_clock()
            self._update(batch)
            if self.config.checkpoint_every and self.learner.step % self.config.checkpoint_every == 0:
                self._checkpoint_if_possible()
        seconds, busy, waits = self._seconds(), self.clock.busy(), self.clock.waits()
        if self.rl_start and self.accuracies[-1][0] != self.learner.step and not self.child.board.stopping:
            self._evaluate()
            seconds = self._seconds()
        return self._summary(seconds) | {"busy_trainer": busy, "waits_trainer": waits}

    def _seconds(self) -> float:
        """Seconds of RL, those before a resume included."""
        return self.seconds_before + (time.time() - self.rl_start if self.rl_start else 0.0)

    def _start_clock(self) -> None:
        self.rl_start = time.time()
        self.clock.begin()
        self.child.board.set(Board.TRAINER, "rl_start", self.rl_start)

    def _time_is_up(self) -> bool:
        limit = self.config.max_seconds
        return bool(limit and self._seconds() > limit)

    def _update(self, batch: Batch) -> None:
        step, config = self.learner.step, self.config
        row = {"step": step, "seconds": self._seconds()} | batch_metrics(batch, step)
        self.events.write("train", step=step, uids=[[int(n) for n in t.uid] for group in batch for t in group])
        try:
            row |= self.learner.update(batch)
        except FloatingPointError as error:
            place = self.out / f"bad-batch-{step}.npz"
            np.savez(place, *pack([t for group in batch for t in group]))
            raise FloatingPointError(f"{error}; the batch is kept in {place}") from error
        version = self.learner.step
        if version % config.sync_every == 0:
            with self.clock.span("publish"):
                self.publish(named_weights(self.learner.model), version)
            self.child.board.set(Board.TRAINER, "version", version)
            self.events.write("publish", version=version)
        self.trained += sum(map(len, batch))
        self.staleness_sum += row["staleness"]
        self.staleness_max = max(self.staleness_max, row["staleness_max"])
        if config.eval_every and version % config.eval_every == 0:
            row["accuracy"] = self._evaluate()
        board = self.child.board
        row["trained"], row["generated"] = self.trained, self.source.generated()
        row["backlog"] = backlog(config, row["generated"], row["trained"])
        row["busy_trainer"], row["busy_searchers"] = self.clock.busy(), board.of_searchers("busy")
        row["waited"] = sum(self.clock.waits().values())
        row["seconds_after"] = self._seconds()
        board.set(Board.TRAINER, "busy", row["busy_trainer"])
        board.set(Board.TRAINER, "trained", self.trained)
        self.child.beat()
        self.file.write(row)
        self.child.tell("row", row)

    def _evaluate(self) -> float:
        with self.clock.span("evaluate"), self.child.long_job():
            accuracy = self.evaluate()
        self.accuracies.append((self.learner.step, self._seconds(), accuracy))
        self.child.tell("accuracy", {"accuracy": accuracy, "prompts": len(self.evaluate.prompts)})
        return accuracy

    def _ended_by(self) -> str:
        if self.learner.step >= self.config.steps:
            return "--steps"
        return "a stop from outside" if self.child.board.stopping else "--max-seconds"

    # --- checkpoints ------------------------------------------------------------------------------------------

    def checkpoint(self) -> Path:
        """Write a checkpoint of this moment (checkpoint.py); OSError when it can't be written."""
        with self.clock.span("checkpoint"), self.child.long_job():
            keep, root = self.config.keep_checkpoints, self.out / "checkpoints"
            return checkpoint.write(root, self.learner.step, self._fill, keep)

    def _checkpoint_if_possible(self) -> None:
        try:
            self.checkpoint()
        except OSError as error:  # the disk is full, say: that is no reason to end, the next one may succeed
            log.error("the checkpoint of update %d was not written: %s", self.learner.step, error)

    def _fill(self, folder: Path) -> None:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        state = {"learner": self.learner.state_dict(), "rng": torch.get_rng_state(), "rng_cuda": cuda}
        checkpoint.save_tensors(folder, self.learner.model, self.evaluate.tokenizer, state)
        if self.config.sync != "onpolicy":
            checkpoint.save_buffer(folder, self.source.buffer.state_dict())
        progress = {name: getattr(self, name) for name in PROGRESS}
        progress |= {"step": self.learner.step, "seconds_before": self._seconds(), "source": self.source.state_dict()}
        (folder / "progress.json").write_text(json.dumps(progress, indent=2) + "\n")

    def resume(self, folder: Path) -> None:
        """Go on from a checkpoint; the policy has been loaded from it already."""
        state = torch.load(folder / "trainer.pt", weights_only=True, map_location="cpu")
        self.learner.load_state_dict(state["learner"])
        for name, value in checkpoint.read_json(folder / "progress.json").items():
            if name in PROGRESS:
                setattr(self, name, value)
        torch.set_rng_state(state["rng"])
        if state["rng_cuda"]:
            torch.cuda.set_rng_state_all(state["rng_cuda"])

    # --- the end ------------------------------------------------------------------------------------------

    def _summary(self, seconds: float) -> dict:
        before = self.accuracies[0][2]
        last = [a for _, _, a in self.accuracies[1:]][-3:]
        counts = self.source.state_dict()
        return {
            "steps": self.learner.step,
            "ended_by": self._ended_by(),
            "accuracy_before": before,
            "accuracy_after": float(np.mean(last)) if last else before,  # mean of the last three evaluations
            "evaluations": self.accuracies,
            "seconds_rl": seconds,
            "seconds_evaluating": self.clock.seconds.get("evaluate", 0.0),
            "trajectories_generated": self.source.generated(),
            "trajectories_trained": self.trained,
            **{name: int(np.sum(counts[name])) for name in ("truncated", "undecodable", "bad_rewards")},
            "staleness_mean": self.staleness_sum / max(1, self.learner.step),
            "staleness_max": self.staleness_max,
            "late_prefetches": self.source.late,
            "threads": torch.get_num_threads(),
            "seconds_trainer": dict(self.clock.seconds),
        }


def main(child, config, folder: str, out: Path, start: str | None, address: str, buffer_proxy) -> None:
    """Body of the trainer's process (child.py starts it).

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
    learner = Learner(model, config, evaluate.tokenizer.pad_token_id or 0, child.clock)
    progress = checkpoint.read_json(Path(start) / "progress.json") if start else {}
    keep_rows_before(out / "metrics.jsonl", progress.get("step", 0))
    source = make_source(child, config, folder, model, buffer_proxy, progress)
    trainer = Trainer(child, config, out, learner, evaluate, source, _publish_to_nobody)
    if start:
        trainer.resume(Path(start))
    publisher = None
    if config.sync != "onpolicy":
        publisher = make_publisher(config, model, learner.step)
        publisher.hand_out(address)
        trainer.publish = publisher.publish
    log.info("the trainer is ready after %.0f s", time.time() - child.started)
    summary = trainer.run()
    child.tell("saving")
    try:
        summary["checkpoint"] = str(trainer.checkpoint())
    except (OSError, EOFError) as error:  # EOFError: the Manager is gone
        summary["checkpoint"], summary["problem"] = None, f"the last checkpoint was not written: {error}"
    child.tell("done", summary)
    if publisher and child.device != "cpu":  # memory of a GPU goes with its owner, under the hands of its readers
        publisher.wait_for_readers(1.5)  # the parent's patience ends after 2 s


def make_publisher(config, model, version: int) -> Publisher:
    """Publish the weights for the first time, in the kind of memory that --weights and the machine allow."""
    on_gpu = model.device.type == "cuda"
    problem = cuda_ipc.problem(model.device) if on_gpu and config.weights != "shared-memory" else None
    kind = choose(config.weights, on_gpu, problem)
    if problem:
        log.warning("weights go through shared memory: %s", problem)
    dtype = torch.bfloat16 if on_gpu and config.engine == "vllm" else None  # what the searchers' engine computes in
    return Publisher(named_weights(model), version, kind, dtype)


def make_source(child, config, folder: str, model, buffer_proxy, progress: dict) -> Barrier | OnPolicy | Prefetch:
    """Where batches come from; `progress` is that of the checkpoint to go on from, or empty."""
    if config.sync == "barrier":
        return Barrier(RemoteBuffer(buffer_proxy), config, child)
    if config.sync == "eager":
        return Prefetch(RemoteBuffer(buffer_proxy), config, child, progress.get("step", 0), progress.get("trained", 0))
    import searcher

    policy, saved = model if config.engine == "hf" else None, progress.get("source")
    generator = searcher.build(child, config, folder, 0, 0, policy, begun=saved["begun"] if saved else 0)
    if saved:
        generator.load_state_dict(saved)
    return OnPolicy(generator, model, config, child)


def _publish_to_nobody(named_tensors, version: int) -> None:
    """onpolicy: the one process that generates takes the weights itself."""
