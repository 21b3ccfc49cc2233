"""Files: written completely or not at all; a one-line error when a file is damaged; JSON lines."""

import contextlib
import fcntl
import json
import os
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


def check_model_files(folder: Path) -> None:
    """Refuse a model folder whose weights are missing, cut off, or not safetensors.

    Raises:
        ConfigError: one line that names the file and its problem.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no *.safetensors; weights in other formats can run code and are not read")
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
