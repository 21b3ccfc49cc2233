"""The parent's side of its children: it starts them, hears them, notices deaths and hangs, and ends them.

The caller (tba_min.py) decides what follows a death: a searcher is started again, any other death ends the run. The
processes' sentinels show deaths. The times that the children write on the notice board show hangs.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.managers import BaseManager
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

from runtime import child, family
from runtime.child import Raised, environment, uninterrupted
from runtime.files import bookkeeping, write_whole
from runtime.metrics import Board

MOMENT = 0.5  # seconds in which those affected by one fault report it, or end


class Failed(RuntimeError):
    """A run that can't go on; the text says why."""


def judge(errors: list[Raised], before: set[tuple[str, str]]) -> tuple[list[Raised], str | None]:
    """What follows from the errors of one moment: the tracebacks to show, and why the run can't go on.

    A searcher's error ends nothing (None), unless the same error came before or comes from two at once. If the run
    ends, the earliest error is the one to show: the others may be consequences, and get a line.

    Args:
        errors: earliest first.
        before: the kinds of those that were shown already.
    """
    kinds = [e.kind for e in errors]
    mild = all(e.traceback and e.name.startswith("searcher-") for e in errors)
    if mild and len(set(kinds)) == len(kinds) and not before & set(kinds):
        return errors, None
    said = [f"{e.name} raised {'the same again: ' if e.kind in before else ''}{e.text}" for e in errors]
    said = [text if e.traceback else e.text for e, text in zip(errors, said, strict=True)]
    return [e for e in errors[:1] if e.traceback and e.kind not in before], "; then ".join(dict.fromkeys(said))


