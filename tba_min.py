"""tba_min: Trajectory Balance with Asynchrony (arXiv 2503.18929) on one machine.  `python tba_min.py --help`

This is the parent. It settles the configuration, prepares task and model, serves the replay buffer, starts one trainer
and the searchers, shows what happens, and cleans up, however the run ends. It touches no model itself and imports
nothing heavy: *spawn* runs this file's top level again in every child, and start-up is most of a short run.
"""

import contextlib
import dataclasses
import io
import json
import logging
import multiprocessing
import multiprocessing.util
import os
import re
import signal
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

import child
from child import environment, start_logging, uninterrupted
from config import Config, ConfigError, resolve, save
from metrics import Board, merge_timeline
from show import Screen, bottleneck, summary_text

EXIT_FAILED, EXIT_WRONG_OPTION, EXIT_INTERRUPTED = 1, 2, 130
GRACE = 4.0  # seconds that a stopped trainer has to end its update and save


def main(argv: list[str] | None = None) -> int:
    """Run from the command line; returns the exit code."""
    from setproctitle import setproctitle

    setproctitle("tba_min parent")
    try:
        config = parse(argv)
        check_task(config)  # first: resolving may download a model
        config = resolve(config)
    except ConfigError as error:
        print(f"tba_min: {error}", file=sys.stderr)
        return EXIT_WRONG_OPTION
    return Run(config).go()


def parse(argv: list[str] | None) -> Config:
    """The configuration of a command line; what tyro refuses in a box is refused here in one line."""
    import tyro

    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(Config, args=argv, prog="tba_min.py", description=Config.__doc__)
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


class Failed(RuntimeError):
    """A run that can't go on; the text says why."""


