"""The installed environment: what was left out of requirements/cpu.txt is not missed."""

import ast
import importlib
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MACOS = sys.platform == "darwin"
on_cpu = pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="requirements/cpu.txt is for CPUs")


@on_cpu
def test_the_pins_are_what_is_installed():
    pinned = (ROOT / f"requirements/{'macos' if MACOS else 'cpu'}.txt").read_text()
    pins = re.findall(r"^([\w.-]+)==(\S+)$", pinned, re.M)
    assert len(pins) > 50
    there = {name: version(name).removesuffix("+cpu") for name, _ in pins}  # torch==2.13.0 is there as 2.13.0+cpu
    wrong = [f"{name}: {there[name]} instead of {pin}" for name, pin in pins if there[name] != pin]
    assert not wrong


def test_the_heavy_packages_import():
    for name in ("torch", "transformers", "matplotlib", "multiprocessing_logging", "tyro", "pydantic", "rich"):
        importlib.import_module(name)
    if not MACOS:  # there is no vLLM there
        importlib.import_module("vllm")


def test_the_parent_imports_nothing_heavy():
    heavy = "{'torch', 'transformers', 'vllm'}"
    code = f"import sys, tba_min, config, buffer, runtime.child; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_heart_imports_only_what_it_may():
    """trainer, searcher, buffer, weights, loss: standard library, numpy, torch, transformers and our own modules."""
    own = {p.stem for p in ROOT.glob("*.py")} | {"runtime", "tasks"}
    allowed = own | set(sys.stdlib_module_names) | {"numpy", "torch", "transformers"}
    for name in ("trainer", "sync", "searcher", "buffer", "loss", "baselines", "runtime/weights", "runtime/policy"):
        for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for module in names:
                assert module.split(".")[0] in allowed, f"{name}.py imports {module}"


def test_readme_names_only_files_that_exist():
    text = (ROOT / "README.md").read_text()
    for name in re.findall(r"`([\w/]+\.(?:py|md|txt|json|png|cff))`", text):
        if not name.startswith(("path/", "runs/", "figures/")) and name not in RUN_FILES:
            assert (ROOT / name).exists(), name


RUN_FILES = {"manifest.json", "progress.json", "config.json", "summary.json", "pids.json", "timeline.json"}


def test_readme_has_the_measured_numbers():
    """README's table of results is that of bench/results/accuracy.json."""
    import json

    runs = json.loads((ROOT / "bench" / "results" / "accuracy.json").read_text())["runs"]
    text = (ROOT / "README.md").read_text()
    rows = [r for r in runs if r["loss"] == "tb"]
    assert len(rows) >= 3
    for r in rows:
        row = f"| {r['seed']} | {r['accuracy_before']:.3f} | {r['accuracy_after']:.3f} | {r['seconds_rl']:.0f} |"
        assert row in text, row


def result(name):
    import json

    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())


def assert_in_readme(*texts):
    readme = " ".join((ROOT / "README.md").read_text().split())
    for text in texts:
        assert " ".join(text.split()) in readme, text


def test_readme_has_the_measured_timeline():
    measured = result("timeline")
    assert [r["mode"] for r in measured["rows"]] == ["onpolicy", "barrier", "eager"]
    for r in measured["rows"]:
        searcher = "".join(f"{b:.0%}" for b in r["busy_searchers"]) or "(the same)"
        pace = f"{r['trained_per_second']} | {r['generated_per_second']} |"
        assert_in_readme(f"| `{r['mode']}` | {r['busy_trainer']:.0%} | {searcher} | {pace}")
    share = max(r["recording_share"] for r in measured["rows"])
    assert share < 0.01  # the goal
    most = max(r["spans_per_second"] for r in measured["rows"])
    assert_in_readme(f"a span costs {measured['settings']['span_us']} µs, at most {most} a second")
    assert_in_readme(f"{100 * share:.3f} % of the time")


def test_readme_has_the_measured_streaming():
    rows = {(r["in_flight"], r["way"]): r for r in result("streaming")["rows"]}
    for size in (64, 256):
        ways = ("stream", "stream + updates", "stream + updates + recompute")
        ratios = " | ".join(f"{rows[size, way]['over_drain']:.2f}" for way in ways)
        assert_in_readme(f"| {size} | {rows[size, 'drain']['tokens_per_second']} | {ratios} |")
    assert rows[64, "stream"]["over_drain"] >= 1.3  # the goal
    assert_in_readme(f"{rows[64, 'stream, single answers']['over_drain']:.2f} with a request for each answer")


def test_readme_has_the_measured_start_up():
    rows = result("startup")["rows"]
    for r in rows:
        phases = " | ".join(f"{r[phase]:.1f}" for phase in ("start", "import", "load", "generate", "update", "all"))
        assert_in_readme(f"| {r['mode']} | {phases} |")
    assert all(r["all"] <= 20 for r in rows)  # the goal


def test_readmes_example_task_works(tmp_path):
    from tasks import is_right, load_task

    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S).group(1)
    (tmp_path / "rhymes.py").write_text(code)
    task = load_task(f"{tmp_path / 'rhymes.py'}:make_task")
    assert task.reward("moon: ", "soon") == 1 and is_right(task, "cat: ", "hat") and not is_right(task, "cat: ", "dog")
    assert len(task.train) >= 16
