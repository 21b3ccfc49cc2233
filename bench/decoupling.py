"""Does either side wait? Wall time of each `--sync` against the limit, the slower of the two sides alone.

    python -m bench.decoupling          8 minutes

Every mode generates and trains the same number of trajectories (replay ratio 1). The limit is the longer of two times:
one searcher alone (generation, reward, log pi_ref, hand-over), and the trainer alone on a full buffer. Searcher and
trainer have one thread each, `onpolicy` has two. Time runs from the first request to the end of the last update, so the
first wait for data counts. `both at once, uncoupled` is the speed that the machine allows two busy processes: the
searcher fills a buffer that nobody reads, and the trainer learns from another one. The learning rate is close to zero,
so that all modes see the same kind of answers.

balanced      both sides take about as long: answers of 8 tokens, all different, to prompts of 48 (bench/digits.py)
unbalanced    the default task: short answers that repeat; the trainer computes each of them once

Writes bench/results/decoupling.json.
"""

import dataclasses
import os
import time
from pathlib import Path

from bench.common import ROOT, arguments, load, median, save, say, table
from bench.lab import Lab
from config import Config, resolve

COMMON = {
    "lr": 1e-9, "replay_ratio": 1.0, "eval_every": 0, "eval_prompts": 1, "max_seconds": 0, "decay_steps": 0,
    "checkpoint_every": 0,
}  # fmt: skip
CASES = {
    "balanced": {
        "task": "bench/digits.py:make_task", "max_new_tokens": 8, "temperature": 2.0, "samples_per_prompt": 8,
        "prompts_per_batch": 4, "in_flight": 64,
    },
    "unbalanced": {"prompts_per_batch": 16, "samples_per_prompt": 16, "in_flight": 256},
}  # fmt: skip
STEPS = {"balanced": 60, "unbalanced": 24}
UNCOUPLED = "both at once, uncoupled"
MODES = {
    "onpolicy": {"sync": "onpolicy"},
    "barrier, k = 1": {"sync": "barrier", "sync_every": 1},
    "barrier, k = 4": {"sync": "barrier", "sync_every": 4},
    "barrier, k = 16": {"sync": "barrier", "sync_every": 16},
    "eager, k = 1": {"sync": "eager", "sync_every": 1},
    "eager, k = 4": {"sync": "eager", "sync_every": 4},
}


def measure(lab: Lab, case: str, steps: int, cache: str) -> list[dict]:
    """One round of a case: each side alone, then every mode; seconds and their ratio to the limit."""
    config = resolve(Config(cache=cache, steps=steps, **COMMON, **CASES[case]))
    folder, size = lab.start_folder(config), config.prompts_per_batch * config.K
    generation, full = lab.generate(config, folder, steps * size)
    freely = dataclasses.replace(config, replay_ratio=1e9)
    training = lab.run(freely, folder, buffer=full)["seconds"]
    uncoupled = lab.side_by_side(config, folder, steps * size, full)
    full[0].shutdown()
    seconds = {"generation alone": generation, "training alone": training, UNCOUPLED: uncoupled}
    for mode, options in MODES.items():
        own = resolve(Config(cache=cache, steps=steps, **(COMMON | CASES[case] | options)))
        seconds[mode] = lab.run(own, folder)["seconds"]
    limit = max(generation, training)
    return [{"case": case, "what": name, "seconds": s, "over_limit": s / limit} for name, s in seconds.items()]


def figures(rows: list[dict]) -> dict[str, float]:
    """The figures that have goals: medians over the repeats."""
    found = {}
    names = {"eager": "eager, k = 1", "eager_k4": "eager, k = 4", "onpolicy": "onpolicy"}  # k = 1 is the default
    for case, end in (("balanced", ""), ("unbalanced", "_unbalanced")):
        for key, name in names.items():
            ratios = [r["over_limit"] for r in rows if r["case"] == case and r["what"] == name]
            if ratios:
                found[f"{key}_over_limit{end}"] = round(median(ratios), 3)
        both = [
            [r["seconds"] for r in rows if (r["case"], r["what"]) == (case, n)] for n in ("eager, k = 4", UNCOUPLED)
        ]
        if all(both):
            found[f"eager_k4_over_uncoupled{end}"] = round(median(a / b for a, b in zip(*both, strict=True)), 3)
    return found


def text(rows: list[dict]) -> str:
    """Markdown."""
    lines = []
    cases = list(dict.fromkeys(r["case"] for r in rows))
    for name in dict.fromkeys(r["what"] for r in rows):
        cells = []
        for case in cases:
            mine = [r for r in rows if r["case"] == case and r["what"] == name]
            cells += [f"{median(r['seconds'] for r in mine):.1f}", f"{median(r['over_limit'] for r in mine):.2f}"]
        lines.append([name, *cells])
    return table(["", *(f"{case}: {what}" for case in cases for what in ("seconds", "over the limit"))], lines)


def main() -> None:
    args = arguments(__doc__)
    began, rows = time.time(), []
    args.cache = str(Path(args.cache).resolve())
    os.chdir(ROOT)
    with Lab(serial=2) as lab:
        for case in CASES:
            steps = 4 if args.quick else STEPS[case]
            measure(lab, case, 4, args.cache)  # warm-up
            for repeat in range(1 if args.quick else args.repeats):
                rows += [row | {"repeat": repeat} for row in measure(lab, case, steps, args.cache)]
                say(
                    began,
                    f"{case}, repeat {repeat}: " + ", ".join(f"{r['what']} {r['seconds']:.1f}" for r in rows[-9:]),
                )
    rows = [r | {"seconds": round(r["seconds"], 3), "over_limit": round(r["over_limit"], 4)} for r in rows]
    if not args.quick:
        save("decoupling", figures(rows), {"common": COMMON, "cases": CASES, "updates": STEPS}, rows, began)
        rows = load("decoupling")["rows"]
    print(text(rows))
    print("\n".join(f"{name}: {value}" for name, value in figures(rows).items()))


if __name__ == "__main__":
    main()
