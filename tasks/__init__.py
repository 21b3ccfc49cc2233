"""Tasks: prompts, and a reward for an answer.

A task of your own is a Python file with a function that returns an object with these four attributes, named on the
command line as `--task path/to/file.py:function`. It is your own code and runs with your rights in every process.

    train, validation, heldout      lists of prompt texts; a prompt's id is its place in `train`
    reward(prompt, answer)          float, usually 0 to 1; the answer's text comes without special tokens
    is_right(prompt, answer)        bool: what held-out accuracy counts (optional: reward >= 1)
    make_start_model(folder, seed)  writes a Hugging Face model folder (optional: then --model must name one)
"""

import importlib.util
import random
import signal
import sys
import threading
from pathlib import Path

from config import ConfigError


class Addition:
    """Two-digit addition, `37+58=` -> `095`: all 10,000 problems, split once and for all (not by the run's seed)."""

    validation_size, heldout_size = 500, 1000

    def __init__(self) -> None:
        problems = [f"{a:02d}+{b:02d}=" for a in range(100) for b in range(100)]
        random.Random(20250318).shuffle(problems)
        self.heldout = problems[: self.heldout_size]
        self.validation = problems[self.heldout_size :][: self.validation_size]
        self.train = problems[self.heldout_size + self.validation_size :]

    @staticmethod
    def solve(prompt: str) -> str:
        """The right answer, three digits: `37+58=` -> `095`."""
        return f"{int(prompt[0:2]) + int(prompt[3:5]):03d}"

    def reward(self, prompt: str, answer: str) -> float:
        """1 for the right three digits and nothing else, otherwise 0."""
        return float(answer == self.solve(prompt))

    def make_start_model(self, folder: Path, seed: int) -> None:
        """A small Llama that was taught addition, then careless habits (start_model.py)."""
        from tasks.start_model import make_start_model

        make_start_model(self, folder, seed)


BUILT_IN = {"addition": Addition}


def load_task(spec: str):
    """The task of a spec: a built-in name, or `file.py:function`.

    Specs, not tasks, travel to other processes: a task may hold what can't be pickled.

    Raises:
        ConfigError: when there is no such task, or it lacks what a task must have.
    """
    if spec in BUILT_IN:
        return BUILT_IN[spec]()
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        known = ", ".join(BUILT_IN)
        raise ConfigError(f"--task {spec}: neither a built-in task ({known}) nor an existing path/to/file.py:function")
    module_name = f"tba_min_task_{Path(path).stem}"
    loader = importlib.util.spec_from_file_location(module_name, path)
    module = sys.modules[module_name] = importlib.util.module_from_spec(loader)
    try:
        loader.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"--task {spec}: the file raises {_in_one_line(error)}") from error
    if not callable(getattr(module, name, None)):
        raise ConfigError(f"--task {spec}: {path} has no function {name}")
    try:
        task = getattr(module, name)()
    except Exception as error:
        raise ConfigError(f"--task {spec}: {name}() raises {_in_one_line(error)}") from error
    missing = [a for a in ("train", "validation", "heldout", "reward") if not hasattr(task, a)]
    if missing:
        raise ConfigError(f"--task {spec}: the task lacks {', '.join(missing)} (see tasks/__init__.py)")
    return task


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


# --- grading: a task's code is the user's own, an answer is anybody's ---------------------------------------------


class OutOfTime(BaseException):
    """A grader took too long. No Exception, so that no `except Exception` of the grader's keeps it."""


def limited(seconds: float, function, *args):
    """function(*args), ended by OutOfTime after `seconds` (0: no limit). In a process's main thread only.

    The alarm ends Python code and regular expressions; one long call of a C library goes on to its end.
    """
    if not seconds or threading.current_thread() is not threading.main_thread():
        return function(*args)

    def ring(_signum, _frame):
        raise OutOfTime

    signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        return function(*args)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def graded(judge, prompt: str, answer: str, limit: float):
    """judge(prompt, answer) within the limit; an error of it says what it was judging."""
    try:
        return limited(limit, judge, prompt, answer)
    except Exception as error:
        error.add_note(f"in grading prompt {prompt!r}, answer {answer!r}")
        raise


def reward_of(task, prompt: str, answer: str, limit: float = 0.0) -> tuple[float, str | None]:
    """The task's reward of an answer, and what was wrong with it: then it is 0.

    Args:
        limit: seconds that it may take; 0 is no limit.

    Raises:
        Exception: what the task raised, with prompt and answer in its traceback.
    """
    try:
        reward = float(graded(task.reward, prompt, answer, limit))
    except OutOfTime:
        return 0.0, f"took more than {limit:g} s (--reward-timeout)"
    if not abs(reward) < 3e38:  # NaN, infinite, or beyond fp32
        return 0.0, f"is {reward}"
    return reward, None


def is_right(task, prompt: str, answer: str, limit: float = 0.0) -> bool:
    """Whether accuracy counts an answer: the task's `is_right`, or a reward of at least 1. Too slow is wrong."""
    judge = getattr(task, "is_right", None) or (lambda *what: task.reward(*what) >= 1)
    try:
        return bool(graded(judge, prompt, answer, limit))
    except OutOfTime:
        return False
