"""Does it work on this machine's GPUs, and how fast? At most six minutes on one recent GPU; a table and a JSON file.

    python -m bench.gpu_check                           writes bench/results/gpu_check.json
    python -m bench.gpu_check --device cpu --quick      the same flow without a GPU, small: its figures mean nothing

Needs only torch, transformers and numpy. Without vLLM its checks are left out, and one line says so. Trainer and
searcher are started here, without the command line. All visible GPUs take part in the checks of weights; the other
checks run on the first. Exit code 1 when a check fails.
"""

import argparse
import importlib
import importlib.util
import json
import logging
import math
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import torch

from bench import common
from buffer import Trajectory
from config import Config, resolve
from runtime import cuda_ipc, memory
from runtime.child import Child, environment
from runtime.engine import Sampling, VllmEngine
from runtime.metrics import Board, merge_timeline, save_spans
from runtime.placement import gpu_names, plan
from runtime.policy import collate, load_policy, named_weights, response_logprobs
from runtime.served_buffer import serve
from runtime.weights import SharedWeights
from tasks import load_task
from tasks.start_model import make_model, make_tokenizer, start_model_path
from trainer import Learner

ROOT = Path(__file__).resolve().parents[1]
GOAL = 0.95  # held-out accuracy of the main job
PATIENCE = 180.0  # seconds for a process's answer
SPAWN = multiprocessing.get_context("spawn")


class Table:
    """Results, printed as they come."""

    def __init__(self) -> None:
        self.rows: list[dict] = []

    def add(self, name: str, value, unit: str = "", ok: bool | None = None) -> None:
        """A figure; `ok` where it is a check."""
        self.rows.append({"name": name, "value": value, "unit": unit, "ok": ok})
        shown = f"{value:,.3g}" if isinstance(value, float) else str(value)
        verdict = {None: "", True: "ok", False: "FAILED"}[ok]
        print(f"{name:<58} {shown:>14} {unit:<10} {verdict}", flush=True)

    @property
    def failed(self) -> list[str]:
        return [row["name"] for row in self.rows if row["ok"] is False]


# --- a second process that reads weights ----------------------------------------------------------------------------


def peer(pipe, device: str) -> None:
    """Body of a reading process: obeys commands, and answers with the result or ("error", traceback)."""
    while True:
        what, *args = pipe.recv()
        try:
            if what == "end":
                return
            if what == "hold":
                (weights,) = args
                weights.device = device
                if device != "cpu" and not weights.slots.is_cuda:
                    cuda_ipc.pin(weights.slots)
                pipe.send(("ok", cuda_ipc.route(weights.slots.device, torch.device(device))))
            elif what == "read":
                pipe.send(("ok", fingerprint(weights.read(PATIENCE))))
            elif what == "watch":
                pipe.send(("ok", watch(weights, *args)))
            elif what == "time":
                pipe.send(("ok", seconds_of(weights.read, args[0])))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))


class Peer:
    """A reading process and the pipe to it."""

    def __init__(self, visible: str, device: str) -> None:
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=peer, args=(theirs, device), daemon=True)
        with environment({"CUDA_VISIBLE_DEVICES": visible}):
            self.process.start()
        theirs.close()

    def tell(self, *what) -> None:
        self.pipe.send(what)

    def answer(self):
        if not self.pipe.poll(PATIENCE):
            raise TimeoutError(f"the reading process sent nothing for {PATIENCE:.0f} s")
        kind, value = self.pipe.recv()
        if kind == "error":
            raise RuntimeError(f"the reading process raised:\n{value}")
        return value

    def ask(self, *what):
        self.tell(*what)
        return self.answer()

    def end(self) -> None:
        if self.process.is_alive():
            self.tell("end")
        self.process.join(20)
        self.process.kill()


def fingerprint(read: tuple[int, list]) -> tuple:
    """Version, and each tensor's name, dtype and bytes."""
    version, tensors = read
    return version, [
        (n, str(t.dtype), t.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()) for n, t in tensors
    ]


