"""The replay buffer: its throughput through the Manager, and the cost of `add` and `sample` by size.

    python -m bench.buffer          4 minutes

Served: 1, 4 or 15 processes write groups of 16 short answers, at full speed or at 1,000 trajectories per second each.
One other process draws batches of 16 prompts with 16 answers through sync.py's prefetching, with a pause of 50 ms for
each update. A prefetch is late when the batch is not ready as the update ends. Goals: 15 writers at 1,000 per second
are taken in; with 4 writers the 99th percentile of a draw is below 5 ms; at most 1 % of the prefetches are late. The
same is measured with a simple buffer, a list per prompt, behind the same Manager.

By size: the buffer is full at every size, so each new trajectory pushes one out. Every prompt holds 32 answers at every
size, because an option bounds them and a draw looks at all of them. A batch is 16 prompts with 16 answers each. Half of
the prompts come from the recency pool: that of eager (the newest 32 groups), or all that is stored (barrier, before its
next sync). `add` and `sample` are timed as the Manager runs them: packed arrays in and out, garbage collection
included, in seconds of CPU. A figure is the median of the repeats' means. Each row has a process of its own. "MB" is
the growth of that process once the buffer is full. "MB later" is its growth after all was replaced once more and timed;
the timing itself takes a few MB.

Writes bench/results/buffer.json.
"""

import multiprocessing
import os
import random
import statistics
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from bench.common import RESULTS, arguments, load, median, percentile, save, say, table
from buffer import Trajectory
from runtime.child import environment, prepare_process, uninterrupted
from runtime.served_buffer import BufferManager, _Server, pack, unpack

SIZES = (10**3, 10**5, 10**6)
POOLS = {"newest 32 groups": 32, "all that is stored": None}
P, K, PER_PROMPT, PROMPT_TOKENS, ANSWER_TOKENS = 16, 16, 32, 6, 4
ADDS, DRAWS = 500, 200  # in a repeat


