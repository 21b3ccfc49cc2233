# %% [markdown]
# # 4 · What asynchrony buys
#
# **Question: how much faster is it, and when not at all?**
#
# Run time: about 2 minutes on 2 cores. Notebook 3 explains the three protocols and the fake clock.
#
# "Asynchronous" sounds fast. But no protocol writes an answer sooner or makes an update shorter. It can only remove
# waiting. So how much waiting is there? All three ways get the same sample budget: the same number of updates, each
# answer trained on once on average, the same times for everything.

# %%
import sys

sys.path.insert(0, "..")  # the project's modules lie one folder up

from dataclasses import replace

import numpy as np
import torch

from notebooks import figures
from notebooks.fake_clock import Setting, play, play_all
from notebooks.toy import World

torch.set_num_threads(1)  # small tensors: one thread is fastest

# %% tags=["parameters"]
FAST = False  # True: fewer updates and seeds, as the tests do
SPREAD = 0.5  # how much the time for an answer varies: standard deviation of its logarithm
TRANSFER = 0.1  # seconds to send or to load weights
TRAIN = 2.0  # seconds of an update
UPDATES = 30 if FAST else 80  # in the plots of speed
LEARNT = 60 if FAST else 150  # in the plots of learning
SEEDS = 2 if FAST else 3

# %% [markdown]
# ## The limit
#
# Let an update take $T$ seconds, and let one searcher need $G$ seconds to write a whole batch, so that $N$ searchers
# need $G/N$. If neither side ever waits for the other, an update takes
#
# $$\max(G/N,\; T)$$
#
# seconds: the slower side sets the pace. One after the other would take the *sum*. The sum of two numbers is never more
# than twice the larger one. So **removing this waiting alone can never make a run more than twice as fast.** A protocol
# can also remove the wait for the slowest answer.
#
# Here a batch is 32 prompts, a group of answers takes a searcher 1 second on average ($G = 32$), and $T = 2$. From 16
# searchers on, the trainer sets the limit. On-policy gets a fair deal: the trainer's device, otherwise idle while
# answers are written, writes too.

# %%
setting = Setting(
    updates=UPDATES, prompts=64, prompts_per_batch=32, answers=8, generate=1.0, train=TRAIN, spread=SPREAD,
    transfer=TRANSFER, k=1, replay_ratio=1.0, recency_prob=0.75,
)  # fmt: skip
MODES = ("onpolicy", "barrier", "eager")  # barrier will sync every 2 updates

# %% [markdown]
# > **Predict:** 1 to 15 searchers. Which of the three comes near the limit? Is there an N at which on-policy is
# > *faster* than eager?

# %%
searchers = [1, 2, 4, 8, 12, 15]
by_n = {n: play_all(setting, searchers=n) for n in searchers}
batch = setting.prompts_per_batch * setting.answers
series = {m: (searchers, [by_n[n][m].rate for n in searchers]) for m in MODES}
series["the limit, max(G/N, T)"] = searchers, [batch / replace(setting, searchers=n).limit for n in searchers]
at_15 = by_n[15]["eager"].rate / by_n[15]["onpolicy"].rate
title = f"15 searchers: eager is {at_15:.1f} times as fast as on-policy"
dashed = ("the limit, max(G/N, T)",)
figures.picture(figures.curves(series, "searchers, N", "trajectories trained a second", title, dashed=dashed))

# %% [markdown]
# **Answer:** eager follows the limit. Barrier is below it everywhere: at each sync all wait for the slowest, and often
# the batch is still incomplete, so that another sync must follow. On-policy falls behind where many searchers wait for
# the slowest of them and then for the trainer. But with *one* searcher on-policy wins: almost all the work is writing.
# On-policy has two devices for it. Eager has one, and its trainer is idle most of the time. Asynchrony doesn't help
# where one side has nearly all the work and the other device could have joined in.
#
# > **Predict:** where do the on-policy seconds go? Who waits more, trainer or searchers, and how does it change with N?

