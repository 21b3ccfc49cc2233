"""The notebooks: what lies beside each source is that source, in the form that all of them have, and all of them run.

The quick tests need no Jupyter: they read the sources with notebooks/lesson.py, which knows a small part of py:percent.
So `make test` installs nothing for them, and a mistake of jupytext or of notebooks/build.py is seen as well.
"""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from notebooks import build, lesson

ROOT = Path(__file__).resolve().parent.parent
SOURCES = lesson.sources()
NAMES = [s.stem for s in SOURCES]
all_six = pytest.mark.parametrize("source", SOURCES, ids=NAMES)
FOLD = re.compile(r"<details><summary>(.*?)</summary>\n\n(.*?)\n\n</details>", re.S)


def code_of(source: Path, tag: str = "") -> list[str]:
    """The code cells of a source; with a tag, those that have it; without, those that do not only find the project."""
    found = [(tags, text) for kind, tags, text in lesson.cells(source) if kind == "code"]
    return [text for tags, text in found if (tag in tags if tag else "setup" not in tags)]


def text_of(source: Path) -> str:
    """All markdown of a source."""
    return "\n\n".join(text for kind, _, text in lesson.cells(source) if kind == "markdown")


def test_there_are_six():
    want = ["from_reward_to_tb", "life_of_a_buffer", "one_sync_at_a_time"]
    want += ["what_async_buys", "ways_to_be_off_policy", "a_real_run"]
    assert [f"{i}_{name}" for i, name in enumerate(want, 1)] == NAMES


@all_six
def test_the_notebook_is_its_source(source):
    made = json.loads(source.with_suffix(".ipynb").read_text())
    found = [(c["cell_type"], c["metadata"].get("tags", []), "".join(c["source"])) for c in made["cells"]]
    assert found == list(lesson.cells(source)), "run `make sync-notebooks`"


@all_six
def test_the_notebook_has_no_outputs_and_stable_ids(source):
    text = source.with_suffix(".ipynb").read_text()
    made = json.loads(text)
    assert (made["nbformat"], made["nbformat_minor"]) >= (4, 5)
    assert all(c["outputs"] == [] and c["execution_count"] is None for c in made["cells"] if c["cell_type"] == "code")
    ids = [c["id"] for c in made["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[0-9a-f]{12}(-\d+)?", i) for i in ids)
    assert "/home" not in text and "/tmp" not in text


# --- the form ---------------------------------------------------------------------------------------------------------


@all_six
def test_every_notebook_has_the_same_form(source):
    cells = list(lesson.cells(source))
    markdown = [text for kind, _, text in cells if kind == "markdown"]
    first = cells[0][2]
    assert first.startswith(f"# {source.stem[0]} · ") and re.search(r"\*\*Question: .*?\?\*\*", first, re.S)
    assert all(part in first for part in ("**At the end you can**", "**You need**", "**Run time:**"))
    assert lesson.defaults(source, fast=True)["FAST"] and not lesson.defaults(source, fast=False)["FAST"]
    assert "## What to take away" in markdown[-1] and "## Exercises" in markdown[-1]
    assert "](http" in text_of(source)  # sources are linked
    assert cells[-1][0] == "code" and "lesson.check(" in cells[-1][2]


@all_six
def test_the_instructor_finds_a_lesson_of_ninety_minutes(source):
    """Minutes for every section, and the board."""
    (plan,) = [text for title, text in FOLD.findall(text_of(source)) if title == "For the instructor"]
    minutes = re.findall(r"^\| (.+?) \| (\d+) \|", plan, re.M)
    sections = [s.strip() for s in re.findall(r"^## (.+)$", text_of(source), re.M)]
    timed = [name for name, _ in minutes]
    assert set(timed) <= {*sections, "Opening"} and set(sections) - set(timed) <= {"What to take away"}
    assert sum(int(m) for _, m in minutes) == 90
    assert "**On the board" in plan


