"""Make requirements-cpu.txt: resolve requirements.in with pip, then leave out what a text model on a CPU never touches.

    python tools/lock.py        (with the Python version that is to be used; needs the network)

Left out are: torchvision, torchaudio and torchcodec (PyPI's builds do not load beside the CPU build of torch, and then
every import of transformers fails), compilers of kernels (triton, numba, llvmlite, intel-openmp), and what serves HTTP
endpoints, tools, images and telemetry exports. tests/test_setup.py checks that what is left imports and runs.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
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
# Pinned; made by `make lock` (tools/lock.py) from requirements.in. Install with `pip install --no-deps -r`: the list is
# complete for text models on a CPU, and leaves out what vLLM's metadata asks for besides (see tools/lock.py).
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        subprocess.run([*command, "--report", report, "-r", ROOT / "requirements.in"], check=True)
        packages = [i["metadata"] for i in json.loads(report.read_text())["install"]]
    rows = sorted((p["name"].lower(), p["version"]) for p in packages)
    kept = [f"{name}=={version}" for name, version in rows if name not in LEFT_OUT]
    (ROOT / "requirements-cpu.txt").write_text(HEAD + "\n".join(kept) + "\n")
    print(f"requirements-cpu.txt: {len(kept)} packages, {len(rows) - len(kept)} left out")


if __name__ == "__main__":
    main()
