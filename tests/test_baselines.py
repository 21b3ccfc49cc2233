"""baselines.py against independent truths: NumPy loops and finite differences, V-trace against its O(T^2) sum."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import baselines as bl
import loss as lo

P, K, T = 4, 5, 6
BETA = 0.3
COMMON = settings(max_examples=30, deadline=None, derandomize=True, database=None)


def sequences(seed=0):
    """log pi, log mu, log ref, reward, [P, K]: off-policy, three prompts of unequal rewards, one of equal."""
    rng = np.random.default_rng(seed)
    reward = rng.normal(size=(P, K))
    reward[-1] = 0.1
    log_pi = rng.normal(size=(P, K)) - 6
    return log_pi, log_pi + rng.normal(size=(P, K)) * 2, rng.normal(size=(P, K)) - 6, reward


def ragged(seed=0):
    """log pi, log mu, values [P, K, T], reward, lengths [P, K]: the same, token by token; NaN in the padding."""
    rng = np.random.default_rng(seed)
    _, _, _, reward = sequences(seed)
    lengths = rng.integers(1, T + 1, (P, K))
    lengths[0, :3] = 0, 1, T
    inside = np.arange(T) < lengths[..., None]
    log_pi, values = rng.normal(size=(P, K, T)) - 2, rng.normal(size=(P, K, T))
    log_mu = log_pi + rng.normal(size=(P, K, T)) * 0.5
    return *(np.where(inside, x, np.nan) for x in (log_pi, log_mu, values)), reward, lengths


def tensors(*arrays):
    return [torch.as_tensor(a) for a in arrays]


def close(got, want, rtol=1e-10, atol=1e-12):
    np.testing.assert_allclose(got.detach().numpy() if torch.is_tensor(got) else got, want, rtol=rtol, atol=atol)


def slope(f, x, h=1e-5):
    """Central finite differences of a scalar function, in x's shape; 0 where x is NaN (padding)."""
    out = np.zeros_like(x)
    for i in zip(*np.nonzero(~np.isnan(x)), strict=True):
        up, down = x.copy(), x.copy()
        up[i] += h
        down[i] -= h
        out[i] = (f(up) - f(down)) / (2 * h)
    return out


def agrees(loss, truth, x):
    """loss(tensor) and truth(array, array at which constants are taken) have one value and one gradient at x."""
    t = torch.as_tensor(x).clone().requires_grad_()
    value = loss(t)
    value.backward()
    close(value, truth(x, x))
    close(t.grad, slope(lambda y: truth(y, x), x), rtol=1e-6, atol=1e-8)


# --- sequence losses ------------------------------------------------------------------------------------------------


def test_rloo():
    log_pi, _, _, reward = sequences()

    def truth(y, _):
        total = 0.0
        for p, k in itertools.product(range(P), range(K)):
            others = [reward[p, j] for j in range(K) if j != k]
            total -= (reward[p, k] - sum(others) / len(others)) * y[p, k]
        return total / (P * K)

    agrees(lambda t: bl.rloo_loss(t, torch.as_tensor(reward)), truth, log_pi)


def policy_gradient(y, shaped, weight):
    """- mean of weight * (shaped - its group mean) * y, prompt by prompt."""
    total = 0.0
    for p in range(P):
        mean = sum(shaped[p]) / K
        total -= sum(weight[p, k] * (shaped[p, k] - mean) * y[p, k] for k in range(K))
    return total / (P * K)


def test_frozen_kl():
    log_pi, log_mu, log_ref, reward = sequences(1)
    mu, ref, r = tensors(log_mu, log_ref, reward)
    shaped = reward - BETA * (log_mu - log_ref)
    agrees(
        lambda t: bl.frozen_kl_loss(t, mu, ref, r, BETA),
        lambda y, _: policy_gradient(y, shaped, np.ones((P, K))),
        log_pi,
    )


