"""Runs for the notebooks: start one as a process of its own, or read those that are kept in the repository.

`keep` writes the data that the notebooks draw, out of runs' folders, to one JSON file; notebooks/save_runs.py does.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from buffer import Trajectory
from runtime import checkpoint
from runtime.files import read_jsonl
from runtime.metrics import trace_events

ROOT = Path(__file__).resolve().parents[1]
SAVED = ROOT / "notebooks" / "saved"
COLUMNS = ("reward", "imbalance", "staleness", "log_ratio_mu")
OPTIONS = ["--steps", "200", "--max-seconds", "0", "--gpus", "0", "--eval-every", "10", "--eval-prompts", "250"]
OPTIONS += ["--checkpoint-every", "20", "--keep-checkpoints", "10"]  # to look back at
SEEDS = (0, 1, 2)
RUNS = {  # name: its file in saved/, and its options beside OPTIONS
    "default": ("default", []),
    "m = 0": ("m_0", ["--recency-prob", "0"]),
    "k = 100": ("k_100", ["--sync-every", "100"]),
    "m = 0, k = 100": ("m_0_k_100", ["--recency-prob", "0", "--sync-every", "100"]),
    "m = 0.5, k = 100": ("m_05_k_100", ["--recency-prob", "0.5", "--sync-every", "100"]),
    "m = 1, k = 100": ("m_1_k_100", ["--recency-prob", "1", "--sync-every", "100"]),
    "pool of 320, k = 100": ("pool_320_k_100", ["--recent-groups", "320", "--sync-every", "100"]),
    "k = 20": ("k_20", ["--sync-every", "20"]),
}
BINS = (0, 6, 12, 25, 50, 100)  # ages in trainer updates, from each number up to the next


@dataclass
class SavedRun:
    """The data of a run that a notebook shows."""

    config: dict  # config.json
    summary: dict  # summary.json
    rows: list[dict]  # metrics.jsonl: step, and the columns in COLUMNS
    ages: dict[int, int]  # staleness in trainer updates -> trajectories trained at this staleness, in the whole run
    looks: list[dict]  # `look_back` at each checkpoint
    trace: list[dict]  # two seconds of timeline.json, from its second 0 on
    answers: list[list[str]]  # held-out prompt, greedy answer before RL, after it

    @property
    def accuracy(self) -> tuple[list[int], list[float]]:
        """Held-out evaluations: trainer updates, shares of right answers."""
        return [e[0] for e in self.summary["evaluations"]], [e[2] for e in self.summary["evaluations"]]

    @property
    def end(self) -> float:
        """Held-out accuracy, mean of the last three evaluations."""
        return float(np.mean(self.accuracy[1][-3:]))

    def course(self, column: str, width: int = 10) -> tuple[list[int], list[float]]:
        """A column over trainer updates, as means of `width` updates."""
        values = np.convolve([row[column] for row in self.rows], np.ones(width) / width, "valid")
        return list(range(width, len(self.rows) + 1)), values.tolist()

    def mean(self, column: str, first: int, last: int) -> float:
        """A column's mean over the trainer updates from `first` to before `last`."""
        return float(np.mean([row[column] for row in self.rows[first:last]]))

    def looked(self, what: str) -> tuple[list[int], list[float]]:
        """A number of `look_back` over trainer updates."""
        return [look["step"] for look in self.looks], [look[what] for look in self.looks]


def bands(runs: list[SavedRun], curve: str, *arguments) -> tuple[list[int], list[list[float]]]:
    """The same curve of several runs: x, and y of each. `curve` is a method or property of SavedRun."""
    curves = [getattr(run, curve) for run in runs]
    found = [c(*arguments) if callable(c) else c for c in curves]
    return found[0][0], [y for _, y in found]


# --- starting and reading a run -------------------------------------------------------------------------------------


