"""Make notebooks/saved/: the saved runs, for notebooks that should not wait for new ones.

    python -m notebooks.save_runs [--cache .cache]        (25 runs with vLLM, 28 s each on two quiet cores)
    python -m notebooks.save_runs --only default          (the runs with this file's name, or `stream`)

Each JSON file has the three runs of a row of RUNS, reduced. `stream.npz` has all trajectories of a run of its own, for
notebook 2, on 256 of the problems so that each comes again and again.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from config import Config, resolve
from notebooks.saved_run import OPTIONS, RUNS, SAVED, SEEDS, keep, start_run
from notebooks.stream import keep_stream
from tba_min import Run


class Recording(Run):
    """A run that keeps its buffer's final contents: with room enough, all trajectories ever written."""

    packed = None

    def _stop(self) -> None:
        self.packed = self.buffer.packed_state()["trajectories"]
        super()._stop()


def few_problems():
    """The addition task with 256 problems to train on."""
    from tasks.addition import Addition

    task = Addition()
    task.train = task.train[:256]
    return task


def record_stream(cache: str, out: str) -> None:
    from tasks.start_model import start_model_path

    start = start_model_path(Config(task="addition", cache=cache))
    here = f"{Path(__file__).resolve()}:few_problems"
    options = {"steps": 200, "max_seconds": 0.0, "eval_every": 0, "per_prompt_capacity": 100_000, "out": out}
    run = Recording(resolve(Config(task=here, model=str(start), gpus=0, **options)))
    if run.go():
        sys.exit("the run failed")
    keep_stream(run.packed, few_problems().train, SAVED / "stream.npz")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cache", default=".cache")
    names = [file for file, _ in RUNS.values()] + ["stream"]
    parser.add_argument("--only", nargs="+", default=names, choices=names)
    arguments = parser.parse_args()
    for file, options in RUNS.values():
        if file in arguments.only:
            same = [*OPTIONS, *options, "--cache", arguments.cache]
            keep([start_run([*same, "--seed", str(seed)]) for seed in SEEDS], SAVED / f"{file}.json", file == "default")
    if "stream" in arguments.only:
        with tempfile.TemporaryDirectory() as folder:
            record_stream(arguments.cache, folder)
    for path in sorted(SAVED.iterdir()):
        print(f"{path.name:20} {path.stat().st_size / 1000:6.1f} kB")


if __name__ == "__main__":
    main()
