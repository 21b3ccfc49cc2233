# %% [markdown]
# # 3 · One sync at a time
#
# **Question: who waits for whom?**
#
# **At the end you can** draw the timeline of three protocols, say who waits in each and for what, compute how old the
# data is that a trainer learns from, and choose how often to send new weights.
#
# **You need** notebook 1 (*policy*, *reward*, *target*, TB) and notebook 2 (*searcher*, *trainer*, *replay buffer*,
# *age*, recency probability *m*). Nothing else.
#
# **Run time:** about 20 seconds on 2 cores.
#
# <details><summary>For the instructor</summary>
#
# | section | minutes |
# | --- | --- |
# | Opening | 10 |
# | The three ways | 25 |
# | The price: age | 20 |
# | Who says how old an answer is? | 10 |
# | How often to sync? | 10 |
# | Exercises | 15 |
#
# **On the board**: four empty rows (one trainer, three searchers) and a time axis. Draw on-policy together, and let the
# students draw the other two. Then the sentence: *age = the trainer's update now − the version of the weights that
# wrote the answer*. Students usually think that an answer is as old as the time since it was finished. They also think
# that asynchronous means "no waiting at all": a trainer without data waits in every protocol.
#
# </details>
#
# A run of this project is one trainer and N searchers. Searchers write answers with the weights that they have. The
# trainer changes the weights. Sometimes the searchers must get the new ones: this is a **sync**. There are three ways
# to organise it. They differ in one thing only: who waits.
#
# Real processes are hard to watch, so we play the protocols on a **fake clock** (`notebooks/fake_clock.py`): a list of
# events, each with a time. The earliest event happens, time jumps to it, and the events that it causes join the list.
# No process runs and nobody sleeps. But the replay buffer, its drawing rule, and the order of prompts are the real
# ones. Notebook 4 compares the clock with measured seconds.

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
from dataclasses import replace

import numpy as np
import torch

from notebooks import figures, lesson
from notebooks.fake_clock import Setting, by_second, by_update, play
from notebooks.toy import World

torch.set_num_threads(1)  # small tensors: one thread is fastest

# %% tags=["parameters"]
FAST = False  # True: fewer seeds, and fewer updates in the last plot, as the tests do
N = 3  # searchers
SYNC_EVERY = 2  # called k: trainer updates between two publications of the weights
SPREAD = 0.6  # how much the time for an answer varies: standard deviation of its logarithm; 0: not at all
UPDATES = 60
SEEDS = 2 if FAST else 5  # other times for the answers, and other answers

# %% [markdown]
# ## The three ways
#
# - **on-policy**: all devices write answers with the newest weights until there is a batch. Then the trainer learns
#   from it while all others wait. Then weights go out, and so on. (*On-policy* means: the policy learns only from
#   answers that it wrote itself, just now.)
# - **barrier**: the protocol of the TBA paper, [Bartoldson et al. 2025](https://arxiv.org/abs/2503.18929), section 3.1.
#   The searchers keep writing while the trainer learns. Every $k$ updates all pause: the searchers' answers go into the
#   buffer, weights go out, and when everyone is there, all go on.
# - **eager**: nobody pauses. A searcher puts answers into the buffer as they are finished. Between two groups of
#   answers, it takes new weights if there are any.
#
# Here a batch is 8 prompts with 8 answers each; the 8 answers to one prompt are a *group*. A searcher needs about 1
# second for a group. The trainer needs 4 seconds for an update. Sending or loading weights takes a quarter of a second.
# In barrier and eager the trainer may not train more answers than the searchers have written; an answer that is trained
# again counts again. (This number, answers trained per answer written, is the **replay ratio**. Here it is at most 1.)
# Here a searcher writes one group at a time. A real one writes many at once (16 by default), and in barrier it looks
# for a sync only when all of them are finished. Then barrier waits longer; notebook 4 comes back to this.

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
stories = {
    name: [play(replace(s, seed=seed), World(prompts=32, rate=0.1, seed=seed)) for seed in range(SEEDS)]
    for name, s in settings.items()
}

# %% [markdown]
# Event by event, the beginning of `eager`, for the trainer and the first searcher:

# %%
spans = stories["eager"][0].spans
events = [(start, end, who, what) for who in ("trainer", "searcher 0") for what, start, end in spans[who]]
for start, end, who, what in sorted(events)[:12]:
    print(f"{start:6.2f} s to {end:6.2f} s   {who:11} {what}")

# %% [markdown]
# > **Predict:** draw the rows of bars on paper, for 20 seconds of each protocol. Where are the gaps? Who has the most
# > of them?

