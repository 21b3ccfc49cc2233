"""Child processes: how a child starts and ends, and the parent's part of that.

A child gets the run's folder, the notice board and its pipes, does its job, and reports the end to the parent. It
ignores the signals that reach all processes of a terminal or a job, because the parent tells it to stop. It ends at
once when the parent is gone. It reports every error.
"""

import importlib
import logging
import logging.handlers
import multiprocessing
import multiprocessing.util
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.queues import Queue
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from types import FrameType

from tqdm import tqdm

from runtime import family
from runtime.files import ConfigError, Lines, bookkeeping, why
from runtime.metrics import Board, Clock, save_spans
from runtime.show import Screen
from runtime.streams import open_streams

INF = float("inf")
ORPHANED = 3  # exit code of a child whose parent is gone
# spans of a clock in which the main thread can't beat
LONG_WORK = {"start", "import", "load", "generate", "pull weights", "reward", "log pi_ref", "forward, backward", "step"}
LONG_WORK |= {"publish", "evaluate", "checkpoint"}
# Signals that ask a run to end: Ctrl-C and Ctrl-\, the terminal's end, job managers before they kill
ENDINGS = tuple(getattr(signal, f"SIG{name}") for name in "INT TERM HUP QUIT XCPU USR1 USR2".split())
LONGEST = 20_000  # characters of a traceback that are kept; of an error's own text a tenth


@dataclass(order=True)
class Raised:
    """An error that ended a child, for the parent."""

    when: float  # time.time()
    name: str  # of the child
    text: str  # type and message
    traceback: str = ""  # empty where the user's input is wrong: the text says it all
    place: str = ""  # the line that raised, as file:line: two errors of a type and a place count as the same error

    @property
    def kind(self) -> tuple[str, str]:
        return self.text.split(":")[0], self.place


@dataclass
class Child:
    """A process of a run: the parts of it that its own job uses."""

    name: str
    board: Board
    messages: Connection  # to the parent: (kind, value)
    device: str
    started: float
    step_timeout: float = INF  # seconds
    clock: Clock = field(default_factory=Clock)
    _starts: bool = True

    def __post_init__(self) -> None:
        threading.Thread(target=self._beat_while_it_works, daemon=True, name="heartbeat").start()

    def beat(self) -> None:
        """Give a sign of life. The job's loop does so each time round, at least once per --heartbeat-timeout."""
        self._starts = False
        self.board.set(Board.row(self.name), "alive", time.time())

    def _beat_while_it_works(self) -> None:
        """A step in progress counts as life, however slow it is, up to --step-timeout: the main thread can't beat."""
        while True:
            what, since = self.clock.inside or ("start" if self._starts else "", self.started)
            if what in LONG_WORK and time.time() - since < self.step_timeout:
                self.board.set(Board.row(self.name), "alive", time.time())
            time.sleep(0.5)

    def tell(self, kind: str, value: object = None) -> None:
        """Send a message to the parent."""
        self.messages.send((kind, value))


def run(
    module: str, name: str, board: Board, messages: Connection, logs: Queue, device: str, out: Path, args: tuple
) -> None:
    """Process target: call `module.main(child, *args)`, report how it ended, exit at once."""
    started = time.time()
    prepare_process(name, board)
    to_parent = logging.handlers.QueueHandler(logs)
    to_parent.setFormatter(logging.Formatter("%(message)s"))  # the parent's handler adds the rest
    logging.basicConfig(level=logging.INFO, handlers=[to_parent], force=True)
    _print_to(out / f"{name}.log")
    code = 0
    try:
        limit = getattr(next(iter(args), None), "step_timeout", INF)  # the first is the Config
        child = Child(name, board, messages, device, started, limit)
        with child.clock.span("import"):
            target = importlib.import_module(module).main
        target(child, *args)
        save_spans(child.clock, out / f"{name}.spans.json")
    except BaseException as error:  # every error is reported, then the process ends
        code = 1
        messages.send(("error", _last_words(name, error)))
    finally:
        messages.close()
        logs.close()
        flush = threading.Thread(target=logs.join_thread, daemon=True)
        flush.start()
        flush.join(2.0)
        sys.stdout.flush()
        _leave(code)


