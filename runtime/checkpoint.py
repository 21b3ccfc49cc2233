"""Checkpoints: everything that a resumed run needs, in a folder that is either complete or absent.

`checkpoints/step-<n>/` holds the policy as a Hugging Face folder, `trainer.pt` (optimizer, schedules, head, reference,
random states), `buffer.npz` and `buffer.json` (the replay buffer), `progress.json` (counters), and `manifest.json` with
every file's size and SHA-256. The folder is written under another name, forced to disk and renamed. So a full disk or a
kill leaves the previous checkpoint as it was. Nothing in it is unpickled: tensors are read as safetensors or with
`weights_only`, arrays without pickling.

No error in saving ends a run. The first save is tried before the first update (`rehearse`). Later, when no checkpoint
can be written, the weights alone are kept in `checkpoints/weights-<n>/`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from runtime.files import ConfigError, read_json, whole_path, why
from runtime.metrics import Board

if TYPE_CHECKING:
    from multiprocessing.managers import BaseProxy

    from transformers import PreTrainedModel

log = logging.getLogger("tba_min.checkpoint")
FORMAT = 1
RUN_FILE = "config.json"
MANIFEST = "manifest.json"
HALF = ".writing-"  # a checkpoint that is being written, or whose writer died
COPIED = {".json", ".txt", ".jinja", ".model", ".tiktoken", ".py"}  # what a model folder has beside weights
OUR_OWN = (MANIFEST, "progress.json", "buffer.json", ".index.json")  # not copied: written anew
ARRAYS = ("head", "prompts", "responses", "log_mu")  # of served_buffer.pack, in its order


def write(root: Path, step: int, fill: Callable[[Path], None], keep: int, kind: str = "step") -> Path:
    """Write `root/<kind>-<n>` completely or not at all. Then remove all of that kind but the last `keep`.

    Args:
        fill: writes the files into the empty folder that it is given.

    Raises:
        OSError: for example when the disk is full; earlier checkpoints stay as they were.
    """
    place, half = root / f"{kind}-{step}", root / f"{HALF}{kind}-{step}"
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
    for old in all_in(root, kind)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return place


def all_in(root: Path, kind: str = "step") -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = {p: p.name.removeprefix(f"{kind}-") for p in root.glob(f"{kind}-*")}
    return sorted((p for p, number in found.items() if number.isdigit()), key=lambda p: int(found[p]))


def clear_halves(root: Path) -> None:
    """Remove the unfinished folders of killed writers."""
    for half in root.glob(f"{HALF}*"):
        shutil.rmtree(half, ignore_errors=True)


def step_of(place: Path) -> int:
    """The update after which a checkpoint was written, from its folder's name."""
    return int(place.name[5:])


def run_of(text: str) -> tuple[Path, Path | None]:
    """The run's folder that --resume means, and the checkpoint in it where one is named.

    It may name the run, its checkpoints' folder, one checkpoint, or a file in any of them.

    Raises:
        ConfigError: one line that says what is there instead.
    """
    place = Path(whole_path(text, "--resume"))
    for out in (place, *list(place.parents)[:3]):
        inside = place.relative_to(out).parts
        if not (out / RUN_FILE).is_file() or (out.parent.name == "checkpoints" and out.name.startswith("step-")):
            continue
        names = [p.name for p in all_in(out / "checkpoints")]
        if inside[:1] == ("checkpoints",) and len(inside) > 1:
            if inside[1] not in names:
                raise ConfigError(f"--resume {text}: there is no such checkpoint; {_there(out, names)}")
            return out, out / "checkpoints" / inside[1]
        if not inside or place.exists():
            return out, None
        raise ConfigError(f"--resume {text}: there is no such folder; {_there(out, names)}")
    if not place.exists():
        raise ConfigError(f"--resume {text}: there is no such folder")
    runs = sorted(place.glob(f"*/{RUN_FILE}"), key=lambda p: p.stat().st_mtime) if place.is_dir() else []
    newest = f"; the newest one in it is {runs[-1].parent}" if runs else ""
    raise ConfigError(f"--resume {text}: {RUN_FILE} is not there, so this is no run{newest}")


def _there(out: Path, names: list[str]) -> str:
    return f"{out} has {', '.join(names)}" if names else f"{out} has none"


def last_in(place: Path) -> Path:
    """The last checkpoint of a run's folder, or the one that is named itself, checked.

    Raises:
        ConfigError: one line that names the file and its problem.
    """
    found = [place] if place.parent.name == "checkpoints" else all_in(place / "checkpoints")
    if not found:
        raise ConfigError(f"--resume {place}: there is no checkpoint in it; start a new run")
    try:
        check(found[-1])
    except ConfigError as error:
        others = all_in(found[-1].parent)
        before = [p for p in others if step_of(p) < step_of(found[-1])]
        other = f"; --resume {before[-1]} goes on from the one before" if before else ""
        raise ConfigError(f"--resume {place}: {error}{other}") from None
    return found[-1]


def set_aside_after(start: Path) -> Path | None:
    """Move what a run did after a checkpoint out of its way: later checkpoints, with a copy of the metrics so far.

    Returns the folder where they are now, `checkpoints/aside-<n>`; None when there was nothing.
    """
    root = start.parent
    later = [place for place in all_in(root) if step_of(place) > step_of(start)]
    if not later:
        return None
    aside = root / f"aside-{1 + len(list(root.glob('aside-*')))}"
    aside.mkdir()
    if (metrics := root.parent / "metrics.jsonl").exists():
        shutil.copy2(metrics, aside)
    for place in later:
        os.replace(place, aside / place.name)
    return aside


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
            raise ConfigError(f"{path} has {found['bytes']} bytes where its manifest has {expected.get('bytes')}")
        if found != expected:
            raise ConfigError(f"{path} is damaged: its SHA-256 differs from the one in its manifest")