# %%
top = {m: (searchers, [by_n[n][m].idle("trainer") for n in searchers]) for m in MODES}
bottom = {m: (searchers, [by_n[n][m].idle_searchers() for n in searchers]) for m in MODES}
wasted = by_n[15]["onpolicy"].idle_searchers()
title = f"On-policy, 15 searchers: each of them waits {wasted:.0%} of the time"
figures.picture(figures.curves_above(top, bottom, "searchers, N", ("trainer waits", "searchers wait"), title))

# %% [markdown]
# **Answer:** on-policy wastes the searchers: the more there are, the longer they all wait for one trainer. Eager wastes
# the trainer, as long as it has too few searchers. (On-policy's trainer hardly waits, because it writes too.)
#
# ## When does it help, and when not?
#
# We take 2 searchers. The time for a group rises from very short (the trainer has all the work) to very long (the
# searchers have it).
#
# > **Predict:** draw the speed-up of eager over on-policy against (G/N) / T. Where is its peak? How high is it, if all
# > answers take the same time?

# %%
ratios = [0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0]  # (G / N) / T
speed = {}
for spread in (0.0, SPREAD, 1.0):
    runs = [play_all(setting, searchers=2, spread=spread, transfer=0.0, generate=r * TRAIN * 2 / 32) for r in ratios]
    speed[f"spread {spread:g}"] = ratios, [r["onpolicy"].seconds / r["eager"].seconds for r in runs]
best = max(max(y) for _, y in speed.values())
worst = min(min(y) for _, y in speed.values())
title = f"Eager over on-policy: {best:.1f} times at best, {worst:.1f} at worst"
figures.picture(figures.curves(speed, "(G/N) / T: searchers' work over trainer's", "speed-up of eager", title, log="x"))

# %% [markdown]
# **Answer:** the peak is where both sides have the same work. It is below 2, as the limit says. To the left of it the
# trainer is the bottleneck and there is little to overlap. To the right the speed-up falls *below 1*: the searchers are
# the bottleneck, and eager has 2 of them where on-policy has 3 writers. Where answers' times differ, on-policy waits
# for the slowest. This lifts the whole curve a little (a lot with 15 searchers, where each writes only two groups for a
# batch).
#
# ## What do late weights cost?
#
# > **Predict:** sending weights takes 0, 1, or 4 seconds. How does this change the speed of the three?

# %%
transfers = [0.0, 0.5, 1.0, 2.0, 4.0]
slow = [play_all(setting, searchers=8, transfer=t) for t in transfers]
series = {m: (transfers, [r[m].rate for r in slow]) for m in MODES}
series["eager, k = 4"] = transfers, [play(replace(setting, k=4, searchers=8, transfer=t)).rate for t in transfers]
kept = {name: rates[-1] / rates[0] for name, (_, rates) in series.items()}
title = f"At 4 s a transfer eager keeps {kept['eager']:.0%} of its speed, and {kept['eager, k = 4']:.0%} with k = 4"
figures.picture(figures.curves(series, "seconds of a transfer", "trajectories trained a second", title))

# %% [markdown]
# **Answer:** no protocol hides it here. On-policy pays for sending and loading at every update. Eager pays too: each
# searcher stops to load whenever there are new weights. Publishing less often is the remedy (barrier, with $k = 2$, has
# half of it already), for all except on-policy, which has no choice.
#
# ## Does the learning suffer?
#
# Speed counts only if the policy learns as much from each answer. So let the three learn (by trajectory balance,
# notebook 1) on 64 prompts whose target is known exactly, with 15 searchers.
#
# > **Predict:** plot the KL (Kullback–Leibler divergence) to the target against *trainer updates*: which curve is
# > lowest? And against *seconds*?