@all_six
def test_a_prediction_comes_before_every_figure_and_its_answer_after(source):
    """Figures may follow each other; before the first there is a prediction, behind the last a folded answer."""
    asked = answered = True
    figures = 0
    for kind, _, text in lesson.cells(source):
        if kind == "markdown":
            answered |= any(title == "Answer" for title, _ in FOLD.findall(text))
            asked = "**Predict" in text
            assert answered or not asked, f"no answer before:\n{text}"
        elif "figures.picture(" in text:
            figures += 1
            assert asked, f"no prediction before:\n{text}"
            answered = False
    assert figures >= 3 and answered


@all_six
def test_what_is_folded_opens(source):
    """A blank line behind the summary and before the end: without it, Markdown inside stays raw text."""
    text = text_of(source)
    assert len(FOLD.findall(text)) == text.count("<details>") == text.count("</details>")
    assert "**Answer" not in text


@all_six
def test_every_exercise_has_a_worked_solution(source):
    text = lesson.exercises(source)
    exercises = re.split(r"^\*\*\d+\.", text, flags=re.M)[1:]
    assert len(exercises) >= 2
    assert all("Solution" in [title for title, _ in FOLD.findall(exercise)] for exercise in exercises)
    assert lesson.settings(source) or lesson.solutions(source)


@all_six
def test_its_claims_are_checked_and_nothing_else_can_end_it(source):
    """A claim that fails where a reader changed something only reports it: so no bare assert."""
    tree = ast.parse("\n".join(code_of(source)))
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    (claims,) = [node for node in ast.walk(ast.parse(code_of(source)[-1])) if isinstance(node, ast.Dict)]
    assert len(claims.keys) >= 6


@all_six
def test_functions_live_in_modules(source):
    tree = ast.parse("\n".join(code_of(source)))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, kinds)]


@all_six
def test_our_modules_have_the_names_that_it_uses(source):
    """Without running it: `figures.curves`, say, is there."""
    homes = {name: f"notebooks.{name}" for name in ("figures", "lesson", "toy")} | {"plots": "runtime.plots"}
    code = "\n".join(code_of(source) + lesson.solutions(source))
    found = re.findall(rf"\b({'|'.join(homes)})\.(\w+)", code)
    assert [(home, name) for home, name in found if not hasattr(importlib.import_module(homes[home]), name)] == []


# --- opens anywhere ---------------------------------------------------------------------------------------------------


def test_all_find_the_project_in_the_same_way():
    (one,) = {text for source in SOURCES for text in code_of(source, "setup")}
    assert 'PROJECT = ""' in one and sum(len(code_of(source, "setup")) for source in SOURCES) == 6


def archive(place: Path) -> Path:
    """The project as a hosting site packs it: all within one folder."""
    with zipfile.ZipFile(place, "w") as file:
        for path in [path for room in (".", "notebooks", "runtime", "tasks") for path in (ROOT / room).glob("*.py")]:
            file.write(path, Path("tba_min-main") / path.relative_to(ROOT))
    return place


def find_from(folder: Path, address: str = "") -> subprocess.CompletedProcess:
    (cell,) = code_of(SOURCES[0], "setup")
    code = cell.replace('PROJECT = ""', f"PROJECT = {address!r}") + "\nimport notebooks.lesson as x; print(x.__file__)"
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=clean, capture_output=True, text=True)


@pytest.mark.parametrize("where", ["root", "notebooks", "below", "archive beside it", "address"])
def test_it_finds_the_project_from(where, tmp_path):
    folder, address, home = {"root": ROOT, "notebooks": ROOT / "notebooks"}.get(where, tmp_path), "", ROOT
    if where == "below":
        folder = ROOT / "notebooks" / "saved"
    if where in ("archive beside it", "address"):
        place = archive(tmp_path / ("tba_min-main.zip" if where == "archive beside it" else "other.zip"))
        address, home = place.as_uri() if where == "address" else "", tmp_path / "tba_min" / "tba_min-main"
    done = find_from(folder, address)
    assert Path(done.stdout.strip()) == home / "notebooks" / "lesson.py", done.stderr


