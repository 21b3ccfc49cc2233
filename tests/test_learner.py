"""The trainer's own update on a tiny Llama, against float64 worked out answer by answer: no padding, no batch."""

import copy
import dataclasses

import numpy as np
import pytest
import torch

import baselines
from buffer import Trajectory
from config import Config, ConfigError
from runtime import policy
from trainer import Learner

BETA, TEMPERATURE, EOS, VOCABULARY = 0.3, 0.7, 1, 11
PROMPTS = [[5, 6], [7, 2, 9, 4, 3], [8, 8, 2]]  # ragged
RESPONSES = [  # ragged: K = 4 for each; with and without an end, two ends, one token, none, one answer twice
    [[3, 4, EOS], [EOS], [3, 4, EOS], [4, 4, 4, EOS]],
    [[], [6, EOS], [2, 3, 4, 5, EOS], [9]],
    [[10, EOS, EOS], [2, 2], [3, EOS], [7, 8, 9, EOS]],
]
REWARDS = [[1.0, 0.0, 0.5, -0.3], [0.0, 1.0, 0.2, 0.9], [0.7, 0.7, 0.7, 0.7]]  # the last are all equal


def tiny_model(seed):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=32,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )
    return LlamaForCausalLM(config).eval()


def answer_logprobs(model, prompt, response):
    """[T] log-probabilities of one answer's tokens, one forward pass, from log-softmax to gather."""
    if not response:
        return torch.zeros(0, dtype=torch.float64)
    logits = model(torch.tensor([prompt + response])).logits[0]
    every = (logits / TEMPERATURE).log_softmax(-1)
    return torch.stack([every[len(prompt) + t - 1, token] for t, token in enumerate(response)])


def a_batch():
    """P = 3 groups of K = 4 by a behaviour policy that is neither pi nor pi_ref."""
    mu, ref = tiny_model(1).double(), tiny_model(2).double()
    groups = []
    with torch.no_grad():
        for p, (prompt, responses) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
            groups.append([])
            for k, response in enumerate(responses):
                log_mu = answer_logprobs(mu, prompt, response).numpy().astype(np.float32)
                log_ref = float(answer_logprobs(ref, prompt, response).sum())
                reason = "stop" if response[-1:] == [EOS] else "length"
                prompt_ids, ids = np.array(prompt, np.int32), np.array(response, np.int32)
                groups[-1].append(
                    Trajectory((0, 0, 4 * p + k), p, prompt_ids, ids, reason, REWARDS[p][k], log_ref, log_mu, 0, 0, 0)
                )
    return groups


def true_update(model, groups):
    """Loss (nats squared) and the gradient of beta / 2 * loss by name, in float64."""
    model = copy.deepcopy(model).double()
    loss = 0.0
    for group in groups:
        u = []
        for t in group:
            log_pi = answer_logprobs(model, t.prompt.tolist(), t.response.tolist()).sum()
            u.append(t.log_ref + t.reward / BETA - log_pi)
        log_z = sum(u).detach() / len(u)
        loss = loss + sum((log_z - x) ** 2 for x in u) / len(u) / len(groups)
    (BETA / 2 * loss).backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


def update_once(micro_batch_tokens=8192, pad=EOS, grad_clip=0.0):
    """One update of the real Learner, with plain SGD at a rate of 1, so that the step is minus the gradient."""
    model = tiny_model(0)
    before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    config = Config(
        beta=BETA,
        temperature=TEMPERATURE,
        lr=1.0,
        warmup_steps=0,
        grad_clip=grad_clip,
        micro_batch_tokens=micro_batch_tokens,
        prompts_per_batch=3,
        samples_per_prompt=4,
    )
    learner = Learner(model, config, pad)
    learner.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    metrics = learner.update(a_batch())
    steps = {name: before[name] - p.detach().double() for name, p in model.named_parameters()}
    return metrics, steps


def check(metrics, steps):
    loss, gradient = true_update(tiny_model(0), a_batch())
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    for name, want in gradient.items():
        np.testing.assert_allclose(steps[name], want, rtol=1e-3, atol=1e-5, err_msg=name)
    assert max(float(g.abs().max()) for g in gradient.values()) > 0.1  # there is something to compare


def test_an_update_is_the_gradient_of_tb():
    check(*update_once())


def test_micro_batches_change_nothing():
    check(*update_once(micro_batch_tokens=1))  # one group each, and each with a width of its own


def test_which_token_pads_is_nothing():
    check(*update_once(pad=0))


