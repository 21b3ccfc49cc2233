"""Child processes: their start and their end, as each child does it, and the parent's part around it.

A child takes the run's folder, board and pipes, does its job, and tells the parent what happened. It ignores Ctrl-C
(the parent tells it to stop), ends at once when the parent is gone, and never leaves an error unreported.
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.queues import Queue
from pathlib import Path

from tqdm import tqdm

from runtime.files import ConfigError
from runtime.metrics import Board, Clock, save_spans
from runtime.show import Screen

ORPHANED = 3  # exit code of a child whose parent is gone


@dataclass
class Child:
    """A process of a run, as its own job sees it."""

    name: str
    board: Board
    messages: Connection  # to the parent: (kind, value)
    device: str
    started: float
    clock: Clock = field(default_factory=Clock)
    _beats_itself: bool = True  # while it starts

    def __post_init__(self) -> None:
        threading.Thread(target=self._beat_in_long_jobs, daemon=True, name="heartbeat").start()

    def beat(self) -> None:
        """A sign of life; the job's loop gives one each time round, and never less often than --heartbeat-timeout."""
        self._beats_itself = False
        self.board.set(Board.row(self.name), "alive", time.time())

    @contextmanager
    def long_job(self) -> Iterator[None]:
        """For what has no loop to give signs of life and may take minutes: a thread gives them meanwhile."""
        self._beats_itself = True
        try:
            yield
        finally:
            self.beat()

    def _beat_in_long_jobs(self) -> None:
        while True:
            if self._beats_itself:
                self.board.set(Board.row(self.name), "alive", time.time())
            time.sleep(0.5)

    def tell(self, kind: str, value: object = None) -> None:
        """Send a message to the parent."""
        self.messages.send((kind, value))


def run(
    module: str, name: str, board: Board, messages: Connection, logs: Queue, device: str, out: Path, args: tuple
) -> None:
    """Process target: call `module.main(child, *args)`, report how it ended, leave without ceremony."""
    started = time.time()
    prepare_process(name)
    output = os.open(out / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)  # the terminal is the parent's; what libraries print is kept in the run's folder
    os.dup2(output, 2)
    to_parent = logging.handlers.QueueHandler(logs)
    to_parent.setFormatter(logging.Formatter("%(message)s"))  # the parent's handler adds the rest
    logging.basicConfig(level=logging.INFO, handlers=[to_parent], force=True)
    code = 0
    try:
        child = Child(name, board, messages, device, started)
        with child.clock.span("import"):
            target = importlib.import_module(module).main
        target(child, *args)
        save_spans(child.clock, out / f"{name}.spans.json")
    except ConfigError as error:  # what the user gave is wrong; where in our code that showed is of no use to them
        code = 1
        messages.send(("refused", str(error)))
    except BaseException as error:  # the last stop: everything is reported, nothing goes on
        code = 1
        messages.send(("error", (f"{type(error).__name__}: {error}", traceback.format_exc(), _where(error))))
    finally:
        messages.close()
        logs.close()
        flush = threading.Thread(target=logs.join_thread, daemon=True)
        flush.start()
        flush.join(2.0)
        sys.stdout.flush()
        os._exit(code)  # vLLM's and torch's teardown costs seconds and can hang


def _where(error: BaseException) -> str:
    """The line that raised, `file:line`: two errors of one type from one line are the same error again."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}:{last.lineno}"


def prepare_buffer(board: Board) -> None:
    """Initializer of the Manager's process."""
    prepare_process("buffer")

    def beat() -> None:
        while True:
            board.set(Board.BUFFER, "alive", time.time())
            time.sleep(0.5)

    threading.Thread(target=beat, daemon=True, name="heartbeat").start()


def prepare_process(name: str) -> None:
    """Title, no Ctrl-C of its own, and an end when the parent ends."""
    from setproctitle import setproctitle

    setproctitle(f"tba_min {name}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it came blocked (see `uninterrupted`)
    tqdm.set_lock(threading.RLock())  # tqdm's own would be a named semaphore, which a kill leaves behind
    parent = multiprocessing.parent_process()

    def watch() -> None:
        wait([parent.sentinel])
        shutil.rmtree(multiprocessing.util.get_temp_dir(), ignore_errors=True)  # the parent's, with all sockets
        os._exit(ORPHANED)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


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
    """Environment variables for the processes started in the body of a with statement."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back around the start of a process: the child never sees it, the parent does afterwards."""
    came: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda *_: came.append(1))  # numpy's threads take it although it is blocked
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a child starts with the mask of this thread
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, signal.SIG_DFL if handler is None else handler)
        if came:
            signal.raise_signal(signal.SIGINT)


class RunLog(logging.FileHandler):
    """All records go into the file, those of tba_min itself to the terminal too."""

    def __init__(self, path: Path, screen: Screen) -> None:
        super().__init__(path, encoding="utf-8")
        self.screen = screen
        self.setFormatter(logging.Formatter("%(asctime)s %(processName)s %(name)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if record.name.startswith("tba_min"):
            self.screen.say(record.getMessage())


def start_logging(path: Path, screen: Screen) -> logging.Handler:
    """One handler for the records of all processes.

    multiprocessing_logging's install function refuses *spawn*, but its handler works under it when its queue is a
    spawn context's; children attach a QueueHandler to that queue (child.py).
    """
    from multiprocessing_logging import MultiProcessingHandler

    multiprocessing.set_start_method("spawn", force=True)  # its queue comes from the default context
    handler = MultiProcessingHandler("logs", sub_handler=RunLog(path, screen))
    handler.queue.cancel_join_thread()  # a child that is killed as it writes keeps the queue's lock for ever
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    return handler
