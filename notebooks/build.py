"""The notebooks: made from their sources, executed, written as HTML with outputs and as pictures.

    python -m notebooks.build sync              notebooks/*.py -> notebooks/*.ipynb, without outputs
    python -m notebooks.build run [NAME ...]    execute -> runs/notebooks/*.html and docs/notebooks/*.png
    python -m notebooks.build run --fast        fewer seeds and updates, no HTML, no pictures: as the tests do

The sources are `py:percent` files, read by jupytext. A cell's id is a hash of its content: it changes only when the
cell changes.
"""

import argparse
import asyncio
import base64
import hashlib
import io
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
LIMIT = {False: 1800.0, True: 240.0}  # most seconds for a whole notebook: full, fast
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
SLOW, QUICK = "FAST = False", "FAST = True"  # in the cell with the tag `parameters`


class NotebookError(RuntimeError):
    """A notebook raised, took too long, or lost its kernel; the text says which and where."""


def sources() -> list[Path]:
    """The notebooks' sources, in order."""
    return sorted(FOLDER.glob("[0-9]_*.py"))


def notebook(source: Path):
    """The notebook of a source: cells with unique ids and without outputs."""
    import jupytext
    import nbformat

    read = jupytext.read(source, fmt="py:percent")
    cells, seen = [], {}
    for cell in read.cells:
        cell_id = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
        seen[cell_id] = seen.get(cell_id, 0) + 1
        if seen[cell_id] > 1:  # the same cell once more
            cell_id += f"-{seen[cell_id]}"
        kind = nbformat.v4.new_code_cell if cell.cell_type == "code" else nbformat.v4.new_markdown_cell
        cells.append(kind(cell.source, id=cell_id, metadata=cell.metadata))
    made = nbformat.v4.new_notebook(cells=cells, metadata=METADATA)
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


def execute(made, seconds: float):
    """Execute a notebook in a kernel of its own, in its folder; returns it with outputs.

    Raises:
        NotebookError: when a cell raises, the kernel dies, or all cells together take longer than `seconds`.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    async def within() -> None:
        where = {"metadata": {"path": FOLDER}}
        client = NotebookClient(made, timeout=seconds, kernel_name="python3", resources=where)
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

        html, figures = ROOT / "runs" / "notebooks", ROOT / "docs" / "notebooks"
        html.mkdir(parents=True, exist_ok=True)
        figures.mkdir(parents=True, exist_ok=True)
        (html / f"{source.stem}.html").write_text(HTMLExporter().from_notebook_node(made)[0], encoding="utf-8")
        for old in figures.glob(f"{source.stem}-*.png"):
            old.unlink()
        for i, png in enumerate(pictures(made), 1):
            small(png).save(figures / f"{source.stem}-{i}.png", optimize=True)
    return seconds


def small(png: bytes):
    """A figure with 64 colours: a third of the bytes, and it looks the same."""
    from PIL import Image

    return Image.open(io.BytesIO(png)).convert("RGB").quantize(64, dither=Image.Dither.NONE)


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
