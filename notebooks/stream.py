"""The recorded stream of notebook 2: every trajectory of a run, in order of arrival, and how a buffer would have used it.

`keep_stream` writes it, without log mu; notebooks/save_runs.py does.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from buffer import ReplayBuffer, Trajectory

Groups = list[list[Trajectory]]


def keep_stream(packed: tuple, prompts: list[str], place: Path) -> None:
    """Write packed trajectories (by `pack` of runtime/served_buffer.py) in order of arrival, without log mu."""
    head, _, responses, _ = packed
    small = {name: head[name].astype(np.uint16) for name in ("prompt_id", "policy_version", "version_last")}
    small |= {"reward": head["reward"].astype(np.float16), "log_ref": head["log_ref"].astype(np.float16)}
    place.parent.mkdir(parents=True, exist_ok=True)
    lengths = head["len"].astype(np.uint8)
    np.savez_compressed(place, **small, len=lengths, responses=responses.astype(np.uint8), prompts=np.array(prompts))


def read_stream(place: Path) -> tuple[list[Trajectory], list[str]]:
    """Trajectories in order of arrival (log mu is 0: nothing here reads it), and the prompts' texts."""
    kept = np.load(place)
    ends = np.concatenate([[0], np.cumsum(kept["len"], dtype=np.int64)])
    responses, prompts = kept["responses"].astype(np.int32), kept["prompts"].tolist()
    columns = (kept[name].tolist() for name in ("prompt_id", "reward", "log_ref", "policy_version", "version_last"))
    out = []
    for i, (prompt, reward, log_ref, first, last) in enumerate(zip(*columns, strict=True)):
        response = responses[ends[i] : ends[i + 1]]
        nothing = np.zeros(len(response), np.float32)
        out.append(
            Trajectory(
                (0, 0, i), prompt, np.zeros(1, np.int32), response, "stop", reward, log_ref, nothing, first, last, 0
            )
        )
    return out, prompts


def arrivals(stream: list[Trajectory]) -> Iterator[tuple[int, list[list[Trajectory]]]]:
    """Each trainer update with its groups. An answer comes at the update of its newest weights, `version_last`."""
    by_update: dict[int, dict[tuple, list[Trajectory]]] = {}
    for t in stream:
        groups = by_update.setdefault(t.version_last, {})
        groups.setdefault((t.prompt_id, t.policy_version), []).append(t)
    for update in range(max(by_update) + 1):
        yield update, list(by_update.get(update, {}).values())


def replay(
    stream: list[Trajectory],
    buffer: ReplayBuffer,
    p: int,
    k: int,
    m: float,
    inverse_temperature: float = 0.0,
    every: int = 1,
    stored: bool = True,
) -> list[dict]:
    """Put a recorded stream through a buffer, draw a batch every `every` trainer updates. -> a row for each draw.

    Nobody learns from the draws: the stream was written by a run with its own settings and doesn't change.

    Args:
        stored: note also what is stored then (slow).
    """
    rows = []
    for update, groups in arrivals(stream):
        for group in groups:
            buffer.add(group)
        batch = None if update % every else buffer.sample(p, k, m, inverse_temperature)
        if batch is None:
            continue
        row = {"update": update}
        seen = {"drawn": [t for group in batch for t in group]} | ({"stored": buffer.contents()} if stored else {})
        for name, trajectories in seen.items():
            row |= {f"{name}_{what}": value for what, value in _look(trajectories, update).items()}
        rows.append(row)
    return rows


def replays(stream: list[Trajectory], draws: int, bounds: dict, *arguments) -> list[list[dict]]:
    """`replay` with several seeds of the draws; only the first looks at what is stored, which is the same for all.

    Args:
        bounds: ReplayBuffer's arguments but its seed.
        arguments: replay's, from `p` to `every`.
    """
    return [replay(stream, ReplayBuffer(**bounds, seed=seed), *arguments, stored=seed == 0) for seed in range(draws)]


