"""Versions in the memory of rank 0, sent to inference with NCCL or IPC. The manifest says where to fetch a version."""

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from prime_rl.configs.training.broadcast import BroadcastConfig, FileBroadcastConfig, TransferConfig
from prime_rl.core.errors import ConfigError
from prime_rl.storage.tensor_hashes import content_hash
from prime_rl.storage.weights.transfer_descriptor import TransferDescriptor
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.weight_sync.memory_sender import WeightSender
from prime_rl.trainer.weight_sync.transport import Hashes, PieceExchange, WeightTransport, raw_tensors


def check_transport(options: BroadcastConfig, world: World) -> None:
    """Raise ConfigError if the transport does not work on this device."""
    if isinstance(options, FileBroadcastConfig):
        return
    if world.device.type != "cuda":
        raise ConfigError(f"weight_broadcast.type = {options.type!r} needs a GPU, but there is none; use 'filesystem'")
    if world.is_main:  # before training, because the import changes settings of torch's compiler
        try:
            import_module("vllm.distributed.weight_transfer")
        except ImportError as error:
            raise ConfigError(
                f"weight_broadcast.type = {options.type!r} sends through vLLM, which cannot be imported ({error}); run "
                "`uv sync --extra gpu`, or use 'filesystem'"
            ) from error


class MemoryTransport(WeightTransport):
    """Gathers each version on rank 0 and serves it from there until two newer versions exist."""

    def __init__(self, options: TransferConfig, exchange: PieceExchange) -> None:
        """Listen on rank 0. All ranks call it together.

        Raises:
            ConfigError: cannot listen, or the transport does not support several ranks.
        """
        super().__init__(exchange)
        world = exchange.world
        if options.type == "ipc" and world.size > 1:
            raise ConfigError(
                f"weight_broadcast.type = 'ipc' is for one trainer rank that shares its GPU with inference, and there "
                f"are {world.size}; use 'nccl' or 'filesystem'"
            )
        self._options = options
        self._sender: WeightSender | None = None
        self._descriptor: TransferDescriptor | None = None
        self._ranks.on_main(self._open)

    def deliver(self, directory: Path, buffer: Tensor, name: str) -> list[Hashes]:
        """Gather the version in the memory of rank 0; the hashes are those of a single file."""
        self._ranks.on_main(lambda: None if self._sender is None else self._sender.evict_old_versions())
        tensors: dict[str, Tensor] = {}
        in_buffer = buffer.untyped_storage().data_ptr()
        for file in self._exchange.plan.files:
            for tensor_name, tensor in self._exchange.collect([replace(file, owner=0)], buffer) or ():
                # The next version overwrites the buffer.
                is_view = tensor.untyped_storage().data_ptr() == in_buffer
                tensors[tensor_name] = tensor.clone() if is_view else tensor
        return self._ranks.gather(lambda: self._add_version(tensors, name))

    def manifest_fields(self) -> dict[str, Any]:
        """Describe where the latest version is served."""
        return {} if self._descriptor is None else {"transfer": self._descriptor.fields()}

    def check(self) -> None:
        """Raise RunError if a transfer failed and could not be aborted; the error names the receiver."""
        if self._sender is not None:
            self._sender.check()

    def close(self) -> None:
        """Finish the current transfers and stop serving."""
        if self._sender is not None:
            self._sender.close()

    def _open(self) -> None:
        self._sender = WeightSender(self._options, self._exchange.world.device)

    def _add_version(self, tensors: Mapping[str, Tensor], name: str) -> Hashes:
        if self._sender is None:
            return {}
        raw = raw_tensors(tensors)
        hashes = {tensor_name: tensor.digest(tensor_name) for tensor_name, tensor in raw.items()}
        options, sender = self._options, self._sender
        shapes = {tensor_name: (tensor.dtype, tensor.shape) for tensor_name, tensor in raw.items()}
        self._descriptor = TransferDescriptor(
            options.type, options.host, sender.port, sender.session, options.timeout_seconds, shapes
        )
        self.bytes_in_memory = sum(tensor.data.size for tensor in raw.values())
        self._sender.add_version(content_hash(hashes), name, tensors)
        return {"": hashes}
