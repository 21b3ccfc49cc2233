"""The product's own processes for a bench, loaded once and used for many measurements.

`Lab` starts a trainer and searchers as separate processes. Each of them runs the unchanged `main` of trainer.py or
searcher.py again and again. `Lab` itself does the parent's work (buffer, notice board, syncs). Only start-up is saved:
an engine is kept from one measurement to the next and gets the new run's weights. The trainer keeps a copy of the
weights after each update, so that accuracies can be measured after the run.
"""

import dataclasses
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

from config import Config
from runtime import child as children
from runtime.child import environment, uninterrupted
from runtime.metrics import Board
from sync import lead_sync

FIRST = {"add requests", "generate", "forward, backward"}  # a run begins with one of these spans


class Worker:
    """A process that keeps its loaded parts and obeys one command after the other."""

    def __init__(self, ctx, name: str, threads: int, board: Board, stand_in: float = 0.0) -> None:
        self.name = name
        self.pipe, other = ctx.Pipe()
        variables = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
        self.process = ctx.Process(target=_obey, args=(name, other, board, stand_in), daemon=True, name=name)
        with uninterrupted(), environment(variables):
            self.process.start()
        other.close()

    def begin(self, command: str, *args) -> None:
        self.pipe.send((command, args))

    def hear(self, *wanted: str, timeout: float = 600.0):
        """The value of the next message of a wanted kind. An error of the worker is raised here."""
        deadline = time.time() + timeout
        while time.time() < deadline:
            if self.pipe.poll(0.05):
                kind, value = self.pipe.recv()
                if kind == "error":
                    raise RuntimeError(f"{self.name}: {value}")
                if kind in wanted:
                    return value
            elif not self.process.is_alive():
                raise RuntimeError(f"{self.name} ended with exit code {self.process.exitcode}")
        raise TimeoutError(f"{self.name} was silent for {timeout:g} s")

    def do(self, command: str, *args):
        self.begin(command, *args)
        return self.hear("result")


