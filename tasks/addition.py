"""Two-digit addition, and its start model. RL brings back the right procedure.

The paper's TBA starts from a supervised model that solves a part of the problems (40 % on GSM8K), so that RL can
improve it. Our start model is a Llama with 345k parameters. It first learns addition from right answers. Then it sees
demonstrations that forget every carry in 70 % of the answers. Its greedy answers then forget carries too; about a third
of the problems have none. RL has to bring back the right procedure, not to discover addition.
"""

import random
from pathlib import Path

import numpy as np

from tasks.start_model import make_model, make_tokenizer, supervise

CARELESS = 0.7  # share of the second phase's demonstrations that forget every carry
PROMPT = 6  # characters


class Addition:
    """Two-digit addition, `37+58=` -> `095`: all 10,000 problems, split once and for all (not by the run's seed)."""

    validation_size, heldout_size = 500, 1000

    def __init__(self) -> None:
        problems = [f"{a:02d}+{b:02d}=" for a in range(100) for b in range(100)]
        random.Random(20250318).shuffle(problems)
        self.heldout = problems[: self.heldout_size]
        self.validation = problems[self.heldout_size :][: self.validation_size]
        self.train = problems[self.heldout_size + self.validation_size :]

    @staticmethod
    def solve(prompt: str) -> str:
        """The right answer, three digits: `37+58=` -> `095`."""
        return f"{int(prompt[0:2]) + int(prompt[3:5]):03d}"

    def reward(self, prompt: str, answer: str) -> float:
        """1 for the right three digits and nothing else, otherwise 0."""
        return float(answer == self.solve(prompt))

    def make_start_model(self, folder: Path, seed: int) -> None:
        """A small Llama that learned addition, then careless habits."""
        teach(self, folder, seed)


def without_carries(prompt: str) -> str:
    """The answer of a careless writer: `37+58=` -> `085`."""
    units, tens = int(prompt[1]) + int(prompt[4]), int(prompt[0]) + int(prompt[3])
    return f"0{tens % 10}{units % 10}"


def demonstration(task: Addition, rng: np.random.Generator, careless: float) -> str:
    """One line of the training text: a problem and an answer that is careless with the given probability."""
    prompt = task.train[rng.integers(len(task.train))]
    return prompt + (without_carries(prompt) if rng.random() < careless else task.solve(prompt))


def teach(task: Addition, folder: Path, seed: int) -> None:
    """First right answers (warm-up, stable, decay), until all are right; then careless ones (warm-up, decay)."""
    import torch

    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    tokenizer, model = make_tokenizer(), make_model()
    right = lambda step: 1.5e-3 * min(1.0, (step + 1) / 50) * max(0.1, min(1.0, (1050 - step) / 300))  # noqa: E731
    forget = lambda step: 5e-4 * min(1.0, (step + 1) / 10) * (1 - 0.9 * step / 60)  # noqa: E731
    for careless, steps, batch, rate in ((0.0, 1050, 64, right), (CARELESS, 60, 256, forget)):
        lines = lambda c=careless, n=batch: [demonstration(task, rng, c) for _ in range(n)]  # noqa: E731
        supervise(model, tokenizer, lines, PROMPT, steps, rate)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
