"""loss.py against independent truths: NumPy written by hand, finite differences, identities, an enumerable problem."""

import itertools
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import loss as lo
from runtime.policy import token_logprobs

P, K, T, V = 4, 5, 6, 7
BETA, TEMPERATURE = 0.3, 0.7
COMMON = settings(max_examples=30, deadline=None, derandomize=True, database=None)


def a_batch(seed=0):
    """Off-policy, ragged (empty, one-token and full answers too), three prompts of unequal rewards, one of equal."""
    rng = np.random.default_rng(seed)
    reward = rng.normal(size=(P, K))
    reward[-1] = 0.6
    lengths = rng.integers(1, T + 1, (P, K))
    lengths[0, :3] = 0, 1, T
    return SimpleNamespace(
        logits=rng.normal(size=(P * K, T, V)) * 2,
        tokens=rng.integers(0, V, (P * K, T)),
        lengths=lengths,
        log_ref=rng.normal(size=(P, K)) - 6,
        reward=reward,
        log_z=rng.normal(size=P),
    )


def on_torch(batch):
    return SimpleNamespace(**{name: torch.as_tensor(value) for name, value in vars(batch).items()})


# --- the truth, in NumPy --------------------------------------------------------------------------------------------


def softmax(row):
    e = np.exp(row - row.max())
    return e / e.sum()


def true_log_pi(b):
    """[P, K], answer by answer and token by token."""
    log_pi = np.zeros((P, K))
    for p, k in itertools.product(range(P), range(K)):
        n = p * K + k
        for t in range(b.lengths[p, k]):
            log_pi[p, k] += np.log(softmax(b.logits[n, t] / TEMPERATURE)[b.tokens[n, t]])
    return log_pi


def true_residuals(log_pi, log_ref, reward, beta, log_z=None):
    """[P, K] log Z + log pi - log ref - r / beta, prompt by prompt."""
    residuals = np.zeros_like(log_pi)
    for p in range(len(log_pi)):
        u = [log_ref[p, k] + reward[p, k] / beta - log_pi[p, k] for k in range(log_pi.shape[1])]
        z = sum(u) / len(u) if log_z is None else log_z[p]
        residuals[p] = [z - u_k for u_k in u]
    return residuals


def true_loss(log_pi, log_ref, reward, beta, log_z=None):
    return float(np.mean(true_residuals(log_pi, log_ref, reward, beta, log_z) ** 2))


def true_gradient(b, beta, log_z=None):
    """d loss / d logits, [P*K, T, V], by hand: 2 / (P K) * residual * (one-hot - p) / temperature."""
    residuals = true_residuals(true_log_pi(b), b.log_ref, b.reward, beta, log_z)
    gradient = np.zeros_like(b.logits)
    for p, k in itertools.product(range(P), range(K)):
        n = p * K + k
        for t in range(b.lengths[p, k]):
            d = -softmax(b.logits[n, t] / TEMPERATURE)
            d[b.tokens[n, t]] += 1
            gradient[n, t] = 2 / (P * K) * residuals[p, k] * d / TEMPERATURE
    return gradient


def slope(f, x, h=1e-5):
    """Central finite differences of a scalar function, in x's shape."""
    out = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[i] += h
        down[i] -= h
        out[i] = (f(up) - f(down)) / (2 * h)
    return out


def close(got, want, rtol=1e-10, atol=1e-12):
    np.testing.assert_allclose(got.detach().numpy() if torch.is_tensor(got) else got, want, rtol=rtol, atol=atol)


def whole_loss(b, beta, log_z=None):
    """Logits to loss by loss.py."""
    log_pi = lo.sequence_logprobs(token_logprobs(b.logits, b.tokens, TEMPERATURE), b.lengths.flatten()).view(P, K)
    return lo.tb_loss(log_pi, b.log_ref, b.reward, beta, log_z)


# --- TB -------------------------------------------------------------------------------------------------------------


