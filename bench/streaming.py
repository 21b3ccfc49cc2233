"""Tokens a second of one searcher's engine: kept full as answers end, against batches that drain before the next one.

Answers of 8, 16, 32 or 64 tokens, as many of each and shuffled, of the start model's architecture (a Llama of 345k
parameters, random weights) on one thread. `drain`: a batch of whole groups runs to the end, then the next one starts.
`stream`: what `eager` does, groups are asked for as soon as answers end, up to S - 1 of them wait inside the engine.
`stream, whole groups`: a group is asked for when there is a place for all of it. `stream, single answers`: each answer
is a request of its own. `+ updates`: new weights every 20 engine steps, in flight; `+ recompute`: keys and values of
running answers are computed anew after each. All ways write the same lengths, in turn, in one process; ratios are of
the same round, medians of the rounds. Rewards and log pi_ref are left out: they cost the same in every way.

    python bench/streaming.py [--rounds 5] [--out bench/results/streaming.json]
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from accuracy import machine  # noqa: E402

from engine import Sampling, VllmEngine  # noqa: E402
from policy import load_policy, named_weights  # noqa: E402

LENGTHS, S, PROMPT = (8, 16, 32, 64), 16, np.arange(2, 8).astype(np.int32)
SIZES = {64: 1024, 256: 2048}  # answers in flight -> answers in a measurement
UPDATE_EVERY = 20  # engine steps


class SpreadEngine(VllmEngine):
    """Answers are as long as `order` says, one after another."""

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


def drain(engine: SpreadEngine, answers: int, size: int) -> int:
    """Tokens written in batches that run empty."""
    batches = [engine.generate([PROMPT] * (size // S), S) for _ in range(answers // size)]
    return sum(len(a.tokens) for batch in batches for group in batch for a in group)


def stream(engine: SpreadEngine, answers: int, size: int, group: int = S, whole: bool = False, weights=None) -> int:
    """Tokens written with the engine kept full."""
    asked = tokens = steps = 0
    while asked < answers or engine.in_flight:
        if weights and steps % UPDATE_EVERY == UPDATE_EVERY - 1:
            engine.load_weights(weights)
        while asked < answers and engine.in_flight + (group if whole else 1) <= size:
            engine.add(asked, PROMPT, group)
            asked += group
        tokens += sum(len(a.tokens) for _, answers_ in engine.step() for a in answers_)
        steps += 1
    return tokens


def measure(engine: SpreadEngine, size: int, rounds: int, weights) -> dict:
    """Tokens a second of each way in each round."""
    ways = {
        "drain": lambda n: drain(engine, n, size),
        "stream": lambda n: stream(engine, n, size),
        "stream, whole groups": lambda n: stream(engine, n, size, whole=True),
        "stream, single answers": lambda n: stream(engine, n, size, group=1),
        "stream + updates": lambda n: stream(engine, n, size, weights=weights),
        "stream + updates + recompute": lambda n: stream(engine, n, size, weights=weights),
    }
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for round_ in range(-1, rounds):  # the first one warms up
        for way, work in ways.items():
            engine.restart()
            engine._recompute_kv = "recompute" in way
            start = time.perf_counter()
            tokens = work(SIZES[size] if round_ >= 0 else size)
            if round_ >= 0:
                rates[way].append(tokens / (time.perf_counter() - start))
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

    from start_model import make_model

    torch.manual_seed(0)
    config = make_model().config
    config.max_position_embeddings = 128
    LlamaForCausalLM(config).save_pretrained(place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
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
    settings = {"lengths": LENGTHS, "group": S, "answers": SIZES, "update_every": UPDATE_EVERY, "rounds": args.rounds}
    head = json.dumps({"machine": machine(), "settings": settings, "goal": "stream over drain at least 1.3"})
    args.out.write_text(head[:-1] + ',\n "rows": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "\n ]}\n")


if __name__ == "__main__":
    main()
