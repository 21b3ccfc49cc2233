"""tba_min: Trajectory Balance with Asynchrony (arXiv 2503.18929) on one machine.  `python tba_min.py --help`

This is the parent. It settles the configuration, prepares task and model, serves the replay buffer, starts one trainer
and the searchers, shows what happens, and cleans up, however the run ends. It touches no model itself and imports
nothing heavy: *spawn* runs this file's top level again in every child, and start-up is most of a short run.
"""

import contextlib
import dataclasses
import fcntl
import io
import json
import logging
import multiprocessing
import multiprocessing.util
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

from config import Config, ConfigError, check_model_files, load, resolve, save
from runtime import checkpoint, child, preview
from runtime.child import environment, start_logging, uninterrupted
from runtime.metrics import Board, merge_timeline
from runtime.placement import describe
from runtime.show import Screen, bottleneck, summary_text
from runtime.supervisor import Failed, Supervisor

EXIT_FAILED, EXIT_WRONG_OPTION, EXIT_INTERRUPTED = 1, 2, 130
GRACE = 4.0  # seconds that a stopped trainer has to end its update
PATIENCE = 600.0  # seconds that its last checkpoint may take
FIXED = ("task", "model", "loss", "log_z", "sync", "seed")  # what a resumed run keeps


def main(argv: list[str] | None = None) -> int:
    """Run from the command line; returns the exit code."""
    from setproctitle import setproctitle

    setproctitle("tba_min parent")
    try:
        config = parse(argv)
        check_task(config)  # first: resolving may download a model
        config = resolve(config)
        if config.dry_run:
            print(*preview.dry_run(config), sep="\n")
            return 0
        preview.check(config)
        return Run(config).go()
    except ConfigError as error:
        print(f"tba_min: {error}", file=sys.stderr)
        return EXIT_WRONG_OPTION


def parse(argv: list[str] | None) -> Config:
    """The configuration of a command line; with --resume that run's, changed by the other options."""
    config = _parse(argv, Config())
    if config.resume is None:
        return config
    out = Path(config.resume).resolve()
    saved = load(out / "config.json")
    config = _parse(argv, saved)
    for name in FIXED:
        if getattr(config, name) != getattr(saved, name):
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} {getattr(config, name)}: the run to resume has {getattr(saved, name)}")
    return dataclasses.replace(config, out=str(out), resume=str(out))


def _parse(argv: list[str] | None, default: Config) -> Config:
    """What tyro reads; what it refuses in a box is refused here in one line."""
    import tyro

    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(Config, args=argv, prog="tba_min.py", description=Config.__doc__, default=default)
    except SystemExit as end:
        if not end.code:  # --help
            raise
        lines = [line.strip(" │|") for line in box.getvalue().splitlines()[1:]]  # without title and borders
        text = " ".join(line for line in lines if line.strip("─-╰╯"))
        raise ConfigError(re.split(" (Argument|For full) helptext", text)[0]) from None


def check_task(config: Config) -> None:
    """Refuse a task that can't fill a batch or an evaluation, or has no model."""
    from tasks import load_task

    task = load_task(config.task)
    if len(task.train) < config.prompts_per_batch:
        raise ConfigError(f"--prompts-per-batch {config.prompts_per_batch}: the task has {len(task.train)} prompts")
    if len(task.train) < (config.searchers or 1):
        raise ConfigError(f"--searchers {config.searchers}: the task has {len(task.train)} prompts to share out")
    if not getattr(task, config.eval_split):
        raise ConfigError(f"--task {config.task}: it has no {config.eval_split} prompts; give it some")
    if config.model == "start" and not hasattr(task, "make_start_model"):
        raise ConfigError(f"--model start: the task {config.task} makes no start model; name a model folder")


