"""Held-out accuracy before and after RL on the default task: whole runs of tba_min.py, by loss and seed.

    python -m bench.accuracy                        the defaults, seeds 0, 1, 2 (README's first table; 4 minutes)
    python -m bench.accuracy --losses rloo grpo --max-seconds 40        other losses; further options go to tba_min.py

Writes bench/results/accuracy.json, where rows of other losses stay, and draws docs/accuracy.png and
docs/staleness.png.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.common import RESULTS, ROOT, machine

PLACE = RESULTS / "accuracy.json"
EXTRA = {
    "tb": [],
    "tb, 40 s": [],
    "tb learned": ["--loss", "tb", "--log-z", "learned"],
    "dr_grpo": ["--loss", "grpo", "--dr-grpo"],
}
KEPT = ("accuracy_before", "accuracy_after", "steps", "seconds_rl", "seconds_evaluating", "seconds_total")
KEPT += ("trajectories_generated", "trajectories_trained", "staleness_mean", "staleness_max", "busy_trainer")


def one_run(loss: str, seed: int, options: list[str]) -> dict:
    """Run tba_min.py in a temporary folder, and return a short form of its summary."""
    out = Path(tempfile.mkdtemp()) / "run"
    command = [sys.executable, "tba_min.py", "--seed", str(seed), "--out", str(out)]
    subprocess.run([*command, *EXTRA.get(loss, ["--loss", loss]), *options], cwd=ROOT, check=True)
    summary = json.loads((out / "summary.json").read_text())
    if loss == "tb" and seed == 0:
        (ROOT / "docs").mkdir(exist_ok=True)
        for name in ("accuracy", "staleness"):
            shutil.copy(out / "figures" / f"{name}.png", ROOT / "docs" / f"{name}.png")
    shutil.rmtree(out.parent)
    row = {"loss": loss, "seed": seed, "options": " ".join(options), "date": time.strftime("%Y-%m-%d")}
    row |= {key: round(summary[key], 3) for key in KEPT} | {"busy_searchers": summary["busy_searchers"]}
    return row | {"evaluations": [[step, round(s, 1), round(a, 3)] for step, s, a in summary["evaluations"]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--losses", nargs="+", default=["tb"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments, options = parser.parse_known_args()
    known = json.loads(PLACE.read_text())["runs"] if PLACE.exists() else []
    rows = [r for r in known if r["loss"] not in arguments.losses]
    for loss in arguments.losses:
        rows += [one_run(loss, seed, options) for seed in arguments.seeds]
        text = ",\n  ".join(json.dumps(r) for r in rows)
        PLACE.write_text(f'{{"machine": {json.dumps(machine())},\n "runs": [\n  {text}\n ]}}\n')
    print(f"\n{'loss':12} {'seed':>4} {'before':>7} {'after':>7} {'RL s':>6} {'total s':>8}")
    for r in rows:
        print(
            f"{r['loss']:12} {r['seed']:4} {r['accuracy_before']:7.3f} {r['accuracy_after']:7.3f}"
            f" {r['seconds_rl']:6.1f} {r['seconds_total']:8.1f}"
        )


if __name__ == "__main__":
    main()
