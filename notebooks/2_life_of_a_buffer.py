# %% [markdown]
# # 2 · The life of a replay buffer
#
# **Question: what is in the replay buffer, and what does the trainer draw from it?**
#
# Run time: about half a minute on 2 cores. Notebook 1 explains the words *policy*, *reward* and *trajectory*.
#
# In this project some processes, the **searchers**, write answers without pause. Another process, the **trainer**,
# changes the model's weights without pause. Neither waits for the other. Between them is a store of answers, the
# **replay buffer**: searchers put answers in, the trainer draws batches from it. An answer may be drawn many times or
# never, and it may be old by then.

# %%
import sys

sys.path.insert(0, "..")  # the project's modules lie one folder up

from collections import Counter

import numpy as np

from buffer import ReplayBuffer, reward_probs
from notebooks import figures
from notebooks.saved_run import SAVED, as_text, gathered, over_time, read_stream, replay
from tasks.start_model import VOCABULARY

# %% tags=["parameters"]
FAST = False  # True: the first updates of the recording only, as the tests do
P, K = 16, 16  # a batch: prompts, and answers to each
M = 0.75  # called m: probability that a prompt of a batch comes from the newest data
INVERSE_TEMPERATURE = 4.0  # how strongly a draw prefers high rewards
CAPACITY = 4000  # trajectories in the bounded buffer below
UPDATES = 100 if FAST else 200  # trainer updates to replay
EVERY = 5 if FAST else 2  # trainer updates between two looks at the buffer

# %% [markdown]
# ## Real trajectories
#
# `saved/stream.npz` holds every answer of a real run of the default job, in order of arrival: a language model of
# 345,000 parameters learns to add two numbers (on 256 of its problems, so that each comes back often). The reward is 1
# for the right answer, otherwise 0. A **trajectory** is one answer and all that is known about it:
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
# `per_prompt`, the oldest go. We put in one group of 16 answers, then the same group again.

# %%
group = stream[:16]
buffer = ReplayBuffer(capacity=24, per_prompt=100)
buffer.add(group)
print("one group:        ", buffer.stats())
buffer.add(group)
print("the same again:   ", buffer.stats())
buffer.add(stream[16:32])
print("a second group:   ", buffer.stats())
first_evicted = buffer.stats()

# %% [markdown]
# The same `uid` is never stored twice. The second group pushed out the oldest 8, because there is room for 24.
#
# With `dedup=True`, only the newest copy of an *answer* stays, even though each copy was a separate trajectory.
#
# > **Predict:** a model that is right about half of the time writes 16 answers to one sum. How many are different?

# %%
unique = ReplayBuffer(capacity=24, per_prompt=100, dedup=True)
unique.add(group)
print("with dedup:", unique.stats())
print(Counter("".join(VOCABULARY[i] for i in t.response[:-1]) for t in group), "for", problems[group[0].prompt_id])
kept = unique.stats()["stored"]

# %% [markdown]
# **Answer:** very few. The model doesn't guess: it knows one or two ways to add, and repeats itself. From a
# deduplicated buffer, the trainer would get groups in which a frequent answer counts as much as a rare one, and would
# estimate log Z from these few. So deduplication is off by default here. The paper uses it: its answers are long and
# hardly ever the same.
#
# ## Drawing
#
# A batch is $P$ prompts with $K$ answers each. For each prompt we toss a coin that shows heads with probability $m$:
#
# - heads: the prompt comes from the **recency pool**, the newest groups (here the newest $2P$);
# - tails: the prompt comes from everything stored, all prompts alike. Its answers are drawn alike too, or by reward
#   with probability $\propto e^{\lambda r}$. $\lambda$ is called the inverse temperature: 0 means all alike.

# %%
rewards = np.array([0.0, 0.0, 0.0, 1.0])
for inverse in (0.0, 1.0, INVERSE_TEMPERATURE):
    print(
        f"lambda = {inverse:g}: four answers with rewards {rewards} are drawn with",
        reward_probs(rewards, inverse).round(3),
    )

# %% [markdown]
# ## How old are stored answers, and how old are drawn ones?
#
# Now we replay the whole recording: at each trainer update we add the answers that came then, and draw a batch. (Nobody
# learns here. The stream was written by its own run and doesn't change.)
#
# > **Predict:** late in the run, with nothing thrown away, what does the histogram of ages in the buffer look like? And
# > of the drawn ages, for $m = 0$, $m = 0.75$ and $m = 1$?


# %%
room = 1_000_000, 1_000_000  # more than the recording has: nothing is ever thrown away
lives = {m: replay(stream, ReplayBuffer(*room, 2 * P), P, K, m, every=EVERY) for m in (0.0, M, 1.0)}
half = UPDATES // EVERY // 2  # where the second half begins: the buffer holds old answers by then

panels = {
    f"m = {m:g}": {what: gathered(rows, f"{what}_ages", half) for what in ("stored", "drawn")}
    for m, rows in lives.items()
}
young = np.mean(np.array(gathered(lives[M], "drawn_ages", half)) < 10)
title = f"With m = {M:g}, {young:.0%} of what the trainer draws is less than 10 updates old"
figures.picture(figures.histograms(panels, np.linspace(0, UPDATES, 25), "age [trainer updates]", title))

