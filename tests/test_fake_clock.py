"""fake_clock.py keeps the protocols' promises, and its time adds up."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notebooks import fake_clock
from notebooks.fake_clock import (
    FakeClock,
    Nothing,
    Setting,
    Story,
    Update,
    bench,
    learn_without_a_clock,
    play,
    play_all,
)

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
    pull=st.none() | st.floats(0, 1),
    in_flight=st.integers(1, 4),
    together=st.sampled_from([0.0, 3.0]),
    replay_ratio=st.floats(0.5, 3),
    seed=st.integers(0, 3),
).map(lambda s: s if s.sync == "onpolicy" else replace(s, together=0.0))


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


BY_HAND = Setting(
    searchers=1, updates=2, prompts=4, prompts_per_batch=2, answers=4, generate=1.0, spread=0.0, train=1.0
)


def test_one_process_by_hand():
    """`--sync onpolicy` of two devices that do everything together: half the seconds, no publication, nobody waits."""
    story = play(replace(BY_HAND, sync="onpolicy", together=2.0, transfer=7.0, pull=0.25))
    # two groups: 1 s; update .5 s; loading .25 s; the same again
    assert [(u.start, u.end) for u in story.updates] == [(1.0, 1.5), (2.75, 3.25)]
    assert list(story.spans) == ["trainer"] and story.seconds == 3.25
    assert story.idle("trainer") == 0 and story.idle_searchers() == 0


def test_a_round_of_barrier_by_hand():
    """A searcher looks for a sync, and reports what it has written, only when a round is finished."""
    story = play(replace(BY_HAND, sync="barrier", in_flight=4, transfer=0.5, pull=0.25, updates=4))
    # rounds of 4 s, two batches each: update 0 is free; update 1 begins at a sync too, k = 1
    assert [u.start for u in story.updates] == [4.0, 8.25, 12.5, 16.75]
    assert story.written == 17 * 4 and story.written_per_trained == 2.125  # 4 rounds, and the beginning of a fifth
    few = play(replace(BY_HAND, sync="barrier", in_flight=1, transfer=0.5, pull=0.25, updates=4))
    assert [u.start for u in few.updates] == [2.0, 4.25, 6.5, 8.75] and few.written == 9 * 4


def test_a_round_that_is_not_finished_is_not_reported():
    """The first round allows two updates. The third one waits for the end of the second round."""
    story = play(replace(BY_HAND, sync="barrier", k=100, in_flight=4, transfer=0.0, train=1.25, updates=4))
    assert [u.start for u in story.updates] == [4.0, 5.25, 8.0, 9.25]


def test_each_searcher_brings_its_share_to_a_sync():
    """So the pool always has a whole batch: with m = 1 and k = 1 an answer is one update old, never older."""
    story = play(
        Setting(sync="barrier", recency_prob=1.0, searchers=3, updates=20, prompts=512, train=0.01, spread=1.0)
    )
    assert {age for u in story.updates[1:] for age in u.ages} == {1}


def test_groups_in_flight_keep_the_weights_that_began_them():
    one = Setting(updates=40, searchers=1, recency_prob=1.0, prompts_per_batch=2, train=1.0, transfer=0.0)
    stories = [play(replace(one, in_flight=n)) for n in (1, 8)]
    assert stories[0].seconds == stories[1].seconds  # in flight or not, a group takes the same time
    assert stories[1].age(8) > stories[0].age(8) + 2


def test_loading_takes_as_long_as_sending_unless_it_is_told():
    one = replace(BY_HAND, sync="eager", transfer=0.5, updates=3)
    assert play(one) == replace(play(replace(one, pull=0.5)), setting=one)
    pulls = [
        end - start for what, start, end in play(replace(one, pull=0.125)).spans["searcher 0"] if what[:4] == "pull"
    ]
    assert pulls and set(pulls) == {0.125}


def test_what_becomes_of_the_answers():
    spans = {"trainer": [], "searcher 0": [("generate", 0.0, 6.0), ("wait for sync", 6.0, 8.0)]}
    updates = [Update(0, 1.0, 2.0, [0, 0, 2, 2], [], {"kl": 4.0}), Update(1, 2.0, 4.0, [4, 4, 4, 4], [], {"kl": 2.0})]
    one = Setting(prompts_per_batch=2, answers=2)
    story = Story(one, spans, updates, written=20, uses=Counter("aaabbcde"), seconds=8.0)
    assert story.never == 0.75 and story.reuse == 1.6 and story.written_per_trained == 2.5
    assert story.lost == 0.25 + 0.75 * 0.75 and story.age() == 2.5 and story.age(1) == 4.0
    assert fake_clock.by_update(story, "age") == [1.0, 4.0] and fake_clock.by_update(story, "kl") == [4.0, 2.0]
    later = replace(story, updates=[replace(updates[0], end=3.0), replace(updates[1], end=5.0)])
    times, (first, second) = fake_clock.by_second([story, later], "kl", points=3)
    assert (
        times.tolist() == [3.0, 3.5, 4.0] and first.tolist() == [3.0, 2.5, 2.0] and second.tolist() == [4.0, 3.5, 3.0]
    )


def test_uses_are_those_of_the_batches():
    for sync in ("eager", "barrier", "onpolicy"):
        world = Ledger()
        story = play(Setting(sync=sync, updates=10), world)
        assert story.uses == Counter(uid for batch in world.batches for uid in batch)


class Diary(Ledger):
    """Also notes which version wrote what, and each batch's versions."""

    def __init__(self) -> None:
        super().__init__()
        self.versions, self.rewards = [], []

    def write(self, prompt, version, k):
        self.versions.append(version)
        return [answer | {"reward": float(len(self.versions))} for answer in super().write(prompt, version, k)]

    def learn(self, groups):
        self.rewards.append([t.reward for group in groups for t in group])
        return {"versions": {t.policy_version for group in groups for t in group}}


