"""Saving: whatever a library, the disk or another process does, the weights survive and the run goes on."""

import json
import shutil

import pytest
import torch
from conftest import SHORT
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from runtime import checkpoint
from runtime.checkpoint import Policy
from runtime.files import ConfigError
from runtime.policy import load_policy, load_tokenizer

GENERATION = {  # transformers loads each of these, and refuses to save it
    "temperature": {"temperature": 0.6},
    "top_p and top_k": {"top_p": 0.9, "top_k": 20, "do_sample": False},
    "beams": {"num_beams": 1, "length_penalty": 2.0, "early_stopping": True},
    "several things": {"temperature": 0.6, "typical_p": 0.5, "num_beam_groups": 2},
}


def state(step=3):
    return {"step": step, "weights": torch.ones(3)}, None, {"step": step}


def same_weights(model, folder) -> bool:
    saved = load_policy(str(folder)).state_dict()
    return all(torch.equal(t, saved[name]) for name, t in model.state_dict().items())


def with_generation_config(source, folder, change):
    shutil.copytree(source, folder)
    place = folder / "generation_config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | change))
    return place


@pytest.mark.parametrize("name", GENERATION)
def test_a_generation_config_that_transformers_does_not_save_is_kept_as_it_was(tiny_folder, tmp_path, name):
    given = with_generation_config(tiny_folder, tmp_path / "m", GENERATION[name]).read_text()
    model = load_policy(str(tmp_path / "m"))
    place, problem = checkpoint.save(tmp_path / "c", 3, 2, Policy(model, tmp_path / "m"), state)
    assert problem is None and (place / "generation_config.json").read_text() == given
    assert same_weights(model, place) and load_tokenizer(str(place)).encode("1+1=") == [3, 12, 3, 16]


@pytest.mark.parametrize(
    "error", [ValueError("no\nway"), RuntimeError("shared tensors"), KeyError("x"), TypeError("y")]
)
@pytest.mark.parametrize("tied", [False, True])
def test_what_transformers_cannot_save_is_saved_without_it(tiny_folder, tmp_path, monkeypatch, caplog, error, tied):
    config = load_policy(str(tiny_folder)).config
    config.tie_word_embeddings = tied
    shutil.copytree(tiny_folder, tmp_path / "m")
    LlamaForCausalLM(config).save_pretrained(tmp_path / "m")
    model = load_policy(str(tmp_path / "m"))

    def fail(folder):
        (folder / "model-00001.safetensors").write_text("half")
        raise error

    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    monkeypatch.setattr(model, "save_pretrained", fail)
    place, problem = checkpoint.save(tmp_path / "c", 3, 2, Policy(model, tmp_path / "m"), state)
    assert problem is None and "could not save the model" in caplog.text
    checkpoint.check(place)
    assert same_weights(model, place) and checkpoint.restore(place)[0]["step"] == 3
    names = {"lm_head.weight", "model.embed_tokens.weight"} & set(load_file(place / "model.safetensors"))
    assert len(names) == (1 if tied else 2)  # a shared tensor is written once


def gone():
    raise EOFError


def unpicklable():
    return {"step": 3, "f": lambda: 0}, None, {"step": 3}


def no_json():
    return {"step": 3}, None, {"step": 3, "x": torch.ones(1)}


@pytest.mark.parametrize("broken", [gone, unpicklable, no_json])
def test_where_no_checkpoint_can_be_written_the_weights_are_kept(tiny_folder, tmp_path, broken):
    model, root = load_policy(str(tiny_folder)), tmp_path / "c"
    policy = Policy(model, tiny_folder)
    before, _ = checkpoint.save(root, 1, 2, policy, state)
    for step in (3, 6):
        place, problem = checkpoint.save(root, step, 2, policy, broken)
        assert place is None and f"the weights alone are kept in {root / f'weights-{step}'}" in problem
        assert "\n" not in problem
    assert sorted(p.name for p in root.iterdir()) == ["step-1", "weights-6"]  # nothing else, no half folder
    assert checkpoint.all_in(root) == [before] and same_weights(model, root / "weights-6")
    if broken is not gone:
        with pytest.raises(ConfigError, match="no checkpoint can be written"):
            checkpoint.rehearse(root, policy, broken)
    assert sorted(p.name for p in root.iterdir()) == ["step-1", "weights-6"]


def test_where_nothing_can_be_written_it_is_said(tiny_folder, tmp_path):
    (tmp_path / "c").write_text("a file")
    policy = Policy(load_policy(str(tiny_folder)), tiny_folder)
    place, problem = checkpoint.save(tmp_path / "c", 3, 2, policy, state)
    assert place is None and "nor can the weights alone be written" in problem and "\n" not in problem
    with pytest.raises(ConfigError, match="no checkpoint can be written"):
        checkpoint.rehearse(tmp_path / "c", policy, state)


def test_a_model_that_is_another_runs_checkpoint_leaves_none_of_its_bookkeeping(finished, tmp_path):
    source = checkpoint.last_in(finished)
    policy = Policy(load_policy(str(source)), source)
    place, _ = checkpoint.save(tmp_path, 0, 2, policy, lambda: state(0))
    assert not (place / "buffer.json").exists() and json.loads((place / "progress.json").read_text()) == {"step": 0}
    checkpoint.check(place)


@pytest.mark.slow
def test_a_run_with_a_model_that_transformers_does_not_save_ends_well_and_resumes(start_job, tiny_folder, tmp_path):
    given = with_generation_config(tiny_folder, tmp_path / "m", GENERATION["temperature"])
    job = start_job(*SHORT, "--engine", "hf", "--model", tmp_path / "m")
    assert job.wait() == 0, job.text
    (place,) = checkpoint.all_in(job.out / "checkpoints")
    assert (place / "generation_config.json").read_text() == given.read_text()
    again = start_job("--steps", 14, "--decay-steps", 0, resume=job.out)
    assert again.wait() == 0 and again.summary()["steps"] == 14, again.text


def test_a_checkpoint_that_cannot_be_written_is_told_before_the_first_update(start_job, tiny_folder, tmp_path):
    (tmp_path / "run0").mkdir()
    (tmp_path / "run0" / "checkpoints").write_text("a file")
    job = start_job(*SHORT, "--engine", "hf", "--model", tiny_folder)
    assert job.wait() == 1 and "no checkpoint can be written in" in job.text, job.text
    assert not job.rows() and "Traceback" not in job.text
    job.assert_nothing_left()