@pytest.mark.parametrize("address", ["", "file:///nowhere.zip", "no address", "damaged", "another project"])
def test_it_says_so_in_one_line_when_it_cannot_find_the_project(address, tmp_path):
    if address in ("damaged", "another project"):
        place = tmp_path / "tba_min.zip"
        place.write_bytes(b"PK")
        if address == "another project":
            with zipfile.ZipFile(place, "w") as file:
                file.writestr("else/readme.txt", "another one")
    done = find_from(tmp_path, address if ":" in address or " address" in address else "")
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "NotFound: tba_min is not here: put its .zip beside this notebook" in last


def test_five_of_them_need_numpy_torch_and_matplotlib_alone():
    wanted = (ROOT / "requirements" / "requirements.in").read_text()
    names = {name.replace("-", "_") for name in re.findall(r"^([\w-]+)==", wanted, re.M)}
    banned = sorted(names - {"torch", "matplotlib"} | {"vllm", "tokenizers", "safetensors", "huggingface_hub"})
    trees = [ast.parse("\n".join(code_of(source) + lesson.solutions(source))) for source in SOURCES[:5]]
    imports = {ast.unparse(n) for tree in trees for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom))}
    code = f"import sys\nsys.modules |= dict.fromkeys({banned})\n" + "\n".join(sorted(imports))
    assert "transformers" in banned and any("toy" in line for line in imports)
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_nothing_of_jupyter_is_asked_for_by_the_main_job():
    cpu = (ROOT / "requirements/cpu.txt").read_text() + (ROOT / "requirements/gpu.txt").read_text()
    lists = [(ROOT / f"requirements/{name}.txt").read_text() for name in ("notebooks", "lab")]
    pins = [set(re.findall(r"^([\w.-]+)==", text, re.M)) for text in (cpu, *lists)]
    assert not pins[0] & pins[1] and not pins[0] & pins[2] and not pins[1] & pins[2]
    assert {"jupytext", "nbclient", "nbformat", "nbconvert", "ipykernel"} <= pins[1] and "jupyterlab" in pins[2]


def test_the_source_of_a_function_is_shown_without_its_docstring(capsys):
    from loss import tb_residual, vargrad_log_z

    lesson.show(vargrad_log_z, tb_residual)
    said = capsys.readouterr().out
    assert '"""' not in said and said.count("def ") == 2 and "return log_z.unsqueeze(1) + log_pi" in said


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_readme_shows_figures_that_there_are():
    named = re.findall(r"\((docs/notebooks/[\w-]+\.png)\)", (ROOT / "README.md").read_text())
    assert len(named) >= 4 and all((ROOT / name).exists() for name in named)


@all_six
def test_its_pictures_are_those_of_todays_code(source):
    """As many as the source draws, none from older code."""
    from PIL import Image

    drawn = sum(text.count("figures.picture(") for text in code_of(source))
    there = sorted(build.FIGURES.glob(f"{source.stem}-*.png"))
    assert {p.name for p in there} == {f"{source.stem}-{i}.png" for i in range(1, drawn + 1)}, "run `make notebooks`"
    made_from = {p.name: Image.open(p).text.get("made-from") for p in there}
    assert made_from == dict.fromkeys(made_from, build.fingerprint(source)), "run `make notebooks`"


def test_a_fingerprint_is_of_what_code_does(tmp_path):
    source = tmp_path / "1_x.py"
    code = "# %% [markdown]\n# Text.\n\n# %%\nfrom notebooks import toy\n\nx = 1  # one\n"
    source.write_text(code)
    first = build.fingerprint(source)
    source.write_text(code.replace("Text.", "Other text.").replace("# one", "# eins").replace("x = 1", "x  =  1"))
    assert build.fingerprint(source) == first
    source.write_text(code.replace("x = 1", "x = 2"))
    assert build.fingerprint(source) != first
    assert {"notebooks.toy", "loss"} <= build.imported("from notebooks import figures, toy\nfrom loss import tb_loss")
    assert build.essence('def f(x):\n    """Doc."""\n    return x') == build.essence("def f(x):\n    return x  # it")
    assert build.essence("a = b + c") != build.essence("a = b - c") != build.essence("a = c - b")


