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


def reward_and_accuracy(rows: list[dict], evaluations: list):
    """Reward of the batches and held-out accuracy over trainer updates; evaluations: (update, seconds, accuracy)."""
    evaluated = [(step, accuracy) for step, _, accuracy in evaluations]
    figure, axes = _axes(
        f"Held-out accuracy goes from {evaluated[0][1]:.2f} to {evaluated[-1][1]:.2f}", "share of answers"
    )
    axes.plot([r["step"] for r in rows], [r["reward"] for r in rows], color=COLOURS["reward"], label="reward of batch")
    axes.plot(*zip(*evaluated, strict=True), "o-", color=COLOURS["accuracy"], label="held-out accuracy, greedy")
    if all(0 <= r["reward"] <= 1 for r in rows):
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


def timeline(trace: list[dict], start: float, seconds: float = 2.0):
    """Who does what in the `seconds` after `start` (time.time()), a row a process; white is waiting."""
    from matplotlib.figure import Figure

    names = {e["pid"]: e["args"]["name"] for e in trace if e["ph"] == "M"}
    spans = [e for e in trace if e["ph"] == "X" and not e["name"].startswith("wait")]
    inside = [e for e in spans if start < (e["ts"] + e["dur"]) / 1e6 and e["ts"] / 1e6 < start + seconds]
    kinds = list(dict.fromkeys(e["name"] for e in sorted(inside, key=lambda e: (e["pid"], e["ts"]))))
    figure = Figure(figsize=(8, 1.2 + 0.5 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    for i, kind in enumerate(kinds):
        for pid in names:
            mine = [e for e in inside if e["name"] == kind and e["pid"] == pid]
            bars = [(e["ts"] / 1e6 - start, e["dur"] / 1e6) for e in mine]
            axes.broken_barh(bars, (pid - 0.4, 0.8), color=f"C{i % 10}", label=kind if pid == min(names) else None)
    axes.set(xlim=(0, seconds), xlabel="seconds", yticks=list(names), yticklabels=list(names.values()))
    axes.set_title(f"{seconds:g} seconds of the run: coloured is work, white is waiting")
    axes.invert_yaxis()
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    return figure


def draw(run: Path) -> list[Path]:
    """Draw all figures of a run's folder into its `figures/`; returns their paths."""
    import json

    rows = read_jsonl(run / "metrics.jsonl")
    if not rows:
        raise ValueError(f"{run}/metrics.jsonl has no update in it: nothing to draw")
    summary = json.loads((run / "summary.json").read_text())
    figures = {
        "accuracy": reward_and_accuracy(rows, summary["evaluations"]),
        "loss": loss(rows),
        "staleness": staleness(rows),
    }
    if (run / "timeline.json").exists():
        trace = json.loads((run / "timeline.json").read_text())["traceEvents"]
        begin = max((e["ts"] / 1e6 for e in trace if e["name"] == "publish"), default=0.0) - 2.0  # towards the end
        figures["timeline"] = timeline(trace, begin)
    (run / "figures").mkdir(exist_ok=True)
    paths = []
    for name, figure in figures.items():
        paths.append(run / "figures" / f"{name}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


if __name__ == "__main__":
    if len(sys.argv) != 2 or not all((Path(sys.argv[1]) / f).exists() for f in ("metrics.jsonl", "summary.json")):
        sys.exit("usage: python plots.py runs/<run>   (a folder with metrics.jsonl and summary.json)")
    for path in draw(Path(sys.argv[1])):
        print(path)
