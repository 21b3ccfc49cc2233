"""One versioned snapshot of the policy's weights, written by the trainer and read by every searcher.

The snapshot lies in shared memory twice (a double buffer): the trainer writes one slot while readers copy the other.
No lock guards it, since the lock of a killed process would stay taken for ever. Instead each slot carries the version
that it holds: the writer marks a slot dirty before its first byte and stamps it after its last; a reader copies, then
looks whether the stamp is still the one it started from. What a reader gets is its own copy, never a view.

The handle travels through a local socket as `torch.multiprocessing` sends tensors: by file descriptor. The memory has
no name in /dev/shm, so it is gone with its last user, however that one ended.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing import AuthenticationError, current_process
from multiprocessing.connection import Client, Listener

import torch

DIRTY = -1  # stamp of a slot that is being written, or was never written
LATEST = 2  # header: [stamp of slot 0, stamp of slot 1, newest complete slot]


class Overtaken(RuntimeError):
    """The writer was faster than this reader, again and again."""


class SharedWeights:
    """Named tensors in one flat, double-buffered piece of shared memory.

    Args:
        layout: (name, shape, dtype) of each tensor, in the order of the flat buffer.
        slots: [2, bytes] uint8, shared.
        header: [3] int64, shared.
    """

    def __init__(self, layout: list[tuple[str, tuple, torch.dtype]], slots: torch.Tensor, header: torch.Tensor):
        self.layout, self.slots, self.header = layout, slots, header
        self._targets = [[view for _, view in self._views(slot)] for slot in slots]
        self._header = header.numpy()  # aligned 8-byte reads and writes are atomic; x86 and the GIL keep their order

    @classmethod
    def like(cls, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> "SharedWeights":
        """Allocate a snapshot for tensors of these names, shapes and dtypes; nothing is published yet."""
        layout = [(name, tuple(t.shape), t.dtype) for name, t in named_tensors]
        size = sum(_padded(shape, dtype) for _, shape, dtype in layout)
        slots = torch.zeros(2, size, dtype=torch.uint8).share_memory_()
        header = torch.tensor([DIRTY, DIRTY, 1], dtype=torch.int64).share_memory_()
        return cls(layout, slots, header)

    def __reduce__(self):
        return SharedWeights, (self.layout, self.slots, self.header)

    @property
    def version(self) -> int:
        """Version of the newest complete snapshot; -1 before the first."""
        return int(self._header[self._header[LATEST]])

    def publish(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Write a new snapshot (the trainer's side; one writer only).

        Raises:
            ValueError: when the version does not grow, or the tensors are not those of the layout.
        """
        if version <= self.version:
            raise ValueError(f"version {version} must be above the published {self.version}")
        tensors = [(name, t.detach()) for name, t in named_tensors]
        if [(n, tuple(t.shape), t.dtype) for n, t in tensors] != self.layout:
            raise ValueError("these are not the tensors that the snapshot was laid out for (names, shapes, dtypes)")
        slot = 1 - int(self._header[LATEST])
        self._header[slot] = DIRTY
        with torch.no_grad():
            torch._foreach_copy_(self._targets[slot], [t for _, t in tensors])  # one call: a loop costs more than 4 MB
        if any(t.is_cuda for _, t in tensors):
            torch.cuda.synchronize()  # the copies must have ended before the stamp says so
        self._header[slot] = version
        self._header[LATEST] = slot

    def read(self, timeout: float = 10.0) -> tuple[int, list[tuple[str, torch.Tensor]]]:
        """Copy the newest complete snapshot (a searcher's side): (version, named tensors), a private copy.

        Raises:
            Overtaken: when no copy stayed valid for `timeout` seconds, or nothing was published.
        """
        copy = torch.empty_like(self.slots[0], device="cpu")
        deadline = time.monotonic() + timeout
        while True:
            slot = int(self._header[LATEST])
            version = int(self._header[slot])
            if version != DIRTY:
                copy.copy_(self.slots[slot])
                if int(self._header[slot]) == version:  # untouched from the first byte to the last
                    return version, self._views(copy)
            if time.monotonic() > deadline:
                state = "nothing was published" if version == DIRTY else "the writer overtook every copy"
                raise Overtaken(f"no weights in {timeout:g} s: {state}")
            time.sleep(0.0005)

    def _views(self, flat: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        views, start = [], 0
        for name, shape, dtype in self.layout:
            size = math.prod(shape) * dtype.itemsize
            views.append((name, flat[start : start + size].view(dtype).view(shape)))
            start += _padded(shape, dtype)
        return views


def hand_out(weights: SharedWeights, address: str) -> None:
    """Give the handle to every searcher that asks for it at this local socket, from a thread (the trainer's side).

    Each asks for itself, so that one which is started again gets a handle of its own, as CUDA IPC will need.
    """
    listener = Listener(address, "AF_UNIX", backlog=64, authkey=bytes(current_process().authkey))

    def serve() -> None:
        while True:
            try:
                with listener.accept() as connection:
                    connection.send(weights)  # torch.multiprocessing sends the memory's descriptor, not its bytes
            except (EOFError, OSError, AuthenticationError):  # a searcher that was killed meanwhile, or a stranger
                continue

    threading.Thread(target=serve, daemon=True, name="weight-handles").start()


def ask_for(address: str, meanwhile: Callable[[], bool]) -> SharedWeights | None:
    """The trainer's handle (a searcher's side); None as soon as `meanwhile()`, called while it waits, is false.

    Raises:
        OSError, EOFError: when the trainer is gone.
    """
    while meanwhile():
        try:
            with Client(address, "AF_UNIX", authkey=bytes(current_process().authkey)) as connection:
                return connection.recv()
        except (FileNotFoundError, ConnectionRefusedError):  # the trainer is still loading
            time.sleep(0.05)
    return None


def _padded(shape: tuple, dtype: torch.dtype) -> int:
    """Bytes of a tensor, rounded up so that the next one starts aligned."""
    return -(-math.prod(shape) * dtype.itemsize // 64) * 64
