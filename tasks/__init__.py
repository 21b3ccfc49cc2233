"""Tasks: their interface, how a task is found, and how its grader is called.

A built-in task has a module of its own in this folder. Yours is a Python file with a function that returns a task:
`--task path/to/file.py:function`. It is your own code and runs with your rights in every process. It may import what
lies beside it (own.py), and its reward may start processes, which end with the run.
"""

import importlib
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from runtime.files import ConfigError, whole_path
from tasks import own

sys.meta_path.insert(0, own.Finder)  # here, because importing this package is all that a task's own processes do


class Task(Protocol):
    """Prompts and a reward. Three more attributes are optional:

    is_right(prompt, answer)        bool: whether held-out accuracy counts the answer; default: reward >= 1
    make_start_model(folder, seed)  writes a Hugging Face model folder; without it --model must name one
    keep_special_tokens             True: the answer's text keeps special tokens, but for the one that ends it and those
                                    of padding and beginning; or the tokens that stay, like ("<answer>", "</answer>")
    """

    train: list[str]  # prompts; a prompt's id is its place here
    validation: list[str]
    heldout: list[str]

    def reward(self, prompt: str, answer: str) -> float:
        """The score, usually 0 to 1; the answer's text comes without special tokens (but see above)."""


BUILT_IN = {"addition": "tasks.addition:Addition"}  # imported on demand


def load_task(spec: str) -> Task:
    """The task of a spec: a built-in name, or `file.py:function`.

    Other processes get the spec, not the task: a task may hold objects that can't be pickled.

    Raises:
        ConfigError: when there is no such task, or it lacks a required attribute.
    """
    if spec in BUILT_IN:
        module, _, name = BUILT_IN[spec].partition(":")
        return getattr(importlib.import_module(module), name)()
    path, _, name = spec.rpartition(":")
    file = Path(whole_path(path, "--task"))
    if not path.endswith(".py") or not file.is_file():
        known = ", ".join(BUILT_IN)
        raise ConfigError(f"--task {spec}: neither a built-in task ({known}) nor an existing path/to/file.py:function")
    try:
        module = own.load(file)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--task {spec}: the file raises {_in_one_line(error)}") from error
    if not callable(getattr(module, name, None)):
        raise ConfigError(f"--task {spec}: {path} has no function {name}")
    try:
        task = getattr(module, name)()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--task {spec}: {name}() raises {_in_one_line(error)}") from error
    missing = [a for a in ("train", "validation", "heldout", "reward") if not hasattr(task, a)]
    if missing:
        raise ConfigError(f"--task {spec}: the task lacks {', '.join(missing)} (see tasks/__init__.py)")
    return task


def _in_one_line(error: BaseException) -> str:
    """An error with the line that raised it; modules have the names that their files give them."""
    text = re.sub(rf"{re.escape(own.PREFIX)}\w+\.", "", " ".join(f"{type(error).__name__}: {error}".split()))
    places = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_file()]
    ours = [f for f in places if own.ROOT not in Path(f.filename).parents]
    return text if isinstance(error, SyntaxError) or not ours else f"{text} ({ours[-1].filename}:{ours[-1].lineno})"


# --- grading: a task's code is the user's own, but an answer may be anything ----------------------------------------


class OutOfTime(BaseException):
    """A grader took too long. It is not an Exception, so a grader's `except Exception` does not catch it."""


def limited(seconds: float, function: Callable, *args: str) -> Any:
    """Call function(*args); raise OutOfTime after `seconds` (0: no limit). It limits only in a process's main thread.

    The alarm ends Python code and regular expressions; a long call into a C library runs to its end. It rings again
    after as much time: on its way out, OutOfTime may pass a `with` statement that waits for what runs too long.
    """
    if not seconds or threading.current_thread() is not threading.main_thread():
        return function(*args)

    def ring(_signum: int, _frame: object) -> None:
        raise OutOfTime

    signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
        return function(*args)
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:  # it rang in this very moment
            signal.setitimer(signal.ITIMER_REAL, 0)


def graded(judge: Callable, prompt: str, answer: str, limit: float) -> Any:
    """judge(prompt, answer) within the limit; its error gets a note with prompt and answer."""
    try:
        return limited(limit, judge, prompt, answer)
    except Exception as error:
        error.add_note(f"in grading prompt {prompt!r}, answer {answer!r}")
        raise


def reward_of(task: Task, prompt: str, answer: str, limit: float = 0.0) -> tuple[float, str | None]:
    """The task's reward for an answer, and None; or 0 and the problem with the task's reward.

    Args:
        limit: seconds; 0: no limit.

    Raises:
        Exception: the task's own, with prompt and answer in its traceback.
    """
    try:
        reward = float(graded(task.reward, prompt, answer, limit))
    except OutOfTime:
        return 0.0, f"took more than {limit:g} s (--reward-timeout)"
    if not abs(reward) < 3e38:  # NaN, infinite, or beyond fp32
        return 0.0, f"is {reward}"
    return reward, None


def is_right(task: Task, prompt: str, answer: str, limit: float = 0.0) -> bool:
    """Whether accuracy counts an answer: the task's `is_right`, or a reward of at least 1. Out of time is wrong."""
    judge = getattr(task, "is_right", None) or (lambda *what: task.reward(*what) >= 1)
    try:
        return bool(graded(judge, prompt, answer, limit))
    except OutOfTime:
        return False
