"""The order of prompts, and that every one is handed over exactly once, whoever dies meanwhile."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.prompts import Places, prompt_stream


@pytest.mark.parametrize("searchers", [1, 2, 3, 7])
def test_searchers_share_each_pass_over_the_prompts(searchers):
    count, passes = 20, 3
    streams = [prompt_stream(count, 4, i, searchers) for i in range(searchers)]
    shares = [len(range(i, count, searchers)) for i in range(searchers)]
    orders, places = [], []
    for _ in range(passes):
        drawn = [list(itertools.islice(stream, n)) for stream, n in zip(streams, shares, strict=True)]
        flat = [pair for part in drawn for pair in part]
        places += [place for place, _ in flat]
        orders.append([prompt for _, prompt in flat])
        assert sorted(orders[-1]) == list(range(count))  # all of them, none twice
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert sorted(places) == list(range(passes * count))
    assert all(isinstance(p, int) for p in orders[0])


def test_the_order_of_prompts_hangs_on_the_seed_alone():
    def first(seed):
        return list(itertools.islice(prompt_stream(100, seed, 1, 3), 80))

    assert first(0) == first(0)
    assert first(0) != first(1)


@given(st.lists(st.integers(0, 60)))
def test_places_are_a_set(added):
    places = Places()
    for place in added:
        places.add(place)
    assert [p in places for p in range(70)] == [p in set(added) for p in range(70)]
    copy = Places(*places.state())
    assert copy.state() == places.state() and places.low not in places.above


lives = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(0, 30), st.randoms(use_true_random=False)), max_size=6
)


@given(st.integers(4, 20), lives)
def test_what_was_begun_and_not_handed_over_is_begun_again_and_nothing_twice(count, lives):
    """Searchers begin prompts, finish them in any order, and die; the next life may have more or fewer searchers."""
    done, handed_over, promised = Places(), [], {}
    for searchers, in_flight, finished, random in [*lives, (2, 3, 4 * count, random_like(lives))]:
        streams = [prompt_stream(count, 0, i, searchers, Places(*done.state())) for i in range(searchers)]
        running: list = [[next(stream) for _ in range(in_flight + 1)] for stream in streams]
        for _ in range(finished):
            i = random.randrange(searchers)
            place, prompt = running[i].pop(random.randrange(len(running[i])))
            assert promised.setdefault(place, prompt) == prompt  # a place is the same prompt in every life
            handed_over.append(place)
            done.add(place)
            running[i].append(next(streams[i]))
    assert len(set(handed_over)) == len(handed_over)
    assert set(range(done.low)) <= set(handed_over) and done.low > 0


def random_like(lives):
    import random

    return random.Random(len(lives))
