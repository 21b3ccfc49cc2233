"""What a run refuses to trust, and the small parts that keep it alive: heartbeats, checkpoints, graders' limits."""

import json
import multiprocessing
import os
import pickle
import stat
import threading
import time
from multiprocessing.connection import Client
from multiprocessing.managers import RemoteError

import numpy as np
import pytest
import torch

from config import Config, ConfigError
from runtime import checkpoint
from runtime.child import LONG_WORK, Child, prepare_buffer
from runtime.engine import Answer
from runtime.files import keep_rows_before, read_jsonl
from runtime.loading import Parts
from runtime.metrics import Board, Clock
from runtime.policy import check_prompts, load_policy
from runtime.served_buffer import serve
from runtime.supervisor import Heartbeats
from runtime.weights import Publisher, ask_for
from tasks import OutOfTime, is_right, limited, reward_of

# --- who may talk, and what is believed ---------------------------------------------------------------------------


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_the_manager_listens_locally_and_only_to_its_own():
    ctx = multiprocessing.get_context("spawn")
    options = {"capacity": 10, "per_prompt": 10, "recent_groups": None, "dedup": False, "seed": 0}
    manager, proxy = serve(ctx, prepare_buffer, (Board(ctx, 0),), **options)
    try:
        assert stat.S_ISSOCK(os.stat(manager.address).st_mode)  # a local socket, no port
        assert stat.S_IMODE(os.stat(os.path.dirname(manager.address)).st_mode) == 0o700
        assert len(multiprocessing.current_process().authkey) >= 32
        with pytest.raises(multiprocessing.AuthenticationError):
            Client(manager.address, authkey=b"a guess")
        assert proxy.stats()["stored"] == 0  # and it still serves
        with pytest.raises(RemoteError, match="not in exposed"):
            proxy._callmethod("__reduce__")  # nothing but what is exposed
    finally:
        manager.shutdown()


def test_the_weight_handle_goes_to_all_who_know_the_key_again_and_again(tmp_path):
    weights = Publisher([("a", torch.arange(3.0))], 7, "shared-memory")
    address = str(tmp_path / "weights")
    weights.hand_out(address)
    for _ in range(3):
        got = ask_for(address, lambda: True)
        version, ((name, tensor),) = got.read()
        assert (version, name, tensor.tolist()) == (7, "a", [0.0, 1.0, 2.0])
        with pytest.raises((multiprocessing.AuthenticationError, ConnectionError, EOFError)):
            Client(address, authkey=b"a guess")
    weights.publish([("a", torch.ones(3))], 8)
    assert got.read()[1][0][1].tolist() == [1.0, 1.0, 1.0]  # the same memory


def test_who_waits_for_the_handle_can_be_stopped(tmp_path):
    asked = iter([True, True, False])
    assert ask_for(str(tmp_path / "nobody"), lambda: next(asked)) is None


def test_a_checkpoint_is_not_unpickled(tmp_path):
    torch.save({"learner": Bomb(tmp_path / "exploded")}, tmp_path / "trainer.pt")
    with pytest.raises(pickle.UnpicklingError):
        checkpoint.restore(tmp_path)
    (tmp_path / "buffer.json").write_text('{"recent": []}')
    bomb = np.empty(1, object)
    bomb[0] = Bomb(tmp_path / "exploded")
    np.savez(tmp_path / "buffer.npz", **dict.fromkeys(checkpoint.ARRAYS, bomb))
    with pytest.raises(ValueError, match="allow_pickle"):
        checkpoint.load_buffer(tmp_path)
    assert not (tmp_path / "exploded").exists()