def test_tba_prime():
    log_pi, log_mu, log_ref, reward = sequences(2)
    mu, ref, r = tensors(log_mu, log_ref, reward)
    ratio = np.exp(log_pi - log_mu)
    assert (ratio > 8).any() and ((ratio > 1) & (ratio < 8)).any() and (ratio < 1).any()

    def truth(y, at):
        return policy_gradient(y, reward - BETA * (at - log_ref), np.minimum(np.exp(at - log_mu), 8))

    agrees(lambda t: bl.tba_prime_loss(t, mu, ref, r, BETA), truth, log_pi)


def gradient(loss, log_pi):
    x = torch.as_tensor(log_pi).clone().requires_grad_()
    return torch.autograd.grad(loss(x), x)[0].numpy()


def test_what_tb_has_in_common_with_them():
    """float64, 1e-10, on any answers: TBA' without its weight is TB; so is RLOO of the KL-shaped reward, K/(K-1) as
    long; frozen KL is TB only where mu is pi."""
    log_pi, log_mu, log_ref, reward = sequences(3)
    pi, mu, ref, r = tensors(log_pi, log_mu, log_ref, reward)
    tb = BETA / 2 * gradient(lambda x: lo.tb_loss(x, ref, r, BETA), log_pi)
    close(gradient(lambda x: bl.tba_prime_loss(x, pi, ref, r, BETA), log_pi), tb)
    close(gradient(lambda x: bl.rloo_loss(x, r - BETA * (pi - ref)), log_pi), K / (K - 1) * tb)
    close(gradient(lambda x: bl.frozen_kl_loss(x, pi, ref, r, BETA), log_pi), tb)
    assert np.abs(gradient(lambda x: bl.frozen_kl_loss(x, mu, ref, r, BETA), log_pi) - tb).max() > 0.01
    assert np.abs(gradient(lambda x: bl.tba_prime_loss(x, mu, ref, r, BETA), log_pi) - tb).max() > 0.01


def test_who_rests_at_the_optimum_of_tb():
    """At pi = pi_ref exp(r / beta) / Z, TB and TBA' have no gradient on any answers; frozen KL has, unless mu is pi."""
    log_pi, log_mu, _, reward = sequences(4)
    log_ref = log_pi - reward / BETA + 0.7
    pi, mu, ref, r = tensors(log_pi, log_mu, log_ref, reward)
    close(gradient(lambda x: lo.tb_loss(x, ref, r, BETA), log_pi), 0, atol=1e-12)
    close(gradient(lambda x: bl.tba_prime_loss(x, mu, ref, r, BETA), log_pi), 0, atol=1e-12)
    close(gradient(lambda x: bl.frozen_kl_loss(x, pi, ref, r, BETA), log_pi), 0, atol=1e-12)
    assert np.abs(gradient(lambda x: bl.frozen_kl_loss(x, mu, ref, r, BETA), log_pi)).max() > 0.01


def test_equal_rewards_have_no_gradient_where_only_rewards_count():
    """... which is where TB still has one (test_loss). 0.1 has no exact mean: nothing may be left of rounding."""
    log_pi, log_mu, _, reward, lengths = ragged()
    for value in (0.1, 1e6, -1e6):
        reward[-1] = value
        pi, mu, r, n = tensors(np.nan_to_num(log_pi), np.nan_to_num(log_mu), reward, lengths)
        for dr in (False, True):
            assert (gradient(lambda x, dr=dr, mu=mu, r=r, n=n: bl.grpo_loss(x, mu, r, n, dr=dr), pi)[-1] == 0).all()
        r32 = r.float()
        x = pi.sum(-1).float().requires_grad_()
        assert (torch.autograd.grad(bl.rloo_loss(x, r32), x)[0][-1] == 0).all()
        assert (torch.autograd.grad(bl.rloo_loss(x, r32), x)[0][0] != 0).all()


# --- token losses ---------------------------------------------------------------------------------------------------


def test_grpo():
    for dr in (False, True):
        check_grpo(dr)