def test_the_batch_is_off_policy():
    """mu is far from pi, and weights, means or masks that don't belong would be seen."""
    model = tiny_model(0).double()
    with torch.no_grad():
        ratios = [
            float(answer_logprobs(model, t.prompt.tolist(), t.response.tolist()).sum()) - float(t.log_mu.sum())
            for group in a_batch()
            for t in group
        ]
    assert max(ratios) > 0.5 and min(ratios) < -0.5


def test_clipping_scales_the_step():
    metrics, steps = update_once(grad_clip=0.01)
    _, gradient = true_update(tiny_model(0), a_batch())
    norm = sum(float(g.square().sum()) for g in gradient.values()) ** 0.5
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, want in gradient.items():
        np.testing.assert_allclose(steps[name], 0.01 / norm * want, rtol=1e-2, atol=1e-6, err_msg=name)


def on_policy_at_the_reference(groups):
    """The same answers, as if the policy had written them and were still the reference."""
    model = tiny_model(0)

    def moved(t):
        with torch.no_grad():
            own = answer_logprobs(model, t.prompt.tolist(), t.response.tolist())
        return dataclasses.replace(t, log_mu=own.numpy().astype(np.float32), log_ref=float(own.sum()))

    return [[moved(t) for t in group] for group in groups]


@pytest.mark.parametrize("loss", ["tb", "frozen_kl", "tba_prime", "rloo"])
def test_a_gradient_is_in_reward_units_at_every_beta(loss):
    """Before the policy leaves its reference, beta decides nothing about the policy gradient; so a clip is the same."""
    groups, norms, steps = on_policy_at_the_reference(a_batch()), [], []
    for beta in (0.004, 0.1, 1.0, 20.0):
        config = Config(loss=loss, beta=beta, temperature=TEMPERATURE, lr=1e-2, warmup_steps=0, grad_clip=0.05)
        learner = Learner(tiny_model(0), config, EOS)
        learner.optimizer = torch.optim.SGD(learner.model.parameters(), lr=1.0)
        norms.append(learner.update(groups)["grad_norm"])
        steps.append(learner.model.lm_head.weight.detach().double().numpy())
    assert norms[0] > 0.5
    np.testing.assert_allclose(norms, norms[1], rtol=2e-3)
    for step in steps:
        np.testing.assert_allclose(step, steps[1], atol=1e-5)
    with_tb = Learner(tiny_model(0), Config(beta=0.1, temperature=TEMPERATURE, grad_clip=0.0), EOS)
    same = {"rloo": 4 / 3}.get(loss, 1.0)  # its baseline leaves the answer itself out: K / (K - 1) times
    assert norms[1] == pytest.approx(same * with_tb.update(groups)["grad_norm"], rel=2e-3)


# --- the other objectives, through the same update -------------------------------------------------------------------


def learner_of(loss, **options):
    config = Config(loss=loss, beta=BETA, temperature=TEMPERATURE, lr=1e-2, warmup_steps=0, grad_clip=0.0, **options)
    return Learner(tiny_model(0), config, EOS)


def log_pi_of(model, groups):
    with torch.no_grad():
        rows = [[answer_logprobs(model, t.prompt.tolist(), t.response.tolist()).sum() for t in g] for g in groups]
    return torch.tensor(rows)


def constants(groups):
    log_mu = torch.tensor([[float(t.log_mu.sum()) for t in g] for g in groups])
    return log_mu, torch.tensor([[t.log_ref for t in g] for g in groups]), torch.tensor(REWARDS)


@pytest.mark.parametrize("loss", ["rloo", "frozen_kl", "tba_prime"])
def test_sequence_losses_get_what_they_need(loss):
    groups = a_batch()
    log_pi, (log_mu, log_ref, reward) = log_pi_of(tiny_model(0), groups), constants(groups)
    want = {
        "rloo": lambda: baselines.rloo_loss(log_pi, reward),
        "frozen_kl": lambda: baselines.frozen_kl_loss(log_pi, log_mu, log_ref, reward, BETA),
        "tba_prime": lambda: baselines.tba_prime_loss(log_pi, log_mu, log_pi, reward, BETA),  # reference = start
    }[loss]()
    metrics = learner_of(loss).update(groups)
    np.testing.assert_allclose(metrics["loss"], float(want), rtol=1e-4)


