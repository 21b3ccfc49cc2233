# %% [markdown]
# # 1 · From a reward to trajectory balance
#
# **Question: what does the trajectory-balance loss minimise, and what is log Z?**
#
# Run time: about 10 seconds on 2 cores. You need to know what a neural network and a gradient are. You need not know
# reinforcement learning.
#
# At the end you will have derived the loss of this project in five lines and checked each line with numbers.

# %%
import sys

sys.path.insert(0, "..")  # the project's modules lie one folder up

import torch

from loss import tb_residual, vargrad_log_z
from notebooks import figures, toy

torch.set_num_threads(1)  # small tensors: one thread is fastest

# %% tags=["parameters"]
FAST = False  # True: fewer seeds and updates, as the tests do
BETA = 0.25  # price of moving away from the start; try 0.05 and 2
K = 16  # answers in a group
RATE = 0.02  # learning rate of Adam
SEEDS = 3 if FAST else 5
UPDATES = 500 if FAST else 1500

# %% [markdown]
# ## The game
#
# A language model gets a **prompt** $x$ and writes an **answer** $y$, token by token. We call the model a **policy**
# and write $\pi_\theta(y|x)$ for the probability that it writes $y$; $\theta$ are its weights. Then somebody gives the
# answer a number, the **reward** $r(x, y)$: high is good. **Reinforcement learning (RL)** changes $\theta$ so that
# rewards rise, although nobody ever shows us a good answer.
#
# We start from a model that can already do something, and keep a frozen copy of it: the **reference policy**
# $\pi_\text{ref}$.
#
# Real answers are too many to count. So we play a small game, where nothing needs to be estimated. There is one prompt.
# An answer is 4 letters out of a, b, c, d: 256 answers in all. The policy is a table of numbers (logits). The rewards
# are random numbers between 0 and 1. The code is in `notebooks/toy.py`.

# %%
prompts = toy.problem(SEEDS)  # one game for each seed
first = toy.Problem(prompts.table[:1], prompts.reward[:1])  # the first game, for a closer look
log_ref, reward = first.log_ref[0], first.reward[0]  # for each of the 256 answers

print("answer  reward  probability under the reference policy")
for i in log_ref.argsort(descending=True)[:5]:
    print(f"{toy.letters(toy.TOKENS[i])}    {reward[i]:.2f}    {log_ref[i].exp():.3f}")
print(f"probabilities of all {len(log_ref)} answers add up to {log_ref.exp().sum():.6f}")

# %% [markdown]
# ## What do we want?
#
# Rewards alone are a bad goal: the policy would write the one best answer for ever, and forget everything else that the
# reference could do. So we want high rewards *and* a policy near the reference. The **Kullback–Leibler divergence
# (KL)** measures the distance. It is the average difference of two log-probabilities:
#
# $$\mathrm{KL}(\pi \| \pi_\text{ref}) = \sum_y \pi(y|x)\,\bigl(\log \pi(y|x) - \log \pi_\text{ref}(y|x)\bigr),$$
#
# which is 0 when the two policies are the same and positive otherwise. Its unit is the *nat* (like a bit, with the
# natural logarithm). The goal is to make
#
# $$J(\pi) = \sum_y \pi(y|x)\, r(x,y) \;-\; \beta\, \mathrm{KL}(\pi \| \pi_\text{ref})$$
#
# as large as possible. $\beta$ is the price of a nat.
#
# **Derivation.** Define a new policy, the *target*: give every answer the weight
# $\pi_\text{ref}(y|x)\, e^{r(x,y)/\beta}$, and divide by the sum of all weights, so that the result adds up to 1:
#
# $$\pi^*(y|x) = \frac{\pi_\text{ref}(y|x)\, e^{r(x,y)/\beta}}{Z(x)}, \qquad Z(x) = \sum_y \pi_\text{ref}(y|x)\, e^{r(x,y)/\beta}.$$
#
# Take the logarithm, solve for the reward, $r = \beta\,(\log \pi^* + \log Z - \log \pi_\text{ref})$, and put this into
# $J$. Everything cancels except
#
# $$J(\pi) = \beta \log Z(x) - \beta\, \mathrm{KL}(\pi \| \pi^*).$$
#
# The first term doesn't depend on the policy. The second is smallest (0) for $\pi = \pi^*$. So **the target is the best
# policy there is, and its $J$ is $\beta \log Z$.** $Z$ is called the partition function.
#
# **Check**, for three policies: the reference, a random one, the target.

