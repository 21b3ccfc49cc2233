"""tba_min: Trajectory Balance with Asynchrony (arXiv 2503.18929) on one machine.  `python tba_min.py --help`

This is the parent. It settles the configuration, prepares task and model, serves the replay buffer, starts one trainer
and the searchers, shows what happens, and cleans up, however the run ends. It touches no model and imports nothing
heavy: *spawn* runs this file's top level again in every child, and start-up is most of a short run.
"""

import dataclasses
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from config import START_MODEL, Config, ConfigError, parse, record, resolve, save, why_no_vllm
from runtime import checkpoint, child, preview
from runtime.files import bookkeeping, lock_folder
from runtime.metrics import Board
from runtime.placement import describe
from runtime.served_buffer import serve
from runtime.show import Screen
from runtime.streams import open_streams
from runtime.summary import FAILURE, finish
from runtime.supervisor import Failed, Supervisor, judge
from sync import lead_sync

EXIT_FAILED, EXIT_WRONG_OPTION, EXIT_INTERRUPTED = 1, 2, 130
GRACE = 4.0  # seconds that a stopped trainer has to end its update
PATIENCE = 600.0  # seconds that its last checkpoint may take


def main(argv: list[str] | None = None) -> int:
    """Run from the command line; returns the exit code."""
    from setproctitle import setproctitle

    setproctitle("tba_min parent")
    open_streams()
    child.on_ending(signal.default_int_handler)  # until there is something to save
    try:
        asked = parse(argv)
        preview.check_task(asked)  # first: resolving may download a model
        config = resolve(asked)
        note = None
        if asked.engine == "auto" and config.engine == "hf":
            note = f"{why_no_vllm(config.gpus)}; transformers' generate writes the answers instead (--engine hf)"
        if config.dry_run:
            print(*preview.dry_run(config), sep="\n")
            return 0
        preview.check(config)
        return Run(config, note, record(asked, config)).go()
    except ConfigError as error:
        print(f"tba_min: {error}", file=sys.stderr)
        return EXIT_WRONG_OPTION
    except KeyboardInterrupt:  # before anything was started
        return EXIT_INTERRUPTED