def _leave(code: int) -> None:
    """Exit at once: vLLM's and torch's teardown costs seconds and can hang. What a task has started goes first.

    A child that exits of itself comes here. When the parent is killed, the watch for it and the main thread, whose
    connections break, both leave. Were one of them to end nothing, it could win, and what a task had started would
    stay.
    """
    try:
        family.end_strangers(())
    finally:
        os._exit(code)


def _print_to(path: Path) -> None:
    """Send what is printed here to a file: the terminal is the parent's."""
    output = os.open(os.devnull, os.O_WRONLY)
    with bookkeeping(path.name):
        output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    open_streams()  # a full disk is no error of what prints


def _last_words(name: str, error: BaseException) -> Raised:
    """The report of an error. It holds text alone: an error itself may not be picklable."""
    when = time.time()
    if isinstance(error, ConfigError):  # the user's input is wrong, so a traceback of our code would not help
        return Raised(when, name, str(error))
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception as second:  # an error of the user's may be unable to say what it is
        text = f"{type(error).__name__}, whose text raised {type(second).__name__}"
    whole = "".join(traceback.format_exception(error))
    if len(whole) > LONGEST:
        whole = f"{whole[: LONGEST // 2]}\n[... {len(whole) - LONGEST} characters ...]\n{whole[-LONGEST // 2 :]}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return Raised(when, name, text[: LONGEST // 10], whole, f"{last.filename}:{last.lineno}")


def prepare_buffer(board: Board) -> None:
    """Initializer of the Manager's process."""
    prepare_process("buffer", board)

    def beat() -> None:
        while True:
            board.set(Board.BUFFER, "alive", time.time())
            time.sleep(0.5)

    threading.Thread(target=beat, daemon=True, name="heartbeat").start()


def prepare_process(name: str, board: Board | None = None) -> None:
    """Set the title, ignore what asks the whole run to end; end when the parent ends, with all that a task started."""
    from setproctitle import setproctitle

    setproctitle(f"tba_min {name}")
    for signum in ENDINGS:
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda signum, _: _end_if_alone(signum, board))
    _let_terminate_work()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)  # they are blocked until here (see `uninterrupted`)
    tqdm.set_lock(threading.RLock())  # tqdm's default is a named semaphore, which a kill leaves behind
    parent = multiprocessing.parent_process()
    multiprocessing.current_process().daemon = False  # a reward may start processes

    def watch() -> None:
        wait([parent.sentinel])
        shutil.rmtree(multiprocessing.util.get_temp_dir(), ignore_errors=True)  # the parent's folder of sockets
        _leave(ORPHANED)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def _let_terminate_work() -> None:
    """Processes that a reward forks get SIGTERM as usual, as Process.terminate() needs it, however soon it comes."""

    def mask(how: int) -> None:
        signal.pthread_sigmask(how, {signal.SIGTERM})

    def in_child() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        mask(signal.SIG_UNBLOCK)

    os.register_at_fork(
        before=lambda: mask(signal.SIG_BLOCK),
        after_in_child=in_child,
        after_in_parent=lambda: mask(signal.SIG_UNBLOCK),
    )


def _end_if_alone(signum: int, board: Board | None) -> None:
    """A job manager sends SIGTERM to all processes: then the parent says stop. Otherwise it is meant for this one."""
    patience = time.time() + 2.0
    while board and time.time() < patience:
        if board.stopping:
            return
        time.sleep(0.02)
    signal.signal(signum, signal.SIG_DFL)
    signal.raise_signal(signum)


