# %% [markdown]
# # 3 · One sync at a time
#
# **Question: who waits for whom?**
#
# Run time: about 10 seconds on 2 cores. Notebook 2 explains *searcher*, *trainer*, *replay buffer* and *age*.
#
# A run of this project is one trainer and N searchers. Searchers write answers with the weights that they have. The
# trainer changes the weights. Sometimes the searchers must get the new ones: this is a **sync**. There are three ways
# to organise it. They differ in one thing only: who waits.
#
# Real processes are hard to watch, so we play the protocols on a **fake clock** (`notebooks/fake_clock.py`): a list of
# events, each with a time. The earliest event happens, time jumps to it, and the events that it causes join the list.
# No process runs and nobody sleeps. But the replay buffer, its drawing rule, and the order of prompts are the real
# ones.

# %%
import sys

sys.path.insert(0, "..")  # the project's modules lie one folder up

from dataclasses import replace

import numpy as np
import torch

from notebooks import figures
from notebooks.fake_clock import Setting, play
from notebooks.toy import World

torch.set_num_threads(1)  # small tensors: one thread is fastest

# %% tags=["parameters"]
FAST = False  # True: fewer updates in the last plot, as the tests do
N = 3  # searchers
SYNC_EVERY = 2  # called k: trainer updates between two publications of the weights
SPREAD = 0.6  # how much the time for an answer varies; 0: not at all
UPDATES = 60

# %% [markdown]
# ## The three ways
#
# - **on-policy**: all devices write answers with the newest weights until there is a batch. Then the trainer learns
#   from it while all others wait. Then weights go out, and so on. (*On-policy* means: the policy learns only from
#   answers that it wrote itself, just now.)
# - **barrier**: the paper's protocol. The searchers keep writing while the trainer learns. Every $k$ updates all pause:
#   the searchers' answers go into the buffer, weights go out, and when everyone is there, all go on.
# - **eager**: nobody pauses. A searcher puts answers into the buffer as they are finished. Between two answers, it
#   takes new weights if there are any.
#
# Here a batch is 8 prompts with 8 answers each. A searcher needs about 1 second for a group of 8 answers. The trainer
# needs 4 seconds for an update. Sending or loading weights takes a quarter of a second. On average, no answer is
# trained on more than once.

# %%
setting = Setting(
    searchers=N, k=SYNC_EVERY, spread=SPREAD, updates=UPDATES, prompts=32, prompts_per_batch=8, answers=8,
    generate=1.0, train=4.0, transfer=0.25, recency_prob=1.0, replay_ratio=1.0,
)  # fmt: skip
settings = {
    "onpolicy": replace(setting, sync="onpolicy", k=1),
    "barrier": replace(setting, sync="barrier"),
    "eager": replace(setting, sync="eager"),
}
stories = {name: play(s, World(prompts=32, rate=0.1)) for name, s in settings.items()}

# %% [markdown]
# Event by event, the beginning of `eager`, for the trainer and the first searcher:

# %%
spans = stories["eager"].spans
events = [(start, end, who, what) for who in ("trainer", "searcher 0") for what, start, end in spans[who]]
for start, end, who, what in sorted(events)[:12]:
    print(f"{start:6.2f} s to {end:6.2f} s   {who:11} {what}")

# %% [markdown]
# > **Predict:** draw the three rows of bars on paper, for 20 seconds. Where are the gaps? Who has the most of them?

# %%
panels = {
    f"{name}: the trainer waits {story.idle('trainer'):.0%} of the time, the searchers {story.idle_searchers():.0%}": story
    for name, story in stories.items()
}
figures.picture(figures.gantt(panels, 20.0, "The first 20 seconds: hatched is waiting"))

# %% [markdown]
# **Answer:** on-policy, everyone waits twice in every round: for the slowest answer, and then for the trainer. At a
# barrier, everyone waits for the slowest searcher to finish its answer. Eager: nobody waits, once there is a first
# batch. (Three searchers write 3 groups per second here, and the trainer needs 8 every 4 seconds. With fewer groups, it
# would have to wait in every protocol; notebook 4 studies this case.)
#
# ## The price: age
#
# We pay for the saved time with *age*: the trainer learns from answers that older weights wrote. (Here we draw from the
# newest data only, $m = 1$, so that all age comes from the protocol.)
#
# > **Predict:** on-policy, all ages are 0. How does the age change over time in `barrier` with $k = 2$? In `eager`?
# > Below is the loss (trajectory balance, TB, of notebook 1, on 32 prompts of its kind): does it suffer?


# %%
ages, losses = {}, {}
for name, story in stories.items():
    ends = [u.end for u in story.updates]
    ages[name] = ends, [np.mean(u.ages) for u in story.updates]
    losses[name] = ends[9:], figures.smooth([u.metrics["imbalance"] for u in story.updates])
