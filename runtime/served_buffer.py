"""The replay buffer in a process of its own: a Manager serves it, and trajectories cross as flat arrays."""

import os
import threading
from collections.abc import Callable, Sequence
from multiprocessing.context import BaseContext
from multiprocessing.managers import BaseManager, BaseProxy

import numpy as np

from buffer import ReplayBuffer, Trajectory
from runtime.prompts import Places

HEAD = np.dtype(
    [("uid", "i8", 3), ("prompt_id", "i8"), ("finish_reason", "U6"), ("reward", "f8"), ("log_ref", "f8")]
    + [("policy_version", "i8"), ("version_last", "i8"), ("searcher", "i4"), ("prompt_len", "i4"), ("len", "i4")]
)


def pack(trajectories: Sequence[Trajectory]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Pack trajectories into four flat arrays: pickling these is several times cheaper than pickling objects."""
    ts = trajectories
    rows = [
        (t.uid, t.prompt_id, t.finish_reason, t.reward, t.log_ref)
        + (t.policy_version, t.version_last, t.searcher, len(t.prompt), len(t.response))
        for t in ts
    ]
    empty = np.zeros(0, np.int32)
    return (
        np.array(rows, HEAD),
        np.concatenate([t.prompt for t in ts] or [empty]).astype(np.int32),
        np.concatenate([t.response for t in ts] or [empty]).astype(np.int32),
        np.concatenate([t.log_mu for t in ts] or [empty]).astype(np.float32),
    )


def unpack(packed: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]) -> list[Trajectory]:
    """The inverse of `pack`. Every array is a separate copy, so that dropping one frees its bytes."""
    head, prompts, responses, log_mu = packed
    trajectories, p, r = [], 0, 0
    for uid, row in zip(head["uid"].tolist(), head.tolist(), strict=True):
        _, prompt_id, reason, reward, log_ref, first, last, searcher, n, t = row
        tokens = (prompts[p : p + n].copy(), responses[r : r + t].copy(), reason, reward, log_ref)
        trajectories.append(Trajectory(tuple(uid), prompt_id, *tokens, log_mu[r : r + t].copy(), first, last, searcher))
        p, r = p + n, r + t
    return trajectories


class _Server(ReplayBuffer):
    """The buffer in the Manager's process: packed arrays go in and out.

    It also knows which places in the stream of prompts have been handed over. Nobody else can know that: a searcher may
    be killed between handing a group over and noting that it did.

    Args:
        answers: S, answers in a group.
        bounds, options: ReplayBuffer's.
    """

    def __init__(self, *bounds: int, answers: int = 1, **options: int | bool | None) -> None:
        super().__init__(*bounds, **options)
        self._answers, self._done = answers, Places()
        self._both = threading.Lock()  # a saved state has the places of just the trajectories that it has

    def pid(self) -> int:
        return os.getpid()

    def packed_state(self) -> dict:
        with self._both:
            state = self.state_dict() | {"done": self._done.state()}
        return state | {"trajectories": pack(state["trajectories"])}  # slow, so it runs without a lock

    def load_packed_state(self, state: dict) -> None:
        with self._both:
            self.load_state_dict(state | {"trajectories": unpack(state["trajectories"])})
            self._done = Places(*state.get("done", ()))

    def add_packed(self, packed: tuple) -> None:
        trajectories = unpack(packed)
        with self._both:
            self.add(trajectories)
            for place in np.unique(packed[0]["uid"][:, 2] // self._answers).tolist():
                self._done.add(place)

    def handed_over(self) -> tuple[int, list[int]]:
        with self._both:
            return self._done.state()

    def sample_packed(self, *args: float) -> tuple | None:
        groups = self.sample(*args)
        return None if groups is None else pack([t for group in groups for t in group])


class BufferManager(BaseManager):
    """Serves one ReplayBuffer on a local socket with a random key, each connection in a thread of its own."""


BufferManager.register(
    "Buffer",
    _Server,
    exposed=["pid", "add_packed", "sample_packed", "start_pool", "stats", "packed_state", "load_packed_state"]
    + ["handed_over"],
)


class RemoteBuffer:
    """The buffer in another process, with those methods of ReplayBuffer that other processes call."""

    def __init__(self, proxy: BaseProxy) -> None:
        self._proxy = proxy

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        self._proxy.add_packed(pack(trajectories))

    def sample(self, num_prompts: int, k: int, *args: float) -> list[list[Trajectory]] | None:
        packed = self._proxy.sample_packed(num_prompts, k, *args)
        if packed is None:
            return None
        flat = unpack(packed)
        return [flat[i : i + k] for i in range(0, len(flat), k)]

    def stats(self) -> dict[str, int]:
        return self._proxy.stats()

    def handed_over(self) -> Places:
        """Places in the stream of prompts whose groups have come, from any searcher."""
        return Places(*self._proxy.handed_over())

    def packed_state(self) -> dict:
        """`ReplayBuffer.state_dict()`, its trajectories packed, and the places that have been handed over."""
        return self._proxy.packed_state()


def serve(
    ctx: BaseContext, initializer: Callable, initargs: tuple, **options: int | bool | None
) -> tuple[BufferManager, BaseProxy]:
    """Start the Manager's process and one buffer in it. Returns both; the caller must keep both."""
    manager = BufferManager(ctx=ctx)
    manager.start(initializer, initargs)
    return manager, manager.Buffer(**options)