class Heartbeats:
    """Finds children that have shown no sign of life for too long.

    Args:
        timeout: seconds.
        clock: returns seconds; a test passes its own.
    """

    def __init__(self, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout, self.clock = timeout, clock
        self._seen: dict[str, tuple[float, float]] = {}  # name -> (its last beat, when it was first seen here)
        self._looked = clock()

    def late(self, beats: dict[str, float]) -> list[str]:
        """Names whose beat has not changed for `timeout`. Call it often: time in which the caller itself stood still
        (Ctrl-Z, a suspended machine) does not count."""
        now = self.clock()
        stood_still = now - self._looked if now - self._looked > 1 else 0.0
        self._looked = now
        before, self._seen = self._seen, {}
        for name, beat in beats.items():
            last, since = before.get(name, (None, now))
            self._seen[name] = (beat, since + stood_still if last == beat else now)
        return [name for name, (_, since) in self._seen.items() if now - since > self.timeout]


class Supervisor:
    """The processes of a run by name, and their messages.

    Args:
        ctx: multiprocessing's spawn context.
        out: the run's folder.
        board: the shared notice board.
        logs: queue for their log records.
        heard: called with (name, kind, value) for each message.
        raised: called with the errors of one moment, the earliest first.
        died: called with (name, how) for each child that ended while it should not have.
        timeout: seconds without a sign of life after which a child counts as hanging.
    """

    def __init__(
        self,
        ctx: BaseContext,
        out: Path,
        board: Board,
        logs: Queue,
        heard: Callable[[str, str, Any], None],
        raised: Callable[[list[Raised]], None],
        died: Callable[[str, str], None],
        timeout: float,
    ) -> None:
        self.ctx, self.out, self.board, self.logs = ctx, out, board, logs
        self.heard, self.raised, self.died = heard, raised, died
        self.processes: dict = {}
        self.manager = None
        self.ending = False  # from now on a child may end
        self._pipes: dict[str, Connection] = {}  # name -> receiving end of its messages
        self._errors: list[Raised] = []  # heard, and not reported yet
        self._pids = {"parent": os.getpid()}
        self._heartbeats = Heartbeats(timeout)
        self._hung: set[str] = set()
        family.ask_for_orphans()
        self._others = {p.pid for p in family.strangers(())}  # children that are none of this run's
        self._detached: set[int] = set()  # orphans that came while all children lived: a task let them go on purpose
        self._looked = time.monotonic()

    # --- starting ---------------------------------------------------------------------------------------------

    def spawn(self, name: str, module: str, variables: dict[str, str], device: str, args: tuple) -> None:
        """Start `module.main(child, *args)` in a process of its own, with these environment variables."""
        receiving, sending = self.ctx.Pipe(duplex=False)
        common = (module, name, self.board, sending, self.logs, device, self.out)
        process = self.ctx.Process(target=child.run, args=(*common, args), name=name, daemon=True)
        self.board.set(Board.row(name), "alive", time.time())
        try:
            with uninterrupted(), environment(variables):
                process.start()
        except OSError as error:
            raise Failed(f"{name} can't be started: {error.strerror}; too low a limit (`ulimit -u`, memory)?") from None
        sending.close()
        self.processes[name], self._pipes[name] = process, receiving
        self._note_pid(name, process.pid)

    def run_to_end(
        self, name: str, module: str, variables: dict[str, str], args: tuple, go_on: Callable[[], bool]
    ) -> int:
        """Start a child on the CPU that does one job, and wait for its end; kill it when `go_on()` is false.

        Returns its process id.
        """
        self.spawn(name, module, variables, "cpu", args)
        process = self.processes[name]
        while process.is_alive() and go_on():
            self.listen(0.1)
        if go_on():
            self.listen(0)  # its last words
        process.kill()
        self.forget(name)
        return process.pid

    def adopt(self, manager: BaseManager, pid: int) -> None:
        """Watch the buffer's Manager too."""
        self.manager = manager
        self._note_pid("buffer", pid)

    def forget(self, name: str) -> None:
        """Drop a child that has done its job, or that a new one replaces."""
        self.processes.pop(name).join()
        pipe = self._pipes.pop(name, None)
        if pipe:
            pipe.close()
        self._pids.pop(name)
        family.end_strangers(self._known() | self._detached)  # what it had started

    def _known(self) -> set[int]:
        manager = {self.manager._process.pid} if self.manager else set()
        return self._others | {p.pid for p in self.processes.values()} | manager

    def _note_pid(self, name: str, pid: int) -> None:
        self._pids[name] = pid
        with bookkeeping("pids.json"):
            write_whole(self.out / "pids.json", json.dumps(self._pids, indent=2) + "\n")

    # --- watching ---------------------------------------------------------------------------------------------

    def listen(self, timeout: float) -> None:
        """Receive messages for up to `timeout` seconds; report errors, then children that died."""
        sentinels = {p.sentinel: n for n, p in self.processes.items() if not self.ending or p.is_alive()}
        # a sentinel is silent as long as a process that the child has forked lives: ask the system too
        gone = [p.sentinel for p in self.processes.values() if not self.ending and not p.is_alive()]
        if self.manager and not self.ending:
            sentinels[self.manager._process.sentinel] = "buffer"
        ready = [*wait([*self._pipes.values(), *sentinels], 0 if gone else timeout), *gone]
        dead = [sentinels[r] for r in dict.fromkeys(ready) if r in sentinels and not self.ending]
        self._drain()  # after the deaths were seen: last messages come before them
        if self._errors:
            self._report_errors()
        for name in dead:
            self.died(name, self.how_it_ended(name))

    def _drain(self) -> None:
        """Receive all messages that have come."""
        for name, pipe in list(self._pipes.items()):
            try:
                while pipe.poll():
                    kind, value = pipe.recv()
                    if kind == "error":
                        self._errors.append(value)
                    else:
                        self.heard(name, kind, value)
            except (EOFError, OSError):  # closed, or killed in the middle of a message
                del self._pipes[name]
                pipe.close()

    def _report_errors(self) -> None:
        """Report the errors of this moment in their order: one fault may show in several processes."""
        for _ in range(0 if self.ending else 10):
            time.sleep(MOMENT / 10)
            self._drain()
        errors, self._errors = sorted(self._errors), []
        self.raised(errors)

    def how_it_ended(self, name: str) -> str:
        """The end of a child in words, also of one that hung."""
        process = self.manager._process if name == "buffer" else self.processes[name]
        process.join(1.0)
        code = process.exitcode
        if name in self._hung:
            self._hung.discard(name)
            return f"hung ({self._heartbeats.timeout:g} s without a sign of life) and was killed"
        return f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"

    def check_heartbeats(self) -> None:
        """Kill a searcher that hangs (its death is then reported like any other).

        Raises:
            Failed: when the trainer or the buffer's Manager hangs.
        """
        names = [n for n, p in self.processes.items() if p.is_alive()] + (["buffer"] if self.manager else [])
        beats = {name: self.board.get(Board.row(name), "alive") for name in names}
        self._look_after_orphans()
        for name in self._heartbeats.late(beats):
            if name.startswith("searcher-"):
                self._hung.add(name)
                self.processes[name].kill()
            else:
                if name == "buffer":
                    self.manager._process.kill()  # else others would wait for it while they end
                raise Failed(f"{name} hangs: no sign of life for {self._heartbeats.timeout:g} s (--heartbeat-timeout)")

    def _look_after_orphans(self) -> None:
        """Once per second: note those that were detached, collect the exit codes of those that have ended."""
        if time.monotonic() - self._looked > 1:
            self._looked = time.monotonic()
            orphans = family.collect(self._known())
            if all(process.is_alive() for process in self.processes.values()):
                self._detached = {process.pid for process in orphans}

    def is_gone(self, name: str, patience: float = 0.0) -> bool:
        """Whether a child has ended, or ends within `patience` seconds: others may fail because of it first."""
        process = self.manager and self.manager._process if name == "buffer" else self.processes.get(name)
        if process:
            process.join(patience)
        return bool(process) and not process.is_alive()

    def printed(self, name: str) -> str:
        """The last line that a child printed, in words: a crash in native code leaves it alone."""
        path = self.out / f"{name}.log"
        if path.is_file():
            lines = path.read_text(errors="replace").split("\n")
            if last := next((line.strip() for line in reversed(lines) if line.strip()), ""):
                return f"the last line that it printed, in {path}: {last[:300]}"
        return "it printed nothing"

    # --- ending -----------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """End all children at once."""
        for process in self.processes.values():
            process.kill()

    def stop(self, deadline: Callable[[], float]) -> None:
        """Let the children end until `deadline()`, a time.time() that is asked repeatedly. Then kill the rest."""
        self.ending = True
        try:
            while any(p.is_alive() for p in self.processes.values()) and time.time() < deadline():
                self.listen(0.05)
        finally:  # nothing that goes wrong above leaves a process behind
            self.kill()
            for process in self.processes.values():
                process.join()
            self._stop_manager()
        self.listen(0)  # last words

    def _stop_manager(self) -> None:
        if self.manager:
            self.manager._process.kill()  # a shutdown would wait for a hanging one; it has nothing to save
            self.manager._process.join()
            with contextlib.suppress(OSError):
                self.manager.shutdown()
        family.end_strangers(self._known())
