"""Who does what when: `onpolicy`, `barrier` and `eager` side by side, each process's busy share, the cost of recording.

Default runs (k = 1, `barrier` too), a few seconds of each, in turn. Draws docs/timeline.png from the last round. Writes
bench/results/timeline.json: busy shares and shares of time waited by cause (medians of the rounds), spans per second of
the process that records most, and their cost as a share of the run's time. The cost is the number of spans times the
time of an empty span, minus that of an empty with statement (same process, median of 7 times 100,000).

    python -m bench.timeline [--rounds 3] [--seconds 8] [...]         further options go to tba_min.py
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

from bench.common import ROOT, machine
from runtime.metrics import Clock
from runtime.plots import read_trace, timeline, towards_the_end

MODES = {
    "onpolicy": "onpolicy: one process, {threads} threads",
    "barrier": "barrier, k = 1: all pause at every update",
    "eager": "eager, k = 1: no syncs; the trainer waits only for answers",
}
WINDOW = 2.5  # seconds that are drawn


def one_run(mode: str, seconds: float, options: list[str]) -> tuple[dict, list[dict]]:
    """Summary and trace of a run."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "run"
        command = [sys.executable, "tba_min.py", "--sync", mode, "--max-seconds", str(seconds), "--out", str(out)]
        subprocess.run([*command, *options], cwd=ROOT, check=True)
        return json.loads((out / "summary.json").read_text()), read_trace(out)


def span_seconds(repeats: int = 7, spans: int = 100_000) -> float:
    """Seconds of a span, minus those of an empty with statement."""
    clock, nothing, costs = Clock(), nullcontext(), []
    for _ in range(repeats):
        times = [time.perf_counter()]
        for context in (lambda: clock.span("generate"), lambda: nothing):
            for _ in range(spans):
                with context():
                    pass
            times.append(time.perf_counter())
        costs.append((times[1] - times[0] - (times[2] - times[1])) / spans)
    return statistics.median(costs)


def recorded(trace: list[dict]) -> float:
    """Spans per second of the process that records most, from the first update on."""
    start = min(e["ts"] for e in trace if e["name"] == "forward, backward") / 1e6
    late = [e for e in trace if e["ph"] == "X" and e["ts"] / 1e6 > start]
    seconds = max((e["ts"] + e["dur"]) / 1e6 for e in late) - start
    return max(sum(e["pid"] == pid for e in late) for pid in {e["pid"] for e in late}) / seconds


def row(mode: str, summaries: list[dict], rates: list[float], cost: float) -> dict:
    """A row of the results."""
    median = statistics.median
    causes = sorted({(who, cause) for s in summaries for who, waits in s["waits"].items() for cause in waits})
    waits = {
        f"{who}: {cause}": round(median(s["waits"][who].get(cause, 0.0) / s["seconds_rl"] for s in summaries), 4)
        for who, cause in causes
    }
    return {
        "mode": mode,
        "busy_trainer": round(median(s["busy_trainer"] for s in summaries), 3),
        "busy_searchers": [round(median(b), 3) for b in zip(*(s["busy_searchers"] for s in summaries), strict=True)],
        "waits": waits,
        "trained_per_second": round(median(s["trajectories_trained"] / s["seconds_rl"] for s in summaries)),
        "generated_per_second": round(median(s["trajectories_generated"] / s["seconds_rl"] for s in summaries)),
        "bottleneck": [s["bottleneck"] for s in summaries],
        "spans_per_second": round(median(rates)),
        "recording_share": round(median(rates) * cost, 6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "timeline.json")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs" / "timeline.png")
    arguments, options = parser.parse_known_args()
    if arguments.rounds < 3:
        parser.error("--rounds must be at least 3")
    runs: dict[str, list] = {mode: [] for mode in MODES}
    for _ in range(arguments.rounds):
        for mode in MODES:
            runs[mode].append(one_run(mode, arguments.seconds, options))
    panels = {}
    for mode, measured in runs.items():
        summary, trace = measured[-1]
        panels[MODES[mode].format(**summary)] = (trace, towards_the_end(trace, WINDOW))
    timeline(panels, WINDOW).savefig(arguments.figure, dpi=120)
    cost = span_seconds()
    rows = [row(mode, [s for s, _ in m], [recorded(t) for _, t in m], cost) for mode, m in runs.items()]
    for r in rows:
        print(r)
    settings = {"rounds": arguments.rounds, "seconds": arguments.seconds, "span_us": round(1e6 * cost, 2)}
    head = json.dumps({"machine": machine(), "settings": settings, "goal": "recording_share below 0.01"})
    arguments.out.write_text(head[:-1] + ',\n "rows": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "\n ]}\n")


if __name__ == "__main__":
    main()
