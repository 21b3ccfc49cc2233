"""TRL's GRPOTrainer on our task and start model: run by bench/time_to_accuracy.py with the Python of TRL's environment.

    python -m bench.trl_grpo REQUEST.json ANSWER.json

The request names the task, the folder of each seed's start model, and the runs: seed, learning rate, updates, threads,
and further options of GRPOConfig. Weights are copied after each update and evaluated after the run. For each run the
answer has the seconds from the first request for answers to the first weights that reach the accuracy.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

began = time.time()
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from tasks import is_right, load_task  # noqa: E402


class Snapshots(TrainerCallback):
    """The time when training begins, and a copy of the weights after each update."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.start, self.kept = time.time(), []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.kept.append((state.global_step, time.time(), weights))


def accuracy(model, tokenizer, task, prompts: list[str], new_tokens: int) -> float:
    """Share of prompts whose greedy answer is right. All prompts must have the same length."""
    ids = torch.tensor(tokenizer(prompts, add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
    texts = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    return sum(is_right(task, p, t) for p, t in zip(prompts, texts, strict=True)) / len(prompts)


def one_run(request: dict, run: dict) -> dict:
    """Train; find the first weights above the target."""
    torch.set_num_threads(run["threads"])
    task, folder = load_task(request["task"]), request["folders"][str(run["seed"])]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    watch = Snapshots()

    def reward(prompts, completions, **_):
        return [float(task.reward(p, c)) for p, c in zip(prompts, completions, strict=True)]

    size, k = request["prompts"] * request["k"], request["k"]
    options = {"per_device_train_batch_size": size, "num_iterations": 1} | run.get("options", {})
    place = tempfile.TemporaryDirectory()
    config = GRPOConfig(
        output_dir=place.name, use_cpu=True, bf16=False, seed=run["seed"], report_to="none",
        num_generations=k, max_completion_length=request["new_tokens"], temperature=1.0, beta=0.0,
        learning_rate=run["lr"], lr_scheduler_type="constant_with_warmup", warmup_steps=request["warmup"],
        max_steps=run["updates"], logging_strategy="no", save_strategy="no", disable_tqdm=True,
        gradient_checkpointing=False, **options,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=config, processing_class=tokenizer, callbacks=[watch],
        train_dataset=Dataset.from_dict({"prompt": list(task.train)}),
    )  # fmt: skip
    trainer.train()
    took = watch.kept[-1][1] - watch.start
    prompts = getattr(task, request["split"])[: request["eval_prompts"]]
    found, share, reached = None, 0.0, watch.kept[-1][1]
    for step, when, weights in watch.kept:
        if step % request["every"] and step != run["updates"]:
            continue
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(weights[name])
        share = accuracy(model, tokenizer, task, prompts, request["new_tokens"])
        if share >= request["target"]:
            found, reached = step, when
            break
    row = {key: run[key] for key in ("seed", "lr", "threads")} | {"options": run.get("options", {})}
    row |= {"update": found, "seconds": reached - watch.start if found else None, "accuracy": share}
    generated = options["per_device_train_batch_size"] / options["num_iterations"]  # mean answers per update
    row["start"] = watch.start
    return row | {"trajectories": found and round(generated * found), "seconds_an_update": took / run["updates"]}


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    rows = [one_run(request, run) for run in request["runs"]]
    rows[0]["startup_seconds"] = rows[0]["start"] - began  # imports, model, trainer
    Path(sys.argv[2]).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
