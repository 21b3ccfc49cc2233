"""A long run with faults injected at random: it must survive them all, account for every update, and learn.

    python -m bench.soak                             30 minutes, vLLM; writes bench/results/soak.json
    python -m bench.soak --minutes 2 --engine hf     as in `make test-slow`; writes nothing

After each fault it waits for the right consequence: the searcher is started again, or the run ends, cleans up, and is
resumed. At the end it checks that each of the updates 0, 1, 2, ... is there exactly once, that no uid is stored twice,
that the accuracy is reached, that memory is flat, and that nothing is left.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from bench.common import RESULTS, ROOT, machine, table
from runtime.checkpoint import all_in, load_buffer
from runtime.files import read_jsonl
from runtime.served_buffer import unpack

SMALL = 2_000_000  # bytes: a trainer that may write no larger file can't write its optimizer's state of 2.8 MB
HEARTBEAT = 20  # seconds; on a busy machine a process may get no core for several


class Wrong(AssertionError):
    """A check of the soak failed."""


class Soak:
    """One run, resumed again and again."""

    def __init__(self, engine: str, cache: str | None) -> None:
        self.tmp = Path(tempfile.mkdtemp(prefix="soak-"))
        self.out = self.tmp / "run"
        self.options = ["--gpus", "0", "--engine", engine, "--steps", "1000000", "--decay-steps", "0", "--lr", "3e-5"]
        self.options += ["--max-seconds", "0", "--eval-every", "50", "--checkpoint-every", "20"]
        self.options += ["--buffer-capacity", "5000"]  # soon full, so that memory should stay flat
        self.options += ["--heartbeat-timeout", str(HEARTBEAT), "--max-restarts", "1000"]
        self.options += ["--cache", cache] if cache else []
        self.memory: list[tuple[float, str, int, float]] = []  # seconds, process, resident bytes, its age in seconds
        self.shm: set[str] = set()  # files in /dev/shm that its processes were seen to use
        self.output = open(self.tmp / "output", "a")  # noqa: SIM115
        self.began = time.time()
        self.longest_shutdown = 0.0
        self.without_disk: list[int] = []  # updates in each time without disk

    # --- the run ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the run, or resume it, and wait until it trains."""
        where = ["--resume" if self.out.exists() else "--out", str(self.out)]
        (self.tmp / "sockets").mkdir(exist_ok=True)
        done = len(self.rows())
        self.process = subprocess.Popen(
            [sys.executable, "tba_min.py", *where, *self.options], cwd=ROOT, stdout=self.output, stderr=self.output,
            env=os.environ | {"TMPDIR": str(self.tmp / "sockets")}, start_new_session=True,
        )  # fmt: skip
        begun = time.time()
        self.wait(self.trains_since(begun), 400)
        self.wait(self.ended_or(lambda: all_in(self.out / "checkpoints")), 400)  # else there is nothing to resume
        print(f"{self.now():7.1f} s  {'resumed' if done else 'started'}, trains update {len(self.rows())}", flush=True)

    def trains_since(self, begun: float):
        """A condition for `wait`. A resumed run first drops the rows after its checkpoint."""
        return self.ended_or(lambda: self.rows() and self.changed("metrics.jsonl") > begun and self.trains())

    def ended_or(self, condition):
        def holds() -> bool:
            if self.process.poll() is not None:
                raise Wrong(f"the run ended with {self.process.returncode}:\n{self.printed()[-2000:]}")
            return condition()

        return holds

    def trains(self) -> bool:
        before = len(self.rows())
        time.sleep(2)
        return len(self.rows()) > before

    def rows(self) -> list[dict]:
        path = self.out / "metrics.jsonl"
        return read_jsonl(path) if path.exists() else []

    def trained(self) -> int:
        rows = self.rows()
        return rows[-1]["step"] + 1 if rows else 0

    def changed(self, name: str) -> float:
        return (self.out / name).stat().st_mtime

    def pid(self, name: str) -> int:
        return json.loads((self.out / "pids.json").read_text())[name]

    def printed(self) -> str:
        return (self.tmp / "output").read_text()

    def now(self) -> float:
        return time.time() - self.began

    def family(self) -> list[psutil.Process]:
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def measure(self) -> None:
        """Resident memory of every process."""
        for name, pid in json.loads((self.out / "pids.json").read_text()).items():
            try:
                process = psutil.Process(pid)
                age = time.time() - process.create_time()
                self.memory.append((self.now(), name, process.memory_info().rss, age))
                self.shm |= {m.path.split(" ")[0] for m in process.memory_maps() if m.path.startswith("/dev/shm/")}
            except psutil.Error:
                continue

    def wait(self, condition, seconds: float) -> None:
        deadline = time.time() + seconds
        while not condition():
            if time.time() > deadline:
                raise Wrong(f"it did not come in {seconds:g} s; the last output:\n{self.printed()[-2000:]}")
            time.sleep(0.1)

    def ends(self, expected: tuple[int, ...], family: list[psutil.Process], noticed: float = 0.0) -> None:
        """Check that the run ends by itself with one of these exit codes, and leaves nothing behind.

        noticed: seconds until the fault counts as noticed; the shutdown is timed from then on.
        """
        begun = time.time() + noticed
        self.wait(lambda: self.process.poll() is not None, 120)
        if self.process.returncode not in expected:
            raise Wrong(f"exit code {self.process.returncode}, not {expected}:\n{self.printed()[-2000:]}")
        alive = lambda: [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]  # noqa: E731
        self.wait(lambda: not alive(), 15)
        self.wait(lambda: not list((self.tmp / "sockets").glob("pymp-*")), 5)
        self.longest_shutdown = max(self.longest_shutdown, time.time() - begun)

    # --- faults -------------------------------------------------------------------------------------------------

    def inject(self, fault: str) -> None:
        """Inject one fault, and wait for its right consequence."""
        victim, _, what = fault.partition(" ")
        family = self.family()
        if victim == "searcher-0":
            old = self.pid(victim)
            os.kill(old, signal.SIGKILL if what == "killed" else signal.SIGSTOP)
            self.wait(lambda: self.pid(victim) != old, 120)
            self.wait(lambda: read_jsonl(self.out / "searcher-0.jsonl")[-1]["time"] > time.time() - 1, 200)
            self.wait(self.trains, 100)
        elif what == "without disk":
            trainer, said = psutil.Process(self.pid("trainer")), self.printed().count("was not written")
            before = self.trained()
            trainer.rlimit(psutil.RLIMIT_FSIZE, (SMALL, psutil.RLIM_INFINITY))
            self.wait(lambda: self.printed().count("was not written") > said, 100)
            trainer.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
            self.wait(self.trains, 60)
            self.without_disk.append(self.trained() - before)  # lines of metrics may be lost meanwhile
        elif victim == "Ctrl-C":
            self.process.send_signal(signal.SIGINT)
            if what == "twice":
                time.sleep(0.1)
                self.process.send_signal(signal.SIGINT)
            self.ends((130,), family)
        else:
            if what == "killed while writing":
                self.wait(lambda: list((self.out / "checkpoints").glob(".writing-*")), 100)
            os.kill(self.pid(victim), signal.SIGSTOP if what == "stopped" else signal.SIGKILL)
            codes = (-signal.SIGKILL,) if victim == "parent" else (1,)
            self.ends(codes, family, noticed=HEARTBEAT if what == "stopped" else 0.0)
        if self.process.poll() is not None:
            self.start()


