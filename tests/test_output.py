"""What a run says and writes about itself never decides how it ends: terminals, pipes, full disks, signals."""

import contextlib
import errno
import fcntl
import io
import json
import logging
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading

import pytest
from conftest import ENDLESS, ROOT, SHORT

from runtime.files import JsonLines, Lines, as_json, bookkeeping, keep_rows_before, read_jsonl, write_whole
from runtime.streams import Forgiving, open_streams

HF = ["--engine", "hf"]
TEXT = ("held-out accuracy  ", "busy               trainer", "bottleneck         ")  # of the summary


def trains(job):
    return job.wait_for(lambda j: len(j.rows()) > 3 and j.family())


def assert_saved(job, outcome: str, code: int) -> None:
    """The run ended as it deserved, whatever became of its output."""
    assert job.wait(90) == code, job.text
    job.assert_nothing_left()
    assert job.summary()["outcome"] == outcome and job.summary()["steps"] > 0
    assert list((job.out / "checkpoints").iterdir())
    assert "Traceback" not in job.text and "Exception ignored" not in job.text
    log = (job.out / "run.log").read_text(encoding="utf-8")
    assert all(text in log for text in (*TEXT, "β²·loss", str(job.out))) and "Traceback" not in log


# --- output ---------------------------------------------------------------------------------------------------------

