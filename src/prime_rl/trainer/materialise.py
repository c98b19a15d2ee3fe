"""From the meta device to real shards: storage, random values, buffers.

I9 world size is invisible: whatever is drawn is drawn whole, on the CPU, from a seed of the run and of the module's
name, and then cut; at most one module's own parameters are whole at a time.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import xxhash
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from prime_rl.errors import ConfigError
from prime_rl.trainer.placement import fill

_MARK = "_is_hf_initialized"  # transformers' initialisation leaves tensors with this mark alone


def give_storage(model: nn.Module, device: torch.device) -> None:
    """Replace tensors on the meta device by uninitialised ones on `device`; what was shared stays shared."""
    first: dict[int, str] = {}
    shared: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        original = first.setdefault(id(parameter), name)
        if original != name:
            shared[name] = original
    model.to_empty(device=device)
    for name, original in shared.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, model.get_parameter(original))


def draw_weights(causal_lm: PreTrainedModel, names: set[str], seed: int) -> None:
    """Draw parameters as transformers does when it makes a model from its configuration.

    Args:
        causal_lm: with storage.
        names: of the parameters as they are called now; a shared one is drawn once.
        seed: the same on every rank.
    """
    drawn = set[int]()
    for name, module, owner in _modules(causal_lm):
        parameters = dict(module.named_parameters(recurse=False))
        fresh = {
            key: value for key, value in parameters.items() if _joined(name, key) in names and id(value) not in drawn
        }
        if fresh:
            drawn.update(map(id, fresh.values()))
            _mark(value for key, value in parameters.items() if key not in fresh)
            with guard_torch_init_functions():
                draw_whole(module, fresh, f"{seed}/{name}", partial(owner._init_weights, module))


def draw_whole(module: nn.Module, parameters: Mapping[str, Tensor], stream: str, draw: Callable[[], object]) -> None:
    """Run `draw` while `module` holds whole CPU tensors in place of its own `parameters`; then fill these from them.

    Args:
        module: the holder.
        parameters: by attribute name, with storage.
        stream: names the stream of random numbers.
        draw: initialises the module's parameters in place.
    """
    whole = {key: nn.Parameter(torch.empty(value.shape, dtype=value.dtype)) for key, value in parameters.items()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(xxhash.xxh3_64_intdigest(stream.encode()) >> 1)
        for value in whole.values():  # for the few that `draw` knows nothing of
            nn.init.normal_(value, std=0.02) if value.ndim > 1 else nn.init.ones_(value)
        kept = dict(module._parameters)
        module._parameters.update(whole)
        try:
            draw()
        finally:
            module._parameters.update(kept)
    for key, value in parameters.items():
        fill(value, whole[key].detach())


@torch.no_grad()
def compute_buffers(causal_lm: PreTrainedModel, loaded: set[str], device: torch.device) -> None:
    """Compute the buffers that no file holds, such as rotary frequencies, and put all buffers on `device`.

    Args:
        causal_lm: with parameters that have their values.
        loaded: names of the buffers that were read from files.
        device: where forward runs.

    Raises:
        ConfigError: code that comes with the model leaves one of its buffers undefined.
    """
    _mark(causal_lm.parameters())
    for name, module, owner in _modules(causal_lm):
        buffers = dict(module.named_buffers(recurse=False))
        unset = {key: value for key, value in buffers.items() if _joined(name, key) not in loaded}
        _mark(value for key, value in buffers.items() if key not in unset)
        for value in unset.values():
            value.fill_(_undefined(value.dtype))
        if unset:
            with guard_torch_init_functions():
                owner._init_weights(module)
        for key in buffers:
            value = module.get_buffer(key)
            if key in unset and value.numel() and bool(_is_undefined(value).any()):
                raise ConfigError(
                    f"model.name: {causal_lm.config.name_or_path}: the model computes its buffer {_joined(name, key)} "
                    "only in its constructor; _init_weights must do it too (transformers 5 asks for that)"
                )
            module._buffers[key] = value.to(device)


def _modules(causal_lm: PreTrainedModel) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Every module once, with its name and the transformers model that knows how to initialise it."""
    owners = {"": causal_lm}
    for name, module in causal_lm.named_modules():
        parent = name.rpartition(".")[0]
        owners[name] = module if isinstance(module, PreTrainedModel) else owners[parent if name else ""]
        yield name, module, owners[name]


def _mark(tensors: Iterator[Tensor]) -> None:
    for tensor in tensors:
        setattr(tensor, _MARK, True)


def _undefined(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return False
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def _is_undefined(value: Tensor) -> Tensor:
    if value.dtype == torch.bool:
        return torch.zeros_like(value)
    undefined = _undefined(value.dtype)
    return value.isnan() if value.is_floating_point() or value.is_complex() else value == undefined


def _joined(module: str, attribute: str) -> str:
    return f"{module}.{attribute}" if module else attribute
