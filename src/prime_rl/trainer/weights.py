"""The values of a policy's tensors: from files or drawn at random, on one rank or sharded over many.

Made of the model as it was built, before adapters and sharding change names and shapes; used when both are done.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prime_rl.configs.trainer import TrainerModelConfig
from prime_rl.trainer.hub import local_directory
from prime_rl.trainer.materialise import compute_buffers, draw_weights, draw_whole, give_storage
from prime_rl.trainer.pretrained import Pretrained


class Weights:
    """What is to be loaded into one model.

    Use: make it, change the model (adapters, wrapped blocks), `follow`, shard, `fill`.
    """

    def __init__(self, causal_lm: PreTrainedModel, config: TrainerModelConfig, seed: int) -> None:
        """Find the files and check that they hold the model; all ranks come to the same answer.

        Args:
            causal_lm: as built, on the meta device.
            config: the name of the model, or that its weights are random.
            seed: of whatever is drawn at random; the same on every rank.

        Raises:
            ConfigError: there are no files, or they hold something else than the model.
        """
        self._seed, self._pretrained = seed, None
        if not config.debug.random_init:
            self._pretrained = Pretrained(
                local_directory(config.name, config.download_timeout), causal_lm, config.debug.num_layers
            )
        self._built = _tensors(causal_lm)
        self._names = {name: name for name in self._built}

    def follow(self, causal_lm: PreTrainedModel) -> None:
        """Look how the tensors are called now that adapters are there; call it before sharding replaces them."""
        now = {id(tensor): name for name, tensor in reversed(_tensors(causal_lm).items())}
        self._names = {name: now[id(tensor)] for name, tensor in self._built.items() if id(tensor) in now}

    def fill(self, model: nn.Module, causal_lm: PreTrainedModel, device: torch.device, home: torch.device) -> None:
        """Give every tensor storage and its value, each rank its part.

        Args:
            model: what was sharded: `causal_lm` or a module around it.
            causal_lm: whose tensors are filled.
            device: where forward runs.
            home: where parameters stay between uses: `device`, or the CPU if they are offloaded.

        Raises:
            ConfigError: a file cannot be read, or a tensor has another shape than the model's.
        """
        self._built = {}
        give_storage(model, home)
        tensors = _tensors(causal_lm)
        loaded = set[str]()
        if self._pretrained is None:
            draw_weights(causal_lm, set(self._names.values()), self._seed)
        else:
            self._pretrained.load(causal_lm, {name: tensors[now] for name, now in self._names.items()})
            draw_weights(causal_lm, {self._names[name] for name in self._pretrained.missing}, self._seed)
            loaded = {self._names[name] for name in self._pretrained.names}
        self._draw_adapters(causal_lm, {id(tensors[now]) for now in self._names.values()})
        compute_buffers(causal_lm, loaded, device)

    def _draw_adapters(self, causal_lm: PreTrainedModel, known: set[int]) -> None:
        """Whatever the model was not built with draws itself."""
        for name, module in causal_lm.named_modules():
            added = {key: value for key, value in module.named_parameters(recurse=False) if id(value) not in known}
            if added:
                draw_whole(module, added, f"{self._seed}/{name}", module.reset_parameters)


def _tensors(causal_lm: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and buffers by all their names."""
    parameters = causal_lm.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(causal_lm.named_buffers(remove_duplicate=False))}
