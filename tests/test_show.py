"""Clocks, the timeline, the table on the screen, and the sentence at a run's end that says who held up whom."""

import json
import math

import pytest

from config import Config
from runtime import metrics
from runtime.metrics import Clock, merge_timeline, read_spans, save_spans
from runtime.plots import SPANS, draw, timeline
from runtime.show import COLUMNS, lines, share, shares
from runtime.summary import LEAST, bottleneck, run_summary, summary_text, training_summary
from sync import backlog, may_update


def summary(trainer=1.0, searchers=(1.0,), used=1.5, sync="eager", ratio=2.0, waits=()):
    return {
        "sync": sync,
        "busy_trainer": trainer,
        "busy_searchers": list(searchers),
        "trajectories_trained": int(1000 * used),
        "trajectories_generated": 1000,
        "replay_ratio": ratio,
        "waits": {"trainer": dict(waits)},
        "updates_measured": 100,
        "seconds_measured": 60.0,
    }


CASES = [  # summary, side, what the sentence says
    (summary(), "neither", "trained 1.5 times on average, at most 2 are allowed"),
    (summary(used=0.95, ratio=1.0), "neither", "at most 1 are allowed"),
    (summary(used=0.45, ratio=0.5), "neither", "at most 0.5 are allowed"),
    (summary(trainer=0.96, searchers=(0.96, 0.96)), "neither", "neither side waited"),
    (summary(used=0.5), "trainer", "fewer searchers"),
    (summary(used=0.2, ratio=0.5), "trainer", "0.2 times"),
    (summary(trainer=0.7, waits={"wait for answers": 3, "wait for prefetch": 1}), "searchers", "more searchers"),
    (summary(trainer=0.7, waits={"wait for prompts": 3}), "searchers", "higher --max-staleness"),
    (summary(trainer=0.7, waits={"wait for prefetch": 3}), "searchers", "smaller batches"),
    (summary(trainer=0.7), "searchers", "waited 30% of the time"),
    (summary(0.9, (0.99,), sync="barrier", waits={"wait for sync": 3}), "searchers", "a larger --sync-every"),
    (summary(0.6, (0.5, 0.7), sync="barrier", waits={"wait for sync": 3}), "coupling", "the searchers 40%"),
    (summary(0.98, (0.4, 0.6), sync="barrier"), "trainer", "the searchers waited 50%"),
    (summary(sync="onpolicy", searchers=()), "coupling", "--sync eager"),
]


@pytest.mark.parametrize("given, side, says", CASES)
def test_who_is_the_bottleneck_and_what_to_change(given, side, says):
    got, sentence = bottleneck(given)
    assert got == side and says in sentence and sentence.endswith(".")


NOT_MEASURED = {
    "a searcher that never reported": {"busy_searchers": [0.9, math.nan]},
    "no batch": {"busy_trainer": None},
    "one batch only": {"updates_measured": 1, "seconds_measured": 600.0},
    "half a second": {"updates_measured": 100, "seconds_measured": 0.5},
    "nothing": {"updates_measured": 0, "seconds_measured": 0.0, "sync": "onpolicy", "busy_searchers": []},
}


@pytest.mark.parametrize("name", NOT_MEASURED)
def test_without_a_measurement_there_is_no_advice(name):
    assert bottleneck(summary(trainer=0.5) | dict.fromkeys(LEAST, 1000) | NOT_MEASURED[name]) == (None, None)


def ended(step, accuracies, stopped=True, stopped_by=None, began=False, now=None, updates=0, **facts):
    """The summary of a run as trainer and parent make it."""
    clock = Clock()
    if began:
        clock.begin()
        for _ in range(updates):
            spend(clock, now, "step", 1.0)
    source = dict.fromkeys(("generated", "truncated", "undecodable", "bad_rewards"), [0])
    progress = {"step": step, "trained": 0, "accuracies": accuracies, "staleness_sum": 2.0 * step}
    progress |= {"staleness_max": 3.0, "seconds_before": 0.0, "source": source}
    config = Config(gpus=0, searchers=1, steps=100)
    result = training_summary(progress, config, clock, stopped, busy_trainer=clock.busy(), waits_trainer={})
    facts = {
        "outcome": "failed" if stopped_by == "a failure" else "interrupted",
        "busy_searchers": [math.nan],
        "restarts": 0,
        "seconds_total": 9.0,
    } | facts
    return run_summary(config, result, {}, stopped_by, **facts)