class Writer:
    """Endless packed groups of K answers, prompt after prompt, in an order that is shuffled for every pass."""

    def __init__(self, prompts: int) -> None:
        self.prompts, self.rng, self.count, self.order = prompts, np.random.default_rng(0), 0, []

    def group(self) -> tuple:
        self.order = self.order or self.rng.permutation(self.prompts).tolist()
        prompt, trajectories = self.order.pop(), []
        for reward in self.rng.random(K).tolist():
            answer = self.rng.integers(64, size=ANSWER_TOKENS, dtype=np.int32)
            what = (np.full(PROMPT_TOKENS, 3, np.int32), answer, "stop", reward, -2.0)
            log_mu = np.zeros(ANSWER_TOKENS, np.float32)
            trajectories.append(Trajectory((0, 0, self.count), prompt, *what, log_mu, 0, 0, 0))
            self.count += 1
        return pack(trajectories)


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
    for _ in range(3 * size // (2 * K)):  # 1.5 times what it holds
        store.add_packed(writer.group())
    full = resident() - empty
    add, uniform, softmax = [], [], []
    for _ in range(repeats):
        groups = [(writer.group(),) for _ in range(ADDS)]
        add.append(mean_seconds(store.add_packed, groups))
        uniform.append(mean_seconds(store.sample_packed, [(P, K, 0.5, 0.0)] * DRAWS))
        softmax.append(mean_seconds(store.sample_packed, [(P, K, 0.5, 1.0)] * DRAWS))
    for _ in range(size // K):  # replace all of it
        store.add_packed(writer.group())
    medians = {"add": add, "sample_uniform": uniform, "sample_softmax": softmax}
    return {
        "stored": store.stats()["stored"],
        "pool": pool,
        **{f"{name}_us": round(1e6 * statistics.median(seconds), 1) for name, seconds in medians.items()},
        "megabytes": round(full / 1e6, 1),
        "megabytes_later": round((resident() - empty) / 1e6, 1),
    }


def spread(rows: list[dict], column: str) -> float:
    """Most expensive size over cheapest size, for the worse of the two pools."""
    values = [[r[column] for r in rows if r["pool"] == pool] for pool in POOLS]
    return max(max(v) / min(v) for v in values)


def cost_table(rows: list[dict]) -> str:
    """Markdown."""
    timed = ("add_us", "sample_uniform_us", "sample_softmax_us")
    lines = []
    for r in rows:
        megabytes = [f"{r[name]:.1f}" for name in ("megabytes", "megabytes_later")]
        lines.append([f"{r['stored']:,}, {r['pool']}", *(f"{r[name]:.0f}" for name in timed), *megabytes])
    lines.append(["dearest / cheapest", *(f"{spread(rows, name):.2f}x" for name in timed), "", ""])
    head = ["stored, recency pool", f"add {K}, us", f"draw {P} x {K}, us", "by reward, us", "MB", "MB later"]
    return table(head, lines)


# --- served ---------------------------------------------------------------------------------------------------------


class Lists:
    """A simple buffer: a list per prompt, and one list of all to find the oldest. Same packed interface."""

    def __init__(self, capacity: int, per_prompt: int, **_) -> None:
        self.capacity, self.per_prompt = capacity, per_prompt
        self.prompts: dict[int, list[Trajectory]] = defaultdict(list)
        self.all: list[Trajectory] = []

    def pid(self) -> int:
        return os.getpid()

    def add_packed(self, packed: tuple) -> None:
        for t in unpack(packed):
            answers = self.prompts[t.prompt_id]
            answers.append(t)
            self.all.append(t)
            if len(answers) > self.per_prompt:
                self.all.remove(answers.pop(0))
            if len(self.all) > self.capacity:
                oldest = self.all.pop(0)
                self.prompts[oldest.prompt_id].remove(oldest)

    def sample_packed(self, num_prompts: int, k: int, *_) -> tuple | None:
        full = [answers for answers in list(self.prompts.values()) if answers]
        if len(full) < num_prompts:
            return None
        return pack([t for answers in random.sample(full, num_prompts) for t in random.choices(answers, k=k)])


class BenchManager(BufferManager):
    """Serves both kinds of buffer."""


BenchManager.register("Lists", Lists, exposed=["pid", "add_packed", "sample_packed"])
KINDS = {"ours": "Buffer", "list per prompt": "Lists"}
UPDATE = 0.05  # seconds of an update
CAPACITY, PROMPTS = 20_000, 8_500  # as many prompts as the default task has


def write(proxy, index: int, pace: float, ready, go, seconds: float, results) -> None:
    """A writer: puts the number of trajectories it wrote, at `pace` per second or at full speed (0), into `results`."""
    prepare_process(f"writer {index}")
    writer = Writer(PROMPTS)
    writer.rng = np.random.default_rng(index)
    groups = [writer.group() for _ in range(64)]  # made in advance: a searcher's own work is not timed
    ready.release()
    go.wait()
    start, sent = time.time(), 0
    while (now := time.time() - start) < seconds:
        if pace and sent > pace * now:
            time.sleep(min(0.005, sent / pace - now))
            continue
        packed = groups[sent // K % len(groups)]
        packed[0]["uid"][:, 0], packed[0]["uid"][:, 2] = index, np.arange(sent, sent + K)
        proxy.add_packed(packed)
        sent += K
    results.put((sent, time.time() - start))


def draws(proxy, seconds: float) -> tuple[list[float], int, int]:
    """Draw through the Manager as a prefetching trainer does: (seconds of each draw, late batches, all batches)."""
    import sync
    from config import Config
    from runtime.metrics import Clock
    from runtime.served_buffer import RemoteBuffer

    took, board = [], SimpleNamespace(stopping=False, of_searchers=lambda field: [1e12])

    class Timed(RemoteBuffer):
        def sample(self, *args):
            start = time.perf_counter()
            batch = super().sample(*args)
            if batch is not None:
                took.append(time.perf_counter() - start)
            return batch

    child = SimpleNamespace(board=board, clock=Clock(), beat=lambda: None)
    prefetch = sync.EagerBatches(
        Timed(proxy), Config(prompts_per_batch=P, samples_per_prompt=K, recency_prob=0.5), child
    )
    end, batches = time.time() + seconds, 0
    while time.time() < end:
        prefetch.next(batches)
        time.sleep(UPDATE)
        batches += 1
    board.stopping = True
    return took, prefetch.late, batches


def served(kind: str, writers: int, pace: float, seconds: float) -> dict:
    """One measurement: the rate of so many writers, and the time of a draw meanwhile."""
    ctx = multiprocessing.get_context("spawn")
    manager = BenchManager(ctx=ctx)
    with uninterrupted(), environment({"OMP_NUM_THREADS": "1"}):
        manager.start(prepare_process, ("buffer",))
        proxy = getattr(manager, KINDS[kind])(capacity=CAPACITY, per_prompt=PER_PROMPT, recent_groups=2 * P, seed=0)
        results, ready, go = ctx.Queue(), ctx.Semaphore(0), ctx.Event()
        args = [(proxy, i, pace, ready, go, seconds + 1, results) for i in range(writers)]
        processes = [ctx.Process(target=write, args=a, daemon=True) for a in args]
        for process in processes:
            process.start()
    for _ in processes:
        ready.acquire()
    first = Writer(PROMPTS)
    for _ in range(2 * CAPACITY // K):
        proxy.add_packed(first.group())
    go.set()
    took, late, batches = draws(proxy, seconds)
    done = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    manager.shutdown()
    rate = sum(sent / span for sent, span in done)
    return {
        "kind": kind,
        "writers": writers,
        "pace": pace,
        "taken_in": round(rate),
        "draw_p50_ms": round(1e3 * median(took), 2),
        "draw_p99_ms": round(1e3 * percentile(took, 0.99), 2),
        "draws": batches,
        "late": late,
    }


def served_table(rows: list[dict]) -> str:
    """Markdown, medians over repeats."""
    lines, settings = [], dict.fromkeys((r["kind"], r["writers"], r["pace"]) for r in rows)
    for kind, writers, pace in settings:
        mine = [r for r in rows if (r["kind"], r["writers"], r["pace"]) == (kind, writers, pace)]
        each = f"{pace:,.0f}/s each" if pace else "full speed"
        late = sum(r["late"] for r in mine) / sum(r["draws"] for r in mine)
        rate, p50, p99 = (median(r[name] for r in mine) for name in ("taken_in", "draw_p50_ms", "draw_p99_ms"))
        lines.append([f"{kind}, {writers} writers, {each}", f"{rate:,.0f}", f"{p50:.1f}", f"{p99:.1f}", f"{late:.1%}"])
    head = ["buffer, writers", "taken in, trajectories/s", "draw median, ms", "draw p99, ms", "late prefetches"]
    return table(head, lines)


def figures(rows: list[dict]) -> dict:
    """The figures that have goals."""
    paced = {n: [r for r in rows if (r["kind"], r["writers"], r["pace"]) == ("ours", n, 1000)] for n in (4, 15)}
    found = {}
    if paced[15]:
        found["taken_in_15_writers_at_1000"] = median(r["taken_in"] for r in paced[15])
    if paced[4]:
        found["draw_p99_ms_4_writers"] = median(r["draw_p99_ms"] for r in paced[4])
    found["late_share"] = {
        n: round(sum(r["late"] for r in p) / sum(r["draws"] for r in p), 4) for n, p in paced.items() if p
    }
    return found


def main() -> None:
    args = arguments(__doc__, part="both")
    began, ctx = time.time(), multiprocessing.get_context("spawn")
    known = load("buffer")["rows"] if (RESULTS / "buffer.json").exists() else []
    rows, costs = ([r for r in known if r["part"] == part] for part in ("served", "by size"))
    if args.part in ("both", "served"):
        rows = all_served(args, began)
    if args.part in ("both", "size"):
        costs = []
        for pool in POOLS:
            for size in SIZES[: 1 if args.quick else 3]:
                with ctx.Pool(1) as one:
                    costs.append({"part": "by size"} | one.apply(measure, (size, pool, args.repeats)))
                say(began, f"{size:,}, {pool}")
    print(served_table(rows) + "\n\n" + cost_table(costs))
    if not args.quick:
        common = {"P": P, "K": K, "per_prompt": PER_PROMPT, "recency_prob": 0.5, "update_s": UPDATE}
        common |= {"capacity": CAPACITY, "prompt_tokens": PROMPT_TOKENS, "answer_tokens": ANSWER_TOKENS}
        save("buffer", figures(rows), common, rows + costs, began, ("numpy",))


def all_served(args, began: float) -> list[dict]:
    """All measurements with writer processes."""
    settings = [(kind, n, 1000) for kind in KINDS for n in (1, 4, 15)] + [("ours", 15, 0)]
    if args.quick:
        settings = [(kind, 2, 1000) for kind in KINDS]
    rows = []
    for repeat in range(1 if args.quick else args.repeats):
        for setting in settings:
            rows.append({"part": "served", "repeat": repeat} | served(*setting, 1.0 if args.quick else 2.0))
        say(began, f"served, repeat {repeat}")
    return rows


if __name__ == "__main__":
    main()
