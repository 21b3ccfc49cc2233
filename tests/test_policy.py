"""Log-probabilities of padded, ragged batches, against one forward pass an answer without any padding."""

import numpy as np
import pytest
import torch

from loss import sequence_logprobs
from runtime.policy import collate, load_policy, named_weights, response_logprobs
from tasks.start_model import VOCABULARY, make_model

PAD, EOS = VOCABULARY.index("<pad>"), VOCABULARY.index("<eos>")
PROMPTS = [[5, 6, 14], [7], [8, 2, 9, 4, 3, 15, 3, 3], [5, 6, 14], [EOS, PAD, 4], [2, 2]]  # ragged, special tokens too
RESPONSES = [[3, 4, EOS], [EOS], [5], [], [10, EOS, EOS, PAD, 7], [PAD, PAD]]  # ragged, an empty one, ends inside


@pytest.fixture(scope="module")
def model():
    """The start model's shape, random weights large enough that every token matters, in float64."""
    torch.manual_seed(0)
    made = make_model().double().eval()
    with torch.no_grad():
        for p in made.parameters():
            p.mul_(3)
    return made


def arrays(lists):
    return [np.array(x, np.int32) for x in lists]


def one_by_one(model, temperature):
    """log pi of each answer's tokens, from log-softmax to gather, no padding and no batch."""
    out = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        logits = model(torch.tensor([prompt + response])).logits[0]  # [L + T, V]
        every = (logits / temperature).log_softmax(-1)
        out.append([float(every[len(prompt) + t - 1, token]) for t, token in enumerate(response)])
    return out


def batched(model, temperature, pad=PAD):
    tokens = collate(arrays(PROMPTS), arrays(RESPONSES), pad)
    return response_logprobs(model, tokens, temperature), tokens


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@torch.no_grad()
def test_padding_changes_no_log_probability(model, temperature):
    logp, tokens = batched(model, temperature)
    want = one_by_one(model, temperature)
    assert logp.shape == (6, 5) and tokens.lengths.tolist() == [len(r) for r in RESPONSES]
    for row, true in zip(logp, want, strict=True):
        np.testing.assert_allclose(row[: len(true)], true, rtol=1e-5, atol=1e-5)
    sums = sequence_logprobs(logp, tokens.lengths)
    np.testing.assert_allclose(sums, [sum(true) for true in want], rtol=1e-5, atol=1e-5)
    assert sums[3] == 0  # the empty answer
    assert np.ptp([x for true in want for x in true]) > 3  # there is something to get wrong


@torch.no_grad()
def test_temperature_is_no_factor_on_log_probabilities(model):
    hot, cold = one_by_one(model, 1.0), one_by_one(model, 0.6)
    assert max(abs(h / 0.6 - c) for hs, cs in zip(hot, cold, strict=True) for h, c in zip(hs, cs, strict=True)) > 0.1


@pytest.mark.parametrize("pad", [PAD, EOS, 17])
@torch.no_grad()
def test_which_token_pads_never_matters(model, pad):
    """Also when it is the end-of-sequence token: ends that an answer has itself are counted."""
    logp, tokens = batched(model, 1.0, pad)
    sums = sequence_logprobs(logp, tokens.lengths)
    np.testing.assert_allclose(sums, [sum(true) for true in one_by_one(model, 1.0)], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_what_stands_in_the_padding_never_matters(model):
    tokens = collate(arrays(PROMPTS), arrays(RESPONSES), PAD)
    want = sequence_logprobs(response_logprobs(model, tokens, 1.0), tokens.lengths)
    noise = torch.Generator().manual_seed(0)
    for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        left, right = tokens.start - len(prompt), tokens.start + len(response)
        for part in (tokens.ids[i, :left], tokens.ids[i, right:]):
            part[:] = torch.randint(2, 20, part.shape, generator=noise)
    got = sequence_logprobs(response_logprobs(model, tokens, 1.0), tokens.lengths)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_gradients_do_not_see_the_padding(model):
    """The same gradient by either way, in every parameter."""
    weights = torch.tensor([0.5, -1.0, 2.0, 3.0, 0.7, -0.3], dtype=torch.float64)
    model.zero_grad()
    logp, tokens = batched(model, 0.8, EOS)
    (sequence_logprobs(logp, tokens.lengths) * weights).sum().backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for prompt, response, weight in zip(PROMPTS, RESPONSES, weights, strict=True):
        if response:
            every = (model(torch.tensor([prompt + response])).logits[0] / 0.8).log_softmax(-1)
            at = torch.arange(len(response)) + len(prompt) - 1
            (every[at, torch.tensor(response)].sum() * weight).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.grad, rtol=1e-3, atol=1e-5, msg=name)
    model.zero_grad()