def test_a_run_that_failed_before_its_first_update_claims_nothing(tmp_path):
    found = ended(0, [(0, 0.0, 0.25)], stopped_by="a failure")
    text = summary_text(found, tmp_path)
    assert (found["ended_by"], found["bottleneck"], found["advice"]) == ("a failure", None, None)
    assert math.isnan(found["busy_trainer"]) and found["staleness_mean"] is None and found["accuracy_after"] == 0.25
    assert "ended by a failure" in text and "trainer -, searchers -" in text and "not known" in text
    assert not any(word in text for word in ("100%", "0%", "nan", "None", "more searchers", "last"))


def test_what_ended_a_run_is_told_as_it_was(now, tmp_path):
    first = [(0, 0.0, 0.25)]
    assert ended(7, first, stopped_by="Ctrl-C")["ended_by"] == "Ctrl-C"
    assert ended(7, first, stopped_by="SIGHUP")["ended_by"] == "SIGHUP"
    assert ended(100, first, stopped_by="Ctrl-C")["ended_by"] == "--steps"  # it was done before it was told to stop
    assert ended(7, first, stopped=False)["ended_by"] == "--max-seconds"
    config = Config(gpus=0, searchers=1)
    killed = run_summary(config, {}, {}, "a failure", outcome="failed", busy_searchers=[math.nan])
    assert killed["ended_by"] == "a failure" and killed["advice"] is None
    interrupted = ended(7, first, stopped_by="Ctrl-C", began=True, now=now, updates=7, busy_searchers=[0.5])
    assert interrupted["accuracy_after"] is None and "not evaluated again" in summary_text(interrupted, tmp_path)
    assert interrupted["updates_measured"] == 7 and interrupted["bottleneck"] == "trainer"
    failed = ended(7, first, stopped_by="a failure", began=True, now=now, updates=7, busy_searchers=[0.5])
    assert failed["advice"] is None and "not known: the run failed" in summary_text(failed, tmp_path)
    more = ended(7, [*first, (5, 1.0, 0.5), (7, 2.0, 0.75)])
    assert more["accuracy_after"] == 0.625 and "mean of the last 2 evaluations" in summary_text(more, tmp_path)


def test_a_share_that_was_not_measured_is_a_dash():
    assert (share(math.nan), share(None), share(0.0), share(1.0)) == ("-", "-", "0%", "100%")
    assert shares([]) == "-" and shares([0.5, math.nan]) == "50% -"
    assert shares([0.1 * i for i in range(9)]) == "0% to 80%" and shares([math.nan] * 9) == "-"


ROW = ["1000000", "12345.6", "123456.7890", "-0.123", "1.000", "123.4", "12345", "100%", "99%/98%/-", "86400s"]


@pytest.mark.parametrize("room", [*range(1, 130), 1000])
def test_a_narrow_table_has_fewer_columns_and_whole_values(room):
    table = lines([list(COLUMNS), ROW, ROW], room)
    values = table[-1].split()
    assert table[-1] == table[-2] and len({len(line) for line in table}) == 1
    assert len(table[0]) <= room or len(values) == 1
    assert values[0] == "1000000" and set(values) <= set(ROW)
    words = " ".join(table[:-2]).split()
    assert len([w for w in words if w not in ("trainer", "searchers")]) == len(values)
    least = sum(max(len(value), *map(len, name.split())) + 1 for name, value in zip(COLUMNS, ROW, strict=True)) - 1
    assert (len(values) == len(ROW)) == (room >= least)


def test_a_usual_terminal_shows_all_columns():
    row = ["120", "55.1", "0.0123", "0.812", "0.950", "3.1", "1234", "98%", "100%", "12 s"]
    upper, lower, values = lines([list(COLUMNS), row], 80)
    assert "searchers" in upper and lower.split().count("busy") == 2 and values.split() == " ".join(row).split()


def test_without_a_limit_all_columns_are_there():
    heading, row = lines([list(COLUMNS), ["1"] * len(COLUMNS)])
    assert all(name in heading for name in COLUMNS) and len(heading) == len(row) == 100