class Policy(NamedTuple):
    """What is saved of a policy."""

    model: PreTrainedModel
    source: Path  # folder that it was started from: its other files (tokenizer, code, ...) are copied as they are

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder. Where transformers can't save the model, its weights are written plainly."""
        for path in self.source.iterdir():
            if path.is_file() and path.suffix in COPIED and not path.name.endswith(OUR_OWN):
                shutil.copyfile(path, folder / path.name)
        try:
            self._save_model(folder)
        except Exception as error:  # any error of a library: it must not cost the weights
            for path in folder.glob("*.safetensors*"):
                path.unlink()
            self._save_plainly(folder)
            log.warning("transformers could not save the model (%s): its weights were saved without it", why(error))

    def _save_model(self, folder: Path) -> None:
        from transformers import GenerationConfig

        own = self.model.generation_config
        self.model.generation_config = GenerationConfig()  # transformers refuses to save some that it could load
        try:
            self.model.save_pretrained(folder)
        finally:
            self.model.generation_config = own
        place = self.source / "generation_config.json"
        shutil.copyfile(place, folder / place.name) if place.exists() else (folder / place.name).unlink(missing_ok=True)

    def _save_plainly(self, folder: Path) -> None:
        from safetensors.torch import save_file

        once = {t.data_ptr(): name for name, t in reversed(self.model.state_dict().items())}  # tied ones share memory
        weights = {name: t.cpu().contiguous() for name, t in self.model.state_dict().items() if name in once.values()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})


State = tuple[dict, dict | None, dict]  # Learner.state_dict(); RemoteBuffer.packed_state(), None in onpolicy; progress


def save(
    root: Path, step: int, keep: int, policy: Policy, state: Callable[[], State]
) -> tuple[Path | None, str | None]:
    """Write `root/step-<n>`: the policy as a Hugging Face folder, and the rest that a resumed run needs.

    Args:
        step: updates so far.
        keep: checkpoints to keep.
        state: called for what is saved beside the policy; `progress` (counters) becomes JSON.

    Returns:
        (its folder, None), or (None, what went wrong, and whether the weights at least are kept).
    """
    try:
        learner, buffer, progress = state()
        return write(root, step, partial(_fill, policy, learner, buffer, progress), keep), None
    except Exception as error:  # of the disk, of a library, or of the buffer's process: none of them ends a run
        problem = why(error)
    try:
        kept = write(root, step, policy.save, 1, kind="weights")
        return None, f"{problem}; the weights alone are kept in {kept}"
    except Exception as error:
        return None, f"{problem}; nor can the weights alone be written: {why(error)}"


def rehearse(root: Path, policy: Policy, state: Callable[[], State]) -> None:
    """Write a checkpoint and throw it away: what would go wrong with the first one goes wrong before the first update.

    Raises:
        ConfigError: one line.
    """
    place = root / f"{HALF}rehearsal"
    try:
        clear_halves(root)
        place.mkdir(parents=True)
        _fill(policy, *state(), place)
    except EOFError:  # the buffer's process is gone, which the parent reports
        raise
    except Exception as error:
        raise ConfigError(f"no checkpoint can be written in {root}: {why(error)}") from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _fill(policy: Policy, learner: dict, buffer: dict | None, progress: dict, folder: Path) -> None:
    """Write the files of a checkpoint."""
    import torch

    policy.save(folder)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    torch.save({"learner": learner, "rng": torch.get_rng_state(), "rng_cuda": cuda}, folder / "trainer.pt")
    if buffer is not None:
        save_buffer(folder, buffer)
    (folder / "progress.json").write_text(json.dumps(progress, indent=2) + "\n")


def restore(folder: Path) -> tuple[dict, dict]:
    """Restore torch's random states; return the learner's state and the progress that `save` wrote."""
    import torch

    state = torch.load(folder / "trainer.pt", weights_only=True, map_location="cpu")
    torch.set_rng_state(state["rng"])
    if state["rng_cuda"]:
        torch.cuda.set_rng_state_all(state["rng_cuda"])
    return state["learner"], read_json(folder / "progress.json")


def save_buffer(folder: Path, state: dict) -> None:
    """Save a buffer's packed state as arrays and JSON."""
    np.savez(folder / "buffer.npz", **dict(zip(ARRAYS, state["trajectories"], strict=True)))
    rest = {key: value for key, value in state.items() if key != "trajectories"}
    (folder / "buffer.json").write_text(json.dumps(rest))


def load_buffer(folder: Path) -> dict | None:
    """The packed state that `save_buffer` wrote; None when the run had no buffer (onpolicy)."""
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
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that can't do it for folders
            raise
    finally:
        os.close(handle)


def take_up(start: Path, board: Board, buffer: BaseProxy | None) -> tuple[int, int]:
    """Restore a run's buffer and its searchers' counters from a checkpoint (the parent's part of a resume).

    Returns the checkpoint's update, and the first incarnation number that no searcher had, so that no uid occurs twice.
    """
    if aside := set_aside_after(start):
        log.info("what the run did after %s is kept in %s", start.name, aside)
    progress, state = read_json(start / "progress.json"), load_buffer(start)
    if not buffer or not state:
        return progress["step"], 0
    buffer.load_packed_state(state)
    for name in Board.COUNTS:  # shared out anew: the number of searchers may have changed
        for i in range(board.searchers):
            board.set(Board.SEARCHERS + i, name, sum(progress["source"][name][i :: board.searchers]))
    return progress["step"], 1 + max((uid[1] for uid in state["trajectories"][0]["uid"].tolist()), default=-1)
