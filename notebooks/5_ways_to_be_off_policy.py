# %% [markdown]
# # 5 · Ways to be off-policy
#
# **Question: which ways of learning tolerate old answers, and which of their parts decides it?**
#
# **At the end you can** write four losses for old answers as one formula with two switches, say which switch makes one
# of them fail, measure how old an answer really is, and compare two methods fairly when their learning rates differ.
#
# **You need** notebook 1 (reward, policy, target, KL divergence, trajectory balance (TB), policy gradient, the goal
# $J$).
#
# **Run time:** about a minute and a half on 2 cores.
#
# <details><summary>For the instructor</summary>
#
# | section | minutes |
# | --- | --- |
# | Opening | 4 |
# | Two switches, four ways | 12 |
# | Which switch decides? | 16 |
# | V-trace: the lag or the critic? | 9 |
# | How old is an old answer? | 10 |
# | Do small steps save frozen KL? | 10 |
# | What do weights buy? | 11 |
# | Exercises | 18 |
#
# **On the board**: the formula $-\,w\,(R - \bar R)\log\pi$ and its 2 × 2 table; then students fill the four cells with
# what they expect at lag 200. Later: "training = updates × learning rate".
#
# Students often believe that a loss without importance weights must follow a wrong direction and so end at a wrong
# place. The first half is true of TB, the second is not: ask where $R - \bar R$ is zero.
#
# </details>
#
# The policy that wrote an answer is called the **behaviour policy**, $\mu$. When $\mu$ is the policy $\pi$ that is
# being trained, learning is *on-policy*; otherwise it is *off-policy*. Asynchronous training is always a little
# off-policy: while an answer is written and waits in the buffer, the trainer goes on. The number of trainer updates in
# between is the **lag**.

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
import numpy as np
import torch

from notebooks import figures, lesson, toy

torch.set_num_threads(1)  # small tensors: one thread is fastest

# %% tags=["parameters"]
FAST = False  # True: less training, fewer lags, rates and seeds, as the tests do
BETA = 0.25  # price of a nat of KL from the reference policy
RATE = 0.02  # learning rate of Adam
CLIP = 8.0  # largest importance weight
LAGS = [0, 20, 100] if FAST else [0, 5, 20, 50, 100, 200]  # trainer updates
MARKS = [2, 4, 8, 16] if FAST else [2, 5, 10, 15, 20, 30]  # training = updates x learning rate; all train to the last
RATES = [0.01, 0.05] if FAST else [0.002, 0.005, 0.01, 0.02, 0.05]  # learning rates, for one figure
SEEDS = 3 if FAST else 5  # games, each with its own rewards and its own draws

# %% [markdown]
# ## Two switches, four ways
#
# All ways see the same data: groups of $K = 16$ answers that the policy of `lag` updates ago wrote, with their rewards.
# (While there is no policy so old, the start writes. So before update 200, answers of "lag 200" are younger than that.)
# Four of them minimise one formula, the mean over the group of
#
# $$-\,w\,\bigl(R - \bar R\bigr)\,\log \pi,$$
#
# where $w$ and $R$ count as constants. $R$ is the reward minus the price of moving away from the reference policy, and
# $\bar R$ is the group's mean of $R$. There are two switches:
#
# - **The price** is *current*, $R = r - \beta\,(\log \pi - \log \pi_\text{ref})$, computed anew in every update; or it
#   is *frozen*, $R = r - \beta\,(\log \mu - \log \pi_\text{ref})$, computed once, when the answer is written.
# - **The weight** is 1, or it is the **importance weight** $w = \min(\pi/\mu, 8)$. An answer that $\pi$ would write
#   twice as often as $\mu$ did then counts twice. This is called *importance sampling* (IS). A weight above 8 is
#   clipped to 8, so that one huge weight can't drown all others.
#
# | | $w = 1$ | $w = \min(\pi/\mu, 8)$ |
# | --- | --- | --- |
# | **current price** | **TB** | **clipped IS** |
# | **frozen price** | **frozen KL** | **frozen KL + IS** |
#
# Notebook 1 shows that TB belongs here: its gradient is, up to a factor, that of the formula with the current price and
# $w = 1$. Clipped IS is TBA′ of the [TBA paper](https://arxiv.org/abs/2503.18929). Frozen KL is usual where the price
# is a part of the reward, as in [Ouyang et al.](https://arxiv.org/abs/2203.02155), who train language models from human
# feedback (their PPO also has a clipped weight for each token). TB needs to know nothing about $\mu$; each of the other
# three needs $\log \mu$ of the answer.
#
# On *fresh* answers, $\mu = \pi$, both switches do nothing. **Check**: the gradient of each loss on the same 16
# answers.