def check_grpo(dr):
    log_pi, log_mu, _, reward, lengths = ragged(5)
    mu, r, n = tensors(log_mu, reward, lengths)
    ratio = np.exp(log_pi - log_mu)
    assert (ratio > 1.2).any() and (ratio < 0.8).any() and ((ratio > 0.8) & (ratio < 1.2)).any()

    def truth(y, _):
        total = 0.0
        for p, k in itertools.product(range(P), range(K)):
            mean = sum(reward[p]) / K
            std = (sum((x - mean) ** 2 for x in reward[p]) / K) ** 0.5
            advantage = (reward[p, k] - mean) / (1 if dr else std + 1e-4)
            answer = 0.0
            for t in range(lengths[p, k]):
                rho = np.exp(y[p, k, t] - log_mu[p, k, t])
                answer += min(rho * advantage, min(max(rho, 0.8), 1.2) * advantage)
            total -= answer if dr else answer / max(lengths[p, k], 1)
        return total / (P * K)

    agrees(lambda t: bl.grpo_loss(t, mu, r, n, dr=dr), truth, log_pi)


def test_dr_grpo_weighs_long_answers_and_easy_prompts_as_they_are():
    """Without 1/length a token counts the same in any answer; without the std a prompt counts by its spread."""
    zeros = torch.zeros(2, 2, 4)
    reward, lengths = torch.tensor([[0.0, 1.0], [0.0, 10.0]]), torch.tensor([[1, 4], [1, 4]])
    grpo, dr = (
        gradient(lambda x, dr=dr: bl.grpo_loss(x, zeros, reward, lengths, dr=dr), np.zeros((2, 2, 4), np.float32))
        for dr in (False, True)
    )
    close(dr[:, 1, :4], -np.array([[0.125] * 4, [1.25] * 4]), rtol=1e-6)
    close(dr[:, 0, 0], [0.125, 1.25], rtol=1e-6)
    close(grpo[:, 1, :4], np.full((2, 4), -0.0625), rtol=1e-3)
    close(grpo[:, 0, 0], [0.25, 0.25], rtol=1e-3)


def true_vtrace(log_rho, values, bootstrap, rewards, discounts, clip_rho, clip_c):
    """One sequence, no padding: v_s = V_s + sum over t >= s of (prod_{s <= i < t} discount_i c_i) delta_t."""
    n = len(values)
    rho, c = np.minimum(np.exp(log_rho), clip_rho), np.minimum(np.exp(log_rho), clip_c)
    v_next = [*values[1:], bootstrap][:n]
    delta = [rho[t] * (rewards[t] + discounts[t] * v_next[t] - values[t]) for t in range(n)]
    targets = [
        values[s] + sum(np.prod([discounts[i] * c[i] for i in range(s, t)]) * delta[t] for t in range(s, n))
        for s in range(n)
    ]
    target_next = [*targets[1:], bootstrap][:n]
    return targets, [rho[t] * (rewards[t] + discounts[t] * target_next[t] - values[t]) for t in range(n)]


def test_vtrace_is_its_quadratic_sum():
    for clip_rho, clip_c in [(1.0, 1.0), (1.5, 0.8), (0.7, 1.2)]:
        check_vtrace(clip_rho, clip_c)


def check_vtrace(clip_rho, clip_c):
    rng = np.random.default_rng(0)
    n, width = 8, 7
    lengths = np.array([0, 1, 7, 7, 3, 5, 6, 2])
    log_rho, values, rewards = (rng.normal(size=(n, width)) for _ in range(3))
    discounts, bootstrap = rng.uniform(0.5, 1, (n, width)), rng.normal(size=n)
    discounts[3, 4] = 0  # an episode that ends, and another that begins, within a sequence
    inside = np.arange(width) < lengths[:, None]
    for clip in (clip_rho, clip_c):
        assert (np.exp(log_rho[inside]) > clip).any() and (np.exp(log_rho[inside]) < clip).any()
    dirty = [np.where(inside, x, np.nan) for x in (log_rho, values, rewards, discounts)]
    rho_t, values_t, rewards_t, discounts_t, bootstrap_t, lengths_t = tensors(*dirty, bootstrap, lengths)
    values_t.requires_grad_()
    rho_t.requires_grad_()
    got = bl.vtrace(rho_t, values_t, bootstrap_t, rewards_t, discounts_t, clip_rho, clip_c, lengths_t)
    assert not got.targets.requires_grad and not got.advantages.requires_grad
    for i, m in enumerate(lengths):
        row = [x[i, :m] for x in (log_rho, values)] + [bootstrap[i]] + [x[i, :m] for x in (rewards, discounts)]
        targets, advantages = true_vtrace(*row, clip_rho, clip_c)
        close(got.targets[i], [*targets, *[0.0] * (width - m)])
        close(got.advantages[i], [*advantages, *[0.0] * (width - m)])