@pytest.mark.parametrize("age, uses, versions", [(0, 1, [0, 1, 2, 3]), (2, 1, [0, 0, 0, 1]), (0, 2, [0, 0, 2, 2])])
def test_age_and_repetition_apart(age, uses, versions):
    world, setting = Diary(), Setting(updates=4, prompts=4, prompts_per_batch=2, answers=3)
    notes = learn_without_a_clock(world, setting, age, uses)
    assert [note["versions"] for note in notes] == [{version} for version in versions]
    assert len(world.versions) == 8 / uses and len(set(sum(world.rewards, []))) == 8 / uses  # groups, all new
    assert all(len(batch) == 6 for batch in world.rewards)


@pytest.mark.parametrize(
    "case, updates, batch, groups, share", [("balanced", 60, 32, 8, 0.68), ("unbalanced", 24, 256, 16, 0.25)]
)
def test_the_bench_that_is_played_is_the_one_that_was_measured(case, updates, batch, groups, share):
    found = fake_clock.bench(case)
    s = found.setting
    assert (s.updates, s.batch_size, s.in_flight, s.searchers) == (updates, batch, groups, 1)
    assert s.limit * s.updates == pytest.approx(found.seconds["generation alone"])  # the slower side in both cases
    assert s.train * s.updates == pytest.approx(found.seconds["training alone"])
    assert s.train / s.limit == pytest.approx(share, abs=0.02)
    assert 0.0005 < s.transfer < 0.002 < 0.01 < s.pull < 0.02
    assert np.median(found.over_limit["generation alone"]) == 1.0 and len(found.over_limit["onpolicy"]) >= 3


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
    assert [s.setting.k for s in stories.values()] == [1, 4, 1]
    assert play_all(Setting(), updates=2, k=2)["barrier"].setting.k == 2
    assert all(len(s.updates) == 4 and s.setting.searchers == 2 for s in stories.values())


@pytest.mark.parametrize("case", ["balanced", "unbalanced"])
def test_what_notebook_4_tells_of_measured_runs_is_what_was_measured(case):
    source = Path(__file__).parents[1] / "notebooks" / "4_what_async_buys.py"
    over = {mode: f"{median(ratios):.2f}" for mode, ratios in bench(case).over_limit.items()}
    text = " ".join(source.read_text().replace("\n#", "\n").split())
    assert f"`{case}` ({over['eager, k = 1']} against {over['onpolicy']})" in text


def test_everyone_waiting_is_an_error():
    def stuck():
        yield "wait for Godot", lambda: False

    with pytest.raises(RuntimeError, match="everyone waits.*Godot"):
        FakeClock().run({"trainer": stuck()})


@pytest.mark.parametrize("wrong", [{"sync": "never"}, {"sync": "onpolicy", "k": 2}, {"together": 2.0}, {"prompts": 4}])
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