def test_backlog_is_what_the_replay_ratio_allows_in_updates():
    c = Config(prompts_per_batch=4, samples_per_prompt=5, replay_ratio=2.0)
    assert backlog(c, 100, 200) == 0 and backlog(c, 100, 100) == 5
    assert may_update(c, 0, 0) and may_update(c, 100, 180)  # the first is free; this one just fits
    assert not may_update(c, 100, 181) and not may_update(c, 0, 20)


@pytest.fixture
def now(monkeypatch):
    """A clock that the test sets."""
    state = {"now": 100.0}
    monkeypatch.setattr(metrics.time, "time", lambda: state["now"])
    return state


def spend(clock, now, name, seconds):
    with clock.span(name):
        now["now"] += seconds


def test_busy_and_waits_count_from_the_first_batch_on(now):
    clock = Clock()
    spend(clock, now, "wait for start", 50.0)
    spend(clock, now, "generate", 3.0)
    assert math.isnan(clock.busy()) and clock.waits() == {} and clock.since_begin() == 0
    clock.begin()
    assert math.isnan(clock.busy())  # no time has passed
    spend(clock, now, "generate", 6.0)
    spend(clock, now, "wait for sync", 2.0)
    spend(clock, now, "wait for sync", 1.0)
    now["now"] += 1.0  # in no span: work
    assert clock.waits() == {"wait for sync": 3.0} and clock.busy() == pytest.approx(0.7)
    assert clock.seconds == {"wait for start": 50.0, "generate": 9.0, "wait for sync": 3.0}


def test_a_span_that_raises_is_recorded_and_the_newest_spans_are_kept(now):
    clock = Clock(limit=2)
    for i in range(3):
        with pytest.raises(ZeroDivisionError), clock.span(f"span {i}"):
            now["now"] += 1
            1 / 0  # noqa: B018
    assert list(clock.spans) == [("span 1", 101.0, 102.0, 0), ("span 2", 102.0, 103.0, 0)]
    assert clock.seconds["span 0"] == 1


def test_timelines_are_merged_and_drawn(tmp_path, now):
    for name in ("searcher-0", "trainer"):
        clock = Clock()
        clock.begin()
        for kind in [*SPANS, "wait for answers"]:
            spend(clock, now, kind, 0.25)
        clock.add("sample", 100.0, 100.5, track=1)
        save_spans(clock, tmp_path / f"{name}.spans.json")
    (tmp_path / "searcher-1.spans.json").write_text('{"spans": [')  # damaged
    saved = read_spans(tmp_path)
    assert {name: s["waits"]["wait for answers"] for name, s in saved.items()} == {"trainer": 0.25, "searcher-0": 0.25}
    merge_timeline(tmp_path)
    assert not list(tmp_path.glob("*.spans.json"))
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {0: "trainer", 1: "searcher-0"}
    first = next(e for e in events if e["ph"] == "X" and names[e["pid"]] == "searcher-0")
    assert first == {"name": "import", "ph": "X", "pid": 1, "tid": 0, "ts": 100_000_000, "dur": 250_000}
    assert [e["tid"] for e in events if e["name"] == "sample"] == [0, 1, 0, 1]
    figure = timeline({"a": (events, 100.0), "b": (events, 103.0)}, seconds=4.0)
    legend = {text.get_text() for text in figure.legends[0].get_texts()}
    assert legend == set(SPANS) | {"wait"} and len(figure.axes) == 2
    figure.savefig(tmp_path / "timeline.png")


def test_figures_are_drawn_whatever_the_metrics_hold(tmp_path):
    """Values that were not finite are null; a damaged timeline costs its own figure alone."""
    row = {"reward": None, "imbalance": None, "staleness": 1.0, "staleness_max": 2.0}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row | {"step": i}) + "\n" for i in range(3)))
    (tmp_path / "summary.json").write_text(json.dumps({"sync": "eager", "evaluations": [[0, 0.0, 0.5]]}))
    (tmp_path / "timeline.json").write_text("{")
    paths, problems = draw(tmp_path)
    assert [path.stem for path in paths] == ["accuracy", "loss", "staleness"]
    assert len(problems) == 1 and problems[0].startswith("figures/timeline.png was not drawn: JSONDecodeError")
