"""Prompts to token ids, answers to text: one way for searchers, evaluation and checks.

A prompt gets the special tokens that the model's tokenizer itself puts in front of a text (--bos). What it would put
behind, an end-of-sequence token for example, is left out: the answer goes on from the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from runtime.files import ConfigError
from runtime.policy import check_prompts, load_tokenizer, stop_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from config import Config
    from tasks import Task


class Text:
    """A model's tokenizer, and its special tokens as we use them.

    Args:
        stop_ids: tokens that end an answer, one at least.
        front: tokens before a prompt.
        keep: special tokens that a grader sees: False, True or their texts (tasks/__init__.py).
        folder: the model's, for messages.

    Raises:
        ConfigError: when `keep` names no token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: list[int],
        front: Sequence[int] = (),
        keep: bool | Sequence[str] = False,
        folder: str = "",
    ) -> None:
        self.tokenizer, self.stop_ids, self.front, self._folder = tokenizer, stop_ids, list(front), folder
        pad = tokenizer.pad_token_id
        self.pad = stop_ids[0] if pad is None or pad < 0 else pad  # any token will do
        self._hidden = self._hidden_from(keep)

    @classmethod
    def of(cls, folder: str, config: Config, task: Task) -> Text:
        """The text of a model's folder.

        Raises:
            ConfigError: also when no token ends an answer, or --bos asks for a token that there is not.
        """
        tokenizer = load_tokenizer(folder, config.trust_remote_code)
        before = front(tokenizer, config.bos, folder)
        keep = getattr(task, "keep_special_tokens", False)
        return cls(tokenizer, stop_tokens(folder, tokenizer), before, keep, folder)

    def encode(self, prompts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each prompt, [L] int32. One that begins with the text of a token in front gets no second."""
        return [np.array(self._begun(ids), np.int32) for ids in self._plain(prompts)]

    def _plain(self, prompts: Sequence[str]) -> list[list[int]]:
        return self.tokenizer(list(prompts), add_special_tokens=False)["input_ids"] if prompts else []

    def _begun(self, ids: list[int]) -> list[int]:
        for n in range(len(self.front), 0, -1):
            if ids[:n] == self.front[-n:]:
                return self.front[:-n] + ids
        return self.front + ids

    def decode(self, answers: Sequence[np.ndarray]) -> list[str]:
        """The text that a grader sees of each answer."""
        if self._hidden is None:
            return self.tokenizer.batch_decode(list(answers), skip_special_tokens=True)
        kept = [[i for i in ids.tolist() if i not in self._hidden] for ids in answers]
        return self.tokenizer.batch_decode(kept, skip_special_tokens=False)

    def _hidden_from(self, keep: bool | Sequence[str]) -> set[int] | None:
        """Ids that a grader does not see; None: the tokenizer's special tokens."""
        if keep is True:  # all but those that frame a text
            own = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id, self.tokenizer.pad_token_id)
            return {*self.stop_ids, *self.front, self.pad, *(i for i in own if i is not None)}
        if not keep:
            return None
        known = self.tokenizer.get_vocab()
        if isinstance(keep, str) or (unknown := [token for token in keep if token not in known]):
            what = f"{keep!r}, no list" if isinstance(keep, str) else f"has {unknown[0]!r}, which is no token here"
            raise ConfigError(f"--task: keep_special_tokens is {what}; give True, or tokens of the model's tokenizer")
        return {*self.tokenizer.all_special_ids, *self.stop_ids, self.pad} - {known[token] for token in keep}

    def check(self, model: PreTrainedModel, prompts: Sequence[str], max_new_tokens: int) -> list[np.ndarray]:
        """Token ids of the prompts, and of the special tokens, are the model's; no prompt is empty or too long.

        Returns `encode(prompts)`.

        Raises:
            ConfigError: one line that names the prompt or token, and the model's limit.
        """
        rows = model.get_input_embeddings().weight.shape[0]
        special = {"its end-of-sequence token": max(self.stop_ids), "its padding token": self.pad}
        if self.front:
            special["the token before a prompt"] = max(self.front)
        for name, token in special.items():
            if token >= rows:
                raise ConfigError(
                    f"--model {self._folder}: {name} has id {token}, and the model knows {rows:,} tokens "
                    f"(0 to {rows - 1}); correct the folder's *.json files, or resize the model's embedding"
                )
        encoded = self.encode(prompts)
        check_prompts(prompts, list(map(len, encoded)), model, max_new_tokens)
        for prompt, ids in zip(prompts, encoded, strict=True):
            if ids.max() >= rows:
                token = self.tokenizer.convert_ids_to_tokens(int(ids.max()))
                raise ConfigError(
                    f"--task: the prompt {prompt[:37]!r} has the token {token!r} with id {ids.max()}, and the model "
                    f"knows {rows:,} tokens (0 to {rows - 1}); leave it out, or resize the model's embedding"
                )
        return encoded


def front(tokenizer: PreTrainedTokenizerBase, wanted: str, folder: str) -> list[int]:
    """Ids of the special tokens that stand before a prompt: none, or mostly one, beginning-of-sequence (BOS).

    Args:
        wanted: --bos: `auto` asks the tokenizer itself, by its treatment of a text.

    Raises:
        ConfigError: when --bos always finds no such token.
    """
    if wanted == "never":
        return []
    found = _put_in_front(tokenizer)
    if wanted == "auto" or tokenizer.bos_token_id in found:
        return found
    if tokenizer.bos_token_id is None:
        raise ConfigError(f"--bos always: the tokenizer of {folder} has no bos_token; use auto or never")
    return [tokenizer.bos_token_id, *found]


def _put_in_front(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    for text in ("a", "0", "."):
        plain, full = (tokenizer(text, add_special_tokens=special)["input_ids"] for special in (False, True))
        for start in range(len(full) - len(plain) + 1):
            if plain and full[start : start + len(plain)] == plain:
                return full[:start]
    return []