# %%
courses = {m: [] for m in MODES}  # for each seed: seconds, and KL to the target, at each update
for seed in range(SEEDS):
    stories = play_all(
        setting, World, {"prompts": 64, "rate": 0.03, "seed": seed}, searchers=15, updates=LEARNT, seed=seed
    )
    for m, story in stories.items():
        courses[m].append(([u.end for u in story.updates], [u.metrics["kl"] for u in story.updates]))
updates = range(1, LEARNT + 1)
series = {m: (updates, [kls for _, kls in c]) for m, c in courses.items()}
end = {m: np.median([kls[-1] for _, kls in c]) for m, c in courses.items()}
late = max(end["eager"], end["barrier"]) / end["onpolicy"]
title = f"Against updates on-policy is ahead: with old data the final KL is {late - 1:.0%} higher"
figures.picture(figures.curves(series, "trainer updates", "KL(π ‖ π*) [nats]", title, log="y"))

# %%
grid = np.linspace(0, max(seconds[-1] for c in courses.values() for seconds, _ in c), 200)
series = {}
for m, c in courses.items():
    inside = grid[grid <= min(seconds[-1] for seconds, _ in c)]
    series[m] = inside, [np.interp(inside, seconds, kls) for seconds, kls in c]
goal = 1.05 * max(end.values())  # all three get there
reached = {
    m: np.median([seconds[int(np.argmax(np.array(kls) < goal))] for seconds, kls in c]) for m, c in courses.items()
}
sooner = reached["onpolicy"] / reached["eager"]
title = f"Against seconds on-policy is behind: it takes {sooner:.1f} times as long as eager to a KL of {goal:.2f}"
figures.picture(figures.curves(series, "seconds (fake)", "KL(π ‖ π*) [nats]", title, log="y"))

# %% [markdown]
# **Answer:** against updates on-policy is a little ahead: a batch from the buffer draws some answers twice and others
# never, and a quarter of it is of any age. Barrier and eager coincide. Against seconds, the time per update stretches
# the same curves, and eager wins by much more than it lost.
#
# This is the whole bargain of TBA (Trajectory Balance with Asynchrony): *a little less learning per update, and many
# more updates per second*. The first half needs a loss that tolerates old data (notebook 5). The second needs enough
# searchers to keep the trainer busy, but not so many that they idle.
#
# ## What to take away
#
# - The limit is max(G/N, T). Overlap alone gives less than a factor of 2. Not waiting for slow answers gives the rest.
# - It gives nothing where one side has nearly all the work, and costs a device where searchers are the bottleneck.
# - Read speed against seconds and learning against updates; never mix them.
#
# ## Exercises
#
# 1. Set `TRAIN = 8`. From how many searchers on is it a waste to add another?
# 2. With 15 searchers, on-policy has 16 devices that write, two groups each. How fast is it with 31 searchers, one
#    group each? Work it out first, then change the list.

# %%
# What this notebook claims:
for n in searchers:  # eager is within 15 % of the limit, and on-policy is not when there are many
    assert by_n[n]["eager"].seconds < 1.15 * (UPDATES + 3) * (replace(setting, searchers=n).limit + 2 * TRANSFER)
assert by_n[1]["onpolicy"].rate > 1.2 * by_n[1]["eager"].rate  # one searcher: eager loses
assert at_15 > 1.7 and by_n[15]["eager"].rate > by_n[15]["barrier"].rate > by_n[15]["onpolicy"].rate
assert wasted > 0.4 and by_n[15]["eager"].idle_searchers() == 0
no_spread = speed["spread 0"][1]
assert 1.4 < max(no_spread) < 2 and np.argmax(no_spread) in (2, 3, 4) and worst == no_spread[-1] < 0.9
assert kept["onpolicy"] < 0.6 and kept["eager"] < 0.7 < kept["eager, k = 4"]
assert 1.0 < late < 1.35 and abs(end["eager"] / end["barrier"] - 1) < 0.1  # per update on-policy is a little ahead
assert sooner > 1.5  # per second it is behind