FAULTS = ["searcher-0 killed", "searcher-0 stopped", "trainer killed", "trainer stopped", "trainer without disk"]
FAULTS += ["trainer killed while writing", "buffer killed", "buffer stopped", "parent killed", "Ctrl-C once"]
FAULTS += ["Ctrl-C twice"]


def faults(seed: int):
    """Endless faults: all kinds once in random order, then again."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(FAULTS, len(FAULTS))


def check(soak: Soak, wanted: float) -> dict:
    """The checks at the end of a run that was ended by Ctrl-C."""
    summary, rows = json.loads((soak.out / "summary.json").read_text()), soak.rows()
    uids = [t.uid for t in unpack(load_buffer(all_in(soak.out / "checkpoints")[-1])["trajectories"])]
    steps = [row["step"] for row in rows]
    missing = set(range(summary["steps"])) - set(steps)
    memory = {name: flat(soak.memory, name) for name in ("parent", "trainer", "buffer", "searcher-0")}
    found = {
        "updates": summary["steps"],
        "updates_all_there_once": steps == sorted(set(steps)) and len(missing) <= sum(soak.without_disk),
        "lines_lost_without_disk": len(missing),
        "trained_as_many": summary["trajectories_trained"] == 256 * summary["steps"] == rows[-1]["trained"],
        "stored": len(uids),
        "no_uid_twice": len(set(uids)) == len(uids),
        "accuracy_before": summary["accuracy_before"],
        "accuracy_after": summary["accuracy_after"],
        "accuracy_reached": summary["accuracy_after"] >= wanted,
        "resident_MB_early_and_late": memory,
        "memory_is_flat": all(m is None or m[1] < 1.1 * m[0] + 40 for m in memory.values()),
        "longest_shutdown_seconds": round(soak.longest_shutdown, 1),
    }
    wrong = [name for name, value in found.items() if value is False]
    if wrong:
        raise Wrong(f"{', '.join(wrong)}: {found}; the run's folder is kept, {soak.tmp}")
    return found


def flat(memory: list, name: str) -> tuple[int, int] | None:
    """Largest resident memory in MB of a process that is at least 15 s old, in the first and in the second half."""
    half = memory[-1][0] / 2 if memory else 0
    parts = [[m for t, n, m, age in memory if n == name and age > 15 and (t > half) == late] for late in (False, True)]
    return tuple(round(max(part) / 1e6) for part in parts) if all(parts) else None


def report(result: dict) -> str:
    """A row for each kind of fault."""
    rows = [[kind, times, result["seconds_at_most"][kind]] for kind, times in result["survived"].items()]
    return table(["fault", "survived", "seconds until it trained again, at most"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=["vllm", "hf"], default="vllm")
    parser.add_argument("--pause", type=float, default=25, help="mean seconds between faults (0.4 to 1.6 times this)")
    parser.add_argument("--accuracy", type=float, default=0.95, help="held-out accuracy that it must reach")
    parser.add_argument("--cache", help="folder of start models")
    args = parser.parse_args()
    rng = random.Random(args.seed + 1)
    soak, done = Soak(args.engine, args.cache), []
    soak.start()
    for fault in faults(args.seed):
        until = time.time() + rng.uniform(0.4, 1.6) * args.pause
        while time.time() < until:
            soak.measure()
            time.sleep(1)
        if soak.now() > 60 * args.minutes:
            break
        print(f"{soak.now():7.1f} s  {fault} ...", flush=True)
        begun = time.time()
        soak.inject(fault)
        done.append({"fault": fault, "at": round(begun - soak.began, 1), "seconds": round(time.time() - begun, 1)})
    soak.process.send_signal(signal.SIGINT)
    soak.ends((130,), soak.family())
    found = check(soak, args.accuracy)
    found["left_in_dev_shm"] = sorted(path for path in soak.shm if os.path.exists(path))
    kinds = {kind: [d["seconds"] for d in done if d["fault"] == kind] for kind in FAULTS}
    result = {"machine": machine(), "engine": args.engine, "minutes": round(soak.now() / 60, 1), "seed": args.seed}
    result |= {"survived": {kind: len(seconds) for kind, seconds in kinds.items()}, "faults": len(done)}
    result |= {"seconds_at_most": {kind: max(seconds, default=None) for kind, seconds in kinds.items()}} | found
    print(report(result))
    print(json.dumps(result, indent=2))
    if args.minutes >= 30:
        (RESULTS / "soak.json").write_text(json.dumps(result, indent=2) + "\n")
    shutil.rmtree(soak.tmp)


if __name__ == "__main__":
    main()
