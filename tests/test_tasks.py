"""The addition task, a task of one's own, how searchers share prompts out, and the start model's tokenizer."""

import itertools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from conftest import ENDLESS, ROOT

from config import ConfigError
from runtime import child
from runtime.metrics import Board
from tasks import OutOfTime, is_right, limited, load_task
from tasks.addition import Addition, demonstration, without_carries
from tasks.start_model import VOCABULARY, make_model, make_tokenizer


@pytest.fixture(scope="module")
def addition():
    return load_task("addition")


# --- addition -------------------------------------------------------------------------------------------------------


def test_the_splits_are_disjoint_and_hold_every_problem_once(addition):
    assert (len(addition.train), len(addition.validation), len(addition.heldout)) == (8500, 500, 1000)
    every = {f"{a:02d}+{b:02d}=" for a in range(100) for b in range(100)}
    assert set(addition.train) | set(addition.validation) | set(addition.heldout) == every
    assert len(every) == 10_000


def test_the_splits_are_always_the_same(addition):
    """A prompt's id is its place: buffers, checkpoints and figures of different runs must mean the same by it."""
    again = Addition()
    assert again.train == addition.train and again.validation == addition.validation
    assert again.heldout == addition.heldout
    assert addition.train[:2] + addition.validation[:2] + addition.heldout[:2] == FIRST


FIRST = ["30+45=", "55+05=", "98+16=", "30+17=", "80+17=", "98+62="]


def test_the_splits_are_alike(addition):
    """About as many carries in each, or accuracies on them could not be compared."""
    shares = []
    for split in (addition.train, addition.validation, addition.heldout):
        shares.append(np.mean([without_carries(p) == addition.solve(p) for p in split]))
    assert shares == pytest.approx([0.3025] * 3, abs=5 * (0.3 * 0.7 / 500) ** 0.5)  # 55 * 55 of 10,000; 5 std. errors


@pytest.mark.parametrize("prompt, right", [("37+58=", "095"), ("00+00=", "000"), ("99+99=", "198"), ("05+60=", "065")])
def test_only_the_three_right_digits_are_rewarded(addition, prompt, right):
    assert addition.solve(prompt) == right
    assert addition.reward(prompt, right) == 1.0 and is_right(addition, prompt, right)
    wrong = ["", " ", right[1:], right + "0", right + " ", " " + right, right[:-1], right + right, str(int(right) + 1)]
    for answer in wrong:
        assert addition.reward(prompt, answer) == 0.0 and not is_right(addition, prompt, answer), answer


def test_every_problem_is_solved(addition):
    for a, b in itertools.product(range(0, 100, 7), repeat=2):
        assert int(addition.solve(f"{a:02d}+{b:02d}=")) == a + b


@pytest.mark.parametrize(
    "prompt, careless", [("37+58=", "085"), ("99+99=", "088"), ("12+34=", "046"), ("60+50=", "010"), ("05+05=", "000")]
)
def test_a_careless_writer_forgets_every_carry(prompt, careless):
    assert without_carries(prompt) == careless


def test_carelessness_has_the_share_that_was_asked_for(addition):
    rng = np.random.default_rng(0)
    for share in (0.0, 0.7, 1.0):
        lines = [demonstration(addition, rng, share) for _ in range(3000)]
        carrying = [line for line in lines if without_carries(line[:6]) != addition.solve(line[:6])]
        forgot = [line[6:] == without_carries(line[:6]) for line in carrying]
        assert all(line[6:] in (without_carries(line[:6]), addition.solve(line[:6])) for line in lines)
        assert {line[:6] for line in lines} <= set(addition.train)
        assert abs(np.mean(forgot) - share) <= 5 * (share * (1 - share) / len(forgot)) ** 0.5


# --- a task of one's own --------------------------------------------------------------------------------------------