def test_vargrad_from_logits_to_gradient():
    b = a_batch()
    t = on_torch(b)
    loss = whole_loss(SimpleNamespace(**vars(t) | {"logits": t.logits.requires_grad_()}), BETA)
    loss.backward()
    close(loss, true_loss(true_log_pi(b), b.log_ref, b.reward, BETA))
    close(t.logits.grad, true_gradient(b, BETA))


def test_learned_log_z_from_logits_to_gradient():
    b = a_batch(1)
    t = on_torch(b)
    t.logits.requires_grad_()
    t.log_z.requires_grad_()
    loss = whole_loss(t, BETA, t.log_z)
    loss.backward()
    log_pi = true_log_pi(b)
    close(loss, true_loss(log_pi, b.log_ref, b.reward, BETA, b.log_z))
    close(t.logits.grad, true_gradient(b, BETA, b.log_z))
    assert t.log_z.grad is not None
    close(t.log_z.grad, slope(lambda z: true_loss(log_pi, b.log_ref, b.reward, BETA, z), b.log_z), rtol=1e-7)


def test_gradients_are_the_finite_differences():
    b = a_batch(2)
    log_pi = true_log_pi(b)
    for z in (None, b.log_z):
        x = torch.as_tensor(log_pi).requires_grad_()
        t = on_torch(b)
        lo.tb_loss(x, t.log_ref, t.reward, BETA, None if z is None else t.log_z).backward()
        want = slope(lambda y, z=z: true_loss(y, b.log_ref, b.reward, BETA, z), log_pi)
        close(x.grad, want, rtol=1e-6, atol=1e-8)


def test_vargrad_log_z_is_each_prompts_own():
    u = torch.tensor([[10.0, 12.0], [0.0, 2.0]], dtype=torch.float64)
    nothing = torch.zeros_like(u)
    close(lo.vargrad_log_z(nothing, u, nothing, 1.0), [11.0, 1.0])  # the published view(K, -1) gives 5 and 7
    close(lo.vargrad_log_z(nothing, nothing, u, 0.5), [22.0, 2.0])
    close(lo.tb_loss(nothing, u, nothing, 1.0), 1.0)


def test_equal_rewards_still_have_a_gradient():
    """TB brings pi back to pi_ref where all answers are equally good; GRPO has no gradient there (test_baselines)."""
    t = on_torch(a_batch())
    log_pi = torch.as_tensor(true_log_pi(a_batch())).requires_grad_()
    lo.tb_loss(log_pi, t.log_ref, t.reward, BETA).backward()
    assert (log_pi.grad[-1].abs() > 1e-2).all()


def test_the_loss_at_the_start_of_a_gsm8k_run():
    log_pi = torch.full((7, 20), -80.0)
    reward = torch.tensor([0.0, 1.0]).repeat(7, 10)
    loss = lo.tb_loss(log_pi, log_pi, reward, 0.004)
    close(loss, 15_625, rtol=1e-6)
    close(0.004**2 * loss, 0.25, rtol=1e-6)


# --- identities (float64, 1e-10) ------------------------------------------------------------------------------------


def test_detaching_log_z_leaves_the_gradient_unchanged():
    t = on_torch(a_batch(3))
    x = torch.as_tensor(true_log_pi(a_batch(3))).requires_grad_()
    (detached,) = torch.autograd.grad(lo.tb_loss(x, t.log_ref, t.reward, BETA), x)
    attached_z = (t.log_ref + t.reward / BETA - x).mean(1)
    (attached,) = torch.autograd.grad(lo.tb_loss(x, t.log_ref, t.reward, BETA, attached_z), x)
    close(detached, attached.numpy())


def test_pairs_of_a_group():
    b = a_batch(4)
    log_pi = true_log_pi(b)
    u = b.log_ref + b.reward / BETA - log_pi
    pairs = sum((u[:, i] - u[:, j]) ** 2 for i, j in itertools.combinations(range(K), 2))  # [P]
    t = on_torch(b)
    close(lo.tb_loss(torch.as_tensor(log_pi), t.log_ref, t.reward, BETA), pairs.sum() / (K * K * P))


