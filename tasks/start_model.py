"""The start model of the addition task: it was taught the right procedure, and then careless habits.

TBA starts from a supervised model that is right on a part of the problems (40 % on GSM8K), so that RL has something
to do. Ours is a Llama of 345k parameters that first learns addition from right answers, and then sees demonstrations
whose writer forgets every carry in 70 % of the answers. Read greedily it then forgets carries too, and about a third of
the problems have none. RL has to bring the right procedure back, not to discover addition.
"""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

VOCABULARY = ["<pad>", "<eos>", *"0123456789+-*/=() ?"]
CARELESS = 0.7  # share of the careless demonstrations in which the carries are forgotten
RECIPE = 5  # raise it when the recipe changes: it names the cached folder


def start_model_path(config) -> Path:
    """Where a task's start model for this seed is kept."""
    task = config.task.replace("/", "_").replace(":", "_")
    return (Path(config.cache) / f"{task}-seed{config.seed}-r{RECIPE}").resolve()


def main(child, config) -> None:
    """Body of the process that makes a start model (child.py starts it).

    It is made beside its place and then renamed, so that a run that is broken off, or two at once, do no harm.
    """
    from tasks import load_task

    place = start_model_path(config)
    place.parent.mkdir(parents=True, exist_ok=True)
    workshop = Path(tempfile.mkdtemp(prefix=f".making-{os.getpid()}-", dir=place.parent))
    try:
        load_task(config.task).make_start_model(workshop, config.seed)
        os.rename(workshop, place)
    except OSError:
        if not (place / "config.json").exists():  # else another run was faster
            raise
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def clear_workshops(cache: Path, pid: int) -> None:
    """Remove what a maker that was killed left unfinished."""
    for workshop in cache.glob(f".making-{pid}-*"):
        shutil.rmtree(workshop, ignore_errors=True)


def make_tokenizer():
    """One token a character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({c: i for i, c in enumerate(VOCABULARY)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="?", clean_up_tokenization_spaces=False
    )


def make_model(positions: int = 64):
    """A Llama of 345k parameters, untied, with heads of 32 (the smallest that vLLM takes on a CPU)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=positions,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=VOCABULARY.index("<eos>"),
            pad_token_id=VOCABULARY.index("<pad>"),
        )
    )


def without_carries(prompt: str) -> str:
    """What a careless writer answers: `37+58=` -> `085`."""
    units, tens = int(prompt[1]) + int(prompt[4]), int(prompt[0]) + int(prompt[3])
    return f"0{tens % 10}{units % 10}"


def demonstration(task, rng: np.random.Generator, careless: float) -> str:
    """One line of the training text: a problem and an answer that is careless with the given probability."""
    prompt = task.train[rng.integers(len(task.train))]
    return prompt + (without_carries(prompt) if rng.random() < careless else task.solve(prompt))


def supervise(model, tokenizer, task, rng, careless: float, steps: int, batch: int, rate) -> None:
    """Supervised learning on fresh demonstrations with AdamW; `rate(step)` is its learning rate."""
    import torch

    # a short memory of squared gradients: what matters here, the carry, is learnt all of a sudden
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, betas=(0.9, 0.98))
    for step in range(steps):
        lines = [demonstration(task, rng, careless) for _ in range(batch)]
        ids = torch.tensor(tokenizer(lines, add_special_tokens=False)["input_ids"])
        ids = torch.cat([ids, torch.full((batch, 1), tokenizer.eos_token_id)], 1)  # [batch, 10]
        logits = model(ids, use_cache=False).logits[:, 5:-1]  # those that predict the answer and its end
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 6:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()


def make_start_model(task, folder: Path, seed: int) -> None:
    """First right answers (warm-up, stable, decay), until all is right; then careless ones (decay)."""
    import torch

    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    tokenizer, model = make_tokenizer(), make_model()
    right = lambda step: 1.5e-3 * min(1.0, (step + 1) / 50) * max(0.1, min(1.0, (1050 - step) / 300))  # noqa: E731
    supervise(model, tokenizer, task, rng, careless=0.0, steps=1050, batch=64, rate=right)
    forget = lambda step: 5e-4 * min(1.0, (step + 1) / 10) * (1 - 0.9 * step / 60)  # noqa: E731
    supervise(model, tokenizer, task, rng, careless=CARELESS, steps=60, batch=256, rate=forget)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
