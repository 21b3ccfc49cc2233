"""The benches' own arithmetic, their small parts, and that README and docs show what they saved."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "bench"
RESULTS = BENCH / "results"


def module(name):
    return importlib.import_module(f"bench.{name}")


def test_percentile_and_table():
    common = module("common")
    assert common.percentile([3, 1, 2, 4], 0.5) == 2
    assert common.percentile(range(1, 101), 0.99) == 99 and common.percentile([7], 0.99) == 7
    assert common.table(["a", "b"], [["x", 1]]) == "| a | b |\n| --- | ---: |\n| x | 1 |"


def test_results_are_written_and_read_back(tmp_path, monkeypatch):
    common = module("common")
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    common.save("x", {"goal": {"1": 2.5}}, {"a": 1}, [{"r": 1}, {"r": 2}], 0.0)
    found = common.load("x")
    assert found["goal"] == {"1": 2.5} and found["settings"] == {"a": 1} and found["rows"] == [{"r": 1}, {"r": 2}]
    assert {"date", "cpu", "cores", "python", "torch"} <= set(found["machine"])


def test_the_best_settings_are_those_with_the_least_median():
    bench = module("time_to_accuracy")
    rows = [{"lr": 1, "seconds": s} for s in (5.0, 5.0, None)] + [{"lr": 2, "seconds": s} for s in (6.0, 1.0, 6.0)]
    assert bench.best(rows)["lr"] == 1
    assert bench.best(rows[1:])["lr"] == 2  # one that is not reached is endless: the median of [5, None]
    other = [
        {"lr": 1, "seconds": 9.0, "threads": 2, "options": {}},
        {"lr": 1, "seconds": 3.0, "threads": 1, "options": {}},
    ]
    assert bench.best(other)["threads"] == 1


def test_speedups_are_paired_by_seed():
    bench = module("time_to_accuracy")
    rows = [
        {"system": "eager TBA", "split": "heldout", "seed": s, "seconds": t} for s, t in ((0, 1.0), (1, 2.0), (2, 4.0))
    ]
    rows += [
        {"system": "TRL GRPO", "split": "heldout", "seed": s, "seconds": t} for s, t in ((2, 4.0), (1, 4.0), (0, 3.0))
    ]
    rows.append({"system": "TRL GRPO", "split": "validation", "seed": 0, "seconds": 99.0})
    assert bench.speedups(rows) == {"trl": 2.0}  # of 3, 2 and 1


def test_the_bound_of_overlap():
    bench = module("time_to_accuracy")
    spans = {"serial": {"generate": 2.0, "log pi_ref": 1.0, "forward, backward": 1.3, "step": 0.2, "evaluate": 9.0}}
    assert bench.bound({"spans": spans}, 1.2) == pytest.approx((3.0 + 1.5) / 3.0 * 1.2)


def test_decoupling_compares_with_the_slower_side():
    bench = module("decoupling")
    rows = [
        {"case": "balanced", "what": "eager, k = 1", "seconds": s, "over_limit": o}
        for s, o in ((1, 1.0), (2, 1.2), (3, 1.1))
    ]
    assert bench.figures(rows) == {"eager_over_limit": 1.1}
    assert "| eager, k = 1 | 2.0 | 1.10 |" in bench.text(rows)


def test_digits_are_worked_out():
    task = module("digits").make_task()
    prompt = "9+1 2+3 4+4 5+6 0+0 1+1 1+1 1+1 1+1 1+1 1+1 1+1 "
    assert task.solve(prompt).startswith("=10 =06 =08 =11 =01 =02 ") and len(task.solve(prompt)) == 48
    assert task.solve(prompt, careless=True).startswith("=10 =05 =08 =11 =00 ")
    assert task.reward(prompt, task.solve(prompt)) == 1 and task.reward(prompt, task.solve(prompt, True)) == 0
    assert task.reward(prompt, task.solve(prompt)[:-1]) == 0 and task.reward(prompt, "") == 0
    splits = [set(task.train), set(task.validation), set(task.heldout)]
    assert sum(map(len, splits)) == len(set.union(*splits)) == 9000
    without = np.mean([task.solve(p) == task.solve(p, True) for p in task.heldout])
    assert 0.25 < without < 0.45


def test_the_stand_in_is_an_engine():
    engine = module("stand_in").StandIn(1e6, 0)
    engine.add(3, np.array([5], np.int32), 4)
    engine.add(4, np.array([5], np.int32), 2)
    assert engine.in_flight == 6
    ((key, answers),) = engine.step()
    assert key == 3 and len(answers) == 4 and engine.in_flight == 2
    assert all(len(a.tokens) == len(a.log_mu) == 4 for a in answers)


def test_a_batch_of_the_trainers_bench_differs_as_it_says():
    bench = module("trainer")
    groups = bench.batch((3, 16, 6, 4, 5), np.random.default_rng(0))
    assert len(groups) == 3 and all(len(g) == 16 and len({t.response.tobytes() for t in g}) == 5 for g in groups)


def test_a_list_per_prompt_holds_what_it_may():
    bench = module("buffer")
    lists, writer = bench.Lists(capacity=64, per_prompt=32), bench.Writer(3)
    for _ in range(12):
        lists.add_packed(writer.group())
    assert len(lists.all) == sum(map(len, lists.prompts.values())) <= 64
    assert max(map(len, lists.prompts.values())) <= 32
    assert len(lists.sample_packed(2, 16)[0]) == 32 and lists.sample_packed(4, 16) is None


# --- docs and README ------------------------------------------------------------------------------------------------


def saved(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def page(name="docs/measurements.md"):
    return " ".join((ROOT / name).read_text().split())


@pytest.mark.parametrize("name", ["decoupling", "scale", "weights", "trainer", "architectures"])
def test_the_saved_table_is_shown(name):
    assert module(name).text(saved(name)["rows"]) in (ROOT / "docs/measurements.md").read_text()


def test_the_buffers_table_is_shown():
    rows = [r for r in saved("buffer")["rows"] if r.get("part") == "served"]
    assert rows and module("buffer").served_table(rows) in (ROOT / "docs/measurements.md").read_text()


def test_the_seconds_to_accuracy_are_shown():
    assert module("time_to_accuracy").tables(saved("time_to_accuracy")) in (ROOT / "docs/measurements.md").read_text()


def goals():
    """What is said beside the tables, with the saved figures in their places."""
    d, t, w, s = (saved(name) for name in ("decoupling", "time_to_accuracy", "weights", "scale"))
    worst = max(s["step_time_over_one_searcher"].values())
    training = [r for r in d["rows"] if (r["case"], r["what"]) == ("unbalanced", "training alone")]
    alone = module("common").median(r["over_limit"] for r in training)
    trainer, buffer = s["trainer_us_a_trajectory"], s["buffer_us_a_trajectory"]
    return [
        f"At k = 1, the default, `eager` takes {d['eager_over_limit']:.2f} times the limit",
        f"At k = 4, `eager` takes {d['eager_k4_over_limit']:.2f} times the limit. "
        f"It also takes {d['eager_k4_over_uncoupled']:.2f} times as long",
        f"On the default task training takes {alone:.2f} of the time of generation",
        f"`eager` takes {d['eager_k4_over_limit_unbalanced']:.2f} times the limit, and "
        f"{d['eager_k4_over_uncoupled_unbalanced']:.2f} times the uncoupled pair. "
        f"`onpolicy` takes {d['onpolicy_over_limit_unbalanced']:.2f} times the limit too",
        f"| TRL's GRPOTrainer | {t['speedup_vs_trl']:.2f} |",
        f"| `onpolicy` TB | {t['speedup_vs_onpolicy_tb']:.2f} |",
        f"| `onpolicy` GRPO | {t['speedup_vs_onpolicy_grpo']:.2f} |",
        f"| `eager` with vLLM | {t['speedup_vs_vllm_eager']:.2f} |",
        f"the lead over TRL is {t['speedup_vs_trl']:.2f}",
        f"Its start-up takes {t['startup_seconds_trl']} s",
        f"Per update it has {t['long_speedup_an_update']:.2f} times the speed of `onpolicy`",
        f"at {t['streaming_gain']:.2f} of the speed of one that drains",
        f"could give {t['long_bound']:.2f} times the speed of `onpolicy`. `eager` has {t['long_speedup']:.2f}. "
        f"That is {t['share_of_bound_generation_bound']:.2f} of the possible speed",
        f"The publication of 1M takes {w['publish_over_copy']['1M']:.2f} copies",
        f"The pull of 135M takes {w['pull_over_copy_and_reload']['135M']:.2f} times copy and reload",
        f"takes up to {worst:.2f} times as long as beside one searcher",
        f"| trainer, each answer trained once | {trainer:.0f} | {1e6 / trainer:,.0f} |",
        f"| the buffer's Manager, draws included | {buffer:.0f} | {1e6 / buffer:,.0f} |",
        f"| a searcher's Python | {s['searcher_us_a_trajectory']:.0f} |",
        f"when each writes {1e6 / buffer / 15:,.0f} trajectories",
    ]


def test_the_goals_figures_are_shown():
    text = page()
    assert [said for said in goals() if " ".join(said.split()) not in text] == []


def test_readme_has_the_goals_figures():
    """README's results are the saved ones, row by row."""
    d, t, s = (saved(name) for name in ("decoupling", "time_to_accuracy", "scale"))
    step = saved("trainer")["step_over_bare"]["16 x 16 answers of 4 tokens"]
    at_least = {  # row -> measured, goal
        "Seconds to .90 accuracy": (t["speedup_vs_trl"], "1.5"),
        "Speed-up over `onpolicy` with long answers": (t["share_of_bound_generation_bound"], "0.9"),
    }
    at_most = {
        "Wall time of `eager`": (d["eager_over_limit"], "1.05"),
        "The same at k = 4": (d["eager_k4_over_limit"], "1.05"),
        "One training step": (step, "1.10"),
        "Step time beside up to 15 searchers": (max(s["step_time_over_one_searcher"].values()), "1.10"),
    }
    lines = (ROOT / "README.md").read_text().splitlines()
    for start, (value, goal) in (at_least | at_most).items():
        (row,) = [line for line in lines if line.startswith(f"| {start}")]
        missed = value < float(goal) if start in at_least else value > float(goal)
        assert row.endswith(f" | {value:.2f} | {goal}{', missed' if missed else ''} |"), row