def test_a_models_code_is_not_run_unasked(tmp_path):
    code = f"import os\nos.mkdir({str(tmp_path / 'exploded')!r})\n"
    for name in ("configuration_evil", "modeling_evil"):
        (tmp_path / f"{name}.py").write_text(code)
    auto = {"AutoConfig": "configuration_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto}))
    with pytest.raises(ValueError):
        load_policy(str(tmp_path))
    assert not (tmp_path / "exploded").exists()


# --- heartbeats ---------------------------------------------------------------------------------------------------


def test_a_process_is_late_after_the_timeout_and_not_before():
    now = [100.0]
    beats = Heartbeats(5, lambda: now[0])
    for second in range(20):
        now[0] = 100 + second
        late = beats.late({"a": second, "b": min(second, 8), "c": 0})
        assert ("a" in late, "b" in late, "c" in late) == (False, second > 13, second > 5)


def test_time_in_which_the_watcher_stood_still_counts_for_nobody():
    now = [0.0]
    beats = Heartbeats(5, lambda: now[0])
    assert beats.late({"a": 1}) == []
    now[0] = 1000  # Ctrl-Z, or a suspended machine
    assert beats.late({"a": 1}) == []
    for tenth in range(49):
        now[0] = 1000 + tenth / 10
        assert beats.late({"a": 1}) == []
    now[0] = 1005.5
    assert beats.late({"a": 1}) == ["a"]


def test_a_new_incarnation_starts_afresh():
    now = [0.0]
    beats = Heartbeats(5, lambda: now[0])
    beats.late({"a": 1})
    for t in range(1, 5):
        now[0] = t
        beats.late({"b": t})  # a is gone
    now[0] = 5.5
    assert beats.late({"a": 1, "b": 6}) == []


def test_work_in_progress_is_a_sign_of_life_up_to_its_own_limit():
    """The main thread is inside the engine, say, and can't beat; while it waits for others nobody beats for it."""
    board = Board(multiprocessing.get_context("spawn"), 1)
    child = Child("searcher-0", board, None, "cpu", time.time(), step_timeout=3.0)

    def beats(name: str) -> bool:
        with child.clock.span(name), child.clock.span("inner"):
            before = board.get(Board.SEARCHERS, "alive")
            time.sleep(0.7)  # the thread beats every half second
            return board.get(Board.SEARCHERS, "alive") > before

    assert beats("load")
    started = board.get(Board.SEARCHERS, "alive")
    time.sleep(0.7)
    assert board.get(Board.SEARCHERS, "alive") > started  # it has no loop yet
    child.beat()
    assert [beats(name) for name in ("generate", "inner", "wait for sync", "hand over")] == [True, False, False, False]
    assert "reward" in LONG_WORK and not any(name.startswith("wait") for name in LONG_WORK)
    with child.clock.span("generate"):
        time.sleep(3.1)
        assert not beats("inner")  # such a long step is a hang


# --- checkpoints --------------------------------------------------------------------------------------------------


def fill(folder):
    (folder / "x").write_text("x" * 100)
    (folder / "sub").mkdir()
    (folder / "sub" / "y").write_bytes(b"\0" * 1000)


def test_the_last_ones_are_kept_and_checked(tmp_path):
    root = tmp_path / "checkpoints"
    for step in (5, 10, 100, 20):
        checkpoint.write(root, step, fill, keep=3)
    assert [p.name for p in checkpoint.all_in(root)] == ["step-10", "step-20", "step-100"]
    assert checkpoint.last_in(tmp_path).name == "step-100"
    checkpoint.check(root / "step-20")


def test_a_failed_write_leaves_the_one_before(tmp_path):
    checkpoint.write(tmp_path / "checkpoints", 1, fill, keep=1)

    def full(folder):
        fill(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        checkpoint.write(tmp_path / "checkpoints", 2, full, keep=1)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-1"]
    checkpoint.check(checkpoint.last_in(tmp_path))


def test_what_a_killed_writer_left_is_cleared(tmp_path):
    (tmp_path / ".writing-step-3").mkdir()
    (tmp_path / ".writing-step-3" / "x").write_text("half")
    checkpoint.write(tmp_path, 4, fill, keep=2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-4"]


def test_what_came_after_a_checkpoint_is_set_aside_once_the_run_goes_on_from_it(tmp_path):
    root = tmp_path / "checkpoints"
    for step in (5, 10, 20):
        checkpoint.write(root, step, fill, keep=9)
    (tmp_path / "metrics.jsonl").write_text("rows")
    assert checkpoint.set_aside_after(root / "step-20") is None
    assert checkpoint.last_in(root / "step-5") == root / "step-5"
    aside = checkpoint.set_aside_after(root / "step-5")
    assert sorted(p.name for p in aside.iterdir()) == ["metrics.jsonl", "step-10", "step-20"]
    assert checkpoint.last_in(tmp_path) == root / "step-5"  # a later resume
    checkpoint.write(root, 10, fill, keep=1)  # another step-10, and the others are not counted
    assert sorted(p.name for p in root.iterdir()) == ["aside-1", "step-10"]
    checkpoint.write(root, 30, fill, keep=9)
    assert checkpoint.set_aside_after(root / "step-10").name == "aside-2"
    checkpoint.check(aside / "step-10")


def test_a_run_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no checkpoint in it"):
        checkpoint.last_in(tmp_path)


def test_rows_after_a_checkpoint_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    keep_rows_before(path, 0)
    assert path.read_text() == ""
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in range(5)) + '{"step": 5, "lo')
    keep_rows_before(path, 3)
    assert [r["step"] for r in read_jsonl(path)] == [0, 1, 2]


# --- graders ------------------------------------------------------------------------------------------------------


class Task:
    def __init__(self, reward):
        self.reward = reward


def forever(*_):
    while True:
        try:
            time.sleep(10)
        except Exception:  # a grader that swallows all it can
            continue


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_a_reward_that_is_no_number_is_none(value):
    assert reward_of(Task(lambda p, a: value), "p", "a") == (0.0, f"is {value}")
    assert reward_of(Task(lambda p, a: -2.5), "p", "a") == (-2.5, None)


def test_a_grader_has_its_time():
    reward, problem = reward_of(Task(forever), "p", "a", 0.05)
    assert reward == 0 and "more than 0.05 s" in problem
    assert is_right(Task(forever), "p", "a", 0.05) is False
    catastrophic = "import re; re.fullmatch('(a+)+b', 'a' * 40)"
    with pytest.raises(OutOfTime):
        limited(0.1, exec, catastrophic)
    time.sleep(0.1)  # no alarm is left to ring
    assert limited(0.05, lambda: 3) == 3
    time.sleep(0.1)


def test_an_error_says_what_was_judged():
    with pytest.raises(KeyError) as caught:
        reward_of(Task(lambda p, a: {}[p]), "2+2=", "5", 1)
    assert caught.value.__notes__ == ["in grading prompt '2+2=', answer '5'"]


def test_in_a_thread_there_is_no_limit():
    got = []
    thread = threading.Thread(target=lambda: got.append(limited(0.01, lambda: time.sleep(0.1) or 3)))
    thread.start()
    thread.join()
    assert got == [3]


def test_prompts_that_a_model_cannot_take(tiny_folder):
    model = load_policy(tiny_folder)  # 64 positions
    check_prompts(["a", "b"], [1, 56], model, 8)
    with pytest.raises(ConfigError, match=r"'b' has 57 tokens; .*--max-new-tokens 8.*the 64"):
        check_prompts(["a", "b"], [1, 57], model, 8)
    with pytest.raises(ConfigError, match="'' has no token"):
        check_prompts(["a", ""], [1, 0], model, 8)


def test_weights_that_are_not_finite_are_refused(tiny_folder, tmp_path):
    model = load_policy(tiny_folder)
    model.lm_head.weight.data[0, 0] = torch.inf
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"its weight lm_head.weight is not finite"):
        load_policy(str(tmp_path))


class Grader:
    train = ["a"]

    def __init__(self):
        self.seen = []

    def reward(self, prompt, answer):
        self.seen.append(answer)
        return 1.0


def test_answers_that_are_no_text_or_empty_are_graded_and_counted():
    """Bytes that are no UTF-8, an empty answer, one at its longest; a real byte-level tokenizer."""
    from fake import FakeSearcher
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from runtime.text import Text

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    end, euro = tokenizer.eos_token_id, tokenizer.encode("€")
    assert len(euro) == 3
    texts = {"€": [*euro, end], "\ufffd": [*euro[:2], end], "": [end], "€€": euro * 2}
    answers = [
        Answer(np.array(ids, np.int32), np.zeros(len(ids), np.float32), "stop" if end in ids else "length")
        for ids in texts.values()
    ]
    grader, config = Grader(), Config(gpus=0)
    one = FakeSearcher(Parts(None, None, grader, Text(tokenizer, [end])), config, 0, 0, Clock())
    written = one._score([(0, 0, answers)])
    assert grader.seen == list(texts) and [t.reward for t in written] == [1.0] * 4
    assert (one.undecodable, one.truncated, one.bad_rewards) == (1, 1, 0)
    assert [len(t.response) for t in written] == [4, 3, 1, 6]