def watch(weights: SharedWeights, snapshots: int) -> tuple[int, int]:
    """Read that many snapshots, each of equal elements: (different versions seen, torn ones)."""
    versions, torn = set(), 0
    for _ in range(snapshots):
        version, tensors = weights.read(PATIENCE)
        versions.add(version)
        torn += any(not bool((t == version % 128).all()) for _, t in tensors)
    return len(versions), torn


def seconds_of(work, times: int) -> float:
    """Median wall time without the first run; it includes the GPU's queued work."""
    seconds = []
    for _ in range(times + 1):
        start = time.perf_counter()
        work()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


# --- weights --------------------------------------------------------------------------------------------------------


def check_weights(table: Table, reader: Peer, who: str, kind: str, device: str, quick: bool) -> None:
    """Round trip, torn reads, unread pushes and bandwidth of one kind of memory, read by one process."""
    where = device if kind == "cuda-ipc" else "cpu"
    g = torch.Generator().manual_seed(0)
    source = [("w", torch.randn(301, 67, generator=g)), ("b", torch.randn(13, generator=g)), ("n", torch.arange(9))]
    source = [(name, t.to(device)) for name, t in source]
    weights = SharedWeights.like(source, where, torch.bfloat16)
    weights.publish(source, 0)
    route = reader.ask("hold", weights)
    print(f"--- {kind}, {who}: {route}", flush=True)
    same = True
    for version in (1, 2, 5):
        source = [(name, t + 1) for name, t in source]
        weights.publish(source, version)
        kept = [(n, t.bfloat16() if t.is_floating_point() else t) for n, t in source]
        same &= reader.ask("read") == fingerprint((version, kept))
    table.add(f"{kind}, {who}: what is read is what was published", "bits", "", same)

    large = [(f"t{i}", torch.zeros(2**12 if quick else 2**17, device=device)) for i in range(8)]
    weights = pinned(SharedWeights.like(large, where), device)
    weights.publish(large, 0)
    reader.ask("hold", weights)
    reader.tell("watch", 200 if quick else 1000)
    version, deadline = 0, time.monotonic() + PATIENCE
    while not reader.pipe.poll() and time.monotonic() < deadline:
        version += 1
        for _, t in large:
            t.fill_(version % 128)
        weights.publish(large, version)
        time.sleep((0, 0, 0, 0.005)[version % 4])  # sometimes a slow reader gets a chance
    seen, torn = reader.answer()
    table.add(f"{kind}, {who}: torn reads, {seen} versions of {version} seen", torn, "", torn == 0 and seen > 1)

    before = allocated(device)
    for _ in range(50):
        version += 1
        weights.publish(large, version)
    grown = allocated(device) - before
    allowed = 0 if device != "cpu" else 2**23  # a process's resident size is not exact
    table.add(f"{kind}, {who}: growth over 50 unread pushes", grown / 2**20, "MiB", grown <= allowed)
    bandwidth(table, reader, who, kind, where, device, quick)


