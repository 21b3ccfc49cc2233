"""Seconds to .90 held-out accuracy from the same start models: eager TBA, `onpolicy`, and TRL's GRPOTrainer.

    python -m bench.time_to_accuracy --trl .venv-trl/bin/python         the default task; 8 minutes
    python -m bench.time_to_accuracy --part long                        the generation-bound variant; 8 minutes

`make bench` makes .venv-trl, the environment of TRL, and runs both.

All systems have the same task, reward, P = K = 16 (P = 8 in the variant), held-out problems, and two threads in all:
eager's searcher and trainer have one each, the others use both in turn. In `--part default` all rows but one generate
with transformers. Time is wall time from the first request for answers to the first weights that reach the accuracy.
Weights are copied after every update and evaluated after the run. The learning rate is constant. On the default task
each system has its own: the best of the same four on the validation split. TRL's batch and threads are chosen there
too. Writes bench/results/time_to_accuracy.json, a part at a time. Start-up: bench/startup.py, and `startup_seconds_trl`
here.
"""

import dataclasses
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

from bench.common import RESULTS, ROOT, arguments, load, median, save, say, table
from bench.lab import Lab
from config import Config, resolve

TARGET, K, WARMUP = 0.90, 16, 0
RATES = (5e-5, 1e-4, 2e-4, 4e-4)
FRESH = {"recency_prob": 1.0, "replay_ratio": 1.0, "in_flight": 128}  # eager trains once on the newest answers
SYSTEMS = {
    "eager TBA": {"engine": "hf", **FRESH},
    "eager TBA, vLLM": FRESH,
    "onpolicy TB": {"engine": "hf", "sync": "onpolicy"},
    "onpolicy GRPO": {"engine": "hf", "sync": "onpolicy", "loss": "grpo"},
}
TRL = "TRL GRPO"
VARIANTS = [  # TRL's threads and options; the first finds the learning rate, the others try it, and some half of it
    (2, {}),
    (1, {}),
    (2, {"per_device_train_batch_size": 128, "steps_per_generation": 2}),
    (2, {"per_device_train_batch_size": 64, "steps_per_generation": 4}),
    (2, {"num_iterations": 2}),
]
LONG = {"task": "bench/digits.py:make_task", "max_new_tokens": 49, "prompts_per_batch": 8, "lr": 1e-4}
LONG_SYSTEMS = {
    "eager TBA, vLLM": FRESH,
    "onpolicy TB, vLLM": {"sync": "onpolicy"},
}


def configuration(cache: str, seed: int, split: str, steps: int, **options) -> Config:
    """A run's configuration."""
    common = {
        "samples_per_prompt": K,
        "eval_every": 0,
        "eval_prompts": 1,
        "eval_split": split,
        "max_seconds": 0,
        "decay_steps": 0,
        "checkpoint_every": 0,
    }
    common["warmup_steps"] = WARMUP
    own = {"recent_groups": options.get("prompts_per_batch", 16)}
    return resolve(Config(cache=cache, seed=seed, steps=steps, **(common | own | options)))


def one_run(lab: Lab, config: Config, prompts: int = 500, every: int = 1) -> dict:
    """Run, then find the first weights that reach the target on so many problems, among every `every`-th update's."""
    folder = lab.start_folder(config)
    run = lab.run(config, folder)
    worker = lab.serial if config.sync == "onpolicy" else lab.trainer
    more = dataclasses.replace(config, eval_prompts=prompts)
    step, when, accuracy = worker.do("first_above", more, folder, TARGET, every)
    batch = config.prompts_per_batch * config.K
    row = {"seed": config.seed, "lr": config.lr, "update": step, "accuracy": accuracy}
    row |= {"seconds": when - run["start"] if step else None, "trajectories": step and step * batch}
    updates = run["summary"]["steps"]
    return (
        row
        | {"seconds_an_update": run["seconds"] / updates, "staleness": run["summary"]["staleness_mean"]}
        | {"spans": {name: seconds_by_name(spans, run["start"], updates) for name, spans in run["spans"].items()}}
    )


def seconds_by_name(spans: list, start: float, updates: int) -> dict[str, float]:
    """Seconds per update, by span name."""
    seconds: dict[str, float] = {}
    for name, begin, end, track in spans:
        if begin >= start and track == 0:
            seconds[name] = seconds.get(name, 0.0) + (end - begin) / updates
    return seconds


