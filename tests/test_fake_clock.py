"""fake_clock.py keeps the protocols' promises, and its time adds up."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notebooks.fake_clock import FakeClock, Nothing, Setting, play, play_all

SETTINGS = st.builds(
    Setting,
    sync=st.sampled_from(["eager", "barrier", "onpolicy"]),
    searchers=st.integers(1, 6),
    updates=st.integers(1, 8),
    prompts=st.just(12),
    prompts_per_batch=st.integers(1, 6),
    answers=st.just(2),
    spread=st.floats(0, 1),
    train=st.floats(0.01, 10),
    transfer=st.floats(0, 1),
    replay_ratio=st.floats(0.5, 3),
    seed=st.integers(0, 3),
)


class Ledger(Nothing):
    """Notes every uid that is learnt from, and refuses versions that were not published."""

    def __init__(self) -> None:
        self.published, self.batches = [0], []

    def write(self, prompt, version, k):
        assert version in self.published
        return super().write(prompt, version, k)

    def learn(self, groups):
        self.batches.append([t.uid for g in groups for t in g])
        return {}

    def publish(self, version):
        self.published.append(version)


@settings(max_examples=60, deadline=None)
@given(SETTINGS)
def test_time_adds_up_and_no_rule_is_broken(setting):
    world = Ledger()
    story = play(setting, world)
    for name, spans in story.spans.items():
        ends = [0.0] + [end for _, _, end in spans]
        starts = [start for _, start, _ in spans] + [story.seconds]
        assert ends == pytest.approx(starts, abs=1e-9), name  # no gap, no overlap, from the beginning to the end
    assert [u.step for u in story.updates] == list(range(setting.updates)) and len(world.batches) == setting.updates
    assert world.published == list(range(setting.updates + 1))  # k = 1
    assert all(0 <= age <= u.step for u in story.updates for age in u.ages)
    assert all(stamped <= age for u in story.updates for age, stamped in zip(u.ages, u.stamped, strict=True))
    size = setting.prompts_per_batch * setting.answers
    trained = (setting.updates - 1) * size  # the first batch is free
    assert setting.updates == 1 or trained + size <= setting.replay_ratio * story.written or setting.sync == "onpolicy"
    if setting.sync == "onpolicy":
        assert {age for u in story.updates for age in u.ages} == {0}
        flat = [uid for batch in world.batches for uid in batch]
        assert len(flat) == len(set(flat))  # learnt from once
    else:
        assert story.seconds >= setting.updates * setting.train


def test_barrier_with_k_2_and_m_1_trains_on_ages_2_and_3():
    """What a sync merges was written with the weights of the sync before it, k updates ago."""
    setting = Setting(sync="barrier", k=2, recency_prob=1.0, updates=20, searchers=3, train=20.0)
    story = play(setting)
    settled = Counter(age for u in story.updates[4:] for age in u.ages)
    assert set(settled) == {2, 3} and settled[2] == settled[3]


def test_a_schedule_done_by_hand():
    """One searcher, 1 s a group, batches of one group, 1 s an update, 0.5 s a transfer, everyone in turn."""
    setting = Setting("onpolicy", 1, 1, 2, 2, 2, 4, generate=1.0, spread=0.0, train=1.0, transfer=0.5)
    story = play(setting)
    # searcher and trainer write a group each: 1 s; update 1 s, publish .5 s; the same again, with .5 s for loading
    assert [(u.start, u.end) for u in story.updates] == [(1.0, 2.0), (4.0, 5.0)]
    assert story.seconds == 5.5
    searcher = [("generate", 0.0, 1.0), ("wait for the trainer", 1.0, 2.5), ("pull weights", 2.5, 3.0)]
    assert story.spans["searcher 0"][:3] == searcher


def test_eager_reaches_the_limit_and_the_others_do_not():
    one = Setting(updates=200, searchers=4, spread=0.5, generate=1.0, train=2.0, transfer=0.0)
    seconds = {sync: play(replace(one, sync=sync)).seconds / one.updates for sync in ("eager", "barrier", "onpolicy")}
    assert one.limit == 2.0
    assert seconds["eager"] < 1.05 * one.limit < 1.2 * one.limit < seconds["barrier"] < seconds["onpolicy"]


def test_the_trainers_clock_understates_staleness():
    """Stamped when it is finished, by the trainer's count, an answer looks younger than the weights that wrote it."""
    story = play(Setting(sync="barrier", k=4, updates=40, searchers=4))
    ages = [a for u in story.updates for a in u.ages]
    stamped = [a for u in story.updates for a in u.stamped]
    assert sum(stamped) < 0.9 * sum(ages)


def test_the_same_setting_is_the_same_story():
    one = Setting(sync="barrier", k=3, updates=15)
    assert play(one) == play(one)
    assert play(one).spans != play(replace(one, seed=1)).spans


def test_all_three_in_one_call():
    worlds = []

    class Counting(Nothing):
        def __init__(self, mark):
            worlds.append(mark)

    stories = play_all(Setting(), Counting, {"mark": 7}, updates=4, searchers=2)
    assert list(stories) == ["onpolicy", "barrier", "eager"] and worlds == [7, 7, 7]
    assert [s.setting.k for s in stories.values()] == [1, 2, 1]
    assert all(len(s.updates) == 4 and s.setting.searchers == 2 for s in stories.values())


def test_everyone_waiting_is_an_error():
    def stuck():
        yield "wait for Godot", lambda: False

    with pytest.raises(RuntimeError, match="everyone waits.*Godot"):
        FakeClock().run({"trainer": stuck()})


@pytest.mark.parametrize("wrong", [{"sync": "never"}, {"sync": "onpolicy", "k": 2}, {"prompts": 4}])
def test_what_cannot_be_played_is_refused(wrong):
    with pytest.raises(ValueError):
        play(Setting(**wrong))


def test_the_trace_is_what_the_gantt_chart_draws():
    from notebooks.figures import gantt

    story = play(Setting(updates=3))
    names = [e["args"]["name"] for e in story.trace() if e["ph"] == "M"]
    assert names == ["trainer", "searcher 0", "searcher 1", "searcher 2"]
    assert sum(e["ph"] == "X" for e in story.trace()) == sum(map(len, story.spans.values()))
    figure = gantt({"eager": story, "again": story}, story.seconds, "twice")
    assert tuple(figure.get_size_inches()) <= (8, 4)