class Run:
    """One run, from its folder to its summary."""

    def __init__(self, config: Config) -> None:
        # torch.multiprocessing is this module plus reducers for tensors, which children register as they import torch
        self.ctx = multiprocessing.get_context("spawn")
        multiprocessing.util.get_temp_dir()  # for all processes' sockets, and removed with the parent
        self.started = time.time()
        self.config, self.screen = config, Screen(config)
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{Path(config.task.split(':')[0]).stem}-{os.getpid()}"
        self.out = Path(config.out or Path("runs") / name).resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.config = config = dataclasses.replace(config, out=str(self.out))
        self.board = Board(self.ctx, config.searchers)
        self.processes: dict[str, multiprocessing.Process] = {}
        self.pipes: dict = {}  # name -> end of a child's message pipe
        self.pids = {"parent": os.getpid()}
        self.log = logging.getLogger("tba_min")
        self.interrupts = 0
        self.ending = False
        self.result: dict | None = None  # what the trainer says at its end
        self.before: float | None = None
        self.manager = None

    def go(self) -> int:
        """Do it all; returns the exit code."""
        save(self.config, self.out / "config.json")
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._interrupt)
        self.log_handler = start_logging(self.out / "run.log", self.screen)
        code = 0
        try:
            folder = self._prepare_model()
            self._start(folder)
            self._watch()
            code = EXIT_INTERRUPTED if self.interrupts else 0
        except Failed as error:
            self.log.error("tba_min: the run failed: %s", error)
            code = EXIT_FAILED
        finally:
            self._stop()
            logging.getLogger().removeHandler(self.log_handler)
            self.log_handler.close()  # waits until all records are out
            self.screen.close()
        if self.result:
            self._summarise("interrupted" if code else "completed")
        elif code == EXIT_INTERRUPTED:
            self.screen.say(f"tba_min: interrupted; what there is lies in {self.out}")
        return code

    def _interrupt(self, signum: int, _frame) -> None:
        self.interrupts += 1
        self.board.set(Board.PARENT, "stop", 1)
        if self.interrupts > 1:
            for process in self.processes.values():
                process.kill()

    # --- starting ---------------------------------------------------------------------------------------------

    def _prepare_model(self) -> str:
        """Folder of the start model; made by a process of its own where it is missing."""
        c = self.config
        if c.model != "start":
            return c.model
        from start_model import clear_workshops, start_model_path

        place = start_model_path(c)
        if not (place / "config.json").exists():
            self.log.info(f"making the start model of task {c.task} for seed {c.seed} (about a minute, once) ...")
            # one thread: so small a model gains little from a second one, and on a busy machine that costs minutes
            self._spawn("start-model", "start_model", {"OMP_NUM_THREADS": "1"}, (c,))
            maker = self.processes["start-model"]
            while maker.is_alive() and not self.interrupts:
                self._listen(0.1)
                self.screen.tick()
            if self.interrupts:
                maker.kill()
            maker.join()
            self._listen(0.0)
            del self.processes["start-model"], self.pids["start-model"]
            clear_workshops(place.parent, maker.pid)
            if self.interrupts:
                return str(place)
            self.log.info(f"start model ready after {time.time() - self.started:.0f} s, kept in {place}")
        return str(place)

    def _start(self, folder: str) -> None:
        """Serve the buffer and start trainer and searchers, all at once."""
        if self.interrupts:
            return
        from buffer import serve

        c = self.config
        say = f"starting the trainer and {c.searchers} searcher(s) with {c.engine}, {c.threads} thread(s) each"
        if c.sync == "onpolicy":
            say = f"starting one process that generates and trains in turn, {c.threads} thread(s)"
        self.log.info(f"{say}; {c.engine} takes a while to load ...")
        pipes = [self.ctx.Pipe(duplex=False) for _ in range(c.searchers)]  # weight handles, trainer -> searcher
        proxy = None
        self._spawn_environment = {"OMP_NUM_THREADS": str(c.threads), "TOKENIZERS_PARALLELISM": "false"}
        if c.sync != "onpolicy":
            with uninterrupted(), environment({"OMP_NUM_THREADS": "1"}):
                pool = None if c.sync == "barrier" else c.recent_groups
                self.manager, self.buffer = serve(
                    self.ctx, child.prepare_process, ("buffer",), capacity=c.buffer_capacity, recent_groups=pool,
                    per_prompt=c.per_prompt_capacity, dedup=c.dedup, seed=c.seed,
                )  # fmt: skip
            self.pids["buffer"] = self.buffer.pid()
            proxy = self.buffer
        for i, (receiving, _) in enumerate(pipes):
            args = (c, folder, self.out, i, 0, receiving, proxy)
            self._spawn(f"searcher-{i}", "searcher", self._placed(1 + i), args)
        senders = [sending for _, sending in pipes]
        self._spawn("trainer", "trainer", self._placed(0), (c, folder, self.out, senders, proxy))
        for ends in pipes:
            for end in ends:
                end.close()  # the children's copies are the only ones now: a dead sender is noticed

    def _placed(self, process: int) -> dict[str, str]:
        """Environment of a process: 0 is the trainer, 1 + i searcher i. One GPU each; `--gpus 1` is shared."""
        if not self.config.gpus:
            return self._spawn_environment | {"CUDA_VISIBLE_DEVICES": ""}
        mask = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = mask.split(",") if mask else [str(i) for i in range(self.config.gpus)]
        return self._spawn_environment | {"CUDA_VISIBLE_DEVICES": devices[process % self.config.gpus]}

    def _spawn(self, name: str, module: str, variables: dict[str, str], args: tuple) -> None:
        receiving, sending = self.ctx.Pipe(duplex=False)
        device = "cuda" if self.config.gpus and module != "start_model" else "cpu"
        common = (module, name, self.board, sending, self.log_handler.queue, device, self.out)
        process = self.ctx.Process(target=child.run, args=(*common, args), name=name, daemon=True)
        with uninterrupted(), environment(variables):
            process.start()
        sending.close()
        self.processes[name], self.pipes[name] = process, receiving
        self.pids[name] = process.pid
        (self.out / "pids.json.new").write_text(json.dumps(self.pids, indent=2) + "\n")
        os.replace(self.out / "pids.json.new", self.out / "pids.json")

    # --- watching ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Listen to the children until the trainer is done or the run is interrupted; lead the syncs of `barrier`."""
        pause = 0.001 if self.config.sync == "barrier" else 0.05
        while self.result is None and not self.interrupts:
            self._listen(pause)
            self._lead_sync()
            self.board.set(Board.PARENT, "alive", time.time())
            self.screen.tick()

    def _listen(self, timeout: float) -> None:
        """Take in messages for up to `timeout` seconds; notice children that died."""
        sentinels = {p.sentinel: n for n, p in self.processes.items() if not self.ending or p.is_alive()}
        if self.manager and not self.ending:
            sentinels[self.manager._process.sentinel] = "buffer"
        ready = wait([*self.pipes.values(), *sentinels], timeout)
        for name, pipe in list(self.pipes.items()):
            while pipe in ready and pipe.poll():
                try:
                    self._heard(name, *pipe.recv())
                except EOFError:
                    del self.pipes[name]
                    break
        for sentinel in ready:
            if sentinel in sentinels and not self.ending and not self.interrupts and self.result is None:
                self._died(sentinels[sentinel])

    def _heard(self, name: str, kind: str, value) -> None:
        if kind == "row":
            self.screen.row(value)
        elif kind == "accuracy" and self.before is None:
            self.before = value["accuracy"]
            self.screen.accuracy = value["accuracy"]
            self.log.info(f"held-out accuracy before RL: {self.before:.3f} (greedy, on {value['prompts']})")
        elif kind == "done":
            self.result = value
        elif kind == "error" and self.ending:
            self.log.error("while ending, %s raised %s", name, value[0])
        elif kind == "error":
            what, text = value
            if self.manager and not self.manager._process.is_alive():
                self._died("buffer")  # that is the cause, whatever it made others say
            self.log.error("%s:\n%s", name, text.rstrip())
            raise Failed(f"{name} raised {what}")

    def _died(self, name: str) -> None:
        process = self.manager._process if name == "buffer" else self.processes[name]
        process.join(1.0)
        code = process.exitcode
        if code == 0 and name == "start-model":
            return
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
        raise Failed(f"{name} {how}; what it printed is in {self.out / (name + '.log')}")

    def _lead_sync(self) -> None:
        """barrier: open a sync when the trainer wishes for one, end it when all searchers have merged."""
        board, parent = self.board, Board.PARENT
        wanted, open_ = board.get(Board.TRAINER, "sync"), board.get(parent, "sync")
        if wanted > open_:
            try:
                self.buffer.start_pool()
            except (EOFError, OSError):
                self._died("buffer")
            board.set(parent, "sync", wanted)
        elif open_ > board.get(parent, "go") and min(board.of_searchers("sync")) >= open_:
            board.set(parent, "go", open_)

    # --- ending -----------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """End all children: the trainer may finish its update and save when the run was interrupted."""
        self.ending = True
        self.board.set(Board.PARENT, "stop", 1)
        deadline = time.time() + (GRACE if self.interrupts == 1 or self.result else 0.5)
        while any(p.is_alive() for p in self.processes.values()) and time.time() < deadline and self.interrupts < 2:
            self._listen(0.05)
            if self.result or not self.processes.get("trainer") or not self.processes["trainer"].is_alive():
                deadline = min(deadline, time.time() + 2.0)
        for process in self.processes.values():
            process.kill()
            process.join()
        if self.manager:
            self.manager.shutdown()

    def _summarise(self, outcome: str) -> None:
        """Write summary.json, draw the figures, say how it went."""
        c, result = self.config, self.result
        waits = merge_timeline(self.out)
        summary = {
            "outcome": outcome,
            **{key: getattr(c, key) for key in ("task", "model", "engine", "sync", "seed", "searchers", "gpus")},
            **result,
            "busy_searchers": self.board.of_searchers("busy"),
            "replay_ratio": c.replay_ratio,
            "waits": {"trainer": result["waits_trainer"]} | {n: w for n, w in waits.items() if n != "trainer"},
            "seconds_total": time.time() - self.started,
        }
        summary["bottleneck"], summary["advice"] = bottleneck(summary)
        (self.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        if result["steps"]:
            from plots import draw

            draw(self.out)
        self.screen.say(summary_text(summary, self.out))


if __name__ == "__main__":
    sys.exit(main())