class Run:
    """One run, from its folder to its summary.

    Args:
        note: a line to say at the start; given: what config.record keeps of the command line.

    Raises:
        ConfigError: when the folder can't be used: another run is at work in it, or its checkpoint is damaged.
    """

    def __init__(self, config: Config, note: str | None = None, given: dict | None = None) -> None:
        # torch.multiprocessing is this, and the pickling of tensors: importing torch adds that in a child
        self.ctx = multiprocessing.get_context("spawn")
        self.started = time.time()
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{Path(config.task.split(':')[0]).stem}-{os.getpid()}"
        self.out = Path(config.out or Path("runs") / name).resolve()
        self._lock = lock_folder(self.out)
        self.start = checkpoint.last_in(Path(config.resume)) if config.resume else None  # to go on from
        self.config, self.note = dataclasses.replace(config, out=str(self.out), resume=None), note
        self.given = given or {}
        self.screen = Screen(self.config)
        self.board = Board(self.ctx, config.searchers)
        self.address = child.local_socket("weights")
        self.log = logging.getLogger("tba_min")
        self.interrupts = 0
        self.stopped_by: str | None = None  # the first signal, or a failure
        self.result: dict | None = None  # the trainer's own summary, at its end
        self.saving_since: float | None = None  # time.time() at which the trainer began its last checkpoint
        self.incarnations = [0] * config.searchers
        self.restarts = 0
        self.absent: set[int] = set()  # searchers that are being started again
        self.lost = [0] * config.searchers  # trajectories that died with their searcher
        self.errors: dict[str, tuple[str, str]] = {}  # searcher -> its last error, its type and place
        self.unsaved: str | None = None  # why the trainer, told to stop, did not save

    def go(self) -> int:
        """Do it all; returns the exit code."""
        handler = child.start_logging(self.out / "run.log", self.screen)
        with bookkeeping("config.json"):
            save(self.config, self.out / "config.json", self.given)
        watch = (self._heard, self._raised, self._died, self.config.heartbeat_timeout)
        self.children = Supervisor(self.ctx, self.out, self.board, handler.queue, *watch)
        child.on_ending(self._interrupt)
        code, why = 0, None
        try:
            self._start(self._prepare_model())
            self._watch()
            code = EXIT_INTERRUPTED if self.interrupts else 0
        except Exception as error:
            code, why = EXIT_FAILED, str(error)
            if not isinstance(error, Failed | ConfigError):  # an error of ours
                why = f"the parent raised {type(error).__name__}: {error}"
                self.log.error("parent:\n%s", traceback.format_exc())
            self.stopped_by = self.stopped_by or FAILURE
            self.log.error("tba_min: the run failed: %s", why)
        finally:
            self._stop()
            run_log = child.log_directly(handler)
            self.screen.close()
        problem = (self.result or {}).get("problem") or self.unsaved
        if problem and code != EXIT_FAILED:
            code, why = EXIT_FAILED, problem
            self.log.error("tba_min: %s", why)
        outcome = {0: "completed", EXIT_INTERRUPTED: "interrupted", EXIT_FAILED: "failed"}[code]
        finish(
            self.config, self.given, self.out, self.result or {}, run_log, outcome=outcome, why=why,
            stopped_by=self.stopped_by, busy_searchers=self.board.of_searchers("busy"), restarts=self.restarts,
            trajectories_lost=sum(self.lost), seconds_total=time.time() - self.started,
            resumed_from=str(self.start) if self.start else None,
        )  # fmt: skip
        return code

    def _interrupt(self, signum: int, _frame: FrameType | None) -> None:
        """Stop and save; at once on a second Ctrl-C. A closing terminal or a job manager may send several signals."""
        self.stopped_by = self.stopped_by or {signal.SIGINT: "Ctrl-C"}.get(signum, signal.Signals(signum).name)
        self.interrupts = max(1, self.interrupts + (signum == signal.SIGINT) + 2 * (signum == signal.SIGQUIT))
        self.board.set(Board.PARENT, "stop", 1)
        if self.interrupts > 1:
            self.children.kill()

    # --- starting ---------------------------------------------------------------------------------------------

    def _prepare_model(self) -> str:
        """Folder of the model; a start model is made by a process of its own where it is missing."""
        if self.config.model != START_MODEL:
            return self.config.model
        from tasks.start_model import obtain

        return obtain(self.config, self.given, self.children, self._go_on)

    def _go_on(self) -> bool:
        self.screen.tick()
        return not self.interrupts

    def _start(self, folder: str) -> None:
        """Serve the buffer and start trainer and searchers, all at once."""
        if self.interrupts:
            return
        c = self.config
        if self.note:
            self.log.info(self.note)
        say = f"starting the trainer and {c.searchers} searcher(s) with {c.engine}, {c.threads} thread(s) each"
        if c.sync == "onpolicy":
            say = f"starting one process that generates and trains in turn, {c.threads} thread(s)"
        self.log.info(f"{say}; {c.engine} takes a while to load ...")
        self.folder, self.buffer, self.places = folder, None, preview.places(c)
        if c.gpus:  # settle vLLM's share of its GPU; config.json keeps what was asked for
            share, lines = preview.fit(c, Path(folder))
            self.config = dataclasses.replace(c, vllm_memory=share)
            for line in [*describe(self.places), *lines]:
                self.log.info("%s", line)
        if c.sync != "onpolicy":
            self._serve_buffer()
        if self.start:
            step, unused = checkpoint.take_up(self.start, self.board, self.buffer)
            self.incarnations = [unused] * c.searchers
            self.log.info(f"going on from {self.start}, update {step}")
        for i in range(c.searchers):
            self._start_searcher(i)
        args = (self.config, folder, self.out, self.start and str(self.start), self.address, self.buffer)
        self.children.spawn("trainer", "trainer", *self._placed(0), args)

    def _serve_buffer(self) -> None:
        c = self.config
        pool = None if c.sync == "barrier" else c.recent_groups
        with child.uninterrupted(), child.environment({"OMP_NUM_THREADS": "1"}):
            manager, self.buffer = serve(
                self.ctx, child.prepare_buffer, (self.board,), answers=c.S, capacity=c.buffer_capacity,
                recent_groups=pool, per_prompt=c.per_prompt_capacity, dedup=c.dedup, seed=c.seed,
            )  # fmt: skip
        self.children.adopt(manager, self.buffer.pid())

    def _start_searcher(self, i: int) -> None:
        args = (self.config, self.folder, self.out, i, self.incarnations[i], self.address, self.buffer)
        self.children.spawn(f"searcher-{i}", "searcher", *self._placed(1 + i), args)

    def _placed(self, process: int) -> tuple[dict[str, str], str]:
        """Environment and device of a process: 0 is the trainer, 1 + i searcher i."""
        place = self.places[process]
        threads = {"OMP_NUM_THREADS": str(self.config.threads), "TOKENIZERS_PARALLELISM": "false"}
        return threads | {"CUDA_VISIBLE_DEVICES": place.visible}, place.device

    # --- watching ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Listen to the children until the trainer is done or the run is interrupted; lead the syncs of `barrier`."""
        barrier = self.config.sync == "barrier"
        while self.result is None and not self.interrupts:
            self.children.listen(0.001 if barrier else 0.05)
            self.children.check_heartbeats()
            try:
                if barrier:
                    lead_sync(self.board, self.buffer, self.absent)
            except (EOFError, OSError) as error:
                self._blame_the_dead({"trainer"}, 0.5)
                raise Failed(f"the buffer's process does not answer: {type(error).__name__}") from None
            self.screen.tick()

    def _heard(self, name: str, kind: str, value: Any) -> None:
        """A message of a child."""
        if kind == "row":
            self.screen.row(value)
        elif kind == "accuracy":
            if self.screen.accuracy is None and not self.start:
                self.log.info(f"held-out accuracy before RL: {value['accuracy']:.3f} (greedy, on {value['prompts']})")
            self.screen.accuracy = value["accuracy"]
        elif kind == "ready":
            self.absent.discard(int(name.removeprefix("searcher-")))
        elif kind == "saving":
            self.saving_since = time.time()
        elif kind == "done":
            self.result = value

    def _raised(self, errors: list[child.Raised]) -> None:
        """The errors of one moment, in their order. A searcher is started again when it has ended."""
        if self.children.ending or self.interrupts or self.result is not None:
            for e in errors:
                known = e.kind in self.errors.values()  # has been told: in run.log alone
                logging.getLogger("others" if known else "tba_min").error("while ending, %s raised %s", e.name, e.text)
                if e.name == "trainer" and not self.result and self.interrupts < 2:
                    self.unsaved = f"the last checkpoint was not written: the trainer raised {e.text}"
            return
        self._blame_the_dead({e.name for e in errors})
        shown, why = judge(errors, set(self.errors.values()))
        self.errors |= {e.name: e.kind for e in errors}
        for e in (e for e in errors if e.traceback):  # those of the others are in run.log alone
            logging.getLogger("tba_min" if e in shown else "others").error("%s:\n%s", e.name, e.traceback.rstrip())
        if why:
            raise Failed(why)

    def _blame_the_dead(self, speakers: set[str], patience: float = 0.0) -> None:
        """Report the Manager or the trainer if it has died without a word: errors of others are consequences."""
        for cause in ("buffer", "trainer"):
            if cause not in speakers and self.children.is_gone(cause, patience):
                self._died(cause, self.children.how_it_ended(cause))

    def _died(self, name: str, how: str) -> None:
        """A child ended: a searcher is started again, anything else ends the run."""
        if self.interrupts or self.result is not None or (name == "start-model" and how == "ended with exit code 0"):
            return
        if not name.startswith("searcher-"):
            raise Failed(f"{name} {how}; {self.children.printed(name)}")
        self._blame_the_dead({name}, 0.5)
        i, row = int(name.removeprefix("searcher-")), Board.row(name)
        self.restarts += 1
        if self.restarts > self.config.max_restarts:
            raise Failed(f"{name} {how}, and --max-restarts {self.config.max_restarts} allows no further start")
        self.lost[i] = int(self.board.get(row, "generated") - self.board.get(row, "handed_over"))
        self.log.warning(f"{name} {how}: started again ({self.restarts} of --max-restarts {self.config.max_restarts})")
        self.children.forget(name)
        self.absent.add(i)
        self.incarnations[i] += 1
        self._start_searcher(i)

    # --- ending -----------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """End all children: the trainer may finish its update and save when the run was interrupted."""
        self.board.set(Board.PARENT, "stop", 1)
        now = time.time()
        trainer = self.children.processes.get("trainer")
        ends: dict[str, float] = {}

        def deadline() -> float:
            if self.interrupts > 1:
                return 0.0
            if self.result or not trainer or not trainer.is_alive():
                return ends.setdefault("others", time.time() + 2.0)
            if self.saving_since:  # a checkpoint is not cut off: a large model's takes as long as it takes
                return self.saving_since + PATIENCE
            return now + GRACE

        self.children.stop(deadline)


if __name__ == "__main__":
    sys.exit(main())
