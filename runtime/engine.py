"""Generation engines behind one small interface: vLLM, and transformers' generate where vLLM can't be installed.

    engine.load_weights(tensors, version)   load new weights, between two steps
    engine.add(key, prompt, n)              ask for n answers to a prompt
    engine.step() -> [(key, answers)]       work for a moment; returns the groups that are now complete
    engine.in_flight                        answers that are requested and not finished
    engine.generate(prompts, n)             n answers to each of a list of prompts

vLLM runs inside the searcher's process. An engine process of its own would start 30 s later on a CPU, and could be left
behind. New weights enter through vLLM's own weight-update life cycle. Calling `load_weights` on its model does not work
on a CPU, where the linear layers hold repacked copies. Prefix caching stays off, because cached keys and values would
belong to older weights. After an update, running requests continue with the keys and values of older weights; with
`recompute_kv`, vLLM computes them anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from runtime import inside_vllm

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from vllm.outputs import CompletionOutput

NamedTensors = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Answer:
    """One generated answer."""

    tokens: np.ndarray  # [T] int32, the end-of-sequence token included
    log_mu: np.ndarray  # [T] float32, log-probability of each token at the sampling temperature, nats
    finish_reason: str  # "stop" or "length"
    version_first: int = 0  # of the weights that wrote the first token
    version_last: int = 0  # ... the last token


@dataclass(frozen=True)
class Sampling:
    """An engine's settings."""

    temperature: float
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    max_prompt: int  # tokens of the longest prompt
    in_flight: int  # answers written at the same time
    seed: int = 0


class Engine:
    """The interface, and the part that both engines share."""

    in_flight: int
    version: int  # of the loaded weights; 0 for a start model

    def add(self, key: int, prompt: np.ndarray, n: int, greedy: bool = False) -> None:
        raise NotImplementedError

    def step(self) -> list[tuple[int, list[Answer]]]:
        raise NotImplementedError

    def load_weights(self, named_tensors: NamedTensors, version: int | None = None) -> None:
        raise NotImplementedError

    def generate(self, prompts: Sequence[np.ndarray], n: int, greedy: bool = False) -> list[list[Answer]]:
        """n answers to each prompt, in the order of the prompts."""
        done: dict[int, list[Answer]] = {}
        for i, prompt in enumerate(prompts):
            self.add(-1 - i, prompt, n, greedy)  # negative: no clash with a stream's keys
        while len(done) < len(prompts):
            done.update(self.step())
        return [done[-1 - i] for i in range(len(prompts))]


# --- vLLM -----------------------------------------------------------------------------------------------------------


