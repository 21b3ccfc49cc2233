"""Our part inside vLLM: the settings of its process, new weights for its model, Hugging Face's classes as they were.

vLLM counts how much of each layer a weight update loads. But it only warns of a layer that got nothing, and is silent
about a layer that got a part. So the counts are checked here, layer by layer, before vLLM ends the update.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from runtime.files import ConfigError, weight_files, why

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from vllm import LLM

NamedTensors = list[tuple[str, torch.Tensor]]

# --- settings -------------------------------------------------------------------------------------------------------

MUST: dict[str, str | None] = {  # what must hold, whatever the shell says; None: not set
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the searcher's process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CONFIGURE_LOGGING": "0",  # its records go where ours go
    "VLLM_LOGGING_CONFIG_PATH": None,
    "VLLM_USE_MODELSCOPE": None,  # models are folders
    "VLLM_PP_LAYER_PARTITION": None,  # one process holds the whole model, and speaks to nobody
    "VLLM_PORT": None,  # Kubernetes sets it for a service named vllm
    "VLLM_HOST_IP": None,
    "VLLM_WORKER_MULTIPROC_METHOD": None,
    "VLLM_MAX_N_SEQUENCES": None,  # --generate-per-prompt decides
    "VLLM_USE_V2_MODEL_RUNNER": None,  # updates were tried with the usual one
    "VLLM_USE_FASTOKENS": None,  # token ids in, token ids out
    "LOCAL_RANK": None,  # of a torchrun around us
}
MUST_ON_CPU: dict[str, str | None] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB that must be free; what is reserved follows from --in-flight
    "VLLM_CPU_CI_ENV": None,
    "VLLM_CPU_SIM_MULTI_NUMA": None,
    "VLLM_BATCH_INVARIANT": None,  # of GPUs
    "TORCHDYNAMO_DISABLE": "1",  # compiling costs more than it gains
}


def _must(device: str) -> dict[str, str | None]:
    return MUST | (MUST_ON_CPU if torch.device(device).type == "cpu" else {})


def of_the_shell(device: str) -> list[str]:
    """vLLM's variables that are the user's own: vLLM reads them, and nothing here needs a value of its own."""
    return [name for name in os.environ if name.startswith("VLLM_") and name not in (*_must(device), "VLLM_DIST_IDENT")]


def import_vllm(device: str) -> list[str]:
    """Set the variables that vLLM reads, then import it (seconds). Returns what to tell about those of the shell.

    Raises:
        ConfigError: when vLLM can't read a variable.
    """
    unused = []
    for name, value in _must(device).items():
        was = os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
        if was not in (None, value):
            unused.append(f"{name}={was} ({value or 'unset'} here)")
    try:
        from vllm import envs
    except (ValueError, RuntimeError) as error:  # vLLM reads some variables when it is imported
        raise ConfigError(f"vLLM can't be imported: {why(error)}; look at the VLLM_ variables") from error
    given = [name for name in of_the_shell(device) if name in envs.environment_variables]
    for name in given:
        try:
            envs.environment_variables[name]()
        except Exception as error:  # each variable is parsed by a function of its own
            shown = f"{name}={os.environ[name]}"
            raise ConfigError(f"{shown} in your shell: vLLM can't read it ({why(error)}); unset it") from None
    from vllm import LLM  # noqa: F401 - vLLM's top level is lazy

    used = [f"{name}={os.environ[name]}" for name in given]
    told = {
        "vLLM does not use these variables of your shell:": unused,
        "vLLM uses these variables of your shell:": used,
    }
    return [f"{text} {', '.join(names)}" for text, names in told.items() if names]


# --- starting -------------------------------------------------------------------------------------------------------


@contextmanager
def only_its_weights(folder: str) -> Iterator[str]:
    """The folder, or one of links that leaves out weight files which transformers does not load; vLLM loads all."""
    used, there = set(weight_files(Path(folder))), set(Path(folder).glob("*.safetensors"))
    if used == there:
        yield folder
        return
    left_out = {p.name for p in there - used}
    if len(used) == 1:
        left_out.add("model.safetensors.index.json")
    with tempfile.TemporaryDirectory() as links:
        for path in Path(folder).iterdir():
            if path.name not in left_out:
                (Path(links) / path.name).symlink_to(path.resolve())
        yield links


def start(folder: str, **options: object) -> LLM:
    """vllm.LLM, which leaves Hugging Face's classes as they were.

    vLLM runs some architectures (GPT-NeoX, OLMo 2, Phi ...) by Hugging Face's code, and patches their class. A
    reference of the same class in this process could then no longer be called. So vLLM's model gets a class of its own.
    """
    from vllm import LLM
    from vllm.model_executor.models.transformers.base import Base

    before: dict[type, tuple[dict, tuple]] = {}
    decorate = Base._decorate_cls_for_torch_compile

    def noted(self: Base, cls: type, *args: object, **kwargs: object) -> None:
        before.setdefault(cls, (dict(vars(cls)), cls.__bases__))
        decorate(self, cls, *args, **kwargs)

    Base._decorate_cls_for_torch_compile = noted
    try:
        with only_its_weights(folder) as clean:
            llm = LLM(model=clean, config_format="hf", load_format="safetensors", **options)
    finally:
        Base._decorate_cls_for_torch_compile = decorate
        own = {cls: _give_back(cls, *state) for cls, state in before.items()}
    llm.apply_model(lambda model: _use(model, own))
    return llm


def _give_back(cls: type, before: dict, bases: tuple) -> type:
    """Undo the patches of a class, and return a subclass that has them."""
    patched = {k: v for k, v in vars(cls).items() if before.get(k) is not v and k != "__dict__"}
    more = tuple(b for b in cls.__bases__ if b not in bases)
    for name in patched:
        if name in before:
            setattr(cls, name, before[name])
        else:
            delattr(cls, name)
    cls.__bases__ = bases
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls, *more), patched | names)


def _use(model: torch.nn.Module, own: dict[type, type]) -> None:
    for module in model.modules():
        if type(module) in own:
            module.__class__ = own[type(module)]


# --- new weights ----------------------------------------------------------------------------------------------------

TRANSFER = "tba_min"


def register_transfer() -> None:
    """Register a weight-transfer engine with vLLM that takes tensors from its own process."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    if TRANSFER in WeightTransferEngineFactory._registry:
        return
    # its warnings name layers that hold tables alone; `_stale` names the others
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):
        named_tensors: list

    class InProcessTransfer(WeightTransferEngine):
        init_info_cls, update_info_cls = WeightTransferInitInfo, UpdateInfo

        def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
            pass

        def start_weight_update(self) -> None:
            self.tied = _tied_heads(self.model)
            _pack_experts_again(self.model)
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: UpdateInfo) -> None:
            self.model.load_weights(update_info.named_tensors)

        def finish_weight_update(self) -> None:
            stale = _stale(self.model, self.tied)
            finalize_layerwise_reload(self.model, self.model_config)
            if stale:
                raise RuntimeError(f"after a weight update these layers still have old weights: {stale}")
            for head, embedding in self.tied:
                _tie_again(head, embedding)

        def shutdown(self) -> None:
            pass

    WeightTransferEngineFactory.register_engine(TRANSFER, InProcessTransfer)