def test_vargrad_is_reinforce_with_a_group_mean_baseline():
    """On any samples, times 2 / beta, with r - beta * (log pi - log pi_ref) of the current pi as the reward."""
    t = on_torch(a_batch(5))
    x = torch.as_tensor(true_log_pi(a_batch(5))).requires_grad_()
    (tb,) = torch.autograd.grad(lo.tb_loss(x, t.log_ref, t.reward, BETA), x)
    shaped = (t.reward - BETA * (x - t.log_ref)).detach()
    reinforce = -((shaped - shaped.mean(1, keepdim=True)) * x).mean()
    (pg,) = torch.autograd.grad(reinforce, x)
    close(tb, 2 / BETA * pg.numpy())


def test_learned_log_z_at_the_group_mean_is_vargrad():
    """Its own gradient, the mean residual, is zero exactly there: learning it leads to VarGrad's estimate."""
    t = on_torch(a_batch(6))
    x = torch.as_tensor(true_log_pi(a_batch(6)))
    z = lo.vargrad_log_z(x, t.log_ref, t.reward, BETA).requires_grad_()
    loss = lo.tb_loss(x, t.log_ref, t.reward, BETA, z)
    close(loss, lo.tb_loss(x, t.log_ref, t.reward, BETA).numpy())
    close(torch.autograd.grad(loss, z)[0], np.zeros(P), atol=1e-10)


def test_the_loss_is_zero_at_the_target_and_only_there():
    """log_target is normalised, its log Z is the log of the sum, and any other normalised policy has a loss."""
    b = a_batch(8)
    b.log_ref -= np.log(np.exp(b.log_ref).sum(1, keepdims=True))  # the K answers are all that there are
    t = on_torch(b)
    target = lo.log_target(t.log_ref, t.reward, BETA)
    want = np.array([softmax(row) for row in b.log_ref + b.reward / BETA])
    close(target.exp(), want)
    close(lo.tb_loss(target, t.log_ref, t.reward, BETA), 0.0, atol=1e-20)
    close(lo.vargrad_log_z(target, t.log_ref, t.reward, BETA), np.log(np.exp(b.log_ref + b.reward / BETA).sum(1)))
    assert lo.tb_loss(t.log_ref, t.log_ref, t.reward, BETA) > 0.1


# --- properties -----------------------------------------------------------------------------------------------------


def value_and_gradient(log_pi, log_ref, reward, beta, log_z=None):
    x = log_pi.clone().requires_grad_()
    loss = lo.tb_loss(x, log_ref, reward, beta, log_z)
    return loss.detach(), torch.autograd.grad(loss, x)[0]


def any_group(seed):
    rng = np.random.default_rng(seed)
    p, k = rng.integers(1, 5), rng.integers(2, 7)
    return [torch.as_tensor(rng.normal(size=(p, k)) * scale) for scale in (9.0, 9.0, 1.0)] + [rng]


@COMMON
@given(st.integers(0, 10**6), st.floats(0.01, 4))
def test_the_order_within_a_group_is_nothing(seed, beta):
    log_pi, log_ref, reward, rng = any_group(seed)
    order = torch.as_tensor(rng.permutation(log_pi.shape[1]))
    loss, grad = value_and_gradient(log_pi, log_ref, reward, beta)
    loss2, grad2 = value_and_gradient(log_pi[:, order], log_ref[:, order], reward[:, order], beta)
    close(loss2, loss.numpy())
    close(grad2, grad[:, order].numpy(), rtol=1e-8, atol=1e-8)


@COMMON
@given(st.integers(0, 10**6), st.floats(0.01, 4))
def test_the_order_of_groups_permutes_log_z(seed, beta):
    log_pi, log_ref, reward, rng = any_group(seed)
    order = torch.as_tensor(rng.permutation(log_pi.shape[0]))
    z = lo.vargrad_log_z(log_pi, log_ref, reward, beta)
    close(lo.vargrad_log_z(log_pi[order], log_ref[order], reward[order], beta), z[order].numpy())
    close(
        lo.tb_loss(log_pi[order], log_ref[order], reward[order], beta),
        lo.tb_loss(log_pi, log_ref, reward, beta).numpy(),
    )


