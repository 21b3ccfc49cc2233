"""Clocks, the timeline, and the sentence at a run's end that says who held up whom."""

import json

import pytest

from runtime import metrics
from runtime.metrics import Clock, merge_timeline, save_spans
from runtime.plots import SPANS, timeline
from runtime.summary import bottleneck
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


def test_backlog_is_what_the_replay_ratio_allows_in_updates():
    from config import Config

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
    assert clock.busy() == 0 and clock.waits() == {}
    clock.begin()
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
    assert merge_timeline(tmp_path) == {name: {"wait for answers": 0.25} for name in ("trainer", "searcher-0")}
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
