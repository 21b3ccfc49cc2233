"""Every figure of a run, drawn from its folder: `python plots.py runs/<run>`."""

import sys
from pathlib import Path

from metrics import read_jsonl

COLOURS = {"reward": "#1f77b4", "accuracy": "#d62728", "loss": "#2ca02c", "mean": "#9467bd", "max": "#c5b0d5"}


def _axes(title: str, ylabel: str):
    from matplotlib.figure import Figure  # no pyplot: it needs no display and leaves no global state

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel="trainer updates", ylabel=ylabel)
    axes.grid(alpha=0.3)
    return figure, axes


def reward_and_accuracy(rows: list[dict], start: float):
    """Reward of the batches and held-out accuracy over trainer updates."""
    evaluated = [(0, start)] + [(r["step"] + 1, r["accuracy"]) for r in rows if "accuracy" in r]
    figure, axes = _axes(f"Held-out accuracy goes from {start:.2f} to {evaluated[-1][1]:.2f}", "share of answers")
    axes.plot([r["step"] for r in rows], [r["reward"] for r in rows], color=COLOURS["reward"], label="reward of batch")
    axes.plot(*zip(*evaluated, strict=True), "o-", color=COLOURS["accuracy"], label="held-out accuracy, greedy")
    axes.set_ylim(0, 1.02)
    axes.legend(loc="lower right")
    return figure


def loss(rows: list[dict]):
    """Trajectory-balance loss in reward units over trainer updates."""
    scaled = [r["imbalance"] for r in rows]
    first, last = (sorted(part)[len(part) // 2] for part in (scaled[:20], scaled[-20:]))
    title = f"The imbalance goes from {first:.2g} to {last:.2g} (medians of 20 updates)"
    figure, axes = _axes(title, "β² · TB loss [reward²]")
    axes.plot([r["step"] for r in rows], scaled, color=COLOURS["loss"])
    if min(scaled) > 0:
        axes.set_yscale("log")
    return figure


def staleness(rows: list[dict]):
    """Age of the trained trajectories over trainer updates."""
    mean = sum(r["staleness"] for r in rows) / len(rows)
    figure, axes = _axes(
        f"The trainer learns from data that is {mean:.0f} updates old on average", "staleness [trainer updates]"
    )
    axes.plot(
        [r["step"] for r in rows], [r["staleness_max"] for r in rows], color=COLOURS["max"], label="oldest of batch"
    )
    axes.plot([r["step"] for r in rows], [r["staleness"] for r in rows], color=COLOURS["mean"], label="mean of batch")
    axes.legend(loc="upper left")
    return figure


def draw(run: Path) -> list[Path]:
    """Draw all figures of a run's folder into its `figures/`; returns their paths."""
    import json

    rows = read_jsonl(run / "metrics.jsonl")
    if not rows:
        raise ValueError(f"{run}/metrics.jsonl has no update in it: nothing to draw")
    summary = json.loads((run / "summary.json").read_text())
    figures = {
        "accuracy": reward_and_accuracy(rows, summary["accuracy_before"]),
        "loss": loss(rows),
        "staleness": staleness(rows),
    }
    (run / "figures").mkdir(exist_ok=True)
    paths = []
    for name, figure in figures.items():
        paths.append(run / "figures" / f"{name}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "metrics.jsonl").exists():
        sys.exit("usage: python plots.py runs/<run>   (a folder with metrics.jsonl and summary.json)")
    for path in draw(Path(sys.argv[1])):
        print(path)