# %%
game = toy.problem(1)
drawn = torch.multinomial(game.log_ref[0].exp(), 16, replacement=True, generator=torch.Generator().manual_seed(0))
names = ("TB", "clipped IS", "frozen KL", "frozen KL + IS")
gradients = {name: toy.gradient(name, game.table[0], game, drawn, BETA) for name in names}
for name, g in gradients.items():
    print(
        f"{name:15} differs from TB's by at most {(g - gradients['TB']).abs().max():.0e}; largest entry {g.abs().max():.0e}"
    )

# %% [markdown]
# ## Which switch decides?
#
# Now the answers get old. We train each way at each lag, on several games, and measure the exact KL from the target.
#
# > **Predict:** four curves, the KL at the end of learning against the lag. Which ones rise: those with the frozen
# > price, those without the weight, or only the one with both faults?

# %%
updates = round(MARKS[-1] / RATE)
ends, courses = {}, {}
for name in names:
    ends[name], courses[name] = toy.by_lag(name, LAGS, SEEDS, BETA, RATE, updates, clip=CLIP)
middle = {name: end.median(1).values for name, end in ends.items()}  # over games
start = float(courses["TB"].untrained.median())
series = {name: (LAGS, ends[name].T) for name in names}
frozen_end, tb_end = float(middle["frozen KL"][-1]), float(middle["TB"][-1])
title = (
    f"Lag {LAGS[-1]}: TB ends at a KL of {tb_end:.2g} nats, frozen KL at {frozen_end:.2g}; the start is at {start:.2g}"
)
weighted = ("clipped IS", "frozen KL + IS")
figures.picture(
    figures.curves(series, "lag [trainer updates]", "final KL(π ‖ π*) [nats]", title, log="y", dashed=weighted)
)

