"""Checkpoints: all that a resumed run needs, in a folder that is either whole or not there.

`checkpoints/step-<n>/` is the policy as a Hugging Face folder, and beside it `trainer.pt` (optimizer, schedules, head,
reference, random states), `buffer.npz` and `buffer.json` (the replay buffer), `progress.json` (counters), and
`manifest.json` with every file's size and SHA-256. It is written under another name, forced to disk and renamed, so
that a full disk or a kill leaves the previous one as it was. Nothing in it is unpickled: tensors are read as
safetensors or with `weights_only`, arrays without pickling.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from config import ConfigError

FORMAT = 1
MANIFEST = "manifest.json"
HALF = ".writing-"  # a checkpoint that is being written, or whose writer died
ARRAYS = ("head", "prompts", "responses", "log_mu")  # of buffer.pack


def write(root: Path, step: int, fill: Callable[[Path], None], keep: int) -> Path:
    """Make `root/step-<n>` whole or not at all, then remove all but the last `keep`.

    Args:
        fill: called with an empty folder, into which it writes the files.

    Raises:
        OSError: when the disk is full, say; what was there before is untouched.
    """
    place, half = root / f"step-{step}", root / f"{HALF}step-{step}"
    clear_halves(root)
    if place.exists():  # a run that was resumed and stopped before its first update
        return place
    half.mkdir(parents=True)
    try:
        fill(half)
        files = sorted(path for path in half.rglob("*") if path.is_file())
        described = {str(path.relative_to(half)): _describe(path) for path in files}
        manifest = {"format": FORMAT, "step": step, "files": described}
        (half / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        for path in [*files, half / MANIFEST, half]:
            _force_to_disk(path)
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise
    os.replace(half, place)
    _force_to_disk(root)
    for old in all_in(root)[:-keep]:
        shutil.rmtree(old)
    return place


def all_in(root: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [p for p in root.glob("step-*") if p.name[5:].isdigit()]
    return sorted(found, key=lambda p: int(p.name[5:]))


def clear_halves(root: Path) -> None:
    """Remove what a killed writer left."""
    for half in root.glob(f"{HALF}*"):
        shutil.rmtree(half, ignore_errors=True)


def last_in(out: Path) -> Path:
    """The last checkpoint of a run's folder, checked.

    Raises:
        ConfigError: one line that names the file and what is wrong with it.
    """
    found = all_in(out / "checkpoints")
    if not found:
        raise ConfigError(f"--resume {out}: there is no checkpoint in it; start anew")
    try:
        check(found[-1])
    except ConfigError as error:
        other = f"; remove that folder to go on from {found[-2].name}" if len(found) > 1 else ""
        raise ConfigError(f"--resume {out}: {error}{other}") from None
    return found[-1]


def check(place: Path) -> None:
    """Compare every file of a checkpoint with its manifest.

    Raises:
        ConfigError: when one is missing, damaged or of another format.
    """
    manifest = read_json(place / MANIFEST)
    if manifest.get("format") != FORMAT:
        found = manifest.get("format")
        raise ConfigError(f"{place / MANIFEST} is of format {found}; this version reads format {FORMAT}")
    for name, expected in dict(manifest.get("files", {})).items():
        path = place / name
        if not path.is_file():
            raise ConfigError(f"{path} is missing")
        found = _describe(path)
        if found["bytes"] != expected.get("bytes"):
            raise ConfigError(f"{path} has {found['bytes']} bytes where {expected.get('bytes')} were written")
        if found != expected:
            raise ConfigError(f"{path} is damaged: its SHA-256 is not the one that was written down")


def read_json(path: Path) -> dict:
    """A JSON object from a file.

    Raises:
        ConfigError: when it is none.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise ConfigError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is damaged: it holds no JSON object")
    return value


def save_tensors(folder: Path, model, tokenizer, state: dict) -> None:
    """The policy as a Hugging Face folder that transformers and vLLM load, and `state` as `trainer.pt`.

    Raises:
        OSError: when writing fails, whatever the libraries call that.
    """
    import torch
    from safetensors import SafetensorError

    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        torch.save(state, folder / "trainer.pt")
    except (RuntimeError, SafetensorError) as error:
        raise OSError(" ".join(str(error).split())) from error


def save_buffer(folder: Path, state: dict) -> None:
    """`ReplayBuffer.state_dict()` as arrays and JSON."""
    np.savez(folder / "buffer.npz", **dict(zip(ARRAYS, state["trajectories"], strict=True)))
    rest = {key: value for key, value in state.items() if key != "trajectories"}
    (folder / "buffer.json").write_text(json.dumps(rest))


def load_buffer(folder: Path) -> dict | None:
    """What `save_buffer` wrote, or None where the run had no buffer (onpolicy)."""
    if not (folder / "buffer.json").exists():
        return None
    state = read_json(folder / "buffer.json")
    with np.load(folder / "buffer.npz", allow_pickle=False) as arrays:
        state["trajectories"] = tuple(arrays[name] for name in ARRAYS)
    state["recent"] = [(number, [tuple(uid) for uid in uids]) for number, uids in state["recent"]]
    return state


def _describe(path: Path) -> dict:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _force_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