def local_socket(name: str) -> str:
    """The path of a socket in the folder that holds those of all our processes, and is removed with the parent.

    Raises:
        ConfigError: when the path is too long.
    """
    address = os.path.join(multiprocessing.util.get_temp_dir(), name)
    most = 103 if sys.platform == "darwin" else 107  # bytes; multiprocessing's own sockets there have names of 17
    if len(os.fsencode(address)) - len(name) + 17 > most:
        raise ConfigError(f"TMPDIR {tempfile.gettempdir()}: too long a path for local sockets, name a shorter one")
    return address


# --- the parent's side -------------------------------------------------------------------------------------------


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that start in the body of a with statement."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def on_ending(handler: Callable[[int, FrameType | None], None]) -> None:
    """Call `handler` on every signal that asks for the end. What the shell has switched off stays off (nohup)."""
    for signum in ENDINGS:
        if signum in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay signals that ask for the end while a process starts: the child never gets them, the parent afterwards."""
    came: list[int] = []
    signals = [signum for signum in ENDINGS if signal.getsignal(signum) != signal.SIG_IGN]
    # handlers too, because numpy's threads take signals that are blocked here
    before = {signum: signal.signal(signum, lambda signum, _: came.append(signum)) for signum in signals}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # a child starts with the mask of this thread
    try:
        ensure_running()  # the process that removes semaphores at the very end: no signal may end it before
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # its start has unblocked some
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        for signum in came:
            signal.raise_signal(signum)


class RunLog(logging.Handler):
    """Writes all records into the file, and shows those of tba_min itself on the terminal too.

    A record of something that was lost (runtime/files.py) is shown the first time only. `lost` has the counts.
    """

    def __init__(self, path: Path, screen: Screen) -> None:
        super().__init__()
        self.screen, self.file = screen, Lines(path, self._lose)
        self.lost: dict[str, tuple[int, str]] = {}  # what -> how often, why the first time
        self.setFormatter(logging.Formatter("%(asctime)s %(processName)s %(name)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text, name = self.format(record), getattr(record, "lost", None)
        except Exception as error:  # its arguments do not fit
            self._lose("a log record", why(error))
        else:
            if name:
                self._lose(name, record.getMessage())
                return
            self.file.write(text)
            if record.name.startswith("tba_min"):
                self.screen.say(record.getMessage())

    def _lose(self, name: str, reason: str) -> None:
        times, first = self.lost.get(name, (0, reason))
        self.lost[name] = (times + 1, first)
        if not times:
            text = f"tba_min: {name} can't be written ({reason}); the run goes on without it"
            self.screen.say(text)
            if name != self.file.path.name:
                self.file.write(text)

    def problems(self) -> list[str]:
        """What was lost, in words."""
        times = {name: f" ({n} times)" if n > 1 else "" for name, (n, _) in self.lost.items()}
        return [f"{name} was not written{times[name]}: {first}" for name, (_, first) in self.lost.items()]


def start_logging(path: Path, screen: Screen) -> logging.Handler:
    """One handler for the records of all processes; it passes them on to a RunLog, its `sub_handler`.

    multiprocessing_logging's install function refuses *spawn*. But its handler works with it when the handler's queue
    comes from a spawn context. Children attach a QueueHandler to that queue (`run`).
    """
    from multiprocessing_logging import MultiProcessingHandler

    with uninterrupted():  # semaphores are made below, so now multiprocessing's process for them starts
        pass
    multiprocessing.set_start_method("spawn", force=True)  # the handler's queue comes from the default context
    handler = MultiProcessingHandler("logs", sub_handler=RunLog(path, screen))
    handler.queue.cancel_join_thread()  # a child that is killed while it writes never frees the queue's lock
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    return handler


def log_directly(handler: logging.Handler) -> RunLog:
    """Wait until all records are out. From now on they are written at once, because no child is left."""
    run_log = handler.sub_handler
    logging.basicConfig(level=logging.INFO, handlers=[run_log], force=True)  # this closes the other one
    return run_log
