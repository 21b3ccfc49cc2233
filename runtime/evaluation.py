"""Held-out accuracy: greedy answers to prompts that are not used in training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from runtime.engine import HfEngine, Sampling
from runtime.text import Text
from tasks import Task, is_right

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from config import Config

ROWS = 512  # answers that are generated at the same time


class Evaluator:
    """Greedy accuracy of a model on the prompts of --eval-split.

    Args:
        folder: the folder with the tokenizer.
    """

    def __init__(self, model: PreTrainedModel, folder: str, task: Task, config: Config) -> None:
        self.task, self.config = task, config
        self.text = Text.of(folder, config, task)
        self.tokenizer = self.text.tokenizer
        self.prompts = list(getattr(task, config.eval_split)[: config.eval_prompts])
        self._ids = self.text.check(model, self.prompts, config.max_new_tokens)
        sampling = Sampling(1.0, config.max_new_tokens, tuple(self.text.stop_ids), max(map(len, self._ids)), ROWS)
        self._engine = HfEngine(model, sampling, self.text.pad)

    def answers(self) -> list[str]:
        """The greedy answer to each prompt."""
        answers = [group[0].tokens for group in self._engine.generate(self._ids, 1, greedy=True)]
        return self.text.decode(answers)

    def __call__(self) -> float:
        """Share of the prompts that are answered right."""
        limit, pairs = self.config.reward_timeout, zip(self.prompts, self.answers(), strict=True)
        return float(np.mean([is_right(self.task, prompt, answer, limit) for prompt, answer in pairs]))
