"""Loads a model by name as a sharded policy that is ready to train.

The model is built on the meta device, changed and sharded before it gets storage and values. No rank ever holds more
than its shards and one whole tensor. `InitialWeights` reads the values from files or draws them. Random values are
drawn for whole tensors on the CPU, from the seed of the run and the module's name, and then sharded, so they do not
depend on the world size (I9).

On CUDA, fused kernels of liger-kernel for norms and gated MLPs save memory traffic. They are checked against
liger-kernel 0.8.5 by tests/unit/trainer/test_compiled_blocks.py. Its rotary embedding can only be replaced for all
models of the process, and the output head is our own, so neither is used.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import xxhash
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import ConfigError, translate_error
from prime_rl.storage.model_files import find_model
from prime_rl.trainer.fsdp import compute_dtype, shard_policy
from prime_rl.trainer.memory_savings import prepare_blocks
from prime_rl.trainer.model.lora import add_adapters, freeze
from prime_rl.trainer.model.policy_model import PolicyModel, build_policy
from prime_rl.trainer.parallel.device_mesh import fill_tensor
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.weights.hf_weights import HFWeights


def make_policy(
    config: TrainerModelConfig, seed: int, world: World, frozen: bool = False, shared: bool = False
) -> PolicyModel:
    """Build the model, prepare its blocks, shard it over the ranks and load it; a collective call.

    The `seed` is that of random weights (`config.debug.random_init`). A `frozen` policy is not trained, so its weights
    may have the precision of the forward pass. A `shared` one is frozen too, with room
    for an `Adapter` of the largest rank `config.lora.rank`.

    Raises:
        ConfigError: the model is missing, or cannot be trained as configured.
        RunError: loading failed on another rank.
    """
    policy, weights = world.run_on_all(lambda: _build_policy(config, seed, world.device), "loading the model")
    if frozen:
        freeze(policy, compute_dtype(config.dtype, world.device))
    if config.lora is not None:
        add_adapters(policy, config.lora, compute_dtype(config.dtype, world.device), shared)
    prepare_blocks(policy, config)
    weights.update_names(policy.causal_lm)
    shard_policy(policy, config, world)
    home = torch.device("cpu") if config.fsdp_cpu_offload else world.device
    world.run_on_all(lambda: weights.fill(policy, policy.causal_lm, world.device, home), "loading the model")
    return policy


def load_policy(config: TrainerModelConfig, seed: int) -> PolicyModel:
    """Load the whole model on the CPU, not sharded. Raises ConfigError as `make_policy`."""
    cpu = torch.device("cpu")
    policy, weights = _build_policy(config, seed, cpu)
    weights.fill(policy, policy.causal_lm, cpu, cpu)
    return policy


def _build_policy(config: TrainerModelConfig, seed: int, device: torch.device) -> tuple[PolicyModel, "InitialWeights"]:
    policy = build_policy(config)
    fuse_kernels(policy.causal_lm, config, device)
    return policy, InitialWeights(policy.causal_lm, config, seed)


def fuse_kernels(causal_lm: PreTrainedModel, config: TrainerModelConfig, device: torch.device) -> None:
    """Replace the forward of norms and dense MLPs by fused kernels if `config.impl` is "liger_kernel".

    The model has no adapters yet; it may be on the meta device. `device` is that of the forward pass. Raises
    ConfigError if there are no kernels for this device or this kind of model.
    """
    if config.impl != "liger_kernel":
        return
    fix = "set model.impl to 'auto'"
    if device.type != "cuda":
        raise ConfigError(f"model.impl 'liger_kernel' runs on CUDA, not on {device.type}; {fix}")
    missing = "model.impl 'liger_kernel': {}; install with --extra liger, or " + fix
    with translate_error(ImportError, lambda error: ConfigError(missing.format(error))):
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as APPLY
    kind = causal_lm.config.model_type
    if kind not in APPLY:
        raise ConfigError(f"model.impl 'liger_kernel' has no kernels for {kind} models; {fix}")
    # Experts keep the forward of transformers: it is fast and is monitored.
    is_dense = all(parameter.ndim < 3 for parameter in causal_lm.parameters())
    wanted = {"rms_norm": True, "layer_norm": True, "swiglu": is_dense, "geglu": is_dense}
    switches = inspect.signature(APPLY[kind]).parameters.keys() - {"model"}
    # liger replaces names in transformers' module as well, for every model of the process; restore them.
    library = sys.modules[type(causal_lm).__module__]
    before = dict(vars(library))
    try:
        APPLY[kind](model=causal_lm, **{switch: wanted.get(switch, False) for switch in switches})
    finally:
        vars(library).update(before)


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
            directory = find_model(config.name, config.revision, config.download_timeout_seconds)
            self._pretrained = HFWeights(directory, causal_lm, config.debug.num_layers)
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

    The whole tensors, float32, replace the module's parameters while `init` runs.
    """
    whole = {key: nn.Parameter(torch.empty(value.shape, dtype=torch.float32)) for key, value in parameters.items()}
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
        fill_tensor(value, whole[key].detach().to(value.dtype))


@torch.no_grad()
def init_buffers(causal_lm: PreTrainedModel, loaded: set[str], device: torch.device) -> None:
    """Compute the buffers that are not in `loaded`, such as rotary frequencies, and move all buffers to `device`.

    Raises ConfigError if the model's code does not initialise one of its buffers.
    """
    _mark_initialized(causal_lm.parameters())
    unset: dict[str, tuple[nn.Module, str]] = {}
    for name, module, owner in reversed([*_modules(causal_lm)]):  # some models compute buffers of their layers
        buffers = {_join(name, key): (module, key) for key, _ in module.named_buffers(recurse=False)}
        _mark_initialized(module.get_buffer(key) for full, (_, key) in buffers.items() if full in loaded)
        computed = {full: place for full, place in buffers.items() if full not in loaded}
        for _, key in computed.values():
            module.get_buffer(key).fill_(_undefined(module.get_buffer(key).dtype))
        if computed or isinstance(module, PreTrainedModel):
            with guard_torch_init_functions():
                owner._init_weights(module)
        unset |= computed
    for full, (module, key) in unset.items():
        if bool(_is_undefined(module.get_buffer(key)).any()):
            raise ConfigError(
                f"model.name: {causal_lm.config.name_or_path}: the model computes its buffer {full} "
                "only in its constructor; transformers 5 requires that _init_weights does it too"
            )
    for module in causal_lm.modules():
        module._buffers.update({key: value.to(device) for key, value in module.named_buffers(recurse=False)})


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
