"""What a run would do: --dry-run, and what is refused because it can't fit."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import config
from config import Config, ConfigError, resolve
from runtime import placement, preview
from runtime.placement import Gpu

ROOT = Path(__file__).parents[1]
LLAMA_1B = {"num_hidden_layers": 22, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32}
LLAMA_1B |= {"num_key_value_heads": 4, "vocab_size": 32_000}


@pytest.fixture
def folder(tmp_path):
    """A model of a billion parameters, as far as its configuration tells."""
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(LLAMA_1B))
    header = json.dumps({"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
    (place / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return place


@pytest.fixture
def machine(monkeypatch):
    """machine(GPUs, GiB of each): what nvidia-smi and the device files tell; no mask."""

    def make(gpus, gib):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(placement.glob, "glob", lambda _: [f"/dev/nvidia{i}" for i in range(gpus)])
        smi = [Gpu(i, f"GPU-{i}", "a GPU", int(gib * 2**30)) for i in range(gpus)]
        monkeypatch.setattr(preview, "installed_gpus", lambda: smi)
        monkeypatch.setattr(config, "installed_vllm", lambda: {"vllm"})
        monkeypatch.setattr(preview, "MEASURED", Path("/nowhere"))

    return make


def resolved(folder, **options):
    few = {"in_flight": 64, "eval_prompts": 64, "max_new_tokens": 256}
    return resolve(Config(model=str(folder), **(few | options)))


def test_a_dry_run_starts_and_writes_nothing(tmp_path):
    """On a machine with less GPUs than the plan has: those are of unknown size, and it says so."""
    command = [sys.executable, str(ROOT / "tba_min.py"), "--gpus", "2", "--dry-run"]
    place = tmp_path / "here"
    place.mkdir()
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "trainer: GPU 0 (CUDA_VISIBLE_DEVICES=0)"
    assert lines[1] == "searcher-0: GPU 1 (CUDA_VISIBLE_DEVICES=1,0)"
    assert "this machine shows 0 GPU(s): the plan assumes 2 of unknown size" in lines
    assert list(place.iterdir()) == [] and done.stderr == ""


def test_plan_memory_and_work_are_told(folder, machine):
    machine(4, 80)
    lines = preview.dry_run(resolved(folder, gpus=4, dry_run=True))
    text = "\n".join(lines)
    assert [line.split(":")[0] for line in lines[:4]] == ["trainer", "searcher-0", "searcher-1", "searcher-2"]
    assert "unknown size" not in text and "not installed" not in text
    assert "trainer: about " in text and "CUDA contexts of 4 process(es) 2.0" in text
    assert "vLLM: 0." in text and " of 80.0 GiB" in text
    # 1.1 billion parameters, 6 FLOP each and token
    assert "256 answers of 258 tokens with their prompts, 6.6 GFLOP per token" in text
    assert "throughput: not estimated" in text


def test_throughput_is_what_was_measured_on_a_gpu(folder, machine, tmp_path, monkeypatch):
    machine(2, 80)
    c = resolved(folder, gpus=2, dry_run=True)
    place = tmp_path / "gpu_check.json"
    monkeypatch.setattr(preview, "MEASURED", place)
    place.write_text(json.dumps({"device": "cpu", "trainer_flops": 1e9}))
    assert "throughput: not estimated" in preview.dry_run(c)[-1]
    place.write_text(json.dumps({"device": "NVIDIA X", "trainer_flops": 6.6e13}))
    last = preview.dry_run(c)[-1]
    assert "measured on NVIDIA X" in last and "66 TFLOP/s" in last
    tokens = float(last.split(" tokens/s")[0].split()[-1].replace(",", ""))
    assert tokens == pytest.approx(1e4, rel=0.01)
    slower = preview.dry_run(dataclasses.replace(c, gradient_checkpointing=True))[-1]
    assert float(slower.split(" tokens/s")[0].split()[-1].replace(",", "")) == pytest.approx(7.5e3, rel=0.01)


def test_a_model_that_can_not_fit_is_refused_before_anything_starts(folder, machine, capsys, tmp_path, monkeypatch):
    import tba_min

    monkeypatch.chdir(tmp_path)
    machine(2, 24)
    before = sorted(tmp_path.iterdir())
    assert tba_min.main(["--gpus", "2", "--model", str(folder), "--max-new-tokens", "256"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("tba_min: --gpus 2: the trainer needs about ") and " GiB of 24.0: use --" in text
    assert text.count("\n") == 1 and sorted(tmp_path.iterdir()) == before
    with pytest.raises(ConfigError, match="the trainer needs about"):
        preview.dry_run(resolved(folder, gpus=2, dry_run=True))


def test_one_that_fits_or_whose_gpu_is_not_known_is_not(folder, machine, monkeypatch):
    machine(2, 80)
    preview.check(resolved(folder, gpus=2))
    machine(2, 24)
    monkeypatch.setattr(preview, "installed_gpus", list)
    preview.check(resolved(folder, gpus=2))
    preview.check(resolved(folder, gpus=0, engine="hf"))


def test_only_a_dry_run_may_ask_for_more_gpus_than_there_are(machine, folder):
    machine(1, 80)
    with pytest.raises(ConfigError, match="--gpus 3: this machine shows 1"):
        resolved(folder, gpus=3)
    c = resolved(folder, gpus=3, dry_run=True)
    assert c.searchers == 2 and len(preview.places(c)) == 3


def test_a_hub_names_configuration_is_all_that_a_dry_run_downloads(monkeypatch, tmp_path):
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns))
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_1B))
        return str(tmp_path)

    hub = type(sys)("huggingface_hub")
    hub.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    c = resolve(Config(model="somebody/something", gpus=2, dry_run=True))
    assert asked == [("somebody/something", ["config.json"])]
    assert any(line.startswith("trainer: about ") for line in preview.dry_run(c))


def test_the_parents_plan_is_that_of_the_preview(machine, folder, tmp_path, monkeypatch):
    """What the children get: the environment from the plan, and vLLM's share from the estimate."""
    import tba_min

    machine(2, 80)
    run = tba_min.Run(resolved(folder, gpus=2, out=str(tmp_path / "run")))
    monkeypatch.setattr(run, "_serve_buffer", lambda: None)
    started = {}

    class Children:
        def spawn(self, name, module, variables, device, args):
            started[name] = (variables["CUDA_VISIBLE_DEVICES"], device, args[0].vllm_memory)

    run.children = Children()
    run._start(str(folder))
    share = preview.fit(run.config, folder)[0]
    assert started == {"searcher-0": ("1,0", "cuda", share), "trainer": ("0", "cuda", share)} and 0 < share <= 0.85
    assert placement.describe(run.places)[0] == "trainer: GPU 0 (CUDA_VISIBLE_DEVICES=0)"
    run.screen.close()
