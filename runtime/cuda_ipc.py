"""CUDA IPC: how another process opens a tensor on the trainer's GPU.

`torch.multiprocessing` can send such tensors, but its handle names the device by the *sender's* index. Each of our
processes sees other devices under other indices (placement.py). So the handle travels with the device's UUID, and the
receiver puts in its own index. vLLM has an IPC weight engine too, but it assumes that trainer and engine share a GPU.

Two GPUs copy directly when they reach each other (NVLink, or PCIe peer access). Otherwise, as on most consumer cards,
the copy goes through the host. CUDA chooses by itself; `route` says which way it takes.
"""

import logging
import time
import weakref
from typing import Any

import torch
from torch.multiprocessing import reductions

log = logging.getLogger("tba_min.weights")
DEVICE = 6  # place of the device's index among the arguments of torch's rebuild_cuda_tensor


def export(tensor: torch.Tensor) -> tuple[str, tuple]:
    """A handle for one receiver: (UUID of the device, arguments of `rebuild_cuda_tensor`).

    Each receiver needs its own handle, because torch counts references in it. The tensor must outlive its readers.

    Raises:
        RuntimeError: when CUDA can't share memory here (some containers, WSL).
    """
    _, arguments = reductions.reduce_tensor(tensor)
    return uuids()[arguments[DEVICE]], arguments


def rebuild(handle: tuple[str, tuple]) -> torch.Tensor:
    """The tensor behind a handle from another process; both processes use the same memory.

    Raises:
        LookupError: when this process does not see the device.
        RuntimeError: when CUDA can't open the memory.
    """
    uuid, arguments = handle
    arguments = list(arguments)
    arguments[DEVICE] = local_index(uuid, uuids())
    return reductions.rebuild_cuda_tensor(*arguments)


def local_index(uuid: str, visible: list[str]) -> int:
    """This process's index of a device.

    Raises:
        LookupError: when this process does not see it.
    """
    if uuid not in visible:
        raise LookupError(f"the trainer's GPU {uuid} is not among the visible ones, {', '.join(visible) or 'none'}")
    return visible.index(uuid)


def uuids() -> list[str]:
    """UUIDs of the GPUs that this process sees, by index."""
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]


def problem(device: torch.device) -> str | None:
    """The reason why memory of this device can't be shared; None when its owner finds no problem."""
    try:
        export(torch.zeros(1, device=device))
    except RuntimeError as error:
        return f"CUDA can't share memory here ({str(error).splitlines()[0]})"
    return None


def collect() -> None:
    """Free the memory that ended receivers held."""
    if torch.cuda.is_initialized():
        torch.cuda.ipc_collect()


def pin(tensor: torch.Tensor) -> None:
    """Page-lock shared host memory while the tensor lives: copies to and from a GPU are then faster."""
    cuda = torch.cuda.cudart()
    code = cuda.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
    if int(code) == 0:
        weakref.finalize(tensor, cuda.cudaHostUnregister, tensor.data_ptr()).atexit = False
    else:
        log.warning(
            "%.2f GiB of shared memory could not be page-locked (CUDA error %d)", tensor.nbytes / 2**30, int(code)
        )


def route(source: torch.device, target: torch.device) -> str:
    """The way that bytes take from one device to another, in words."""
    if source.type == "cpu":
        return "from shared host memory"
    if (source.index or 0) == (target.index or 0):
        return "by CUDA IPC within one GPU"
    reaches = torch.cuda.can_device_access_peer(target.index or 0, source.index or 0)
    return "by CUDA IPC from GPU to GPU" + ("" if reaches else ", through the host: they can't reach each other")


def measured(weights: Any) -> str:
    """Route and bandwidth of a SharedWeights read, in words. It times the second of two reads: the first allocates."""
    weights.read()
    start = time.perf_counter()
    weights.read()
    seconds, size = time.perf_counter() - start, weights.slots.shape[1]
    where = route(weights.slots.device, torch.device(weights.device))
    return f"{where}, {size / 2**20:.1f} MiB at {size / seconds / 1e9:.2f} GB/s"
