# %% [markdown]
# # 2 · The life of a replay buffer
#
# **Question: what is in the replay buffer, and what does the trainer draw from it?**
#
# **At the end you can** say how old an answer is and how old a batch is; write the rule by which a batch is drawn; choose
# $m$ and the buffer's size for an age that you want; and read a plot of the loss by age.
#
# **You need** notebook 1 (*policy*, *reward*, *trajectory*, the TB loss and its residuals) and a little NumPy.
#
# **Run time:** about a minute on 2 cores.
#
# <details><summary>For the instructor</summary>
#
# | section | minutes |
# | --- | --- |
# | Opening | 5 |
# | Real trajectories | 5 |
# | Adding, deduplicating, evicting | 10 |
# | Drawing | 5 |
# | Write your own sampler | 20 |
# | How old are stored answers, and how old are drawn ones? | 10 |
# | A small buffer forgets | 5 |
# | Drawing by reward | 5 |
# | How many different answers? | 5 |
# | Does an old answer have a larger loss? | 10 |
# | Exercises | 10 |
#
# **On the board**: searchers → buffer → trainer, with "version 7" written on the arrow of the weights; the rule for a
# batch as a tree: a coin with $m$, then the newest groups or everything stored. Students often toss *one* coin for the
# whole batch: its mean is right and its spread is not. The checker in "Write your own sampler" says so.
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
from collections import Counter

import numpy as np

from buffer import ReplayBuffer, reward_probs
from notebooks import figures, lesson
from notebooks.saved_run import BINS, SAVED, read_saved
from notebooks.stream import arrivals, as_text, gathered, judge, over_time, read_stream, replays
from tasks.start_model import VOCABULARY

# %% tags=["parameters"]
FAST = False  # True: fewer looks and draws, as the tests do
P, K = 16, 16  # a batch: prompts, and answers to each
M = 0.75  # called m: probability that a prompt of a batch comes from the newest data
RECENT = 2 * P  # "the newest data": so many groups
INVERSE_TEMPERATURE = 4.0  # how strongly a draw prefers high rewards
CAPACITY = 4000  # trajectories in the bounded buffer below
UPDATES = 200  # trainer updates to replay
EVERY = 10 if FAST else 2  # trainer updates between two looks at the buffer
DRAWS = 2 if FAST else 5  # seeds of the draws

# %% [markdown]
# ## Real trajectories
#
# In this project some processes, the **searchers**, write answers without pause. Another process, the **trainer**,
# changes the model's weights without pause. Neither waits for the other. Between them is a store of answers, the
# **replay buffer**: searchers put answers in, the trainer draws batches from it. An answer may be drawn many times or
# never, and it may be old by then.
#
# `saved/stream.npz` holds every answer of a real run, in order of arrival: a language model of 345,000 parameters learns
# to add two numbers. It is like the run that `python tba_min.py` makes, but with 256 problems instead of 8,500, so that
# each comes back often. The reward is 1 for the right answer, otherwise 0. The searcher writes 16 answers to a problem at a
# time: a **group**. A **trajectory** is one answer and all that is known about it:
#
# | field | meaning |
# | --- | --- |
# | `uid` | a unique number |
# | `prompt_id`, `response` | the problem, and the answer's tokens |
# | `reward` | 0 or 1 here |
# | `policy_version` | the trainer's update count whose weights wrote it |
#
# Take the trainer's update count *now* and subtract `policy_version`. The result is the answer's **age**, or
# *staleness*, in trainer updates: how often the weights have changed since.

# %%
stream, problems = read_stream(SAVED / "stream.npz")
stream = [t for t in stream if t.version_last < UPDATES]

print(len(stream), "trajectories, 16 at a time answer one problem:\n")
for t in stream[:3] + stream[-3:]:
    print(as_text(t, problems))

# %% [markdown]
# ## Adding, deduplicating, evicting
#
# `ReplayBuffer(capacity, per_prompt)` keeps trajectories by prompt. When it is full, or a prompt has more than
# `per_prompt`, the oldest go. We put in one group of 16 answers, then the same group again, then another one.

