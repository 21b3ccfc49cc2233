"""The notebooks: made from their sources, executed, written as HTML with outputs and as pictures.

    python -m notebooks.build sync              notebooks/*.py -> notebooks/*.ipynb, without outputs
    python -m notebooks.build run [NAME ...]    execute -> runs/notebooks/*.html, docs/notebooks/*.png, seconds.json
    python -m notebooks.build run --fast        fewer seeds and updates, no HTML, no pictures: as the tests do

The sources are `py:percent` files, read by jupytext. A cell's id is a hash of its content: it changes only when the
cell changes. Each picture knows the code that it was made from (`fingerprint`).
"""

import argparse
import ast
import asyncio
import base64
import hashlib
import io
import json
import re
import sys
import time
from pathlib import Path

from notebooks.lesson import FOLDER, QUICK, SLOW, cells, sources

ROOT = FOLDER.parent
FIGURES = ROOT / "docs" / "notebooks"
SECONDS = FIGURES / "seconds.json"  # of each notebook in full, for README's table
PURE = ("loss", "baselines", "buffer")  # the project's modules that a picture may depend on, beside those in this room
LIMIT = {False: 1800.0, True: 240.0}  # most seconds for a whole notebook: full, fast
MEASURED = ("decoupling", "weights")  # bench/results that the fake clock reads
LEAVES = (str, bytes, int, float, complex)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class NotebookError(RuntimeError):
    """A notebook raised, took too long, or lost its kernel; the text says which and where."""


def notebook(source: Path):
    """The notebook of a source: cells with unique ids and without outputs."""
    import jupytext
    import nbformat

    read = jupytext.read(source, fmt="py:percent")
    made, seen = [], {}
    for cell in read.cells:
        cell_id = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
        seen[cell_id] = seen.get(cell_id, 0) + 1
        if seen[cell_id] > 1:  # the same cell once more
            cell_id += f"-{seen[cell_id]}"
        kind = nbformat.v4.new_code_cell if cell.cell_type == "code" else nbformat.v4.new_markdown_cell
        made.append(kind(cell.source, id=cell_id, metadata=cell.metadata))
    made = nbformat.v4.new_notebook(cells=made, metadata=METADATA)
    nbformat.validate(made)
    return made


def text(made) -> str:
    """The text of the .ipynb file."""
    import nbformat

    return nbformat.writes(made, indent=1, ensure_ascii=False).rstrip("\n") + "\n"


def sync() -> None:
    """Write every .ipynb anew."""
    for source in sources():
        source.with_suffix(".ipynb").write_text(text(notebook(source)), encoding="utf-8")


def quickened(made):
    """The same notebook with `FAST = True` among its parameters."""
    (cell,) = [c for c in made.cells if "parameters" in c.metadata.get("tags", [])]
    if cell.source.count(SLOW) != 1:
        raise NotebookError(f"the parameters' cell must have one line {SLOW!r}")
    cell.source = cell.source.replace(SLOW, QUICK)
    return made


