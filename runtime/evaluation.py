"""Held-out accuracy: greedy answers to prompts that are not used in training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from runtime.engine import HfEngine, Sampling
from runtime.policy import check_prompts, load_tokenizer, stop_tokens
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
        self.tokenizer = load_tokenizer(folder, config.trust_remote_code)
        self.prompts = list(getattr(task, config.eval_split)[: config.eval_prompts])
        ids = self.tokenizer(self.prompts, add_special_tokens=False)["input_ids"]
        check_prompts(self.prompts, [len(i) for i in ids], model, config.max_new_tokens)
        self._ids = [np.array(i, np.int32) for i in ids]
        stop = stop_tokens(folder, self.tokenizer)
        sampling = Sampling(1.0, config.max_new_tokens, tuple(stop), max(map(len, ids)), ROWS)
        pad = self.tokenizer.pad_token_id
        self._engine = HfEngine(model, sampling, stop[0] if pad is None else pad)

    def answers(self) -> list[str]:
        """The greedy answer to each prompt."""
        answers = [group[0].tokens for group in self._engine.generate(self._ids, 1, greedy=True)]
        return self.tokenizer.batch_decode(answers, skip_special_tokens=True)

    def __call__(self) -> float:
        """Share of the prompts that are answered right."""
        limit, pairs = self.config.reward_timeout, zip(self.prompts, self.answers(), strict=True)
        return float(np.mean([is_right(self.task, prompt, answer, limit) for prompt, answer in pairs]))
