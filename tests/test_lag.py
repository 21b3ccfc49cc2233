"""bench/lag.py measures what it says: at lag 0 all of its losses are one, and its saved table is whole."""

import json
from pathlib import Path

import pytest

from bench import lag

BENCH = Path(__file__).parents[1] / "bench" / "lag.py"


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
