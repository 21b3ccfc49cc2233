"""The notebooks' figures: curves, histograms, and timelines of the fake clock."""

import io
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from runtime.plots import figure_with_axes, timeline

METHODS = {  # one colour per method, in every notebook; purple is age, as in runtime/plots.py
    "TB": "#1f77b4",
    "policy gradient": "#ff7f0e",
    "clipped IS": "#2ca02c",
    "frozen KL": "#d62728",
    "frozen KL + IS": "#b35806",
    "V-trace": "#e6ab02",
    "V-trace, exact critic": "#222222",
    "onpolicy": "#7f7f7f",
    "barrier": "#8c564b",
    "eager": "#17a2b8",
    "stored": "#9a9a9a",
    "drawn": "#7b4fa6",
    "default": "#1f77b4",
    "m = 0": "#9c9f1e",
    "k = 100": "#d62728",
    "m = 0, k = 100": "#1b7837",
    "m = 1, k = 100": "#b35806",
    "m = 0.5, k = 100": "#17a2b8",
    "pool of 320, k = 100": "#762a83",
    "k = 20": "#e6ab02",
}
OTHERS = ("#222222", "#1b7837", "#b35806", "#2166ac", "#999999", "#762a83")  # for other curves, by their place


def picture(figure):
    """A figure as a PNG, for a notebook to show."""
    from IPython.display import Image

    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    return Image(data.getvalue())


def smooth(values, width: int = 10):
    """Means of `width` neighbours: [n] -> [n - width + 1]."""
    return np.convolve(values, np.ones(width) / width, "valid")


def _colour(name: str, place: int) -> str:
    return METHODS.get(name) or OTHERS[place % len(OTHERS)]


def _draw_curves(axes, series: dict, dashed: tuple[str, ...] = ()) -> None:
    """Each curve [n]; or [seeds, n] as a band, with a thin line per seed and the median on top."""
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
        dashed: names of curves to draw dashed, so that curves below them stay visible.
    """
    figure, axes = figure_with_axes(title, ylabel)
    _draw_curves(axes, series, dashed)
    axes.set(xlabel=xlabel)
    for axis in log:
        _logarithmic(axes, axis)
    _tick_each(axes, series)
    axes.legend()
    return figure


def _logarithmic(axes, axis: str) -> None:
    """A logarithmic scale whose ticks are plain numbers: 0.01, not 10 to the power of -2."""
    getattr(axes, f"set_{axis}scale")("log")
    ticks = getattr(axes, f"{axis}axis")
    low, high = ticks.get_view_interval()
    few = np.log10(high / low) < 1.5  # then powers of ten alone are too few
    ticks.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
    ticks.set_major_formatter(FuncFormatter(_plain))
    ticks.set_minor_formatter(NullFormatter())


def _plain(value: float, _: int) -> str:
    return f"{value:g}"


def _tick_each(axes, series: dict) -> None:
    """A tick at each x, if there are few."""
    x = list(next(iter(series.values()))[0])
    if len(x) < 20:
        axes.set_xticks(x, [f"{value:g}" for value in x])
        axes.xaxis.minorticks_off()


def curves_above(top: dict, bottom: dict, xlabel: str, ylabels: tuple[str, str], title: str, log: Sequence[str] = ()):
    """Two panels of `curves` over one x axis; `log`: those with a logarithmic y axis, "top", "bottom", or "x"."""
    names = dict(zip(("top", "bottom"), ylabels, strict=True))
    panels = dict(zip(ylabels, (top, bottom), strict=True))
    return stacked(panels, xlabel, title, [names.get(name, name) for name in log])


def stacked(panels: dict, xlabel: str, title: str, log: Sequence[str] = ()):
    """Panels of `curves` over one x axis, by their y labels; `log`: those with a logarithmic y axis, and "x"."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    known: set[str] = set()
    for axes, (ylabel, series) in zip(figure.subplots(len(panels), sharex=True), panels.items(), strict=True):
        _draw_curves(axes, series)
        axes.set_ylabel(ylabel, fontsize=8 if len(panels) > 2 else None)
        for axis in ["y"] * (ylabel in log) + ["x"] * ("x" in log):
            _logarithmic(axes, axis)
        if set(series) - known:  # a legend where a name comes for the first time
            axes.legend(fontsize=8, ncols=3)
            known |= set(series)
    figure.axes[0].set_title(title)
    figure.axes[-1].set_xlabel(xlabel)
    _tick_each(figure.axes[-1], next(iter(panels.values())))
    return figure


def against_target(log_target, reward, policies: dict, title: str):
    """Each sequence's log-probability against the exact target's, one panel per policy; balance is the diagonal."""
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
    """Share of trajectories by some number; each panel holds values by name."""
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
            _logarithmic(axes, "y")
    figure.axes[0].set_ylabel("share of trajectories")
    figure.axes[0].legend()
    figure.suptitle(title)
    return figure


def gantt(stories: dict, seconds: float, title: str, start: float = 0.0):
    """The timelines of stories from notebooks/fake_clock.py, one panel per story, as small as a notebook needs."""
    figure = timeline({name: (story.trace(), start) for name, story in stories.items()}, seconds)
    figure.set_size_inches(8, min(4.0, 1.2 + 0.4 * sum(len(s.spans) for s in stories.values())))
    for axes in figure.axes:
        axes.tick_params(labelsize=8)
        axes.title.set_fontsize(9)
    figure.suptitle(title)
    return figure


def curves_beside(panels: dict, ylabels: tuple[str, str], title: str, dashed: tuple[str, ...] = ()):
    """Two panels of `curves` side by side, by their titles: (series, xlabel)."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    for axes, (name, (series, xlabel)), ylabel in zip(figure.subplots(1, 2), panels.items(), ylabels, strict=True):
        _draw_curves(axes, series, dashed)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.set_title(name, fontsize=10)
        axes.legend(fontsize=8)
    figure.suptitle(title)
    return figure


def tradeoff(series: dict, labels: dict, xlabel: str, ylabel: str, title: str):
    """Curves by name: (x [n], y [n]), and under each of their points its label, which may be empty."""
    figure, axes = figure_with_axes(title, ylabel)
    _draw_curves(axes, series)
    for place, (name, (x, y)) in enumerate(series.items()):
        for label, *point in zip(labels[name], x, y, strict=True):
            style = {"fontsize": 8, "color": _colour(name, place), "textcoords": "offset points"}
            axes.annotate(label, point, (4, -12), **style)
    axes.set(xlabel=xlabel)
    axes.margins(0.08)
    axes.legend()
    return figure


def against_measured(panels: dict, xlabel: str, title: str):
    """Measured numbers beside played ones; each panel holds, by name, (measured [repeats], played)."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    for axes, (name, rows) in zip(figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
        for place, (measured, played) in enumerate(rows.values()):
            axes.plot([np.median(measured), played], [place, place], color="#999999", linewidth=1)
            axes.scatter(measured, [place] * len(measured), s=22, color="#222222", label="measured")
            axes.scatter([played], [place], s=60, marker="D", facecolors="none", edgecolors="#d62728", label="played")
        axes.set(xlabel=xlabel, yticks=range(len(rows)), yticklabels=list(rows))
        axes.set_title(name, fontsize=10)
        axes.grid(alpha=0.3)
    figure.axes[0].invert_yaxis()
    figure.axes[-1].legend(*([h[:2] for h in figure.axes[-1].get_legend_handles_labels()]))
    figure.suptitle(title)
    return figure