mean_age = {name: np.mean(y[10:]) for name, (_, y) in ages.items()}
ylabels = ("mean age\n[trainer updates]", "β² · TB loss\n[reward²]")
title = f"Barrier learns from data {mean_age['barrier']:.1f} updates old, eager {mean_age['eager']:.1f}; both are done sooner"
figures.picture(figures.curves_above(ages, losses, "seconds (fake)", ylabels, title, log=("bottom",)))

# %% [markdown]
# **Answer:** barrier alternates between 2 and 3. Answers merged at a sync were written with the weights of the sync
# before. So they are $k$ updates old when first drawn, and $2k - 1$ before the next sync. Eager lacks this rhythm and
# is younger: it need not wait for a sync to use an answer. The loss falls in all three ways (it is averaged over 10
# updates here). Each curve ends when its updates are done: in seconds, eager is there first.
#
# ## Who says how old an answer is?
#
# It seems natural to stamp a finished answer with the trainer's count of updates at that moment. This is **wrong**: the
# weights that wrote it are older. The searcher loaded them some time before.
#
# > **Predict:** for `barrier` with $k = 8$, by how much is the wrong stamp off?

# %%
slow = play(replace(settings["barrier"], k=8))
x = [u.step for u in slow.updates]
right, wrong = ([np.mean(getattr(u, what)) for u in slow.updates] for what in ("ages", "stamped"))
series = {"by the weights that wrote it": (x, right), "by the trainer's clock": (x, wrong)}
off = np.mean(right[8:]) - np.mean(wrong[8:])
title = f"The trainer's clock makes data look {off:.1f} updates younger than it is"
figures.picture(figures.curves(series, "trainer updates", "mean age [trainer updates]", title))

# %% [markdown]
# **Answer:** by about half of $k$: while the searcher writes with its old weights, the trainer's clock goes on.
# `searcher.py` stamps a trajectory with the version that its engine had loaded when the prompt was handed to it.
#
# ## How often to sync?
#
# > **Predict:** for larger $k$, how do age and waiting change in `barrier`, and how in `eager`?

# %%
every = [1, 2, 4, 8, 16]
many = {
    name: [play(replace(settings[name], k=k, updates=80 if FAST else 240)) for k in every]
    for name in ("barrier", "eager")
}
old = {name: (every, [np.mean([np.mean(u.ages) for u in s.updates[16:]]) for s in runs]) for name, runs in many.items()}
idle = {name: (every, [s.idle("trainer") for s in runs]) for name, runs in many.items()}
title = (
    f"k = 16 spares barrier's trainer {idle['barrier'][1][0] - idle['barrier'][1][-1]:.0%} of the time, and costs age"
)
ylabels = ("mean age\n[trainer updates]", "trainer waits\n[share of time]")
figures.picture(figures.curves_above(old, idle, "k [trainer updates]", ylabels, title))

# %% [markdown]
# **Answer:** barrier must choose between waiting (small $k$) and old data (large $k$). Eager hardly waits at any $k$,
# so it can take $k = 1$: its data is nearly as young as barrier's at $k = 1$, and nobody has waited for it. So eager is
# the default here, although the paper describes the barrier.
#
# ## What to take away
#
# - On-policy: everyone waits for the slowest, in turn. Barrier: everyone waits every $k$ updates. Eager: only a lack of
#   data causes waits.
# - In barrier, ages are $k$ to $2k - 1$. In eager they depend on how long an answer takes.
# - An answer is as old as the weights that wrote it. The trainer's clock makes it look younger.
#
# ## Exercises
#
# 1. Set `N = 1`. Who waits now? What is the smallest number of searchers that keeps the trainer busy in `eager`?
# 2. Set `SPREAD = 0`. How much do barrier and on-policy still wait? Then 1.2: which of the three protocols suffers
#    most?

# %%
# What this notebook claims:
assert max(age for u in stories["onpolicy"].updates for age in u.ages) == 0
settled = [u.ages for u in stories["barrier"].updates[8:]]
expected = np.mean([age in (SYNC_EVERY, 2 * SYNC_EVERY - 1) for ages in settled for age in ages])
assert expected > 0.9  # not always: when the pool lacks prompts, the batch takes older ones
seconds = {name: story.seconds for name, story in stories.items()}
assert seconds["eager"] < 0.95 * seconds["barrier"] < 0.95 * seconds["onpolicy"]
assert stories["eager"].idle_searchers() == 0 and stories["onpolicy"].idle_searchers() > 0.4
assert 0.5 < mean_age["eager"] < mean_age["barrier"] and abs(mean_age["barrier"] - 2.5) < 0.5
final = {name: np.mean([u.metrics["kl"] for u in story.updates[-5:]]) for name, story in stories.items()}
first = stories["eager"].updates[0].metrics["kl"]
assert all(kl < 0.75 * first for kl in final.values())  # all learn
assert 2 < off < 6  # about half of k = 8
assert old["barrier"][1][-1] > 4 * old["barrier"][1][0] and idle["barrier"][1][-1] < idle["barrier"][1][0] - 0.1
assert np.ptp(idle["eager"][1]) < 0.1
