"""How much staleness do TB and policy gradients bear? Exact answers on a problem that can be enumerated.

256 sequences (4 tokens of a vocabulary of 4) from a tabular autoregressive policy, a random reward in [0, 1] for each,
start at pi_ref. Every update learns from K sequences by the policy of `lag` updates ago (the start, while there is none
so old). The figure is KL(pi || target), target = pi_ref * exp(r / beta) / Z, over all sequences, averaged over the last
100 updates; medians over seeds. All losses have one gradient at lag 0 (that of beta / 2 * TB), so a learning rate means
the same to each. Four losses are two questions, crossed:

                        log pi of the KL term     importance weight min(pi / mu, 8) of the sequence
    TB                  current                   no
    clipped IS (TBA')   current                   yes
    frozen KL           of generation             no
    frozen KL + IS      of generation             yes

    python bench/lag.py [--updates 1500] [--seeds 3] [--out bench/results/lag.json]
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

sys.path.insert(0, str(Path(__file__).parents[1]))
from baselines import frozen_kl_loss, tba_prime_loss  # noqa: E402
from loss import tb_loss  # noqa: E402

VOCABULARY, LENGTH, K, CLIP = 4, 4, 16, 8.0
BETAS, LAGS = (0.1, 0.25, 1.0, 4.0), (0, 20, 200)
RATES = {"adam": (0.005, 0.02, 0.05), "sgd": (0.3, 1.0, 3.0)}
OPTIMIZERS = {
    "adam": ("torch.optim.Adam, betas .9 and .999", torch.optim.Adam),
    "sgd": ("torch.optim.SGD, no momentum", torch.optim.SGD),
}


def frozen_is_loss(log_pi: Tensor, log_mu: Tensor, log_ref: Tensor, reward: Tensor, beta: float) -> Tensor:
    """The frozen-KL policy gradient, corrected for who wrote the answers as TBA' does it. [P, K]."""
    shaped = reward - beta * (log_mu - log_ref)
    weight = (log_pi - log_mu).detach().exp().clamp(max=CLIP)
    return -(weight * (shaped - shaped.mean(1, keepdim=True)) * log_pi).mean()


LOSSES = {  # name: loss of (log_pi, log_mu, log_ref, reward, beta), all [P, K]
    "TB": lambda pi, mu, ref, r, beta: beta / 2 * tb_loss(pi, ref, r, beta),
    "clipped IS": lambda pi, mu, ref, r, beta: tba_prime_loss(pi, mu, ref, r, beta, CLIP),
    "frozen KL": frozen_kl_loss,
    "frozen KL + IS": frozen_is_loss,
}


def all_sequences() -> tuple[Tensor, Tensor]:
    """Tokens [256, 4], and the row of the policy's table that each is drawn from [256, 4]."""
    tokens = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
    rows = []
    for t in range(LENGTH):
        prefix = sum((tokens[:, i] * VOCABULARY ** (t - 1 - i) for i in range(t)), torch.zeros(len(tokens)).long())
        rows.append(sum(VOCABULARY**i for i in range(t)) + prefix)
    return tokens, torch.stack(rows, 1)


TOKENS, ROWS = all_sequences()
STATES = sum(VOCABULARY**t for t in range(LENGTH))  # 85


def log_probabilities(table: Tensor) -> Tensor:
    """[B, 85, 4] logits -> [B, 256] log-probabilities of all sequences."""
    return table.log_softmax(-1).flatten(1)[:, ROWS * VOCABULARY + TOKENS].sum(-1)


