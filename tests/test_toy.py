"""toy.py counts right: a distribution, its best target, autograd's gradients, a World that learns."""

import itertools

import numpy as np
import pytest
import torch

from buffer import Trajectory
from loss import tb_loss
from notebooks import toy


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_policy_is_a_distribution_over_256_sequences():
    table = torch.randn(3, toy.STATES, toy.VOCABULARY, dtype=torch.float64, generator=seeded())
    log_pi = toy.log_probabilities(table)
    assert log_pi.shape == (3, 256)
    assert torch.allclose(log_pi.exp().sum(1), torch.ones(3, dtype=torch.float64))
    # by the chain rule: first token from the first row, a last token from the row of its prefix
    last = table.log_softmax(-1)[:, 21 + 4 * (4 * 2 + 1) + 3, 0]  # after 2, 1, 3
    first_three = log_pi.exp().view(3, 4, 4, 4, 4)[:, 2, 1, 3].sum(-1).log()
    assert torch.allclose(log_pi.view(3, 4, 4, 4, 4)[:, 2, 1, 3, 0], first_three + last)
    assert toy.letters(toy.TOKENS[27]) == "abcd"


def test_the_target_is_the_best_policy_and_worth_beta_log_z():
    """J(pi) = E[r] - beta KL(pi || pi_ref) is beta log Z at the target, and beta KL(pi || target) less elsewhere."""
    p, beta = toy.problem(2), 0.3
    log_ref, target = p.log_ref, toy.log_target(p.log_ref, p.reward, beta)
    log_z = toy.exact_log_z(log_ref, p.reward, beta)
    others = toy.log_probabilities(torch.randn(2, toy.STATES, toy.VOCABULARY, generator=seeded(7)))
    for log_pi in (target, log_ref, others):
        assert torch.allclose(
            toy.worth(log_pi, log_ref, p.reward, beta), beta * log_z - beta * toy.kl(log_pi, target), atol=1e-5
        )
    assert (toy.kl(others, target) > 0.1).all()


def test_a_policy_that_fools_tb_on_some_answers_and_is_far_from_the_target():
    p, beta = toy.problem(1), 0.25
    target, drawn = toy.log_target(p.log_ref[0], p.reward[0], beta), torch.tensor([3, 200, 3, 77])
    found = toy.fooling(target, drawn)
    assert found.exp().sum() == pytest.approx(1, abs=1e-5)
    assert torch.equal(found[drawn], target[drawn]) and toy.kl(found, target) > 1
    others = torch.ones(256, dtype=torch.bool).index_fill(0, drawn, False)
    assert len(found[others].unique()) == 1
    on_drawn, on_all = (tb_loss(*(x[None, i] for x in (found, p.log_ref[0], p.reward[0])), beta) for i in (drawn, ...))
    assert on_drawn < 1e-9 and on_all > 0.1


def test_the_effective_share_of_samples():
    assert toy.effective_share(torch.zeros(5)) == pytest.approx(1)
    assert toy.effective_share(torch.tensor([50.0, 0, 0, 0])) == pytest.approx(0.25)
    w = np.array([1.0, 2.0, 3.0])
    assert float(toy.effective_share(torch.tensor(w).log())) == pytest.approx(w.sum() ** 2 / (3 * (w**2).sum()))


@pytest.mark.parametrize("k", [2, 5])
def test_the_noise_is_that_of_autograds_gradients(k):
    """The same draws, one group at a time, through tb_loss and autograd."""
    p, beta, groups = toy.problem(1), 0.25, 30
    table, log_ref, reward = p.table[0].clone().requires_grad_(), p.log_ref[0], p.reward[0]
    log_pi = toy.log_probabilities(table.unsqueeze(0))[0]
    loss = (log_pi.exp().detach() * (log_pi + (log_pi - log_ref - reward / beta).detach() * log_pi)).sum()
    exact = torch.autograd.grad(loss, table, retain_graph=True)[0]
    drawn = torch.multinomial(log_pi.detach().exp(), groups * k, True, generator=seeded()).view(groups, k)
    for baseline, log_z, scale in (("VarGrad", None, k / (k - 1)), ("exact log Z", "exact", 1.0)):
        errors = []
        for d in drawn:
            z = None if log_z is None else toy.exact_log_z(log_ref, reward, beta).view(1)
            loss = scale / 2 * tb_loss(log_pi[d][None], log_ref[d][None], reward[d][None], beta, z)
            gradient = torch.autograd.grad(loss, table, retain_graph=True)[0]
            errors.append((gradient - exact).square().sum())
        want = float(torch.stack(errors).mean() / exact.square().sum())
        found = toy.gradient_noise(p.table[0], reward, log_ref, beta, k, baseline, groups)
        assert found == pytest.approx(want, rel=1e-3), baseline