class Run:
    """One run, from its folder to its summary.

    Raises:
        ConfigError: when the folder can't be used: another run is at work in it, or its checkpoint is damaged.
    """

    def __init__(self, config: Config) -> None:
        # torch.multiprocessing is this module plus reducers for tensors, which children register as they import torch
        self.ctx = multiprocessing.get_context("spawn")
        self.started = time.time()
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{Path(config.task.split(':')[0]).stem}-{os.getpid()}"
        self.out = Path(config.out or Path("runs") / name).resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self._lock = self._lock_folder()
        self.start = checkpoint.last_in(self.out) if config.resume else None  # checkpoint to go on from
        self.config = dataclasses.replace(config, out=str(self.out), resume=None)
        self.screen = Screen(self.config)
        self.board = Board(self.ctx, config.searchers)
        # all processes' sockets lie in a folder that is removed with the parent
        self.address = os.path.join(multiprocessing.util.get_temp_dir(), "weights")
        if len(self.address) > 97:  # a socket's path may have 107 bytes, and others there have names of 17
            raise ConfigError(f"TMPDIR {tempfile.gettempdir()}: too long a path for local sockets, name a shorter one")
        self.log = logging.getLogger("tba_min")
        self.interrupts = 0
        self.result: dict | None = None  # what the trainer says at its end
        self.saving_since: float | None = None  # time.time() at which the trainer began its last checkpoint
        self.incarnations = [0] * config.searchers
        self.restarts = 0
        self.absent: set[int] = set()  # searchers that are being started again
        self.lost = [0] * config.searchers  # trajectories that died with their searcher
        self.errors: dict[str, tuple[str, str]] = {}  # searcher -> its last error, what and where

    def _lock_folder(self):
        """Held until this process ends, however it does: one run a folder."""
        handle = open(self.out / ".lock", "w")  # noqa: SIM115
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{self.out}: a run is at work in this folder; end it first, or name another") from None
        return handle

    def go(self) -> int:
        """Do it all; returns the exit code."""
        save(self.config, self.out / "config.json")
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._interrupt)
        self.log_handler = start_logging(self.out / "run.log", self.screen)
        self.children = Supervisor(
            self.ctx, self.out, self.board, self.log_handler.queue, self._heard, self._died,
            self.config.heartbeat_timeout,
        )  # fmt: skip
        code, why = 0, None
        try:
            self._start(self._prepare_model())
            self._watch()
            code = EXIT_INTERRUPTED if self.interrupts else 0
        except Failed as error:
            code, why = EXIT_FAILED, str(error)
            self.log.error("tba_min: the run failed: %s", error)
        finally:
            self._stop()
            logging.getLogger().removeHandler(self.log_handler)
            self.log_handler.close()  # waits until all records are out
            self.screen.close()
        if self.result and self.result.get("problem") and code != EXIT_FAILED:
            code, why = EXIT_FAILED, self.result["problem"]
            self.screen.say(f"tba_min: {why}")
        self._summarise({0: "completed", EXIT_INTERRUPTED: "interrupted", EXIT_FAILED: "failed"}[code], why)
        return code

    def _interrupt(self, signum: int, _frame) -> None:
        self.interrupts += 1
        self.board.set(Board.PARENT, "stop", 1)
        if self.interrupts > 1:
            self.children.kill()

    # --- starting ---------------------------------------------------------------------------------------------

    def _prepare_model(self) -> str:
        """Folder of the start model; made by a process of its own where it is missing."""
        c = self.config
        if c.model != "start":
            return c.model
        from tasks.start_model import clear_workshops, start_model_path

        place = start_model_path(c)
        if not (place / "config.json").exists():
            self.log.info(f"making the start model of task {c.task} for seed {c.seed} (about a minute, once) ...")
            # one thread: so small a model gains little from a second one, and on a busy machine that costs minutes
            self.children.spawn("start-model", "tasks.start_model", {"OMP_NUM_THREADS": "1"}, "cpu", (c,))
            maker = self.children.processes["start-model"]
            while maker.is_alive() and not self.interrupts:
                self.children.listen(0.1)
                self.screen.tick()
            if self.interrupts:
                maker.kill()
            self.children.forget("start-model")
            clear_workshops(place.parent, maker.pid)
            if self.interrupts:
                return str(place)
            self.log.info(f"start model ready after {time.time() - self.started:.0f} s, kept in {place}")
        try:
            check_model_files(place)
        except ConfigError as error:
            raise Failed(f"{error}; remove {place}, it is made again") from None
        return str(place)

    def _start(self, folder: str) -> None:
        """Serve the buffer and start trainer and searchers, all at once."""
        if self.interrupts:
            return
        c = self.config
        say = f"starting the trainer and {c.searchers} searcher(s) with {c.engine}, {c.threads} thread(s) each"
        if c.sync == "onpolicy":
            say = f"starting one process that generates and trains in turn, {c.threads} thread(s)"
        self.log.info(f"{say}; {c.engine} takes a while to load ...")
        self.folder, self.buffer, self.places = folder, None, preview.places(c)
        if c.gpus:
            self._divide_memory(folder)
        c = self.config
        self.variables = {"OMP_NUM_THREADS": str(c.threads), "TOKENIZERS_PARALLELISM": "false"}
        if c.sync != "onpolicy":
            self._serve_buffer()
        if self.start:
            self._take_up()
        for i in range(c.searchers):
            self._start_searcher(i)
        start = str(self.start) if self.start else None
        args = (c, folder, self.out, start, self.address, self.buffer)
        self.children.spawn("trainer", "trainer", *self._placed(0), args)

    def _serve_buffer(self) -> None:
        from buffer import serve

        c = self.config
        pool = None if c.sync == "barrier" else c.recent_groups
        with uninterrupted(), environment({"OMP_NUM_THREADS": "1"}):
            manager, self.buffer = serve(
                self.ctx, child.prepare_buffer, (self.board,), capacity=c.buffer_capacity, recent_groups=pool,
                per_prompt=c.per_prompt_capacity, dedup=c.dedup, seed=c.seed,
            )  # fmt: skip
        self.children.adopt(manager, self.buffer.pid())

    def _take_up(self) -> None:
        """Give buffer and counters what the checkpoint has."""
        progress = checkpoint.read_json(self.start / "progress.json")
        state = checkpoint.load_buffer(self.start)
        counts = progress["source"]
        if self.buffer and state:
            self.buffer.load_state_dict(state)
            next_one = 1 + max((uid[1] for uid in state["trajectories"][0]["uid"].tolist()), default=-1)
            self.incarnations = [next_one] * self.config.searchers  # so that no uid comes twice
            for name in Board.COUNTS:  # spread out: their number may have changed
                for i in range(self.config.searchers):
                    self.board.set(Board.SEARCHERS + i, name, sum(counts[name][i :: self.config.searchers]))
        self.log.info(f"going on from {self.start}, update {progress['step']}")

    def _start_searcher(self, i: int) -> None:
        args = (self.config, self.folder, self.out, i, self.incarnations[i], self.address, self.buffer)
        self.children.spawn(f"searcher-{i}", "searcher", *self._placed(1 + i), args)

    def _placed(self, process: int) -> tuple[dict[str, str], str]:
        """Environment and device of a process: 0 is the trainer, 1 + i searcher i."""
        place = self.places[process]
        return self.variables | {"CUDA_VISIBLE_DEVICES": place.visible}, place.device

    def _divide_memory(self, folder: str) -> None:
        """Settle vLLM's share of its GPU, and log who needs what; the run's config.json keeps what was asked for."""
        try:
            share, lines = preview.fit(self.config, Path(folder))
        except ConfigError as error:
            raise Failed(str(error)) from None
        self.config = dataclasses.replace(self.config, vllm_memory=share)
        for line in [*describe(self.places), *lines]:
            self.log.info("%s", line)

    # --- watching ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Listen to the children until the trainer is done or the run is interrupted; lead the syncs of `barrier`."""
        pause = 0.001 if self.config.sync == "barrier" else 0.05
        while self.result is None and not self.interrupts:
            self.children.listen(pause)
            self.children.check_heartbeats()
            self._lead_sync()
            self.screen.tick()

    def _heard(self, name: str, kind: str, value) -> None:
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
        elif kind == "refused":
            if not self.children.ending:  # several processes may say the same
                raise Failed(value)
        elif self.children.ending:
            self.log.error("while ending, %s raised %s", name, value[0])
        elif kind == "error":
            self._raised(name, *value)

    def _raised(self, name: str, what: str, text: str, where: str) -> None:
        """A child's last words. A searcher that fails for the first time is started again when it has ended."""
        self._blame_those_behind(name)
        error = (what.split(":")[0], where)
        if error in self.errors.values():
            raise Failed(f"{name} raised the same again: {what}")
        self.log.error("%s:\n%s", name, text.rstrip())
        if not name.startswith("searcher-"):
            raise Failed(f"{name} raised {what}")
        self.errors[name] = error

    def _blame_those_behind(self, name: str) -> None:
        """When the Manager or the trainer has died, whatever others say is a consequence."""
        for cause in {"buffer": ("buffer",), "trainer": ("buffer",)}.get(name, ("buffer", "trainer")):
            if self.children.is_gone(cause, 0.5):
                self._died(cause, self.children.how_it_ended(cause))

    def _died(self, name: str, how: str) -> None:
        """A child ended: a searcher is started again, anything else ends the run."""
        if self.interrupts or self.result is not None or (name == "start-model" and how == "ended with exit code 0"):
            return
        if not name.startswith("searcher-"):
            raise Failed(f"{name} {how}; what it printed is in {self.out / (name + '.log')}")
        self._blame_those_behind(name)
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

    def _lead_sync(self) -> None:
        """barrier: open a sync when the trainer wishes for one, end it when all searchers that live have merged."""
        board, parent = self.board, Board.PARENT
        wanted, open_ = board.get(Board.TRAINER, "sync"), board.get(parent, "sync")
        present = [s for i, s in enumerate(board.of_searchers("sync")) if i not in self.absent]
        if wanted > open_:
            try:
                self.buffer.start_pool()
            except (EOFError, OSError):
                self._blame_those_behind("trainer")
                raise
            board.set(parent, "sync", wanted)
        elif open_ > board.get(parent, "go") and present and min(present) >= open_:
            board.set(parent, "go", open_)

    # --- ending -----------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """End all children: the trainer may finish its update and save when the run was interrupted."""
        self.board.set(Board.PARENT, "stop", 1)
        now = time.time()
        trainer = self.children.processes.get("trainer")

        def deadline() -> float:
            if self.interrupts > 1:
                return 0.0
            if self.result or not trainer or not trainer.is_alive():
                return ends.setdefault("others", time.time() + 2.0)
            if self.saving_since:  # a checkpoint is not cut off: a large model's takes as long as it takes
                return self.saving_since + PATIENCE
            return now + GRACE

        ends: dict[str, float] = {}
        self.children.stop(deadline)

    def _summarise(self, outcome: str, why: str | None) -> None:
        """Write summary.json, draw the figures, say how it went."""
        c, result = self.config, self.result or {}
        waits = merge_timeline(self.out)
        summary = {
            "outcome": outcome,
            "why": why,
            **{key: getattr(c, key) for key in ("task", "model", "engine", "sync", "seed", "searchers", "gpus")},
            **result,
            "busy_searchers": self.board.of_searchers("busy"),
            "replay_ratio": c.replay_ratio,
            "waits": {"trainer": result.get("waits_trainer", {})} | {n: w for n, w in waits.items() if n != "trainer"},
            "restarts": self.restarts,
            "trajectories_lost": sum(self.lost),
            "resumed_from": str(self.start) if self.start else None,
            "seconds_total": time.time() - self.started,
        }
        if result:
            summary["bottleneck"], summary["advice"] = bottleneck(summary)
        (self.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        if result:
            if result["steps"]:
                from runtime.plots import draw

                draw(self.out)
            self.screen.say(summary_text(summary, self.out))
        saved = checkpoint.all_in(self.out / "checkpoints")
        if outcome != "completed":
            resume = f"; `python tba_min.py --resume {self.out}` goes on from {saved[-1].name}" if saved else ""
            self.screen.say(f"tba_min: {outcome}; what there is lies in {self.out}{resume}")


if __name__ == "__main__":
    sys.exit(main())
