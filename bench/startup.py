"""Seconds from the command to the end of the first optimizer step, by phase: default runs with a cached start model.

The phases are those of the process that all others wait for: the searcher in `eager`, the one process in `onpolicy`.

    python -m bench.startup [--rounds 3] [...]        further options go to tba_min.py, for example --cache FOLDER

Writes bench/results/startup.json. Make the start model first (`make run`).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.common import ROOT, machine
from runtime.plots import read_trace

MODES = {"eager": [], "eager, hf": ["--engine", "hf"], "onpolicy": ["--sync", "onpolicy"]}
PHASES = {
    "start": "Python, options, buffer; the process begins",
    "import": "torch, transformers, vLLM",
    "load": "task, models, vLLM's engine",
    "generate": "the first answers, scored and drawn (onpolicy: and the first evaluation)",
    "update": "forward, backward, optimizer step",
}


def spans(trace: list[dict], process: str, name: str) -> list[tuple[float, float]]:
    """Start and end, in seconds, of a process's spans with that name."""
    (pid,) = [e["pid"] for e in trace if e["ph"] == "M" and e["args"]["name"] == process]
    mine = [e for e in trace if e["ph"] == "X" and e["pid"] == pid and e["name"] == name]
    return [(e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in mine]


def one_run(mode: str, options: list[str]) -> dict[str, float]:
    """Seconds of each phase, and their sum, of one short run."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "tba_min.py", "--steps", "2", "--eval-every", "0", "--out", f"{place}/run"]
        began = time.time()
        subprocess.run([*command, *MODES[mode], *options], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        trace = read_trace(Path(place) / "run")
    process = "trainer" if mode == "onpolicy" else "searcher-0"
    imports, loads = spans(trace, process, "import"), spans(trace, process, "load")
    first, last = spans(trace, "trainer", "forward, backward")[0][0], spans(trace, "trainer", "step")[0][1]
    ends = [began, imports[0][0], imports[0][0] + sum(b - a for a, b in imports), loads[-1][1], first, last]
    seconds = dict(zip(PHASES, (b - a for a, b in zip(ends, ends[1:], strict=False)), strict=True))
    return seconds | {"all": last - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "startup.json")
    arguments, options = parser.parse_known_args()
    if arguments.rounds < 3:
        parser.error("--rounds must be at least 3")
    runs: dict[str, list[dict]] = {mode: [] for mode in MODES}
    for _ in range(arguments.rounds):
        for mode in MODES:
            runs[mode].append(one_run(mode, options))
    rows = []
    for mode, measured in runs.items():
        medians = {phase: round(statistics.median(r[phase] for r in measured), 1) for phase in [*PHASES, "all"]}
        spread = {"least": round(min(r["all"] for r in measured), 1), "most": round(max(r["all"] for r in measured), 1)}
        rows.append({"mode": mode} | medians | spread)
        print(rows[-1])
    head = json.dumps({"machine": machine(), "rounds": arguments.rounds, "goal": "at most 20 s", "phases": PHASES})
    arguments.out.write_text(head[:-1] + ',\n "rows": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "\n ]}\n")


if __name__ == "__main__":
    main()
