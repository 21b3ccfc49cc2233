"""bench/lag.py measures what it says: at lag 0 all of its losses are one, and its saved table is whole."""

import json
from pathlib import Path
from statistics import median

import pytest

from bench import lag

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench" / "lag.py"


def test_at_lag_0_all_losses_are_one_and_they_learn():
    """By SGD: Adam magnifies rounding once the gradient is nearly zero."""
    rows = {loss: lag.run(loss, "sgd", 0.25, 200, 1) for loss in lag.COMPARED}
    fresh = {loss: [r["kl"] for r in rows[loss] if r["lag"] == 0] for loss in rows}
    for loss in rows:
        assert fresh[loss] == pytest.approx(fresh["TB"], rel=0.02), loss
    assert max(fresh["TB"]) < 0.9 * rows["TB"][0]["start"]
    stale = {loss: [r["kl"] for r in rows[loss] if r["lag"] == 200] for loss in rows}
    assert stale["TB"] != pytest.approx(fresh["TB"], rel=1e-3)
    assert stale["frozen KL"][-1] > 2 * stale["TB"][-1]  # the contrast, at the largest rate


def test_the_saved_table_is_whole_and_anonymous():
    text = (BENCH.parent / "results" / "lag.json").read_text()
    result = json.loads(text)
    settings = {(r["optimizer"], r["beta"], r["lr"], r["loss"], r["lag"]) for r in result["rows"]}
    assert len(settings) == len(result["rows"]) == 6 * len(lag.BETAS) * len(lag.COMPARED) * len(lag.LAGS)
    assert all(len(r["kl_seeds"]) == result["settings"]["seeds"] == 3 for r in result["rows"])
    assert "/home" not in text and "/tmp" not in text and lag.platform.node() not in text


def test_what_is_told_of_the_saved_table():
    """docs/losses.md and notebook 5 cite it."""
    rows = json.loads((BENCH.parent / "results" / "lag.json").read_text())["rows"]
    kl = {(r["optimizer"], r["beta"], r["lr"], r["loss"], r["lag"]): r["kl"] for r in rows}
    start = {r["beta"]: r["start"] for r in rows}
    settings = sorted({key[:3] for key in kl})
    lost = [s for s in settings if all((kl[*s, loss, 0] or 1) > 100 * start[s[1]] for loss in lag.COMPARED)]
    assert lost == [("sgd", 4.0, 3.0)] and len(settings) == 24
    backwards = [s for s in settings if s not in lost and kl[*s, "TB", 0] > start[s[1]]]
    assert backwards == [("adam", 4.0, 0.05)]

    def ratios(loss: str, stale: int) -> dict:
        return {s: kl[*s, loss, stale] / kl[*s, "TB", stale] for s in settings if s not in lost}

    clipped = [*ratios("clipped IS", 20).values(), *ratios("clipped IS", 200).values()]
    flat = [kl[*s, "TB", stale] / kl[*s, "TB", 0] for s in settings if s not in lost for stale in (20, 200)]
    tied = [s for s, ratio in ratios("frozen KL", 20).items() if ratio < 1.5]
    numbers = {
        "median at lag 20": f"{median(ratios('frozen KL', 20).values()):.0f} times",
        "median at lag 200": f"{median(ratios('frozen KL', 200).values()):.0f} times",
        "flat in the lag": f"{min(flat):.1f} to {max(flat):.1f} times",
        "a tie both ways": f"{min(clipped):.1f} to {max(clipped):.1f} times",
        "where all are lost": f"{kl['sgd', 4.0, 3.0, 'TB', 0]:.1f} nats",
        "where TB goes backwards": f"{kl['adam', 4.0, 0.05, 'TB', 0]:.3f}",
        "from": f"{start[4.0]:.4f}",
    }
    for place in (ROOT / "docs" / "losses.md", ROOT / "notebooks" / "5_ways_to_be_off_policy.py"):
        text = " ".join(place.read_text().replace("\n# ", "\n").split())
        assert {what: number for what, number in numbers.items() if number not in text} == {}, place.name
    docs = " ".join((ROOT / "docs" / "losses.md").read_text().split())
    assert f"{len(tied)} settings" in docs and f"{min(kl[*s, 'TB', 0] for s in tied):.3f} nats" in docs