def test_vtrace_without_lengths_takes_all():
    rng = np.random.default_rng(1)
    arrays = [rng.normal(size=(2, 5)) for _ in range(3)]
    discounts, bootstrap = np.full((2, 5), 0.9), rng.normal(size=2)
    log_rho, values, rewards, d, b = tensors(*arrays, discounts, bootstrap)
    got = bl.vtrace(log_rho, values, b, rewards, d)
    for i in range(2):
        want = true_vtrace(arrays[0][i], arrays[1][i], bootstrap[i], arrays[2][i], discounts[i], 1.0, 1.0)
        close(got.targets[i], want[0])
        close(got.advantages[i], want[1])


def test_vtrace_on_policy_is_the_return():
    """mu = pi, no discount, one reward at the end: the target is that reward, wherever V stands."""
    values = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    rewards, discounts = torch.zeros(3, 4), torch.ones(3, 4)
    rewards[:, -1], discounts[:, -1] = torch.tensor([1.0, 0.0, -2.0]), 0.0
    got = bl.vtrace(torch.zeros(3, 4), values, torch.full((3,), 9.0), rewards, discounts)
    close(got.targets, np.repeat([[1.0], [0.0], [-2.0]], 4, 1), rtol=1e-5, atol=1e-6)
    close(got.advantages, got.targets - values, rtol=1e-5, atol=1e-6)


def test_vtrace_loss():
    log_pi, log_mu, values, reward, lengths = ragged(6)
    mu, r, n = tensors(log_mu, reward, lengths)
    ratio = np.exp(log_pi - log_mu)
    assert (ratio > 1).any() and (ratio < 1).any()

    def truth(y, v, log_pi_at, v_at):
        total = 0.0
        for p, k in itertools.product(range(P), range(K)):
            m = lengths[p, k]
            rewards, discounts = np.zeros(m), np.ones(m)
            rewards[m - 1 : m], discounts[m - 1 : m] = reward[p, k], 0
            log_rho = (log_pi_at - log_mu)[p, k, :m]
            targets, advantages = true_vtrace(log_rho, v_at[p, k, :m], 0.0, rewards, discounts, 1.0, 1.0)
            for t in range(m):
                total += 0.5 * (targets[t] - v[p, k, t]) ** 2 - advantages[t] * y[p, k, t]
        return total / (P * K)

    v = torch.as_tensor(values)
    agrees(lambda t: bl.vtrace_loss(t, mu, v, r, n), lambda y, at: truth(y, values, at, values), log_pi)
    pi = torch.as_tensor(log_pi)
    agrees(lambda t: bl.vtrace_loss(pi, mu, t, r, n), lambda y, at: truth(log_pi, y, log_pi, at), values)


# --- masks, properties, refusals ------------------------------------------------------------------------------------


