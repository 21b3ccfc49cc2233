"""A task with longer answers, for the generation-bound comparison: twelve-digit addition, worked out digit by digit.

    3+4 8+5 ... 1+0 =  ->  =07 =13 ... =02

The pairs of digits come units first. For each pair the answer has the carry to the next pair and the digit of the sum:
48 tokens and an end. The start model has the architecture of the default task's Llama. It first learns to add. Then it
learns from demonstrations that forget every carry in 70 % of the answers. A third of the problems have no carry.

    python tba_min.py --task bench/digits.py:make_task --max-new-tokens 49 --max-seconds 60
"""

import random
from pathlib import Path

DIGITS = 12
CARRYING = 0.085  # share of the pairs that carry: (1 - .085)^12 = .34 of the problems have none
CARELESS = 0.7


class Digits:
    """The problems are always the same; they do not depend on the run's seed."""

    def __init__(self) -> None:
        rng = random.Random(20250318)
        small = [(a, b) for a in range(10) for b in range(10) if a + b <= 8]  # no carry, even with one more
        large = [(a, b) for a in range(10) for b in range(10) if a + b >= 10]
        problems = set()
        while len(problems) < 9000:
            pairs = [rng.choice(large if rng.random() < CARRYING else small) for _ in range(DIGITS)]
            problems.add("".join(f"{a}+{b} " for a, b in pairs))
        problems = sorted(problems)
        rng.shuffle(problems)
        self.heldout, self.validation, self.train = problems[:500], problems[500:1000], problems[1000:]

    @staticmethod
    def solve(prompt: str, careless: bool = False) -> str:
        """All steps: the right ones, or with every carry forgotten by the next pair."""
        steps, carry = [], 0
        for pair in prompt.split():
            total = int(pair[0]) + int(pair[2]) + carry
            steps.append(f"={total:02d} ")
            carry = 0 if careless else total // 10
        return "".join(steps)

    def reward(self, prompt: str, answer: str) -> float:
        """1 for the right number (the digits of the sum and the last carry), otherwise 0."""
        right = self.solve(prompt)
        same = len(answer) == len(right) and answer[2::4] == right[2::4] and answer[-3] == right[-3]
        return float(same)

    def _demonstrations(self, rng, careless: float) -> list[str]:
        prompts = [self.train[i] for i in rng.integers(len(self.train), size=32)]
        return [p + self.solve(p, rng.random() < careless) for p in prompts]

    def make_start_model(self, folder: Path, seed: int) -> None:
        """It takes about a minute on one core."""
        import numpy as np
        import torch

        from tasks.start_model import adamw, make_model, make_tokenizer, supervise

        torch.manual_seed(seed)
        rng, tokenizer, model = np.random.default_rng(seed), make_tokenizer(), make_model(2 * 4 * DIGITS + 4)
        optimizer = adamw(model)
        for steps, careless, peak in ((450, 0.0, 2e-3), (60, CARELESS, 5e-4)):
            rate = lambda step, n=steps, r=peak: r * min(1.0, (step + 1) / 30, (n - step) / (0.4 * n) + 0.1)  # noqa: E731
            lines = lambda share=careless: self._demonstrations(rng, share)  # noqa: E731
            supervise(model, tokenizer, lines, 4 * DIGITS, steps, rate, optimizer)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def make_task() -> Digits:
    return Digits()