# %%
target = toy.log_target(log_ref, reward, BETA)  # log pi* of each answer
log_z = toy.exact_log_z(log_ref, reward, BETA)
stranger = toy.log_probabilities(
    torch.randn(1, toy.STATES, toy.VOCABULARY, generator=torch.Generator().manual_seed(5))
)[0]
print(f"beta log Z = {BETA * log_z:.4f}\n\npolicy       J        beta log Z - beta KL(policy || target)")
for name, log_pi in {"reference": log_ref, "random": stranger, "target": target}.items():
    worth = toy.worth(log_pi, log_ref, reward, BETA)
    print(f"{name:10} {worth:7.4f}   {BETA * log_z - BETA * toy.kl(log_pi, target):7.4f}")

# %% [markdown]
# ## From the target to a loss
#
# We know the target, so why not just compute it? Because of $Z$: for a real model the sum over all answers has more
# terms than there are atoms. For any one answer, we *can* compute everything else. Take the logarithm of the target's
# definition and move everything to one side:
#
# $$\log Z(x) + \log \pi_\theta(y|x) - \log \pi_\text{ref}(y|x) - \frac{r(x,y)}{\beta} = 0 \quad\text{for every answer } y,$$
#
# exactly when $\pi_\theta$ is the target. The left side is the **residual** of the answer: how far it is out of
# balance. An answer, token by token, is a *trajectory*. So the mean of the squared residuals is called **trajectory
# balance (TB)**. Note that the writer of the answers does *not* occur in it.
#
# **And log Z?** If all answers are in balance, each of them gives the same number,
# $u(y) = \log \pi_\text{ref} + r/\beta - \log \pi_\theta$, and this number is $\log Z$. Before that, we take the mean
# of $u$ over a group of $K$ answers to the same prompt. This estimate is called **VarGrad**: with it the loss is the
# variance of $u$ in the group, and the gradient makes this variance smaller.
#
# **Check.** Draw $K$ answers *by a random policy*, and look at the residuals of the reference and of the target.

# %%
drawn = torch.multinomial(stranger.exp(), K, replacement=True, generator=torch.Generator().manual_seed(0))
group = log_ref[drawn][None], reward[drawn][None]  # [1 prompt, K answers]
for name, log_pi in {"reference": log_ref, "target": target}.items():
    estimate = vargrad_log_z(log_pi[drawn][None], *group, BETA)
    residual = tb_residual(log_pi[drawn][None], *group, estimate, BETA)
    print(
        f"{name:10} log Z by VarGrad {estimate.item():.3f} (exact {log_z:.3f}), TB loss {residual.square().mean():.6f}"
    )

# %% [markdown]
# ## Learning
#
# Now the table learns by TB, from 16 fresh answers at each update of the trainer. It never sees the target.
#
# > **Predict before you look:** each dot below is one of the 256 answers. In balance, a dot lies on the diagonal.
# > Before learning, where do answers with a high reward lie, above or below it? And after?

# %%
final, course = toy.by_lag("TB", [0], SEEDS, BETA, RATE, UPDATES)
policies = {"before": log_ref, f"after {UPDATES} trainer updates": course.log_pi[0]}
figures.picture(
    figures.against_target(target, reward, policies, "TB brings every answer into balance, the rare ones last")
)

