"""The notebooks' figures: curves, histograms, and timelines of the fake clock."""

import io

import numpy as np
from matplotlib.figure import Figure

from runtime.plots import figure_with_axes, timeline

METHODS = {  # one colour per method, in every notebook; purple is age, as in runtime/plots.py
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
        getattr(axes, f"set_{axis}scale")("log")
    _tick_each(axes, series)
    axes.legend()
    return figure


def _tick_each(axes, series: dict) -> None:
    """A tick at each x, if there are few."""
    x = list(next(iter(series.values()))[0])
    if len(x) < 20:
        axes.set_xticks(x, [f"{value:g}" for value in x])
        axes.xaxis.minorticks_off()


def curves_above(top: dict, bottom: dict, xlabel: str, ylabels: tuple[str, str], title: str, log: str = ""):
    """Two panels of `curves` over one x axis; `log`: names of panels with a logarithmic y axis."""
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
            axes.set_yscale("log")
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
