# %% [markdown]
# # 1 · From a reward to trajectory balance
#
# **Question: which loss teaches a language model to write answers with a high reward, and what is the log Z inside
# it?**
#
# **At the end you can** derive the loss of this project, compute it by hand for four answers, write its training loop
# in ten lines, say which answers it needs, and show where it is a policy gradient.
#
# **You need** one course in deep learning: softmax, gradient, optimizer, PyTorch. You need no reinforcement learning
# and no earlier notebook.
#
# **Run time:** about half a minute on 2 cores.
#
# <details><summary>For the instructor</summary>
#
# | section | minutes |
# | --- | --- |
# | Opening | 3 |
# | The game | 6 |
# | The goal | 12 |
# | From the target to a loss | 11 |
# | The training loop | 10 |
# | Which answers does it need? | 8 |
# | Where log Z comes from | 7 |
# | Does learning come to rest? | 5 |
# | The policy gradient | 10 |
# | How many answers in a group? | 6 |
# | Exercises | 12 |
#
# **On the board**: the goal $J$; the target $\pi^* = \pi_\text{ref}\, e^{r/\beta} / Z$; the residual; $u$ and its
# mean; the table of four answers with two columns left empty; $\nabla J = E[R\, \nabla \log \pi]$.
#
# Students usually take a loss of 0 for a proof that the policy is right: let them find the policy that fools the loss
# before they see it. Many take $\log Z$ for a constant that one can drop. On the policy's own answers this only costs
# noise. On other answers it makes the gradient wrong.
#
# </details>

# %% tags=["setup"] jupyter={"source_hidden": true}
# Find the project: in this folder, above it, in a .zip beside this notebook, or at an address. Run this cell; you need not read it.
import io
import sys
import urllib.request
import zipfile
from pathlib import Path

PROJECT = ""  # web address of the project as a .zip file, for a notebook that stands alone


class NotFound(ImportError):
    def _render_traceback_(self):  # Jupyter shows this one line
        return [str(self)]


def projects():
    here = Path.cwd()
    folders = here, *here.parents, *sorted(here.glob("tba_min*")), *sorted(here.glob("tba_min*/*"))
    return [str(folder) for folder in folders if (folder / "notebooks" / "toy.py").is_file()]


if not projects():
    try:
        archives = sorted(Path.cwd().glob("*tba_min*.zip"))
        archive = archives[0].read_bytes() if archives else urllib.request.urlopen(PROJECT).read()
        zipfile.ZipFile(io.BytesIO(archive)).extractall("tba_min")
        projects()[0]
    except (OSError, ValueError, IndexError, zipfile.BadZipFile) as error:
        advice = "put its .zip beside this notebook, or the .zip's web address into PROJECT above"
        raise NotFound(f"tba_min is not here: {advice} (it is {PROJECT!r}: {error})") from None
sys.path.insert(0, projects()[0])

# %%
import torch

from loss import tb_loss, tb_residual, vargrad_log_z
from notebooks import figures, lesson, toy

torch.set_num_threads(1)  # small tensors: one thread is fastest

# %% tags=["parameters"]
FAST = False  # True: fewer seeds and updates, as the tests do
BETA = 0.25  # price of moving away from the start
K = 16  # answers in a group
RATE = 0.02  # learning rate of Adam
SEEDS = 3 if FAST else 5
UPDATES = 400 if FAST else 1500

# %% [markdown]
# ## The game
#
# A language model gets a **prompt** $x$ and writes an **answer** $y$, token by token (here a token is a letter). In
# reinforcement learning (RL) the model is called a **policy**. $\pi_\theta(y|x)$ is the probability that it writes
# $y$, and $\theta$ are its weights. Then somebody gives the answer a number, the **reward** $r(x, y)$: high is good.
# RL changes $\theta$ so that rewards rise. Nobody ever shows the model a good answer.
#
# We start from a model that can already do something, and keep a frozen copy of it: the **reference policy**
# $\pi_\text{ref}$.
#
# Real answers are too many to count. So we play a small game in which we can count everything:
#
# - There is one prompt. An answer is 4 letters out of a, b, c, d. That makes 256 answers.
# - The policy is a table instead of a network. It has a row for each beginning of an answer ("", "a", ..., "ddd"):
#   $1 + 4 + 16 + 64 = 85$ rows. A row holds 4 **logits**. Softmax turns them into the probabilities of the next
#   letter. The log-probability of an answer is the sum of those of its 4 letters.
# - The reference's logits are random numbers. They stand for a trained model.
# - The rewards are random numbers between 0 and 1. They stand for a judge.
#
# The code is in `notebooks/toy.py`.

# %%
games = toy.problem(SEEDS)  # one game for each seed
first = toy.Problem(games.table[:1], games.reward[:1])  # the first game, for a closer look
log_ref, reward = first.log_ref[0], first.reward[0]  # [256], [256]: log pi_ref and r of each answer

print("answer  reward  probability under the reference policy")
for i in log_ref.argsort(descending=True)[:5]:
    print(f"{toy.letters(toy.TOKENS[i])}    {reward[i]:.2f}    {log_ref[i].exp():.3f}")
print(f"The probabilities of all {len(log_ref)} answers add up to {log_ref.exp().sum():.6f}.")