def over_time(lives: list[list[dict]], name: str, width: int = 1) -> tuple[list[int], list[list[float]]]:
    """A column of replays as curves: trainer updates, and for each replay that has the column the means of `width`
    neighbours. A list counts as its mean."""
    known = [rows for rows in lives if name in rows[0]]
    values = [np.convolve([np.mean(row[name]) for row in rows], np.ones(width) / width, "valid") for rows in known]
    return [row["update"] for row in lives[0]][width - 1 :], [v.tolist() for v in values]


def gathered(lives: list[list[dict]], name: str, start: int = 0) -> list[int]:
    """All numbers in a column of lists, of all replays that have it, from row `start` on."""
    return [value for rows in lives for row in rows[start:] if name in row for value in row[name]]


def as_text(t: Trajectory, prompts: list[str]) -> str:
    """A trajectory of the addition task as readable text."""
    from tasks.start_model import VOCABULARY

    answer = "".join(VOCABULARY[i] for i in t.response)
    return f"{prompts[t.prompt_id]}{answer:12} reward {t.reward:.0f}, written by version {t.policy_version}"


def _look(trajectories: list[Trajectory], update: int) -> dict:
    answers = {(t.prompt_id, t.response.tobytes()) for t in trajectories}
    return {
        "ages": [update - t.policy_version for t in trajectories],
        "reward": float(np.mean([t.reward for t in trajectories])),
        "distinct": len(answers) / len(trajectories),
    }


# --- the reader's own sampler ---------------------------------------------------------------------------------------


def judge(mine: Callable | None, groups: Groups, p: int, m: float, recent: int, draws: int = 2000) -> dict[str, bool]:
    """Compare a sampler with the buffer's rule, on the same groups, and print the verdict.

    Args:
        mine: (groups, p, m, recent, rng) -> p groups of different prompts; None: not written yet.
        groups: all that is stored, oldest first, a group a list of answers to one prompt.
        p, m, recent: prompts in a batch; probability that one comes from the newest `recent` groups.
        draws: batches to draw.

    Returns:
        test -> whether it passes; empty when nothing was written.
    """
    if mine is None:
        print("Write `mine` first.")
        return {}
    buffer = ReplayBuffer(10**6, 10**6, recent)
    for group in groups:
        buffer.add(group)
    rng, place = np.random.default_rng(0), {t.uid: i for i, group in enumerate(groups) for t in group}
    batches = {
        "mine": [mine(groups, p, m, recent, rng) for _ in range(draws)],
        "buffer": [buffer.sample(p, 1, m) for _ in range(draws)],
    }
    if any(len({group[0].prompt_id for group in batch}) != p or len(batch) != p for batch in batches["mine"]):
        verdict = {f"{p} different prompts in each batch": False}
    else:
        drawn = {who: np.array([[place[g[0].uid] for g in batch] for batch in b]) for who, b in batches.items()}
        young = {who: (places >= len(groups) - recent).sum(1) for who, places in drawn.items()}
        error = np.std(young["buffer"]) * (2 / draws) ** 0.5  # standard error of the difference of two means
        often = {who: np.bincount(places.ravel(), minlength=len(groups)) for who, places in drawn.items()}
        verdict = {
            f"{p} different prompts in each batch": True,
            "as many from the newest groups": abs(young["mine"].mean() - young["buffer"].mean()) < 4 * error,
            "a coin for each prompt, not one for the batch": young["mine"].std() < 1.2 * young["buffer"].std(),
            "all of the newest groups alike": _alike(*(counts[-recent:] for counts in often.values())),
            "all older prompts alike, and all groups of a prompt": _alike(*(c[:-recent] for c in often.values())),
        }
    for test, passed in verdict.items():
        print("yes" if passed else "NO ", test)
    return verdict


def _alike(mine: np.ndarray, buffer: np.ndarray) -> bool:
    """Whether two rows of counts may come from one distribution: a chi-square test, at four standard errors."""
    both = np.maximum(mine + buffer, 1)
    return bool(((mine - buffer) ** 2 / both).mean() < 1 + 4 * (2 / len(both)) ** 0.5)
