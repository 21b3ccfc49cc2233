"""The order in which searchers take prompts, and which of them are done.

A *place* is a position in the endless stream of prompts: the first pass over all prompts has places 0 to count - 1, the
next one goes on from there. So a place tells a group of answers from all others, whoever writes it.
"""

from collections.abc import Iterable, Iterator

import numpy as np


class Places:
    """A set of places that fills up from the beginning: all below `low`, and those in `above`."""

    def __init__(self, low: int = 0, above: Iterable[int] = ()) -> None:
        self.low, self.above = low, set(above)

    def add(self, place: int) -> None:
        if place >= self.low:
            self.above.add(place)
        while self.low in self.above:
            self.above.remove(self.low)
            self.low += 1

    def __contains__(self, place: int) -> bool:
        return place < self.low or place in self.above

    def state(self) -> tuple[int, list[int]]:
        """(low, above): the arguments that make a copy."""
        return self.low, sorted(self.above)


def prompt_stream(
    count: int, seed: int, searcher: int, searchers: int, done: Places | None = None
) -> Iterator[tuple[int, int]]:
    """Endless (place, prompt id): each pass over all prompts is shuffled anew, and the searchers share it.

    Args:
        done: places that are left out, because they have been handed over.
    """
    done = done or Places()
    epoch = done.low // count
    while True:
        order = np.random.default_rng([seed, epoch]).permutation(count)
        for position in range(searcher, count, searchers):
            if epoch * count + position not in done:
                yield epoch * count + position, int(order[position])
        epoch += 1