@COMMON
@given(st.integers(0, 10**6), st.floats(0.01, 4), st.floats(-100, 100))
def test_a_constant_on_a_prompts_rewards_moves_log_z_alone(seed, beta, constant):
    log_pi, log_ref, reward, _ = any_group(seed)
    more = reward.clone()
    more[0] += constant
    shift = torch.zeros(len(reward), dtype=torch.float64)
    shift[0] = constant / beta
    z, z2 = (lo.vargrad_log_z(log_pi, log_ref, r, beta) for r in (reward, more))
    close(z2, (z + shift).numpy(), rtol=1e-9, atol=1e-9)
    (loss, grad), (loss2, grad2) = (value_and_gradient(log_pi, log_ref, r, beta) for r in (reward, more))
    close(loss2, loss.numpy(), rtol=1e-7)
    close(grad2, grad.numpy(), rtol=1e-7, atol=1e-7)


@COMMON
@given(st.integers(0, 10**6), st.floats(0.01, 4), st.floats(0.01, 100))
def test_beta_and_reward_are_one_scale(seed, beta, c):
    """Scaled together nothing changes; beta^2 * loss, in reward units, changes by c^2."""
    log_pi, log_ref, reward, _ = any_group(seed)
    loss, grad = value_and_gradient(log_pi, log_ref, reward, beta)
    loss2, grad2 = value_and_gradient(log_pi, log_ref, c * reward, c * beta)
    close(loss2, loss.numpy(), rtol=1e-8)
    close(grad2, grad.numpy(), rtol=1e-7, atol=1e-8)
    close((c * beta) ** 2 * loss2, c**2 * (beta**2 * loss).numpy(), rtol=1e-8)
    loss3, _ = value_and_gradient(log_pi, log_ref, 2 * reward, beta)  # the reward alone: another problem
    assert not np.isclose(loss3, loss, rtol=1e-9)


@COMMON
@given(st.integers(0, 10**6), st.sampled_from([0.0, 1.0, -1e9, float("inf"), float("nan")]))
def test_what_stands_in_the_padding_is_nothing(seed, junk):
    rng = np.random.default_rng(seed)
    x = torch.as_tensor(rng.normal(size=(6, T)))
    lengths = torch.as_tensor(rng.integers(0, T + 1, 6))
    outside = torch.arange(T) >= lengths.unsqueeze(1)
    dirty = x.masked_fill(outside, junk).requires_grad_()
    total = lo.sequence_logprobs(dirty, lengths)
    close(total, [sum(row[:n]) for row, n in zip(x.tolist(), lengths.tolist(), strict=True)])
    weights = torch.as_tensor(rng.normal(size=6))
    (total * weights).sum().backward()
    close(dirty.grad, np.where(outside, 0.0, weights.unsqueeze(1)))


# --- log-probabilities ----------------------------------------------------------------------------------------------


def test_token_logprobs_at_a_temperature():
    b = a_batch(7)
    for temperature in (0.6, 1.0, 2.5):
        got = token_logprobs(torch.as_tensor(b.logits), torch.as_tensor(b.tokens), temperature)
        want = [[np.log(softmax(b.logits[n, t] / temperature)[b.tokens[n, t]]) for t in range(T)] for n in range(P * K)]
        close(got, want)


def test_token_logprobs_gradient():
    rng = np.random.default_rng(0)
    logits = torch.as_tensor(rng.normal(size=(3, 5, 4))).requires_grad_()
    tokens = torch.as_tensor(rng.integers(0, 4, (3, 4)))
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x[:, :-1], tokens, TEMPERATURE), logits)