OWN = """
import dataclasses
from pathlib import Path

@dataclasses.dataclass
class Echo:
    train: list
    validation: list
    heldout: list

    def reward(self, prompt, answer):
        return len(answer) / 4

def make_task():
    return Echo(["a", "b"], ["c"], [Path(__file__).name])
"""


def test_a_task_of_ones_own_is_loaded_from_its_file(tmp_path):
    (tmp_path / "echo.py").write_text(OWN)
    task = load_task(f"{tmp_path}/echo.py:make_task")
    assert task.train == ["a", "b"] and task.heldout == ["echo.py"]
    assert task.reward("a", "xx") == 0.5
    # without an is_right of its own, accuracy counts rewards of at least 1
    assert not is_right(task, "a", "xxx") and is_right(task, "a", "xxxx") and is_right(task, "a", "xxxxx")
    assert load_task(f"{tmp_path}/echo.py:make_task") is not task


def test_a_tasks_own_judge_decides_what_is_right(tmp_path):
    method = "    def is_right(self, prompt, answer):\n        return answer == prompt\n\n"
    judge = OWN.replace("def make_task", method + "def make_task")
    (tmp_path / "echo.py").write_text(judge)
    task = load_task(f"{tmp_path}/echo.py:make_task")
    assert is_right(task, "a", "a") and not is_right(task, "a", "xxxx")


# --- a task is real code: its imports, the processes that it starts ---------------------------------------------------

GOOD = "class Task:\n    train = validation = heldout = ['1', '2']\n    def reward(self, prompt, answer):\n        {}\n"


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


LATE = "def x():\n    from helper import x\n    return x()"
BESIDE = "int(Path(__file__).with_name('data.txt').read_text())"
HELPER = {"helper.py": "X = 3"}
REWARDS = {  # the task's folder, what the task imports, and what its reward returns
    "a sibling": (HELPER, "import helper", "helper.X"),
    "a sibling's name": (HELPER, "from helper import X", "X"),
    "a relative import": (HELPER, "from . import helper\nfrom .helper import X", "X * (helper.X == 3)"),
    "a relative import in a package": (HELPER | {"__init__.py": ""}, "from .helper import X", "X"),
    "a package's own name": ({"__init__.py": "X = 3"}, "from . import X", "X"),
    "a package beside": ({"a/__init__.py": "from .deep import X", "a/deep.py": "X = 3"}, "import a", "a.X"),
    "a module in it": ({"a/__init__.py": "", "a/deep.py": "X = 3"}, "import a.deep as d", "d.X"),
    "a folder beside": ({"a/deep.py": "X = 3"}, "from a import deep", "deep.X"),
    "a module like ours": ({"config.py": "X = 3"}, "import config", "config.X"),
    "three like ours": (
        {"loss.py": "X = 1", "buffer.py": "import loss\nX = loss.X", "sync.py": "from buffer import X"},
        "import loss, buffer, sync",
        "loss.X + buffer.X + sync.X",
    ),
    "packages like ours": (
        {"runtime/files.py": "X = 1", "tasks/__init__.py": "Y = 2"},
        "from runtime.files import X\nfrom tasks import Y",
        "X + Y",
    ),
    "one of ours too": (HELPER, "from helper import X\nfrom tasks.arithmetic import evaluate", "X * evaluate('1')"),
    "a module like Python's": (
        {"statistics.py": "X = 3", "helper.py": "import statistics\nX = statistics.X"},
        "from helper import X",
        "X",
    ),
    "one that needs Python's": (
        {"random.py": "import random\nX = 3 + 0 * random.random()"},
        "import random",
        "random.X",
    ),
    "a library's data folder": ({"numpy/data.txt": ""}, "import numpy", "numpy.array([3])[0]"),
    "a late import": ({"config.py": "X = 3"}, "", "__import__('config').X"),
    "two late imports": (
        {"helper.py": "def x():\n    import loss\n    return loss.X", "loss.py": "X = 3"},
        LATE,
        "x()",
    ),
    "a star": (HELPER, "from helper import *", "X"),
    "a circle": ({"helper.py": "import t\ndef x():\n    return t.Y"}, "import helper\nY = 3", "helper.x()"),
    "by its name in a string": (HELPER, "import importlib", "importlib.import_module('helper').X"),
    "a file beside": ({"data.txt": "3"}, "from pathlib import Path", BESIDE),
}


