"""Loads the parts that a searcher works with, by the configuration: engine, reference, task, tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from runtime.engine import Engine, HfEngine, Sampling, VllmEngine, import_vllm
from runtime.policy import check_prompts, load_policy, load_tokenizer, stop_tokens
from tasks import Task, load_task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from config import Config
    from runtime.child import Child


class Parts(NamedTuple):
    """The parts that a searcher works with."""

    engine: Engine  # generates; its weights have version 0
    reference: PreTrainedModel  # frozen, pi_ref
    task: Task
    tokenizer: PreTrainedTokenizerBase


def load_parts(
    child: Child, config: Config, folder: str, index: int, incarnation: int, policy: PreTrainedModel | None = None
) -> Parts:
    """Load the parts of searcher `index`, and seed its sampling.

    Args:
        folder: the start model, which is the reference too.
        policy: the model of the `hf` engine; None: the engine loads its own copy.
    """
    if config.engine == "vllm":
        with child.clock.span("import"):
            import_vllm(child.device)
    with child.clock.span("load"):
        task, tokenizer = load_task(config.task), load_tokenizer(folder, config.trust_remote_code)
        reference = load_policy(folder, child.device, trust_remote_code=config.trust_remote_code)
        lengths = [len(ids) for ids in tokenizer(task.train, add_special_tokens=False)["input_ids"]]
        check_prompts(task.train, lengths, reference, config.max_new_tokens)
        stop_ids = stop_tokens(folder, tokenizer)
        engine = make_engine(config, folder, tokenizer, stop_ids, max(lengths), child.device, policy)
        # after vLLM's start, which sets all seeds
        torch.manual_seed(int(np.random.SeedSequence([config.seed, index, incarnation]).generate_state(1)[0]))
    return Parts(engine, reference, task, tokenizer)


def make_engine(
    config: Config,
    folder: str,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: list[int],
    longest: int,
    device: str,
    policy: PreTrainedModel | None = None,
) -> Engine:
    """The engine that the configuration names.

    Args:
        longest: tokens of the longest prompt.
        policy: the model that `hf` runs; None: loaded from the folder.
    """
    s = Sampling(config.temperature, config.max_new_tokens, tuple(stop_ids), longest, config.in_flight, config.seed)
    if config.engine == "hf":
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stop_ids[0]
        return HfEngine(policy or load_policy(folder, device), s, pad)
    memory = config.vllm_memory or (0.4 if config.gpus == 1 or config.sync == "onpolicy" else 0.85)
    return VllmEngine(folder, s, device, memory, config.recompute_kv, trust_remote_code=config.trust_remote_code)
