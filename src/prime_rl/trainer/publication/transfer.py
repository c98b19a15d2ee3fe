"""I5: versions that stay in memory: `weights/step_n` says what they are and where to fetch them, and appears as ever.

Rank 0 gathers the whole tensors from the ranks' copies, as it would to write them, hashes them, and holds them until
two newer versions are there; whoever loads a version asks for it (`sending`). The last version of a run is written to
files.
"""

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prime_rl.configs.broadcast import TransferConfig
from prime_rl.configs.shared import BroadcastConfig, FileBroadcastConfig
from prime_rl.errors import ConfigError
from prime_rl.run.offer import Offer
from prime_rl.run.tensors import content_hash
from prime_rl.trainer.checkpoints.agreement import Agreement
from prime_rl.trainer.parallel import World
from prime_rl.trainer.publication.files import Hashes, exchange, finished, raw_tensors
from prime_rl.trainer.publication.plan import Plan
from prime_rl.trainer.publication.sending import Sender
from prime_rl.trainer.publication.sources import Sources


def choose_way(options: BroadcastConfig, world: World) -> tuple[FileBroadcastConfig, TransferConfig | None]:
    """Return how versions are written to files, and, if they are not, how they travel.

    Raises:
        ConfigError: they cannot travel so from this device.
    """
    if isinstance(options, FileBroadcastConfig):
        return options, None
    if world.device.type != "cuda":
        raise ConfigError(f"weight_broadcast.type = {options.type!r} needs a GPU, and there is none; use 'filesystem'")
    if world.leads:
        _import_vllm(options.type)
    return FileBroadcastConfig(), options


class Transfer:
    """What takes the place of writing files."""

    def __init__(self, options: TransferConfig, world: World, ranks: Agreement) -> None:
        """Begin to listen on rank 0. All ranks call it together.

        Raises:
            ConfigError: cannot listen, no vLLM, or a way that several ranks cannot take.
        """
        if options.type == "ipc" and world.size > 1:
            raise ConfigError(
                f"weight_broadcast.type = 'ipc' is for one trainer rank that shares its GPU with inference, and there "
                f"are {world.size}; use 'nccl' or 'filesystem'"
            )
        self._options, self._world, self._ranks = options, world, ranks
        self._sender: Sender | None = None
        self._offer: Offer | None = None
        self.bytes = 0
        ranks.on_lead(self._open)

    def take(
        self, plan: Plan, sources: Sources, buffer: Tensor, group: dist.ProcessGroup, version: str
    ) -> list[Hashes]:
        """Gather the version in the memory of rank 0 and hold it there. All ranks call it together.

        Args:
            plan: of the publication.
            sources: makes of whole tensors what is published.
            buffer: this rank's copies.
            group: of all ranks, which nothing else uses at the same time.
            version: for messages.

        Returns:
            Hashes, as if they were written to one file.

        Raises:
            RunError: an older version is still being sent, and there is no room for a third.
        """
        self._ranks.on_lead(lambda: None if self._sender is None else self._sender.make_room())
        tensors: dict[str, Tensor] = {}
        for file in plan.files:
            mine = exchange((replace(file, owner=0),), buffer, self._world.rank, group)
            if mine is not None:
                for name, tensor in finished(file, mine, sources):
                    tensors[name] = tensor.clone() if _is_inside(tensor, buffer) else tensor
        return self._ranks.gather(lambda: self._hold(tensors, version))

    def fields(self) -> dict[str, Any]:
        """Give the manifest's field, on rank 0, of what was taken last."""
        return {} if self._offer is None else {"transfer": self._offer.fields()}

    def check(self) -> None:
        """Raise what has gone wrong in sending.

        Raises:
            RunError: names who was waited for.
        """
        if self._sender is not None:
            self._sender.check()

    def close(self) -> None:
        """Finish what is being sent."""
        if self._sender is not None:
            self._sender.close()

    def _open(self) -> None:
        self._sender = Sender(self._options, self._world.device)

    def _hold(self, tensors: Mapping[str, Tensor], version: str) -> Hashes:
        if self._sender is None:
            return {}
        raw = raw_tensors(tensors)
        digests = {name: tensor.digest(name) for name, tensor in raw.items()}
        options = self._options
        self._offer = Offer(
            options.type,
            options.host,
            self._sender.port,
            self._sender.session,
            options.timeout,
            {name: (tensor.dtype, tensor.shape) for name, tensor in raw.items()},
        )
        self.bytes = sum(tensor.data.size for tensor in raw.values())
        self._sender.hold(content_hash(digests), version, tensors)
        return {"": digests}


def _import_vllm(kind: str) -> None:
    """Import what sends, before training: it changes settings of torch's compiler."""
    try:
        import_module("vllm.distributed.weight_transfer")
    except ImportError as error:
        raise ConfigError(
            f"weight_broadcast.type = {kind!r} sends by vLLM, which cannot be imported here ({error}); run `uv sync "
            "--extra gpu`, or use 'filesystem'"
        ) from error


def _is_inside(tensor: Tensor, buffer: Tensor) -> bool:
    """Whether the tensor is a view of the buffer, which the next version overwrites."""
    storages: list[torch.UntypedStorage] = [tensor.untyped_storage(), buffer.untyped_storage()]
    return storages[0].data_ptr() == storages[1].data_ptr()
