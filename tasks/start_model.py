"""Start models: a small Llama with a character tokenizer, supervised learning, and the process that makes one.

A task with `make_start_model` gets one start model per seed. It is kept in the --cache folder.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from config import save
from runtime.files import ConfigError, bookkeeping, check_model_files
from runtime.identity import model_hash, task_file

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from config import Config
    from runtime.child import Child
    from runtime.supervisor import Supervisor

log = logging.getLogger("tba_min.tasks")
VOCABULARY = ["<pad>", "<eos>", *"0123456789+-*/=() ?"]
RECIPE = 5  # raise it when the recipe changes: it names the cached folder


def start_model_path(config: Config) -> Path:
    """Where a task's start model for this seed is kept."""
    task = config.task
    if file := task_file(task):  # files of one name may lie in many folders, and a name has at most 255 bytes
        task = f"{file.stem[:40]}-{hashlib.sha256(os.fsencode(task)).hexdigest()[:12]}"
    return (Path(config.cache) / f"{task}-seed{config.seed}-r{RECIPE}").resolve()


def obtain(config: Config, given: dict, children: Supervisor, go_on: Callable[[], bool]) -> str:
    """Folder of the start model. When it is missing, a separate process makes it, as long as `go_on()` is true.

    Args:
        given: what the run's config.json keeps of its command line; its place and hash come in, by which a resumed run
            knows it.

    Raises:
        ConfigError: when it is damaged, or not the one that a resumed run began with.
    """
    place, began = _kept(start_model_path(config), given), time.time()
    if not (place / "config.json").exists():
        log.info("making the start model of task %s for seed %d (about a minute, once) ...", config.task, config.seed)
        # one thread: a small model gains little from a second one, which costs minutes on a busy machine
        variables = {"OMP_NUM_THREADS": "1"}
        pid = children.run_to_end("start-model", "tasks.start_model", variables, (config,), go_on)
        for workshop in place.parent.glob(f".making-{pid}-*"):  # left by a maker that was killed
            shutil.rmtree(workshop, ignore_errors=True)
        if not go_on():
            return str(place)
        log.info("start model ready after %.0f s, kept in %s", time.time() - began, place)
    try:
        check_model_files(place)
    except ConfigError as error:
        raise ConfigError(f"{error}; remove {place}, then it is made again") from None
    if given.get("model") not in (None, model_hash(place)):
        raise ConfigError(f"{place} is not the start model that the run began with; name the --cache that has that one")
    given |= {"model": model_hash(place), "start_model": str(place)}
    with bookkeeping("config.json"):
        save(config, Path(config.out) / "config.json", given)
    return str(place)


def _kept(place: Path, given: dict) -> Path:
    """Where the start model of a resumed run lies: in this cache, or where it was; by its hash."""
    places = [place, Path(given.get("start_model", place))]
    there = [p for p in places if (p / "config.json").exists()]
    same = [p for p in there if model_hash(p) == given.get("model")]
    return [*same, *there, place][0]


def main(child: Child, config: Config) -> None:
    """Body of the process that makes a start model (runtime/child.py starts it).

    It is made in a folder beside and then renamed. So an interrupted run, or two runs at once, do no harm.
    """
    from tasks import load_task

    place = start_model_path(config)
    place.parent.mkdir(parents=True, exist_ok=True)
    workshop = Path(tempfile.mkdtemp(prefix=f".making-{os.getpid()}-", dir=place.parent))
    try:
        load_task(config.task).make_start_model(workshop, config.seed)
        os.rename(workshop, place)
    except OSError:
        if not (place / "config.json").exists():  # else another run was faster
            raise
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({c: i for i, c in enumerate(VOCABULARY)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="?", clean_up_tokenization_spaces=False
    )


def make_model(positions: int = 64) -> LlamaForCausalLM:
    """A Llama with 345k parameters, untied, with heads of width 32 (the smallest that vLLM supports on a CPU)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=positions,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=VOCABULARY.index("<eos>"),
            pad_token_id=VOCABULARY.index("<pad>"),
        )
    )


def supervise(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    lines: Callable[[], list[str]],
    prompt: int,
    steps: int,
    rate: Callable[[int], float],
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Supervised learning on fresh demonstrations.

    Args:
        lines: makes a batch of demonstrations, prompt and answer, all of one length.
        prompt: tokens of a prompt; the loss is on the answer and its end.
        rate: learning rate of a step.
        optimizer: None: a new AdamW.
    """
    import torch

    optimizer = optimizer or adamw(model)
    for step in range(steps):
        ids = torch.tensor(tokenizer(lines(), add_special_tokens=False)["input_ids"])  # [batch, length]
        ids = torch.cat([ids, torch.full((len(ids), 1), tokenizer.eos_token_id)], 1)
        logits = model(ids, use_cache=False).logits[:, prompt - 1 : -1]  # those that predict the answer and its end
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, prompt:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()


def adamw(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    """AdamW with a short memory of squared gradients, because carries are learned suddenly."""
    import torch

    return torch.optim.AdamW(model.parameters(), weight_decay=0.0, betas=(0.9, 0.98))