# %% [markdown]
# **Answer:** before, the yellow dots (high reward) lie below: the target gives them more probability than the policy
# does. Afterwards all probable answers lie on the diagonal. The answers in the lower left corner are drawn so rarely
# that nothing pulls at them yet. They also weigh little in any sum.
#
# > **Predict:** the loss is an average over 16 random answers, the KL to the target is exact. Which of the two is
# > smoother? Do both go to 0?

# %%
updates = range(1, UPDATES + 1)
title = f"TB finds the target: exact KL from {course.untrained.median():.2f} to {final.median():.4f} nats"
above, below = {"TB": (updates, course.loss.T)}, {"TB": (updates, course.kl.T)}
ylabels = ("TB loss [nats²]", "KL(π ‖ π*) [nats]")
figures.picture(figures.curves_above(above, below, "trainer updates", ylabels, title, log=("top", "bottom")))

# %% [markdown]
# **Answer:** the KL is smooth. The loss jumps, because each value comes from other answers. (Thin lines are seeds, the
# band reaches from the lowest to the highest, the thick line is the median.) Both fall by two orders of magnitude and
# then stay at a small number: with a fixed learning rate a policy keeps trembling about its target.
#
# ## Where log Z comes from
#
# VarGrad's estimate is a mean over the policy's own answers. What is its expectation, $\sum_y \pi(y|x)\, u(y)$? Put the
# target's logarithm into $u$: $u = \log Z + \log \pi^* - \log \pi_\theta$. So the expectation is
#
# $$\log Z - \mathrm{KL}(\pi_\theta \| \pi^*).$$
#
# > **Predict:** on which side of the true $\log Z$ does the estimate begin, and by how much is it off?

# %%
smooth = course.log_z.unfold(0, 20, 1).mean(-1)  # mean over 20 updates
exact = toy.exact_log_z(prompts.log_ref, prompts.reward, BETA)
gap = (exact - smooth).T  # [seeds, updates]
series = {
    "exact log Z less its estimate (mean of 20 updates)": (updates[19:], gap),
    "KL(π ‖ π*)": (updates[19:], course.kl.unfold(0, 20, 1).mean(-1).T),
}
figures.picture(figures.curves(series, "trainer updates", "nats", "What VarGrad misses of log Z is the KL still to go"))

# %% [markdown]
# **Answer:** below, by the remaining KL. As the policy nears its target, the estimate nears the truth. So we learn
# $\log Z$ on the way, at no cost.
#
# ## The same thing under another name
#
# The textbook way to learn from rewards is the **policy gradient** (REINFORCE). It makes each answer more probable in
# proportion to its *advantage*: how much better it was than the average of its group:
#
# $$-\frac1K \sum_i A_i\, \nabla \log \pi_\theta(y_i|x), \qquad A_i = R_i - \bar R, \qquad R_i = r_i - \beta\,(\log \pi_\theta(y_i|x) - \log \pi_\text{ref}(y_i|x)).$$
#
# $R$ is the reward minus the price of moving away. Now differentiate TB ($\log Z$ is held fixed):
#
# $$\nabla\,\frac1K \sum_i (\log Z + \log\pi_\theta - \log\pi_\text{ref} - r_i/\beta)^2 = \frac2K \sum_i (\bar u - u_i)\, \nabla \log \pi_\theta(y_i|x),$$
#
# and $u_i = R_i/\beta$. **TB's gradient is the policy gradient, times $2/\beta$**, for any answers. **Check**, on
# answers that the random policy wrote:

# %%
by_tb, by_pg = (toy.gradient(name, first.table[0], first, drawn, BETA) for name in ("TB", "policy gradient"))
print(f"longest difference {(by_tb - by_pg).abs().max():.1e}, longest entry {by_tb.abs().max():.1e}")

# %% [markdown]
# > **Predict:** both learn from the same random draws. How do the two curves differ?
#
# (We use plain gradient descent here. Adam divides by the size of the gradient, so it magnifies rounding errors once
# the gradient is tiny.)