# %% [markdown]
# **Answer:** the stored ages are spread over the whole run, a little of each age. (The far end is thin: only the last
# updates can see answers that old.) With $m = 0$ the draw looks like the store: most of its answers were written by a
# model that is long gone. With $m = 1$ all of it is new. With $m = 0.75$ it is a mixture: three quarters are fresh, and
# a quarter is of any age.
#
# ## A small buffer forgets
#
# > **Predict:** the buffer may hold only 4,000 trajectories. How do the stored ages change? And the drawn ages, for
# > $m = 0$?


# %%
bounded = replay(stream, ReplayBuffer(CAPACITY, 1_000_000, 2 * P), P, K, 0.0, every=EVERY)
series = {
    "stored": over_time(bounded, "stored_ages"),
    "drawn": over_time(bounded, "drawn_ages"),
    "stored, without a bound": over_time(lives[0.0], "stored_ages"),
}
limit = np.mean([np.mean(row["stored_ages"]) for row in bounded[-10:]])
title = f"A buffer of {CAPACITY:,} stops ageing at {limit:.0f} trainer updates on average"
figures.picture(figures.curves(series, "trainer updates", "mean age [trainer updates]", title))

# %% [markdown]
# **Answer:** without a bound the mean age grows by about half an update at each update, for ever. With one it stops as
# soon as the buffer is full, at a little more than half the time needed to fill it. The drawn ages scatter about this
# value. (The kinks come from the recording: the searcher's pace varied.) So there are two ways to keep the trainer's
# data young: a small buffer and a large $m$. The small buffer also forgets rare successes.
#
# ## Drawing by reward
#
# > **Predict:** the share of right answers among the stored ones rises as the model learns. With $\lambda = 4$, is the
# > share among the drawn ones higher? Everywhere?

# %%
by_reward = replay(stream, ReplayBuffer(*room, 2 * P), P, K, 0.0, INVERSE_TEMPERATURE, EVERY)

series = {
    "stored": over_time(lives[0.0], "stored_reward", 5),
    "drawn": over_time(by_reward, "drawn_reward", 5),
    "drawn, all alike": over_time(lives[0.0], "drawn_reward", 5),
}
right = {what: np.mean([row[f"{what}_reward"] for row in by_reward[half:]]) for what in ("drawn", "stored")}
title = f"λ = {INVERSE_TEMPERATURE:g}: late on, {right['drawn']:.0%} of the drawn are right, and {right['stored']:.0%} of the stored"
figures.picture(figures.curves(series, "trainer updates", "share of right answers", title))

# %% [markdown]
# **Answer:** not in the beginning! Each prompt then holds 16 answers, and a batch takes all 16: there is nothing to
# choose. Later, prompts come back and hold 32 or more. Then nearly every drawn answer is right. Is this good? The
# trainer then hardly sees wrong answers, and trajectory balance (the loss of notebook 1) learns from *differences* in a
# group.
#
# ## How many different answers?
#
# > **Predict:** as the model learns, does the number of distinct answers per trajectory rise or fall?

# %%
fresh = replay(stream, ReplayBuffer(*room, P), P, K, 1.0, every=EVERY)
deduplicated = replay(stream, ReplayBuffer(*room, 2 * P, dedup=True), P, K, 0.0, every=EVERY)
series = {
    "stored": over_time(lives[0.0], "stored_distinct", 5),
    "drawn": over_time(fresh, "drawn_distinct", 5),
    "stored, with dedup": over_time(deduplicated, "stored_distinct", 5),
}
last = np.mean([row["drawn_distinct"] for row in fresh[-10:]])
title = f"Of 16 fresh answers to a sum, {16 * last:.1f} are different in the end"
figures.picture(figures.curves(series, "trainer updates", "distinct answers / trajectories", title))

# %% [markdown]
# **Answer:** it falls. In the store this is nearly arithmetic: the same few answers come again and again. But it also
# falls in each fresh group (*drawn*, with $m = 1$): a policy that knows the right answer writes nothing else. A group
# of equal answers has equal residuals (notebook 1) and teaches nothing. So the trainer learns less and less from fresh
# data, and then answers of an older, more varied model become useful. With deduplication the share is 1 by definition.
#
# ## What to take away
#
# - Age is counted in trainer updates: the count now minus `policy_version`.
# - $m$ sets how much of a batch is new. The rest is as old as the store.
# - A bound on the buffer bounds the age. A draw by reward can only choose among the answers of a prompt.
# - Look at *drawn* ages, not at stored ones: the loss sees the drawn ones.
#
# ## Exercises
#
# 1. Set `M = 0.5`. Which share of a batch is less than 10 updates old? Work it out before you run it.
# 2. `recent_groups` is $2P$ above. What happens to the ages for $m = 1$ when it is $20P$? Does a larger pool act like a
#    smaller $m$?

# %%
# What this notebook claims:
assert first_evicted["duplicates"] == 16 and first_evicted["evicted"] == 8 and first_evicted["stored"] == 24
assert kept <= 6
mean_age = {m: np.mean(gathered(rows, "drawn_ages", half)) for m, rows in lives.items()}
stored_age = np.mean(gathered(lives[0.0], "stored_ages", half))
assert 0.85 < mean_age[0.0] / stored_age < 1.15  # m = 0 draws what is stored
assert mean_age[1.0] < 8 and abs(mean_age[M] - (M * mean_age[1.0] + (1 - M) * mean_age[0.0])) < 0.1 * stored_age
assert abs(young - M) < 0.12
assert limit < 0.75 * np.mean(lives[0.0][-1]["stored_ages"])
assert 0.05 < right["drawn"] - right["stored"] < 0.4
assert last < np.mean([row["drawn_distinct"] for row in fresh[:4]]) and deduplicated[-1]["stored_distinct"] == 1
