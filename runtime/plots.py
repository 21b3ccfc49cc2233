"""Every figure of a run, drawn from its folder: `python -m runtime.plots runs/<run>`."""

import io
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

if not os.environ.get("MPLBACKEND", "").startswith("module:"):  # a notebook's own
    os.environ["MPLBACKEND"] = "agg"  # no display is needed, and no name in the shell can fail
import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # no pyplot: it leaves no global state
from matplotlib.patches import Patch

from runtime.files import read_json, read_jsonl, why, write_whole

COLOURS = {"reward": "#1f77b4", "accuracy": "#d62728", "loss": "#2ca02c", "mean": "#9467bd", "max": "#c5b0d5"}


def figure_with_axes(title: str, ylabel: str) -> tuple[Figure, Axes]:
    """An empty figure over trainer updates."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel="trainer updates", ylabel=ylabel)
    axes.grid(alpha=0.3)
    return figure, axes


def numbers(values: list[float | None]) -> list[float]:
    """Values of a JSON file to plot: null is a value that was not finite."""
    return [float("nan") if value is None else value for value in values]


def reward_and_accuracy(rows: list[dict], evaluations: list) -> Figure:
    """Reward of the batches and held-out accuracy over trainer updates; evaluations: (update, seconds, accuracy)."""
    evaluated = [(step, accuracy) for step, _, accuracy in evaluations]
    title = f"Held-out accuracy goes from {evaluated[0][1]:.2f} to {evaluated[-1][1]:.2f}"
    if len(evaluated) == 1:
        title = f"Held-out accuracy at update {evaluated[0][0]}: {evaluated[0][1]:.2f}, not evaluated again"
    figure, axes = figure_with_axes(title, "share of answers")
    rewards = numbers([r["reward"] for r in rows])
    axes.plot([r["step"] for r in rows], rewards, color=COLOURS["reward"], label="reward of batch")
    axes.plot(*zip(*evaluated, strict=True), "o-", color=COLOURS["accuracy"], label="held-out accuracy, greedy")
    if all(0 <= reward <= 1 for reward in rewards):
        axes.set_ylim(0, 1.02)
    axes.legend(loc="lower right")
    return figure


def loss(rows: list[dict]) -> Figure:
    """Trajectory-balance loss in reward units over trainer updates."""
    scaled = [r["imbalance"] for r in rows]  # None where it was not finite
    known = [value for value in scaled if value is not None]
    first, last = (sorted(part)[len(part) // 2] if part else float("nan") for part in (known[:20], known[-20:]))
    title = f"The imbalance goes from {first:.2g} to {last:.2g} (medians of 20 updates)"
    figure, axes = figure_with_axes(title, "β² · TB loss [reward²]")
    axes.plot([r["step"] for r in rows], numbers(scaled), color=COLOURS["loss"])
    if min(known, default=0) > 0:
        axes.set_yscale("log")
    return figure


def staleness(rows: list[dict]) -> Figure:
    """Age of the trained trajectories over trainer updates."""
    mean = sum(r["staleness"] for r in rows) / len(rows)
    figure, axes = figure_with_axes(
        f"The trainer learns from data that is {mean:.0f} updates old on average", "staleness [trainer updates]"
    )
    axes.plot(
        [r["step"] for r in rows], [r["staleness_max"] for r in rows], color=COLOURS["max"], label="oldest of batch"
    )
    axes.plot([r["step"] for r in rows], [r["staleness"] for r in rows], color=COLOURS["mean"], label="mean of batch")
    axes.legend(loc="upper left")
    return figure


SPANS = {  # one colour per kind of span, in all figures: a searcher's blue to green, a trainer's red to yellow
    "import": "#4d4d4d",
    "load": "#7f7f7f",
    "generate": "#1f77b4",
    "add requests": "#9ecae1",
    "reward": "#17becf",
    "log pi_ref": "#2ca02c",
    "hand over": "#98df8a",
    "pull weights": "#9467bd",
    "sample": "#8c564b",
    "forward, backward": "#d62728",
    "step": "#ff7f0e",
    "publish": "#e377c2",
    "evaluate": "#ffd92f",
    "checkpoint": "#a6761d",
}
OTHER = "#bcbd22"
WAIT = {"facecolor": "white", "edgecolor": "#999999", "hatch": "////", "linewidth": 0.0}


def _gantt(axes: Axes, trace: list[dict], start: float, seconds: float) -> set[str]:
    """Draw a row per process, with a thin row below for its second thread. Returns the kinds of span in it."""
    names = {e["pid"]: e["args"]["name"] for e in trace if e["ph"] == "M"}
    inside = [
        e for e in trace if e["ph"] == "X" and start < (e["ts"] + e["dur"]) / 1e6 and e["ts"] / 1e6 < start + seconds
    ]
    for kind in sorted(
        {e["name"] for e in inside}, key=lambda kind: not kind.startswith("wait")
    ):  # waits first, so that work covers them
        look = WAIT if kind.startswith("wait") else {"facecolor": SPANS.get(kind, OTHER), "linewidth": 0}
        for pid in names:
            for track, (top, height) in enumerate([(-0.4, 0.64), (0.28, 0.12)]):
                mine = [e for e in inside if e["name"] == kind and e["pid"] == pid and e["tid"] == track]
                bars = [(e["ts"] / 1e6 - start, e["dur"] / 1e6) for e in mine]
                axes.broken_barh(bars, (pid + top, height), **look)
    axes.set(xlim=(0, seconds), ylim=(len(names) - 0.5, -0.5), yticks=list(names), yticklabels=list(names.values()))
    return {e["name"] for e in inside}


def timeline(traces: dict[str, tuple[list[dict], float]], seconds: float = 2.0) -> Figure:
    """Who does what: one panel per run, all on one time scale; hatched is waiting.

    Args:
        traces: title of the panel -> (events of timeline.json, start of the window as time.time()).
    """
    rows = [sum(e["ph"] == "M" for e in trace) for trace, _ in traces.values()]
    height = 1.1 + 0.45 * sum(rows) + 0.35 * len(rows)
    figure = Figure(figsize=(9, height), layout="constrained")
    panels = figure.subplots(len(rows), sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    kinds: set[str] = set()
    for axes, (title, (trace, start)) in zip(panels, traces.items(), strict=True):
        kinds |= _gantt(axes, trace, start, seconds)
        axes.set_title(title, loc="left", fontsize=10)
    panels[-1].set_xlabel("seconds")
    known = [kind for kind in SPANS if kind in kinds]
    others = sorted(kind for kind in kinds - set(SPANS) if not kind.startswith("wait"))
    legend = [Patch(facecolor=SPANS.get(kind, OTHER), label=kind) for kind in known + others]
    legend.append(Patch(**WAIT | {"linewidth": 0.5}, label="wait"))
    figure.legend(handles=legend, loc="outside lower center", ncols=5, fontsize=8)
    return figure


def towards_the_end(trace: list[dict], seconds: float) -> float:
    """Start of a window of `seconds` at whose end the last update ends, as time.time()."""
    return max((e["ts"] / 1e6 for e in trace if e["name"] == "publish"), default=0.0) - seconds


def read_trace(run: Path) -> list[dict]:
    """The events of a run's timeline."""
    return json.loads((run / "timeline.json").read_text())["traceEvents"]