# %%
sgd = {"updates": 200, "optimizer": "sgd"}
both = {name: toy.by_lag(name, [0], SEEDS, BETA, 1.0, **sgd)[1] for name in ("TB", "policy gradient")}
apart = float((both["TB"].kl - both["policy gradient"].kl).abs().max())
series = {name: (range(1, 201), c.kl.T) for name, c in both.items()}
title = f"One method with two names: never more than {apart:.0e} nats apart"
figures.picture(figures.curves(series, "trainer updates", "KL(π ‖ π*) [nats]", title, "y", dashed=("policy gradient",)))

# %% [markdown]
# **Answer:** not at all. On fresh answers TB and this policy gradient are *one* method. A plot in which one of them
# wins shows something else. TB adds a reason why the answers may be old: its loss is 0 at the target and positive
# elsewhere, whoever wrote them. Notebook 5 tests other methods on old answers.
#
# ## How many answers in a group?
#
# A gradient from few answers is noisy. Our measure of the noise: its mean squared distance from the exact gradient,
# divided by the exact gradient's squared length. Below 1, there is more signal than noise.
#
# > **Predict:** three choices for $\log Z$: zero (no baseline), the exact $\log Z$, VarGrad's mean of the group. Which
# > one has the least noise at the start of learning? How does the noise fall when $K$ doubles?

# %%
sizes = [2, 4, 8, 16, 32, 64]
look = first.table[0], reward, log_ref, BETA
noise = {b: [toy.gradient_noise(*look, k, b) for k in sizes] for b in ("zero", "exact log Z", "VarGrad")}
series = {f"log Z: {name}": (sizes, values) for name, values in noise.items()}
title = f"At K = 64 VarGrad needs {noise['zero'][-1] / noise['VarGrad'][-1]:.1f} times fewer answers than no baseline"
figures.picture(figures.curves(series, "answers in a group, K", "noise / signal", title, log="xy"))

# %% [markdown]
# **Answer:** all of them fall like $1/K$. Zero is worst by far. The surprise: VarGrad's crude mean beats the exact
# $\log Z$ once a group has more than a few answers. Early on, the exact value is too high for the present policy (by
# the remaining KL), and every answer looks bad. For two answers the mean is too noisy and the exact value wins.
#
# ## What to take away
#
# - The best policy for "reward, but $\beta$ a nat for moving away" is $\pi_\text{ref}\, e^{r/\beta} / Z$.
# - TB says this for each answer, and is 0 exactly there, whoever wrote the answers.
# - $\beta \log Z$ is the worth of the best policy. VarGrad estimates it from a group, too low by the remaining KL.
# - With fresh answers TB *is* the policy gradient with a group baseline.
#
# ## Exercises
#
# 1. Set `BETA = 0.05` and `BETA = 2` and run all cells. How do the target and the first plot look? Why does the loss
#    begin so much higher with the small value, although the game is the same? (Compare $\beta^2$ times the loss.)
# 2. In `loss.py`, VarGrad's estimate is detached: no gradient flows through it. Show on paper that this changes
#    nothing. (The residuals of a group add up to 0.) What if it were the mean over all answers *except* the answer
#    itself?

# %%
# What this notebook claims:
best, at_start, random = (toy.worth(p, log_ref, reward, BETA) for p in (target, log_ref, stranger))
assert abs(best - BETA * log_z) < 1e-4 and best > max(at_start, random)
assert residual.abs().max() < 1e-4  # the target balances any answers
assert (final < 0.03).all() and (final < course.untrained / 10).all()
assert (gap - course.kl.unfold(0, 20, 1).mean(-1).T).mean().abs() < 0.02  # the gap is the KL
assert (by_tb - by_pg).abs().max() < 1e-5 and apart < 1e-3  # TB is the policy gradient
for values in noise.values():
    assert 16 < values[0] / values[-1] < 80  # K goes from 2 to 64: about 32
assert noise["VarGrad"][-1] < noise["exact log Z"][-1] < noise["zero"][-1] / 2
assert noise["VarGrad"][0] > noise["exact log Z"][0]
