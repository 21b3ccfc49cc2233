"""Which process may see which GPU: a pure function from the machine's GPUs to an environment for each process.

A process sees its own device first, as `cuda:0`. A searcher sees the trainer's second, because it must open the memory
in which the trainer keeps the weights. CUDA reads `CUDA_VISIBLE_DEVICES` when it starts, so the parent sets it while it
starts a process. This module does not need torch.
"""

import glob
import os
import shutil
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where a process runs."""

    visible: str  # its CUDA_VISIBLE_DEVICES
    device: str  # torch's name of its own device
    sees_trainer: bool = False  # whether the trainer's device is among the visible ones


def gpu_names() -> list[str]:
    """GPUs that this process may use, as `devices` names them, without importing torch (that costs seconds)."""
    present = len(glob.glob("/dev/nvidia[0-9]*"))
    if not present and os.path.exists("/dev/dxg"):  # WSL has no device file for each GPU
        present = len(installed_gpus())
    return devices(present, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible_gpus() -> int:
    """Number of GPUs that this process may use."""
    return len(gpu_names())


def devices(present: int, mask: str | None) -> list[str]:
    """Names of the GPUs that a process may use, as CUDA reads them.

    Args:
        present: GPUs in the machine.
        mask: CUDA_VISIBLE_DEVICES: numbers, UUIDs (`GPU-...`) or MIG instances (`MIG-...`); None when it is not set.

    CUDA stops at the first entry that names no GPU, for example `-1`. When an entry occurs twice, it takes none at all.
    """
    if mask is None:
        return [str(i) for i in range(present)]
    names: list[str] = []
    for name in (part.strip() for part in mask.split(",")):
        named = present > 0 and name.startswith(("GPU-", "MIG-"))
        if not named and not (name.isdigit() and int(name) < present):
            break
        names.append(str(int(name)) if name.isdigit() else name)
    return names if len(set(names)) == len(names) else []


def plan(names: list[str], gpus: int, searchers: int) -> list[Place]:
    """A place for each process: the trainer's first, then those of the searchers.

    Args:
        names: the result of `devices`.
        gpus: GPUs to use: the first is the trainer's, each other one is a searcher's. All processes share a single
            one; 0 is CPU.
        searchers: processes beside the trainer; 0 when the trainer does their work (onpolicy).

    Raises:
        ValueError: when there are fewer devices than `gpus`, or too few for one per searcher.
    """
    if gpus > len(names):
        raise ValueError(f"{gpus} GPUs wanted of {len(names)}")
    if gpus == 0:
        return [Place("", "cpu", True)] * (1 + searchers)
    if gpus > 1 and searchers > gpus - 1:
        raise ValueError(f"{searchers} searchers on {gpus - 1} GPUs")
    trainer = names[0]
    own = [trainer] * searchers if gpus == 1 else names[1 : 1 + searchers]
    return [Place(trainer, "cuda", True), *(_searcher(name, trainer) for name in own)]


def _searcher(own: str, trainer: str) -> Place:
    if own == trainer:
        return Place(own, "cuda", True)
    if own.startswith("MIG-") or trainer.startswith("MIG-"):  # CUDA shows a process only one MIG instance
        return Place(own, "cuda", False)
    return Place(f"{own},{trainer}", "cuda", True)


def describe(places: list[Place]) -> list[str]:
    """One line per process, for the log and `--dry-run`."""
    lines = []
    for i, place in enumerate(places):
        name = "trainer" if i == 0 else f"searcher-{i - 1}"
        where = "CPU" if place.device == "cpu" else f"GPU {place.visible.split(',')[0]}"
        seen = "" if place.device == "cpu" else f" (CUDA_VISIBLE_DEVICES={place.visible})"
        lines.append(f"{name}: {where}{seen}")
    return lines


# --- the machine ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """A line of nvidia-smi."""

    index: int
    uuid: str
    name: str
    total: int  # bytes


def installed_gpus() -> list[Gpu]:
    """The GPUs that nvidia-smi lists; none when it is missing or fails."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    return parse_gpus(done.stdout) if done.returncode == 0 else []


def parse_gpus(text: str) -> list[Gpu]:
    """GPUs from nvidia-smi's lines, MiB in the last column; GPUs of unknown memory are left out."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") == 3]
    return [Gpu(int(i), uuid, name, int(mib) * 2**20) for i, uuid, name, mib in rows if mib.isdigit()]


def smallest(gpus: list[Gpu], names: list[str]) -> int | None:
    """Bytes of the smallest GPU in `names` (from `devices`); None when that is not known.

    CUDA may number GPUs in another order than nvidia-smi does, so a number stands for any of them.
    """
    sizes = []
    for name in names:
        if name.startswith("MIG-"):  # a part of a GPU; nvidia-smi does not list its size
            return None
        sizes += [g.total for g in gpus if name.isdigit() or g.uuid.startswith(name)]
    return min(sizes, default=None)
