"""Make notebooks/saved/: the saved runs, for notebooks that should not wait for new ones.

    python -m notebooks.save_runs [--cache .cache]        (five runs with vLLM on two quiet cores: 6 minutes)

`default.json`, `m_0.json`, `huge_k.json` and `small_beta.json` are runs of notebook 6, reduced. `stream.npz` has all
trajectories of a fifth run, for notebook 2, on 256 of the problems so that each comes again and again.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from config import Config, resolve
from notebooks.saved_run import SAVED, keep, keep_stream, run_job
from tba_min import Run

SAME = ["--steps", "200", "--max-seconds", "0", "--eval-every", "10", "--eval-prompts", "250", "--seed", "0"]
RUNS = {  # file: its mistake
    "default": [],
    "m_0": ["--recency-prob", "0"],
    "huge_k": ["--sync-every", "100"],
    "small_beta": ["--beta", "0.002"],
}


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
    parser.add_argument("--only", nargs="+", default=[*RUNS, "stream"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only:
            out = str(Path(folder) / name)
            if name == "stream":
                record_stream(arguments.cache, out)
            else:
                run = run_job(Path(out), *SAME, *RUNS[name], "--gpus", "0", "--cache", arguments.cache)
                keep(run, SAVED / f"{name}.json", timeline=name == "default")
    for path in sorted(SAVED.iterdir()):
        print(f"{path.name:20} {path.stat().st_size / 1000:6.1f} kB")


if __name__ == "__main__":
    main()