def test_a_fingerprint_reaches_what_is_imported_by_what_is_imported(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "ROOT", tmp_path)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "toy.py").write_text("from loss import tb_loss\n")
    source = tmp_path / "1_x.py"
    source.write_text("# %%\nfrom notebooks import toy\n")
    found = []
    for text in ("tb_loss = 1\n", "tb_loss = 2\n"):
        (tmp_path / "loss.py").write_text(text)
        found.append(build.fingerprint(source))
    assert found[0] != found[1]


def test_readme_has_their_run_times():
    rows = dict(re.findall(r"^\| `(\d_\w+)` \|.*\| (.+?) \|$", (ROOT / "README.md").read_text(), re.M))
    seconds = json.loads(build.SECONDS.read_text())
    assert list(rows) == NAMES == list(seconds)
    assert rows == {name: f"{s} s" for name, s in seconds.items()}


# --- claims -----------------------------------------------------------------------------------------------------------


def test_a_claim_that_fails_raises_only_where_nothing_was_changed(capsys):
    here = lesson.defaults(SOURCES[0], fast=False)
    lesson.check(1, here, {"water is wet": True})
    assert "holds" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="does not hold: water is dry$"):
        lesson.check(1, here, {"water is wet": True, "water is dry": False})
    name = next(name for name in here if name != "FAST")
    lesson.check(1, here | {name: -1}, {"water is dry": False})
    said = capsys.readouterr().out
    assert "does NOT hold  water is dry" in said and f"you set {name} = -1" in said


# --- with Jupyter, which `make test-slow` installs


@pytest.mark.slow
@all_six
def test_jupytext_makes_the_same_notebook(source):
    assert build.text(build.notebook(source)) == source.with_suffix(".ipynb").read_text()


@pytest.mark.slow
@all_six
def test_it_runs_in_fast_mode_and_its_claims_and_solutions_hold(source):
    """The code of the solutions follows as cells at the end, where a reader would put it."""
    import nbformat

    made = build.quickened(build.notebook(source))
    drawn = sum(text.count("figures.picture(") for text in code_of(source))
    made.cells += [nbformat.v4.new_code_cell(code) for code in lesson.solutions(source)]
    assert len(build.pictures(build.execute(made, build.LIMIT[True]))) == drawn


@pytest.mark.slow
def test_it_runs_alone_beside_an_archive_of_the_project(tmp_path, monkeypatch):
    """As on a hosted service: a notebook, a .zip, and nothing of ours on the path."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    archive(tmp_path / "tba_min-main.zip")
    made = build.execute(build.quickened(build.notebook(SOURCES[0])), build.LIMIT[True], tmp_path)
    assert build.pictures(made) and (tmp_path / "tba_min" / "tba_min-main" / "loss.py").exists()


@pytest.mark.slow
def test_jupyter_shows_one_line_where_there_is_no_project(tmp_path):
    import nbformat

    (cell,) = code_of(SOURCES[0], "setup")
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)], metadata=build.METADATA)
    with pytest.raises(build.NotebookError):
        build.execute(made, 60.0, tmp_path)
    (output,) = [o for o in made.cells[0].outputs if o.output_type == "error"]
    assert len(output.traceback) == 1 and "tba_min is not here" in output.traceback[0]


@pytest.fixture
def same_threads():
    """Notebooks set the number of threads."""
    import torch

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize(
    "source, setting", [pytest.param(s, x, id=f"{s.stem}, {x}") for s in SOURCES for x in lesson.settings(s)]
)
def test_an_exercises_setting_runs_to_the_end(source, setting, same_threads, capsys):
    lesson.play(source, setting=setting)
    assert "you set" in capsys.readouterr().out


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
