"""The addition task, a task of one's own, how searchers share prompts out, and the start model's tokenizer."""

import itertools

import numpy as np
import pytest

from tasks import is_right, load_task
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
