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
    over = figures.curves_above({"a": ([1, 8], X[:2])}, {"a": ([1, 8], X[:2])}, "clip", ("up", "down"), "t", log=("x",))
    assert [(a.get_xscale(), a.get_yscale()) for a in over.axes] == [("log", "linear")] * 2
    assert [t.get_text() for t in over.axes[1].get_xticklabels()] == ["1", "8"]


def test_panels_are_stacked_over_one_x():
    panels = {"age": {"a": (X, X)}, "loss": {"a": (X, [1 + x for x in X]), "b": (X, X)}, "accuracy": {"a": (X, X)}}
    figure = figures.stacked(panels, "updates", "t", log=["loss"])
    fits(figure, "t")
    assert [a.get_ylabel() for a in figure.axes] == list(panels)
    assert [a.get_yscale() for a in figure.axes] == ["linear", "log", "linear"]
    assert [a.get_xlabel() for a in figure.axes] == ["", "", "updates"]


@pytest.mark.parametrize("top, want", [(1000.0, ["0.1", "1", "10", "100"]), (0.5, ["0.1", "0.2", "0.5"])])
def test_the_ticks_of_a_logarithmic_axis_are_plain_numbers(top, want):
    figure = figures.curves({"a": (X, np.geomspace(0.1, top, 30))}, "x", "y", "t", log="y")
    figure.savefig("/dev/null", format="png")  # draws, and so places the ticks
    (axes,) = figure.axes
    low, high = axes.get_ylim()
    shown = [t.get_text() for t, v in zip(axes.get_yticklabels(), axes.get_yticks(), strict=True) if low <= v <= high]
    assert shown[: len(want)] == want and not any(t.get_text() for t in axes.get_yticklabels(minor=True))


def test_the_lower_panel_names_the_curves_that_the_upper_one_lacks():
    both = {"eager": (X, X), "onpolicy": (X, X)}
    figure = figures.curves_above({"eager": (X, X)}, both, "seconds", ("up", "down"), "t")
    assert [text.get_text() for text in figure.axes[1].get_legend().get_texts()] == ["eager", "onpolicy"]
    assert figures.curves_above(both, {"eager": (X, X)}, "s", ("up", "down"), "t").axes[1].get_legend() is None


def test_two_panels_side_by_side_have_axes_of_their_own():
    panels = {"one": ({"a": (X, X)}, "updates"), "two": ({"b": (X[:9], X[:9])}, "seconds")}
    figure = figures.curves_beside(panels, ("age", "KL"), "t", dashed=("b",))
    fits(figure, "t")
    assert [(a.get_title(), a.get_xlabel(), a.get_ylabel()) for a in figure.axes] == [
        ("one", "updates", "age"),
        ("two", "seconds", "KL"),
    ]
    assert [a.lines[0].get_linestyle() for a in figure.axes] == ["-", "--"]


def test_a_tradeoff_has_a_label_under_its_points():
    figure = figures.tradeoff({"eager": ([1, 2], [3, 4])}, {"eager": ["k = 1", ""]}, "age", "speed", "t")
    fits(figure, "t")
    (axes,) = figure.axes
    assert [(text.get_text(), text.xy) for text in axes.texts] == [("k = 1", (1, 3)), ("", (2, 4))]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("age", "speed")


def test_played_stands_beside_measured():
    rows = {"eager": ([1.0, 1.5], 1.25), "barrier": ([2.0, 2.5], 3.0)}
    figure = figures.against_measured({"balanced": rows, "other": rows}, "seconds", "t")
    fits(figure, "t")
    axes = figure.axes[1]
    offsets = [dots.get_offsets().tolist() for dots in axes.collections]
    assert offsets == [[[1.0, 0], [1.5, 0]], [[1.25, 0]], [[2.0, 1], [2.5, 1]], [[3.0, 1]]]
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["eager", "barrier"]
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["measured", "played"]


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
