"""Make requirements/cpu.txt: resolve requirements.in with pip, then leave out what a text model on a CPU never touches.

    python requirements/lock.py        (with the Python version that is to be used; needs the network)

Then requirements/notebooks.txt and requirements/lab.txt anew: what is asked for by name stands at their top and stays;
below it comes what that needs and the lists before it do not have, at versions that suit them.

Left out are: torchvision, torchaudio and torchcodec (PyPI's builds do not load beside the CPU build of torch, and then
every import of transformers fails), compilers of kernels (triton, numba, llvmlite, intel-openmp), and what serves HTTP
endpoints, tools, images and telemetry exports. tests/test_setup.py checks that what is left imports and runs.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LEFT_OUT = set(
    """
    torchvision torchaudio torchcodec triton numba llvmlite intel-openmp intel-cmplr-lib-ur
    mistral-common mistral_common pycountry anthropic opencv-python-headless sentry-sdk supervisor cryptography
    outlines_core mcp mcp-types blake3 lm-format-enforcer depyf watchfiles astor dill interegular
    fastapi-cli fastapi-cloud-cli fastar rignore rich-toolkit detect-installer agent-detector sse-starlette pyjwt
    hf-xet email-validator dnspython grpcio opentelemetry-exporter-otlp opentelemetry-exporter-otlp-proto-grpc
    """.split()
)
HEAD = """\
# Pinned; made by `make lock` from requirements.in. Install with `pip install --no-deps -r`: the list is
# complete for text models on a CPU, and leaves out what vLLM's metadata asks for besides (see requirements/lock.py).
"""
NEEDED = "# what they need:"


def resolve(*arguments: str | Path) -> list[tuple[str, str]]:
    """Name and version of all that pip would install into an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        subprocess.run([*command, "--report", report, *arguments], check=True)
        packages = [i["metadata"] for i in json.loads(report.read_text())["install"]]
    return sorted((p["name"].lower(), p["version"]) for p in packages)


def normal(name: str) -> str:
    """A package's name as pip compares it."""
    return re.sub("[-_.]+", "-", name).lower()


def lock_more(path: Path, before: list[Path]) -> None:
    """Write anew what stands under NEEDED in a list that is installed after others."""
    asked = path.read_text().split(NEEDED)[0]
    there = {normal(name) for p in before for name in re.findall(r"^([\w.-]+)==", p.read_text(), re.M)}
    names = {normal(name) for name in re.findall(r"^([\w.-]+)==", asked, re.M)}
    limits = [argument for p in before for argument in ("-c", p)]
    more = [f"{n}=={v}" for n, v in resolve("-r", path, *limits) if normal(n) not in there | names]
    path.write_text(asked + "\n".join([NEEDED, *more]) + "\n")
    print(f"{path.name}: {len(names)} asked for, {len(more)} needed")


def main() -> None:
    rows = resolve("-r", HERE / "requirements.in")
    kept = [f"{name}=={version}" for name, version in rows if name not in LEFT_OUT]
    (HERE / "cpu.txt").write_text(HEAD + "\n".join(kept) + "\n")
    print(f"cpu.txt: {len(kept)} packages, {len(rows) - len(kept)} left out")
    before = [HERE / "cpu.txt"]
    for name in ("notebooks.txt", "lab.txt"):
        lock_more(HERE / name, before)
        before.append(HERE / name)


if __name__ == "__main__":
    main()