# %%
group = stream[:16]
buffer = ReplayBuffer(capacity=24, per_prompt=100)
for what, more in {"one group": group, "the same again": group, "a second group": stream[16:32]}.items():
    buffer.add(more)
    print(f"{what:15} {buffer.stats()}")
counts = buffer.stats()

# %% [markdown]
# The same `uid` is never stored twice. The second group pushed out the oldest 8, because there is room for 24.
#
# With `dedup=True` (deduplication), only the newest copy of an *answer* stays, even though each copy was a separate
# trajectory.
#
# > **Predict:** a model that is right about half of the time writes 16 answers to one sum. How many are different?

# %%
unique = ReplayBuffer(capacity=24, per_prompt=100, dedup=True)
unique.add(group)
kept = unique.stats()["stored"]
print("with dedup:", unique.stats())
print(Counter("".join(VOCABULARY[i] for i in t.response[:-1]) for t in group), "for", problems[group[0].prompt_id])

# %% [markdown]
# <details><summary>Answer</summary>
#
# Very few. The model doesn't guess: it knows one or two ways to add, and repeats itself. From a deduplicated buffer the
# trainer would get groups in which a frequent answer counts as much as a rare one, and would estimate log Z from these
# few. So deduplication is off by default here. The paper's settings use it
# ([TBA](https://arxiv.org/abs/2503.18929)): its answers are long, and long answers hardly ever repeat.
#
# </details>
#
# ## Drawing
#
# A batch is $P$ prompts with $K$ answers each. For each prompt we toss a coin that shows heads with probability $m$:
#
# - heads: the prompt comes from the **recency pool**, the newest groups (here the newest 32);
# - tails: the prompt comes from everything stored, all prompts alike. Its answers are drawn alike too, or by reward
#   with probability $\propto e^{\lambda r}$. $\lambda$ is called the inverse temperature: 0 means all alike.
#
# No prompt comes twice in a batch. This is the rule of the paper (section 3.1). There, the pool is all that came with the
# last hand-over of the searchers.

# %%
rewards = np.array([0.0, 0.0, 0.0, 1.0])
for inverse in (0.0, 1.0, INVERSE_TEMPERATURE):
    print(f"lambda = {inverse:g}: rewards {rewards} are drawn with", reward_probs(rewards, inverse).round(3))

# %% [markdown]
# ## Write your own sampler
#
# Write a function `mine(groups, p, m, recent, rng)` that returns $p$ groups by this rule. `groups` is all that is stored,
# oldest first. Each group is a list of answers to one prompt (`group[0].prompt_id`), and several groups may answer the
# same prompt. `recent` is the number of groups in the pool. `rng` is a NumPy generator: `rng.random()` is between 0 and
# 1, `rng.choice(n)` is a number below $n$. Then run the cell: it compares how often each group is in 2,000 of your batches
# and in as many of the project's buffer.

# %%
mine = None  # in place of this line, write: def mine(groups, p, m, recent, rng): ...
stored = [group for _, groups in arrivals(stream) for group in groups][:380]  # some prompts have one group, some two
verdict = judge(mine, stored, P, M, RECENT)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def mine(groups, p, m, recent, rng):
#     by_prompt = {}
#     for group in groups:
#         by_prompt.setdefault(group[0].prompt_id, []).append(group)
#     batch = {}
#     for from_pool in rng.random(p) < m:  # a coin for each prompt, tossed once
#         group = None
#         while group is None or group[0].prompt_id in batch:  # no prompt twice
#             if from_pool:
#                 group = groups[-1 - rng.choice(recent)]
#             else:  # first a prompt, then one of its groups: so that all prompts are alike
#                 known = by_prompt[list(by_prompt)[rng.choice(len(by_prompt))]]
#                 group = known[rng.choice(len(known))]
#         batch[group[0].prompt_id] = group
#     return list(batch.values())
#
#
# assert all(judge(mine, stored, P, M, RECENT).values())
# ```
#
# A subtle mistake: whoever tosses the coin *again* after a repeated prompt draws too few from the pool, for the pool is
# small and repeats itself more often. The real buffer follows the same rule, in constant time however much is stored
# (`buffer.py`).
#
# </details>
#
# ## How old are stored answers, and how old are drawn ones?
#
# Now we replay the whole recording: at each trainer update we add the answers that came then, and draw a batch. (Nobody
# learns here. The stream was written by its own run and doesn't change.)
#
# > **Predict:** late in the run, with nothing thrown away, what does the histogram of ages in the buffer look like? And
# > of the drawn ages, for $m = 0$, $m = 0.75$ and $m = 1$?