def test_every_loss_learns_from_fresh_answers_and_v_trace_has_a_critic():
    for loss in toy.LOSSES:
        final, course = toy.by_lag(loss, [0], 2, beta=0.5, rate=0.05, updates=120, last=20)
        assert (final < 0.5 * course.untrained.view(1, -1)).all(), loss
        assert course.loss.shape == (120, 2) and course.log_ratio.shape == (120, 2, 16)
        assert course.log_ratio.abs().max() == 0  # nothing is stale


def test_a_lag_is_counted_in_updates():
    _, course = toy.by_lag("TB", [0, 3], 1, beta=0.25, rate=0.05, updates=8, last=1)
    assert (course.log_ratio[0] == 0).all() and (course.log_ratio[:, 0] == 0).all()
    assert (course.log_ratio[1:, 1].abs().amax(1) > 0).all()  # from update 1 on the writer is behind


def test_the_same_answers_again_and_again():
    p, beta, none = toy.problem(2), 0.25, torch.zeros(2, dtype=torch.long)
    same = torch.tensor([[1, 2, 3], [250, 251, 3]])
    course = toy.learn("TB", p, beta, none, [0.02], 300, k=16, same=same)
    first = tb_loss(*(x.gather(1, same) for x in (p.log_ref, p.log_ref, p.reward)), beta)
    assert course.loss[0].mean() == pytest.approx(float(first), rel=1e-5)
    assert course.loss[-1].max() < 1e-3 * first and course.kl[-1].min() > 0.3  # in balance, and far from the target


def test_lags_and_seeds_are_rows_of_one_batch():
    final, course = toy.by_lag("TB", [2], 2, beta=0.25, rate=0.02, updates=12, last=3)
    assert final.shape == (1, 2) and torch.equal(final.flatten(), toy.final_kl(course, 3))
    assert torch.equal(toy.log_probabilities(course.table), course.log_pi)