def test_collate_lays_answers_out_from_one_column():
    tokens = collate(arrays([[5], [6, 7, 8]]), arrays([[3, EOS], [4]]), PAD)
    assert tokens.ids.tolist() == [[PAD, PAD, 5, 3, EOS], [6, 7, 8, 4, PAD]]
    assert tokens.mask.tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert tokens.start == 3 and tokens.lengths.tolist() == [2, 1]
    assert tokens.ids.dtype == torch.int64


def test_no_mask_where_no_prompt_is_padded():
    """It would only cost the fast attention kernel; answers' padding is behind everything that is read."""
    assert collate(arrays([[5, 6], [6, 7]]), arrays([[3], [3, 4, 5]]), PAD).mask is None


@torch.no_grad()
def test_without_a_mask_the_log_probabilities_are_the_same(model):
    prompts, responses = arrays([[5, 6], [6, 7]]), arrays([[3], [3, 4, 5]])
    plain = response_logprobs(model, collate(prompts, responses, PAD), 1.0)
    prompts, responses = [*prompts, np.array([9, 9, 9, 9])], [*responses, np.array([2])]
    padded = response_logprobs(model, collate(prompts, responses, PAD), 1.0)
    np.testing.assert_allclose(plain[0, :1], padded[0, :1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(plain[1], padded[1], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_empty_answers_alone_sum_to_zero(model):
    tokens = collate(arrays([[5, 6], [7]]), arrays([[], []]), PAD)
    logp = response_logprobs(model, tokens, 1.0)
    assert logp.shape == (2, 1) and sequence_logprobs(logp, tokens.lengths).tolist() == [0.0, 0.0]


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt is empty"):
        collate(arrays([[5], []]), arrays([[3], [3]]), PAD)


def test_prompts_and_answers_must_be_as_many():
    with pytest.raises(ValueError):
        collate(arrays([[5], [6]]), arrays([[3]]), PAD)


# --- folders --------------------------------------------------------------------------------------------------------


def test_a_saved_policy_is_loaded_in_fp32_and_frozen_unless_it_is_to_learn(tmp_path):
    torch.manual_seed(1)
    made = make_model().to(torch.bfloat16)
    made.save_pretrained(tmp_path)
    for trainable in (False, True):
        model = load_policy(str(tmp_path), trainable=trainable)
        assert not model.training  # no dropout
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {p.requires_grad for p in model.parameters()} == {trainable}
        want = {name: p.detach().float() for name, p in made.named_parameters()}
        got = dict(named_weights(model))
        assert list(got) == list(want) and not any(t.requires_grad for t in got.values())
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_distinct_rows_stand_for_all():
    from runtime.policy import unique_rows

    p, q = np.array([1, 2], np.int32), np.array([1], np.int32)
    a, b = np.array([2, 3], np.int32), np.array([3], np.int32)
    prompts, responses = [p, p, q, p, q], [b, a, a, b, a]  # q + a reads like p + b, but is another row
    first, kind = unique_rows(prompts, responses)
    assert first == [0, 1, 2] and kind == [0, 1, 2, 0, 2]
    assert unique_rows([], []) == ([], [])
