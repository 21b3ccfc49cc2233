"""Shared by the tests of whole runs: a tiny model, a way to start a run, and to see what it left behind."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from config import visible_gpus
from runtime.files import read_jsonl

settings.register_profile("shared machine", deadline=None)  # how long an example takes is nobody's promise
settings.load_profile("shared machine")
ROOT = Path(__file__).resolve().parent.parent
SHORT = ["--gpus", "0", "--steps", "12", "--prompts-per-batch", "4", "--samples-per-prompt", "4", "--eval-every", "5"]
SHORT += ["--eval-prompts", "50", "--in-flight", "64", "--max-seconds", "60", "--decay-steps", "0"]
SHORT += ["--task", "tests/checksum.py:make_task"]
ENDLESS = [*SHORT, "--steps", "100000", "--max-seconds", "0", "--engine", "hf"]


def pytest_configure():
    """Signals that the shell has switched off (nohup, a job in the background) are switched on for the runs here."""
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(signum) == signal.SIG_IGN:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)


def pytest_collection_modifyitems(items):
    """Tests marked `gpu` are skipped where there is none."""
    if not visible_gpus():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A model folder with a character tokenizer: the start model's shape, with random weights."""
    import torch

    from tasks.start_model import make_model, make_tokenizer

    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("tiny")
    make_model().save_pretrained(place)
    make_tokenizer().save_pretrained(place)
    return place


@pytest.fixture(scope="session")
def finished(tmp_path_factory, tiny_folder):
    """The folder of a run that has ended, with two checkpoints. Tests work on copies."""
    job = Job(tmp_path_factory.mktemp("finished") / "run", *SHORT, "--engine", "hf", "--checkpoint-every", "8",
              "--model", tiny_folder)  # fmt: skip
    assert job.wait() == 0, job.text
    job.assert_nothing_left()
    shutil.rmtree(job.tmp)
    return job.out


class Job:
    """A run of tba_min.py as a process of its own.

    Args:
        again: resume the run in `out`.
        shell: a line of bash in which {} stands for the command; the job is then the shell.
        env: further environment variables.
        options: of subprocess.Popen.
    """

    def __init__(
        self, out: Path, *args: str, again: bool = False, shell: str = "", env: dict | None = None, **options: object
    ) -> None:
        self.out = out
        self.shm: set[str] = set()  # files in /dev/shm that its processes were seen to use
        self.tmp = Path(tempfile.mkdtemp(prefix="job-"))  # its own: sockets left can be seen; short, as they need it
        self.text = ""
        where = ["--resume" if again else "--out", str(out)]
        command = [sys.executable, str(ROOT / "tba_min.py"), *where, *map(str, args)]
        if shell:
            command = ["bash", "-o", "pipefail", "-c", shell.replace("{}", shlex.join(command))]
        self.output = open(self.tmp / "output", "w+")
        usual = {"stdout": self.output, "stderr": subprocess.STDOUT, "start_new_session": True}
        env = os.environ | {"TMPDIR": str(self.tmp)} | (env or {})
        self.process = subprocess.Popen(command, cwd=ROOT, env=env, **usual | options)

    def wait(self, timeout: float = 240) -> int:
        """Wait for its end; keeps what it printed in `text`."""
        deadline = time.time() + timeout
        while self.process.poll() is None:
            self.family()  # notes the shared memory in use
            if time.time() > deadline:
                self.end()
                pytest.fail(f"not ended after {timeout} s:\n{self.printed()[-3000:]}")
            time.sleep(0.2)
        self.text = self.printed()
        return self.process.returncode

    def wait_for(self, condition, timeout: float = 120):
        """Poll until `condition(self)` is true."""
        deadline = time.time() + timeout
        while not (value := condition(self)):
            if self.process.poll() is not None or time.time() > deadline:
                pytest.fail(f"the run ended or nothing came in {timeout} s:\n{self.printed()[-3000:]}")
            time.sleep(0.1)
        return value

    def end(self) -> None:
        """Kill the parent: its children notice and end, its resource tracker removes semaphores. Then what is left."""
        family = self.family()
        self.process.kill()
        self.process.wait()
        for process in psutil.wait_procs(family, timeout=10)[1]:
            process.kill()

    def printed(self) -> str:
        return (self.tmp / "output").read_text(errors="replace")

    def family(self) -> list[psutil.Process]:
        """The run's parent and all its descendants."""
        try:
            parent = psutil.Process(self.process.pid)
            family = [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        for process in family:
            self.shm |= shared_memory(process.pid)
        return family

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def pids(self) -> dict[str, int]:
        return json.loads((self.out / "pids.json").read_text())

    def rows(self) -> list[dict]:
        path = self.out / "metrics.jsonl"
        return read_jsonl(path) if path.exists() else []

    def summary(self) -> dict:
        return json.loads((self.out / "summary.json").read_text())

    def assert_nothing_left(self, family: list[psutil.Process] = ()) -> None:
        """No process that `pids.json` or `family` names, and no shared memory, is left."""
        deadline = time.time() + 10
        alive = [psutil.Process(p) for p in self.pids().values() if psutil.pid_exists(p)] + list(family)
        while (alive := [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]) and (
            time.time() < deadline
        ):
            time.sleep(0.1)
        assert not alive, f"still running: {alive}"
        left = [path for path in self.shm if os.path.exists(path)]
        assert not left, f"shared memory is left: {left}"
        assert self.shm, "no shared memory was seen: this test has not looked"
        deadline = time.time() + 5
        while (sockets := list(self.tmp.glob("pymp-*"))) and time.time() < deadline:
            time.sleep(0.1)
        assert not sockets, f"sockets are left: {sockets}"


def shared_memory(pid: int) -> set[str]:
    """Files in /dev/shm that a process has mapped: semaphores and shared tensors."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it has just ended
        return set()
    return {
        "/dev/shm/" + line.split("/dev/shm/")[1].split(" (deleted)")[0]
        for line in maps.splitlines()
        if "/dev/shm/" in line
    }


@pytest.fixture
def start_job(tmp_path):
    """start_job(*args) -> Job; whatever still runs at the test's end is killed."""
    jobs: list[Job] = []

    def start(*args: str, resume: Path | None = None, **options: object) -> Job:
        jobs.append(Job(resume or tmp_path / f"run{len(jobs)}", *args, again=bool(resume), **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()
        shutil.rmtree(job.tmp, ignore_errors=True)