TOKEN_LOSSES = {
    "grpo": lambda pi, mu, v, r, n: bl.grpo_loss(pi, mu, r, n),
    "dr_grpo": lambda pi, mu, v, r, n: bl.grpo_loss(pi, mu, r, n, dr=True),
    "vtrace": bl.vtrace_loss,
}


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_all_empty_is_a_zero_with_a_zero_gradient(name):
    pi, mu, values = (torch.full((P, K, T), float("nan")).requires_grad_() for _ in range(3))
    loss = TOKEN_LOSSES[name](pi, mu.detach(), values, torch.rand(P, K), torch.zeros(P, K, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0
    assert (pi.grad == 0).all()
    assert values.grad is None or (values.grad == 0).all()


@COMMON
@given(st.integers(0, 10**6), st.sampled_from(list(TOKEN_LOSSES)), st.sampled_from([0.0, 1.0, 1e9, float("nan")]))
def test_what_stands_in_the_padding_is_nothing(seed, name, junk):
    *tokens, reward, lengths = tensors(*ragged(seed))
    results = []
    for filling in (-3.0, junk):
        pi, mu, values = (torch.where(x.isnan(), filling, x).requires_grad_() for x in tokens)
        loss = TOKEN_LOSSES[name](pi, mu.detach(), values, reward, lengths)
        loss.backward()
        results.append((loss.item(), pi.grad.numpy(), np.zeros(1) if values.grad is None else values.grad.numpy()))
    for got, want in zip(*results, strict=True):
        close(got, want)


@COMMON
@given(st.integers(0, 10**6), st.integers(0, P - 1), st.floats(-100, 100))
def test_a_constant_on_a_prompts_rewards_changes_no_group_baseline(seed, prompt, constant):
    log_pi, log_mu, log_ref, reward = sequences(seed)
    more = reward.copy()
    more[prompt] += constant
    mu, ref = tensors(log_mu, log_ref)
    losses = [
        lambda x, r: bl.rloo_loss(x, r),
        lambda x, r: bl.frozen_kl_loss(x, mu, ref, r, BETA),
        lambda x, r: bl.tba_prime_loss(x, mu, ref, r, BETA),
    ]
    for loss in losses:
        before, after = (
            gradient(lambda x, loss=loss, r=r: loss(x, torch.as_tensor(r)), log_pi) for r in (reward, more)
        )
        close(after, before, rtol=1e-8, atol=1e-9)


X2, X3, N2 = torch.zeros(P, K), torch.zeros(P, K, T), torch.zeros(P, K, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "given_and_right"),
    [
        (lambda: bl.rloo_loss(X3, X3), "must all be [P, K], got [(4, 5, 6), (4, 5, 6)]"),
        (lambda: bl.rloo_loss(X2[:, :1], X2[:, :1]), "at least 2 answers per prompt, got K = 1"),
        (lambda: bl.rloo_loss(X2.flatten(), X2.flatten()), "must all be [P, K], got [(20,), (20,)]"),
        (lambda: bl.frozen_kl_loss(X2, X3, X2, X2, 1.0), "must all be [P, K], got [(4, 5), (4, 5, 6), (4, 5), (4, 5)]"),
        (lambda: bl.tba_prime_loss(X2, X2, X2, X2[0], 1.0), "must all be [P, K], got [(4, 5), (4, 5), (4, 5), (5,)]"),
        (lambda: bl.grpo_loss(X2, X2, X2, N2), "must all be [P, K, T], got [(4, 5), (4, 5)]"),
        (lambda: bl.grpo_loss(X3, X2, X2, N2), "must all be [P, K, T], got [(4, 5, 6), (4, 5)]"),
        (lambda: bl.grpo_loss(X3, X3, X2, N2.flatten()), "lengths must be [P, K] = [4, 5], got (20,)"),
        (lambda: bl.grpo_loss(X3, X3, X2[:1], N2), "reward must be [P, K] = [4, 5], got (1, 5)"),
        (lambda: bl.vtrace_loss(X3, X3, X3[..., :1], X2, N2), "must all be [P, K, T], got [(4, 5, 6), (4, 5, 6), (4,"),
        (lambda: bl.vtrace_loss(X3, X3, X3, X3, N2), "reward must be [P, K] = [4, 5], got (4, 5, 6)"),
        (lambda: bl.vtrace(X2, X2, X2, X2, X2), "bootstrap must be [N] = [4], got (4, 5)"),
        (lambda: bl.vtrace(X2, X2, X2[:, 0], X2, X2, lengths=N2), "lengths must be [N] = [4], got (4, 5)"),
        (lambda: bl.vtrace(X3, X3, X2, X3, X3), "must all be [N, T], got"),
    ],
)
def test_refusals_say_what_was_given_and_what_would_be_right(call, given_and_right):
    with pytest.raises(ValueError) as error:
        call()
    assert given_and_right in str(error.value)
    assert "\n" not in str(error.value)