@pytest.mark.parametrize("name", REWARDS)
def test_a_task_imports_what_lies_beside_it(tmp_path, name):
    files, imports, value = REWARDS[name]
    write(tmp_path, files | {"t.py": f"{imports}\n{GOOD.format('return ' + value)}"})
    task = load_task(f"{tmp_path}/t.py:Task")
    assert task.reward("1", "2") == 3
    assert type(pickle.loads(pickle.dumps(task))) is type(task)
    import buffer
    import config
    import loss

    for ours in (buffer, config, loss):
        assert Path(ours.__file__).parent == ROOT


@pytest.mark.parametrize("name", ["metrics", "config", "tasks", "runtime", "random", "torch", "my-task", "a.b", "1st"])
def test_a_task_file_may_have_any_name(tmp_path, name):
    write(
        tmp_path, {f"{name}.py": "import random, json, math\n" + GOOD.format("return math.floor(3 + random.random())")}
    )
    task = load_task(f"{tmp_path}/{name}.py:Task")
    assert task.reward("1", "2") == 3 and type(pickle.loads(pickle.dumps(task))) is type(task)


def test_two_tasks_with_siblings_of_one_name(tmp_path):
    for i in "12":
        write(tmp_path / i, {"helper.py": f"X = {i}", "t.py": "import helper\n" + GOOD.format("return helper.X")})
    one, two = (load_task(f"{tmp_path}/{i}/t.py:Task") for i in "12")
    assert (one.reward("", ""), two.reward("", "")) == (1, 2)


def test_a_file_that_was_changed_is_read_again(tmp_path):
    write(tmp_path, {"helper.py": "X = 1", "t.py": "import helper\n" + GOOD.format("return helper.X")})
    assert load_task(f"{tmp_path}/t.py:Task").reward("", "") == 1
    assert type(load_task(f"{tmp_path}/t.py:Task")) is type(load_task(f"{tmp_path}/t.py:Task"))
    write(tmp_path, {"helper.py": "X = 2"})
    assert load_task(f"{tmp_path}/t.py:Task").reward("", "") == 2
    assert not list(tmp_path.glob("__pycache__"))  # nothing is left in the user's folder


def test_a_tasks_path_may_be_relative_a_link_or_in_the_home_folder(tmp_path, monkeypatch):
    write(tmp_path / "real", {"helper.py": "X = 3", "t.py": "import helper\n" + GOOD.format("return helper.X")})
    (tmp_path / "link.py").symlink_to(tmp_path / "real" / "t.py")
    (tmp_path / "folder").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path / "real")
    monkeypatch.setenv("HOME", str(tmp_path))
    for spec in ("t.py", "./t.py", "../real/t.py", "../link.py", "../folder/t.py", "~/real/t.py", "~/link.py"):
        assert load_task(f"{spec}:Task").reward("", "") == 3, spec


@pytest.mark.parametrize("helper, says", [
    ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module' (HELPER:1)"),
    ("X = 1\ndef f(:", "SyntaxError: "),
    ("Y = 1", "ImportError: cannot import name 'X' from 'helper'"),
    ("raise SystemExit(3)", "SystemExit: 3 (HELPER:1)"),
    ("1 / 0", "ZeroDivisionError: division by zero (HELPER:1)"),
])  # fmt: skip
def test_an_error_in_an_import_is_one_line_with_its_place(tmp_path, helper, says):
    write(tmp_path, {"helper.py": helper, "t.py": "from helper import X\n" + GOOD.format("return X")})
    with pytest.raises(ConfigError) as caught:
        load_task(f"{tmp_path}/t.py:Task")
    text = str(caught.value)
    assert text.startswith(f"--task {tmp_path}/t.py:Task: the file raises ") and "\n" not in text
    assert says.replace("HELPER", f"{tmp_path}/helper.py") in text and "own_" not in text and "helper" in text