# %%
waits = {name: (s[0].idle("trainer"), s[0].idle_searchers()) for name, s in stories.items()}
panels = {
    f"{name}: the trainer waits {trainer:.0%} of the time, the searchers {searchers:.0%}": stories[name][0]
    for name, (trainer, searchers) in waits.items()
}
figures.picture(figures.gantt(panels, 20.0, "The first 20 seconds: hatched is waiting (shares: of the whole run)"))

# %% [markdown]
# <details><summary>Answer</summary>
#
# On-policy, a searcher waits twice in every round: for the slowest answer, and then for the trainer. The trainer waits
# once, for the slowest answer. At a barrier, everyone waits for the slowest searcher to finish its group. Eager: nobody
# waits, once there is a first batch. (Three searchers write 3 groups per second here, and the trainer needs 8 every 4
# seconds. With fewer groups, it would have to wait in every protocol: exercise 1.)
#
# </details>
#
# This on-policy has one device that trains and N others that wait meanwhile. The project's own `--sync onpolicy` is a
# single process in which all devices write and then train together. Nobody waits there, but two cores together are not
# twice as fast as one: notebook 4 has measured numbers.
#
# ## The price: age
#
# We pay for the saved time with **age**: the trainer learns from answers that older weights wrote. The age of an answer
# is the trainer's update now minus the update whose weights wrote it. On-policy, it is always 0. We draw from the
# newest data only ($m = 1$; in barrier that is what the last sync brought, in eager the last 16 groups), so that all
# age comes from the protocol.
#
# Does the learning suffer? The three learn by trajectory balance (TB, notebook 1) on 32 prompts of its kind. We do not
# look at the loss: it says how unbalanced the drawn answers are, not how far the policy is from its target. Here the
# target is known exactly, and with it the **KL divergence** KL(π ‖ π*): the mean, over the policy's answers, of how
# much more probable they are under the policy than under the target (as a logarithm). It is 0 at the target.
#
# > **Predict:** how does the age change from update to update in `barrier` with $k = 2$? And in `eager`? Which of the
# > three has the lowest KL after 200 seconds?

# %%
ages = {m: (range(UPDATES), [by_update(s, "age") for s in stories[m]]) for m in ("barrier", "eager")}
distances = {name: by_second(many, "kl") for name, many in stories.items()}
mean_age = {name: np.mean([s.age(10) for s in stories[name]]) for name in ages}
seconds = {name: np.median([s.seconds for s in many]) for name, many in stories.items()}
at_200 = {name: np.median([np.interp(200, x, y) for y in kls]) for name, (x, kls) in distances.items()}
last = {name: np.median([s.updates[-1].metrics["kl"] for s in many]) for name, many in stories.items()}
title = f"Mean age: barrier {mean_age['barrier']:.1f}, eager {mean_age['eager']:.1f} updates"
done = " / ".join(f"{s:.0f}" for s in seconds.values())
panels = {title: (ages, "trainer updates"), f"{UPDATES} updates take {done} s": (distances, "seconds (fake)")}
ylabels = ("mean age of a batch [trainer updates]", "KL(π ‖ π*) [nats]")
figures.picture(figures.curves_beside(panels, ylabels, f"Age and learning, {SEEDS} seeds"))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Barrier alternates between 2 and 3. Answers merged at a sync were written with the weights of the sync before. So they
# are $k$ updates old when first drawn, and $2k - 1$ before the next sync. Eager lacks this rhythm and is younger: it
# need not wait for a sync to use an answer. Each curve of the KL ends when its updates are done. After 200 seconds
# eager is lowest. Barrier makes updates faster than on-policy, but learns no more per second here.
#
# </details>
#
# After the same number of updates on-policy is lowest. Is it because its data is young? Notebook 4 takes this apart:
# age is not the reason.
#
# ## Who says how old an answer is?
#
# It seems natural to stamp a finished answer with the trainer's count of updates at that moment. This is **wrong**: the
# weights that wrote it are older. The searcher loaded them some time before.
#
# > **Predict:** for `barrier` with $k = 8$, by how much is the wrong stamp off?

# %%
slow = [play(replace(settings["barrier"], k=8, seed=seed)) for seed in range(SEEDS)]
right, wrong = ([[np.mean(getattr(u, what)) for u in s.updates] for s in slow] for what in ("ages", "stamped"))
series = {"by the weights that wrote it": (range(UPDATES), right), "by the trainer's clock": (range(UPDATES), wrong)}
true_age, stamped_age = np.mean(right, 0)[8:].mean(), np.mean(wrong, 0)[8:].mean()
title = f"Mean age by the weights: {true_age:.1f} updates; by the trainer's clock: {stamped_age:.1f}"
figures.picture(figures.curves(series, "trainer updates", "mean age of a batch [trainer updates]", title))

