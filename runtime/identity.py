"""What a run is known by: its model and task by their content, so that they may move.

A model is its config.json and its weights. Files up to 1 GiB are hashed whole. Of a larger file the hash takes the
size, the header (each tensor's name and shape) and 4,096 samples of 64 KiB, spread evenly: training changes nearly
every weight, and reading a whole large model would delay each start.
"""

import hashlib
from pathlib import Path

from runtime.files import weight_files

WHOLE, SAMPLES, SAMPLE = 2**30, 4096, 2**16  # bytes, samples, bytes


def model_hash(folder: Path) -> str:
    """SHA-256 over a model folder's config.json and the weights that are loaded; other files in it do not matter."""
    files = [folder / "config.json", *weight_files(folder)]
    return hashlib.sha256("".join(map(file_hash, files)).encode()).hexdigest()


def file_hash(path: Path) -> str:
    """SHA-256 of a file; of one above 1 GiB that of its size, its beginning and samples."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        if size <= WHOLE:
            return hashlib.file_digest(file, "sha256").hexdigest()
        seen = hashlib.sha256(str(size).encode())
        length = int.from_bytes(file.read(8), "little")  # safetensors: the header's length, the header
        seen.update(file.read(min(length, WHOLE)))
        for i in range(SAMPLES):
            file.seek((size - SAMPLE) * i // (SAMPLES - 1))
            seen.update(file.read(SAMPLE))
    return seen.hexdigest()


def task_file(spec: str) -> Path | None:
    """The file of a task's spec; None for a built-in task."""
    path, colon, _ = spec.rpartition(":")
    return Path(path) if colon and path.endswith(".py") else None


def task_hash(spec: str) -> str | None:
    """SHA-256 of a task's file; None for a built-in task, or where there is no such file."""
    path = task_file(spec)
    return file_hash(path) if path and path.is_file() else None
