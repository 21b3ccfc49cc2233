"""Special tokens: what stands before a prompt, what ends an answer, what a grader sees, ids that the model lacks."""

import json
import shutil

import numpy as np
import pytest

from config import Config
from runtime.evaluation import Evaluator
from runtime.files import ConfigError
from runtime.policy import load_policy, stop_tokens
from runtime.text import Text, front
from tasks.start_model import VOCABULARY, make_tokenizer

PAD, EOS = 0, 1
BOS, SOP, _, CLOSE = range(len(VOCABULARY), len(VOCABULARY) + 4)  # added after the characters
MORE = ["<bos>", "<sop>", "<answer>", "</answer>"]
ONE, PLUS = VOCABULARY.index("1"), VOCABULARY.index("+")


class Task:
    train = validation = heldout = ["1+1", "11+1"]

    def __init__(self, keep=False):
        if keep:
            self.keep_special_tokens = keep

    def reward(self, prompt, answer):
        return 1.0


def tokenizer_with(template=None, bos="<bos>"):
    """The start model's tokenizer with more special tokens, which puts a text into `template`."""
    from tokenizers.processors import TemplateProcessing

    made = make_tokenizer()
    made.add_special_tokens({"additional_special_tokens": MORE})
    if bos:
        made.add_special_tokens({"bos_token": bos})
    if template:
        ids = [(token, made.convert_tokens_to_ids(token)) for token in ("<eos>", *MORE)]
        made.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=ids)
    return made


@pytest.fixture
def folder(tmp_path, tiny_folder):
    """A model's folder whose JSON files a test may change: folder(file, **changes)."""
    place = tmp_path / "model"
    shutil.copytree(tiny_folder, place)

    def change(file, drop=(), **values):
        path = place / file
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({k: v for k, v in old.items() if k not in drop} | values))
        return place

    change.place = place
    return change


def without_eos(folder):
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        folder(file, drop=("eos_token_id", "eos_token"))
    return folder.place


def stops(folder):
    from runtime.policy import load_tokenizer

    return stop_tokens(str(folder.place), load_tokenizer(str(folder.place)))


# --- what ends an answer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "files, want",
    [
        ({"config.json": {"eos_token_id": [3, 4]}}, [3, 4]),
        ({"config.json": {"eos_token_id": 5}}, [5]),
        ({"config.json": {"text_config": {"eos_token_id": [6]}}}, [6]),
        ({"generation_config.json": {"eos_token_id": 7}, "config.json": {"eos_token_id": [3]}}, [3, 7]),
        ({"generation_config.json": {"eos_token_id": [7, 1]}, "tokenizer_config.json": {"eos_token": "<eos>"}}, [1, 7]),
        ({"generation_config.json": {"eos_token_id": []}, "tokenizer_config.json": {"eos_token": "9"}}, [11]),
        ({"generation_config.json": {"eos_token_id": None}, "config.json": {"eos_token_id": 0}}, [0]),
        ({"generation_config.json": {"eos_token_id": -1}, "config.json": {"eos_token_id": [2, -1]}}, [2]),
    ],
)
def test_stops_are_the_union_of_all_sources(folder, files, want):
    without_eos(folder)
    for file, values in files.items():
        folder(file, **values)
    assert stops(folder) == want


def test_no_stop_anywhere_is_one_line(folder):
    with pytest.raises(ConfigError, match=r"no end-of-sequence token, so answers would never end; set eos_token_id"):
        Text.of(str(without_eos(folder)), Config(), Task())


@pytest.mark.parametrize("wrong", ["<eos>", ["<eos>"], 1.5, True, {"a": 1}])
def test_a_stop_that_is_no_id_is_one_line(folder, wrong):
    folder("generation_config.json", eos_token_id=wrong)
    with pytest.raises(ConfigError, match=r"generation_config.json: eos_token_id is .*; it must be a token id"):
        stops(folder)


# --- what stands before a prompt ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template, wanted, want",
    [
        (None, "auto", []),
        ("<bos> $A", "auto", [BOS]),
        ("$A <eos>", "auto", []),  # what stands behind a text would end the answer before it began
        ("<bos> $A <eos>", "auto", [BOS]),
        ("<bos> <sop> $A", "auto", [BOS, SOP]),
        ("<sop> $A", "auto", [SOP]),
        ("<bos> $A", "never", []),
        (None, "always", [BOS]),
        ("<sop> $A <eos>", "always", [BOS, SOP]),
        ("<bos> $A", "always", [BOS]),
    ],
)
def test_a_prompt_begins_as_the_tokenizer_would_begin_it(template, wanted, want):
    tokenizer = tokenizer_with(template)
    before = front(tokenizer, wanted, "folder")
    assert before == want
    text = Text(tokenizer, [EOS], before)
    assert [ids.tolist() for ids in text.encode(["1+1", "1"])] == [[*want, ONE, PLUS, ONE], [*want, ONE]]
    assert text.encode(["1"])[0].dtype == np.int32 and text.encode([]) == []


def test_a_prompt_that_has_it_already_gets_no_second():
    one, two = Text(tokenizer_with(), [EOS], [BOS]), Text(tokenizer_with(), [EOS], [BOS, SOP])
    assert one.encode(["<bos>1"])[0].tolist() == [BOS, ONE]
    assert two.encode(["<bos><sop>1"])[0].tolist() == two.encode(["<sop>1"])[0].tolist() == [BOS, SOP, ONE]
    assert one.encode([""])[0].tolist() == [BOS]
    assert Text(tokenizer_with(), [EOS]).encode(["<bos>1"])[0].tolist() == [BOS, ONE]  # the task's own


