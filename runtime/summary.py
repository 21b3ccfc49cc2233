"""The end of a run: summary.json, the bottleneck, a text of a few lines, the timeline and the figures.

A figure that was not measured is null in summary.json, and "-" or "not measured" in the text.
"""

import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from config import Config, save
from runtime import checkpoint
from runtime.child import RunLog
from runtime.files import as_json, bookkeeping, lost, write_whole
from runtime.metrics import Clock, merge_timeline, read_spans
from runtime.show import share, shares

SETTINGS = ("task", "model", "engine", "sync", "seed", "searchers", "gpus")
STOPPED = "a stop from outside"  # as the trainer sees it; the parent knows by what
FAILURE = "a failure"
LEAST = {"updates_measured": 5, "seconds_measured": 1.0}  # of RL: with less, no side is called the bottleneck
DRAWING = 300  # seconds that the figures may take; matplotlib's first start searches all fonts
log = logging.getLogger("tba_min.summary")


def training_summary(progress: dict, config: Config, clock: Clock, stopped: bool, **facts: object) -> dict:
    """The trainer's part of summary.json.

    Args:
        progress: as checkpoints have it: step, trained, accuracies (update, second of RL, accuracy), ...
        stopped: whether the parent ended the run.
        facts: further entries, from the trainer.
    """
    before, *later = (accuracy for _, _, accuracy in progress["accuracies"])
    evaluated = progress["accuracies"][-1][0]  # the update
    after = float(np.mean(later[-3:])) if later else before if evaluated == progress["step"] else None
    counts = {name: int(np.sum(progress["source"][name])) for name in ("truncated", "undecodable", "bad_rewards")}
    ended_by = "--steps" if progress["step"] >= config.steps else STOPPED if stopped else "--max-seconds"
    return {
        "steps": progress["step"],
        "ended_by": ended_by,
        "accuracy_before": before,
        "accuracy_after": after,
        "evaluations": progress["accuracies"],
        "seconds_rl": progress["seconds_before"],
        "seconds_evaluating": clock.seconds.get("evaluate", 0.0),
        "trajectories_generated": int(np.sum(progress["source"]["generated"])),
        "trajectories_trained": progress["trained"],
        **counts,
        "staleness_mean": progress["staleness_sum"] / progress["step"] if progress["step"] else None,
        "staleness_max": progress["staleness_max"] if progress["step"] else None,
        "seconds_trainer": dict(clock.seconds),
        "updates_measured": sum(name == "step" for name, *_ in clock.spans),
        "seconds_measured": clock.since_begin(),
        **facts,
    }


def run_summary(config: Config, result: dict, waits: dict, stopped_by: str | None, **facts: object) -> dict:
    """summary.json of a run.

    Args:
        result: the trainer's own summary; empty when it sent none.
        waits: process -> cause -> seconds, from the timeline.
        stopped_by: the signal or the failure that ended the run, if one did.
        facts: further entries, from the parent: outcome, why, busy_searchers, ...
    """
    waits = {"trainer": result.get("waits_trainer", {})} | {name: w for name, w in waits.items() if name != "trainer"}
    summary = {name: getattr(config, name) for name in SETTINGS} | result | facts
    summary |= {"replay_ratio": config.replay_ratio, "waits": waits}
    if result.get("ended_by", STOPPED) == STOPPED:
        summary["ended_by"] = stopped_by
    known = result and stopped_by != FAILURE  # a failure makes others wait
    summary["bottleneck"], summary["advice"] = bottleneck(summary) if known else (None, None)
    return summary


def finish(config: Config, given: dict, out: Path, result: dict, run_log: RunLog, **facts: object) -> None:
    """Write summary.json, the figures and what else a run leaves, and say how it went: the summary first of all.

    Each of them may fail; then it is said, in summary.json too, and the others follow.
    """
    with bookkeeping(out.name):
        out.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
    spans = read_spans(out)
    summary = run_summary(config, result, {name: saved.get("waits", {}) for name, saved in spans.items()}, **facts)
    _write(summary, out, run_log)
    if result:
        with bookkeeping("the summary's text"):
            log.info("%s", summary_text(summary, out))
    before = dict(run_log.lost)
    with bookkeeping("timeline.json"):
        merge_timeline(out, spans)
    if not (out / "config.json").exists():  # it could not be written at the start
        with bookkeeping("config.json"):
            save(config, out / "config.json", given)
    if result.get("steps"):
        with bookkeeping("figures"):
            if problem := _draw(out):
                lost("figures", problem)
    if run_log.lost != before or "summary.json" in before:
        _write(summary, out, run_log)
    if summary["outcome"] != "completed":
        saved = checkpoint.all_in(out / "checkpoints")
        resume = f"; `python tba_min.py --resume {out}` goes on from {saved[-1].name}" if saved else ""
        log.info("tba_min: %s; what there is lies in %s%s", summary["outcome"], out, resume)


def _write(summary: dict, out: Path, run_log: RunLog) -> None:
    """Write summary.json, with everything that was not written until now under `problem`."""
    problems = [summary["problem"]] if summary.get("problem") else []
    with bookkeeping("summary.json"):
        all_of_them = {"problem": "; ".join(problems + run_log.problems()) or None}
        write_whole(out / "summary.json", as_json(summary | all_of_them, indent=2) + "\n")


