"""Every figure of a run, drawn from its folder: `python -m runtime.plots runs/<run>`."""

import json
import sys
from pathlib import Path

from runtime.metrics import read_jsonl

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


SPANS = {  # one colour a kind of span, everywhere: blue to green is a searcher's work, red to yellow a trainer's
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


def _gantt(axes, trace: list[dict], start: float, seconds: float) -> set[str]:
    """A row a process (a thin one below it for its other thread); returns the kinds of span that are there."""
    names = {e["pid"]: e["args"]["name"] for e in trace if e["ph"] == "M"}
    inside = [
        e for e in trace if e["ph"] == "X" and start < (e["ts"] + e["dur"]) / 1e6 and e["ts"] / 1e6 < start + seconds
    ]
    for kind in sorted(
        {e["name"] for e in inside}, key=lambda kind: not kind.startswith("wait")
    ):  # work is above waits
        look = WAIT if kind.startswith("wait") else {"facecolor": SPANS.get(kind, OTHER), "linewidth": 0}
        for pid in names:
            for track, (top, height) in enumerate([(-0.4, 0.64), (0.28, 0.12)]):
                mine = [e for e in inside if e["name"] == kind and e["pid"] == pid and e["tid"] == track]
                bars = [(e["ts"] / 1e6 - start, e["dur"] / 1e6) for e in mine]
                axes.broken_barh(bars, (pid + top, height), **look)
    axes.set(xlim=(0, seconds), ylim=(len(names) - 0.5, -0.5), yticks=list(names), yticklabels=list(names.values()))
    return {e["name"] for e in inside}


def timeline(traces: dict[str, tuple[list[dict], float]], seconds: float = 2.0):
    """Who does what, a panel a run on one scale of time; hatched is waiting.

    Args:
        traces: title of the panel -> (events of timeline.json, start of the window as time.time()).
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

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
    """Start of the last `seconds` before the last update ended, as time.time()."""
    return max((e["ts"] / 1e6 for e in trace if e["name"] == "publish"), default=0.0) - seconds


def read_trace(run: Path) -> list[dict]:
    """The events of a run's timeline."""
    return json.loads((run / "timeline.json").read_text())["traceEvents"]


def draw(run: Path) -> list[Path]:
    """Draw all figures of a run's folder into its `figures/`; returns their paths."""
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
        trace = read_trace(run)
        title = f"two seconds of a run with --sync {summary['sync']}: coloured is work, hatched is waiting"
        figures["timeline"] = timeline({title: (trace, towards_the_end(trace, 2.0))})
    (run / "figures").mkdir(exist_ok=True)
    paths = []
    for name, figure in figures.items():
        paths.append(run / "figures" / f"{name}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


# --- the notebooks' figures -----------------------------------------------------------------------------------------

METHODS = {  # one colour a method, in every notebook; purple is age, as in staleness() above
    "TB": "#1f77b4",
    "policy gradient": "#ff7f0e",
    "clipped IS": "#2ca02c",
    "frozen KL": "#d62728",
    "V-trace": "#e6ab02",
    "onpolicy": "#7f7f7f",
    "barrier": "#8c564b",
    "eager": "#17a2b8",
    "stored": "#c5b0d5",
    "drawn": "#7b4fa6",
    "default": "#1f77b4",
    "m = 0": "#9c9f1e",
    "k = 100": "#e377c2",
    "β = 0.002": "#d62728",
}
OTHERS = ("#222222", "#1b7837", "#b35806", "#2166ac", "#999999", "#762a83")  # for what is no method, by its place


def picture(figure):
    """A figure as a notebook shows it: a PNG."""
    import io

    from IPython.display import Image

    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    return Image(data.getvalue())


def smooth(values, width: int = 10):
    """Means of `width` neighbours: [n] -> [n - width + 1]."""
    import numpy as np

    return np.convolve(values, np.ones(width) / width, "valid")


def _colour(name: str, place: int) -> str:
    return METHODS.get(name) or OTHERS[place % len(OTHERS)]


def _draw_curves(axes, series: dict, dashed: tuple[str, ...] = ()) -> None:
    """Each curve [n], or [seeds, n] as a band with a thin line a seed and the median on top."""
    import numpy as np

    for place, (name, (x, y)) in enumerate(series.items()):
        colour, y = _colour(name, place), np.atleast_2d(np.asarray(y, float))
        if len(y) > 1:
            axes.fill_between(x, y.min(0), y.max(0), color=colour, alpha=0.15, linewidth=0)
            axes.plot(x, y.T, color=colour, alpha=0.4, linewidth=0.5)
        style = (0, (4, 4)) if name in dashed else "-"
        marker = "o" if len(x) < 20 else None
        width = 2 if len(x) < 500 else 1.2
        axes.plot(x, np.median(y, 0), color=colour, linewidth=width, linestyle=style, marker=marker, ms=4, label=name)
    axes.grid(alpha=0.3)


def curves(series: dict, xlabel: str, ylabel: str, title: str, log: str = "", dashed: tuple[str, ...] = ()):
    """Curves by name: (x [n], y [n] or [seeds, n]).

    Args:
        log: axes with a logarithmic scale: "", "x", "y" or "xy".
        dashed: names of curves to draw dashed, so that what lies below them is seen.
    """
    figure, axes = _axes(title, ylabel)
    _draw_curves(axes, series, dashed)
    axes.set(xlabel=xlabel)
    for axis in log:
        getattr(axes, f"set_{axis}scale")("log")
    _tick_each(axes, series)
    axes.legend()
    return figure


def _tick_each(axes, series: dict) -> None:
    """A tick at each x, where there are few."""
    x = list(next(iter(series.values()))[0])
    if len(x) < 20:
        axes.set_xticks(x, [f"{value:g}" for value in x])
        axes.xaxis.minorticks_off()


def curves_above(top: dict, bottom: dict, xlabel: str, ylabels: tuple[str, str], title: str, log: str = ""):
    """Two panels over one x axis, of curves as in `curves`; `log`: names of panels with a logarithmic y axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    panels = figure.subplots(2, sharex=True)
    for axes, series, ylabel, name in zip(panels, (top, bottom), ylabels, ("top", "bottom"), strict=True):
        _draw_curves(axes, series)
        axes.set_ylabel(ylabel)
        if name in log:
            axes.set_yscale("log")
    panels[0].set_title(title)
    panels[0].legend(fontsize=8, ncols=3)
    panels[1].set_xlabel(xlabel)
    _tick_each(panels[1], top)
    return figure


def against_target(log_target, reward, policies: dict, title: str):
    """Each sequence's log-probability against that of the exact target, a panel a policy; balance is the diagonal."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    panels = figure.subplots(1, len(policies), sharex=True, sharey=True)
    low, high = float(log_target.min()) - 1, 0.5
    for axes, (name, log_pi) in zip(panels, policies.items(), strict=True):
        axes.plot([low, high], [low, high], color="black", linewidth=0.8)
        dots = axes.scatter(log_target, log_pi, s=10, c=reward, cmap="viridis", vmin=0, vmax=1)
        axes.set(title=name, xlabel="log of the target [nats]")
        axes.title.set_fontsize(10)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("log of the policy [nats]")
    figure.colorbar(dots, ax=panels, label="reward")
    figure.suptitle(title)
    return figure


def histograms(panels: dict, bins, xlabel: str, title: str, log: bool = False):
    """Share of trajectories by a number, a panel for each entry, which holds values by name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    for axes, (name, series) in zip(
        figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels.items(), strict=True
    ):
        for place, (what, values) in enumerate(series.items()):
            weights, colour = [1 / len(values)] * len(values), _colour(what, place)
            axes.hist(values, bins, weights=weights, color=colour, alpha=0.35)
            axes.hist(values, bins, weights=weights, color=colour, histtype="step", linewidth=1.5, label=what)
        axes.set(xlabel=xlabel, title=name)
        axes.title.set_fontsize(10)
        axes.grid(alpha=0.3)
        if log:
            axes.set_yscale("log")
    figure.axes[0].set_ylabel("share of trajectories")
    figure.axes[0].legend()
    figure.suptitle(title)
    return figure


def gantt(stories: dict, seconds: float, title: str, start: float = 0.0):
    """Who does what while fake_clock plays, a panel a story: the timeline of a real run, drawn small."""
    figure = timeline({name: (story.trace(), start) for name, story in stories.items()}, seconds)
    figure.set_size_inches(8, min(4.0, 1.2 + 0.4 * sum(len(s.spans) for s in stories.values())))
    for axes in figure.axes:
        axes.tick_params(labelsize=8)
        axes.title.set_fontsize(9)
    figure.suptitle(title)
    return figure


if __name__ == "__main__":
    if len(sys.argv) != 2 or not all((Path(sys.argv[1]) / f).exists() for f in ("metrics.jsonl", "summary.json")):
        sys.exit("usage: python -m runtime.plots runs/<run>   (a folder with metrics.jsonl and summary.json)")
    for path in draw(Path(sys.argv[1])):
        print(path)