def _stale(model: torch.nn.Module, tied: list[tuple[torch.nn.Module, torch.nn.Module]]) -> list[str]:
    """Names of the layers of which new weights did not fill all parameters. To be called before vLLM ends an update.

    Buffers (tables of rotary embeddings, Gemma's normalizer) are computed, not loaded. A parameter without the loader
    that counts is new: the model itself registered and filled it in this update (Phi's output bias).
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload.layerwise import _get_weight_loader, get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
    from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

    heads, stale = {id(head) for head, _ in tied}, []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or id(layer) in heads or is_deferred_attention_layer(layer):
            continue  # it is complete; or it has no weights of its own
        own = [p for k, p in layer._parameters.items() if p is not None and k not in SKIP_LOAD_TENSORS]
        counted = [p for p in own if _get_weight_loader(p).__name__ == "online_process_loader"]
        needed = sum(get_tensor_load_numel(p) - _padding(layer, p) for p in counted)
        if info.load_numel < needed:
            stale.append(f"{name} ({type(layer).__name__}: {info.load_numel:,} of {needed:,} numbers came)")
    return stale


def _padding(layer: torch.nn.Module, parameter: torch.Tensor) -> int:
    """Numbers of a parameter that no file has: vLLM rounds the rows of an embedding up."""
    rows = getattr(layer, "num_embeddings_padded", None)
    return (rows - layer.org_vocab_size) * (parameter.numel() // rows) if rows else 0


def _tied_heads(model: torch.nn.Module) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """Output layers that share the weight of an input embedding, each with the embedding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    layers = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding)]
    embeddings = {m.weight.data_ptr(): m for m in layers if not isinstance(m, ParallelLMHead)}
    heads = [m for m in layers if isinstance(m, ParallelLMHead)]
    return [(m, embeddings[m.weight.data_ptr()]) for m in heads if m.weight.data_ptr() in embeddings]


def _tie_again(head: torch.nn.Module, embedding: torch.nn.Module) -> None:
    """After an update, give an output layer the input embedding's new weights.

    An update loads a shared tensor once, under the embedding's name. The output layer (and on a CPU its repacked copy)
    then keeps the old weights, and vLLM only warns.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    head.weight = embedding.weight
    if head.weight.device.type == "cpu":
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def _pack_experts_again(model: torch.nn.Module) -> None:
    """Let an update repack experts. On a CPU vLLM does that with its first weights only, and misreads later ones."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and next(layer.parameters()).device.type == "cpu":
            method.moe_kernel = None


class Names:
    """Weights under the names, and in the pieces, of a model's files: those that vLLM's loaders know.

    transformers keeps some weights in another form than the files have, for example all experts of a layer in one
    tensor. vLLM's loaders drop a name that they do not know, some of them without a word.
    """

    def __init__(self, folder: str, trust_remote_code: bool = False) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.conversion_mapping import get_model_conversion_mapping

        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        with torch.device("meta"):  # its structure alone
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        self._model: PreTrainedModel | None = model if get_model_conversion_mapping(model, add_legacy=False) else None

    def of_files(self, named_tensors: NamedTensors) -> NamedTensors:
        if self._model is None:
            return named_tensors
        from transformers.core_model_loading import revert_weight_conversion

        return list(revert_weight_conversion(self._model, dict(named_tensors)).items())