def bandwidth(table: Table, reader: Peer, who: str, kind: str, where: str, device: str, quick: bool) -> None:
    """Bandwidth of fp32 weights, published as bf16 and read, against a copy within the device."""
    count = 2**22 if quick else 2**29  # 8 MiB, or 1 GiB as bf16
    free = torch.cuda.mem_get_info()[0] if device != "cpu" else 2**40
    while count * 16 > free:
        count //= 2
    big = [(f"t{i}", torch.zeros(count // 8, device=device)) for i in range(8)]
    weights = pinned(SharedWeights.like(big, where, torch.bfloat16), device)
    size, version = 2 * count, iter(range(1000))
    publish = seconds_of(lambda: weights.publish(big, next(version)), 5)
    reader.ask("hold", weights)
    pull = reader.ask("time", 5)
    a = torch.zeros(size, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    copy = seconds_of(lambda: b.copy_(a), 5)
    table.add(f"{kind}, {who}: publish {size / 2**20:.0f} MiB", size / publish / 1e9, "GB/s")
    table.add(f"{kind}, {who}: pull", size / pull / 1e9, "GB/s")
    table.add(f"{kind}, {who}: pull / copy within the device", copy / pull, "")


def pinned(weights: SharedWeights, device: str) -> SharedWeights:
    """Page-lock shared memory, as the trainer does."""
    if device != "cpu" and not weights.slots.is_cuda:
        cuda_ipc.pin(weights.slots)
    return weights


def allocated(device: str) -> int:
    """Bytes that this process holds."""
    if device != "cpu":
        return torch.cuda.memory_allocated()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# --- training -------------------------------------------------------------------------------------------------------


def check_training(table: Table, device: str, quick: bool) -> float:
    """Step time of the trainer's own update on a Llama of middle size; returns its FLOP/s.

    FLOP are 6 per parameter and token, without attention and without the embedding, which multiplies nothing.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, inner, layers, vocabulary = (64, 128, 2, 256) if quick else (1024, 2816, 24, 32_000)
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocabulary}
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=hidden // 32, head_dim=32, tie_word_embeddings=False)
    ).to(device).eval()  # fmt: skip
    prompt, answer, k, groups = (8, 8, 4, 2) if quick else (128, 128, 8, 8)
    c = Config(samples_per_prompt=k, max_new_tokens=answer, decay_steps=0, micro_batch_tokens=8192, lr=1e-6)
    learner, batch = Learner(model, c, 0), made_up(groups, k, prompt, answer, vocabulary)
    learner.update(batch)
    before = torch.cuda.memory_allocated() if device != "cpu" else 0
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    seconds = seconds_of(lambda: learner.update(batch), 5)
    parameters = sum(p.numel() for p in model.parameters())
    tokens = groups * k * (prompt + answer)
    rate = 6 * (parameters - vocabulary * hidden) * tokens / seconds
    best = matmul(device, 256 if quick else 8192)
    table.add(f"an update: {parameters / 1e6:.0f} million parameters, {tokens:,} tokens", seconds, "s")
    table.add("an update: tokens", tokens / seconds, "tokens/s")
    table.add("an update: achieved", rate / 1e12, "TFLOP/s")
    table.add("a large bf16 matrix product" if device != "cpu" else "a matrix product", best / 1e12, "TFLOP/s")
    table.add("an update / that product", rate / best, "")
    if device != "cpu":
        shape = memory.shape_of(model.config.to_dict(), parameters)
        peak = torch.cuda.max_memory_allocated() - before
        estimate = sum(memory.step_parts(shape, c, prompt).values())
        table.add("an update: memory at its peak", peak / 2**30, "GiB")
        table.add("an update: memory estimated / counted", estimate / peak, "", 0.7 < estimate / peak < 1.6)
    return rate


def made_up(groups: int, k: int, prompt: int, answer: int, vocabulary: int) -> list[list[Trajectory]]:
    """A batch of random tokens."""
    rng = np.random.default_rng(0)

    def one(p: int, i: int) -> Trajectory:
        ids, response = (rng.integers(2, vocabulary, n).astype(np.int32) for n in (prompt, answer))
        log_mu = np.full(answer, -math.log(vocabulary), np.float32)
        what = (ids, response, "length", float(rng.random()), float(log_mu.sum()), log_mu)
        return Trajectory((0, 0, p * k + i), p, *what, 0, 0, 0)

    return [[one(p, i) for i in range(k)] for p in range(groups)]


def matmul(device: str, size: int) -> float:
    """FLOP/s of a square matrix product."""
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: a @ b, 10)


# --- vLLM -----------------------------------------------------------------------------------------------------------


def check_vllm(table: Table, device: str) -> None:
    """New weights in a running vLLM: its log-probabilities must be those of the new weights, not of the old ones."""
    if not importlib.util.find_spec("vllm"):
        print("--- vLLM is not installed: its checks are left out", flush=True)
        return
    receiving, sending = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=vllm_differences, args=(sending, device), daemon=True)
    process.start()
    sending.close()
    try:
        new, old = receiving.recv() if receiving.poll(PATIENCE) else (math.nan, math.nan)
    except EOFError:  # the process raised; its traceback is on the terminal
        new = old = math.nan
    process.kill()
    limit = 0.1 if device != "cpu" else 1e-3  # bf16, fp32
    table.add("vLLM after an update: difference to the new weights", new, "nats", new < limit)
    table.add("vLLM after an update: difference to the old weights", old, "nats", old > 3 * limit)


def vllm_differences(pipe, device: str) -> None:
    """Body of a process: largest difference of a token's log-probability, to the new and to the old weights."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        save_random_model(folder)
        sampling = Sampling(1.0, 8, (1,), 6, 64)
        engine = VllmEngine(folder, sampling, device, 0.3)
        old, new = load_policy(folder, device), load_policy(folder, device)
        with torch.no_grad():
            for p in new.parameters():
                p.add_(torch.randn_like(p) * p.abs().mean())
        engine.load_weights(named_weights(new))
        prompts = [np.array([2 + i, 3, 12, 4, 5, 15], np.int32) for i in range(4)]
        answers = [(p, a) for p, group in zip(prompts, engine.generate(prompts, 4), strict=True) for a in group]
        tokens = collate([p for p, _ in answers], [a.tokens for _, a in answers], 0, device)
        found = []
        for model in (new, old):
            with torch.no_grad():
                logp = response_logprobs(model, tokens, 1.0).cpu().numpy()
            found.append(
                max(
                    float(np.abs(row[: len(a.tokens)] - a.log_mu).max())
                    for row, (_, a) in zip(logp, answers, strict=True)
                )
            )
        pipe.send(tuple(found))


def save_random_model(folder) -> None:
    """The start model's shape with random weights."""
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


# --- the main job ---------------------------------------------------------------------------------------------------


def check_job(table: Table, device: str, visible: str, out: Path, quick: bool) -> None:
    """Trainer and searcher on one device, hf: to .95 on addition, or a few updates when quick."""
    options = {"gpus": int(device != "cpu"), "engine": "hf"}
    if quick:
        task = str(ROOT / "tests" / "checksum.py") + ":make_task"
        options |= {"task": task, "prompts_per_batch": 4, "samples_per_prompt": 4, "in_flight": 64, "steps": 6}
        options |= {"eval_prompts": 20, "eval_every": 3, "decay_steps": 0, "max_seconds": 60.0}
    config = resolve(Config(**options))
    folder = out / "model" if quick else start_model_path(config)
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True)
        if quick:
            save_random_model(folder)
        else:
            print("--- making the start model (about a minute) ...", flush=True)
            load_task(config.task).make_start_model(folder, config.seed)
    summary = run_job(config, str(folder), device, visible, out)
    table.add("main job: updates", summary["steps"], "")
    table.add("main job: accuracy before", summary["accuracy_before"], "")
    after = summary["accuracy_after"]
    table.add("main job: accuracy after", after, "", None if quick else after >= GOAL)
    table.add("main job: seconds of RL", summary["seconds_rl"], "s")
    table.add("main job: trajectories trained", summary["trajectories_trained"] / summary["seconds_rl"], "per second")
    table.add("main job: trainer busy", summary["busy_trainer"], "")
    table.add("main job: staleness", summary["staleness_mean"], "updates")
    merge_timeline(out)


def run_job(config: Config, folder: str, device: str, visible: str, out: Path) -> dict:
    """A run without the command line: buffer, searcher, trainer. Returns the trainer's summary.

    Raises:
        RuntimeError: when a process raised or ended, with its traceback.
    """
    board, address = Board(SPAWN, 1), str(out / "weights")
    stored = {"capacity": config.buffer_capacity, "per_prompt": config.per_prompt_capacity, "seed": config.seed}
    stored |= {"recent_groups": config.recent_groups, "dedup": config.dedup}
    manager, buffer = serve(SPAWN, int, (), **stored)
    common = {"searcher-0": ("searcher", (config, folder, out, 0, 0, address, buffer))}
    common |= {"trainer": ("trainer", (config, folder, out, None, address, buffer))}
    pipes, processes = {}, []
    for name, (module, args) in common.items():
        receiving, sending = SPAWN.Pipe(duplex=False)
        process = SPAWN.Process(target=job_process, args=(module, name, board, sending, device, out, args), daemon=True)
        with environment({"CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": str(config.threads)}):
            process.start()
        sending.close()
        pipes[receiving] = name
        processes.append(process)
    try:
        return hear(pipes, time.monotonic() + 2 * PATIENCE)
    finally:
        board.set(Board.PARENT, "stop", 1)
        for process in processes:
            process.join(20)
            process.kill()
        manager.shutdown()


def hear(pipes: dict, deadline: float) -> dict:
    """Receive the job's messages up to the trainer's last one, its summary."""
    while time.monotonic() < deadline:
        for pipe in wait(list(pipes), 1.0):
            try:
                kind, value = pipe.recv()
            except EOFError:
                raise RuntimeError(f"{pipes[pipe]} ended") from None
            if kind == "done":
                return value
            if kind == "error":
                raise RuntimeError(f"{pipes[pipe]} raised:\n{value}")
            if kind == "accuracy":
                print(f"    held-out accuracy {value['accuracy']:.3f}", flush=True)
    raise TimeoutError("the main job did not end")


def job_process(module: str, name: str, board: Board, messages, device: str, out: Path, args: tuple) -> None:
    """Body of a process of the main job: like child.run, but without a parent's services."""
    logging.basicConfig(level=logging.INFO, format="    %(message)s", stream=sys.stdout)
    for noisy in ("httpx", "transformers"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    try:
        me = Child(name, board, messages, device, time.time())
        importlib.import_module(module).main(me, *args)
        save_spans(me.clock, out / f"{name}.spans.json")
    except BaseException:
        messages.send(("error", traceback.format_exc()))


# --- all of it ------------------------------------------------------------------------------------------------------


def machine(device: str) -> dict:
    """The machine, its GPU included."""
    found = common.machine("numpy", "torch", "transformers", "vllm") | {"device": "cpu", "gpus": 0}
    if device != "cpu":
        found |= {
            "device": torch.cuda.get_device_name(0),
            "gpus": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
        }
    return found


def check_all(table: Table, device: str, quick: bool, vllm: bool, out: Path) -> float:
    """Every check in turn; returns the trainer's FLOP/s."""
    torch.zeros(1, device=device)  # this process uses CUDA first; the spawned ones must work nevertheless
    names = gpu_names() if device != "cpu" else []
    kinds = ["shared-memory"]
    if device != "cpu":
        problem = cuda_ipc.problem(torch.device(device, 0))
        table.add("CUDA IPC can be used", problem or "yes")
        kinds = ["shared-memory"] if problem else ["cuda-ipc", "shared-memory"]
    places = plan(names, len(names), max(1, len(names) - 1))[1:] + (plan(names, 1, 1)[1:] if len(names) > 1 else [])
    for place in places:
        reader = Peer(place.visible, place.device)
        own = place.visible.split(",")[0]
        who = "CPU" if device == "cpu" else f"GPU {own}"
        for kind in kinds if place.sees_trainer else ["shared-memory"]:
            check_weights(table, reader, who, kind, device, quick)
        reader.end()
    rate = check_training(table, device, quick)
    if device != "cpu":
        torch.cuda.empty_cache()  # the next checks run in other processes
    if vllm:
        check_vllm(table, device)
    check_job(table, device, names[0] if names else "", out, quick)
    return rate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows only that it runs")
    parser.add_argument("--no-vllm", action="store_true", help="leave vLLM's checks out")
    parser.add_argument("--out", type=Path, help="default: bench/results/gpu_check.json, or gpu_check-cpu.json")
    args = parser.parse_args()
    args.out = args.out or common.RESULTS / ("gpu_check.json" if args.device == "cuda" else "gpu_check-cpu.json")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu --quick runs the same flow without one")
    table, began = Table(), time.time()
    print(", ".join(f"{name} {value}" for name, value in machine(args.device).items()), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        rate = check_all(table, args.device, args.quick, not args.no_vllm, Path(folder))
        timeline = args.out.with_name(f"{args.out.stem}-timeline.json")
        shutil.copy(Path(folder) / "timeline.json", timeline)
    print(f"--- the main job's timeline: {timeline}")
    seconds = time.time() - began
    print(f"--- {seconds:.0f} s; " + (f"FAILED: {'; '.join(table.failed)}" if table.failed else "all checks hold"))
    result = machine(args.device) | {"quick": args.quick, "seconds": round(seconds), "trainer_flops": rate}
    args.out.write_text(json.dumps(result | {"rows": table.rows}, indent=1) + "\n")
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())