def _draw(out: Path) -> str | None:
    """Draw the figures in a process of its own: matplotlib meets the shell's settings, and fails or hangs in many ways.

    Returns the problem, if there is one: the last line that it printed.
    """
    # no display, and no settings of the user's: a matplotlibrc in the working directory would come first
    paths = filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")))
    variables = {"MPLBACKEND": "agg", "MATPLOTLIBRC": os.devnull, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-P", "-m", "runtime.plots", str(out)]
    drawing = subprocess.run(
        command, env=os.environ | variables, cwd=out, stdin=subprocess.DEVNULL, capture_output=True, timeout=DRAWING
    )
    if not drawing.returncode:
        return None
    return drawing.stderr.decode(errors="replace").strip().split("\n")[-1] or f"exit code {drawing.returncode}"


SLACK = 0.05  # share of the time that a side may wait before it counts as held up
MORE_ANSWERS = "more searchers, more --in-flight, or a higher --replay-ratio"
CURES = {  # a wait of the trainer -> the remedy
    "wait for answers": MORE_ANSWERS,
    "wait for prompts": f"{MORE_ANSWERS}, or a higher --max-staleness if that is set",
    "wait for prefetch": "smaller batches, or fewer processes than cores: the buffer's process comes late",
    "wait for sync": "a larger --sync-every, or --sync eager, where nobody waits for a sync",
}


def bottleneck(summary: dict) -> tuple[str | None, str | None]:
    """Which side made the other wait, and a sentence that says what to change.

    Args:
        summary: sync, busy_trainer, busy_searchers (shares of the time), waits (process -> cause -> seconds),
            trajectories_trained, trajectories_generated, replay_ratio (trained / generated, at most),
            updates_measured, seconds_measured.

    Returns:
        ("trainer" | "searchers" | "neither" | "coupling", sentence): "coupling" is a single process, or syncs that make
        both sides wait. (None, None) when too little was measured.
    """
    known = [summary["busy_trainer"], *summary["busy_searchers"]]
    if any(map(unknown, known)) or any(summary[name] < least for name, least in LEAST.items()):
        return None, None
    if summary["sync"] == "onpolicy":
        return "coupling", "one process generates and trains in turn: --sync eager does both at the same time."
    idle = 1 - summary["busy_trainer"]
    searchers_idle = 1 - sum(summary["busy_searchers"]) / len(summary["busy_searchers"])
    used = summary["trajectories_trained"] / max(1, summary["trajectories_generated"])
    times = f"each answer was trained {used:.1f} times on average, at most {summary['replay_ratio']:g} are allowed"
    causes = summary["waits"]["trainer"]
    cure = CURES[max(causes, key=causes.get)] if causes else MORE_ANSWERS
    if idle > SLACK and searchers_idle > SLACK:
        waited = f"the trainer waited {idle:.0%} of the time and the searchers {searchers_idle:.0%}"
        return "coupling", f"{waited}; try {cure}."
    if idle > SLACK:
        return "searchers", f"the searchers are: the trainer waited {idle:.0%} of the time; try {cure}."
    if searchers_idle > SLACK:
        waited = f"the trainer is: the searchers waited {searchers_idle:.0%} of the time"
        return "trainer", f"{waited}; try fewer searchers, more --threads, or --sync eager, where they go on."
    if used < 0.9 * min(1.0, summary["replay_ratio"]):
        faster = "fewer searchers, more --threads, or a larger --micro-batch-tokens"
        return "trainer", f"the trainer is: it never waited, and {times}; try {faster}."
    return "neither", f"neither side waited, and {times}."


def unknown(busy: float | None) -> bool:
    """Whether a share of the time was not measured."""
    return busy is None or math.isnan(busy)


def summary_text(summary: dict, out: Path) -> str:
    """The end of a run in a few lines."""
    one_process = summary["sync"] == "onpolicy"
    searchers = "(same process)" if one_process else shares(summary["busy_searchers"])
    updates, after, stale = summary["steps"], summary["accuracy_after"], summary["staleness_mean"]
    cause = "the run failed" if summary["outcome"] == "failed" else "too little was measured"
    evaluations = min(3, max(1, len(summary["evaluations"]) - 1))
    mean = f"; mean of the last {evaluations} evaluations" if evaluations > 1 else ""
    accuracy = f"{summary['accuracy_before']:.3f} -> " + ("not evaluated again" if after is None else f"{after:.3f}")
    ages = (
        "not measured" if stale is None else f"{stale:.1f} updates on average, {summary['staleness_max']:.0f} at most"
    )
    return "\n".join(
        [
            "",
            f"held-out accuracy  {accuracy}   ({updates} updates, ended by {summary['ended_by']}{mean})",
            f"time               {summary['seconds_rl']:.1f} s of RL, of which {summary['seconds_evaluating']:.1f} s"
            f" evaluating; {summary['seconds_total']:.1f} s in all",
            f"trajectories       {summary['trajectories_generated']} generated,"
            f" {summary['trajectories_trained']} trained",
            f"staleness          {ages}",
            f"busy               trainer {share(summary['busy_trainer'])}, searchers {searchers}",
            f"bottleneck         {summary['advice'] or 'not known: ' + cause}",
            *([f"restarts           {summary['restarts']} of searchers"] if summary["restarts"] else []),
            f"run                {out}",
        ]
    )