def test_training_is_updates_times_rate():
    found = toy.by_training("TB", 2, [0.05, 0.1], 3, 0.25, [1.0, 2.0])
    assert found.shape == (2, 2, 3)
    for i, (rate, updates) in enumerate([(0.05, 40), (0.1, 20)]):
        _, course = toy.by_lag("TB", [2], 3, 0.25, rate, updates)
        assert torch.allclose(found[i, 1], course.kl[-updates // 10 :].mean(0))
        assert torch.allclose(found[i, 0], course.kl[updates // 2 - updates // 20 : updates // 2].mean(0))


def test_the_exact_critic_is_the_mean_of_all_ways_to_go_on():
    log_pi = toy.log_probabilities(torch.randn(2, toy.STATES, toy.VOCABULARY, generator=seeded()))
    shaped = torch.randn(2, 256, generator=seeded(1))
    found = toy.exact_critic(log_pi, shaped)
    assert found.shape == (2, toy.STATES)
    for t, sequence in itertools.product(range(toy.LENGTH), (0, 27, 200)):
        on = (toy.TOKENS[:, :t] == toy.TOKENS[sequence, :t]).all(1)
        want = (log_pi[:, on].exp() * shaped[:, on]).sum(1) / log_pi[:, on].exp().sum(1)
        assert torch.allclose(found[:, toy.ROWS[sequence, t]], want, atol=1e-5)


def test_v_trace_gains_by_an_exact_critic():
    run = {"beta": 0.25, "rate": 0.05, "updates": 300}
    learnt, exact = (toy.by_lag("V-trace", [0, 20], 3, **run, critic_is_exact=x)[0] for x in (False, True))
    assert (exact.median(1).values < 0.7 * learnt.median(1).values).all()


def test_a_weight_turns_the_gradient_to_that_of_the_goal():
    """Autograd knows three things of it: the gradient of J, TB's mean gradient (of the variance of u), the noise."""
    p, beta, k = toy.problem(1), 0.25, 4
    other = torch.randn(1, toy.STATES, toy.VOCABULARY, generator=seeded(3))
    log_mu = toy.log_probabilities(p.table + 0.5 * other)
    table = p.table.clone().requires_grad_()
    log_pi = toy.log_probabilities(table)
    u = p.log_ref + p.reward / beta - log_pi
    spread = (log_mu.exp() * (u - (log_mu.exp() * u).sum()).square()).sum()
    goal = toy.worth(log_pi, p.log_ref, p.reward, beta).sum()
    tb, up = (torch.autograd.grad(x, table, retain_graph=True)[0].flatten() for x in (spread, goal))
    want = torch.cosine_similarity(tb, -up, dim=0).acos().rad2deg()
    look = {clip: toy.directions(p.table, log_mu, p, beta, clip, k, groups=3000) for clip in (1e-3, 1.0, 1e3)}
    assert float(want) > 20 and float(look[1e-3][0]) == pytest.approx(float(want), abs=0.1)
    assert float(look[1e3][0]) < 0.1 and 3 < float(look[1.0][0]) < 0.9 * float(want)

    drawn, gradients = torch.multinomial(log_mu[0].exp(), 600 * k, True, generator=seeded(5)).view(600, 1, k), []
    token_pi, token_mu = toy.token_log_probabilities(table), toy.token_log_probabilities(p.table + 0.5 * other)
    rest = token_pi, token_mu, p.log_ref, p.reward, torch.zeros(1, toy.STATES), beta, 1e3
    for d in drawn:
        loss = toy.LOSSES["clipped IS"](toy.look_up(torch.zeros(1).long(), d, *rest))
        gradients.append(torch.autograd.grad(loss, table, retain_graph=True)[0].flatten())
    gradients, mean = torch.stack(gradients), up * (k - 1) / k
    noise = (gradients + mean).square().sum(1).mean().sqrt() / mean.norm()
    assert float(look[1e3][1]) == pytest.approx(float(noise), rel=0.1)


def test_a_world_writes_by_its_versions_and_learns():
    world = toy.World(prompts=3, beta=0.5, rate=0.05)
    before = [world.write(1, 0, 400) for _ in range(2)]
    indices = [sum(int(t) * 4 ** (3 - i) for i, t in enumerate(a["response"])) for a in before[0]]
    assert [float(world.reward[1, i]) for i in indices] == [a["reward"] for a in before[0]]
    assert np.mean([a["log_mu"].sum() - a["log_ref"] for a in before[0]]) == pytest.approx(0, abs=1e-5)
    count, kls = itertools.count(), []
    for _ in range(60):
        answers = [(p, a) for p in (0, 2) for a in world.write(p, 0, 8)]
        ts = [
            Trajectory(uid=(0, 0, next(count)), prompt_id=p, policy_version=0, version_last=0, searcher=0, **a)
            for p, a in answers
        ]
        kls.append(world.learn([ts[:8], ts[8:]])["kl"])
    assert kls[-1] < 0.75 * kls[0]
    learnt = toy.log_probabilities(world.table.detach())
    assert torch.allclose(learnt[1], world.log_ref[1], atol=1e-5)  # nobody asked about prompt 1
    world.publish(60)
    assert np.mean([a["log_mu"].sum() - a["log_ref"] for a in world.write(0, 60, 400)]) > 0.01
    assert np.mean([a["log_mu"].sum() - a["log_ref"] for a in world.write(0, 0, 400)]) == pytest.approx(0, abs=1e-5)
