"""One versioned snapshot of the policy's weights, written by the trainer and read by every searcher.

The snapshot lies in memory that all of them reach: shared host memory, or the trainer's GPU (cuda_ipc.py). It has two
slots (a double buffer): the trainer writes one while readers copy the other. There is no lock, because a killed process
would never free it. Instead each slot has a stamp, the version that it holds. The writer marks a slot dirty before the
first byte, and stamps it after the last. A reader copies a slot, then checks that the stamp has not changed. It gets
its own copy, never a view. The stamps always lie in host memory. Both sides wait for their GPU before they write or
trust a stamp.

The handle travels through a local socket in the way that `torch.multiprocessing` sends tensors: host memory as a file
descriptor. The memory has no name in /dev/shm, so it is freed with its last user, even when that one is killed.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing import AuthenticationError, current_process
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import TYPE_CHECKING

import torch

from runtime import cuda_ipc
from runtime.files import ConfigError
from runtime.machine import check_shared_memory
from runtime.policy import named_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from config import Config

log = logging.getLogger("tba_min.weights")
DIRTY = -1  # stamp of a slot that is being written, or was never written
LATEST = 2  # header: [stamp of slot 0, stamp of slot 1, newest complete slot]


class Overtaken(RuntimeError):
    """The writer was faster than this reader, again and again."""


class SharedWeights:
    """Named tensors in one flat, double-buffered piece of memory that other processes can open.

    Args:
        layout: (name, shape, dtype) of each tensor, in the order of the flat buffer.
        slots: [2, bytes] uint8, shared host memory or a GPU's.
        header: [3] int64, shared host memory.
    """

    dtype: torch.dtype | None = None  # of floating-point tensors when published; None: unchanged
    device = "cpu"  # where `read` puts its copies

    def __init__(self, layout: list[tuple[str, tuple, torch.dtype]], slots: torch.Tensor, header: torch.Tensor):
        self.layout, self.slots, self.header = layout, slots, header
        self._targets = [[view for _, view in self._views(slot)] for slot in slots]
        self._header = header.numpy()  # aligned 8-byte reads and writes are atomic; `_in_order` keeps their order

    @classmethod
    def like(
        cls,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
    ) -> SharedWeights:
        """Allocate a snapshot for tensors of these names and shapes; nothing is published yet.

        Args:
            device: of the memory; `cpu` is shared host memory.
            dtype: floating-point tensors are converted to it; None: unchanged.

        Raises:
            ConfigError: when shared memory has no room for it.
        """
        layout = [(name, tuple(t.shape), _kept(t.dtype, dtype)) for name, t in named_tensors]
        size = sum(_padded(shape, kind) for _, shape, kind in layout)
        if torch.device(device).type == "cpu":
            check_shared_memory(2 * size)
        slots = torch.zeros(2, size, dtype=torch.uint8, device=device)
        header = torch.tensor([DIRTY, DIRTY, 1], dtype=torch.int64).share_memory_()
        new = cls(layout, slots if slots.is_cuda else slots.share_memory_(), header)
        new.dtype = dtype
        return new

    def __reduce__(self):
        if self.slots.is_cuda:  # a new handle each time, with its own reference counter
            return _open, (self.layout, cuda_ipc.export(self.slots), self.header)
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
        if [(n, tuple(t.shape), _kept(t.dtype, self.dtype)) for n, t in tensors] != self.layout:
            raise ValueError("these are not the tensors that the snapshot was laid out for (names, shapes, dtypes)")
        slot = 1 - int(self._header[LATEST])
        self._header[slot] = DIRTY
        _in_order()
        with torch.no_grad():  # one call: a loop costs more than copying 4 MB
            torch._foreach_copy_(self._targets[slot], [t for _, t in tensors], non_blocking=True)
        _in_order(tensors[0][1], self.slots)  # the copies must end before the stamp is written
        self._header[slot] = version
        _in_order()
        self._header[LATEST] = slot

    def read(self, timeout: float = 10.0) -> tuple[int, list[tuple[str, torch.Tensor]]]:
        """Copy the newest complete snapshot (a searcher's side): (version, named tensors), a private copy.

        Raises:
            Overtaken: when no copy stayed valid for `timeout` seconds, or nothing was published.
        """
        copy = torch.empty_like(self.slots[0], device=self.device)
        deadline = time.monotonic() + timeout
        while True:
            slot = int(self._header[LATEST])
            version = int(self._header[slot])
            if version != DIRTY:
                _in_order()
                copy.copy_(self.slots[slot])
                _in_order(copy, self.slots)
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


def _open(layout: list, handle: tuple, header: torch.Tensor) -> SharedWeights:
    """Rebuild on the receiving side; see `__reduce__`."""
    return SharedWeights(layout, cuda_ipc.rebuild(handle), header)


_FENCE = threading.Lock()


def _in_order(*tensors: torch.Tensor) -> None:
    """End all reads and writes before this call before any after it begins.

    Work on a GPU is only queued: wait for those that hold the tensors. An ARM processor may reorder accesses to memory,
    but none across a lock's release and the next acquisition. x86 keeps their order by itself.
    """
    for device in {t.device for t in tensors if t.is_cuda}:
        torch.cuda.synchronize(device)
    for _ in range(2):
        with _FENCE:
            pass


def _kept(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted and dtype.is_floating_point else dtype


def _padded(shape: tuple, dtype: torch.dtype) -> int:
    """Bytes of a tensor, rounded up so that the next one starts aligned."""
    return -(-math.prod(shape) * dtype.itemsize // 64) * 64


# --- from the trainer to the searchers ------------------------------------------------------------------------------


def choose(wanted: str, on_gpu: bool, problem: str | None = None) -> str:
    """Which kind of memory holds the snapshot, "cuda-ipc" or "shared-memory".

    Args:
        wanted: --weights.
        on_gpu: whether the trainer is on a GPU.
        problem: why CUDA IPC does not work here; None when no problem was found.

    Raises:
        ConfigError: when --weights cuda-ipc can't be had.
    """
    if wanted == "shared-memory" or (wanted == "auto" and (not on_gpu or problem)):
        return "shared-memory"
    if not on_gpu or problem:
        raise ConfigError(f"--weights cuda-ipc: {problem or 'there is no GPU'}; use --weights shared-memory")
    return "cuda-ipc"


class Publisher:
    """The trainer's side: a snapshot in each kind of memory that searchers need, and connections to its readers.

    Args:
        named_tensors: the weights, published at once as `version`.
        kind: memory that searchers get by default.
        dtype: of the searchers' engines; None: unchanged.
    """

    def __init__(self, named_tensors: list, version: int, kind: str, dtype: torch.dtype | None = None) -> None:
        self._dtype, self._readers = dtype, []
        self._lock = threading.Lock()  # between the training loop and the thread of `hand_out`
        self._device = named_tensors[0][1].device
        self._snapshots = {kind: self._new(kind, named_tensors, version)}

    def _new(self, kind: str, named_tensors: list, version: int) -> SharedWeights:
        new = SharedWeights.like(named_tensors, self._device if kind == "cuda-ipc" else "cpu", self._dtype)
        if self._device.type == "cuda" and kind == "shared-memory":
            cuda_ipc.pin(new.slots)
        new.publish(named_tensors, version)
        return new

    def publish(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Write a new snapshot in each kind of memory."""
        named_tensors = list(named_tensors)
        with self._lock:
            for snapshot in self._snapshots.values():
                snapshot.publish(named_tensors, version)

    def offer(self, kind: str | None) -> SharedWeights:
        """The snapshot of that kind. The first request for a kind makes it."""
        with self._lock:
            default = next(iter(self._snapshots.values()))
            if kind and kind not in self._snapshots:
                version, tensors = default.read()
                self._snapshots[kind] = self._new(kind, tensors, version)
            return self._snapshots[kind] if kind else default

    def hand_out(self, address: str) -> None:
        """Start a thread that gives a handle to every searcher that asks at this local socket.

        A searcher that is started again asks again, because CUDA IPC needs a handle for each process.
        """
        listener = Listener(address, "AF_UNIX", backlog=64, authkey=bytes(current_process().authkey))

        def serve() -> None:
            while True:
                try:
                    connection = listener.accept()
                    connection.send(self.offer(connection.recv()))  # torch sends the memory's handle, not its bytes
                    self._readers.append(connection)
                except (EOFError, OSError, AuthenticationError):  # a searcher that was killed meanwhile, or a stranger
                    continue
                except (RuntimeError, ConfigError) as error:  # from CUDA, or no room; the reader sees its line end
                    log.error("a searcher got no weight handle: %s", error)
                cuda_ipc.collect()

        threading.Thread(target=serve, daemon=True, name="weight-handles").start()

    def wait_for_readers(self, timeout: float) -> int:
        """Wait until all readers have ended, at most `timeout` seconds. Returns how many have not.

        Memory of a GPU must stay until its last reader has ended.
        """
        deadline, left = time.monotonic() + timeout, list(self._readers)
        while left and (rest := deadline - time.monotonic()) > 0:
            ended = wait(left, rest)  # a reader sends nothing more: it is ready when it has ended
            left = [c for c in left if c not in ended]
        return len(left)


def make_publisher(config: Config, model: PreTrainedModel, version: int) -> Publisher:
    """Publish the weights for the first time, in the kind of memory that --weights and the machine allow."""
    on_gpu = model.device.type == "cuda"
    problem = cuda_ipc.problem(model.device) if on_gpu and config.weights != "shared-memory" else None
    kind = choose(config.weights, on_gpu, problem)
    if problem:
        log.warning("weights go through shared memory: %s", problem)
    dtype = torch.bfloat16 if on_gpu and config.engine == "vllm" else None  # that of the searchers' engine
    return Publisher(named_weights(model), version, kind, dtype)


def ask_for(
    address: str, meanwhile: Callable[[], bool], wanted: str = "auto", device: str = "cpu"
) -> SharedWeights | None:
    """Ask for the trainer's snapshot (a searcher's side). None as soon as `meanwhile()`, called in the wait, is false.

    Args:
        wanted: --weights.
        device: of the copies that `read` makes.

    Raises:
        ConfigError: when the trainer's memory can't be opened and --weights forbids another kind.
        OSError, EOFError: when the trainer is gone.
    """
    kind = None  # the trainer's choice
    while meanwhile():
        try:
            connection = Client(address, "AF_UNIX", authkey=bytes(current_process().authkey))
        except (FileNotFoundError, ConnectionRefusedError):  # the trainer is still loading
            time.sleep(0.05)
            continue
        try:
            weights = _receive(connection, kind)
        except (RuntimeError, LookupError) as error:
            if kind:  # the second kind failed too
                raise
            kind = choose(wanted, True, f"the trainer's GPU memory can't be opened: {str(error).splitlines()[0]}")
            log.warning("weights go through shared memory: %s", str(error).splitlines()[0])
            continue
        weights.device = device
        if device != "cpu" and not weights.slots.is_cuda:
            cuda_ipc.pin(weights.slots)
        return weights
    return None


def _receive(connection: Connection, kind: str | None) -> SharedWeights:
    try:
        connection.send(kind)
        weights = connection.recv()
    except BaseException:
        connection.close()
        raise
    weights.connection = connection  # as long as it is open, the trainer knows that somebody reads
    return weights