def run(loss: str, optimizer: str, beta: float, updates: int, seeds: int) -> list[dict]:
    """Train every lag, learning rate and seed at one time, as rows of one batch: they share nothing but the clock."""
    rates = RATES[optimizer]
    each = list(itertools.product(LAGS, range(seeds)))
    lags = torch.tensor([lag for _ in rates for lag, _ in each])  # [B]
    problems = [torch.Generator().manual_seed(seed) for seed in range(seeds)]
    starts = [torch.randn(STATES, VOCABULARY, generator=g) for g in problems]
    rewards = [torch.rand(len(TOKENS), generator=g) for g in problems]
    start = torch.stack([starts[seed] for _, seed in each])  # [B / rates, 85, 4]
    reward = torch.stack([rewards[seed] for _, seed in each]).repeat(len(rates), 1)  # [B, 256]
    log_ref = log_probabilities(start).repeat(len(rates), 1)
    log_target = (log_ref + reward / beta).log_softmax(1)

    tables = [start.clone().requires_grad_() for _ in rates]
    groups = [{"params": [table], "lr": rate} for table, rate in zip(tables, rates, strict=True)]
    stepper = OPTIMIZERS[optimizer][1](groups, lr=0.0)
    draws = torch.Generator().manual_seed(1)
    history = torch.empty(updates, len(lags), len(TOKENS))  # log pi of all sequences before each update
    distances = []
    for step in range(updates):
        log_pi = log_probabilities(torch.cat(tables))  # [B, 256]
        history[step] = log_pi.detach()
        log_mu = history[(step - lags).clamp(min=0), torch.arange(len(lags))]
        mu = log_mu.exp().nan_to_num(1.0)  # rows that diverged go on, of no use to anybody
        drawn = torch.multinomial(mu, K, replacement=True, generator=draws)  # [B, K]
        batch = (x.gather(1, drawn) for x in (log_pi, log_mu, log_ref, reward))
        stepper.zero_grad()
        (LOSSES[loss](*batch, beta) * len(lags)).backward()  # a sum over rows: they don't share a gradient
        stepper.step()
        if step >= updates - 100:
            distances.append((history[step].exp() * (history[step] - log_target)).sum(1))
    final = torch.stack(distances).mean(0).nan_to_num(torch.inf, torch.inf).view(len(rates), len(LAGS), seeds)
    untrained = (log_ref.exp() * (log_ref - log_target)).sum(1)[:seeds]
    return [
        {"loss": loss, "optimizer": optimizer, "beta": beta, "lr": rate, "lag": lag, "start": untrained.median().item()}
        | {"kl": finite(final[i, j].median()), "kl_seeds": [finite(x) for x in final[i, j]]}
        for (i, rate), (j, lag) in itertools.product(enumerate(rates), enumerate(LAGS))
    ]


def finite(x: Tensor) -> float | None:
    """None for what diverged: JSON knows no infinity."""
    return x.item() if x.isfinite() else None


def machine() -> dict:
    """What ran this, without names or paths."""
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
    """JSON that a diff can be read of."""
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
        "| optimizer | beta | KL at the start | lr | " + " | ".join(LOSSES) + " |",
        "| --- " * (4 + len(LOSSES)) + "|",
    ]
    for optimizer, beta in itertools.product(RATES, BETAS):
        for rate in RATES[optimizer]:
            cells = [" / ".join(cell(kl[optimizer, beta, rate, loss, lag]) for lag in LAGS) for loss in LOSSES]
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
    for optimizer, loss, beta in itertools.product(RATES, LOSSES, BETAS):
        rows += run(loss, optimizer, beta, args.updates, args.seeds)
        print(f"\r{time.time() - began:4.0f} s  {optimizer}, {loss}, beta {beta:g}", end="\033[K", file=sys.stderr)
    print("\r\033[K", end="", file=sys.stderr)
    print(table(rows))
    settings = {"updates": args.updates, "seeds": args.seeds, "K": K, "clip": CLIP, "sequences": len(TOKENS)}
    settings["optimizers"] = {name: words for name, (words, _) in OPTIMIZERS.items()}
    result = {"machine": machine() | {"seconds": round(time.time() - began)}, "settings": settings, "rows": rows}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(one_row_a_line(result))


if __name__ == "__main__":
    main()
