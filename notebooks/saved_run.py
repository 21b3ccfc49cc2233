"""Runs for the notebooks: start one as a process of its own, or read one that is kept in the repository.

`keep` writes the data that the notebooks draw, out of a run's folder, to one JSON file. `keep_stream` writes a run's
trajectories in order of arrival, without log mu. notebooks/save_runs.py makes both.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from buffer import ReplayBuffer, Trajectory
from runtime.files import read_jsonl
from runtime.metrics import trace_events

ROOT = Path(__file__).resolve().parents[1]
SAVED = ROOT / "notebooks" / "saved"
COLUMNS = ("step", "seconds", "seconds_after", "imbalance", "reward", "staleness", "staleness_max", "log_ratio_mu")
COLUMNS += ("kl_ref", "distinct", "accuracy")


@dataclass
class SavedRun:
    """The data of a run that a notebook shows."""

    config: dict  # config.json
    summary: dict  # summary.json
    rows: list[dict]  # metrics.jsonl, the columns in COLUMNS
    ages: dict[int, int]  # staleness in trainer updates -> trajectories trained at this staleness, in the whole run
    trace: list[dict]  # two seconds of timeline.json, from its second 0 on
    answers: list[list[str]]  # held-out prompt, greedy answer before RL, after it

    @property
    def accuracy(self) -> list[tuple[int, float, float]]:
        """Held-out evaluations: trainer update, second of RL, share of right answers."""
        return [tuple(e) for e in self.summary["evaluations"]]


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


def obtain(file: str, options: list[str], replay: bool) -> SavedRun:
    """The saved run with this name, or a new run with these options, in a folder of its own."""
    if replay:
        return read_run(SAVED / f"{file}.json")
    return run_job(Path(tempfile.mkdtemp()) / file, *options)


def read_run(place: Path) -> SavedRun:
    """A run from its folder, or from a JSON file by `keep`."""
    place = Path(place)
    if place.is_file():
        kept = json.loads(place.read_text())
        kept["trace"] = _unflat(kept["trace"])
        kept["ages"] = {int(age): n for age, n in kept["ages"].items()}
        return SavedRun(**kept)
    config, summary = (json.loads((place / f"{name}.json").read_text()) for name in ("config", "summary"))
    full = read_jsonl(place / "metrics.jsonl")
    ages: Counter[int] = Counter()
    for row in full:
        ages.update({int(age): n for age, n in row["ages"].items()})
    rows = [{c: row[c] for c in COLUMNS if c in row} for row in full]
    trace = two_seconds(json.loads((place / "timeline.json").read_text())["traceEvents"])
    return SavedRun(config, summary, rows, dict(sorted(ages.items())), trace, before_and_after(config, place))


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


# --- keeping one ----------------------------------------------------------------------------------------------------


def keep(run: SavedRun, place: Path, timeline: bool) -> None:
    """Write a run to one JSON file: numbers to four digits, the timeline only on request."""
    summary = run.summary | {"evaluations": [[s, _short(t), _short(a)] for s, t, a in run.summary["evaluations"]]}
    trace = run.trace if timeline else []
    head = {
        "config": {name: value for name, value in run.config.items() if name not in ("out", "cache")},
        "summary": {name: _short(value) for name, value in summary.items() if name not in ("model", "checkpoint")},
        "ages": run.ages,
        "answers": run.answers,
    }
    rows = ",\n".join(json.dumps({name: _short(value) for name, value in row.items()}) for row in run.rows)
    events = ",\n".join(json.dumps(_flat(e)) for e in trace)
    place.parent.mkdir(parents=True, exist_ok=True)
    start = json.dumps(head).removesuffix("}")
    place.write_text(f'{start},\n"rows": [\n{rows}\n],\n"trace": [\n{events}\n]}}\n')


def _short(value):
    return float(f"{value:.4g}") if isinstance(value, float) else value


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


# --- a stream of trajectories ---------------------------------------------------------------------------------------


def keep_stream(packed: tuple, prompts: list[str], place: Path) -> None:
    """Write packed trajectories (by `pack` of runtime/served_buffer.py) in order of arrival, without log mu."""
    head, _, responses, _ = packed
    small = {name: head[name].astype(np.uint16) for name in ("prompt_id", "policy_version", "version_last")}
    small |= {"reward": head["reward"].astype(np.float16), "log_ref": head["log_ref"].astype(np.float16)}
    place.parent.mkdir(parents=True, exist_ok=True)
    lengths = head["len"].astype(np.uint8)
    np.savez_compressed(place, **small, len=lengths, responses=responses.astype(np.uint8), prompts=np.array(prompts))


def read_stream(place: Path) -> tuple[list[Trajectory], list[str]]:
    """Trajectories in order of arrival (log mu is 0: nothing here reads it), and the prompts' texts."""
    kept = np.load(place)
    ends = np.concatenate([[0], np.cumsum(kept["len"], dtype=np.int64)])
    responses, prompts = kept["responses"].astype(np.int32), kept["prompts"].tolist()
    columns = (kept[name].tolist() for name in ("prompt_id", "reward", "log_ref", "policy_version", "version_last"))
    out = []
    for i, (prompt, reward, log_ref, first, last) in enumerate(zip(*columns, strict=True)):
        response = responses[ends[i] : ends[i + 1]]
        nothing = np.zeros(len(response), np.float32)
        out.append(
            Trajectory(
                (0, 0, i), prompt, np.zeros(1, np.int32), response, "stop", reward, log_ref, nothing, first, last, 0
            )
        )
    return out, prompts