class Lab:
    """Everything of a run but its start-up. Use it as a context manager.

    Args:
        searchers: searcher processes, each with one thread, as the trainer.
        serial: threads of one more process, for onpolicy runs; 0: no such process.
        stand_in: answers per second of an engine that only sleeps (bench/scale.py); 0: real engines.
    """

    def __init__(self, searchers: int = 1, serial: int = 0, stand_in: float = 0.0) -> None:
        import multiprocessing
        import multiprocessing.util

        self.ctx = multiprocessing.get_context("spawn")
        multiprocessing.util.get_temp_dir()
        self.board = Board(self.ctx, searchers)
        self.trainer = Worker(self.ctx, "trainer", 1, self.board)
        self.searchers = [Worker(self.ctx, f"searcher-{i}", 1, self.board, stand_in) for i in range(searchers)]
        self.serial = Worker(self.ctx, "serial", serial, self.board) if serial else None
        self.scratch = tempfile.TemporaryDirectory()
        self.runs = 0

    def __enter__(self) -> "Lab":
        return self

    def __exit__(self, *_) -> None:
        for worker in [self.trainer, *self.searchers, *([self.serial] if self.serial else [])]:
            worker.process.kill()
            worker.process.join()
        self.scratch.cleanup()

    def wait_for_all(self) -> None:
        """Wait until every process has imported its modules."""
        for worker in (self.trainer, *self.searchers):
            worker.do("ping")

    def run(self, config: Config, folder: str, buffer=None, use: int | None = None, watch=None) -> dict:
        """One run. -> start (of the first request), end (of the last update), spans by process, the trainer's summary.

        Args:
            buffer: (manager, proxy) of a full buffer: the trainer then learns without any searcher.
            use: searchers that take part; None: all.
            watch: called with the buffer's process id as the run begins and as it ends.
        """
        out = self._fresh()
        if config.sync == "onpolicy":
            self.serial.begin("train", config, folder, out, None)
            summary = self.serial.hear("done")
            return _measured({"serial": self.serial.hear("result")}, summary, "serial", "serial")
        manager, proxy = buffer or self.serve(config)
        searchers = [] if buffer else self.searchers[:use]
        if buffer:
            self.board.set(Board.SEARCHERS, "generated", 1e12)  # so that the replay ratio never stops the trainer
        self._begin_searchers(searchers, config, folder, out, proxy)
        self.trainer.begin("train", config, folder, out, proxy)
        pid = proxy.pid() if watch else 0
        if watch:
            watch(pid)
        summary = self._lead(config, proxy, searchers)
        handed_over, now = sum(self.board.of_searchers("handed_over")), time.time()
        if watch:
            watch(pid)
        self.board.set(Board.PARENT, "stop", 1)
        spans = {"trainer": self.trainer.hear("result")} | {w.name: w.hear("result") for w in searchers}
        if not buffer:
            manager.shutdown()
        run = _measured(spans, summary, searchers[0].name if searchers else "trainer", "trainer")
        return run | {"handed_over": handed_over, "seconds_searching": now - run["start"]}

    def _begin_searchers(self, searchers: list, config: Config, folder: str, out: Path, proxy) -> None:
        """Let the searchers load, until they wait for the weights."""
        for i, searcher in enumerate(searchers):
            searcher.begin("search", config, folder, out, i, proxy)
        for searcher in searchers:
            searcher.hear("waiting")

    def generate(self, config: Config, folder: str, trajectories: int) -> tuple[float, tuple]:
        """Searchers alone. -> seconds from the first request to so many handed over, and (manager, proxy)."""
        out = self._fresh()
        served = self.serve(config)
        self._begin_searchers(self.searchers, config, folder, out, served[1])
        self.trainer.do("hand_out", folder, out)
        while sum(self.board.of_searchers("handed_over")) < trajectories:
            time.sleep(0.002)
        end = time.time()
        self.board.set(Board.PARENT, "stop", 1)
        spans = [w.hear("result") for w in self.searchers]
        return end - min(_first(s) for s in spans), served

    def side_by_side(self, config: Config, folder: str, trajectories: int, full: tuple) -> float:
        """Both sides at the same time, without coupling: the searchers fill a buffer that nobody reads, the trainer
        learns from the full (manager, proxy) and publishes nothing. -> seconds of the slower side.
        """
        out = self._fresh()
        manager, proxy = self.serve(config)
        self._begin_searchers(self.searchers, config, folder, out, proxy)
        alone = dataclasses.replace(config, replay_ratio=1e9, sync_every=10**9)
        self.trainer.begin("train", alone, folder, out, full[1])
        reached, done = 0.0, False
        while not (reached and done):
            if not reached and sum(self.board.of_searchers("handed_over")) >= trajectories:
                reached = time.time()
            if self.trainer.pipe.poll(0.002) and not done:
                kind, value = self.trainer.pipe.recv()
                if kind == "error":
                    raise RuntimeError(f"trainer: {value}")
                done = kind == "done"
        self.board.set(Board.PARENT, "stop", 1)
        learnt, searched = self.trainer.hear("result"), [w.hear("result") for w in self.searchers]
        manager.shutdown()
        return max(reached - min(map(_first, searched)), _measured({"t": learnt}, {}, "t", "t")["seconds"])

    def start_folder(self, config: Config) -> str:
        """Folder of the start model of task and seed. A missing one is made."""
        from tasks.start_model import start_model_path

        place = start_model_path(config)
        if not (place / "config.json").exists():
            self.trainer.do("make_start_model", config)
        return str(place)

    def serve(self, config: Config) -> tuple:
        """Start a new buffer for a run, as the parent does."""
        from runtime.served_buffer import serve

        pool = None if config.sync == "barrier" else config.recent_groups
        options = {"capacity": config.buffer_capacity, "per_prompt": config.per_prompt_capacity, "dedup": config.dedup}
        options |= {"recent_groups": pool, "seed": config.seed, "answers": config.S}
        with uninterrupted(), environment({"OMP_NUM_THREADS": "1"}):
            return serve(self.ctx, children.prepare_buffer, (self.board,), **options)

    def _fresh(self) -> Path:
        for row in range(Board.SEARCHERS + self.board.searchers):
            for field in Board.FIELDS:
                self.board.set(row, field, 0)
        self.runs += 1
        out = Path(self.scratch.name) / str(self.runs)
        out.mkdir()
        return out

    def _lead(self, config: Config, proxy, searchers: list) -> dict:
        """The parent's part of a run, until the trainer's summary comes."""
        absent = set(range(len(searchers), self.board.searchers))
        while True:
            if self.trainer.pipe.poll(0.001 if config.sync == "barrier" else 0.05):
                kind, value = self.trainer.pipe.recv()
                if kind == "done":
                    return value
                if kind == "error":
                    raise RuntimeError(f"trainer: {value}")
            for worker in (self.trainer, *searchers):
                if not worker.process.is_alive():
                    raise RuntimeError(f"{worker.name} is gone")
            for searcher in searchers:
                if searcher.pipe.poll():
                    searcher.hear("result", timeout=1.0)
                    raise RuntimeError(f"{searcher.name} ended early")
            if config.sync == "barrier":
                lead_sync(self.board, proxy, absent)


def _first(spans: list) -> float:
    return min(start for name, start, _, _ in spans if name in FIRST)


def _measured(spans: dict, summary: dict, opens: str, closes: str) -> dict:
    ends = [end for name, _, end, _ in spans[closes] if name == "step"]
    start = _first(spans[opens])
    return {"start": start, "end": ends[-1], "seconds": ends[-1] - start, "spans": spans, "summary": summary}


# --- in a worker ----------------------------------------------------------------------------------------------------


def _obey(name: str, pipe, board: Board, stand_in: float) -> None:
    children.prepare_process(name)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the output of libraries
    here = SimpleNamespace(name=name, pipe=pipe, board=board, engines={}, snapshots=[])
    if stand_in:
        _stand_in(stand_in)
    else:
        _keep_engines(here)
    while True:
        command, args = pipe.recv()
        try:
            pipe.send(("result", COMMANDS[command](here, *args)))
        except BaseException:  # reported to the bench, which then ends
            pipe.send(("error", traceback.format_exc()))