def test_token_logprobs_in_many_tiles():
    """A vocabulary that is cut into tiles of 2 tokens, from a slice that isn't contiguous."""
    torch.manual_seed(0)
    v = 2**17
    logits = torch.randn(3, 6, v, requires_grad=True)
    tokens, weights = torch.randint(v, (3, 5)), torch.randn(3, 5)
    got = token_logprobs(logits[:, :-1], tokens, TEMPERATURE)
    (grad,) = torch.autograd.grad((got * weights).sum(), logits)
    want = (logits[:, :-1].double() / TEMPERATURE).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    (want_grad,) = torch.autograd.grad((want * weights).sum(), logits)
    close(got, want.detach().numpy(), rtol=1e-6, atol=1e-5)
    close(grad, want_grad.numpy(), rtol=1e-4, atol=1e-7)


def test_bf16_logits_have_an_fp32_log_softmax():
    torch.manual_seed(0)
    logits = (torch.randn(16, 4, 1000) * 4).bfloat16().requires_grad_()
    tokens = torch.randint(1000, (16, 4))
    got = token_logprobs(logits, tokens, TEMPERATURE)
    assert got.dtype == torch.float32
    exact = (logits.detach().double() / TEMPERATURE).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    close(got, exact.numpy(), rtol=1e-5, atol=1e-5)  # log-softmax in bf16 is off by 1e-2
    got.sum().backward()
    assert logits.grad.dtype == torch.bfloat16
    p = (logits.detach().double() / TEMPERATURE).softmax(-1)
    want = (torch.nn.functional.one_hot(tokens, 1000) - p) / TEMPERATURE
    close(logits.grad.double(), want.numpy(), rtol=2**-8, atol=1e-6)  # rounded to bf16 once, at the end


MEMORY = """
import sys
import torch
from runtime.policy import token_logprobs

def resident(which):  # bytes; getrusage's peak would be inherited from the parent
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) * 1024

def naive(logits, tokens, temperature):
    return (logits.float() / temperature).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

def run(f, logits, tokens):
    f(logits, tokens, 0.7).sum().backward()
    logits.grad = None

f = {"ours": token_logprobs, "naive": naive}[sys.argv[1]]
dtype = getattr(torch, sys.argv[2])
tokens = torch.randint(150_000, (int(sys.argv[3]), 64))
run(f, torch.zeros(1, 2, 100, dtype=dtype, requires_grad=True), tokens[:1, :2] % 100)  # load what is loaded lazily
logits = torch.empty(*tokens.shape, 150_000, dtype=dtype).normal_().requires_grad_()
before = resident("VmRSS")
run(f, logits, tokens)
print(resident("VmHWM") - before, logits.numel() * logits.element_size())
"""


def memory(function, dtype, n):
    """Bytes of peak resident memory that forward and backward add to the logits' [n, 64, 150k], and the logits'."""
    command = [sys.executable, "-c", MEMORY, function, dtype, str(n)]
    folder = lo.__file__.rsplit("/", 1)[0]
    added, logits = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.split()
    return int(added), int(logits)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_large_vocabulary_needs_one_copy_of_the_logits(dtype):
    """The gradient is that copy: 307 MB in fp32, 154 in bf16. 16 MB are for tiles and the allocator."""
    added, logits = memory("ours", dtype, 8)
    assert added < logits + 16e6


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_measurement_of_memory_sees_copies():
    added, logits = memory("naive", "float32", 2)
    assert added > 2 * logits


# --- masks ----------------------------------------------------------------------------------------------------------


def test_an_end_token_counts_where_the_padding_is_the_same_token():
    eos = 0
    tokens = torch.tensor([[5, 6, eos, eos, eos]])  # length 3
    torch.manual_seed(0)
    token_logp = token_logprobs(torch.randn(1, 5, V, dtype=torch.float64), tokens).requires_grad_()
    total = lo.sequence_logprobs(token_logp, torch.tensor([3]))
    total.sum().backward()
    assert token_logp.grad.tolist() == [[1, 1, 1, 0, 0]]
    close(total, [token_logp.detach()[0, :3].sum()])


