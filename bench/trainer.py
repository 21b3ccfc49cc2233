"""The cost of a training step over the bare forward and backward of the same tokens.

    python -m bench.trainer          1 minute

The step is all that the trainer does with a batch that it holds: metrics of the batch, padding, loss, checks, clipping,
optimizer, publication. Bare is forward, cross-entropy and backward on tensors that are already padded. Both take turns
on one thread. A figure is the median of the repeats' ratios. All answers differ, except in the last row, where they
repeat as on the default task: the trainer then computes each of them once, and bare computes all.

Writes bench/results/trainer.json.
"""

import os
import time

import numpy as np

from bench.common import arguments, median, save, say, table  # noqa: I001
from buffer import Trajectory
from config import Config

CASES = {  # prompts P, answers K, prompt tokens, answer tokens, distinct answers of a group
    "16 x 16 answers of 4 tokens": (16, 16, 6, 4, 16),
    "8 x 16 answers of 49 tokens": (8, 16, 48, 49, 16),
    "16 x 16 answers of 4 tokens, 3 of 16 differ": (16, 16, 6, 4, 3),
}


def batch(shape: tuple, rng: np.random.Generator) -> list[list[Trajectory]]:
    """P groups of K random answers."""
    p, k, prompt_tokens, answer_tokens, different = shape
    groups = []
    for i in range(p):
        prompt = rng.integers(2, 12, prompt_tokens, dtype=np.int32)
        answers = [rng.integers(2, 12, answer_tokens, dtype=np.int32) for _ in range(different)]
        for j, answer in enumerate(answers):
            answer[:2] = divmod(j, 10)  # so that all of them differ
        group = []
        for j in range(k):
            log_mu = rng.random(answer_tokens, dtype=np.float32)
            what = (prompt, answers[j % different].copy(), "stop", float(j % 2), -float(answer_tokens))
            group.append(Trajectory((0, 0, i * k + j), i, *what, log_mu, 0, 0, 0))
        groups.append(group)
    return groups


def measure(shape: tuple, pairs: int, seed: int) -> dict:
    """Median seconds of the step and of the bare passes, in turns."""
    import torch

    from runtime.policy import collate, named_weights
    from runtime.weights import SharedWeights
    from tasks.start_model import make_model
    from trainer import Learner, batch_metrics

    torch.manual_seed(seed)
    groups = batch(shape, np.random.default_rng(seed))
    flat = [t for group in groups for t in group]
    model, other = make_model(128).eval(), make_model(128).eval()
    learner = Learner(model, Config(lr=1e-9, prompts_per_batch=shape[0], decay_steps=0, beta_final=0.1), 0)
    weights = SharedWeights.like(named_weights(model))
    parts = [collate([t.prompt for t in part], [t.response for t in part], 0) for part in halves(flat, shape)]

    def step() -> None:
        batch_metrics(groups, learner.step)
        learner.update(groups)
        weights.publish(named_weights(model), learner.step)

    def bare() -> None:
        for tokens in parts:
            answers = tokens.ids[:, tokens.start :]
            logits = other(tokens.ids, use_cache=False, logits_to_keep=answers.shape[1] + 1).logits[:, :-1]
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten()).backward()
        other.zero_grad(set_to_none=True)

    times: dict[str, list[float]] = {"step": [], "bare": []}
    for _ in range(pairs + 2):
        for name, work in (("step", step), ("bare", bare)):
            start = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - start)
    step_s, bare_s = (median(times[name][2:]) for name in ("step", "bare"))
    return {"step_ms": round(1e3 * step_s, 2), "bare_ms": round(1e3 * bare_s, 2), "ratio": round(step_s / bare_s, 4)}


def halves(flat: list, shape: tuple) -> list[list]:
    """The answers in the micro-batches that the trainer's limit of tokens asks for."""
    size = max(1, Config.micro_batch_tokens // (shape[1] * (shape[2] + shape[3]))) * shape[1]
    return [flat[i : i + size] for i in range(0, len(flat), size)]


def figures(rows: list[dict]) -> dict[str, dict[str, float]]:
    """Medians over the repeats."""
    cases = dict.fromkeys(r["case"] for r in rows)
    return {"step_over_bare": {c: round(median(r["ratio"] for r in rows if r["case"] == c), 3) for c in cases}}


def text(rows: list[dict]) -> str:
    """Markdown."""
    lines = []
    for case, ratio in figures(rows)["step_over_bare"].items():
        mine = [r for r in rows if r["case"] == case]
        ms = [f"{median(r[name] for r in mine):.1f}" for name in ("step_ms", "bare_ms")]
        lines.append([case, *ms, f"{ratio:.2f}"])
    return table(["batch", "step, ms", "bare, ms", "ratio"], lines)


def main() -> None:
    args = arguments(__doc__, repeats=5)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    began, rows = time.time(), []
    for case, shape in CASES.items():
        for repeat in range(1 if args.quick else args.repeats):
            rows.append({"case": case, "repeat": repeat} | measure(shape, 3 if args.quick else 11, repeat))
        say(began, case)
    print(text(rows))
    if not args.quick:
        save("trainer", figures(rows), {"threads": 1, "pairs": 11}, rows, began, ("torch", "transformers"))


if __name__ == "__main__":
    main()
