"""The installed environment misses nothing that was left out of requirements/cpu.txt; README and docs are true."""

import ast
import importlib
import json
import math
import re
import shutil
import statistics
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


README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
RUN_FILES = {"manifest.json", "progress.json", "config.json", "summary.json", "pids.json", "timeline.json"}
RUN_FILES |= {"generation_config.json"}
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def headings(page):
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_there_are_pages():
    assert {"measurements", "runs", "losses", "gpus", "operations"} <= {page.stem for page in PAGES}


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= 200


@each_page
def test_readme_names_only_files_that_exist(page):
    for name in re.findall(r"`([\w/]+\.(?:py|md|txt|json|png|cff))`", page.read_text()):
        if not name.startswith(("path/", "runs/", "figures/")) and name not in RUN_FILES:
            assert (ROOT / name).exists(), name


@each_page
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        place = page.parent / name if name else page
        assert place.exists(), target
        assert not anchor or anchor in headings(place), target


@each_page
def test_every_command_is_there(page):
    text, targets = page.read_text(), re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    for name in re.findall(r"python -m ([\w.]+)", text):
        assert name == "pytest" or (ROOT / (name.replace(".", "/") + ".py")).exists(), name
    for name in re.findall(r"(?:`|^)make ([\w-]+)", text, re.M):
        assert name in targets, name


def test_every_page_is_one_question_and_readme_leads_to_it():
    for page in PAGES[1:]:
        titles = re.findall(r"^# (.*)$", page.read_text(), re.M)
        assert len(titles) == 1 and titles[0].endswith("?"), page
        assert f"[docs/{page.name}](docs/{page.name}) | {titles[0]} |" in README.read_text()


# --- what was measured, on the page where it stands -------------------------------------------------------------------


def result(name):
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())


def assert_on(page, *texts):
    words = " ".join((ROOT / page).read_text().split())
    for text in texts:
        assert " ".join(text.split()) in words, text


def test_readme_has_the_measured_numbers():
    """README's table of results is that of bench/results/accuracy.json."""
    rows = [r for r in result("accuracy")["runs"] if r["loss"] == "tb"]
    assert len(rows) >= 3
    for r in rows:
        numbers = f"{r['accuracy_before']:.3f} | {r['accuracy_after']:.3f} | {r['seconds_rl']:.0f}"
        assert_on("README.md", f"| {r['seed']} | {numbers} |")


def test_the_losses_have_the_measured_accuracies():
    """What `--loss` each row of docs/losses.md says, by its name in bench/accuracy.py."""
    names = {"tb, 40 s": "`tb`", "tb learned": "`tb --log-z learned`", "dr_grpo": "`grpo --dr-grpo`"}
    found = {}
    for r in result("accuracy")["runs"]:
        found.setdefault(r["loss"], {})[r["seed"]] = r["accuracy_after"]
    assert len(found) == 9
    for loss, by_seed in found.items():
        if loss != "tb":
            numbers = " | ".join(f"{by_seed[seed]:.3f}" for seed in (0, 1, 2))
            assert_on("docs/losses.md", f"| {names.get(loss, f'`{loss}`')} | {numbers} |")


def test_the_losses_have_the_measured_lag():
    rows = result("lag")["rows"]
    kl = {
        (r["optimizer"], r["beta"], r["lr"], r["loss"], r["lag"]): math.inf if r["kl"] is None else r["kl"]
        for r in rows
    }
    for loss in ("TB", "clipped IS", "frozen KL", "frozen KL + IS"):
        numbers = " | ".join(f"{kl['adam', 0.25, 0.02, loss, lag]:.2g}" for lag in (0, 20, 200))
        assert_on("docs/losses.md", f"| {loss} | {numbers} |")
    settings = {key[:3] for key in kl}
    assert len(settings) == 24
    settings -= {("sgd", 4.0, 3.0)}  # where every loss fails

    def over_tb(loss, lag):
        return [kl[*s, loss, lag] / kl[*s, "TB", lag] for s in settings]

    late, later = (f"{statistics.median(over_tb('frozen KL', lag)):.0f}" for lag in (20, 200))
    assert_on("docs/losses.md", f"is {late} times TB's at lag 20 and {later} times at lag 200")
    ties = [ratio for lag in (0, 20, 200) for ratio in over_tb("clipped IS", lag)]
    assert (f"{min(ties):.1f}", f"{max(ties):.1f}") == ("0.7", "1.8")
    assert_on("docs/losses.md", "within 0.7 to 1.8 times")


def test_the_timeline_is_the_measured_one():
    measured, page = result("timeline"), "docs/measurements.md"
    assert [r["mode"] for r in measured["rows"]] == ["onpolicy", "barrier", "eager"]
    for r in measured["rows"]:
        searcher = "".join(f"{b:.0%}" for b in r["busy_searchers"]) or "(the same)"
        pace = f"{r['trained_per_second']} | {r['generated_per_second']} |"
        assert_on(page, f"| `{r['mode']}` | {r['busy_trainer']:.0%} | {searcher} | {pace}")
    share = max(r["recording_share"] for r in measured["rows"])
    assert share < 0.01  # the goal
    most = max(r["spans_per_second"] for r in measured["rows"])
    assert_on(page, f"a span costs {measured['settings']['span_us']} µs, at most {most} per second")
    assert_on(page, f"{100 * share:.3f} % of the time")


def test_streaming_is_the_measured_one():
    rows, page = {(r["in_flight"], r["way"]): r for r in result("streaming")["rows"]}, "docs/measurements.md"
    for size in (64, 256):
        ways = ("stream", "stream + updates", "stream + updates + recompute")
        ratios = " | ".join(f"{rows[size, way]['over_drain']:.2f}" for way in ways)
        assert_on(page, f"| {size} | {rows[size, 'drain']['tokens_per_second']} | {ratios} |")
    assert rows[64, "stream"]["over_drain"] >= 1.3  # the goal
    assert_on(page, f"{rows[64, 'stream, single answers']['over_drain']:.2f} with a request for each answer")


def test_the_start_up_is_the_measured_one():
    rows = result("startup")["rows"]
    for r in rows:
        phases = " | ".join(f"{r[phase]:.1f}" for phase in ("start", "import", "load", "generate", "update", "all"))
        assert_on("docs/measurements.md", f"| {r['mode']} | {phases} |")
    assert all(r["all"] <= 20 for r in rows)  # the goal


def test_readmes_example_task_works(tmp_path):
    from tasks import is_right, load_task

    code = re.search(r"```python\n(.*?)```", README.read_text(), re.S).group(1)
    (tmp_path / "rhymes.py").write_text(code)
    task = load_task(f"{tmp_path / 'rhymes.py'}:make_task")
    assert task.reward("moon: ", "soon") == 1 and is_right(task, "cat: ", "hat") and not is_right(task, "cat: ", "dog")
    assert len(task.train) >= 16
