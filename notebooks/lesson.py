"""The parts of a notebook that a machine reads: its cells, its parameters, its claims, its exercises.

A notebook's source is a `py:percent` file beside it. The cell with the tag `parameters` has the numbers that a reader
may change; the last cell has the notebook's claims. They are about the numbers in the source: `check` raises where one
of them fails there, and only reports where the reader has changed something.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SLOW, QUICK = "FAST = False", "FAST = True"  # in the cell with the tag `parameters`


def sources() -> list[Path]:
    """The notebooks' sources, in order."""
    return sorted(FOLDER.glob("[0-9]_*.py"))


def cells(source: Path) -> Iterator[tuple[str, list[str], str]]:
    """(markdown or code, tags, text) of each cell of a source."""
    for part in re.split(r"^# %%", source.read_text(encoding="utf-8"), flags=re.M)[1:]:
        head, _, text = part.partition("\n")
        (tags,) = re.findall(r"tags=\[(.*?)\]", head) or [""]
        kind = "markdown" if "[markdown]" in head else "code"
        if kind == "markdown":
            text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.split("\n"))
        yield kind, re.findall(r'"(\w+)"', tags), text.strip("\n")


def parameters(source: Path) -> str:
    """The text of the cell that a reader may change."""
    (text,) = [text for _, tags, text in cells(source) if "parameters" in tags]
    if text.count(SLOW) != 1:
        raise ValueError(f"{source.name}: the parameters' cell must have one line {SLOW!r}")
    return text


def defaults(source: Path, fast: bool) -> dict:
    """The parameters as the source has them."""
    found: dict = {}
    exec(parameters(source).replace(SLOW, QUICK if fast else SLOW), {}, found)
    return found


def check(number: int, here: dict, claims: dict[str, bool]) -> None:
    """Print a notebook's claims, and whether each of them holds.

    Args:
        number: of the notebook.
        here: the notebook's names, `globals()`.
        claims: sentence -> whether it holds.

    Raises:
        AssertionError: when a claim fails although no parameter was changed; it names all that fail.
    """
    (source,) = FOLDER.glob(f"{number}_*.py")
    known = defaults(source, here["FAST"])
    changed = [f"{name} = {here[name]!r}" for name, value in known.items() if here[name] != value]
    for sentence, holds in claims.items():
        print("holds         " if holds else "does NOT hold ", sentence)
    if changed:
        print(f"\nNothing is wrong: the claims are about the notebook as it came, and you set {', '.join(changed)}.")
    elif failed := [sentence for sentence, holds in claims.items() if not holds]:
        raise AssertionError("does not hold: " + "; ".join(failed))


def show(*functions) -> None:
    """Print the source of functions without their docstrings: what is taught is what runs."""
    for function in functions:
        lines = inspect.getsource(function).rstrip().split("\n")
        first = ast.parse("\n".join(lines)).body[0].body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            del lines[first.lineno - 1 : first.end_lineno]
        print("\n".join(lines), end="\n\n")


# --- exercises ------------------------------------------------------------------------------------------------------


def exercises(source: Path) -> str:
    """The text behind the heading `Exercises`, solutions included."""
    (found,) = [text.split("## Exercises\n", 1)[1] for _, _, text in cells(source) if "## Exercises\n" in text]
    return found


def settings(source: Path) -> list[str]:
    """Every change of parameters that an exercise asks for: `M = 0.5`, or two in one with a semicolon between."""
    names = "|".join(defaults(source, fast=False))
    return re.findall(rf"`((?:{names}) = [^`]+)`", exercises(source))


def solutions(source: Path) -> list[str]:
    """The code in the solutions, a text for each block, in order: those of the exercises, and any before."""
    text = "\n".join(text for kind, _, text in cells(source) if kind == "markdown")
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


def play(source: Path, fast: bool = True, setting: str = "") -> dict:
    """Run all code of a notebook here, without Jupyter. Returns its names.

    Args:
        setting: changed parameters, as `settings` finds them.
    """
    here = {"__name__": source.stem}
    for kind, tags, text in cells(source):
        if kind == "code":
            if "parameters" in tags:
                text = text.replace(SLOW, QUICK if fast else SLOW) + f"\n{setting}"
            exec(compile(text, source.name, "exec"), here)
    return here
