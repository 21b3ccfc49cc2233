"""The notebooks' figures hold what they were given, and fit on a page."""

import numpy as np
import pytest

from notebooks import figures

X = list(range(30))


def fits(figure, title: str) -> None:
    assert tuple(figure.get_size_inches()) <= (8, 4)
    titles = [axes.get_title() for axes in figure.axes] + [figure.get_suptitle()]
    assert title in titles


def test_smooth_is_the_mean_of_neighbours():
    assert figures.smooth([1, 2, 3, 6], 2).tolist() == [1.5, 2.5, 4.5]


def test_curves_have_a_colour_a_method_a_band_and_a_line_a_seed():
    y = np.random.default_rng(0).random((3, 30)) + 0.1
    figure = figures.curves({"TB": (X, y), "frozen KL": (X, y[0])}, "trainer updates", "y", "found", log="y")
    fits(figure, "found")
    (axes,) = figure.axes
    assert len(axes.lines) == 3 + 1 + 1 and len(axes.collections) == 1  # thin lines, median, the other; a band
    median = next(line for line in axes.lines if line.get_label() == "TB")
    assert median.get_color() == figures.METHODS["TB"] and np.allclose(median.get_ydata(), np.median(y, 0))
    assert axes.get_xlabel() == "trainer updates" and axes.get_yscale() == "log"


def test_few_points_have_ticks_of_their_own():
    figure = figures.curves({"a": ([1, 5, 20], [1, 2, 3])}, "k", "y", "t", log="x")
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == ["1", "5", "20"]


def test_two_panels_share_their_x():
    figure = figures.curves_above({"eager": (X, X)}, {"eager": (X, X)}, "seconds", ("up", "down"), "t", log=("bottom",))
    fits(figure, "t")
    assert [a.get_ylabel() for a in figure.axes] == ["up", "down"]
    assert [a.get_yscale() for a in figure.axes] == ["linear", "log"]


def test_histograms_are_shares():
    figure = figures.histograms({"m = 0": {"stored": [0, 0, 1, 1], "drawn": [1]}}, [0, 1, 2], "age", "t")
    fits(figure, "t")
    heights = [patch.get_height() for patch in figure.axes[0].patches if patch.__class__.__name__ == "Rectangle"]
    assert heights == [0.5, 0.5, 0.0, 1.0]


def test_balance_is_the_diagonal():
    target = np.log([0.1, 0.2, 0.7])
    figure = figures.against_target(target, [0, 0.5, 1], {"before": target - 1, "after": target}, "t")
    fits(figure, "t")
    (dots,) = figure.axes[1].collections
    assert np.allclose(dots.get_offsets()[:, 0], dots.get_offsets()[:, 1])
    (line,) = figure.axes[0].lines
    assert np.allclose(line.get_xdata(), line.get_ydata())


@pytest.mark.slow
def test_a_picture_is_a_png():
    figure = figures.curves({"a": (X, X)}, "x", "y", "t")
    assert figures.picture(figure).data.startswith(b"\x89PNG")