@pytest.mark.parametrize("dr", [False, True])
def test_grpo_gets_each_tokens_probabilities(dr):
    groups = a_batch()
    model, width = tiny_model(0), max(len(t.response) for g in groups for t in g)
    log_pi, log_mu = torch.zeros(3, 4, width), torch.zeros(3, 4, width)
    for p, group in enumerate(groups):
        for k, t in enumerate(group):
            with torch.no_grad():
                own = answer_logprobs(model, t.prompt.tolist(), t.response.tolist())
            log_pi[p, k, : len(own)], log_mu[p, k, : len(own)] = own, torch.as_tensor(t.log_mu)
    lengths = torch.tensor([[len(t.response) for t in g] for g in groups])
    want = baselines.grpo_loss(log_pi, log_mu, torch.tensor(REWARDS), lengths, dr=dr)
    metrics = learner_of("grpo", dr_grpo=dr).update(groups)
    np.testing.assert_allclose(metrics["loss"], float(want), rtol=1e-4)


def test_learned_log_z_starts_at_the_mean_reward_and_moves():
    groups = a_batch()
    log_pi, (_, log_ref, reward) = log_pi_of(tiny_model(0), groups), constants(groups)
    learner = learner_of("tb", log_z="learned", lr_head=1e-2)
    metrics = learner.update(groups)
    log_z = torch.full((3,), float(reward.mean()) / BETA)
    want = (log_z[:, None] + log_pi - log_ref - reward / BETA).square().mean()
    np.testing.assert_allclose(metrics["loss"], float(want), rtol=1e-4)
    assert float(learner.head.weight.detach().abs().max()) > 0  # it got a gradient
    for _ in range(300):  # fitted alone, the head finds VarGrad's log Z of each prompt
        for p in learner.model.parameters():
            p.requires_grad_(False)
        metrics = learner_head_step(learner, groups)
    np.testing.assert_allclose(metrics["loss"], metrics["imbalance"] / BETA**2, rtol=0.02)


def learner_head_step(learner, groups):
    loss, metrics = learner._loss(learner._answers(groups, BETA), groups)
    learner.optimizer.zero_grad()
    loss.backward()
    learner.optimizer.param_groups[1]["lr"] = 0.03
    learner.optimizer.step()
    return metrics


def test_tba_prime_resets_its_reference():
    groups, learner = a_batch(), learner_of("tba_prime", ref_reset_every=3)
    distances = [learner.update(groups)["kl_ref"] for _ in range(7)]
    assert [i for i, d in enumerate(distances) if abs(d) < 1e-6] == [0, 3, 6]


def test_the_critic_of_vtrace_learns():
    groups, learner = a_batch(), learner_of("vtrace")
    before = learner.head.bias.item()
    losses = [learner.update(groups)["loss"] for _ in range(5)]
    assert all(np.isfinite(losses)) and learner.head.bias.item() != before


@pytest.mark.parametrize("rewards", [{1: "nan"}, {0: "inf", 1: "nan"}, {1: "nan", 0: "-inf"}, {1: "inf"}], ids=str)
def test_the_first_that_is_not_finite_is_named(rewards):
    groups = a_batch()
    for i, reward in rewards.items():
        groups[i] = [dataclasses.replace(groups[i][0], reward=float(reward)), *groups[i][1:]]
    first = min(rewards)
    message = rf"update 0: the loss is \S+; prompt {first} has log_pi .* reward \[{rewards[first]}, "
    with pytest.raises(FloatingPointError, match=message):
        learner_of("tb").update(groups)


# --- gradient checkpointing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"log_z": "learned"}, {"loss": "tba_prime"}, {"loss": "vtrace"}], ids=str)
def test_gradient_checkpointing_changes_no_bit_of_an_update(options):
    """... and does compute each layer twice for it, though the model is in eval mode."""
    weights, metrics, calls = {}, {}, {False: 0, True: 0}
    for on in (False, True):
        c = Config(beta=BETA, temperature=TEMPERATURE, gradient_checkpointing=on, **options)
        model = tiny_model(0)
        assert not model.training
        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(lambda *_, on=on: calls.__setitem__(on, calls[on] + 1))
        learner = Learner(model, c, EOS)
        metrics[on] = [learner.update(a_batch()) for _ in range(2)]
        weights[on] = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert metrics[True] == metrics[False]
    assert all(torch.equal(weights[True][name], w) for name, w in weights[False].items())
    passes = 2 * len(tiny_model(0).model.layers)  # updates times layers
    assert calls[True] - calls[False] == passes


def test_without_gradients_nothing_is_computed_twice():
    model, seen = tiny_model(0), []
    policy.checkpoint_layers(model)
    model.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        model(torch.tensor([[5, 6, 7]]))
    assert len(seen) == 1


def test_a_model_that_can_not_checkpoint_is_refused():
    with pytest.raises(ConfigError, match="^--gradient-checkpointing: Linear does not support it"):
        policy.checkpoint_layers(torch.nn.Linear(2, 2))
