"""Tokens per second of one searcher's engine: kept full as answers end, or in batches that drain before the next one.

The answers have 8, 16, 32 or 64 tokens, equally many of each, in random order. The model has the start model's
architecture (a Llama with 345k parameters) and random weights; one thread runs it. The ways take turns in one process,
a few seconds each. A ratio is taken within a round; the result is the median of the rounds. Rewards and log pi_ref are
left out: they cost the same in every way.

drain                     a batch of whole groups runs to its end, then the next one starts
stream                    as in `eager`: a group is requested as soon as an answer ends; up to S - 1 answers wait inside
stream, whole groups      a group is requested when there is room for all of it
stream, single answers    each answer is a request of its own
+ updates                 new weights every 20 engine steps, while answers run
+ recompute               and the keys and values of running answers are then computed anew

    python -m bench.streaming [--rounds 7] [--out bench/results/streaming.json]
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
import numpy as np
import torch

from bench.common import machine
from runtime.engine import Sampling, VllmEngine
from runtime.policy import load_policy, named_weights

LENGTHS, S, PROMPT = (8, 16, 32, 64), 16, np.arange(2, 8).astype(np.int32)
SIZES = {64: 256, 256: 128}  # answers in flight -> engine steps in a measurement
UPDATE_EVERY, WARM_UP = 20, 40  # engine steps


class SpreadEngine(VllmEngine):
    """Each answer takes its length from `lengths`, one after another."""

    def restart(self) -> None:
        self.lengths = itertools.cycle(np.random.default_rng(0).permutation(np.tile(LENGTHS, 512)).tolist())

    def _params(self, n: int, greedy: bool):
        from vllm.v1.engine import parallel_sampling

        params, engine = super()._params(n, greedy), self
        params.ignore_eos, params.stop_token_ids = True, []

        class Spread(parallel_sampling.ParentRequest):
            def get_child_info(self, index: int):
                name, child = super().get_child_info(index)
                child = child.clone()
                child.max_tokens = next(engine.lengths)
                return name, child

        import vllm.v1.engine.llm_engine as llm_engine

        llm_engine.ParentRequest = Spread
        if n == 1:
            params.max_tokens = next(self.lengths)
        return params


def drain(engine: SpreadEngine, steps: int, size: int) -> float:
    """Tokens per second of batches that drain."""
    tokens, start = 0, time.perf_counter()
    for _ in range(steps // max(LENGTHS)):
        groups = engine.generate([PROMPT] * (size // S), S)
        tokens += sum(len(a.tokens) for group in groups for a in group)
    return tokens / (time.perf_counter() - start)


def stream(engine: SpreadEngine, steps: int, size: int, group: int = S, whole: bool = False, weights=None) -> float:
    """Tokens per second of an engine that is kept full; it is filled before and emptied after the time is taken."""
    tokens, keys = 0, itertools.count()
    for step in range(-WARM_UP, steps):
        if step == 0:
            start, tokens = time.perf_counter(), 0
        if weights and step % UPDATE_EVERY == 0:
            engine.load_weights(weights)
        while engine.in_flight + (group if whole else 1) <= size:
            engine.add(next(keys), PROMPT, group)
        tokens += min(size, engine.in_flight)  # each running answer gets a token
        engine.step()
    rate = tokens / (time.perf_counter() - start)
    while engine.in_flight:
        engine.step()
    return rate


def measure(engine: SpreadEngine, size: int, rounds: int, weights) -> dict[str, list[float]]:
    """Tokens per second of each way in each round."""
    ways = {
        "drain": lambda n: drain(engine, n, size),
        "stream": lambda n: stream(engine, n, size),
        "stream, whole groups": lambda n: stream(engine, n, size, whole=True),
        "stream, single answers": lambda n: stream(engine, n, size, group=1),
        "stream + updates": lambda n: stream(engine, n, size, weights=weights),
        "stream + updates + recompute": lambda n: stream(engine, n, size, weights=weights),
    }
    rates: dict[str, list[float]] = {way: [] for way in ways}
    engine.restart()
    drain(engine, max(LENGTHS), size)  # warms up
    for _ in range(rounds):
        for way, work in ways.items():
            engine.restart()
            engine._recompute_kv = "recompute" in way
            rates[way].append(work(SIZES[size]))
    return rates


def row(size: int, way: str, rates: dict[str, list[float]]) -> dict:
    """A row of the table."""
    ratios = [a / b for a, b in zip(rates[way], rates["drain"], strict=True)]
    return {
        "in_flight": size,
        "way": way,
        "tokens_per_second": round(statistics.median(rates[way])),
        "over_drain": round(statistics.median(ratios), 3),
        "over_drain_least": round(min(ratios), 3),
        "over_drain_most": round(max(ratios), 3),
    }


def make_folder(place: str) -> None:
    """The start model's architecture with room for longer answers."""
    from transformers import LlamaForCausalLM

    from tasks.start_model import make_model

    torch.manual_seed(0)
    config = make_model().config
    config.max_position_embeddings = 128
    LlamaForCausalLM(config).save_pretrained(place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results" / "streaming.json")
    args = parser.parse_args()
    if args.rounds < 3:
        parser.error("--rounds must be at least 3")
    rows = []
    with tempfile.TemporaryDirectory() as place:
        make_folder(place)
        weights = named_weights(load_policy(place))
        for size in SIZES:
            engine = SpreadEngine(place, Sampling(1.0, max(LENGTHS), (), len(PROMPT), size))
            rates = measure(engine, size, args.rounds, weights)
            rows += [row(size, way, rates) for way in rates]
    print(f"{'in flight':>9}  {'way':30} {'tokens/s':>8} {'over drain':>10}  (least to most)")
    for r in rows:
        least, most = r["over_drain_least"], r["over_drain_most"]
        print(f"{r['in_flight']:9}  {r['way']:30} {r['tokens_per_second']:8} {r['over_drain']:10.2f}", end="")
        print(f"  ({least:.2f} to {most:.2f})")
    settings = {
        "lengths": LENGTHS,
        "group": S,
        "engine_steps": SIZES,
        "update_every": UPDATE_EVERY,
        "rounds": args.rounds,
    }
    head = json.dumps({"machine": machine(), "settings": settings, "goal": "stream over drain at least 1.3"})
    args.out.write_text(head[:-1] + ',\n "rows": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "\n ]}\n")


if __name__ == "__main__":
    main()
