"""Storage and values of a policy's tensors: from files or random, on one rank or sharded over many.

Random values are drawn for whole tensors on the CPU, from the seed of the run and the module's name, and then sharded,
so they do not depend on the world size (I9). At most one module's parameters are whole at a time.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import xxhash
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import ConfigError
from prime_rl.trainer.parallel.dtensor_slices import fill_tensor
from prime_rl.trainer.weights.hf_weights import HFWeights
from prime_rl.trainer.weights.model_download import model_directory

_INITIALIZED = "_is_hf_initialized"  # transformers does not initialise tensors with this attribute


class InitialWeights:
    """The initial values of one model's tensors.

    Use: create it, change the model (adapters, wrapped blocks), `update_names`, shard, `fill`.
    """

    def __init__(self, causal_lm: PreTrainedModel, config: TrainerModelConfig, seed: int) -> None:
        """Find the files and check that they match the model; all ranks get the same result.

        `causal_lm` is on the meta device, before adapters and sharding. Raises ConfigError if the files do not match.
        """
        self._seed, self._pretrained = seed, None
        if not config.debug.random_init:
            self._pretrained = HFWeights(
                model_directory(config.name, config.download_timeout_seconds), causal_lm, config.debug.num_layers
            )
        self._built = _tensors(causal_lm)
        self._names = {name: name for name in self._built}

    def update_names(self, causal_lm: PreTrainedModel) -> None:
        """Record the names after adapters were added; call it before sharding replaces the tensors."""
        now = {id(tensor): name for name, tensor in reversed(_tensors(causal_lm).items())}
        self._names = {name: now[id(tensor)] for name, tensor in self._built.items() if id(tensor) in now}

    def fill(self, model: nn.Module, causal_lm: PreTrainedModel, device: torch.device, home: torch.device) -> None:
        """Allocate every tensor and set its values; each rank has its part.

        Args:
            model: the sharded module: `causal_lm` or a module around it.
            causal_lm: its tensors are filled.
            device: the device of the forward pass.
            home: the device of the parameters: `device`, or the CPU if they are offloaded.
        """
        self._built = {}
        materialize(model, home)
        tensors = _tensors(causal_lm)
        loaded = set[str]()
        if self._pretrained is None:
            init_parameters(causal_lm, set(self._names.values()), self._seed)
        else:
            self._pretrained.load(causal_lm, {name: tensors[now] for name, now in self._names.items()})
            init_parameters(causal_lm, {self._names[name] for name in self._pretrained.missing}, self._seed)
            loaded = {self._names[name] for name in self._pretrained.names}
        self._init_adapters(causal_lm, {id(tensors[now]) for now in self._names.values()})
        init_buffers(causal_lm, loaded, device)

    def _init_adapters(self, causal_lm: PreTrainedModel, known: set[int]) -> None:
        # Modules that were added to the model initialise themselves.
        for name, module in causal_lm.named_modules():
            added = {key: value for key, value in module.named_parameters(recurse=False) if id(value) not in known}
            if added:
                init_full_parameters(module, added, f"{self._seed}/{name}", module.reset_parameters)


def _tensors(causal_lm: PreTrainedModel) -> dict[str, Tensor]:
    """Return parameters and buffers by all their names."""
    parameters = causal_lm.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(causal_lm.named_buffers(remove_duplicate=False))}


def materialize(model: nn.Module, device: torch.device) -> None:
    """Replace meta tensors by uninitialised ones on `device`; tied parameters stay tied."""
    first: dict[int, str] = {}
    originals = {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    model.to_empty(device=device)
    for name, original in originals.items():
        if name != original:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(original))


def init_parameters(causal_lm: PreTrainedModel, names: set[str], seed: int) -> None:
    """Initialise the parameters `names` as transformers does; a tied one is drawn once."""
    done = set[int]()
    for name, module, owner in _modules(causal_lm):
        parameters = dict(module.named_parameters(recurse=False))
        fresh = {key: value for key, value in parameters.items() if _join(name, key) in names and id(value) not in done}
        if fresh:
            done.update(map(id, fresh.values()))
            _mark_initialized(value for key, value in parameters.items() if key not in fresh)
            with guard_torch_init_functions():
                init_full_parameters(module, fresh, f"{seed}/{name}", partial(owner._init_weights, module))


def init_full_parameters(
    module: nn.Module, parameters: Mapping[str, Tensor], seed: str, init: Callable[[], object]
) -> None:
    """Initialise the allocated `parameters` of a module, by attribute name: this rank's part of whole CPU tensors.

    The whole tensors replace the module's parameters while `init` runs.
    """
    whole = {key: nn.Parameter(torch.empty(value.shape, dtype=value.dtype)) for key, value in parameters.items()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(xxhash.xxh3_64_intdigest(seed.encode()) >> 1)
        for value in whole.values():  # the defaults for parameters that `init` ignores
            nn.init.normal_(value, std=0.02) if value.ndim > 1 else nn.init.ones_(value)
        kept = dict(module._parameters)
        module._parameters.update(whole)
        try:
            init()
        finally:
            module._parameters.update(kept)
    for key, value in parameters.items():
        fill_tensor(value, whole[key].detach())


@torch.no_grad()
def init_buffers(causal_lm: PreTrainedModel, loaded: set[str], device: torch.device) -> None:
    """Compute the buffers that are not in `loaded`, such as rotary frequencies, and move all buffers to `device`.

    Raises ConfigError if the model's code does not initialise one of its buffers.
    """
    _mark_initialized(causal_lm.parameters())
    for name, module, owner in _modules(causal_lm):
        buffers = dict(module.named_buffers(recurse=False))
        unset = {key: value for key, value in buffers.items() if _join(name, key) not in loaded}
        _mark_initialized(value for key, value in buffers.items() if key not in unset)
        for value in unset.values():
            value.fill_(_undefined(value.dtype))
        if unset:
            with guard_torch_init_functions():
                owner._init_weights(module)
        for key in buffers:
            value = module.get_buffer(key)
            if key in unset and value.numel() and bool(_is_undefined(value).any()):
                raise ConfigError(
                    f"model.name: {causal_lm.config.name_or_path}: the model computes its buffer {_join(name, key)} "
                    "only in its constructor; transformers 5 requires that _init_weights does it too"
                )
            module._buffers[key] = value.to(device)


def _modules(causal_lm: PreTrainedModel) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Yield each module with its name and the transformers model whose `_init_weights` initialises it."""
    owners = {"": causal_lm}
    for name, module in causal_lm.named_modules():
        parent = name.rpartition(".")[0]
        owners[name] = module if isinstance(module, PreTrainedModel) else owners[parent if name else ""]
        yield name, module, owners[name]


def _mark_initialized(tensors: Iterator[Tensor]) -> None:
    for tensor in tensors:
        setattr(tensor, _INITIALIZED, True)


def _undefined(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return False
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def _is_undefined(value: Tensor) -> Tensor:
    if value.dtype == torch.bool:
        return torch.zeros_like(value)
    undefined = _undefined(value.dtype)
    return value.isnan() if value.is_floating_point() or value.is_complex() else value == undefined


def _join(module: str, attribute: str) -> str:
    return f"{module}.{attribute}" if module else attribute
