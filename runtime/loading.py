"""Loads the parts that a searcher works with, by the configuration: engine, reference, task, tokenizer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from runtime.engine import Engine, HfEngine, Sampling, VllmEngine
from runtime.files import ConfigError
from runtime.inside_vllm import import_vllm
from runtime.policy import load_policy
from runtime.text import Text
from runtime.update_check import check_updates
from tasks import Task, load_task

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from config import Config
    from runtime.child import Child

log = logging.getLogger("tba_min.loading")


class Parts(NamedTuple):
    """The parts that a searcher works with."""

    engine: Engine  # generates; its weights have version 0
    reference: PreTrainedModel  # frozen, pi_ref
    task: Task
    tokenizer: Text


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
            told = import_vllm(child.device)
        for line in told if index == incarnation == 0 else ():
            log.info("%s", line)
    with child.clock.span("load"):
        task = load_task(config.task)
        text = Text.of(folder, config, task)
        reference = load_policy(folder, child.device, trust_remote_code=config.trust_remote_code)
        prompts = text.check(reference, task.train, config.max_new_tokens)
        engine = _engine(child, config, folder, text, prompts, reference, policy, first=incarnation == 0)
        # after vLLM's start, which sets all seeds
        torch.manual_seed(int(np.random.SeedSequence([config.seed, index, incarnation]).generate_state(1)[0]))
    return Parts(engine, reference, task, text)


def _engine(
    child: Child,
    config: Config,
    folder: str,
    text: Text,
    prompts: list[np.ndarray],
    reference: PreTrainedModel,
    policy: PreTrainedModel | None,
    first: bool,
) -> Engine:
    """The engine, checked when this searcher starts for the first time: an error is then the model's fault.

    Raises:
        ConfigError: when vLLM can't generate from the model, or not follow its updates.
    """
    try:
        engine = make_engine(config, folder, text, max(map(len, prompts)), child.device, policy)
        if first and isinstance(engine, VllmEngine):
            check_updates(engine, reference, prompts, config.temperature)
    except (ConfigError, MemoryError, torch.OutOfMemoryError, OSError):
        raise
    except Exception as error:  # vLLM's and the model's code have no common one
        if config.engine != "vllm" or not first:
            raise
        logging.getLogger(__name__).info("vLLM does not take this model", exc_info=True)  # for run.log alone
        raise ConfigError(
            f"--engine vllm: vLLM can't serve {type(reference).__name__} here ({_reason(error)}); use --engine hf"
        ) from error
    return engine


def _reason(error: Exception) -> str:
    """An error in a line; pydantic, which checks vLLM's options, hides the reason in the middle."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    line = next((line for line in lines if line.startswith(("Value error, ", "Assertion failed, "))), lines[0])
    return f"{type(error).__name__}: {line}"[:250]


def make_engine(
    config: Config, folder: str, text: Text, longest: int, device: str, policy: PreTrainedModel | None = None
) -> Engine:
    """The engine that the configuration names.

    Args:
        longest: tokens of the longest prompt.
        policy: the model that `hf` runs; None: loaded from the folder.
    """
    stop = tuple(text.stop_ids)
    s = Sampling(config.temperature, config.max_new_tokens, stop, longest, config.in_flight, config.seed)
    if config.engine == "hf":
        return HfEngine(policy or load_policy(folder, device), s, text.pad)
    memory = config.vllm_memory or (0.4 if config.gpus == 1 or config.sync == "onpolicy" else 0.85)
    return VllmEngine(folder, s, device, memory, config.recompute_kv, trust_remote_code=config.trust_remote_code)