# %% [markdown]
# ## The goal
#
# Reward alone is a bad goal. The best policy would write the one best answer for ever, and forget everything else that
# the reference could do. So we want a high reward *and* a policy near the reference. The **Kullback–Leibler divergence
# (KL)** says how far a policy is away:
#
# $$\mathrm{KL}(\pi \| \pi_\text{ref}) = \sum_y \pi(y|x)\,\bigl(\log \pi(y|x) - \log \pi_\text{ref}(y|x)\bigr).$$
#
# It is the mean difference of two log-probabilities, over answers that $\pi$ writes. It is 0 when the two policies are
# equal, and positive otherwise. It matters which policy comes first: $\mathrm{KL}(\pi_\text{ref} \| \pi)$ is another
# number. (Why is it never negative? $\log a \le a - 1$, so
# $-\mathrm{KL} = \sum_y \pi \log \frac{\pi_\text{ref}}{\pi} \le \sum_y (\pi_\text{ref} - \pi) = 0$.) Its unit is the
# **nat**: a bit is a logarithm to base 2, a nat is a natural logarithm.
#
# The goal is to make this number as large as possible:
#
# $$J(\pi) = \sum_y \pi(y|x)\, r(x,y) \;-\; \beta\, \mathrm{KL}(\pi \| \pi_\text{ref}).$$
#
# $\beta > 0$ is the price of a nat. A large $\beta$ keeps the policy near the reference.
#
# **Which policy is the best?** Here is a guess, and the next lines prove it. Give every answer the weight
# $\pi_\text{ref}(y|x)\, e^{r(x,y)/\beta}$. Divide by the sum of all weights, which is called the **partition
# function** $Z$. The result is a policy, the **target**:
#
# $$\pi^*(y|x) = \frac{\pi_\text{ref}(y|x)\, e^{r(x,y)/\beta}}{Z(x)}, \qquad Z(x) = \sum_y \pi_\text{ref}(y|x)\, e^{r(x,y)/\beta}.$$
#
# Take the logarithm and solve for the reward: $r = \beta\,(\log \pi^* + \log Z - \log \pi_\text{ref})$. Put this into
# $J$. The terms with $\log \pi_\text{ref}$ cancel, and $\sum_y \pi = 1$:
#
# $$J(\pi) = \beta \sum_y \pi\,(\log \pi^* + \log Z - \log \pi_\text{ref}) - \beta \sum_y \pi\,(\log \pi - \log \pi_\text{ref}) = \beta \log Z - \beta\, \mathrm{KL}(\pi \| \pi^*).$$
#
# The first term doesn't depend on the policy. The second is best, 0, for $\pi = \pi^*$. So **the target is the best
# policy, and its $J$ is $\beta \log Z$** (see [Korbak et al. 2022](https://arxiv.org/abs/2205.11275)).
#
# **Check**, for three policies: the reference, the target, and a *random policy*, a table of other random logits.

# %%
target = toy.log_target(log_ref, reward, BETA)  # [256] log pi* of each answer
log_z = toy.exact_log_z(log_ref, reward, BETA)
random_table = torch.randn(toy.STATES, toy.VOCABULARY, generator=torch.Generator().manual_seed(5))
log_random = toy.log_probabilities(random_table[None])[0]  # [256]

print(f"beta log Z = {BETA * log_z:.4f}\n\npolicy       J        beta log Z - beta KL(policy || target)")
for name, log_pi in {"reference": log_ref, "random": log_random, "target": target}.items():
    worth = toy.worth(log_pi, log_ref, reward, BETA)
    print(f"{name:10} {worth:7.4f}   {BETA * log_z - BETA * toy.kl(log_pi, target):7.4f}")

# %% [markdown]
# ## From the target to a loss
#
# We have a formula for the target. Why not just compute it? Because of $Z$: for a real model, the sum over all answers
# has more terms than there are atoms. For any *one* answer we can compute everything else. So take the logarithm of
# the target's definition and move everything to one side:
#
# $$\log Z(x) + \log \pi_\theta(y|x) - \log \pi_\text{ref}(y|x) - \frac{r(x,y)}{\beta} = 0 .$$
#
# If this holds for *every* answer $y$, then $\pi_\theta$ is the target, and the other way round. The left side is the
# **residual** of an answer: it says how far the answer is out of balance. The loss is the mean of the squared
# residuals. An answer, token by token, is a trajectory. So the loss is called **trajectory balance (TB)**. It comes
# from [Malkin et al. 2022](https://arxiv.org/abs/2201.13259), and [TBA](https://arxiv.org/abs/2503.18929) uses it for
# language models.
#
# **And log Z?** Put everything that we can compute on one side:
#
# $$u(y) = \log \pi_\text{ref}(y|x) + \frac{r(x,y)}{\beta} - \log \pi_\theta(y|x), \qquad \text{residual} = \log Z - u(y).$$
#
# At the target, every answer has $u(y) = \log Z$. Elsewhere each answer has its own opinion $u(y)$ about $\log Z$. We
# take $K$ answers to the same prompt, a **group**, and use the mean of their opinions in place of $\log Z$. This
# estimate is called **VarGrad** ([Richter et al. 2020](https://arxiv.org/abs/2010.10436)). With it the loss is the
# variance of $u$ in the group. Learning makes the answers agree.
#
# That is all. Here is the code of this project, without its docstrings. Tensors are [P, K]: P prompts, K answers each
# (`x[None]` turns K numbers into one with P = 1). `detach` lets no gradient through (exercise 2 asks why this is
# right). The first lines of `tb_loss` only refuse wrong shapes.

# %%
lesson.show(vargrad_log_z, tb_residual, tb_loss)

# %% [markdown]
# **By hand.** The random policy writes four answers. It is also the policy $\pi_\theta$ whose loss we want. (With the
# reference as $\pi_\theta$, two columns would cancel.) We need nothing but plain Python:

# %%
four = torch.multinomial(log_random.exp(), 4, replacement=True, generator=torch.Generator().manual_seed(0)).tolist()
u = [log_ref[i].item() + reward[i].item() / BETA - log_random[i].item() for i in four]
estimate = sum(u) / 4  # VarGrad: the mean of u stands for log Z
residuals = [estimate - one for one in u]
by_hand = sum(one**2 for one in residuals) / 4

print("answer  log pi_ref     r  r/beta  log pi       u  residual  square")
for i, one, residual in zip(four, u, residuals, strict=True):
    numbers = f"{log_ref[i]:10.3f} {reward[i]:5.2f} {reward[i] / BETA:7.3f} {log_random[i]:7.3f} {one:7.3f}"
    print(f"{toy.letters(toy.TOKENS[i])}    {numbers} {residual:9.3f} {residual**2:7.3f}")
by_code = tb_loss(log_random[four][None], log_ref[four][None], reward[four][None], BETA).item()  # [1 prompt, 4 answers]
print(f"mean                                      {estimate:7.3f} {sum(residuals) / 4:9.3f} {by_hand:7.3f}")
print(f"tb_loss                                                     {by_code:7.3f}")

# %% [markdown]
# Read one row aloud. A positive residual says: the policy writes this answer too often, measured by the opinion of the
# group. A negative one says: too rarely.
#
# ## The training loop
#
# Now the table learns. It starts as the reference policy. In each update the policy writes K answers, and the loss of
# these K answers changes the table. No gradient flows through the drawing, and TB needs none. The target is never
# used, except to measure the KL. Adam is the optimizer ([Kingma and Ba 2014](https://arxiv.org/abs/1412.6980)).

