"""How much staleness do TB and policy gradients tolerate? Exact answers on a problem that can be enumerated.

There are 256 sequences (4 tokens of a vocabulary of 4), each with a random reward in [0, 1]. A tabular autoregressive
policy starts at pi_ref. Every update learns from K sequences by the policy of `lag` updates ago (at first, by the start
policy). The figure is KL(pi || target), target = pi_ref * exp(r / beta) / Z, over all sequences, averaged over the last
100 updates; medians over seeds. All losses have the same gradient at lag 0 (that of beta / 2 * TB), so a learning rate
means the same for each. The four losses combine two choices:

                        log pi of the KL term     importance weight min(pi / mu, 8) of the sequence
    TB                  current                   no
    clipped IS (TBA')   current                   yes
    frozen KL           of generation             no
    frozen KL + IS      of generation             yes

    python -m bench.lag [--updates 1500] [--seeds 3] [--out bench/results/lag.json]
"""

import argparse
import datetime
import itertools
import json
import platform
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from notebooks.toy import CLIP, TOKENS, final_kl, learn, problem, repeated

K = 16
BETAS, LAGS = (0.1, 0.25, 1.0, 4.0), (0, 20, 200)
RATES = {"adam": (0.005, 0.02, 0.05), "sgd": (0.3, 1.0, 3.0)}
OPTIMIZERS = {"adam": "torch.optim.Adam, betas .9 and .999", "sgd": "torch.optim.SGD, no momentum"}
COMPARED = ("TB", "clipped IS", "frozen KL", "frozen KL + IS")


def run(loss: str, optimizer: str, beta: float, updates: int, seeds: int) -> list[dict]:
    """Train all lags, learning rates and seeds at the same time (toy.learn); return the final KL of each."""
    rates = RATES[optimizer]
    start = repeated(problem(seeds), len(rates) * len(LAGS))  # order: rate, then lag, then seed
    lags = torch.tensor(LAGS).repeat_interleave(seeds).repeat(len(rates))
    course = learn(loss, start, beta, lags, list(rates), updates, K, optimizer)
    final = final_kl(course).view(len(rates), len(LAGS), seeds)
    untrained = course.untrained[:seeds].median().item()
    return [
        {"loss": loss, "optimizer": optimizer, "beta": beta, "lr": rate, "lag": lag, "start": untrained}
        | {"kl": finite(final[i, j].median()), "kl_seeds": [finite(x) for x in final[i, j]]}
        for (i, rate), (j, lag) in itertools.product(enumerate(rates), enumerate(LAGS))
    ]


def finite(x: Tensor) -> float | None:
    """None for a run that diverged: JSON has no infinity."""
    return x.item() if x.isfinite() else None


def machine() -> dict:
    """The machine, without names or paths."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def one_row_a_line(result: dict) -> str:
    """JSON with one row per line, for readable diffs."""
    head = json.dumps(result | {"rows": []}, indent=1).removesuffix("[]\n}")
    return head + "[\n" + ",\n".join(json.dumps(row) for row in result["rows"]) + "\n]}\n"


def cell(kl: float | None) -> str:
    return "diverged" if kl is None else f"{kl:.2g}"


def table(rows: list[dict]) -> str:
    """Markdown: a row for each optimizer, beta and learning rate, a column for each loss: lag 0 / 20 / 200."""
    kl = {(r["optimizer"], r["beta"], r["lr"], r["loss"], r["lag"]): r["kl"] for r in rows}
    start = {r["beta"]: r["start"] for r in rows}
    lines = [
        f"KL to the exact target at lag {' / '.join(map(str, LAGS))}",
        "",
        "| optimizer | beta | KL at the start | lr | " + " | ".join(COMPARED) + " |",
        "| --- " * (4 + len(COMPARED)) + "|",
    ]
    for optimizer, beta in itertools.product(RATES, BETAS):
        for rate in RATES[optimizer]:
            cells = [" / ".join(cell(kl[optimizer, beta, rate, loss, lag]) for lag in LAGS) for loss in COMPARED]
            lines.append(f"| {optimizer} | {beta:g} | {start[beta]:.2g} | {rate:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "lag.json")
    args = parser.parse_args()
    if args.updates < 100 or args.seeds < 1:
        parser.error("--updates must be at least 100 and --seeds at least 1")
    began, rows = time.time(), []
    for optimizer, loss, beta in itertools.product(RATES, COMPARED, BETAS):
        rows += run(loss, optimizer, beta, args.updates, args.seeds)
        print(f"\r{time.time() - began:4.0f} s  {optimizer}, {loss}, beta {beta:g}", end="\033[K", file=sys.stderr)
    print("\r\033[K", end="", file=sys.stderr)
    print(table(rows))
    settings = {"updates": args.updates, "seeds": args.seeds, "K": K, "clip": CLIP, "sequences": len(TOKENS)}
    settings["optimizers"] = OPTIMIZERS
    result = {"machine": machine() | {"seconds": round(time.time() - began)}, "settings": settings, "rows": rows}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(one_row_a_line(result))


if __name__ == "__main__":
    main()