# %%
print(f"final KL at lag {LAGS[-1]} [nats]; the start is at {start:.2g}\n")
print(f"{'':15} {'no weight':>10} {'weight':>10}")
for price, pair in {"current price": names[:2], "frozen price": names[2:]}.items():
    print(f"{price:15} {middle[pair[0]][-1]:10.2g} {middle[pair[1]][-1]:10.2g}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# The two with the frozen price rise, with or without the weight. The two with the current price stay flat, with or
# without the weight. So **the price decides**. The weight makes the frozen price less bad here at a large lag, but
# doesn't cure it. (In 5 of the 24 settings of `bench/lag.py` it makes it worse.) At the largest lag both end about as
# far from the target as they began, or farther.
#
# TB and clipped IS are a tie.
#
# </details>
#
# Why? At the target, $r - \beta(\log \pi - \log \pi_\text{ref})$ is the same number for every answer. So with the
# current price $R - \bar R$ is zero there, *whoever wrote the answers*: the target is a place of rest. With the frozen
# price it is zero only if $\mu$ is the target too. Until then the price pulls the policy back from the place where it
# was `lag` updates ago. The pull comes too late, like steering a ship that turns a minute after the wheel. Such a place
# of rest is unstable when the policy moves far within the lag.
#
# > **Predict:** which picture does a late pull give over time, at lag 20?

# %%
at = int(np.abs(np.array(LAGS) - 20).argmin())
time, rows = range(1, updates + 1), slice(at * SEEDS, (at + 1) * SEEDS)
series = {name: (time, courses[name].kl[:, rows].T) for name in ("TB", "frozen KL")}
second_half = {name: courses[name].kl[updates // 2 :, rows] for name in ("TB", "frozen KL")}
swing = float(second_half["frozen KL"].median() / second_half["TB"].median())
title = f"Lag {LAGS[at]}, second half of learning: frozen KL is {swing:.2g} times as far from the target as TB"
figures.picture(figures.curves(series, "trainer updates", "KL(π ‖ π*) [nats]", title, log="y"))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Frozen KL comes near the target as fast as TB, and then can't stay there. It overshoots, is pulled back too late, and
# goes on swinging at a distance. TB goes on falling.
#
# </details>
#
# Flat in the lag doesn't mean "never fails". `bench/lag.py` trains these four ways in 24 settings of optimizer, β and
# learning rate; its table is in `bench/results/lag.json`. In two settings *all four* end farther away than they
# started, at lag 0 already: plain gradient descent (SGD) with β = 4 and rate 3 ends at a KL of 3.9 nats, Adam with β =
# 4 and rate 0.05 at 0.015; both start at 0.0027. There the lag is not the cause: the steps are too large. In the 23
# settings other than the first, TB's KL at lags 20 and 200 is 0.5 to 1.4 times that at lag 0. Frozen KL ends 38 times
# as far away as TB at lag 20 and 324 times at lag 200. These are medians over the settings; in the setting of our
# figure the ratio at lag 200 is still larger. Clipped IS ends at 0.7 to 1.8 times TB's KL: a tie both ways.
#
# ## V-trace: the lag or the critic?
#
# *V-trace*, of the [IMPALA system](https://arxiv.org/abs/1802.01561), is a fifth way. It weighs token by token, with
# weights of at most 1. It needs $\log \mu$ of every token, and a **critic**: a second model that guesses $R$ from the
# beginning of an answer. The critic is a table here, and learns on the way. V-trace compares $R$ with the critic's
# guess, where the others compare it with the group's mean. We give it the current price.
#
# Where V-trace ends higher than TB, the cause may be the lag, or the critic. In this game the best critic can be
# computed: from each beginning on, the exact mean of $R$ over all answers that the present policy may go on to write.
#
# > **Predict:** V-trace with a critic that learns, and V-trace with the exact critic: which curve lies above TB's? Does
# > either rise with the lag?

# %%
learnt, exact = "V-trace", "V-trace, exact critic"
ends[learnt], courses[learnt] = toy.by_lag("V-trace", LAGS, SEEDS, BETA, RATE, updates)
ends[exact], courses[exact] = toy.by_lag("V-trace", LAGS, SEEDS, BETA, RATE, updates, critic_is_exact=True)
middle |= {name: ends[name].median(1).values for name in (learnt, exact)}
behind = {name: float((middle[name] / middle["TB"]).median()) for name in (learnt, exact)}
series = {name: (LAGS, ends[name].T) for name in ("TB", learnt, exact)}
title = f"V-trace ends {behind[learnt]:.1f} times as far away as TB; with an exact critic {behind[exact]:.1f} times"
figures.picture(
    figures.curves(series, "lag [trainer updates]", "final KL(π ‖ π*) [nats]", title, log="y", dashed=(exact,))
)

# %% [markdown]
# <details><summary>Answer</summary>
#
# Neither rises with the lag. V-trace with a critic that learns lies above TB at every lag, at lag 0 too. With the exact
# critic it reaches TB's level. So the critic's errors are the cause, and the lag is not.
#
# </details>
#
# An exact critic exists only in a game. For a language model the critic is a second large network, and it must follow a
# policy that moves. TB and the other three do without one.
#
# ## How old is an old answer?
#
# How different are $\pi$ and $\mu$ after so many updates? Look at the weights $\pi/\mu$ of the drawn answers. If all
# weights are 1, sixteen answers count as sixteen. If one weight is huge and the others tiny, they count as one. The
# **effective sample size** is the number in between, $(\sum w)^2 / \sum w^2$. (It is a rule of thumb:
# [Elvira et al.](https://arxiv.org/abs/1809.04129) show its limits.)
#
# > **Predict:** early in learning (with our numbers, updates 50 to 150) and at the end, for three lags: how broad is
# > the histogram of the weights? And what share of the sample is left?

# %%
early = slice(min(round(1 / RATE), updates // 2), round(3 / RATE))  # a training of 1 to 3
late = slice(-100, None)
log_ratio = courses["TB"].log_ratio.view(updates, len(LAGS), -1)  # [updates, lags, seeds * K]
panels = {
    when: {
        f"lag {lag}": (log_ratio[part, i].flatten() / np.log(2)).clamp(-4, 4).numpy()
        for i, lag in enumerate(LAGS)
        if lag in (5, 20, 100)
    }
    for when, part in {f"updates {early.start} to {early.stop}": early, "the last 100 updates": late}.items()
}
shown = int(np.abs(np.array(LAGS) - 100).argmin())
shown_lag = LAGS[shown]
spread = [float(log_ratio[part, shown].std() / np.log(2)) for part in (early, late)]
title = f"Lag {shown_lag}: log2 of the weights has a standard deviation of {spread[0]:.2f} early, {spread[1]:.2f} at the end"
xlabel = "log2 of π/μ (-1: half as probable now)"
figures.picture(figures.histograms(panels, np.linspace(-4, 4, 33), xlabel, title, log=True))

# %%
share = toy.effective_share(courses["TB"].log_ratio).view(updates, len(LAGS), SEEDS)
series = {
    f"updates {early.start} to {early.stop}": (LAGS, share[early].mean(0).T),
    "the last 100 updates": (LAGS, share[late].mean(0).T),
}
worth = 16 * float(share[early].mean(0)[-1].mean())
title = f"Updates {early.start} to {early.stop}: 16 answers of lag {LAGS[-1]} weigh as much as {worth:.1f}"
figures.picture(figures.curves(series, "lag [trainer updates]", "effective sample size / K", title))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Early on, a third of the answers of lag 100 are now at least twice or at most half as probable as when they were
# written. Importance sampling then wastes a quarter of the sample. At lag 200 the start wrote all answers of these
# updates: of them it wastes about a third. At the end nearly all weights are close to 1, at any lag: TB hardly moves
# any more, and old data is as good as new.
#
# </details>
#
# So "lag" says little without "how far does the policy move in so many updates". A smaller learning rate makes answers
# of the same lag less outdated.
#
# ## Do small steps save frozen KL?
#
# With a small learning rate the policy moves little within 20 updates. Then the frozen price is nearly the current one.
# But with a small learning rate the policy also learns little per update. Two runs with different rates can be compared
# only at equal **training**: updates × learning rate. With [Adam](https://arxiv.org/abs/1412.6980) each number in the
# table moves by about the learning rate in a step, so this is about the longest way that it can go.
#
# > **Predict:** at lag 20, the KL of frozen KL as a multiple of TB's, against training, for several learning rates. Is
# > it 1 for the smallest rate, at the beginning? At the end?

# %%
tb_by, frozen_by = (toy.by_training(name, 20, RATES, SEEDS, BETA, MARKS) for name in ("TB", "frozen KL"))
gap = (frozen_by / tb_by).median(2).values  # [rates, marks]
series = {f"learning rate {rate:g}": (MARKS, (frozen_by / tb_by)[i].T) for i, rate in enumerate(RATES)}
title = f"At a training of {MARKS[-1]} the gap is {gap[0, -1]:.2g} times at rate {RATES[0]:g}, {gap[-1, -1]:.2g} times at {RATES[-1]:g}"
ylabel = "KL, frozen KL / TB, at lag 20"
figures.picture(figures.curves(series, "training: updates × learning rate", ylabel, title, log="y"))

# %%
print(f"KL at a training of {MARKS[-1]}, lag 20 [nats]")
for i, rate in enumerate(RATES):
    pair = [float(by[i, -1].median()) for by in (tb_by, frozen_by)]
    print(f"learning rate {rate:<6g} {round(MARKS[-1] / rate):6} updates: TB {pair[0]:.2g}, frozen KL {pair[1]:.2g}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# At the beginning it is about 1 for the small rates: far from the target, a late price hardly matters. Then each curve
# leaves 1, the one with the smallest rate last and least. So with small steps of Adam the gap is **smaller and comes
# later; it does not vanish**. Frozen KL comes to a distance that grows with the rate. TB is still on its way.
#
# </details>
#
# Adam's steps stay long near the target. SGD's shrink with the residuals, and then even a late pull may come to rest:
# exercise 4.
#
# At equal *updates* the smallest rate would show a tie, only because neither has come near the target. So a comparison
# at one learning rate, or at equal updates, says little about two methods.
#
# ## What do weights buy?
#
# The current price decides where learning ends. What is the weight for? Take a policy early in learning (a training of
# 2) and answers that the *start* policy wrote. The exact gradient of the goal $J$ is known in this game. A clip of 8
# lets all weights through here; with a clip near 0 all weights are equal, and that is TB.
#
# > **Predict:** which angle lies between the mean gradient and the exact one, against the clip? And how does the noise
# > change: the distance of one group's gradient from the mean, as a multiple of the mean's length?

# %%
clips = [0.25, 1.0, 8.0] if FAST else [0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
games = toy.problem(SEEDS)
young = toy.learn("TB", games, BETA, torch.zeros(SEEDS, dtype=torch.long), [RATE], round(2 / RATE))
angle, noise = torch.stack([torch.stack(toy.directions(young.table, games.log_ref, games, BETA, c)) for c in clips], 2)
tb_angle = toy.directions(young.table, games.log_ref, games, BETA, 1e-3)[0]
panels = {"clipped IS": (clips, angle)}, {"clipped IS": (clips, noise)}
title = (
    f"A clip of 8 turns the mean gradient by {angle[:, -1].median():.0f}°, one of 0.25 by {angle[:, 0].median():.0f}°"
)
ylabels = "angle [degrees]", "noise [mean lengths]"
figures.picture(figures.curves_above(*panels, "clip: largest importance weight", ylabels, title, log=("x",)))

# %%
kl_early = {name: float(courses[name].kl[early].view(-1, len(LAGS), SEEDS)[:, -1].mean()) for name in names}
print(f"TB's angle: {tb_angle.median():.0f} degrees")
print(f"mean KL in updates {early.start} to {early.stop} at lag {LAGS[-1]}, from a start of {start:.2g} nats:")
print(", ".join(f"{name} {x:.2g}" for name, x in kl_early.items()))

# %% [markdown]
# <details><summary>Answer</summary>
#
# The weight buys the direction: with all weights let through, the mean gradient is the exact one; the lower the clip,
# the more it turns away. TB's points tens of degrees away from the gradient of $J$. The weight costs signal: a group's
# gradient scatters about as much as TB's, but its mean is shorter, so that the noise is larger in mean lengths.
#
# </details>
#
# And what does that do to learning? Very little here: while the weights matter most, TB and clipped IS are nearly
# equally far from the target. TB takes another way to the same place. And at the end nearly all weights are close to 1.
#
# That holds for 256 short answers, whose weights hardly ever pass 8 with the current price. For an answer of hundreds
# of tokens the weight is a product of hundreds of ratios; this notebook says nothing about that case. And it shows no
# game in which TB is *better* than well-clipped importance sampling. What TB saves is the need to know $\mu$: after a
# change of weights in mid-answer, with several engines, or with answers from a file, $\log \mu$ may be wrong or
# missing. TB doesn't ask.
#
# ## What to take away
#
# | way | needs | in this game |
# | --- | --- | --- |
# | TB | nothing of $\mu$ | flat in the lag |
# | clipped IS | $\log \mu$ of the answer | flat in the lag: a tie with TB |
# | frozen KL, with or without the weight | $\log \mu$ of the answer, a $\mu$ that is nearly $\pi$ | fails when the policy moves much within the lag |
# | V-trace | $\log \mu$ of every token, a critic | flat in the lag; a critic that learns costs a factor |
#
# - The switch that decides is the price: current or frozen.
# - Compare methods at equal training, at several learning rates, at several lags.
#
# ## Exercises
#
# **1. One number for lag and rate.** A policy that takes small steps moves less within the same lag. At a rate of 0.02
# and lag 20 frozen KL ends at a KL of about 0.07 nats. Between which two lags of the first figure does it do so with a
# quarter of the rate? Predict, then set `RATE = 0.005`, and run the notebook (about 3 minutes).
#
# <details><summary>Solution</summary>
#
# Four times the lag, about. What counts is lag × rate: the length of the way that the policy goes within the lag. Final
# KLs of frozen KL (medians of 5 games):
#
# | lag × rate | rate 0.02 | rate 0.005 |
# | --- | --- | --- |
# | 0.1 | lag 5: 0.0063 | lag 20: 0.0080 |
# | 0.4 and 0.5 | lag 20: 0.070 | lag 100: 0.072 |
# | 1 | lag 50: 0.41 | lag 200: 0.37 |
#
# TB ends at 0.0004 to 0.0006 at every lag, V-trace at 0.0016 to 0.0018, with the exact critic at 0.0004 to 0.0006: what
# we said of them at the rate 0.02 is true at this rate too.
#
# </details>
#
# **2. A higher price.** With β = 1 the target is close to the start, 0.04 nats. Do small steps save frozen KL now?
# Predict the curve of the smallest learning rate, then set `BETA = 1.0` and read the figure with the learning rates.
#
# <details><summary>Solution</summary>
#
# No. At rate 0.002 frozen KL is 7 times as far away as TB at a training of 5, and 34 times at 30. All five rates end at
# 32 to 64 times. The curves leave 1 early, because TB is soon near this target, and only there frozen KL shows its
# fault.
#
# The distance at which frozen KL stops hardly depends on β. At the rates 0.002, 0.005, 0.01, 0.02 it is 0.0008, 0.0050,
# 0.018, 0.068 for β = 1, and 0.0010, 0.0047, 0.024, 0.068 for β = 0.25. The reason:
# $r = \beta(\log \pi^* + \log Z - \log \pi_\text{ref})$, so the frozen $R - \bar R$ is $\beta$ times a difference of
# $\log \pi^* - \log \mu$. The factor β changes the gradient's length, and Adam's steps hardly depend on that length.
#
# </details>
#
# **3. A fifth way.** The weight of a whole answer multiplies the ratios of all its tokens. Write a loss with the
# current price that weighs each token's $\log \pi$ by the ratio of this token alone, clipped at `a.clip`. A loss is a
# function of `a`, an `Answers` (in `baselines.py`): `a.token_pi` and `a.token_mu` are [P, K, T], and
# `a.shaped_reward(a.log_pi)` is $R$, [P, K]. Put it into `toy.LOSSES` under a name. Is its gradient on fresh answers
# TB's? Is it flat in the lag? And with the frozen price?
#
# <details><summary>Solution</summary>
#
# ```python
# def token_weights(a, price):
#     weight = (a.token_pi - a.token_mu).detach().exp().clamp(max=a.clip)  # [P, K, T]
#     shaped = a.shaped_reward(price)
#     return -((weight * a.token_pi).sum(-1) * (shaped - shaped.mean(1, keepdim=True))).mean()
#
#
# toy.LOSSES["token IS"] = lambda a: token_weights(a, a.log_pi)
# toy.LOSSES["frozen token IS"] = lambda a: token_weights(a, a.log_mu)
# for name in ("token IS", "frozen token IS"):
#     fresh = toy.gradient(name, game.table[0], game, drawn, BETA)
#     assert (fresh - gradients["TB"]).abs().max() < 1e-4 * gradients["TB"].abs().max()
#     end = toy.by_lag(name, LAGS, SEEDS, BETA, RATE, updates, clip=CLIP)[0].median(1).values
#     print(name, [f"{x:.2g}" for x in end])
#     assert (end[-1] > 20 * tb[-1]) if "frozen" in name else ((end / tb).max() < 2.5)
# ```
#
# On fresh answers all weights are 1, so the gradient is TB's. With the current price it ends at 0.0013, 0.0013, 0.0018,
# 0.0013, 0.0011, 0.0017 for our six lags: flat, and a tie with TB. Its weights are "wrong" (the ratio of one token
# doesn't correct for the tokens before it), and that doesn't matter, because $R - \bar R$ is zero at the target for
# every answer. With the frozen price it fails like the other two. The price decides, whatever the weight.
#
# </details>
#
# **4. Another optimizer.** Is it Adam? Train TB and frozen KL at lag 20 by SGD, `optimizer="sgd"` of `toy.by_lag`, with
# the rates 0.5 and 2. Which of the four do you expect to fail?
#
# <details><summary>Solution</summary>
#
# ```python
# by_sgd = {}
# for rate in (0.5, 2.0):
#     for name in ("TB", "frozen KL"):
#         by_sgd[name, rate] = float(toy.by_lag(name, [20], 3, 0.25, rate, 1500, optimizer="sgd")[0].median())
#         print(f"rate {rate}: {name:10} KL {by_sgd[name, rate]:.3f} after 1500 updates")
# assert by_sgd["frozen KL", 0.5] < 1.1 * by_sgd["TB", 0.5] and by_sgd["frozen KL", 2.0] > 10 * by_sgd["TB", 2.0]
# ```
#
# With the rate 0.5 frozen KL follows TB: 0.068 and 0.066 nats. (Both are still on their way.) With the rate 2 TB is at
# 0.018, and frozen KL at about 0.5, near its start. So the optimizer counts, and so does the step: with SGD the late
# price does no harm below some step, for its steps shrink with the residuals.
#
# </details>

# %%
worst = max(float((g - gradients["TB"]).abs().max()) for g in gradients.values()) / float(gradients["TB"].abs().max())
tb, clipped, frozen, frozen_is = (middle[name] for name in names)
tie, slow, best = clipped / tb, middle[learnt] / tb, middle[exact] / tb
first = {name: float(courses[name].kl[early, rows].mean()) for name in ("TB", "frozen KL")}
falls = float(courses["TB"].kl[-100:, rows].mean() / courses["TB"].kl[updates // 2 :, rows][:100].mean())
doubled = float((log_ratio[early, shown].abs() > np.log(2)).float().mean())
kept = float(share[early].mean(0)[shown].mean())
calm = float((log_ratio[late].abs() < np.log(1.5)).float().mean())
leaves = [next((mark for mark, x in zip(MARKS, row, strict=True) if x > 1.5), np.inf) for row in gap]
floors = frozen_by[:, -1].median(1).values
still_falling = (tb_by[:, -1] / tb_by[:, -2]).median(1).values
turned, scattered = angle.median(0).values, noise.median(0).values
near_tb = float((angle[:, 0] - tb_angle).abs().max())
heavy = max(float((courses[name].log_ratio.exp() > CLIP).float().mean()) for name in ("TB", "clipped IS"))
lesson.check(
    5,
    globals(),
    {
        f"On fresh answers the four losses have one gradient: they differ by {worst:.0e} of its size": worst < 1e-4,
        f"TB is flat in the lag: it ends at {tb.min():.2g} to {tb.max():.2g}, from a start of {start:.2g}": bool(
            tb.max() < 2.2 * tb.min() and tb.max() < 0.02 * start
        ),
        f"Clipped IS ties with TB: {tie.min():.2f} to {tie.max():.2f} times TB's KL": bool(
            tie.max() < 2.5 and tie.min() > 0.5
        ),
        f"Both frozen prices rise: at the largest lag {frozen[-1] / tb[-1]:.0f} and {frozen_is[-1] / tb[-1]:.0f} times TB": bool(
            min(frozen[-1], frozen_is[-1]) > 40 * tb[-1] and max(frozen[0], frozen_is[0]) < 1.5 * tb[0]
        ),
        f"The weight makes the frozen price less bad, {frozen_is[-1]:.2g} for {frozen[-1]:.2g}; no cure": bool(
            frozen_is[-1] < 0.7 * frozen[-1] and frozen_is[-1] > 0.4 * start and frozen[-1] > start
        ),
        f"Frozen KL starts as fast as TB (KL {first['frozen KL']:.2g} and {first['TB']:.2g}), then swings": bool(
            first["frozen KL"] < 1.4 * first["TB"] and swing > 4
        ),
        f"TB goes on falling: in the second half to {falls:.2f} of its KL": falls < 0.7,
        f"V-trace with a critic that learns ends {slow.min():.1f} to {slow.max():.1f} times as far away as TB": bool(
            slow.min() > 1.4 and slow[0] > 1.4 and middle[learnt].max() < 2 * middle[learnt].min()
        ),
        f"With the exact critic it reaches TB's level: {best.min():.2f} to {best.max():.2f} times": bool(
            best.max() < 1.6 and best.median() < 1.25 and behind[exact] < 0.7 * behind[learnt]
        ),
        f"Early, {doubled:.0%} of the answers at lag {shown_lag} are twice or half as probable as when written": doubled
        > 0.2,
        f"Early, importance sampling leaves {kept:.2f} of the sample at lag {shown_lag}; at the largest lag {worth:.1f} of 16": (
            0.65 < kept < 0.8 and 8.5 < worth < 12.8
        ),
        f"At the end {calm:.1%} of all weights are between 1/1.5 and 1.5": calm > 0.95,
        f"With the smallest rate frozen KL is {gap[0, 0]:.2f} times as far away as TB at first": bool(gap[0, 0] < 1.2),
        f"The gap comes later with small steps: it passes 1.5 at a training of {leaves}": leaves == sorted(leaves)[::-1]
        and leaves[0] > leaves[-1],
        f"It is smaller with small steps and doesn't vanish: {[f'{x:.2g}' for x in gap[:, -1]]}": bool(
            gap[:, -1].min() > 1.5 and gap[-1, -1] > 3 * gap[0, -1]
        ),
        f"Frozen KL's distance grows with the rate: {[f'{x:.2g}' for x in floors]}": bool((floors.diff() > 0).all()),
        "TB has not stopped at any rate": bool((still_falling < 0.95).all()),
        f"A clip of 8 keeps the exact direction; one of {clips[0]} turns it by {turned[0]:.0f} degrees": bool(
            angle[:, -1].max() < 2 and angle[:, 0].min() > 20 and (turned.diff() < 0.5).all()
        ),
        f"TB's angle is {tb_angle.median():.0f} degrees, near that of clip {clips[0]}": bool(
            tb_angle.min() > 20 and near_tb < 8
        ),
        f"The weight costs noise: {scattered[0]:.1f} to {scattered[-1]:.1f} times the mean": bool(
            scattered[-1] > 1.05 * scattered[0]
        ),
        f"Early TB and clipped IS are equally far: KL {kl_early['TB']:.2g} and {kl_early['clipped IS']:.2g}": bool(
            abs(kl_early["clipped IS"] / kl_early["TB"] - 1) < 0.2
        ),
        f"With the current price at most {heavy:.0e} of all weights are above {CLIP:g}": heavy < 1e-4,
    },
)