def execute(made, seconds: float, where: Path = FOLDER):
    """Execute a notebook in a kernel of its own, in the folder `where`; returns it with outputs.

    Raises:
        NotebookError: when a cell raises, the kernel dies, or all cells together take longer than `seconds`.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    async def within() -> None:
        folder = {"metadata": {"path": where}}
        client = NotebookClient(made, timeout=seconds, kernel_name="python3", resources=folder)
        await asyncio.wait_for(client.async_execute(), seconds)

    began = time.monotonic()
    try:
        asyncio.run(within())
    except (CellExecutionError, CellTimeoutError, DeadKernelError, TimeoutError) as error:
        # at the limit the kernel is stopped, and nbclient may first report a dead kernel
        kind = "TimeoutError" if time.monotonic() - began >= seconds else type(error).__name__
        raise NotebookError(f"{kind} (limit {seconds:.0f} s): {error}") from error
    return made


def pictures(made) -> list[bytes]:
    """All PNGs among the outputs, in order."""
    data = [o.data for c in made.cells if c.cell_type == "code" for o in c.outputs if "data" in o]
    return [base64.b64decode(d["image/png"]) for d in data if "image/png" in d]


def run(source: Path, fast: bool) -> float:
    """Execute one notebook, write its results, return its seconds."""
    made, began = notebook(source), time.time()
    execute(quickened(made) if fast else made, LIMIT[fast])
    seconds = time.time() - began
    if not fast:
        from nbconvert import HTMLExporter

        html = ROOT / "runs" / "notebooks"
        html.mkdir(parents=True, exist_ok=True)
        FIGURES.mkdir(parents=True, exist_ok=True)
        (html / f"{source.stem}.html").write_text(HTMLExporter().from_notebook_node(made)[0], encoding="utf-8")
        for old in FIGURES.glob(f"{source.stem}-*.png"):
            old.unlink()
        for i, png in enumerate(pictures(made), 1):
            save_small(png, FIGURES / f"{source.stem}-{i}.png", fingerprint(source))
        known = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
        SECONDS.write_text(json.dumps(dict(sorted((known | {source.stem: round(seconds)}).items())), indent=1) + "\n")
    return seconds


def save_small(png: bytes, place: Path, made_from: str) -> None:
    """Keep a figure with 64 colours: a third of the bytes, and it looks the same."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    note = PngInfo()
    note.add_text("made-from", made_from)
    few = Image.open(io.BytesIO(png)).convert("RGB").quantize(64, dither=Image.Dither.NONE)
    few.save(place, optimize=True, pnginfo=note)


# --- from which code? -----------------------------------------------------------------------------------------------


def fingerprint(source: Path) -> str:
    """Of the code that a notebook's pictures come from: its own, this room's modules that it imports, and their data.

    Text, comments and docstrings do not count.
    """
    code = "\n".join(text for kind, _, text in cells(source) if kind == "code")
    parts, names, done = [essence(code)], imported(code), set()
    while names - done:
        name = min(names - done)
        done.add(name)
        text = (ROOT / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8")
        parts.append(f"{name}\n{essence(text)}")
        names |= imported(text)
    data = sorted((FOLDER / "saved").iterdir()) if done & {"notebooks.saved_run", "notebooks.stream"} else []
    data += [ROOT / "bench" / "results" / f"{name}.json" for name in MEASURED if "notebooks.fake_clock" in done]
    parts += [hashlib.sha256(path.read_bytes()).hexdigest() for path in data]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def imported(code: str) -> set[str]:
    """The modules of this room and of PURE that a text imports, without lesson.py, which draws nothing."""
    rooms = re.findall(r"^\s*from notebooks import ([\w, ]+)", code, re.M)
    found = {f"notebooks.{name}" for names in rooms for name in names.split(", ")}
    found |= set(re.findall(r"^\s*from (notebooks\.\w+) import", code, re.M))
    found |= set(re.findall(rf"^\s*from ({'|'.join(PURE)}) import", code, re.M))
    return found - {"notebooks.lesson"}


def essence(code: str) -> str:
    """What a text does, the same in every version of Python: its syntax tree without docstrings."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    out = []
    for node in ast.walk(tree):
        leaves = [f"{name}={value!r}" for name, value in ast.iter_fields(node) if isinstance(value, LEAVES)]
        out.append(" ".join([type(node).__name__, *leaves]))
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["sync", "run"])
    parser.add_argument("names", nargs="*", help="notebooks by the beginning of their names; none: all")
    parser.add_argument("--fast", action="store_true")
    arguments = parser.parse_intermixed_args()
    if arguments.what == "sync":
        return sync()
    for source in sources():
        if not arguments.names or source.stem.startswith(tuple(arguments.names)):
            print(f"{source.stem:24} {run(source, arguments.fast):6.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
