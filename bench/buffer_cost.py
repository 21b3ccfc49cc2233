"""What `add` and `sample` of the replay buffer cost, and how many bytes it takes, by how much is stored.

The buffer is full at every size, so that each trajectory that comes in pushes one out, and every prompt holds as many
answers (32) at every size: what a prompt holds is bounded by an option of its own, and a draw looks at all of them. A
group of 16 short answers is added; a batch is 16 prompts with 16 answers each, half of the prompts from the recency
pool. The pool is eager's (the newest 32 groups) or all that is stored (barrier, before its next sync). `add` and
`sample` are timed as the Manager runs them, packed arrays in and out, garbage collection included, in seconds of CPU.
A figure is the median of the repeats' means. Megabytes are the growth of the process (each row has one of its own) once
the buffer is full, and later, when all of it was replaced once more and all was timed: a few are the timing's own.

    python bench/buffer_cost.py [--repeats 5] [--out bench/results/buffer_cost.json]
"""

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from buffer import Trajectory, _Server, pack  # noqa: E402

SIZES = (10**3, 10**5, 10**6)
POOLS = {"newest 32 groups": 32, "all that is stored": None}
P, K, PER_PROMPT, PROMPT_TOKENS, ANSWER_TOKENS = 16, 16, 32, 6, 4
ADDS, DRAWS = 500, 200  # in a repeat


class Writer:
    """Packed groups of K answers for ever, prompt after prompt in an order that is shuffled again and again."""

    def __init__(self, prompts: int) -> None:
        self.prompts, self.rng, self.count, self.order = prompts, np.random.default_rng(0), 0, []

    def group(self) -> tuple:
        self.order = self.order or self.rng.permutation(self.prompts).tolist()
        prompt, out = self.order.pop(), []
        for reward in self.rng.random(K).tolist():
            answer = self.rng.integers(64, size=ANSWER_TOKENS, dtype=np.int32)
            what = (np.full(PROMPT_TOKENS, 3, np.int32), answer, "stop", reward, -2.0)
            out.append(Trajectory((0, 0, self.count), prompt, *what, np.zeros(ANSWER_TOKENS, np.float32), 0, 0, 0))
            self.count += 1
        return pack(out)


def resident() -> int:
    """Bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def mean_seconds(work, arguments: list[tuple]) -> float:
    began = time.process_time()
    for args in arguments:
        work(*args)
    return (time.process_time() - began) / len(arguments)


def measure(size: int, pool: str, repeats: int) -> dict:
    """One row of the table: a full buffer of `size` trajectories."""
    store, writer, empty = _Server(size, PER_PROMPT, POOLS[pool], seed=0), Writer(size // PER_PROMPT), resident()
    for _ in range(3 * size // (2 * K)):  # half as much again as it holds
        store.add_packed(writer.group())
    full = resident() - empty
    add, uniform, softmax = [], [], []
    for _ in range(repeats):
        groups = [(writer.group(),) for _ in range(ADDS)]
        add.append(mean_seconds(store.add_packed, groups))
        uniform.append(mean_seconds(store.sample_packed, [(P, K, 0.5, 0.0)] * DRAWS))
        softmax.append(mean_seconds(store.sample_packed, [(P, K, 0.5, 1.0)] * DRAWS))
    for _ in range(size // K):  # all of it anew
        store.add_packed(writer.group())
    medians = {"add": add, "sample_uniform": uniform, "sample_softmax": softmax}
    return {
        "stored": store.stats()["stored"],
        "pool": pool,
        **{f"{name}_us": round(1e6 * statistics.median(seconds), 1) for name, seconds in medians.items()},
        "megabytes": round(full / 1e6, 1),
        "megabytes_later": round((resident() - empty) / 1e6, 1),
    }


def machine() -> dict:
    """What ran this, without names or paths."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def spread(rows: list[dict], column: str) -> float:
    """Dearest size over cheapest size, the worse of the two pools."""
    values = [[r[column] for r in rows if r["pool"] == pool] for pool in POOLS]
    return max(max(v) / min(v) for v in values)


def table(rows: list[dict]) -> str:
    """Markdown."""
    timed = ("add_us", "sample_uniform_us", "sample_softmax_us")
    lines = [
        f"| stored | recency pool | add {K}, µs | draw {P} x {K} uniform, µs | by reward, µs | MB | MB later |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in rows:
        times = " | ".join(f"{r[name]:.0f}" for name in timed)
        lines.append(f"| {r['stored']:,} | {r['pool']} | {times} | {r['megabytes']:.1f} | {r['megabytes_later']:.1f} |")
    spreads = " | ".join(f"{spread(rows, name):.2f}x" for name in timed)
    return "\n".join([*lines, f"| dearest / cheapest | | {spreads} | | |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "buffer_cost.json")
    args = parser.parse_args()
    if args.repeats < 3:
        parser.error("--repeats must be at least 3")
    began, rows, ctx = time.time(), [], multiprocessing.get_context("spawn")
    for pool in POOLS:
        for size in SIZES:
            with ctx.Pool(1) as one:
                rows.append(one.apply(measure, (size, pool, args.repeats)))
            print(f"{time.time() - began:4.0f} s  {size:,}, {pool}", file=sys.stderr)
    print(table(rows))
    settings = {"P": P, "K": K, "per_prompt": PER_PROMPT, "recency_prob": 0.5, "repeats": args.repeats}
    settings |= {"prompt_tokens": PROMPT_TOKENS, "answer_tokens": ANSWER_TOKENS}
    result = {"machine": machine() | {"seconds": round(time.time() - began)}, "settings": settings, "rows": []}
    head = json.dumps(result, indent=1).removesuffix("[]\n}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(head + "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]}\n")


if __name__ == "__main__":
    main()