# %%
NO_BOUND = {"capacity": 1_000_000, "per_prompt": 1_000_000}  # more than the recording has: nothing is thrown away
pool = NO_BOUND | {"recent_groups": RECENT}
lives = {m: replays(stream, DRAWS, pool, P, K, m, 0.0, EVERY) for m in (0.0, M, 1.0)}
half = UPDATES // EVERY // 2  # where the second half begins: the buffer holds old answers by then

panels = {
    f"m = {m:g}": {what: gathered(known, f"{what}_ages", half) for what in ("stored", "drawn")}
    for m, known in lives.items()
}
young = np.mean(np.array(gathered(lives[M], "drawn_ages", half)) < 10)
title = f"With m = {M:g}, {young:.0%} of what the trainer draws is less than 10 updates old"
figures.picture(figures.histograms(panels, np.linspace(0, UPDATES, 25), "age [trainer updates]", title))

# %% [markdown]
# <details><summary>Answer</summary>
#
# The stored ages are spread over the whole run, a little of each age. (The far end is thin: only the last updates can see
# answers that old.) With $m = 0$ the draw looks like the store: most of its answers were written by a model that is long
# gone. With $m = 1$ all of it is new. With $m = 0.75$ it is a mixture: three quarters are fresh, and a quarter is of any
# age.
#
# </details>
#
# ## A small buffer forgets
#
# > **Predict:** the buffer may hold only 4,000 trajectories. How do the stored ages change over time? And the drawn ages,
# > for $m = 0$?

# %%
bounded = replays(stream, DRAWS, pool | {"capacity": CAPACITY}, P, K, 0.0, 0.0, EVERY)
series = {
    "stored, without a bound": over_time(lives[0.0], "stored_ages"),
    "stored": over_time(bounded, "stored_ages"),
    "drawn": over_time(bounded, "drawn_ages"),
}
(full_age,), (bounded_age,) = series["stored, without a bound"][1], series["stored"][1]
full = next(
    (i for i, age in enumerate(full_age) if age > bounded_age[i] + 0.5), len(full_age) - 1
)  # the first eviction
low, high = min(bounded_age[full:]), max(bounded_age[full:])
title = f"When {CAPACITY:,} are stored the oldest go: from then on the mean age is {low:.0f} to {high:.0f}"
figures.picture(figures.curves(series, "trainer updates", "mean age [trainer updates]", title))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Without a bound the mean age grows for ever, by about half an update at each update. With a bound it no longer grows
# without limit. It does not stand still: it follows the searcher's speed. When the searcher writes fast, 4,000 answers are
# soon replaced, and the age falls. The drawn ages scatter about the stored ones (thin lines differ in the random numbers of
# the draws; the band reaches from the lowest to the highest). So there are two ways to keep the trainer's data young: a
# small buffer and a large $m$. The small buffer also forgets rare successes.
#
# </details>
#
# ## Drawing by reward
#
# > **Predict:** the share of right answers among the stored ones rises as the model learns. With $\lambda = 4$, is the
# > share among the drawn ones higher? Everywhere?