def _keep_engines(here) -> None:
    """Give searcher.py the engine of the previous run, with the new run's weights."""
    from runtime import loading
    from runtime.policy import load_policy, named_weights

    make = loading.make_engine

    def kept(config, folder, *args, **kwargs):
        if config.engine == "hf":
            return make(config, folder, *args, **kwargs)
        key = (config.in_flight, config.max_new_tokens, config.temperature, config.task)
        if key not in here.engines:
            here.engines.clear()
            here.engines[key] = make(config, folder, *args, **kwargs)
            return here.engines[key]
        engine = here.engines[key]
        while engine.in_flight:
            engine.step()
        engine.load_weights(named_weights(load_policy(folder)), 0)
        return engine

    loading.make_engine = kept


def _stand_in(rate: float) -> None:
    """Give searcher.py an engine and a reference that sleep like a GPU with `rate` answers per second."""
    import searcher
    from bench.stand_in import StandIn, log_ref
    from runtime import loading

    loading.make_engine = lambda config, *_, **__: StandIn(rate, config.seed)
    searcher.Searcher._log_ref = log_ref


class _Messages:
    """A child's pipe to its parent, without the metrics rows, which nobody reads here."""

    def __init__(self, pipe) -> None:
        self.pipe = pipe

    def send(self, message: tuple) -> None:
        if message[0] in ("accuracy", "done", "error"):
            self.pipe.send(message)


def _child(here) -> children.Child:
    name = "trainer" if here.name == "serial" else here.name
    return children.Child(name, here.board, _Messages(here.pipe), "cpu", time.time())


def _address(out: Path) -> str:
    return f"{out}/weights"


def search(here, config, folder: str, out: Path, index: int, proxy) -> list:
    """Run searcher.py's main until the stop; tell when it waits for the weights. -> its spans."""
    import searcher
    from runtime.weights import ask_for

    def ask(*args):
        here.pipe.send(("waiting", None))
        return ask_for(*args)

    searcher.ask_for = ask
    child = _child(here)
    searcher.main(child, config, folder, out, index, 0, _address(out), proxy)
    return list(child.clock.spans)


def rounds(here, config, folder: str, trajectories: int) -> float:
    """Seconds in which a searcher generates so many in rounds; in each the engine runs empty."""
    import searcher

    child = _child(here)
    parts = searcher.load_parts(child, config, folder, 0, 0)
    one, done = searcher.Searcher(parts, config, 0, 0, child.clock), 0
    start = time.time()
    while done < trajectories:
        done += len(one.round(max(1, config.in_flight // config.S)))
    return (time.time() - start) * trajectories / done


def make_start_model(here, config) -> None:
    """Make the start model of a task, as a run does."""
    from tasks import start_model

    start_model.main(None, config)


def train(here, config, folder: str, out: Path, proxy) -> list:
    """Run trainer.py's main, with a copy of the weights after each update. -> its spans."""
    import trainer

    here.snapshots = [(0, 0.0, None)]
    if not hasattr(here, "Trainer"):
        here.Trainer = trainer.Trainer

    class Keeping(here.Trainer):
        def _update(self, batch) -> None:
            super()._update(batch)
            state = {name: p.detach().clone() for name, p in self.learner.model.named_parameters()}
            here.snapshots.append((self.learner.step, time.time(), state))

    trainer.Trainer = Keeping
    child = _child(here)
    trainer.main(child, config, folder, out, None, _address(out), proxy)
    return list(child.clock.spans)


def hand_out(here, folder: str, out: Path) -> None:
    """Give the searchers a folder's weights, as a trainer does at its start."""
    from runtime.policy import load_policy, named_weights
    from runtime.weights import Publisher

    Publisher(named_weights(load_policy(folder)), 0, "shared-memory").hand_out(_address(out))


def first_above(here, config, folder: str, target: float, every: int) -> tuple:
    """(update, time, accuracy) of the first kept weights with that accuracy; else update None and the last weights."""
    import torch

    from runtime.policy import load_policy
    from tasks import load_task
    from trainer import Evaluator

    model = load_policy(folder)
    evaluate = Evaluator(model, folder, load_task(config.task), config)
    own, last = dict(model.named_parameters()), here.snapshots[-1][0]
    for step, when, state in here.snapshots[1:]:
        if step % every and step != last:
            continue
        with torch.no_grad():
            for name, value in state.items():
                own[name].copy_(value)
        accuracy = evaluate()
        if accuracy >= target:
            return step, when, accuracy
    return None, when, accuracy


def ping(here) -> None:
    """Import the heavy modules; the answer says that it is done."""
    import searcher  # noqa: F401
    import trainer  # noqa: F401


COMMANDS = {f.__name__: f for f in (ping, search, rounds, train, hand_out, first_above, make_start_model)}

if __name__ == "__main__":
    sys.exit(__doc__)
