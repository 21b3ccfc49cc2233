"""What a run finds on its machine: cores, shared memory, files, folders. What is missing is told with its remedy."""

import math
import multiprocessing
import multiprocessing.util
import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from runtime.files import ConfigError

SHM = "/dev/shm"
FILES = (256, 4096)  # open files of a process: the fewest that a run needs, and what it asks for
MIB = 2**20


# --- cores ----------------------------------------------------------------------------------------------------------


def cpu_quota(root: Path = Path("/")) -> float:
    """Cores' worth of time that Linux's control groups allow, each of them and all above it; infinite without a limit.

    Args:
        root: folder with `proc` and `sys`; a test passes its own.
    """
    quota = math.inf
    for version, mount, path in _cpu_groups(root):
        folder = root / (mount + path).lstrip("/")
        top = root / mount.lstrip("/")
        for group in (folder, *folder.parents):
            quota = min(quota, _limit(group, version))
            if group == top:
                break
    return quota


def _cpu_groups(root: Path) -> Iterator[tuple[int, str, str]]:
    """(version of control groups, where they are mounted, path of this process's group below that)."""
    mounts = [(2, "/", "/sys/fs/cgroup"), (1, "/", "/sys/fs/cgroup/cpu"), (1, "/", "/sys/fs/cgroup/cpu,cpuacct")]
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) > 4 and kind[:1] == ["cgroup2"]:
            mounts.append((2, fields[3], fields[4]))
        elif len(fields) > 4 and kind[:1] == ["cgroup"] and "cpu" in kind[-1].split(","):
            mounts.append((1, fields[3], fields[4]))
    own = {1: "/", 2: "/"}
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" or "cpu" in controllers.split(","):
            own[2 if number == "0" else 1] = path
    for version, mounted, place in mounts:
        path = own[version]
        if mounted != "/" and (path + "/").startswith(mounted + "/"):  # a container sees only its own part
            path = path[len(mounted) :]
        yield version, place, "" if ".." in path else path


def _limit(group: Path, version: int) -> float:
    if version == 2:
        words = " ".join(_lines(group / "cpu.max")).split()
        quota, period = [*words, *("max", "100000")[len(words) :]][:2]
    else:
        quota, period = (" ".join(_lines(group / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
    if not (quota.isdigit() and period.isdigit() and int(quota) and int(period)):  # `max`, -1, missing, damaged
        return math.inf
    return int(quota) / int(period)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:  # not Linux, or hidden from this process
        return []


# --- shared memory, temporary files, open files ---------------------------------------------------------------------


def check_shared_memory(needed: int, folder: str = SHM) -> None:
    """Refuse to lay `needed` bytes into shared memory that has no room: writing there would end in a bus error.

    Raises:
        ConfigError: one line with the size that would do.
    """
    if sys.platform != "linux":
        return
    try:
        found = os.statvfs(folder)
    except OSError as error:
        raise ConfigError(f"there is no shared memory in {folder}: {error.strerror}; mount a tmpfs there") from None
    free, used = found.f_bavail * found.f_frsize, (found.f_blocks - found.f_bfree) * found.f_frsize
    if needed > free:
        size = math.ceil((used + needed) / MIB) + 16
        raise ConfigError(
            f"the searchers' copy of the weights needs {math.ceil(needed / MIB)} MB of shared memory, {folder} has "
            f"{free // MIB} MB free: `docker run --shm-size={size}m`, or `mount -o remount,size={size}m {folder}`"
        )


def check() -> None:
    """Refuse a machine on which no process of a run could start or talk to another one.

    Raises:
        ConfigError: one line with the remedy.
    """
    try:
        multiprocessing.util.get_temp_dir()
    except OSError:
        told = f"TMPDIR {os.environ['TMPDIR']}" if "TMPDIR" in os.environ else tempfile.gettempprefix()
        raise ConfigError(f"{told}: no folder for temporary files can be written; set TMPDIR to one that can") from None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES[0]:
        raise ConfigError(f"`ulimit -n` is {hard}: a run's processes open up to {FILES[0]} files each; raise it")
    if soft != resource.RLIM_INFINITY and soft < FILES[1]:
        most = FILES[1] if hard == resource.RLIM_INFINITY else min(hard, FILES[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        multiprocessing.get_context("spawn").Lock()
    except OSError as error:
        remedy = f"{SHM} must be there, and writable: `docker run --shm-size=1g`, or `mount -t tmpfs tmpfs {SHM}`"
        raise ConfigError(f"processes can't share memory ({error.strerror}); {remedy}") from None


# --- folders --------------------------------------------------------------------------------------------------------


def check_folders(folders: dict[str, Path]) -> None:
    """Refuse folders in which nothing can be written, without making any.

    Args:
        folders: option -> its folder, which may not exist yet.

    Raises:
        ConfigError: one line that names all of them.
    """
    problems = {option: why for option, folder in folders.items() if (why := _why_not(folder))}
    if problems:
        told = "; ".join(f"{option} {folders[option]}: {why}" for option, why in problems.items())
        raise ConfigError(f"{told}; name a folder that can be written with {' and '.join(problems)}")


def _why_not(folder: Path) -> str | None:
    """Why a folder can't be made or written; None when it can."""
    place = folder
    while True:
        try:
            place.stat()
            break
        except FileNotFoundError:
            if place.is_symlink():
                return f"{place} is a link to nothing"
            place = place.parent
        except NotADirectoryError:
            place = place.parent
        except OSError as error:
            return (error.strerror or str(error)).lower()
    if not place.is_dir():
        return f"{place} is a file"
    if any(len(os.fsencode(name)) > os.pathconf(place, "PC_NAME_MAX") for name in folder.relative_to(place).parts):
        return "file name too long"
    if os.access(place, os.W_OK | os.X_OK):
        return None
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        return f"{place} is read-only"
    return f"this user may not write in {place}"