# %%
table = first.table[0].clone().requires_grad_()  # [85, 4] logits
optimizer = torch.optim.Adam([table], lr=RATE)
draws = torch.Generator().manual_seed(1)
losses, kls = [], []
for _ in range(UPDATES):
    log_pi = toy.log_probabilities(table[None])  # [1, 256]: one prompt, all answers
    drawn = torch.multinomial(log_pi.detach().exp(), K, replacement=True, generator=draws)  # [1, K]: the policy writes
    loss = tb_loss(log_pi.gather(1, drawn), log_ref[drawn], reward[drawn], BETA)  # of these K answers
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    kls.append(toy.kl(log_pi.detach(), target).item())  # only in this game can we know it
learnt = toy.log_probabilities(table.detach()[None])[0]  # [256]
print(f"KL(pi || pi*): {kls[0]:.4f} nats before, {kls[-1]:.4f} at the last of {UPDATES} updates")

# %% [markdown]
# > **Predict before you look:** each dot below is one of the 256 answers: to the right its log-probability under the
# > target, upwards that under the policy. Where the policy is the target, a dot lies
# > on the diagonal. Before learning, where do answers with a high reward (yellow) lie, above or below it? And after?

# %%
policies = {"before": log_ref, f"after {UPDATES} updates": learnt}
title = f"KL to the target: {kls[0]:.2f} nats before, {kls[-1]:.4f} after"
figures.picture(figures.against_target(target, reward, policies, title))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Before, the yellow dots lie below: the target gives them more probability than the reference does. (The border is a
# reward of $\beta \log Z$: there $\log \pi^* = \log \pi_\text{ref}$.) Afterwards the probable answers lie on the
# diagonal. The answers in the lower left corner are rarely drawn. They have moved too, because they share rows of the
# table with frequent answers, but they are not there yet. They also
# weigh little in the KL.
#
# </details>
#
# Is this one lucky game? We play one game for each seed, with the same loop. (`toy.learn` trains all games at once. It
# multiplies the loss by $\beta/2$, which Adam doesn't notice: Adam divides the gradient by its own size. `toy.by_lag`
# calls it for a list of lags: how many updates old is the policy that writes? Here 0.) From here on, thin lines are
# games, the band reaches from the lowest to the highest, and the thick line is the median.
#
# > **Predict:** the loss is a mean over K random answers. The KL is exact. Which of the two is smoother? Do both fall
# > towards 0?

# %%
final, course = toy.by_lag("TB", [0], SEEDS, BETA, RATE, UPDATES, k=K)
updates = range(1, UPDATES + 1)
title = f"Median KL to the target: {course.untrained.median():.2f} nats before, {final.median():.4f} at the end"
above, below = {"TB": (updates, course.loss.T)}, {"TB": (updates, course.kl.T)}
ylabels = ("TB loss [nats²]", "KL(π ‖ π*) [nats]")
figures.picture(figures.curves_above(above, below, "trainer updates", ylabels, title, log=("top", "bottom")))

# %% [markdown]
# <details><summary>Answer</summary>
#
# The KL is smoother. The loss jumps, because each value comes from other answers. Both fall, to less than a twentieth
# of their start. Why the KL falls more and more slowly is a question for later.
#
# </details>
#
# ## Which answers does it need?
#
# The residual of an answer doesn't ask who wrote it. At the target, it is 0 for any answer. So the loss is 0 there, and
# **the answers may come from anybody**: from an old copy of the policy, from another model, from a file. A loss that
# allows this is said to learn *off-policy*. RL calls data *on-policy* when the policy that learns has just written it.
#
# The other way round, there is a condition. The loss of a few answers is 0 as soon as *these* answers are in balance.
# It says nothing about the others. Can you build a policy that fools the loss, with a loss of 0 although it is far
# from the target?
#
# Here is one. Let the random policy write K answers. Give these answers exactly the target's probabilities. Share the
# rest evenly among all other answers:

# %%
drawn = torch.multinomial(log_random.exp(), K, replacement=True, generator=torch.Generator().manual_seed(0))  # [K]
fooling = toy.fooling(target, drawn)  # [256]
print(f"{K} answers, {len(drawn.unique())} different ones", end=", ")
print(f"with {target[drawn.unique()].exp().sum():.1%} of the target's probability\n")
group_loss = {}
print("policy     adds up to   TB loss on these answers   KL to the target")
for name, log_pi in {"reference": log_ref, "fooling": fooling, "target": target}.items():
    group_loss[name] = tb_loss(log_pi[drawn][None], log_ref[drawn][None], reward[drawn][None], BETA).item()
    print(f"{name:10} {log_pi.exp().sum():.6f} {group_loss[name]:20.1e} {toy.kl(log_pi, target):23.2f}")

# %% [markdown]
# The loss can't tell this policy from the target: both have 0, up to rounding. So the right sentence has a condition:
# **on answers that cover the space, the loss is 0 at the target and nowhere else.** "Cover" means: every answer is
# drawn again and again, and in ever new groups, so that any two answers meet in one. (Random draws do that, with K of 2
# or more.) A loss of 0 says that $u$ is the same number within a group. Then it is the same for all answers. So
# $\pi = \pi^* \cdot \text{constant}$, and the constant is 1 because probabilities add up to 1.
#
# > **Predict:** three ways to get answers. (1) The policy writes fresh ones for each update, as before. (2) The
# > *reference* writes fresh ones for each update, and never learns. (3) The reference writes K answers once, and every
# > update learns from the same K. Where do the loss and the KL go?

# %%
at_hand = torch.multinomial(games.log_ref.exp(), K, replacement=True, generator=torch.Generator().manual_seed(0))
_, by_reference = toy.by_lag("TB", [UPDATES], SEEDS, BETA, RATE, UPDATES, k=K)  # the writer is as old as the run
fixed = toy.learn("TB", games, BETA, torch.zeros(SEEDS, dtype=torch.long), [RATE], UPDATES, same=at_hand)
ways = {"fresh, by the policy": course, "fresh, by the reference": by_reference, f"the same {K} again": fixed}
above = {name: (updates, way.loss.T) for name, way in ways.items()}
below = {name: (updates, way.kl.T) for name, way in ways.items()}
ends = [float(toy.final_kl(way).median()) for way in ways.values()]
title = f"KL at the end: {ends[0]:.4f} and {ends[1]:.4f} with fresh answers, {ends[2]:.2g} with the same {K}"
figures.picture(figures.curves_above(above, below, "trainer updates", ylabels, title, log=("top", "bottom")))

# %% [markdown]
# <details><summary>Answer</summary>
#
# With fresh answers the policy finds the target, although in case 2 somebody else wrote them all: the reference gives
# every answer a chance. With the same few answers the loss falls to 0 (the rounding error of its numbers), and the KL
# stays high. **A small TB loss on few answers proves nothing.**
#
# </details>
#
# ## Where log Z comes from
#
# VarGrad's estimate is a mean of $u$ over the answers at hand. Call the policy that wrote them $\mu$, and write
# $E_\mu[\cdot]$ for the mean over all answers that $\mu$ may write. What is the estimate on average? Put the target's
# logarithm into $u$: $u = \log Z + \log \pi^* - \log \pi_\theta$. Now add and subtract $\log \mu$, and take the mean
# over answers by $\mu$:
#
# $$E_\mu[u] = \log Z + E_\mu\bigl[(\log \mu - \log \pi_\theta) - (\log \mu - \log \pi^*)\bigr] = \log Z + \mathrm{KL}(\mu \| \pi_\theta) - \mathrm{KL}(\mu \| \pi^*).$$
#
# The estimate is too high when the writer is nearer to the target than to the policy, and too low otherwise. On the
# policy's own answers, $\mu = \pi_\theta$, one term is 0: the estimate is **too low by the KL that is still to go.**
#
# **Check**, with the reference as $\pi_\theta$, for three writers. The first column is the mean of `vargrad_log_z`
# over 4,000 groups, less the exact $\log Z$.

# %%
writers = {"the policy itself": log_ref, "the target": target, "a random policy": log_random}
draws, measured, predicted = torch.Generator().manual_seed(2), {}, {}
print("writer              mean estimate - log Z   KL(writer || policy) - KL(writer || target)")
for name, log_mu in writers.items():
    groups = torch.multinomial(log_mu.exp(), 4000 * K, replacement=True, generator=draws).view(4000, K)  # [P, K]
    estimates = vargrad_log_z(log_ref[groups], log_ref[groups], reward[groups], BETA)  # [P]; pi_theta is pi_ref
    measured[name] = float(estimates.mean() - log_z)
    predicted[name] = float(toy.kl(log_mu, log_ref) - toy.kl(log_mu, target))
    print(f"{name:18} {measured[name]:14.3f} {predicted[name]:29.3f}")

# %% [markdown]
# > **Predict:** during learning on its own answers, how do the error of the estimate and the KL to the target go
# > together?

# %%
smooth = course.log_z.unfold(0, 20, 1).mean(-1)  # mean over 20 updates
exact = toy.exact_log_z(games.log_ref, games.reward, BETA)
gap, to_go = (exact - smooth).T, course.kl.unfold(0, 20, 1).mean(-1).T  # [seeds, updates]
shown = slice(0, min(300, UPDATES - 19))
series = {
    "exact log Z less its estimate (mean of 20 updates)": (updates[19:][shown], gap[:, shown]),
    "KL(π ‖ π*)": (updates[19:][shown], to_go[:, shown]),
}
title = f"The error of the estimate and the KL still to go: on average {(gap - to_go).mean().abs():.4f} nats apart"
figures.picture(figures.curves(series, "trainer updates", "nats", title, dashed=("KL(π ‖ π*)",)))

# %% [markdown]
# <details><summary>Answer</summary>
#
# They are the same number, apart from the noise of random answers. As the policy nears its target, the estimate nears
# the truth. So we learn $\log Z$ on the way, at no cost, and $\beta \log Z$ tells how good the best policy is.
#
# </details>
#
# ## Does learning come to rest?
#
# The KL above falls more and more slowly. Will it reach 0? The noise of random answers doesn't stand in the way: at
# the target all residuals are 0, *whichever* answers are drawn, and so is the gradient. But the optimizer may. **SGD**
# (stochastic gradient descent) takes a step of learning rate times gradient. **Adam** divides the gradient by its
# recent size. So its steps depend much less on it: each number moves by at most about the learning rate, and by less
# where the gradient keeps changing its sign.
#
# Compare the gradient of K own answers before and after learning. SGD's steps shrink in proportion:

# %%
draws, length = torch.Generator().manual_seed(3), {}
for name, logits in {"before": first.table[0], "after": table.detach()}.items():
    chance = toy.log_probabilities(logits[None])[0].exp()
    groups = torch.multinomial(chance, 50 * K, replacement=True, generator=draws).view(50, K)
    length[name] = float(torch.stack([toy.gradient("TB", logits, first, g, BETA).norm() for g in groups]).mean())
    print(f"{name:7} mean length of the gradient {length[name]:.4f}")

# %% [markdown]
# > **Predict:** Adam with two learning rates, and SGD. Which curves go on falling? Which learning rate of Adam ends
# > higher?

# %%
none, longer = torch.zeros(SEEDS, dtype=torch.long), 2 * UPDATES
optimizers = {f"Adam, rate {r:g}": ("adam", r) for r in (5 * RATE, RATE)} | {"SGD, rate 1": ("sgd", 2 / BETA)}
rest = {}  # the loss of toy.learn is beta / 2 * tb_loss: SGD's rate of 1 for tb_loss is 2 / beta there
for name, (kind, rate) in optimizers.items():
    kl = toy.learn("TB", games, BETA, none, [rate], longer, k=K, optimizer=kind).kl  # [updates, seeds]
    rest[name] = kl.unfold(0, 20, 1).mean(-1).T  # [seeds, updates]: mean over 20 updates
series = {name: (range(20, longer + 1), kl) for name, kl in rest.items()}
ends = [f"{kl[:, -80:].mean(1).median():.4f} ({name})" for name, kl in rest.items()]
figure = figures.curves(
    series, "trainer updates", "KL(π ‖ π*) [nats], mean of 20 updates", "KL at the end: " + ", ".join(ends), "y"
)
figures.picture(figure)

# %% [markdown]
# <details><summary>Answer</summary>
#
# Adam with the larger rate falls fastest, and then it falls no more: it steps over the target again and again, and
# trembles about it. The smaller rate gets nearer. SGD goes on falling, because its steps shrink with the residuals. So
# with Adam, one lowers the learning rate towards the end. (SGD has its own trouble: a rate that is safe may be slow.
# Look at this figure again in exercise 1.)
#
# </details>
#
# ## The policy gradient
#
# The textbook way to learn from rewards is the **policy gradient**: climb the slope of $J$. Its oldest form is
# REINFORCE ([Williams 1992](https://doi.org/10.1007/BF00992696)). Let us derive it for our $J$, in four lines.
# $\nabla$ is the gradient with respect to $\theta$, and $E$ without an index is the mean over the policy's own
# answers. Write $R(y) = r(x,y) - \beta\,(\log \pi_\theta(y|x) - \log \pi_\text{ref}(y|x))$: the reward of an answer
# less its price. Then $J = \sum_y \pi_\theta(y|x)\, R(y)$, and
#
# 1. by the product rule, $\nabla J = \sum_y (\nabla \pi_\theta)\, R + \sum_y \pi_\theta\, \nabla R$;
# 2. $\nabla \pi_\theta = \pi_\theta\, \nabla \log \pi_\theta$, the derivative of a logarithm, rearranged. So the
#    first sum is $E[R\, \nabla \log \pi_\theta]$;
# 3. $\nabla R = -\beta\, \nabla \log \pi_\theta$. So the second sum is $-\beta\, E[\nabla \log \pi_\theta] = -\beta
#    \sum_y \nabla \pi_\theta = -\beta\, \nabla \sum_y \pi_\theta = -\beta\, \nabla 1 = 0$;
# 4. what remains is $\nabla J = E[R\, \nabla \log \pi_\theta] = E[(R - b)\, \nabla \log \pi_\theta]$ for any constant
#    $b$, because $E[b\, \nabla \log \pi_\theta] = 0$ as in line 3. Such a $b$ is called a **baseline**.
#
# Now TB. Use any constant $c$ for $\log Z$, and answers by any writer $\mu$. The writer counts as a constant, even when
# it happens to be $\pi_\theta$: no gradient flows through the drawing. Note that $u = R/\beta$. The residual is $c -
# u$, and its gradient is $\nabla \log \pi_\theta$. So
#
# $$\nabla\, E_\mu\bigl[(c - u)^2\bigr] = 2\, E_\mu\bigl[(c - u)\, \nabla \log \pi_\theta\bigr] = -\frac{2}{\beta}\, E_\mu\bigl[(R - \beta c)\, \nabla \log \pi_\theta\bigr].$$
#
# Now put $\mu = \pi_\theta$: this is $-\frac{2}{\beta} \nabla J$, whatever $c$ is. **On fresh answers of the policy
# itself, the expected gradient of TB is the policy gradient, times $-2/\beta$**, and $\log Z$ is its baseline.
#
# **Check**, exactly, with all 256 answers. The policy is the random one, so that no term is 0 by accident.

# %%
table = random_table.clone().requires_grad_()
log_pi = toy.log_probabilities(table[None])[0]  # [256]
(slope,) = torch.autograd.grad(toy.worth(log_pi, log_ref, reward, BETA), table, retain_graph=True)  # of J, [85, 4]

apart = {}
print(f"largest entry of the gradient of J: {slope.abs().max():.4f}\n")
print("writer      log Z        largest distance of -beta/2 times TB's gradient")
for writer, log_mu in {"the policy": log_pi.detach(), "reference": log_ref}.items():
    for name, c in {"exact": log_z, "0": torch.tensor(0.0)}.items():
        residual = tb_residual(log_pi[None], log_ref[None], reward[None], c[None], BETA)[0]  # [256]
        (by_tb,) = torch.autograd.grad((log_mu.exp() * residual.square()).sum(), table, retain_graph=True)
        apart[writer, name] = float((-BETA / 2 * by_tb - slope).abs().max())
        print(f"{writer:11} {name:11} {apart[writer, name]:.7f}")

# %% [markdown]
# With another writer it is a *different* gradient, and there $\log Z$ counts: line 3 needs the policy's own answers.
# Yet with the exact $\log Z$ it is 0 at the same place, the target. That is why TB may learn from others.
#
# **In a group** the constant is the mean of the group's own $u$, and the same algebra holds for *any* K answers,
# without any expectation:
#
# $$-\frac{\beta}{2}\, \nabla\, \text{TB loss} = \frac1K \sum_{i=1}^K (R_i - \bar R)\, \nabla \log \pi_\theta(y_i|x), \qquad \bar R = \frac1K \sum_i R_i.$$
#
# $R_i - \bar R$ is the **advantage**: how much better the answer was than its group. The right side is REINFORCE with
# the group's mean as baseline. They are *one* method: on the same answers, neither can win. One detail is left:
# $\bar R$ contains $R_i$ itself. So the expectation of this gradient on own answers is $\frac{K-1}{K} \nabla J$, a
# little shorter. (Exercise 2 mends it.)
#
# **Check** both: on the K answers from above, and for K = 2 over all 256 × 256 pairs of answers.

# %%
by_tb, by_pg = (toy.gradient(name, random_table, first, drawn, BETA) for name in ("TB", "policy gradient"))
print(f"{K} answers: largest distance {(by_tb - by_pg).abs().max():.7f}, largest entry {by_tb.abs().max():.4f}")

pairs = torch.cartesian_prod(torch.arange(256), torch.arange(256))  # [65536, 2]: a group of K = 2 in each row
pair = log_pi[pairs], log_ref[pairs], reward[pairs]
residual = tb_residual(*pair, vargrad_log_z(*pair, BETA), BETA)
expected = (log_pi.detach()[pairs].sum(1).exp() * residual.square().mean(1)).sum()  # each pair by its probability
(by_pairs,) = torch.autograd.grad(expected, table)
half = float((-BETA / 2 * by_pairs - slope / 2).abs().max())
print(f"all pairs: largest distance from half the gradient of J {half:.7f}")

# %% [markdown]
# ## How many answers in a group?
#
# A gradient from few answers is noisy. Our measure of the noise: its mean squared distance from the exact gradient,
# divided by the exact gradient's squared length. Below 1, there is more signal than noise. Above 1, learning is
# possible too: the noise of many small steps averages out. We measure at the start of learning, where
# $\pi_\theta = \pi_\text{ref}$ and so $u = r/\beta$.
#
# > **Predict:** three choices for $\log Z$: 0 (no baseline), the exact value, VarGrad's mean. (We scale VarGrad's
# > gradient by $\frac{K}{K-1}$, so that all three have the same expectation.) How does the noise fall when K doubles?
# > Which choice has the least?

# %%
sizes, choices = [2, 4, 8, 16, 32, 64], ("zero", "exact log Z", "VarGrad")
starts = list(zip(games.table, games.reward, games.log_ref, strict=True))
noise = {c: torch.tensor([[toy.gradient_noise(*s, BETA, k, c) for k in sizes] for s in starts]) for c in choices}
middle = {name: values.median(0).values for name, values in noise.items()}  # [sizes]
series = {f"log Z: {name}": (sizes, values) for name, values in noise.items()}
numbers = ", ".join(f"{name} {values[-1]:.2f}" for name, values in middle.items())
title = f"Noise / signal at K = 64, β = {BETA:g}: {numbers}"
figures.picture(figures.curves(series, "answers in a group, K", "noise / signal", title, log="xy"))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Without a baseline and with the exact $\log Z$ the noise falls like $1/K$, with VarGrad like $1/(K - 1)$: threefold
# from K = 2 to 4, twofold for large K. No baseline is the worst. The surprise: at $\beta = 0.25$, VarGrad's rough mean
# beats the exact $\log Z$ in a group of 8 or more. For two answers, the exact value wins.
#
# </details>
#
# **Who wins where?** The noise of a choice $b$ grows with the mean square of $b - u_i$ (if we take the length of
# $\nabla \log \pi$ as the same for all answers).
#
# - The best constant is the mean of $u$. It leaves the variance of $u$, $V$.
# - The exact $\log Z$ is above this mean by the remaining KL (see above): it leaves $V + \mathrm{KL}^2$.
# - VarGrad, scaled, compares each answer with the mean of the $K - 1$ *others* (exercise 2). This mean has an error of
#   its own, $V/(K-1)$: it leaves $V + V/(K-1)$.
#
# So **VarGrad wins where $V/(K-1) < \mathrm{KL}^2$**. A small $\beta$ makes the remaining KL large, a large $\beta$
# makes it small.
#
# > **Predict:** draw the ratio, noise with the exact $\log Z$ over noise with VarGrad, over $\beta$. Where is it above
# > 1? Which K needs the smallest $\beta$?

# %%
betas, ks = [0.05, 0.1, 0.25, 0.5, 1.0, 2.0], (2, 4, 16, 64)
ratio = torch.zeros(len(ks), SEEDS, len(betas))  # noise with the exact log Z / noise with VarGrad
rule, without = torch.zeros_like(ratio), torch.zeros_like(ratio)  # (V + KL^2) / (V + V / (K - 1)); zero / VarGrad
chance = games.log_ref.exp()  # [seeds, 256]
for b, beta in enumerate(betas):
    u = games.reward / beta
    v = (chance * u**2).sum(1) - (chance * u).sum(1) ** 2  # [seeds] the variance of u
    kl_to_go = toy.kl(games.log_ref, toy.log_target(games.log_ref, games.reward, beta))
    for i, k in enumerate(ks):
        rule[i, :, b] = (v + kl_to_go**2) / (v + v / (k - 1))
        for j, start in enumerate(starts):
            zero, by_exact, by_mean = (toy.gradient_noise(*start, beta, k, choice) for choice in choices)
            ratio[i, j, b], without[i, j, b] = by_exact / by_mean, zero / by_mean
series = {f"K = {k}": (betas, values) for k, values in zip(ks, ratio, strict=True)}
title = "Above 1 VarGrad has less noise than the exact log Z, below 1 it has more"
figures.picture(figures.curves(series, "β", "noise with exact log Z / with VarGrad", title, log="x"))

# %% [markdown]
# <details><summary>Answer</summary>
#
# VarGrad wins at small $\beta$. The exact $\log Z$ wins at large $\beta$: there it is nearly the best constant, and
# unlike a mean it has no sampling error. (But only a game knows it.) Larger groups move the border to the right. In a
# group of two, VarGrad wins at the smallest $\beta$ of this figure only; with 64 answers it is a tie from $\beta = 1$
# on. The rule above predicts each ratio to within 25 %.
#
# And no baseline at all? For K = 16 it has 3.8 times the noise of VarGrad *at every* $\beta$ (median of the games):
# both scale with $u = r/\beta$, so $\beta$ cancels. The exact $\log Z$ is what changes. At $\beta = 2$ it has a
# quarter of the noise of no baseline. At $\beta = 0.05$ it is far above the mean of $u$, and still has two thirds of
# that noise.
#
# </details>
#
# ## What to take away
#
# - The best policy for "reward, less $\beta$ for each nat away from the reference" is
#   $\pi_\text{ref}\, e^{r/\beta} / Z$. Its $J$ is $\beta \log Z$.
# - TB says this for each answer. On random groups that cover the space, it is 0 there and nowhere else, whoever wrote
#   them. On few answers, a loss of 0 proves nothing.
# - VarGrad estimates $\log Z$ from a group. On the policy's own answers, it is too low by the KL still to go; in
#   general the error is $\mathrm{KL}(\mu \| \pi_\theta) - \mathrm{KL}(\mu \| \pi^*)$.
# - TB's noise vanishes at the target. A fixed learning rate of Adam keeps a policy trembling all the same; under SGD,
#   at a rate that is not too large, the KL goes on falling.
# - On own answers, TB's expected gradient is the policy gradient times $-2/\beta$. In a group it is REINFORCE with the
#   group's mean as baseline.
# - The group's mean is the better baseline where $V/(K-1) < \mathrm{KL}^2$, the exact $\log Z$ elsewhere.
#
# ## Exercises
#
# **1. The price of a nat.** Set `BETA = 0.05`, then `BETA = 2`, and run all cells. How do the target and the first
# figure change? At the first update, the loss is much higher with the small value, although the game is the same. By
# which factor, and why?
#
# <details><summary>Solution</summary>
#
# A nat is cheap at $\beta = 0.05$: the target goes far from the reference ($\mathrm{KL}(\pi_\text{ref} \| \pi^*)$ is
# 7.42 nats in the first game, instead of 0.70), and its best answer has a probability of 0.40. In the first figure the
# dots spread over a much longer diagonal. At $\beta = 2$ target and reference are nearly the same (0.012 nats), and
# the dots lie near the diagonal from the start. The KL of the second figure stops at 0.002, a fifth of all that there
# was to learn. (The section on rest says why.) At $\beta = 0.05$ the figure of that section looks different: nothing is
# near the target yet, SGD crawls (its KL is 0.46 after 1,500 updates and 0.43 after 3,000), and both Adams still fall.
#
# At the first update $\pi_\theta = \pi_\text{ref}$, so $u = r/\beta$, and the loss is the variance of the group's
# rewards divided by $\beta^2$. From 2 to 0.05 this is a factor of $40^2 = 1600$. So losses at different $\beta$ can't
# be compared, but $\beta^2$ times the loss can: its unit is reward squared. In this game it is about 0.093 at the
# start for every $\beta$.
#
# ```python
# many = torch.multinomial(log_ref.exp(), 16_000, replacement=True, generator=torch.Generator().manual_seed(4)).view(-1, 16)
# for beta in (0.05, 0.25, 2.0):
#     goal = toy.log_target(log_ref, reward, beta)
#     loss = tb_loss(log_ref[many], log_ref[many], reward[many], beta)
#     print(f"beta {beta:4}: target's best answer {goal.max().exp():.2f}, KL(reference || target) {toy.kl(log_ref, goal):.3f},", end=" ")
#     print(f"first loss {loss:8.4f}, beta^2 * loss {beta**2 * loss:.4f}")
#     assert torch.isclose(beta**2 * loss, reward[many].var(1, correction=0).mean(), rtol=1e-3)
# ```
#
# </details>
#
# **2. Leave one out.** In `vargrad_log_z`, `detach` lets no gradient through the estimate. Show on paper that the
# gradient of the loss is the same without it. Now use another estimate for each answer $i$: the mean of $u$ over all
# answers of the group *except* $i$. What changes, with `detach` and without it?
#
# <details><summary>Solution</summary>
#
# Write $\bar u$ for the group's mean. The loss is $\frac1K \sum_i (\bar u - u_i)^2$. If $\bar u$ lets gradients
# through, its part of the gradient is $\frac2K \bigl(\sum_i (\bar u - u_i)\bigr) \nabla \bar u$. The residuals of a
# group add up to 0, so this part is 0.
#
# The mean of the others is $\frac{K \bar u - u_i}{K-1}$. The residual becomes
# $\frac{K \bar u - u_i}{K-1} - u_i = \frac{K}{K-1}\,(\bar u - u_i)$: VarGrad's, a little longer.
#
# With `detach`, the gradient is $\frac2K \sum_i \frac{K}{K-1} (\bar u - u_i)\, \nabla \log \pi_\theta(y_i)$: VarGrad's
# times $\frac{K}{K-1}$. That cancels the factor $\frac{K-1}{K}$ from above, so its expectation on own answers is
# exactly $-\frac2\beta \nabla J$. (The mean of the others doesn't depend on $y_i$. So it is a baseline in the strict
# sense. Policy gradients with this baseline are called RLOO, see
# [Ahmadian et al. 2024](https://arxiv.org/abs/2402.14740).)
#
# Without `detach`, the loss is $\bigl(\frac{K}{K-1}\bigr)^2$ times VarGrad's loss, so the gradient has this factor.
# Now `detach` changes something: the residuals add up to 0, but each of them is multiplied by the gradient of another
# estimate. The direction stays the same in each case. Only the length changes.
#
# ```python
# table = random_table.clone().requires_grad_()
# log_pi = toy.log_probabilities(table[None])[0]
#
#
# def one_left_out(log_pi, detach):
#     u = log_ref[drawn] + reward[drawn] / BETA - log_pi[drawn]
#     estimate = (u.sum() - u) / (K - 1)  # for each answer: the mean of the others
#     return ((estimate.detach() if detach else estimate) - u).square().mean()
#
#
# own = log_pi[drawn][None], log_ref[drawn][None], reward[drawn][None]
# u = (own[1] + own[2] / BETA - own[0])[0]
# losses_of_u = {
#     "VarGrad, detached": tb_loss(*own, BETA),
#     "VarGrad, not detached": u.var(correction=0),
#     "one left out, detached": one_left_out(log_pi, True),
#     "one left out, not detached": one_left_out(log_pi, False),
# }
# slopes = {name: torch.autograd.grad(x, table, retain_graph=True)[0] for name, x in losses_of_u.items()}
# for (name, found), factor in zip(slopes.items(), (1, 1, K / (K - 1), (K / (K - 1)) ** 2), strict=True):
#     print(f"{name:27} times {float(found.norm() / slopes['VarGrad, detached'].norm()):.4f}, expected {factor:.4f}")
#     assert torch.allclose(found, factor * slopes["VarGrad, detached"], atol=1e-3)
# ```
#
# </details>
#
# **3. How much is enough?** Let the reference write $n$ answers once, and learn from the same $n$ in every update, for
# $n$ = 16, 64, 256 and 1024. How many *different* answers are among them? How does the KL at the end fall?
#
# <details><summary>Solution</summary>
#
# Medians of five games, after 1,500 updates; before learning the KL is 0.62 nats:
#
# | answers | different | of the target's probability | KL at the end |
# | --- | --- | --- | --- |
# | 16 | 14 | 25 % | 0.48 |
# | 64 | 42 | 52 % | 0.27 |
# | 256 | 101 | 81 % | 0.10 |
# | 1,024 | 174 | 95 % | 0.023 |
#
# The TB loss is below 0.00001 in all four cases: it can't tell them apart. What counts is how much of the target's
# probability the answers cover. The rest is left to chance. Even 1,024 answers end higher than 16 *fresh* ones in each
# update (0.0016).
#
# ```python
# ends_of_n = []
# for n in (16, 64, 256, 1024):
#     same = torch.multinomial(games.log_ref.exp(), n, replacement=True, generator=torch.Generator().manual_seed(0))
#     different = torch.tensor([float(len(row.unique())) for row in same]).median()
#     covered = torch.stack([t[row.unique()].exp().sum() for t, row in zip(toy.log_target(games.log_ref, games.reward, BETA), same)])
#     stay = toy.learn("TB", games, BETA, none, [RATE], UPDATES, same=same)
#     ends_of_n.append(float(stay.kl[-1].median()))
#     print(f"{n:5} answers, {different:4.0f} different, {covered.median():.0%} of the target, KL {ends_of_n[-1]:.4f}, loss {stay.loss[-1].median():.0e}")
# assert ends_of_n == sorted(ends_of_n, reverse=True) and ends_of_n[-1] < ends_of_n[0] / 5
# ```
#
# </details>

# %%
worths = [float(toy.worth(p, log_ref, reward, BETA)) for p in (log_ref, log_random, target)]
by_kl = [float(BETA * (log_z - toy.kl(p, target))) for p in (log_ref, log_random, target)]
identity = max(abs(a - b) for a, b in zip(worths, by_kl, strict=True))
alone = toy.learn("TB", first, BETA, torch.zeros(1, dtype=torch.long), [RATE], UPDATES, k=K).kl[:, 0]
other_loop = float((alone - torch.tensor(kls)).abs().max())
probable = target >= target.sort().values[-64]  # the quarter of the answers that the target likes best
off = (learnt - target).abs()
rare, before = target.argsort()[:64], (log_ref - target).abs()
three = float((noise["VarGrad"][:, 0] / noise["VarGrad"][:, 1]).median())
border = bool(((log_ref < target) == (reward > BETA * log_z))[(reward - BETA * log_z).abs() > 1e-4].all())
jump = {name: float(x.diff(dim=0).abs().mean() / x.mean()) for name, x in (("loss", course.loss), ("KL", course.kl))}
fresh, same_again = torch.stack([course.kl[-1], by_reference.kl[-1]]), fixed.kl[-1]
fall = float((course.untrained / final).min())
loss_fall = float(course.loss[:20].mean() / course.loss[-100:].mean())
error = max(abs(measured[name] - predicted[name]) for name in writers)
fast_adam, slow_adam, sgd = (  # [half, end]: medians over games, means over 100 updates
    [float(kl[:, i - 80 : i].mean(1).median()) for i in (UPDATES - 19, longer - 19)] for kl in rest.values()
)
own, others = (max(apart[w, c] for c in ("exact", "0")) for w in ("the policy", "reference"))
group = float((by_tb - by_pg).abs().max())
halves = {name: float((values[1:-1] / values[2:]).mean()) for name, values in middle.items()}  # K = 4 to 64
wins = {k: values.median(0).values for k, values in zip(ks, ratio, strict=True)}  # [betas]
no_baseline = without[2].median(0).values  # K = 16: zero / VarGrad
to_exact = (without / ratio)[2].median(0).values  # zero / exact log Z
lesson.check(
    1,
    globals(),
    {
        f"J is beta log Z - beta KL(pi || target), to {identity:.0e}; the target has the highest": (
            identity < 1e-4 and worths[2] > max(worths[:2]) + 0.1
        ),
        f"four answers by hand give {by_hand:.3f}, as tb_loss; their residuals add up to 0": (
            abs(by_hand - by_code) < 1e-4 and abs(sum(residuals)) < 1e-4
        ),
        f"the written loop and toy.learn are the same to {other_loop:.0e} nats": other_loop < 0.02,
        "before learning an answer is too rare exactly if its reward is above beta log Z": border,
        f"after it the probable quarter is {off[probable].mean():.3f} nats off, the rest {off[~probable].mean():.3f}": (
            off[probable].mean() < off[~probable].mean() / 4
        ),
        f"the rarest quarter was {before[rare].mean():.2f} nats off, and is {off[rare].mean():.2f}": (
            off[~probable].mean() < off[rare].mean() < (0.7 if FAST else 0.4) * before[rare].mean()
        ),
        f"the rest has {target[~probable].exp().sum():.0%} of the target's probability": (
            target[~probable].exp().sum() < 0.25
        ),
        f"TB's KL falls at least {fall:.0f}-fold in every game, its loss {loss_fall:.0f}-fold": (
            fall > 20 and loss_fall > 20
        ),
        f"the loss jumps by {jump['loss']:.0%} from update to update, the KL by {jump['KL']:.0%}": (
            jump["loss"] > 10 * jump["KL"]
        ),
        f"the fooling policy has a loss of {group_loss['fooling']:.0e} and a KL of {toy.kl(fooling, target):.2f}": (
            group_loss["fooling"] < 1e-6 < 0.1 < group_loss["reference"]
            and toy.kl(fooling, target) > 1
            and abs(fooling.exp().sum() - 1) < 1e-5
        ),
        f"fresh answers end at most at {fresh.max():.4f} nats, the same {K} at least at {same_again.min():.2f}": (
            fresh.max() < 0.04 and same_again.min() > 0.2 and fixed.loss[-1].max() < 1e-6
        ),
        f"VarGrad's error is KL(mu || pi) - KL(mu || target), to {error:.3f}, for three writers": error < 0.04,
        f"it is {measured['the target']:+.2f} for the target, {measured['the policy itself']:+.2f} for the policy": (
            measured["the target"] > 0.3 and measured["the policy itself"] < -0.4
        ),
        f"while it learns, the error is the KL to go, to {(gap - to_go).mean().abs():.3f} nats": (
            (gap - to_go).mean().abs() < 0.02 and (gap - to_go)[:, :50].mean().abs() < to_go[:, :50].mean() / 5
        ),
        f"the gradient is {length['before'] / length['after']:.0f} times shorter after learning": (
            length["after"] < length["before"] / 5 and group_loss["target"] < 1e-6
        ),
        f"from half to all updates SGD falls {sgd[0] / sgd[1]:.1f}-fold, the faster Adam {fast_adam[0] / fast_adam[1]:.1f}": (
            sgd[1] < 0.6 * sgd[0] and fast_adam[1] / fast_adam[0] > (1.3 * sgd[1] / sgd[0] if FAST else 0.8)
        ),
        f"the faster Adam ends at {fast_adam[1]:.4f}, the slower at {slow_adam[1]:.4f}": (
            fast_adam[1] > (1 if FAST else 5) * slow_adam[1]
        ),
        f"on own answers -beta/2 times TB's gradient is that of J to {own:.0e}, with any log Z": own < 1e-5,
        f"with another writer it differs by up to {others:.2f}": others > 0.1,
        f"in a group TB's gradient is REINFORCE's to {group:.0e}; in mean (K - 1)/K of J's": (
            group < 1e-5 and half < 1e-5
        ),
        f"noise falls by {min(halves.values()):.2f} to {max(halves.values()):.2f} when K doubles, from 4 on": (
            min(halves.values()) > 1.8 and max(halves.values()) < 2.4
        ),
        f"from K = 2 to 4 VarGrad's falls {three:.1f}-fold": 2.4 < three < 3.6,
        "at beta = 0.25 VarGrad has the least noise from K = 8 on, the exact log Z for K = 2, no baseline never": bool(
            (middle["VarGrad"] < middle["exact log Z"])[2:].all()
            and middle["VarGrad"][0] > middle["exact log Z"][0]
            and (middle["zero"] > 1.5 * torch.maximum(middle["VarGrad"], middle["exact log Z"])).all()
        ),
        f"the rule gives each ratio, to {(ratio / rule - 1).abs().max():.0%}": (ratio / rule - 1).abs().max() < 0.25,
        "VarGrad wins at beta = 0.05 for every K; at beta = 2 it loses up to K = 16 and ties for K = 64": bool(
            min(w[0] for w in wins.values()) > 1.1
            and max(wins[k][-1] for k in (2, 4, 16)) < 0.97
            and abs(wins[64][-2:] - 1).max() < 0.03
            and wins[2][2] < 0.8 < 1.2 < wins[4][1]
            and wins[16][2] > 1.1
        ),
        f"no baseline, K = 16: {no_baseline[0]:.1f} times VarGrad's noise at every beta": bool(
            no_baseline.max() / no_baseline.min() < 1.01 and 3.3 < no_baseline[0] < 4.2
        ),
        f"and {to_exact[0]:.1f} times that of the exact log Z at beta = 0.05, {to_exact[-1]:.1f} times at 2": bool(
            1.3 < to_exact[0] < 2.1 and 3.3 < to_exact[-1] < 4.8
        ),
    },
)