def run_job(out: Path, *options: str) -> SavedRun:
    """Run `tba_min.py` as a process of its own, show its output, and read its folder.

    Raises:
        RuntimeError: when the run fails; the text has its last lines.
    """
    command = [sys.executable, str(ROOT / "tba_min.py"), "--out", str(Path(out).resolve()), *options]
    print("python tba_min.py", *options, flush=True)
    lines: list[str] = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout:
            lines.append(line)
            print(line, end="", flush=True)
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {''.join(lines[-8:])}")
    return read_run(Path(out))


def start_run(options: list[str]) -> SavedRun:
    """A new run with these options, in a folder of its own that is removed when it has been read."""
    with tempfile.TemporaryDirectory() as folder:
        return run_job(Path(folder) / "run", *options)


def read_run(out: Path) -> SavedRun:
    """A run from its folder."""
    config, summary = (json.loads((out / f"{name}.json").read_text()) for name in ("config", "summary"))
    full = read_jsonl(out / "metrics.jsonl")
    ages: Counter[int] = Counter()
    for row in full:
        ages.update({int(age): n for age, n in row["ages"].items()})
    rows = [{c: row[c] for c in ("step", *COLUMNS)} for row in full]
    trace = two_seconds(json.loads((out / "timeline.json").read_text())["traceEvents"])
    looks = [look_back(place, config["beta"]) for place in checkpoint.all_in(out / "checkpoints")]
    return SavedRun(config, summary, rows, dict(sorted(ages.items())), looks, trace, before_and_after(config, out))


def read_saved(name: str) -> list[SavedRun]:
    """The kept runs with this name in RUNS, one for each of SEEDS."""
    runs = json.loads((SAVED / f"{RUNS[name][0]}.json").read_text())["runs"]
    for run in runs:
        columns, values = run["rows"].keys(), zip(*run["rows"].values(), strict=True)
        run["rows"] = [{"step": i, **dict(zip(columns, row, strict=True))} for i, row in enumerate(values)]
        run["ages"] = {int(age): n for age, n in run["ages"].items()}
        run["trace"] = _unflat(run["trace"])
    return [SavedRun(**run) for run in runs]


def two_seconds(trace: list[dict]) -> list[dict]:
    """The last two seconds before the last publication, moved to second 0."""
    begin = max((e["ts"] for e in trace if e["name"] == "publish"), default=0) - 2_000_000
    names = [e for e in trace if e["ph"] == "M"]
    spans = [e for e in trace if e["ph"] == "X" and begin < e["ts"] + e["dur"] and e["ts"] < begin + 2_000_000]
    return names + [e | {"ts": e["ts"] - begin} for e in spans]


def before_and_after(config: dict, out: Path, count: int = 8) -> list[list[str]]:
    """Greedy answers to the first held-out prompts, by the start model and by the run's saved policy."""
    from config import Config
    from tasks.start_model import start_model_path

    known = {f.name for f in dataclasses.fields(Config)}
    settled = Config(**{name: value for name, value in config.items() if name in known})
    start = start_model_path(settled) if settled.model == "start" else settled.model
    end = max((out / "checkpoints").glob("step-*"), key=lambda p: int(p.name.removeprefix("step-")))
    prompts, before = greedy(str(start), settled, count)
    return [list(row) for row in zip(prompts, before, greedy(str(end), settled, count)[1], strict=True)]


def greedy(folder: str, config, count: int) -> tuple[list[str], list[str]]:
    """Held-out prompts of the task, and the greedy answers of a model folder to them."""
    from runtime.evaluation import Evaluator
    from runtime.policy import load_policy
    from tasks import load_task

    few = dataclasses.replace(config, eval_split="heldout", eval_prompts=count)
    evaluate = Evaluator(load_policy(folder), folder, load_task(config.task), few)
    return evaluate.prompts, evaluate.answers()


# --- looking back at a checkpoint -----------------------------------------------------------------------------------


