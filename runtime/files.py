"""Files: written completely or not at all; a one-line error when a file is damaged; JSON lines."""

import fcntl
import json
import os
from pathlib import Path
from typing import TextIO


class ConfigError(ValueError):
    """An option, or a file that it names, is wrong. The text is one line with the problem and the remedy."""


def one_line(error: BaseException) -> str:
    """An error's type and text, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def write_whole(path: Path, text: str) -> None:
    """Write a text file under another name, then rename it: a reader sees all of the old file or all of the new one."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


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
    size, problem = path.stat().st_size, None
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, size)))
        header.pop("__metadata__", None)
        end = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        if size != end:
            problem = f"has {size} bytes where its header asks for {end}"
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
        ConfigError: when another run has the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / ".lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{folder}: a run is at work in this folder; end it first, or name another") from None
    return lock


# --- JSON lines: one object in each line ----------------------------------------------------------------------------


class JsonLines:
    """A growing file of JSON lines. Each line is flushed as soon as it is written."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a", encoding="utf-8")

    def write(self, row: dict) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()


def read_jsonl(path: Path) -> list[dict]:
    """The rows of a JSONL file; a last line that was cut off is left out."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def keep_rows_before(path: Path, step: int) -> None:
    """Drop the rows of a metrics file from update `step` on: a resumed run does these updates again."""
    rows = [row for row in read_jsonl(path) if row["step"] < step] if path.exists() else []
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