# %% [markdown]
# <details><summary>Answer</summary>
#
# By a little more than $(k - 1)/2$, here 3.7: while the searcher writes with its old weights, the trainer's clock goes
# on. `searcher.py` stamps a trajectory with the version that its engine had loaded when it began to write.
#
# </details>
#
# ## How often to sync?
#
# > **Predict:** for larger $k$, how do age and waiting change in `barrier`, and how in `eager`?

# %%
every = [1, 2, 4, 8, 16]
many = {
    name: [
        [play(replace(settings[name], k=k, seed=seed, updates=80 if FAST else 160)) for k in every]
        for seed in range(SEEDS)
    ]
    for name in ("barrier", "eager")
}
old = {name: (every, [[s.age(32) for s in runs] for runs in seeds]) for name, seeds in many.items()}
idle = {name: (every, [[s.idle("trainer") for s in runs] for runs in seeds]) for name, seeds in many.items()}
age_at, idle_at = ({name: np.median(y, 0) for name, (_, y) in d.items()} for d in (old, idle))
title = (
    f"The trainer waits: barrier {idle_at['barrier'][0]:.0%} of the time at k = 1, "
    f"{idle_at['barrier'][-1]:.0%} at k = {every[-1]}; eager at most {max(idle_at['eager']):.1%}"
)
ylabels = ("mean age\n[trainer updates]", "trainer waits\n[share of time]")
figures.picture(figures.curves_above(old, {"barrier": idle["barrier"]}, "k [trainer updates]", ylabels, title))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Barrier must choose between waiting (small $k$) and old data (large $k$). Eager hardly waits at any $k$ (so the lower
# panel leaves it out). It can take $k = 1$: its data is then 1.4 updates old (barrier: 1.0), and nobody has waited for
# it. (The real `eager` also draws up to two batches ahead, which the clock leaves out. Its ages are up to 2 updates
# higher, and then barrier at a small $k$ has the younger data.)
#
# </details>
#
# So eager is the default here, although the paper describes the barrier.
#
# ## What to take away
#
# - On-policy: all wait for the slowest answer, then the searchers wait for the trainer. Barrier: everyone waits every
#   $k$ updates. Eager: only a lack of data causes waits.
# - In barrier with $m = 1$, ages are $k$ to $2k - 1$, as long as every sync brings enough for $k$ updates. In eager
#   they depend on $k$, on how many groups count as newest, and on how long an answer takes.
# - An answer is as old as the weights that wrote it. The trainer's clock makes it look younger.
#
# ## Exercises
#
# **1. One searcher.** Before you run it: who waits for whom with `N = 1`, in each of the three protocols? Then find the
# smallest number of searchers that keeps eager's trainer busy, first on paper, then with the clock.
#
# <details><summary>Solution</summary>
#
# With one searcher, barrier and eager take the same time (486 seconds for 60 updates), and their trainer waits half of
# it, because a batch takes 8 seconds to write and 4 to train on. A single searcher has nobody to wait for at a sync.
# On-policy takes 528 seconds: it has two writers, but nothing overlaps. On paper: an update takes 4 seconds, and
# another eighth for sending weights. N searchers write a batch in 8 / N seconds. So two are enough, just (two updates
# take 8.25 seconds; in this time two searchers write 16 groups and load once):
#
# ```python
# for n in (1, 2, 3, 4):
#     one = play(replace(settings["eager"], searchers=n))
#     print(n, f"{one.idle('trainer'):.1%} of the trainer's time, {one.seconds:.0f} s, written {one.written}")
# ```
#
# The trainer waits 49 %, 3 %, 1 % and 1 % of the time. More searchers than that write answers that the trainer has no
# time for: notebook 4 counts them.
#
# </details>
#
# **2. Equal answers, very unequal answers.** How much do barrier and on-policy still wait with `SPREAD = 0`? Which of
# the three suffers most with `SPREAD = 1.2`?
#
# <details><summary>Solution</summary>
#
# | spread | on-policy | barrier | eager |
# | --- | --- | --- | --- |
# | 0 | 390 s, trainer waits 4 % | 280 s, 11 % | 250 s, 1 % |
# | .6 | 428 s, 10 % | 295 s, 16 % | 250 s, 1 % |
# | 1.2 | 495 s, 22 % | 367 s, 33 % | 250 s, 1 % |
#
# (Medians over 5 seeds, 60 updates; the titles of the figure show the first seed only.) With equal answers on-policy's
# searchers still wait 65 % of the time: they wait for the trainer, not for slow answers. Barrier's trainer still waits,
# because searchers look for a sync only between two groups. With very unequal answers barrier loses most: at each sync
# all wait for the slowest of three groups under way. Eager does not notice: no answer holds up another one. But its
# oldest answers are then 5 or 6 updates old, and 12 with one of the five seeds.
#
# </details>
#
# **3. Rare syncs.** Which ages can a batch have in barrier with `SYNC_EVERY = 8`? Work it out, then look. What happens
# to the time, and to eager's age?
#
# <details><summary>Solution</summary>
#
# Barrier: 8 to 15, mean 11.5, since a sync merges answers that the weights of the sync before wrote. The 60 updates
# take 255 seconds instead of 295: a quarter of the syncs. Eager's mean age rises from 2.0 to 4.9 only. It is
# below $k$, because it uses what is written between two publications at once.
#
# </details>

# %%
# What this notebook claims:
pool = [age for s in stories["barrier"] for u in s.updates[8:] for age in u.ages]
first = np.mean([s.updates[0].metrics["kl"] for s in stories["eager"]])
lesson.check(
    3,
    globals(),
    {
        "on-policy, every answer has age 0": not any(
            age for s in stories["onpolicy"] for u in s.updates for age in u.ages
        ),
        f"on-policy, the searchers wait {waits['onpolicy'][1]:.0%}, more than the trainer ({waits['onpolicy'][0]:.0%})": (
            0.6 < waits["onpolicy"][1] < 0.8 and 0.03 < waits["onpolicy"][0] < 0.2
        ),
        f"barrier: the trainer waits {waits['barrier'][0]:.0%}, the searchers {waits['barrier'][1]:.0%}": (
            0.1 < waits["barrier"][0] < 0.25 and 0.02 < waits["barrier"][1] < 0.12
        ),
        f"eager: the searchers never wait, the trainer {waits['eager'][0]:.1%}, before its first batch": (
            waits["eager"][1] == 0 and waits["eager"][0] < 0.03
        ),
        f"barrier's ages are {min(pool)} to {max(pool)}, that is k to 2k - 1": (
            set(pool) == set(range(SYNC_EVERY, 2 * SYNC_EVERY))
        ),
        f"eager's data is younger: mean age {mean_age['eager']:.2f} against {mean_age['barrier']:.2f}": (
            mean_age["eager"] < mean_age["barrier"] - 0.2
        ),
        f"eager needs {seconds['eager']:.0f} s, barrier {seconds['barrier']:.0f}, on-policy {seconds['onpolicy']:.0f}": (
            seconds["eager"] < 0.92 * seconds["barrier"] < 0.8 * seconds["onpolicy"]
        ),
        f"all learn: the KL falls from {first:.2f} to {max(last.values()):.2f} or less": max(last.values())
        < 0.75 * first,
        f"after 200 s eager's KL is lowest ({at_200['eager']:.3f}), the others have {at_200['onpolicy']:.3f} (on-policy) "
        f"and {at_200['barrier']:.3f} (barrier)": (
            at_200["eager"] < min(at_200["onpolicy"], at_200["barrier"]) - 0.01
            and abs(at_200["barrier"] - at_200["onpolicy"]) < 0.02
        ),
        f"after {UPDATES} updates on-policy's KL is lowest ({last['onpolicy']:.3f})": (
            last["onpolicy"] < min(last["barrier"], last["eager"]) - 0.02
        ),
        f"the trainer's clock is {true_age - stamped_age:.1f} updates off, about half of k = 8": (
            2.5 < true_age - stamped_age < 5.5
        ),
        f"barrier, k = 1 to 16: waiting falls from {idle_at['barrier'][0]:.0%} to {idle_at['barrier'][-1]:.1%}, the age "
        f"rises from {age_at['barrier'][0]:.1f} to {age_at['barrier'][-1]:.1f}": (
            idle_at["barrier"][0] > 0.2 > 0.06 > idle_at["barrier"][-1]
            and np.allclose(age_at["barrier"], [1.5 * k - 0.5 for k in every], rtol=0.05)
        ),
        f"eager's trainer waits {max(idle_at['eager']):.1%} at most, and at k = 1 its data is {age_at['eager'][0]:.1f} old": (
            max(idle_at["eager"]) < 0.03 and age_at["barrier"][0] < age_at["eager"][0] < 2
        ),
    },
)