def test_no_padding_mask_can_hide():
    """Sums, not means; the last token counts; nothing is added for a padded position."""
    token_logp = torch.full((4, 3), -2.0)
    close(lo.sequence_logprobs(token_logp, torch.tensor([0, 1, 2, 3])), [0.0, -2.0, -4.0, -6.0])


def test_all_empty_is_a_zero_with_a_zero_gradient():
    token_logp = torch.full((P * K, T), float("nan")).requires_grad_()
    log_pi = lo.sequence_logprobs(token_logp, torch.zeros(P * K, dtype=torch.int64)).view(P, K)
    loss = lo.tb_loss(log_pi, torch.zeros(P, K), torch.full((P, K), 0.5), BETA)
    loss.backward()
    assert loss.item() == 0
    assert (token_logp.grad == 0).all()


def test_no_columns_at_all():
    assert lo.sequence_logprobs(torch.zeros(3, 0), torch.zeros(3, dtype=torch.int64)).tolist() == [0, 0, 0]
    assert token_logprobs(torch.zeros(3, 0, V), torch.zeros(3, 0, dtype=torch.int64)).shape == (3, 0)


def test_all_truncated_answers_are_as_good_as_others():
    """Nothing in the loss asks how an answer ended: full rows have every token in the sum."""
    x = torch.as_tensor(np.random.default_rng(0).normal(size=(6, T))).requires_grad_()
    log_pi = lo.sequence_logprobs(x, torch.full((6,), T)).view(2, 3)
    loss = lo.tb_loss(log_pi, torch.zeros(2, 3), torch.zeros(2, 3), BETA)
    loss.backward()
    close(loss, true_loss(x.detach().numpy().sum(1).reshape(2, 3), np.zeros((2, 3)), np.zeros((2, 3)), BETA))
    assert (x.grad != 0).all()


# --- extremes and refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [1e6, -1e6])
@pytest.mark.parametrize("log_z", [None, torch.zeros(2)])
def test_huge_rewards_at_a_small_beta_are_finite(reward, log_z):
    log_pi = torch.full((2, 4), -50.0, requires_grad=True)
    rewards = torch.tensor([[reward, 0, 0, 1], [reward, reward, reward, reward]])
    loss = lo.tb_loss(log_pi, torch.full((2, 4), -49.0), rewards, 1e-3, log_z)
    loss.backward()
    z = None if log_z is None else log_z.numpy()
    want = true_loss(np.full((2, 4), -50.0), np.full((2, 4), -49.0), rewards.double().numpy(), 1e-3, z)
    close(loss.double(), want, rtol=1e-5)
    assert log_pi.grad.isfinite().all()


@pytest.mark.parametrize(
    ("call", "given_and_right"),
    [
        (lambda x: lo.tb_loss(x[0], x[0], x[0], 1.0), "[P, K], got [(5,), (5,), (5,)]"),
        (lambda x: lo.tb_loss(x, x, x[:, :1], 1.0), "[P, K], got [(4, 5), (4, 5), (4, 1)]"),
        (lambda x: lo.tb_loss(x, x[:1], x, 1.0), "[P, K], got [(4, 5), (1, 5), (4, 5)]"),
        (lambda x: lo.tb_loss(x, x, x, 1.0, x), "log_z must be [P] = [4], got (4, 5)"),
        (lambda x: lo.tb_loss(x, x, x, 1.0, x[0]), "log_z must be [P] = [4], got (5,)"),
        (lambda x: lo.tb_loss(x, x, x, 0.0), "beta must be above 0, got 0.0"),
        (lambda x: lo.tb_loss(x, x, x, float("nan")), "beta must be above 0, got nan"),
        (lambda x: lo.sequence_logprobs(x, x.long()), "need [N, T] and [N], got (4, 5) and (4, 5)"),
        (lambda x: lo.sequence_logprobs(x, x[0].long()), "need [N, T] and [N], got (4, 5) and (5,)"),
        (lambda x: token_logprobs(x, x.long()), "need [N, T, V] and [N, T], got (4, 5) and (4, 5)"),
        (lambda x: token_logprobs(x[None], x.long()), "need [N, T, V] and [N, T], got (1, 4, 5) and (4, 5)"),
    ],
)
def test_refusals_say_what_was_given_and_what_would_be_right(call, given_and_right):
    with pytest.raises(ValueError) as error:
        call(torch.zeros(P, K))
    assert given_and_right in str(error.value)
    assert "\n" not in str(error.value)


