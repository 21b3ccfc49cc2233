"""The end of a run: summary.json, the bottleneck, and a text of a few lines."""

from pathlib import Path

import numpy as np

from config import Config
from runtime.metrics import Clock

SETTINGS = ("task", "model", "engine", "sync", "seed", "searchers", "gpus")


def training_summary(progress: dict, config: Config, clock: Clock, stopped: bool, **facts: object) -> dict:
    """The trainer's part of summary.json.

    Args:
        progress: as checkpoints have it: step, trained, accuracies (update, second of RL, accuracy), ...
        stopped: whether the parent ended the run.
        facts: further entries, from the trainer.
    """
    before, *later = (accuracy for _, _, accuracy in progress["accuracies"])
    counts = {name: int(np.sum(progress["source"][name])) for name in ("truncated", "undecodable", "bad_rewards")}
    ended_by = "--steps" if progress["step"] >= config.steps else "a stop from outside" if stopped else "--max-seconds"
    return {
        "steps": progress["step"],
        "ended_by": ended_by,
        "accuracy_before": before,
        "accuracy_after": float(np.mean(later[-3:])) if later else before,
        "evaluations": progress["accuracies"],
        "seconds_rl": progress["seconds_before"],
        "seconds_evaluating": clock.seconds.get("evaluate", 0.0),
        "trajectories_generated": int(np.sum(progress["source"]["generated"])),
        "trajectories_trained": progress["trained"],
        **counts,
        "staleness_mean": progress["staleness_sum"] / max(1, progress["step"]),
        "staleness_max": progress["staleness_max"],
        "seconds_trainer": dict(clock.seconds),
        **facts,
    }


def run_summary(config: Config, result: dict, waits: dict, **facts: object) -> dict:
    """summary.json of a run.

    Args:
        result: the trainer's own summary; empty when it sent none.
        waits: process -> cause -> seconds, from the timeline.
        facts: further entries, from the parent: outcome, why, busy_searchers, ...
    """
    waits = {"trainer": result.get("waits_trainer", {})} | {name: w for name, w in waits.items() if name != "trainer"}
    summary = {name: getattr(config, name) for name in SETTINGS} | result | facts
    summary |= {"replay_ratio": config.replay_ratio, "waits": waits}
    if result:
        summary["bottleneck"], summary["advice"] = bottleneck(summary)
    return summary


SLACK = 0.05  # share of the time that a side may wait before it counts as held up
MORE_ANSWERS = "more searchers, more --in-flight, or a higher --replay-ratio"
CURES = {  # a wait of the trainer -> the remedy
    "wait for answers": MORE_ANSWERS,
    "wait for prompts": f"{MORE_ANSWERS}, or a higher --max-staleness if that is set",
    "wait for prefetch": "smaller batches, or fewer processes than cores: the buffer's process comes late",
    "wait for sync": "a larger --sync-every, or --sync eager, where nobody waits for a sync",
}


def bottleneck(summary: dict) -> tuple[str, str]:
    """Which side made the other wait, and a sentence that says what to change.

    Args:
        summary: sync, busy_trainer, busy_searchers (shares of the time), waits (process -> cause -> seconds),
            trajectories_trained, trajectories_generated, replay_ratio (trained / generated, at most).

    Returns:
        ("trainer" | "searchers" | "neither" | "coupling", sentence): "coupling" is a single process, or syncs that make
        both sides wait.
    """
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


def summary_text(summary: dict, out: Path) -> str:
    """The end of a run in a few lines."""
    searchers = " ".join(f"{b:.0%}" for b in summary["busy_searchers"]) or "(same process)"
    return "\n".join(
        [
            "",
            f"held-out accuracy  {summary['accuracy_before']:.3f} -> {summary['accuracy_after']:.3f}"
            f"   ({summary['steps']} updates, ended by {summary['ended_by']}; mean of the last three evaluations)",
            f"time               {summary['seconds_rl']:.1f} s of RL, of which {summary['seconds_evaluating']:.1f} s"
            f" evaluating; {summary['seconds_total']:.1f} s in all",
            f"trajectories       {summary['trajectories_generated']} generated,"
            f" {summary['trajectories_trained']} trained",
            f"staleness          {summary['staleness_mean']:.1f} updates on average,"
            f" {summary['staleness_max']:.0f} at most",
            f"busy               trainer {summary['busy_trainer']:.0%}, searchers {searchers}",
            f"bottleneck         {summary['advice']}",
            *([f"restarts           {summary['restarts']} of searchers"] if summary["restarts"] else []),
            f"run                {out}",
        ]
    )
