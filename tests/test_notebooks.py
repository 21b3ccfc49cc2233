"""The notebooks: what lies beside each source is that source, in the form that all of them have, and all of them run.

The quick tests need no Jupyter: they read the sources' cells (which use a small part of py:percent) on their own, so
that `make test` installs nothing for them, and so that a mistake of jupytext or of notebooks/build.py is seen as well.
"""

import ast
import importlib
import json
import re
from pathlib import Path

import pytest

from notebooks import build

ROOT = Path(__file__).resolve().parent.parent
SOURCES = build.sources()
NAMES = [s.stem for s in SOURCES]
all_six = pytest.mark.parametrize("source", SOURCES, ids=NAMES)


def cells_of(source: Path) -> list[tuple[str, list[str], str]]:
    """(kind, tags, text) of each cell of a py:percent source."""
    out = []
    for part in re.split(r"^# %%", source.read_text(), flags=re.M)[1:]:
        head, _, text = part.partition("\n")
        text = text.strip("\n")
        tags = re.findall(r'"(\w+)"', head)
        if "[markdown]" in head:
            text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.split("\n"))
        out.append(("markdown" if "[markdown]" in head else "code", tags, text))
    return out


def test_there_are_six():
    want = ["from_reward_to_tb", "life_of_a_buffer", "one_sync_at_a_time"]
    want += ["what_async_buys", "ways_to_be_off_policy", "a_real_run"]
    assert [f"{i}_{name}" for i, name in enumerate(want, 1)] == NAMES


@all_six
def test_the_notebook_is_its_source(source):
    made = json.loads(source.with_suffix(".ipynb").read_text())
    found = [(c["cell_type"], c["metadata"].get("tags", []), "".join(c["source"])) for c in made["cells"]]
    assert found == cells_of(source), "run `make sync-notebooks`"


@all_six
def test_the_notebook_has_no_outputs_and_stable_ids(source):
    text = source.with_suffix(".ipynb").read_text()
    made = json.loads(text)
    assert (made["nbformat"], made["nbformat_minor"]) >= (4, 5)
    assert all(c["outputs"] == [] and c["execution_count"] is None for c in made["cells"] if c["cell_type"] == "code")
    ids = [c["id"] for c in made["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[0-9a-f]{12}(-\d+)?", i) for i in ids)
    assert "/home" not in text and "/tmp" not in text


@all_six
def test_every_notebook_has_the_same_form(source):
    cells = cells_of(source)
    markdown = [text for kind, _, text in cells if kind == "markdown"]
    assert cells[0][2].startswith(f"# {source.stem[0]} · ")
    assert re.search(r"\*\*Question: .*?\?\*\*", cells[0][2], re.S) and "Run time: about" in cells[0][2]
    (parameters,) = [text for _, tags, text in cells if "parameters" in tags]
    assert parameters.count("FAST = False") == 1
    assert "## What to take away" in markdown[-1] and "## Exercises" in markdown[-1]
    assert len(re.findall(r"^\d\. ", markdown[-1].split("## Exercises")[1], re.M)) == 2
    assert cells[-1][0] == "code" and cells[-1][2].count("assert ") >= 5
    assert len(source.read_text()) > 5000


@all_six
def test_a_prediction_comes_before_every_figure_and_its_answer_after(source):
    """Figures may follow each other; before the first there is a prediction, behind the last an answer."""
    asked = answered = True
    figures = 0
    for kind, _, text in cells_of(source):
        if kind == "markdown":
            answered |= "**Answer" in text
            asked = "**Predict" in text
            assert answered or not asked or "**Answer" in text, f"no answer before:\n{text}"
        elif "figures.picture(" in text:
            figures += 1
            assert asked, f"no prediction before:\n{text}"
            answered = False
    assert figures >= 3 and answered


@all_six
def test_functions_live_in_modules(source):
    tree = ast.parse(source.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, kinds)]


@all_six
def test_our_modules_have_the_names_that_it_uses(source):
    """Without running it: `figures.curves`, say, is there."""
    found = set(re.findall(r"\b(figures|plots|toy)\.(\w+)", source.read_text())) - {("toy", "py"), ("figures", "py")}
    homes = {"figures": "notebooks.figures", "plots": "runtime.plots", "toy": "notebooks.toy"}
    assert [(home, name) for home, name in found if not hasattr(importlib.import_module(homes[home]), name)] == []


def test_nothing_of_jupyter_is_asked_for_by_the_main_job():
    cpu = (ROOT / "requirements/cpu.txt").read_text() + (ROOT / "requirements/gpu.txt").read_text()
    lists = [(ROOT / f"requirements/{name}.txt").read_text() for name in ("notebooks", "lab")]
    pins = [set(re.findall(r"^([\w.-]+)==", text, re.M)) for text in (cpu, *lists)]
    assert not pins[0] & pins[1] and not pins[0] & pins[2] and not pins[1] & pins[2]
    assert {"jupytext", "nbclient", "nbformat", "nbconvert", "ipykernel"} <= pins[1] and "jupyterlab" in pins[2]


def test_readme_shows_figures_that_there_are():
    named = re.findall(r"\((docs/notebooks/[\w-]+\.png)\)", (ROOT / "README.md").read_text())
    assert len(named) >= 4 and all((ROOT / name).exists() for name in named)
    figures = {p.name for p in (ROOT / "docs" / "notebooks").glob("*.png")}
    for source in SOURCES:  # as many as the source draws
        drawn = source.read_text().count("figures.picture(")
        assert {f"{source.stem}-{i}.png" for i in range(1, drawn + 1)} <= figures
        assert f"{source.stem}-{drawn + 1}.png" not in figures


# --- with Jupyter, which `make test-slow` installs ------------------------------------------------------------------


@pytest.mark.slow
@all_six
def test_jupytext_makes_the_same_notebook(source):
    assert build.text(build.notebook(source)) == source.with_suffix(".ipynb").read_text()


@pytest.mark.slow
@all_six
def test_it_runs_in_fast_mode_and_its_claims_hold(source):
    made = build.execute(build.quickened(build.notebook(source)), build.LIMIT[True])
    assert len(build.pictures(made)) == source.read_text().count("figures.picture(")


@pytest.mark.slow
@pytest.mark.parametrize(
    "code, what",
    [
        ("assert 1 == 2", "CellExecutionError"),
        ("import os; os._exit(1)", "DeadKernelError"),
        ("import time; time.sleep(60)", "TimeoutError"),
    ],
)
def test_what_goes_wrong_in_a_notebook_is_told(code, what):
    import nbformat

    cells = [nbformat.v4.new_code_cell("1 + 1"), nbformat.v4.new_code_cell(code)]
    broken = nbformat.v4.new_notebook(cells=cells, metadata=build.METADATA)
    with pytest.raises(build.NotebookError, match=what):
        build.execute(broken, 20.0)