# %%
by_reward = replays(stream, DRAWS, pool, P, K, 0.0, INVERSE_TEMPERATURE, EVERY)
width = max(1, 10 // EVERY)  # means of 10 updates
series = {
    "stored": over_time(lives[0.0], "stored_reward", width),
    "drawn": over_time(by_reward, "drawn_reward", width),
}
right = {what: np.mean([row[f"{what}_reward"] for row in by_reward[0][half:]]) for what in ("drawn", "stored")}
early = {what: np.mean([row[f"{what}_reward"] for row in by_reward[0] if row["update"] <= 10]) for what in right}
title = f"λ = {INVERSE_TEMPERATURE:g}: late on, {right['drawn']:.0%} of the drawn are right, and {right['stored']:.0%} of the stored"
figures.picture(figures.curves(series, "trainer updates", "share of right answers", title))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Not in the beginning. Each prompt then holds 16 answers, and a batch takes all of them. Later, prompts come back and hold
# 32 or more. Then many more of the drawn answers are right. Is this good? The trainer sees fewer wrong answers, and
# trajectory balance learns from *differences* in a group.
#
# </details>
#
# With 8,500 problems no prompt comes back within 200 updates: there, $\lambda$ would change nothing.
#
# ## How many different answers?
#
# > **Predict:** as the model learns, does the number of distinct answers in a fresh group of 16 rise or fall?

# %%
(fresh,) = replays(stream, 1, NO_BOUND | {"recent_groups": P}, P, K, 1.0, 0.0, EVERY)  # the newest P groups: no chance
updates, (shares,) = over_time([fresh], "drawn_distinct", width)
first, last = K * np.mean(shares[:4]), K * np.mean(shares[-10:])
title = f"Of {K} fresh answers to a sum, {first:.1f} are different at first, {last:.1f} in the end"
series = {"the newest groups": (updates, K * np.array(shares))}
figures.picture(figures.curves(series, "trainer updates", f"different answers of {K}", title))

# %% [markdown]
# <details><summary>Answer</summary>
#
# It falls: a policy that knows the right answer writes nothing else. Equal answers have equal residuals (notebook 1), and
# a group of equal answers teaches nothing. So fresh data teaches less and less, and the answers of an older, more varied
# model become useful.
#
# </details>
#
# ## Does an old answer have a larger loss?
#
# The recording has no policy to compute a loss with. So we take three runs of the default job (three seeds, all of its
# problems) that saved their policy and their buffer every 20 updates. For each group that is stored then we compute the
# TB loss under the policy of that moment, and sort the groups by age. The loss is multiplied by $\beta^2$, so that its
# unit is that of the reward, squared.
#
# > **Predict:** at update 20, which groups have the larger loss, the youngest or the oldest? And at update 200?

# %%
runs = read_saved("default")
looks = {step: [look for run in runs for look in run.looks if look["step"] == step] for step in (200, 60, 20)}
series = {}
for step, of_runs in looks.items():
    known = [i for i in range(len(BINS)) if all(look["loss"][i] is not None for look in of_runs)]
    series[f"update {step}"] = [BINS[i] for i in known], [[look["loss"][i] for i in known] for look in of_runs]
medians = {step: np.median(series[f"update {step}"][1], 0) for step in looks}
(*_, oldest), y = series["update 200"][0], medians[200]
title = f"Update 200: {y[0]:.3f} for the youngest groups, {y[-1]:.3f} for those of {oldest} updates and more"
figures.picture(figures.curves(series, "age: from this many trainer updates on", "β² · TB loss [reward²]", title))

# %% [markdown]
# <details><summary>Answer</summary>
#
# At update 20 the oldest groups (12 and more) have the smallest loss. At update 200 the oldest (100 and more) have the
# largest, and below an age of 100 the loss hardly depends on it. A likely reason, which this figure does not prove: early
# on the policy has learned most from the oldest groups; in the end the young groups are mostly the same right answer over
# and over, with equal residuals, and only the old ones hold wrong answers from which there is something to learn. So
# neither "old answers have a large loss" nor its opposite is true, and a mean loss over a batch depends on the batch's
# ages. Keep this in mind when you look at a loss curve (notebook 6).
#
# </details>
#
# ## What to take away
#
# - Age is counted in trainer updates: the count now minus `policy_version`.
# - $m$ sets how much of a batch is new. The rest is as old as the store.
# - A bound on the buffer bounds the age. A draw by reward can only choose among the answers of a prompt.
# - Look at *drawn* ages, not at stored ones: the loss sees the drawn ones.
# - The loss of an answer does not say how old it is, nor the other way round.
#
# ## Exercises
#
# **1. Half and half.** Which share of a batch is less than 10 updates old with `M = 0.5`? Work it out before you run it.
#
# <details><summary>Solution</summary>
#
# About half: the pool's answers are nearly all that young, and of the rest only a small part is (at update 150, 10 of 150
# updates). So $0.5 + 0.5 \cdot 10/150 \approx 0.53$; the run says 0.51.
#
# </details>
#
# **2. A larger pool.** Set `RECENT = 320`, ten times as many groups. What happens to the ages for $m = 1$? Does a large pool act
# like a small $m$?
#
# <details><summary>Solution</summary>
#
# The searcher writes 9.5 groups per update here. So 32 groups are the last 3 or 4 updates, and 320 groups the last 34. The
# mean drawn age for $m = 1$ rises from 2.8 to 20.5. The histogram shows the difference to a small $m$: with a large pool
# *all* answers are moderately old and none is very old. With a small $m$ some are fresh and the rest is of any age. The
# same mean can be either.
#
# </details>
#
# **3. Reuse.** How often is each answer drawn in a whole run? Count it with $m = 0$ and with $m = 1$. What share of all
# answers is never drawn?
#
# <details><summary>Solution</summary>
#
# ```python
# from buffer import ReplayBuffer
#
# never = {}
# for m in (0.0, 1.0):
#     buffer, drawn = ReplayBuffer(**pool), Counter()
#     for _, groups in arrivals(stream):
#         for group in groups:
#             buffer.add(group)
#         batch = buffer.sample(P, K, m) or []
#         drawn.update(t.uid for group in batch for t in group)
#     never[m] = 1 - len(drawn) / len(stream)
#     print(f"m = {m:g}: drawn {sum(drawn.values()) / len(stream):.2f} times on average, never: {never[m]:.0%}")
# ```
#
# The trainer draws 1.7 answers for each answer that was written, in both. With $m = 0$ still 35 % of all answers are never
# drawn, and with $m = 1$ 19 %: an answer is drawn while it is new, or never. All these were written for nothing.
#
# </details>

# %%
# What this notebook claims:
mean_age = {m: np.mean(gathered(known, "drawn_ages", half)) for m, known in lives.items()}
stored_age = np.mean(gathered(lives[0.0], "stored_ages", half))
mixture = M * mean_age[1.0] + (1 - M) * mean_age[0.0]
lesson.check(2, globals(), {
    "an answer that is sent twice is stored once": counts["duplicates"] == 16,
    "24 places: the second group pushes out the oldest 8": counts["evicted"] == 8 and counts["stored"] == 24,
    f"16 answers of the start model to one sum: {kept} different": kept <= 6,
    f"m = 0 draws what is stored: mean age {mean_age[0.0]:.0f} of {stored_age:.0f}": 0.9 < mean_age[0.0] / stored_age < 1.1,
    f"m = 1 draws the newest: mean age {mean_age[1.0]:.1f}": mean_age[1.0] < 8,
    f"m = {M:g} is the mixture of both: {mean_age[M]:.1f} for {mixture:.1f}": abs(mean_age[M] - mixture) < 0.1 * stored_age,
    f"m = {M:g}: {young:.0%} of a batch is less than 10 updates old": abs(young - M) < 0.12,
    "without a bound the mean age grows by about half an update per update": 0.3 < full_age[-1] / UPDATES < 0.6,
    f"bounded, the mean age moves between {low:.0f} and {high:.0f}": high < 0.5 * full_age[-1] and high > 3 * low,
    f"by reward, {right['drawn']:.0%} of the drawn are right in the second half, and {right['stored']:.0%} of the stored": 0.05
    < right["drawn"] - right["stored"] < 0.4,
    "in the first 10 updates a draw by reward changes nothing": abs(early["drawn"] - early["stored"]) < 0.1,
    f"a fresh group has fewer different answers in the end ({last:.1f}) than at first ({first:.1f})": last < 0.8 * first,
    "at update 20 the oldest groups have the smallest loss, in each seed": all(y[-1] == min(y) for y in series["update 20"][1]),
    "at update 200 the oldest groups have the largest loss, in each seed": all(y[-1] == max(y) for y in series["update 200"][1]),
})  # fmt: skip