def best(rows: list[dict]) -> dict:
    """A row of the settings with the smallest median of seconds; a run that misses the target counts as infinite."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(json.dumps([row["lr"], row.get("threads"), row.get("options")]), []).append(row)
    endless = float("inf")
    return min(groups.values(), key=lambda g: median(r["seconds"] or endless for r in g))[0]


def trl(python: str, cache: str, runs: list[dict], split: str, updates: int, lab: Lab) -> list[dict]:
    """Run TRL, all runs in one process, with the Python of TRL's environment."""
    folders = {r["seed"]: lab.start_folder(configuration(cache, r["seed"], split, 1)) for r in runs}
    request = {"task": "addition", "folders": folders, "prompts": 16, "k": K, "new_tokens": Config.max_new_tokens}
    request |= {"split": split, "eval_prompts": 500, "every": 1, "target": TARGET, "warmup": WARMUP}
    request["runs"] = [{"updates": updates, **run} for run in runs]
    with tempfile.TemporaryDirectory() as place:
        asked, answer = Path(place) / "request.json", Path(place) / "answer.json"
        asked.write_text(json.dumps(request))
        command = [python, "-m", "bench.trl_grpo", str(asked), str(answer)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            raise RuntimeError(f"TRL failed:\n{done.stderr[-2000:]}")
        return json.loads(answer.read_text())


def tune_trl(python: str, cache: str, seeds, updates: int, lab: Lab, quick: bool) -> tuple[dict, list[dict]]:
    """TRL's best settings on the validation split, and the rows of all that were tried."""
    first = [{"seed": s, "lr": lr, "threads": 2, "options": {}} for lr in RATES[: 1 if quick else 4] for s in seeds]
    rows = trl(python, cache, first, "validation", updates, lab)
    rate = best(rows)["lr"]
    runs = []
    for threads, options in [] if quick else VARIANTS[1:]:
        rates = [rate] if not options else [rate, rate / 2]
        each = updates * options.get("steps_per_generation", options.get("num_iterations", 1))
        tried = {"threads": threads, "options": options, "updates": each}
        runs += [tried | {"seed": s, "lr": r} for r in rates for s in seeds]
    rows += trl(python, cache, runs, "validation", updates, lab) if runs else []
    return best(rows), rows


def short(row: dict) -> dict:
    """A row for the JSON: without spans, rounded."""
    digits = {"seconds": 3, "seconds_an_update": 4, "accuracy": 3, "staleness": 2}
    kept = {name: value for name, value in row.items() if name not in ("spans", "start")}
    return kept | {n: round(row[n], d) for n, d in digits.items() if isinstance(row.get(n), float)}


def default_part(args, began: float) -> tuple[dict, list[dict]]:
    """The default task: tune each system on the validation split, then three seeds on the held-out one."""
    tuning, seeds, rows, chosen = [0], [0, 1, 2], [], {}
    systems, rates, steps = SYSTEMS, RATES, 32
    if args.quick:
        tuning, seeds, rates, steps = [0], [0], RATES[1:2], 30
        systems = {name: s for name, s in SYSTEMS.items() if s.get("engine") == "hf"}
    with Lab(serial=2) as lab:
        for name, options in systems.items():
            tried = []
            for rate in rates:
                runs = [configuration(args.cache, s, "validation", steps, lr=rate, **options) for s in tuning]
                tried += [one_run(lab, c) | {"system": name, "split": "validation"} for c in runs]
            chosen[name] = best(tried)["lr"]
            rows += tried
            say(began, f"{name}: learning rate {chosen[name]:g}")
        if args.trl:
            best_trl, tried = tune_trl(args.trl, args.cache, tuning, steps, lab, args.quick)
            rows += [row | {"system": TRL, "split": "validation"} for row in tried]
            say(began, f"TRL: {best_trl['lr']:g}, {best_trl['threads']} threads, {best_trl['options']}")
        for seed in seeds:
            for name, options in systems.items():
                config = configuration(args.cache, seed, "heldout", steps, lr=chosen[name], **options)
                rows.append(one_run(lab, config) | {"system": name, "split": "heldout"})
                say(began, f"{name}, seed {seed}: {rows[-1]['seconds']}")
        if args.trl:
            each = {key: best_trl[key] for key in ("lr", "threads", "options")}
            each["updates"] = steps * max([1, *(v for v in best_trl["options"].values() if v < 16)])
            runs = [each | {"seed": seed} for seed in seeds]
            rows += [
                r | {"system": TRL, "split": "heldout"} for r in trl(args.trl, args.cache, runs, "heldout", steps, lab)
            ]
            say(began, f"{TRL}: {[r['seconds'] for r in rows[-len(seeds) :]]}")
    figures = {f"speedup_vs_{key}": value for key, value in speedups(rows).items()}
    starts = [row["startup_seconds"] for row in rows if "startup_seconds" in row]
    return figures | ({"startup_seconds_trl": round(median(starts), 1)} if starts else {}), rows


def speedups(rows: list[dict]) -> dict[str, float]:
    """Seconds of each other system over those of eager TBA, median over seeds."""
    mine = {r["seed"]: r["seconds"] for r in rows if r["system"] == "eager TBA" and r["split"] == "heldout"}
    names = {
        TRL: "trl",
        "onpolicy TB": "onpolicy_tb",
        "onpolicy GRPO": "onpolicy_grpo",
        "eager TBA, vLLM": "vllm_eager",
    }
    ratios = {}
    for name, key in names.items():
        theirs = [r for r in rows if r["system"] == name and r["split"] == "heldout"]
        if theirs and all(mine.values()):
            ratios[key] = round(median((r["seconds"] or float("inf")) / mine[r["seed"]] for r in theirs), 2)
    return ratios


def bound(serial: dict, gain: float) -> float:
    """The largest speed-up by overlap and streaming: (G + T) / max(G, T) of a serial run, times streaming's gain."""
    spans = serial["spans"]["serial"]
    generation = sum(
        spans.get(n, 0.0) for n in ("add requests", "generate", "reward", "log pi_ref", "hand over", "pull weights")
    )
    training = spans["forward, backward"] + spans["step"]
    return (generation + training) / max(generation, training) * gain


def streaming_gain(lab: Lab, config: Config, folder: str, trajectories: int) -> float:
    """Seconds of a searcher that drains its engine before it refills it, over those of one that keeps it full."""
    streaming, served = lab.generate(config, folder, trajectories)
    served[0].shutdown()
    draining = lab.searchers[0].do("rounds", config, folder, trajectories)
    return draining / streaming


def long_part(args, began: float) -> tuple[dict, list[dict]]:
    """The generation-bound variant."""
    rows, shares, gains = [], [], []
    seeds, steps = ([0], 3) if args.quick else ([0, 1, 2], 24)
    with Lab(serial=2) as lab:
        for seed in seeds:
            runs = {}
            for name, options in LONG_SYSTEMS.items():
                config = configuration(args.cache, seed, "heldout", steps, **LONG, **options)
                runs[name] = one_run(lab, config, 150, 2) | {"system": name, "split": "heldout"}
                say(began, f"{name}, seed {seed}: {runs[name]['seconds']}")
            config = configuration(args.cache, seed, "heldout", steps, **LONG, **FRESH)
            gains.append(streaming_gain(lab, config, lab.start_folder(config), 128 if args.quick else 512))
            eager, serial = runs.values()
            most = bound(serial, gains[-1])
            share = {"bound": most, "speedup_an_update": serial["seconds_an_update"] / eager["seconds_an_update"]}
            if eager["seconds"] and serial["seconds"]:
                share["speedup"] = serial["seconds"] / eager["seconds"]
            shares.append(share)
            say(began, f"seed {seed}: streaming gain {gains[-1]:.2f}, bound {most:.2f}")
            rows += list(runs.values())
    figures = {"streaming_gain": round(median(gains), 3)}
    for name in ("bound", "speedup_an_update", "speedup"):
        found = [share[name] for share in shares if name in share]
        if found:
            figures[f"long_{name}"] = round(median(found), 3)
    reached = [share["speedup"] / share["bound"] for share in shares if "speedup" in share]
    if reached:
        figures["share_of_bound_generation_bound"] = round(median(reached), 3)
    figures["long_share_an_update"] = round(median(s["speedup_an_update"] / s["bound"] for s in shares), 3)
    return figures, rows


PARTS = {"default": default_part, "long": long_part}


def tables(result: dict) -> str:
    """Markdown tables of the results' JSON."""
    rows, parts = result["rows"], []
    for part in PARTS:
        names = list(dict.fromkeys(r["system"] for r in rows if r["part"] == part))
        lines = []
        for name in names:
            mine = [r for r in rows if r["part"] == part and r["system"] == name and r.get("split") != "validation"]
            seconds = [f"{r['seconds']:.1f}" if r["seconds"] else "not reached" for r in mine]
            counts = " / ".join(f"{r['trajectories']:,}" if r["trajectories"] else "-" for r in mine)
            lines.append([name, f"{mine[0]['lr']:g}", " / ".join(seconds), counts])
        if lines:
            head = [part, "learning rate", "seconds to .90", "trajectories"]
            parts.append(table(head, lines))
    return "\n\n".join(parts)


def main() -> None:
    args = arguments(__doc__, part="default", trl="")
    began = time.time()
    args.cache = str(Path(args.cache).resolve())
    if args.trl:
        args.trl = str(Path(args.trl).absolute())
    os.chdir(ROOT)
    figures, rows = PARTS[args.part](args, began)
    rows = [short({"part": args.part, **row}) for row in rows]
    if args.quick:
        print(tables({"rows": rows}), "\n", figures)
        return
    known = load("time_to_accuracy") if (RESULTS / "time_to_accuracy.json").exists() else {"rows": []}
    rows = [r for r in known["rows"] if r["part"] != args.part] + rows
    outside = ("machine", "settings", "rows")
    figures = {name: value for name, value in known.items() if name not in outside} | figures
    settings = {"target": TARGET, "P": 16, "K": K, "rates": RATES, "fresh": FRESH, "long": LONG}
    save("time_to_accuracy", figures, settings, rows, began)
    print(tables(load("time_to_accuracy")), "\n")
    print("\n".join(f"{name}: {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