class VllmEngine(Engine):
    """vLLM, driven step by step.

    Args:
        memory: share of a GPU's memory that vLLM may take.
        recompute_kv: after an update, compute the keys and values of running requests with the new weights.
        options: passed on to `vllm.LLM`.
    """

    def __init__(
        self,
        folder: str,
        sampling: Sampling,
        device: str = "cpu",
        memory: float = 0.85,
        recompute_kv: bool = False,
        **options: object,
    ):
        inside_vllm.import_vllm(device)
        from vllm.config import WeightTransferConfig

        inside_vllm.register_transfer()
        self._names = inside_vllm.Names(folder, bool(options.get("trust_remote_code")))
        on_cpu = torch.device(device).type == "cpu"
        length = sampling.max_prompt + sampling.max_new_tokens
        block = 32  # the smallest on a CPU
        cpu_options = {
            "dtype": "float32",
            "block_size": block,
            # as many blocks as can be in use, and no more: vLLM writes zeros into all of them at the start
            "num_gpu_blocks_override": sampling.in_flight * -(-length // block) + 16,
        }
        gpu_options = {"dtype": "bfloat16", "gpu_memory_utilization": memory}
        common = {
            "skip_tokenizer_init": True,  # token ids in, token ids out
            "enforce_eager": on_cpu,  # on a CPU compiling costs 46 s and gains 15 %
            "max_model_len": length,
            "max_num_seqs": sampling.in_flight,
            "max_num_batched_tokens": max(8192, length),
            "enable_prefix_caching": False,
            "async_scheduling": False,  # else a token would carry the version of the next step
            "logprobs_mode": "processed_logprobs",  # at the sampling temperature; the default ignores it
            "weight_transfer_config": WeightTransferConfig(backend=inside_vllm.TRANSFER),
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "seed": sampling.seed,
        }
        self._llm = inside_vllm.start(str(folder), **(common | (cpu_options if on_cpu else gpu_options) | options))
        self._engine = self._llm.llm_engine
        self.caches_prefixes = bool(self._engine.vllm_config.cache_config.enable_prefix_caching)
        self.dtype: torch.dtype = self._engine.vllm_config.model_config.dtype  # of its weights
        self._sampling, self._recompute_kv = sampling, recompute_kv
        self._label(0)
        self._ids = itertools.count()
        self._keys: dict[str, int] = {}

    @property
    def in_flight(self) -> int:
        return self._engine.get_num_unfinished_requests()

    def _label(self, version: int) -> None:
        self.version = version
        self._engine.set_weight_version(str(version))  # vLLM stores it with every token

    def add(self, key: int, prompt: np.ndarray, n: int, greedy: bool = False) -> None:
        name = str(next(self._ids))
        self._keys[name] = key
        self._engine.add_request(name, {"prompt_token_ids": prompt.tolist()}, self._params(n, greedy))

    def _params(self, n: int, greedy: bool):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            n=n,
            temperature=0.0 if greedy else self._sampling.temperature,
            max_tokens=self._sampling.max_new_tokens,
            stop_token_ids=list(self._sampling.stop_ids),  # without a tokenizer vLLM knows no end-of-sequence token
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def step(self) -> list[tuple[int, list[Answer]]]:
        """One decode step of all requests in flight."""
        finished = [request for request in self._engine.step() if request.finished]
        return [(self._keys.pop(request.request_id), [_answer(c) for c in request.outputs]) for request in finished]

    def load_weights(self, named_tensors: NamedTensors, version: int | None = None) -> None:
        """Replace the weights; running requests go on.

        Args:
            named_tensors: all parameters, under their (unfused) Hugging Face names.
            version: of these weights, by default the next one; answers name the versions that wrote them.

        Raises:
            RuntimeError: when a layer kept its old weights, or vLLM kept old keys and values. With prefix caching and
                without `recompute_kv`, let running requests end first: vLLM keeps its cache while they run.
        """
        rpc = self._engine.collective_rpc
        rpc("start_weight_update")
        rpc("update_weights", args=({"named_tensors": self._names.of_files(list(named_tensors))},))
        rpc("finish_weight_update")
        self._label(self.version + 1 if version is None else version)
        if self._recompute_kv:
            if not self._engine.reset_prefix_cache(reset_running_requests=True):
                raise RuntimeError("vLLM did not reset the keys and values of running requests")
        elif self.caches_prefixes and not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache: later answers would read keys of older weights")

    @contextmanager
    def short_answers(self, most: int) -> Iterator[None]:
        """In the body of a with statement, answers are asked for with at most that many tokens."""
        usual = self._sampling
        self._sampling = replace(usual, max_new_tokens=min(most, usual.max_new_tokens))
        try:
            yield
        finally:
            self._sampling = usual


def _answer(completion: CompletionOutput) -> Answer:
    tokens = np.array(completion.token_ids, np.int32)
    log_mu = np.array(completion.logprobs.logprobs, np.float32)  # one candidate per position: the sampled token
    if len(tokens) != len(log_mu):
        raise RuntimeError(f"vLLM gave {len(log_mu)} log-probabilities for {len(tokens)} tokens")
    spans = completion.weight_versions  # the tokens that each version wrote
    return Answer(tokens, log_mu, completion.finish_reason, int(spans[0].version), int(spans[-1].version))


# --- transformers ---------------------------------------------------------------------------------------------------


class HfEngine(Engine):
    """transformers' generate, in batches: a batch drains before the next one starts.

    Args:
        model: the model that generates. When it is the trainer's own, `load_weights` has nothing to copy.
    """

    def __init__(self, model: PreTrainedModel, sampling: Sampling, pad: int):
        self.model, self._sampling, self._pad, self.version = model, sampling, pad, 0
        self._waiting: list[tuple[int, np.ndarray, int, bool]] = []

    @property
    def in_flight(self) -> int:
        return sum(n for _, _, n, _ in self._waiting)

    def add(self, key: int, prompt: np.ndarray, n: int, greedy: bool = False) -> None:
        self._waiting.append((key, prompt, n, greedy))

    def load_weights(self, named_tensors: NamedTensors, version: int | None = None) -> None:
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in named_tensors:
                mine = own.pop(name)
                if mine.data_ptr() != tensor.data_ptr():
                    mine.copy_(tensor)
        if own:
            raise ValueError(f"no new weights came for {sorted(own)}")
        self.version = self.version + 1 if version is None else version

    def step(self) -> list[tuple[int, list[Answer]]]:
        """Write complete answers to as many waiting prompts as fit into a batch."""
        if not self._waiting:
            return []
        greedy, batch, size = self._waiting[0][3], [], 0
        while self._waiting and self._waiting[0][3] == greedy:
            if batch and size + self._waiting[0][2] > self._sampling.in_flight:
                break
            batch.append(self._waiting.pop(0))
            size += batch[-1][2]
        answers = iter(self._generate([p for _, p, _, _ in batch], [n for _, _, n, _ in batch], greedy))
        return [(key, list(itertools.islice(answers, n))) for key, _, n, _ in batch]

    @torch.no_grad()  # not inference_mode: the trainer evaluates with the model that it trains
    def _generate(self, prompts: list[np.ndarray], counts: list[int], greedy: bool) -> list[Answer]:
        """`counts[i]` answers to prompt i, in that order; each prompt's keys and values are computed once."""
        from transformers import GenerationConfig, LogitsProcessorList

        width = max(map(len, prompts))
        ids = np.full((len(prompts), width), self._pad, np.int64)
        mask = np.zeros_like(ids)
        for ids_row, mask_row, prompt in zip(ids, mask, prompts, strict=True):
            ids_row[width - len(prompt) :] = prompt
            mask_row[width - len(prompt) :] = 1
        row = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor(counts))  # answer -> prompt
        ids, mask = (torch.as_tensor(x, device=self.model.device) for x in (ids, mask))
        started = {}
        if width > 1 and max(counts) > 1 and not self.model._is_stateful:  # Mamba's state is no list of keys
            # all but the last token: generate() starts with that one
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, :-1]
            made = self.model(ids[:, :-1], attention_mask=mask[:, :-1], position_ids=positions, use_cache=True)
            made.past_key_values.batch_select_indices(row.to(ids.device))
            started = {"past_key_values": made.past_key_values}
        recorder = _Recorder(1.0 if greedy else self._sampling.temperature, width)
        usual, self.model.generation_config = self.model.generation_config, GenerationConfig()  # no penalties etc.
        written = self.model.generate(
            ids[row],
            attention_mask=mask[row],
            **started,
            generation_config=GenerationConfig(
                do_sample=not greedy,
                temperature=1.0,  # the recorder applies it
                top_k=0,  # off, so that log mu is the log-probability of sampling; None would mean 50
                top_p=1.0,
                max_new_tokens=self._sampling.max_new_tokens,
                eos_token_id=list(self._sampling.stop_ids),
                pad_token_id=self._pad,
            ),
            logits_processor=LogitsProcessorList([recorder]),
        )
        self.model.generation_config = usual
        tokens, log_mu = written[:, width:].cpu().numpy().astype(np.int32), recorder.finish(written)
        return [self._cut(t, m) for t, m in zip(tokens, log_mu, strict=True)]

    def _cut(self, tokens: np.ndarray, log_mu: np.ndarray) -> Answer:
        ends = np.flatnonzero(np.isin(tokens, self._sampling.stop_ids))
        length = ends[0] + 1 if len(ends) else len(tokens)
        reason = "stop" if len(ends) else "length"
        return Answer(tokens[:length].copy(), log_mu[:length].copy(), reason, self.version, self.version)


class _Recorder:
    """A logits processor that applies the temperature and notes each sampled token's log-probability.

    transformers can return all scores, but those are [T, N, V]; this keeps only one step's scores.
    """

    def __init__(self, temperature: float, start: int):
        self._temperature, self._start = temperature, start
        self._last: torch.Tensor | None = None
        self._log_mu: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._note(input_ids)
        self._last = (scores.float() / self._temperature).log_softmax(-1)
        return self._last

    def _note(self, ids: torch.Tensor) -> None:
        if self._last is not None:
            column = self._start + len(self._log_mu)
            self._log_mu.append(self._last.gather(1, ids[:, column : column + 1]))

    def finish(self, ids: torch.Tensor) -> np.ndarray:
        """[N, T] nats."""
        self._note(ids)
        return torch.cat(self._log_mu, 1).float().cpu().numpy()
