"""The whole system with 1 to 15 searchers: does ingest grow with them, and does the trainer notice?

    python -m bench.scale          5 minutes

A searcher's engine and reference are stand-ins: they sleep as long as a GPU of a given speed would take, and return
random answers. All else is real: 15 processes, hand-over, buffer, prefetching, a trainer on the default task's model.
The trainer has one core of its own; everything else shares the other. Goals: ingest grows linearly in N, the trainer's
step time stays flat (within 10 %), the trainer waits less than 1 % of the time. The trainer may reuse stored answers
without limit, so that one searcher is enough for it.

The processor time per trajectory of the buffer's process, the searchers and the trainer shows where the design ends.
Writes bench/results/scale.json.
"""

import os
import time

import psutil

from bench.common import arguments, load, median, save, say, table
from bench.lab import Lab
from config import Config, resolve

COUNTS = (1, 2, 4, 8, 15)
RATE = 120.0  # answers per second of one stand-in
OPTIONS = {
    "engine": "hf",  # so that no process imports vLLM
    "prompts_per_batch": 16, "samples_per_prompt": 16, "in_flight": 64, "replay_ratio": 1e9, "lr": 1e-9,
    "eval_every": 0, "eval_prompts": 1, "max_seconds": 0, "decay_steps": 0, "checkpoint_every": 0,
}  # fmt: skip


def processor_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def pin(lab: Lab) -> None:
    """Put the trainer alone on the first core, all else on the others."""
    first, *others = sorted(os.sched_getaffinity(0))
    for worker in (lab.trainer, *lab.searchers):
        cores = {first} if worker is lab.trainer else set(others)
        for thread in psutil.Process(worker.process.pid).threads():
            os.sched_setaffinity(thread.id, cores)
    os.sched_setaffinity(0, set(others))  # the buffer's process inherits it


def measure(lab: Lab, searchers: int, steps: int, cache: str) -> dict:
    """One run with so many searchers."""
    config = resolve(Config(cache=cache, steps=steps, searchers=searchers, **OPTIONS))
    used: dict[str, float] = {}
    pids = {"trainer": lab.trainer.process.pid} | {f"s{i}": lab.searchers[i].process.pid for i in range(searchers)}

    def watch(buffer_pid: int) -> None:
        pids["buffer"] = buffer_pid
        used.update({name: processor_seconds(pid) - used.get(name, 0.0) for name, pid in pids.items()})

    run = lab.run(config, lab.start_folder(config), use=searchers, watch=watch)
    spans = [s for s in run["spans"]["trainer"] if s[1] >= run["start"]]
    parts = [[end - start for name, start, end, _ in spans if name == n] for n in ("forward, backward", "step")]
    steps_s = [a + b for a, b in zip(*parts, strict=True)][2:]
    first = min(start for name, start, _, _ in spans if name == "forward, backward")
    later = [s for s in spans if s[1] >= first and s[3] == 0]  # track 0: the trainer's main thread
    waits = sum(end - start for name, start, end, _ in later if name.startswith("wait"))
    ingest = run["handed_over"] / run["seconds_searching"]
    return {
        "searchers": searchers,
        "ingest": round(ingest, 1),
        "step_ms": round(1e3 * median(steps_s), 2),
        "waiting": round(waits / (run["end"] - first), 5),
        "buffer_us": round(1e6 * used["buffer"] / run["handed_over"], 1),
        "searcher_us": round(1e6 * sum(v for n, v in used.items() if n[0] == "s") / run["handed_over"], 1),
        "trainer_us": round(1e6 * sum(steps_s) / len(steps_s) / 256, 1),
    }


def figures(rows: list[dict]) -> dict:
    """The figures that have goals, medians over repeats."""
    by = {n: [r for r in rows if r["searchers"] == n] for n in sorted({r["searchers"] for r in rows})}
    one, most = min(by), max(by)
    ingest = {n: median(r["ingest"] for r in mine) for n, mine in by.items()}
    step = {n: median(r["step_ms"] for r in mine) for n, mine in by.items()}
    return {
        "ingest_share_of_linear": {n: round(ingest[n] / (n / one * ingest[one]), 3) for n in by},
        "step_time_over_one_searcher": {n: round(step[n] / step[one], 3) for n in by},
        "waiting": {n: round(median(r["waiting"] for r in mine), 5) for n, mine in by.items()},
        "buffer_us_a_trajectory": median(r["buffer_us"] for r in by[most]),
        "searcher_us_a_trajectory": median(r["searcher_us"] for r in by[most]),
        "trainer_us_a_trajectory": median(r["trainer_us"] for r in by[most]),
    }


def text(rows: list[dict]) -> str:
    """Markdown."""
    lines, found = [], figures(rows)
    for n in sorted({r["searchers"] for r in rows}):
        mine = [r for r in rows if r["searchers"] == n]
        ingest, step = (median(r[name] for r in mine) for name in ("ingest", "step_ms"))
        linear, over = found["ingest_share_of_linear"][n], found["step_time_over_one_searcher"][n]
        lines.append([n, f"{ingest:,.0f}", f"{linear:.2f}", f"{step:.1f}", f"{over:.2f}", f"{found['waiting'][n]:.2%}"])
    head = ["searchers", "ingest, trajectories/s", "of linear", "step, ms", "of one searcher's", "trainer waits"]
    return table(head, lines)


def main() -> None:
    args = arguments(__doc__)
    began, rows = time.time(), []
    counts = (1, 3) if args.quick else COUNTS
    with Lab(searchers=max(counts), stand_in=RATE) as lab:
        lab.wait_for_all()
        pin(lab)
        say(began, "loaded")
        measure(lab, max(counts), 10, args.cache)
        for repeat in range(1 if args.quick else args.repeats):
            for n in counts:
                rows.append({"repeat": repeat} | measure(lab, n, 20 if args.quick else 35, args.cache))
            say(began, f"repeat {repeat}")
    if not args.quick:
        save("scale", figures(rows), {"rate": RATE, "options": OPTIONS}, rows, began)
        rows = load("scale")["rows"]
    print(text(rows))
    print("\n".join(f"{name}: {value}" for name, value in figures(rows).items()))


if __name__ == "__main__":
    main()
