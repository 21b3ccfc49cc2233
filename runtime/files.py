"""Files: written completely or not at all; a one-line error when a file is damaged; JSON lines.

What a run writes about itself must never end it. Here such a failure becomes a log record, which `RunLog`
(runtime/child.py) shows the first time and counts.
"""

import contextlib
import fcntl
import io
import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

ROOM = 65_536  # bytes that must be free in a run's folder at its start


class ConfigError(ValueError):
    """An option, or a file that it names, is wrong. The text is one line with the problem and the remedy."""


def whole_path(text: str, option: str) -> str:
    """The absolute path that a user means: `~` is expanded, which a shell does not do after `=`; links are followed.

    Raises:
        ConfigError: when there is no such home folder, or links lead in a circle.
    """
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise ConfigError(f"{option} {text}: there is no home folder {text.split('/')[0]}")
    try:
        path = Path(expanded).resolve()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except (OSError, RuntimeError, ValueError) as error:  # too long, a circle, no working directory, a zero byte
        raise ConfigError(f"{option} {text}: {getattr(error, 'strerror', None) or error}") from None
    return str(path)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file under another name, then rename it: a reader sees all of the old file or all of the new one."""
    new = path.with_name(path.name + ".new")
    try:
        new.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        os.replace(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()  # half a file helps nobody, and takes room on a full disk
        raise


def lost(name: str, reason: str) -> None:
    """Report that something was not written, or not shown. The run goes on without it."""
    logging.getLogger("tba_min.files").warning("%s", reason, extra={"lost": name})


def why(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join([f"{type(error).__name__}:", *str(error).split()])[:200]


@contextlib.contextmanager
def bookkeeping(name: str) -> Iterator[None]:
    """For work that a run can do without: an error in it, whatever its kind, is reported and goes no further."""
    try:
        yield
    except Exception as error:
        lost(name, why(error))


def read_json(path: Path) -> dict:
    """Read a JSON object from a file.

    Raises:
        ConfigError: when the file holds none.
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


def safetensors_header(path: Path) -> dict[str, dict]:
    """Name -> {dtype, shape, data_offsets} of each tensor in a safetensors file, without reading the tensors.

    The format: 8 bytes with the length of a JSON header, the header, the tensors.

    Raises:
        ConfigError: when the header is damaged, or the file is shorter or longer than the header says.
    """
    problem = None
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, size)))
        header.pop("__metadata__", None)
        end = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        if size != end:
            problem = f"has {size} bytes where its header asks for {end}"
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        problem = "does not begin with a safetensors header"
    if problem:
        raise ConfigError(f"{path} is damaged: it {problem}")
    return header


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def named_weight_files(folder: Path) -> list[Path]:
    """The files that transformers loads from a model folder, which may hold others: adapters, other precisions.

    That is the file that config.json names (`transformers_weights`), or else model.safetensors, or else those that
    model.safetensors.index.json names. Nothing where the folder has none of them.

    Raises:
        ConfigError: when the index is damaged.
    """
    named = read_json(folder / "config.json").get("transformers_weights")
    names = [named] if isinstance(named, str) else [WEIGHTS, INDEX]
    first = next((folder / name for name in names if (folder / name).is_file()), None)
    if first is None or not first.name.endswith(".index.json"):
        return [first] if first else []
    shards = read_json(first).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(s, str) for s in shards.values()):
        raise ConfigError(f"{first} is damaged: it has no weight_map that names files")
    return [folder / shard for shard in sorted(set(shards.values()))]


def weight_files(folder: Path) -> list[Path]:
    """`named_weight_files`, all of which are there.

    Raises:
        ConfigError: when one is missing.
    """
    files = named_weight_files(folder)
    if missing := [path.name for path in files if not path.is_file()]:
        raise ConfigError(f"{folder} lacks {missing[0]}, which {INDEX} names ({len(missing)} of {len(files)} missing)")
    return files


