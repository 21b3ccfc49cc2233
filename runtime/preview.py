"""A preview of a run: the GPU of each process, the memory needed there, and the computation of an update.

`--dry-run` prints all of it. A run on GPUs logs the memory, and refuses to start when it can't fit.
"""

import functools
import json
import os
from pathlib import Path

from config import START_MODEL, Config, ConfigError, why_no_vllm
from runtime import child, machine, memory
from runtime.placement import Place, describe, gpu_names, installed_gpus, plan, smallest
from tasks import load_task

QUIET = "ignore::UserWarning:multiprocessing.resource_tracker"  # semaphores of killed processes are removed silently
MEASURED = Path(__file__).parents[1] / "bench" / "results" / "gpu_check.json"


def names_of(config: Config) -> list[str]:
    """The GPUs of a run; a dry run assumes that missing ones exist."""
    names = gpu_names()
    if config.dry_run and config.gpus > len(names):
        return [str(i) for i in range(config.gpus)]
    return names


def places(config: Config) -> list[Place]:
    """A place for the trainer, and for each searcher."""
    return plan(names_of(config), config.gpus, config.searchers)


def longest_prompt(config: Config) -> int:
    """Tokens of the task's longest prompt, estimated from its characters; a start model has one per character."""
    characters = _characters(config.task, config.eval_split)
    return characters if config.model == START_MODEL else -(-characters // memory.CHARACTERS)


@functools.cache  # a task may take long to load
def _characters(spec: str, split: str) -> int:
    task = load_task(spec)
    return max(map(len, [*task.train, *getattr(task, split)]))


def fit(config: Config, folder: Path) -> tuple[float, list[str]]:
    """memory.fit for the model in a folder on this machine's GPUs.

    Raises:
        ConfigError: when it can't fit.
    """
    total = smallest(installed_gpus(), names_of(config)[: config.gpus])
    return memory.fit(memory.read_shape(folder), config, longest_prompt(config), total)


def work(shape: memory.Shape, config: Config, prompt: int, measured: dict | None) -> list[str]:
    """The computation of an update, and its time at the rate that bench/gpu_check.py measured."""
    answers, tokens = config.prompts_per_batch * config.K, prompt + config.max_new_tokens
    per_token = (8 if config.gradient_checkpointing else 6) * shape.per_token  # forward 2, backward 4 (2 again)
    flop = answers * tokens * per_token
    lines = [
        f"an update: at most {answers:,} answers of {tokens} tokens with their prompts, "
        f"{per_token / 1e9:.2g} GFLOP per token (without attention): {flop / 1e12:.2g} TFLOP"
    ]
    if shape.computed:
        lines.append(
            f"of {shape.parameters:,} parameters, {shape.computed:,} take part in a token: some experts do not"
        )
    if measured:
        rate = measured["trainer_flops"]
        lines.append(
            f"throughput: {rate / flop:.2g} updates/s, {rate / per_token:,.0f} tokens/s in the trainer, if it achieves "
            f"the {rate / 1e12:.3g} TFLOP/s that bench/gpu_check.py measured on {measured['device']} with another model"
        )
    else:
        lines.append(
            "throughput: not estimated, bench/gpu_check.py has not run on a GPU here; "
            f"100 TFLOP/s achieved would be {1e14 / per_token:,.0f} tokens/s in the trainer"
        )
    return lines


def measured_here() -> dict | None:
    """The results of bench/gpu_check.py; None when it has not run on a GPU."""
    if not MEASURED.exists():
        return None
    result = json.loads(MEASURED.read_text())
    usable = result.get("trainer_flops") and result.get("device") != "cpu" and not result.get("quick")
    return result if usable else None


def dry_run(config: Config) -> list[str]:
    """The whole preview, in lines. It starts nothing and writes nothing.

    Raises:
        ConfigError: when it can't fit.
    """
    lines = describe(places(config))
    if config.gpus > len(gpu_names()):
        lines.append(f"this machine shows {len(gpu_names())} GPU(s): the plan assumes {config.gpus} of unknown size")
    if config.engine == "vllm" and (why := why_no_vllm(config.gpus)):
        lines.append(f"{why}: a run here would use --engine hf")
    folder = _folder(config)
    if folder is None:
        return [*lines, "the start model is not made yet: its memory and work are not estimated"]
    if config.gpus:
        lines += fit(config, folder)[1]
    else:
        lines.append("memory: estimated for GPUs only")
    return lines + work(memory.read_shape(folder), config, longest_prompt(config), measured_here())


def _folder(config: Config) -> Path | None:
    if config.model != START_MODEL:
        return Path(config.model)
    from tasks.start_model import start_model_path

    place = start_model_path(config)
    return place if os.path.exists(place / "config.json") else None


def check(config: Config) -> None:
    """Refuse a run that this machine can't hold, before anything starts or is written.

    Raises:
        ConfigError: one line with what is needed, what there is, and an option or command that would help.
    """
    folder = _folder(config)
    if config.gpus and folder:
        try:
            fit(config, folder)
        except ConfigError as error:
            raise ConfigError(f"--gpus {config.gpus}: {error}") from None
    folders = {"--out": Path(config.out or "runs").absolute()}
    if not folder:  # a start model is made there
        folders["--cache"] = Path(config.cache)
    machine.check_folders(folders)
    with child.environment({"PYTHONWARNINGS": QUIET}), child.uninterrupted():  # multiprocessing's tracker starts here
        machine.check()
    child.local_socket("weights")
    if folder and config.sync != "onpolicy" and not (config.gpus and config.weights != "shared-memory"):
        width = 2 if config.gpus and config.engine == "vllm" else 4  # bytes; as make_publisher publishes
        machine.check_shared_memory(2 * width * memory.read_shape(folder).parameters)


def check_task(config: Config) -> None:
    """Refuse a task that can't fill a batch or an evaluation, or has no model.

    Raises:
        ConfigError: one line that names the option and what would be right.
    """
    task = load_task(config.task)
    if len(task.train) < config.prompts_per_batch:
        raise ConfigError(f"--prompts-per-batch {config.prompts_per_batch}: the task has {len(task.train)} prompts")
    if len(task.train) < (config.searchers or 1):
        raise ConfigError(f"--searchers {config.searchers}: the task has {len(task.train)} prompts to share out")
    if not getattr(task, config.eval_split):
        raise ConfigError(f"--task {config.task}: it has no {config.eval_split} prompts; give it some")
    if config.model == START_MODEL and not hasattr(task, "make_start_model"):
        raise ConfigError(f"--model start: the task {config.task} makes no start model; name a model folder")