OUTPUTS = {  # how it is started: shell line, environment
    "the reader leaves": ("{} | head -1", {}),
    "no standard output": ("{} >&-", {}),
    "no standard error": ("{} 2>&-", {}),
    "no standard stream": ("{} <&- >&- 2>&-", {}),
    "a full disk": ("{} >/dev/full 2>/dev/full", {}),
    "ascii": ("{}", {"PYTHONIOENCODING": "ascii", "NO_COLOR": "1"}),
    "latin-1": ("{}", {"PYTHONIOENCODING": "latin-1", "TERM": ""}),
    "a locale without UTF-8": ("{}", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTPUTS)
def test_output_that_fails_changes_nothing(start_job, tiny_folder, name):
    shell, env = OUTPUTS[name]
    job = start_job(*SHORT, *HF, "--model", tiny_folder, shell=shell, env=env)
    job.wait_for(lambda j: j.rows() and j.family())
    assert_saved(job, "completed", 0)
    if name == "ascii":
        assert "imbalance" in job.text and job.text.isascii()


@pytest.mark.slow
def test_ctrl_c_takes_the_reader_along(start_job, tiny_folder):
    """As in a terminal: all processes of the group get it, `tee` dies."""
    job = start_job(*ENDLESS, "--model", tiny_folder, shell="trap : INT; {} | tee /dev/null; exit ${PIPESTATUS[0]}")
    trains(job)
    os.killpg(job.process.pid, signal.SIGINT)
    assert_saved(job, "interrupted", 130)
    assert job.summary()["ended_by"] == "Ctrl-C"


class Terminal:
    """A pseudo-terminal, and everything that a run shows on it."""

    def __init__(self, columns: int, rows: int = 24) -> None:
        self.ours, self.theirs = pty.openpty()
        self.resize(columns, rows)
        self.seen = b""
        threading.Thread(target=self._read, daemon=True).start()

    def resize(self, columns: int, rows: int = 24) -> None:
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(self.ours, 4096):
                self.seen += data

    def options(self) -> dict:
        def own() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        streams = dict.fromkeys(("stdin", "stdout", "stderr"), self.theirs)
        return streams | {"start_new_session": False, "preexec_fn": own, "pass_fds": ()}


@pytest.mark.slow
@pytest.mark.parametrize("columns, term", [(40, "xterm"), (20, "xterm"), (0, "xterm"), (40, "dumb"), (120, "xterm")])
def test_a_terminal_of_any_width(start_job, tiny_folder, columns, term):
    terminal = Terminal(columns)
    args = [*SHORT, *HF, "--eval-every", 1, "--steps", 30, "--model", tiny_folder]
    job = start_job(*args, env={"TERM": term, "COLUMNS": ""}, **terminal.options())
    trains(job)
    if columns == 40:
        terminal.resize(20)
    assert_saved(job, "completed", 0)
    shown = terminal.seen.decode()
    assert "update" in shown and "…" not in shown.replace("...", "")
    assert ("searchers busy" in shown) == (columns == 120)  # 0 is unknown: 80


@pytest.mark.slow
def test_a_terminal_that_is_closed(start_job, tiny_folder):
    """The kernel sends SIGHUP to all processes of the terminal, and every write fails."""
    terminal = Terminal(80)
    job = start_job(*ENDLESS, "--model", tiny_folder, env={"TERM": "xterm"}, **terminal.options())
    trains(job)
    os.close(terminal.theirs)
    os.close(terminal.ours)
    job.wait(60)
    assert_saved(job, "interrupted", 130)
    assert job.summary()["ended_by"] == "SIGHUP"


@pytest.mark.slow
def test_a_terminal_that_stands_still(start_job, tiny_folder):
    """Ctrl-S, or a pager that nobody scrolls: the run goes on."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, 1031, 4096)  # F_SETPIPE_SZ: soon full
    job = start_job(*SHORT, *HF, "--steps", 300, "--eval-every", 1, "--model", tiny_folder, stdout=writing)
    os.close(writing)
    assert_saved(job, "completed", 0)
    os.close(reading)


def test_help_and_errors_on_poor_outputs():
    def python(line: str, **env: str) -> subprocess.CompletedProcess:
        shell = ["bash", "-o", "pipefail", "-c", line.replace("{}", f"{sys.executable} tba_min.py")]
        return subprocess.run(shell, cwd=ROOT, capture_output=True, env=os.environ | env)

    for line in ("{} --help | head -1", "{} --help >/dev/full", "{} --help >&-", "{} --dry-run --gpus 0 | true"):
        done = python(line)
        assert (done.returncode, done.stderr) == (0, b""), line
    done = python("{} --task /nowhere/π.py:β 2>&1 >&-", PYTHONIOENCODING="ascii")
    assert done.returncode == 2 and done.stdout.count(b"\n") == 1 and b"/nowhere/pi.py:beta" in done.stdout


def test_characters_that_an_output_lacks_are_replaced():
    open_streams()  # pytest's own streams stay
    text = "π → β²·x … ╭─╮ 你 \udcff"
    plain = b"pi -> beta^2*x ... +-+ \\u4f60 \\udcff"
    assert text.encode("ascii", "plain") == plain
    assert text.encode("cp1252", "plain").startswith(b"pi -> beta\xb2\xb7x \x85 +-+")
    assert text.encode("utf-8", "plain").decode().endswith("你 \\udcff")


def test_a_stream_that_cannot_be_written_is_no_error(tmp_path):
    reading, writing = os.pipe()
    stream = io.TextIOWrapper(io.BufferedWriter(Forgiving(writing)), "utf-8", line_buffering=True)
    os.set_blocking(writing, False)
    for _ in range(100):
        print("x" * 10_000, file=stream)  # nobody reads
    os.read(reading, 1 << 20)
    print("heard again", file=stream)
    assert os.read(reading, 1 << 20).endswith(b"heard again\n")
    os.close(reading)
    print("nobody is there", file=stream)
    stream.close()
    os.close(writing)
    with open("/dev/full", "wb") as full:
        print("full", file=io.TextIOWrapper(io.BufferedWriter(Forgiving(full.fileno())), write_through=True))


# --- bookkeeping ----------------------------------------------------------------------------------------------------


class Reports(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.names.append(record.lost)


@pytest.fixture
def reports():
    handler = Reports()
    logging.getLogger("tba_min.files").addHandler(handler)
    yield handler.names
    logging.getLogger("tba_min.files").removeHandler(handler)


@contextlib.contextmanager
def files_of_at_most(size: int):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_line_is_whole_or_absent_and_the_next_ones_are_tried(tmp_path, reports):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "lo')  # what a killed writer left
    file = JsonLines(path)
    file.write({"step": 2})
    with files_of_at_most(path.stat().st_size + 5):
        file.write({"step": 3})  # its first five bytes fit
        file.write({"step": 4})
    file.write({"step": 5, "loss": float("nan"), "all": [float("inf")]})
    file.write({"step": 6, "bad": object()})
    assert [row["step"] for row in read_jsonl(path)] == [0, 2, 5]
    assert reports == ["rows.jsonl"] * 3
    assert json.loads(path.read_text().split("\n")[-2], parse_constant=pytest.fail)["all"] == [None]
    keep_rows_before(path, 5)
    file.write({"step": 7})
    assert [row["step"] for row in read_jsonl(path)] == [0, 2, 7]


def test_places_that_cannot_be_written(tmp_path, reports):
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", tmp_path / "nowhere" / "x", "/dev/full"):
        Lines(tmp_path / path).write("text")
    with bookkeeping("any"):
        raise KeyError("of whatever kind")
    assert reports == ["folder", "x", "full", "any"]
    (tmp_path / "nowhere").mkdir()
    late = Lines(tmp_path / "folder" / "gone" / "x")
    late.write("lost")
    late.path.parent.mkdir()
    late.write("kept \udcff")
    assert late.path.read_text() == "kept \\udcff\n"
    with files_of_at_most(10), pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        write_whole(tmp_path / "whole", "x" * 100)
    assert not list(tmp_path.glob("whole*"))


def test_json_knows_no_nan():
    assert as_json({"a": (1.5, float("-inf")), "b": {"c": float("nan")}}) == '{"a": [1.5, null], "b": {"c": null}}'


def test_nothing_that_is_written_beside_decides_the_outcome(start_job, tiny_folder, tmp_path):
    """Nearly everything fails at once; training, checkpoint and summary do not."""
    out = tmp_path / "run0"
    for name in ("timeline.json", "pids.json.new", "trainer.log"):
        (out / name).mkdir(parents=True)
    for name in ("run.log", "searcher-0.jsonl", "searcher-0.log", "events-trainer.jsonl", "trainer.spans.json.new"):
        (out / name).symlink_to("/dev/full")
    (out / "figures").write_text("a file")
    env = {"MPLBACKEND": "Qt4Agg", "MPLCONFIGDIR": "/proc/nowhere"}
    job = start_job(*SHORT, *HF, "--event-log", "--model", tiny_folder, env=env)
    job.pids = lambda: {}  # which could not be written
    job.wait_for(lambda j: j.rows() and j.family())
    assert job.wait(90) == 0, job.text
    job.assert_nothing_left()
    assert "Traceback" not in job.text
    summary = job.summary()
    assert summary["outcome"] == "completed" and len(job.rows()) == summary["steps"] == 12 and summary["checkpoint"]
    full = "No space left on device"
    for name, reason in {"run.log": full, "searcher-0.jsonl": full, "events-trainer.jsonl": full, "trainer.log": "",
                         "timeline.json": "", "pids.json": "", "figures": ""}.items():  # fmt: skip
        assert f"{name} was not written" in summary["problem"] and reason in summary["problem"]
        assert job.text.count(f"tba_min: {name} can't be written ({reason}") == 1, name
    assert all(text in job.text for text in TEXT)


@pytest.mark.slow
def test_metrics_that_are_never_written(start_job, tiny_folder, tmp_path):
    (tmp_path / "run0").mkdir()
    for name in ("metrics.jsonl", "trainer.log", "events-searcher-0.jsonl", "summary.json", "timeline.json"):
        (tmp_path / "run0" / name).symlink_to("/dev/full")
    job = start_job(*SHORT, *HF, "--event-log", "--model", tiny_folder)
    assert job.wait(90) == 0, job.text
    job.assert_nothing_left()
    problem = job.summary()["problem"]
    assert "metrics.jsonl was not written (12 times): No space left on device" in problem
    assert "metrics.jsonl has no update in it" in problem and "Traceback" not in job.text


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["full for a while", "full to the end", "no folder", "figures"])
def test_a_disk_that_is_full_for_a_while(start_job, tiny_folder, tmp_path, fault):
    import psutil

    env = {}
    if fault == "figures":
        (tmp_path / "matplotlib.py").write_text("raise SystemError('broken')")
        env = {"PYTHONPATH": str(tmp_path)}
    args = [*SHORT, *HF, "--steps", 400, "--max-seconds", 0, "--model", tiny_folder]
    job = start_job(*args, env=env, shell="{} | cat")  # a pipe: what is shown has its own limit
    family = trains(job)
    ours = [psutil.Process(pid) for pid in job.pids().values()]
    if fault == "no folder":
        subprocess.run(["rm", "-rf", str(job.out)], check=True)
    elif fault != "figures":
        for process in ours:
            process.rlimit(psutil.RLIMIT_FSIZE, (100, psutil.RLIM_INFINITY))
        job.wait_for(lambda j: "metrics.jsonl can't be written" in j.printed())
    if fault == "full for a while":
        for process in ours:
            process.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
        job.wait_for(lambda j: j.rows()[-1]["step"] > len(j.rows()))
    pids, job.pids = (job.pids() if fault != "no folder" else {}), lambda: pids
    code = job.wait(90)
    job.assert_nothing_left(family)
    assert "Traceback" not in job.text and all(text in job.text for text in TEXT), job.text
    if fault == "full to the end":  # the last checkpoint too
        assert code == 1 and not (job.out / "summary.json").exists()
        assert job.text.count("can't be written (File too large)") >= 3
        return
    assert code == 0 and job.summary()["outcome"] == "completed" and job.summary()["checkpoint"], job.text
    expected = "figures was not written" if fault in ("no folder", "figures") else "metrics.jsonl was not written ("
    assert expected in job.summary()["problem"]


# --- signals --------------------------------------------------------------------------------------------------------

SIGNALS = {  # signal, to the whole group (a terminal or a job manager does that)
    "a terminal that ends": (signal.SIGHUP, True),
    "SIGHUP": (signal.SIGHUP, False),
    "a job manager": (signal.SIGTERM, True),
    "a job manager's warning": (signal.SIGUSR1, True),
    "the time of the CPU is over": (signal.SIGXCPU, False),
    "Ctrl-backslash": (signal.SIGQUIT, True),
}


@pytest.mark.parametrize(
    "name",
    [name if name == "a terminal that ends" else pytest.param(name, marks=pytest.mark.slow) for name in SIGNALS],
)
def test_other_signals_end_a_run_as_ctrl_c_does(start_job, tiny_folder, name):
    signum, to_all = SIGNALS[name]
    job = start_job(*ENDLESS, "--model", tiny_folder)
    family = trains(job)
    (os.killpg if to_all else os.kill)(job.process.pid, signum)
    if signum == signal.SIGHUP:  # shells and terminals send it more than once
        (os.killpg if to_all else os.kill)(job.process.pid, signum)
    assert job.wait(60) == 130, job.text
    job.assert_nothing_left(family)
    assert job.summary()["outcome"] == "interrupted" and job.summary()["ended_by"] == signum.name
    assert "Traceback" not in job.text
    if signum != signal.SIGQUIT:  # that one ends at once
        assert list((job.out / "checkpoints").iterdir()) and job.summary()["steps"] > 3


@pytest.mark.slow
def test_nohup_goes_on_and_a_searcher_alone_may_be_ended(start_job, tiny_folder):
    job = start_job(*ENDLESS, "--model", tiny_folder, shell="exec nohup {}")
    trains(job)
    os.killpg(job.process.pid, signal.SIGHUP)
    os.kill(job.pids()["searcher-0"], signal.SIGTERM)
    job.wait_for(lambda j: "searcher-0 was killed by SIGTERM: started again" in j.printed())
    done = len(job.rows())
    job.wait_for(lambda j: len(j.rows()) > done + 20)
    job.interrupt()
    assert job.wait(60) == 130, job.text
    job.assert_nothing_left()


def test_signals_wait_while_a_process_starts_and_processes_of_a_reward_can_be_ended(tmp_path):
    code = """
import multiprocessing, os, signal, time
from runtime.child import ENDINGS, on_ending, prepare_process, uninterrupted
from runtime.metrics import Board

def child(board, end):
    prepare_process("test", board)
    inner = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    inner.start()
    inner.terminate()
    inner.join(10)
    end.send(inner.exitcode)
    end.recv()

if __name__ == "__main__":
    got = []
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    on_ending(lambda signum, _: got.append(signum))
    ctx = multiprocessing.get_context("spawn")
    here, there = ctx.Pipe()
    board = Board(ctx, 0)
    process = ctx.Process(target=child, args=(board, there))
    board.set(Board.PARENT, "stop", 1)  # the parent has got the signal too
    with uninterrupted():
        process.start()
        for signum in ENDINGS:
            os.kill(os.getpid(), signum)
            os.kill(process.pid, signum)  # its group gets it while it starts
        assert not got
    there.close()
    assert sorted(got) == sorted(set(ENDINGS) - {signal.SIGUSR2}), got
    assert here.recv() == -signal.SIGTERM
    for signum in ENDINGS:
        os.kill(process.pid, signum)
    here.send(0)
    process.join(20)
    assert process.exitcode == 0, process.exitcode
"""
    (tmp_path / "main.py").write_text(code)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, tmp_path / "main.py"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
