"""The cost of publishing the weights and of pulling them into a running vLLM, against one copy of the same bytes.

    python -m bench.weights          3 minutes

The weights are random, in the shapes of two models: the default task's, made wider (under a million parameters), and
SmolLM2-135M (under 135 million). `copy` is one memcpy of as many bytes between two warm pieces of memory. `reload` is
vLLM's own weight update from tensors in memory. All take turns on one thread. A figure is the median of the repeats'
ratios.

    publish / copy                  goal: at most 1.2
    pull / (copy + reload)          goal: at most 1.2 (a pull is read, then reload)

Writes bench/results/weights.json.
"""

import os
import tempfile
import time

from bench.common import arguments, median, save, say, table  # noqa: I001

SHAPES = {  # hidden, MLP, layers, heads, key-value heads, vocabulary
    "1M": (192, 512, 2, 6, 6, 64),
    "135M": (576, 1536, 30, 9, 3, 49152),
}


def make(folder: str, shape: tuple):
    """A random Llama of that shape, untied, with our tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tasks.start_model import make_tokenizer

    hidden, mlp, layers, heads, kv_heads, vocabulary = shape
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=64,
            tie_word_embeddings=vocabulary > 1000, bos_token_id=None, eos_token_id=1, pad_token_id=0,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return model.requires_grad_(False)


def seconds(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(size: str, repeats: int, times: int) -> list[dict]:
    """Measure all repeats of one size."""
    import torch

    from runtime.engine import Sampling, VllmEngine
    from runtime.policy import named_weights
    from runtime.weights import SharedWeights

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = make(folder, SHAPES[size])
        engine = VllmEngine(folder, Sampling(1.0, 8, (1,), 8, 16))
    named = named_weights(model)
    shared = SharedWeights.like(named)
    bytes_ = sum(p.numel() * p.element_size() for _, p in named)
    source, target = torch.ones(bytes_, dtype=torch.uint8), torch.ones(bytes_, dtype=torch.uint8)
    version, rows = 0, []
    for repeat in range(-1, repeats):  # the first warms up
        spent: dict[str, list[float]] = {"copy": [], "publish": [], "reload": [], "pull": []}
        for _ in range(times):
            version += 1
            spent["copy"].append(seconds(lambda: target.copy_(source)))
            spent["publish"].append(seconds(lambda v=version: shared.publish(named, v)))
            spent["reload"].append(seconds(lambda: engine.load_weights(named)))
            spent["pull"].append(seconds(lambda: engine.load_weights(shared.read()[1])))
        ms = {name: 1e3 * median(values) for name, values in spent.items()}
        ratios = {"publish_over_copy": ms["publish"] / ms["copy"]}
        ratios["pull_over_copy_and_reload"] = ms["pull"] / (ms["copy"] + ms["reload"])
        row = {"size": size, "parameters": sum(p.numel() for _, p in named), "repeat": repeat}
        row |= {f"{name}_ms": round(value, 3) for name, value in ms.items()}
        rows.append(row | {name: round(value, 3) for name, value in ratios.items()})
    return rows[1:]


RATIOS = ("publish_over_copy", "pull_over_copy_and_reload")


def figures(rows: list[dict]) -> dict[str, dict[str, float]]:
    """Medians over the repeats, by size."""
    sizes = dict.fromkeys(r["size"] for r in rows)
    return {n: {size: round(median(r[n] for r in rows if r["size"] == size), 2) for size in sizes} for n in RATIOS}


def text(rows: list[dict]) -> str:
    """Markdown."""
    lines, found = [], figures(rows)
    for size in found[RATIOS[0]]:
        mine = [r for r in rows if r["size"] == size]
        ms = [f"{median(r[f'{name}_ms'] for r in mine):.2f}" for name in ("copy", "publish", "reload", "pull")]
        lines.append([size, *ms, *(f"{found[name][size]:.2f}" for name in RATIOS)])
    head = [
        "parameters",
        "copy, ms",
        "publish, ms",
        "reload, ms",
        "pull, ms",
        "publish / copy",
        "pull / (copy + reload)",
    ]
    return table(head, lines)


def main() -> None:
    args = arguments(__doc__)
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    began, rows = time.time(), []
    for size in list(SHAPES)[: 1 if args.quick else 2]:
        rows += measure(size, 1 if args.quick else args.repeats, 5 if size == "135M" else 40)
        say(began, size)
    print(text(rows))
    if not args.quick:
        save("weights", figures(rows), {"threads": 1, "dtype": "float32"}, rows, began)


if __name__ == "__main__":
    main()