# --- an enumerable problem ------------------------------------------------------------------------------------------


LETTERS, END, LONGEST = 3, 3, 3  # tokens 0, 1, 2 and the end; answers of at most 3 tokens


def all_answers():
    """Every answer: tokens [S, 3], lengths [S], and for each position the number of the state it is written in."""
    answers = [
        (*letters, END) for n in range(LONGEST) for letters in itertools.product(range(LETTERS), repeat=n)
    ] + list(itertools.product(range(LETTERS), repeat=LONGEST))
    states = {s: i for i, s in enumerate(sorted({a[:t] for a in answers for t in range(len(a))}))}
    tokens = torch.tensor([list(a) + [END] * (LONGEST - len(a)) for a in answers])
    where = torch.tensor([[states[a[:t]] if t < len(a) else 0 for t in range(LONGEST)] for a in answers])
    return tokens, torch.tensor([len(a) for a in answers]), where, len(states)


def enumerated_log_pi(table, tokens, lengths, where):
    """[prompts, states, V] logits -> [prompts, S] log-probabilities of all answers."""
    return torch.stack(
        [lo.sequence_logprobs(token_logprobs(logits[where], tokens), lengths) for logits in table]
    )  # logits[where]: [S, 3, V]


def test_the_answers_are_all_there():
    tokens, lengths, where, states = all_answers()
    table = torch.randn(2, states, LETTERS + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert len(tokens) == 1 + 3 + 9 + 27
    close(enumerated_log_pi(table, tokens, lengths, where).exp().sum(1), [1.0, 1.0])


@pytest.mark.parametrize("behaviour", ["uniform", "on-policy", "frozen"])
@pytest.mark.parametrize("learned", [False, True])
def test_tb_reaches_its_optimum(behaviour, learned):
    """pi is pi_ref * exp(r / beta) / Z, within a total variation of .01, whoever writes the answers."""
    generator = torch.Generator().manual_seed(0)
    tokens, lengths, where, states = all_answers()
    prompts, k, beta = 2, 16, 0.5
    log_ref = enumerated_log_pi(torch.randn(prompts, states, 4, generator=generator), tokens, lengths, where)
    reward = torch.rand(prompts, len(tokens), generator=generator)
    target = (log_ref + reward / beta).softmax(1)
    frozen = enumerated_log_pi(torch.randn(prompts, states, 4, generator=generator), tokens, lengths, where)
    table = torch.zeros(prompts, states, 4, requires_grad=True)
    log_z = torch.zeros(prompts, requires_grad=learned)
    steps = 800
    optimizer = torch.optim.Adam([{"params": [table], "lr": 0.05}, {"params": [log_z], "lr": 0.1}])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for _ in range(steps):
        log_pi = enumerated_log_pi(table, tokens, lengths, where)
        mu = {"uniform": torch.ones_like(log_pi), "on-policy": log_pi.detach().exp(), "frozen": frozen.exp()}[behaviour]
        drawn = torch.multinomial(mu, k, replacement=True, generator=generator)  # [prompts, k]
        loss = lo.tb_loss(
            log_pi.gather(1, drawn), log_ref.gather(1, drawn), reward.gather(1, drawn), beta, log_z if learned else None
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    final = enumerated_log_pi(table, tokens, lengths, where).detach().exp()
    assert ((log_ref.exp() - target).abs().sum(1) / 2 > 0.1).all()  # there was something to learn
    assert ((final - target).abs().sum(1) / 2 < 0.01).all()
    if learned:
        close(log_z, (log_ref + reward / beta).logsumexp(1).numpy(), rtol=0, atol=0.03)