def test_always_needs_a_token():
    with pytest.raises(ConfigError, match="--bos always: the tokenizer of here has no bos_token; use auto or never"):
        front(tokenizer_with(bos=None), "always", "here")


def test_evaluation_and_searchers_write_prompts_alike(folder):
    tokenizer_with("<bos> $A <eos>").save_pretrained(folder.place)
    model, config = load_policy(str(folder.place)), Config()
    evaluate = Evaluator(model, str(folder.place), Task(), config)
    here = Text.of(str(folder.place), config, Task()).check(model, Task.train, 8)
    assert [i.tolist() for i in evaluate._ids] == [i.tolist() for i in here]
    assert here[0].tolist() == [BOS, ONE, PLUS, ONE]


def test_the_default_tasks_prompts_stay_as_they_were(tiny_folder):
    text = Text.of(str(tiny_folder), Config(), Task())
    assert (text.front, text.stop_ids, text.pad) == ([], [EOS], PAD)
    want = text.tokenizer("37+58=", add_special_tokens=False)["input_ids"]
    assert text.encode(["37+58="])[0].tolist() == want


# --- what a grader sees ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keep, stop, ids, want",
    [
        (False, EOS, "<answer>1</answer><eos>", "1"),
        (True, EOS, "<answer>1</answer><eos>", "<answer>1</answer>"),
        (True, EOS, "<answer>1</answer>", "<answer>1</answer>"),  # as long as it may be
        (True, EOS, "<bos>1<pad><eos>", "1"),
        (True, 3, "<answer>11", "<answer>"),  # the model's files name another stop
        (("<answer>",), EOS, "<answer>1</answer><eos>", "<answer>1"),
        (["</answer>"], CLOSE, "<answer>1</answer>", "1</answer>"),  # even when it is what ends an answer
        (True, EOS, "<eos>", ""),
    ],
)
def test_a_task_may_ask_for_special_tokens(keep, stop, ids, want):
    tokenizer = tokenizer_with()
    text = Text(tokenizer, [stop], keep=keep)
    assert text.decode([np.array(tokenizer(ids)["input_ids"], np.int32)]) == [want]


@pytest.mark.parametrize("keep", ["<answer>", ["<think>"]])
def test_tokens_to_keep_must_be_tokens(keep):
    with pytest.raises(ConfigError, match="keep_special_tokens .* give True, or tokens of the model's tokenizer"):
        Text(tokenizer_with(), [EOS], keep=keep)


# --- ids that the model lacks ---------------------------------------------------------------------------------------


def checked(folder, prompts=("1+1",), **options):
    place = str(folder.place)
    return Text.of(place, Config(**options), Task()).check(load_policy(place), prompts, 8)


def grow(folder, count, **special):
    """Give the tokenizer tokens that the model has no embedding for: ids 64 and above."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"<t{i}>" for i in range(64 - len(tokenizer) + count)])
    tokenizer.add_special_tokens(special)
    tokenizer.save_pretrained(folder.place)


def test_tokens_beyond_the_embedding_are_refused_where_they_are_used(folder):
    grow(folder, 2)
    assert len(checked(folder)) == 1  # a tokenizer may know more than the model (Gemma 3 1B): it does not matter
    with pytest.raises(
        ConfigError, match=r"--task: the prompt '1<t44>' has the token '<t44>' with id 65, and the model"
    ):
        checked(folder, ("1", "1<t44>"))


@pytest.mark.parametrize(
    "special, options, what",
    [
        ({"pad_token": "[PAD]"}, {}, "its padding token has id 64"),
        ({"eos_token": "[EOS]"}, {}, "its end-of-sequence token has id 64"),
        ({"bos_token": "[BOS]"}, {"bos": "always"}, "the token before a prompt has id 64"),
    ],
)
def test_special_tokens_beyond_the_embedding_are_refused(folder, special, options, what):
    grow(folder, 0, **special)
    with pytest.raises(ConfigError, match=rf"{what}, and the model knows 64 tokens \(0 to 63\)"):
        checked(folder, **options)


def test_a_beginning_that_is_not_used_may_lie_beyond(folder):
    grow(folder, 0, bos_token="[BOS]")
    assert len(checked(folder)) == 1


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_stops_beyond_the_vocabulary_are_refused(folder, file):
    folder(file, eos_token_id=[1, 64])
    with pytest.raises(ConfigError, match="its end-of-sequence token has id 64, and the model knows 64 tokens"):
        checked(folder)


def test_a_padding_id_that_the_model_cannot_have_is_refused(folder):
    folder("config.json", pad_token_id=64)
    with pytest.raises(ConfigError, match=r"config.json: pad_token_id is 64, and vocab_size 64; it must be below"):
        checked(folder)


@pytest.mark.parametrize("pad", [None, "<eos>", "negative"])
def test_any_padding_works(folder, pad):
    config = {"pad_token_id": -1} if pad == "negative" else {}
    folder("config.json", drop=("pad_token_id",), **config)
    folder("generation_config.json", drop=("pad_token_id",), **config)
    folder("tokenizer_config.json", drop=("pad_token",), **({"pad_token": "<eos>"} if pad == "<eos>" else {}))
    evaluate = Evaluator(load_policy(str(folder.place)), str(folder.place), Task(), Config())
    assert evaluate.text.pad == EOS and len(evaluate.answers()) == 2