def check_model_files(folder: Path) -> None:
    """Refuse a model folder whose weights are missing, cut off, or not safetensors. Files not loaded do not matter.

    Raises:
        ConfigError: one line that names the file and its problem.
    """
    if not (files := weight_files(folder)):
        raise ConfigError(
            f"{folder} has no *.safetensors that are loaded ({WEIGHTS}, or what {INDEX} names); "
            "weights in other formats can run code and are not read"
        )
    for path in files:
        safetensors_header(path)


def lock_folder(folder: Path) -> TextIO:
    """Lock a run's folder for this process. The lock ends with the process, even when that is killed.

    Returns the lock; keep it.

    Raises:
        ConfigError: when another run has the lock, or nothing can be written there.
    """
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.write(" " * ROOM)  # a full disk is found now rather than at the first line of metrics
        lock.flush()
        lock.truncate(0)
    except BlockingIOError:
        raise ConfigError(f"{folder}: a run is at work in this folder; end it first, or name another") from None
    except OSError as error:
        for place in made:
            with contextlib.suppress(OSError):  # those that were never made
                (place / ".lock").unlink(missing_ok=True)
                place.rmdir()
        raise ConfigError(f"--out {folder}: can't be written ({error.strerror}); name another folder") from None
    return lock


# --- growing files --------------------------------------------------------------------------------------------------


class Lines:
    """A growing text file with one writer. A line is in it as soon as it is written.

    A line that can't be written is reported as lost. The next one is tried again, and starts a line of its own, also
    when a full disk or a kill has left half of one.
    """

    def __init__(self, path: Path, lost: Callable[[str, str], None] = lost) -> None:
        self.path, self.lost = path, lost
        self._file: io.FileIO | None = None

    def write(self, line: str) -> None:
        try:
            self._append(line.encode("utf-8", "backslashreplace") + b"\n")
        except OSError as error:
            self.lost(self.path.name, why(error))

    def _append(self, data: bytes) -> None:
        if self._file is None:
            self._file = open(self.path, "ab+", buffering=0)
            size = os.fstat(self._file.fileno()).st_size
            if size and os.pread(self._file.fileno(), 1, size - 1) != b"\n":
                data = b"\n" + data
        whole = os.fstat(self._file.fileno()).st_size
        try:
            while data:  # a nearly full disk takes a part
                data = data[self._file.write(data) :]
        except OSError:
            file, self._file = self._file, None  # opened anew for the next line: it may be a new file by then
            with contextlib.suppress(OSError), file:
                file.truncate(whole)
            raise


class JsonLines:
    """A growing file of JSON lines, one object in each."""

    def __init__(self, path: Path) -> None:
        self._lines = Lines(path)

    def write(self, row: dict) -> None:
        with bookkeeping(self._lines.path.name):
            self._lines.write(as_json(row))


def as_json(value: object, indent: int | None = None) -> str:
    """JSON, where a number that is not finite is null: JSON has no NaN."""
    try:
        return json.dumps(value, allow_nan=False, indent=indent)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_jsonl(path: Path) -> list[dict]:
    """The rows of a JSONL file. A line that was cut off, by a kill or a full disk, is left out."""
    rows = []
    if is_special(path):
        return rows
    for line in Path(path).read_text(encoding="utf-8", errors="replace").split("\n"):
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def is_special(path: Path) -> bool:
    """Whether a path is there and no plain file: a device may be read without end."""
    return os.path.exists(path) and not os.path.isfile(path)


def keep_rows_before(path: Path, step: int) -> None:
    """Drop the rows of a metrics file from update `step` on: a resumed run does these updates again.

    The file is cut where it is, which needs no room on a full disk.
    """
    if is_special(path):
        return
    with bookkeeping(path.name), open(path, "ab+") as file:
        file.seek(0)
        kept = 0
        for line in file:
            with contextlib.suppress(json.JSONDecodeError, UnicodeDecodeError):
                if json.loads(line)["step"] >= step:
                    break
            kept += len(line)
        file.truncate(kept)