def look_back(place: Path, beta: float) -> dict:
    """What a checkpoint's policy makes of all that its buffer holds.

    Returns:
        step: trainer updates so far.
        coverage: the probability that the policy, asked a stored prompt again, writes an answer that the buffer holds
            for this prompt (0 to 1, mean over prompts; exact, at temperature 1).
        loss: beta^2 * TB loss of the groups whose age lies in each of BINS, None where there is none.
    """
    from runtime.served_buffer import unpack

    stored, step = unpack(checkpoint.load_buffer(place)["trajectories"]), checkpoint.step_of(place)
    log_pi = _log_pi(place, stored)
    known: dict[int, dict[bytes, float]] = {}  # prompt -> answer -> log pi
    groups: dict[tuple[int, int], list[float]] = {}  # prompt, version -> the answers' u
    for t, here in zip(stored, log_pi, strict=True):
        known.setdefault(t.prompt_id, {})[t.response.tobytes()] = here
        groups.setdefault((t.prompt_id, t.policy_version), []).append(t.log_ref + t.reward / beta - here)
    by_age: list[list[float]] = [[] for _ in BINS]
    for (_, version), u in groups.items():
        by_age[np.searchsorted(BINS, step - version, side="right") - 1].append(beta**2 * float(np.var(u)))
    coverage = float(np.mean([np.exp(list(answers.values())).sum() for answers in known.values()]))
    return {"step": step, "coverage": coverage, "loss": [float(np.mean(x)) if x else None for x in by_age]}


def _log_pi(folder: Path, stored: list[Trajectory]) -> list[float]:
    """log pi of each stored answer under a model folder, nats."""
    import torch

    from loss import sequence_logprobs
    from runtime.policy import answer_logprobs, load_policy

    model, out = load_policy(str(folder)), []
    with torch.inference_mode():
        for i in range(0, len(stored), 2048):
            part = stored[i : i + 2048]
            found = answer_logprobs(model, [t.prompt for t in part], [t.response for t in part], 0, 1.0)
            out += sequence_logprobs(*found[:2]).tolist()
    return out


# --- keeping runs ---------------------------------------------------------------------------------------------------


def keep(runs: list[SavedRun], place: Path, everything: bool) -> None:
    """Write runs to one JSON file, a line for each part: numbers to three digits.

    Args:
        everything: also their timelines, ages and answers.
    """
    out = []
    for run in runs:
        part = {
            "config": {name: value for name, value in run.config.items() if name not in ("out", "cache", "given")},
            "summary": {name: value for name, value in run.summary.items() if name not in ("model", "checkpoint")},
            "rows": {name: [row[name] for row in run.rows] for name in COLUMNS},
            "ages": run.ages if everything else {},
            "looks": run.looks,
            "trace": [_flat(e) for e in run.trace] if everything else [],
            "answers": run.answers if everything else [],
        }
        lines = (f'"{name}":{json.dumps(_short(value), separators=(",", ":"))}' for name, value in part.items())
        out.append(",\n".join(lines))
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text('{"runs": [{\n' + "\n}, {\n".join(out) + "\n}]}\n")


def _short(value):
    """Numbers to three digits, everywhere inside."""
    if isinstance(value, dict):
        return {name: _short(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_short(part) for part in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value


def _flat(e: dict) -> list:
    """An event as [row, name] or [row, name, milliseconds, milliseconds, thread]."""
    if e["ph"] == "M":
        return [e["pid"], e["args"]["name"]]
    return [e["pid"], e["name"], round(e["ts"] / 1000, 1), round(e["dur"] / 1000, 1), e["tid"]]


def _unflat(rows: list[list]) -> list[dict]:
    """The inverse of `_flat`, for all events of a timeline."""
    spans = {name: [] for _, name in (row for row in rows if len(row) == 2)}
    names = list(spans)
    for pid, name, start, length, track in (row for row in rows if len(row) == 5):
        spans[names[pid]].append((name, start / 1000, (start + length) / 1000, track))
    return trace_events(spans)