WORKERS = """
import multiprocessing, subprocess
from concurrent.futures import ProcessPoolExecutor
from config import score

def by(start):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(start)) as pool:
        return list(pool.map(score, ["ab"]))[0]

def run():
    assert not multiprocessing.current_process().daemon
    process = multiprocessing.get_context("fork").Process(target=score, args=("",))
    process.start()
    process.join()
    words = subprocess.run(["printf", "12"], capture_output=True, text=True).stdout
    return by("fork"), by("spawn"), by("forkserver"), process.exitcode, words
"""
CHILD = """
import multiprocessing, os
from pathlib import Path
from runtime import child
from tasks import load_task

def main(spec):
    child.prepare_process("trainer")
    task = load_task(spec)
    print(task.reward("", ""), flush=True)
    os._exit(0)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=main, args=(SPEC,), daemon=True)
    process.start()
    process.join()
"""


def test_a_reward_may_start_processes(tmp_path):
    """In a child as a run has them; the function lies in a sibling that is named like one of our modules."""
    write(tmp_path, {
        "config.py": "def score(answer):\n    return len(answer)\n",
        "t.py": WORKERS + GOOD.format("return run()"),
        "parent.py": CHILD.replace("SPEC", repr(f"{tmp_path}/t.py:Task")),
    })  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "parent.py")]
    # its own folder would come first there, with config.py in it
    done = subprocess.run(
        command, env=environment | {"PYTHONSAFEPATH": "1"}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "(2, 2, 2, 0, '12')", done.stderr


def test_a_grader_that_waits_for_its_processes_has_its_time_too():
    def waits():
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
            pool.submit(time.sleep, 1000).result()  # OutOfTime, and then the `with` waits for the sleeper

    with pytest.raises(OutOfTime):
        limited(0.3, waits)
    time.sleep(0.5)  # no alarm is left to ring
    for process in multiprocessing.active_children():
        process.kill()


LEAVES = """
import multiprocessing, os, subprocess, time
from pathlib import Path
from buffer import pause

FILE = Path(__file__).with_name("pids")

class Task:
    train = validation = heldout = [f"{i:02d}+{i:02d}=" for i in range(60)]
    started = []

    def reward(self, prompt, answer):
        if not self.started:
            self.started += [multiprocessing.get_context(c).Process(target=pause) for c in ("fork", "spawn")]
            for process in self.started:
                process.start()
            self.started += [subprocess.Popen(["sleep", "1234"], start_new_session=True)]
            command = ["sh", "-c", "sleep 1234 >/dev/null & echo $!"]
            orphan = subprocess.check_output(command, text=True) if DETACHED else os.getpid()
            with FILE.open("a") as file:
                file.write(" ".join(str(p) for p in [*(p.pid for p in self.started), orphan]).strip() + "\\n")
        return sum(map(ord, answer)) % 7 / 6
"""


ENDS = ["the last update", "Ctrl-C", "a killed searcher", "a hanging searcher", "a killed trainer", "a killed parent"]


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_what_a_reward_started_ends_with_the_run(start_job, tiny_folder, tmp_path, end):
    """Forked, spawned, in a session of its own, and detached: while the parent lives none of them escapes."""
    detached = end != "a killed parent"
    text = LEAVES.replace("DETACHED", str(detached))
    write(tmp_path / "own", {"t.py": text, "buffer.py": "import time\ndef pause():\n    time.sleep(1234)\n"})
    steps = ["--steps", 500] if end == "the last update" else ["--checkpoint-every", 0, "--heartbeat-timeout", 4]
    args = ["--task", f"{tmp_path}/own/t.py:Task", "--model", tiny_folder]
    job = start_job(*ENDLESS, *args, *steps)
    file = tmp_path / "own" / "pids"
    job.wait_for(  # both sides
        lambda j: j.family() and len(j.rows()) > 2 and file.exists() and file.read_text().count("\n") > 1
    )
    time.sleep(2.5)  # the parent has noted who is detached
    theirs = [psutil.Process(int(pid)) for pid in file.read_text().split() if psutil.pid_exists(int(pid))]
    assert end == "the last update" or len(theirs) == 8
    family = job.family()
    if end in ("a killed searcher", "a hanging searcher"):
        old = job.pids()["searcher-0"]
        os.kill(old, signal.SIGKILL if end == "a killed searcher" else signal.SIGSTOP)
        job.wait_for(lambda j: j.pids().get("searcher-0", old) != old and file.read_text().count("\n") > 2)
        # those of the trainer live on; the searcher's fourth was let go on purpose, and ends with the run
        job.wait_for(lambda j: sum(map(alive, theirs)) == 5)
        job.interrupt()
    elif end == "a killed trainer":
        os.kill(job.pids()["trainer"], signal.SIGKILL)
    elif end == "a killed parent":
        job.process.kill()
    elif end == "Ctrl-C":
        job.interrupt()
    job.wait(60)
    job.assert_nothing_left([*family, *theirs])
    assert "Traceback" not in job.text and "leaked" not in job.text


STARTS = """
import subprocess

def main(child, file, fails):
    processes = [subprocess.Popen(["sleep", "1234"], start_new_session=new) for new in (False, True)]
    file.write_text(" ".join(str(p.pid) for p in processes))
    if fails:
        raise OSError("as when a connection breaks")
"""


@pytest.mark.parametrize("fails", [False, True])
def test_a_child_that_exits_ends_what_a_task_has_started_by_itself(tmp_path, monkeypatch, fails):
    """Nobody here asks for orphans, as when the parent was killed."""
    write(tmp_path, {"starts.py": STARTS})
    monkeypatch.syspath_prepend(tmp_path)
    ctx = multiprocessing.get_context("spawn")
    ours, theirs = ctx.Pipe()
    args = ("starts", "searcher-0", Board(ctx, 1), theirs, ctx.Queue(), "cpu", tmp_path, (tmp_path / "pids", fails))
    process = ctx.Process(target=child.run, args=args)
    process.start()
    process.join(60)
    started = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert process.exitcode == int(fails) and len(started) == 2
    left = [p for p in started if psutil.pid_exists(p) and alive(psutil.Process(p))]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def alive(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


# --- tokenizer and model --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["made", "saved and loaded"])
def tokenizer(request, tmp_path_factory):
    from runtime.policy import load_tokenizer

    made = make_tokenizer()
    if request.param == "made":
        return made
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(folder)
    return load_tokenizer(str(folder))


def test_text_survives_the_tokenizer(tokenizer, addition):
    texts = ["37+58=095", " 1 2 ", "==", "", "0123456789+-*/=() ?", *addition.heldout[:50]]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.batch_decode([tokenizer.encode(t) for t in texts]) == texts


def test_special_tokens_are_left_out_and_others_are_not(tokenizer):
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    assert (pad, eos) == (VOCABULARY.index("<pad>"), VOCABULARY.index("<eos>")) and pad != eos
    ids = tokenizer.encode("095", add_special_tokens=False)
    assert tokenizer.decode([*ids, eos, pad, pad], skip_special_tokens=True) == "095"
    assert tokenizer.encode("1é\n2", add_special_tokens=False) == tokenizer.encode("1??2", add_special_tokens=False)


def test_every_token_has_a_row_in_the_model(tokenizer):
    config = make_model().config
    assert max(tokenizer.get_vocab().values()) < config.vocab_size
    assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert not config.tie_word_embeddings and config.head_dim % 32 == 0
