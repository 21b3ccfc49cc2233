"""Do the tests catch what students get wrong? Each mutant is put into a copy of the modules, and a test must fail.

In this process, for torch and transformers take seconds to import: the copy's modules stand in for the real ones while
test_loss.py, test_baselines.py and test_learner.py are imported afresh and their quick tests (those without
parameters, and not marked slow) are called until one fails.
"""

import importlib
import inspect
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from mutants import EQUIVALENTS, MUTANTS, VARIANTS, Mutant

TESTS = Path(__file__).parent
ROOT = TESTS.parent
TRUTHS = {
    "loss.py": ["test_loss", "test_learner"],
    "baselines.py": ["test_baselines"],
    "trainer.py": ["test_learner"],
    "runtime/policy.py": ["test_learner"],
}


def copy_with(mutant: Mutant | None, folder: Path) -> None:
    """Copy the modules and the tests of truth to `folder`, with the mutant's patch."""
    for source in [*ROOT.glob("*.py"), *(TESTS / f"{name}.py" for name in TRUTHS["loss.py"] + TRUTHS["baselines.py"])]:
        shutil.copy(source, folder)
    for room in ("runtime", "tasks"):
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    if mutant is not None:
        text = (folder / mutant.file).read_text()
        for old, new in mutant.patch:
            assert text.count(old) == 1, (
                f"{mutant.name}: {mutant.file} has this {text.count(old)} times, not once: {old}"
            )
            text = text.replace(old, new)
        (folder / mutant.file).write_text(text)


@contextmanager
def modules_of(folder: Path) -> Iterator[None]:
    """The folder's modules stand in for those of the same names, which come back afterwards."""
    rooms = {path.stem for path in folder.iterdir()}
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in rooms}
    finders = list(sys.meta_path)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] in rooms]:
            del sys.modules[name]
        sys.modules.update(kept)
        sys.meta_path[:] = finders
        importlib.invalidate_caches()


def quick_tests(module: ModuleType) -> list:
    """The test functions that can be called without arguments."""
    functions = [f for name, f in vars(module).items() if name.startswith("test_")]
    marks = {f: [mark.name for mark in getattr(f, "pytestmark", [])] for f in functions}
    return [f for f in functions if not marks[f] and not inspect.signature(f).parameters]


def first_red(mutant: Mutant | None, folder: Path, modules: list[str]) -> str | None:
    """The name of the first test that fails with an AssertionError, or None when all are green."""
    copy_with(mutant, folder)
    with modules_of(folder):
        for name in modules:
            module = importlib.import_module(name)
            assert Path(module.__file__).parent == folder
            tests = quick_tests(module)
            assert len(tests) >= 4
            for test in tests:
                try:
                    test()
                except AssertionError:
                    return f"{name}.{test.__name__}"
    return None


@pytest.mark.parametrize("mutant", MUTANTS + VARIANTS, ids=lambda m: m.name)
def test_a_wrong_answer_is_caught(mutant, tmp_path):
    red = first_red(mutant, tmp_path, TRUTHS[mutant.file])
    print(f"{mutant.name}: {red}")  # pytest -rP shows who caught whom
    assert red is not None, f"no test noticed: {mutant.name}"


SAME = [None, EQUIVALENTS[0], *(pytest.param(mutant, marks=pytest.mark.slow) for mutant in EQUIVALENTS[1:])]


@pytest.mark.parametrize("mutant", SAME, ids=lambda m: m.name if m else "no change")
def test_a_right_answer_is_not(mutant, tmp_path):
    modules = TRUTHS[mutant.file] if mutant else TRUTHS["loss.py"] + TRUTHS["baselines.py"]
    assert first_red(mutant, tmp_path, modules) is None


def test_there_are_thirteen():
    assert len({mutant.name for mutant in MUTANTS}) == 13


def test_a_patch_that_no_longer_fits_says_so(tmp_path):
    with pytest.raises(AssertionError, match="0 times, not once: gone"):
        copy_with(Mutant("stale", "loss.py", [("gone", "")]), tmp_path)
