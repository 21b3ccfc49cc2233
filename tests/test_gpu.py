"""bench/gpu_check.py: whole on a GPU (`pytest -m gpu`), and the same flow, small, without one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "bench" / "gpu_check.py"


def run(out, *options):
    """The script as a process of its own; its result, what it printed."""
    command = [sys.executable, "-m", "bench.gpu_check", "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(out.read_text()), done.stdout


@pytest.mark.gpu
def test_everything_holds_on_this_machines_gpus(tmp_path):
    result, text = run(tmp_path / "gpu.json")
    assert result["device"] != "cpu" and result["trainer_flops"] > 0 and "all checks hold" in text
    assert result["seconds"] < 360


@pytest.mark.slow
@pytest.mark.parametrize("vllm", [False, True])
def test_the_same_flow_without_a_gpu(tmp_path, vllm):
    """Weights, training, vLLM, the main job: so that the script is not found broken where a GPU is at last."""
    result, text = run(tmp_path / "cpu.json", "--device", "cpu", "--quick", *([] if vllm else ["--no-vllm"]))
    assert result["device"] == "cpu" and result["quick"] and result["trainer_flops"] > 0
    rows = {row["name"]: row for row in result["rows"]}
    checked = {name for name, row in rows.items() if row["ok"]}
    assert "shared-memory, CPU: what is read is what was published" in checked and "all checks hold" in text
    assert rows["main job: updates"]["value"] == 6
    assert any(name.startswith("vLLM") for name in checked) == vllm
    spans = json.loads((tmp_path / "cpu-timeline.json").read_text())["traceEvents"]
    assert {"generate", "forward, backward", "step", "publish"} <= {span["name"] for span in spans}


def test_its_parts_run(capsys):
    from bench import gpu_check

    table = gpu_check.Table()
    assert gpu_check.check_training(table, "cpu", quick=True) > 0
    assert table.failed == []
    table.add("a check", 1.0, "", False)
    assert table.failed == ["a check"] and "FAILED" in capsys.readouterr().out


def test_it_imports_only_torch_transformers_numpy_and_our_own():
    import ast

    names = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(SCRIPT.read_text()))
        for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [])
        + ([node.module] if isinstance(node, ast.ImportFrom) else [])
    }
    own = {p.stem for p in ROOT.glob("*.py")} - {"tba_min"} | {"runtime", "tasks", "bench"}  # tba_min needs tyro, rich
    assert names <= own | set(sys.stdlib_module_names) | {"torch", "transformers", "numpy"}


def test_without_a_gpu_it_says_so(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu_check"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "torch sees no GPU here" in done.stderr