def arrivals(stream: list[Trajectory]) -> Iterator[tuple[int, list[list[Trajectory]]]]:
    """Each trainer update with its groups. An answer comes at the update of its newest weights, `version_last`."""
    by_update: dict[int, dict[tuple, list[Trajectory]]] = {}
    for t in stream:
        groups = by_update.setdefault(t.version_last, {})
        groups.setdefault((t.prompt_id, t.policy_version), []).append(t)
    for update in range(max(by_update) + 1):
        yield update, list(by_update.get(update, {}).values())


def replay(
    stream: list[Trajectory],
    buffer: ReplayBuffer,
    p: int,
    k: int,
    m: float,
    inverse_temperature: float = 0.0,
    every: int = 1,
) -> list[dict]:
    """Put a recorded stream through a buffer, draw a batch every `every` trainer updates. -> a row for each draw.

    Nobody learns from the draws: the stream was written by a run with its own settings and doesn't change.
    """
    rows = []
    for update, groups in arrivals(stream):
        for group in groups:
            buffer.add(group)
        batch = None if update % every else buffer.sample(p, k, m, inverse_temperature)
        if batch is None:
            continue
        seen = {"stored": buffer.contents(), "drawn": [t for group in batch for t in group]}
        row = {"update": update, "held": len(seen["stored"])}
        for name, trajectories in seen.items():
            row |= {f"{name}_{what}": value for what, value in _look(trajectories, update).items()}
        rows.append(row)
    return rows


def over_time(rows: list[dict], name: str, width: int = 1) -> tuple[list[int], list[float]]:
    """A column of a replay as a curve: trainer updates, and means of `width` neighbours. A list becomes its mean."""
    values = np.convolve([np.mean(row[name]) for row in rows], np.ones(width) / width, "valid")
    return [row["update"] for row in rows][width - 1 :], values.tolist()


def gathered(rows: list[dict], name: str, start: int = 0) -> list[int]:
    """All numbers in a column of lists, from row `start` on."""
    return [value for row in rows[start:] for value in row[name]]


def as_text(t: Trajectory, prompts: list[str]) -> str:
    """A trajectory of the addition task as readable text."""
    from tasks.start_model import VOCABULARY

    answer = "".join(VOCABULARY[i] for i in t.response)
    return f"{prompts[t.prompt_id]}{answer:12} reward {t.reward:.0f}, written by version {t.policy_version}"


def _look(trajectories: list[Trajectory], update: int) -> dict:
    answers = {(t.prompt_id, t.response.tobytes()) for t in trajectories}
    return {
        "ages": [update - t.policy_version for t in trajectories],
        "reward": float(np.mean([t.reward for t in trajectories])),
        "distinct": len(answers) / len(trajectories),
    }