def draw(run: Path) -> tuple[list[Path], list[str]]:
    """Draw all figures of a run's folder into its `figures/`.

    Returns the paths, and a line for each figure that could not be drawn: the others are drawn all the same.
    """
    rows = read_jsonl(run / "metrics.jsonl")
    if not rows:
        raise ValueError(f"{run}/metrics.jsonl has no update in it: nothing to draw")
    summary = read_json(run / "summary.json")
    figures: dict[str, Callable[[], Figure]] = {
        "accuracy": partial(reward_and_accuracy, rows, summary.get("evaluations", [])),
        "loss": partial(loss, rows),
        "staleness": partial(staleness, rows),
    }
    if (run / "timeline.json").exists():
        figures["timeline"] = partial(_last_two_seconds, run, summary["sync"])
    (run / "figures").mkdir(exist_ok=True)
    paths, problems = [], []
    for name, figure in figures.items():
        try:
            _save(figure(), run / "figures" / f"{name}.png")
            paths.append(run / "figures" / f"{name}.png")
        except Exception as error:
            problems.append(f"figures/{name}.png was not drawn: {why(error)}")
    return paths, problems


def _last_two_seconds(run: Path, sync: str) -> Figure:
    trace = read_trace(run)
    title = f"two seconds of a run with --sync {sync}: coloured is work, hatched is waiting"
    return timeline({title: (trace, towards_the_end(trace, 2.0))})


def _save(figure: Figure, path: Path) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    write_whole(path, picture.getvalue())


def main(run: Path) -> str | None:
    """Draw; returns the problem, if there is one."""
    try:
        with matplotlib.rc_context():
            matplotlib.rcdefaults()  # the figures are ours: no font, size or TeX of the user's
            paths, problems = draw(run)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except ValueError as error:
        return str(error)
    print(*paths, sep="\n")
    return "; ".join(problems) or None


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: python -m runtime.plots runs/<run>   (a folder with metrics.jsonl and summary.json)")
    sys.exit(main(Path(sys.argv[1])))
