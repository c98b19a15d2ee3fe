"""`trainer.weight_broadcast`: how weights get from the trainer to inference (docs/design/weight_sync.md)."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from prime_rl.configs.loading.base_config import BaseConfig

DEFAULT_TRANSFER_PORT = 29501
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
Precision = Literal["auto", "bfloat16", "float16", "float32"]


class DeltaConfig(BaseConfig):
    """Publish versions as deltas against the previous version (docs/design/deltas.md)."""

    full_interval: int = Field(10, ge=1)
    """Publish every n-th version in full. A server that starts reads the last full version and the deltas after it."""


class _Broadcast(BaseConfig):
    deprecated: ClassVar[dict[str, str]] = {"timeout": "timeout_seconds"}

    type: str
    """Transport of the weights."""

    timeout_seconds: float = Field(1200, gt=0)
    """Timeout for writing one version, or of each side while it waits for the other."""

    dtype: Precision = "auto"
    """Precision of the published weights; auto is bfloat16 on CUDA and float32 on CPU."""

    canary: bool = True
    """Publish the trainer's log-probabilities of 64 fixed tokens with each version; inference compares its own."""


class FileBroadcastConfig(_Broadcast):
    """Write the weights to the run directory."""

    type: Literal["filesystem"] = "filesystem"

    directory: Path | None = None
    """Local directory for the versions, such as /dev/shm, linked from `weights/`. The last version is always written to
    the run directory."""

    delta: DeltaConfig | None = None
    """Publish only what changed since the previous version, for slow networks; None publishes full versions."""


class NCCLBroadcastConfig(_Broadcast):
    """Send the weights over NCCL from the GPU of trainer rank 0 to the GPUs of inference."""

    type: Literal["nccl"] = "nccl"

    host: str = "127.0.0.1"
    """Address of the machine of trainer rank 0, as the inference servers reach it."""

    port: int = Field(DEFAULT_TRANSFER_PORT, ge=0, le=65535)
    """Port on which trainer rank 0 listens; 0 takes a free one. NCCL opens further ports."""


class IPCBroadcastConfig(_Broadcast):
    """Share the GPU memory of the trainer's only rank with inference on the same GPU (CUDA IPC)."""

    type: Literal["ipc"] = "ipc"

    port: int = Field(DEFAULT_TRANSFER_PORT, ge=0, le=65535)
    """Port on which the trainer listens on this machine; 0 takes a free one."""

    @property
    def host(self) -> str:
        """This machine."""
        return "127.0.0.1"


TransferConfig = NCCLBroadcastConfig | IPCBroadcastConfig
BroadcastConfig = Annotated[FileBroadcastConfig | NCCLBroadcastConfig | IPCBroadcastConfig, Field(discriminator="type")]


def check_transfer(kind: str, device: str, adapters: bool) -> None:
    """Raise ValueError if the trainer cannot use the transport `kind`; `adapters`: it publishes only adapters."""
    if kind == "filesystem":
        return
    if kind == "ipc" and (setting := _expandable_segments()) is not None:
        raise ValueError(
            f"weight_broadcast.type = 'ipc' shares the trainer's GPU memory with inference, which the environment "
            f"variable {setting} prevents; remove expandable_segments from it, or use 'filesystem'"
        )
    if device == "cpu":
        raise ValueError(f"weight_broadcast.type = {kind!r} needs a GPU, and device = 'cpu'; use 'filesystem'")
    if adapters:
        raise ValueError(
            f"weight_broadcast.type = {kind!r} sends whole models, and model.lora.publish = 'adapter'; use "
            "'filesystem', or publish 'merged'"
        )


def _expandable_segments() -> str | None:
    """Return the environment variable that makes torch allocate expandable segments, with its value."""
    # Another process can only map such memory with a file descriptor of the trainer. The kernel denies access to it
    # where tracing is restricted, as in most containers.
    for name in ALLOCATOR_VARIABLES:
        value = os.environ.get(name, "")
        if any(re.fullmatch(r"\s*expandable_segments\s*:\s*True\s*", part) for part in value.split(",")):
            return f"{name}={value}"
    return None


def check_placement(
    kind: str, trainer: Sequence[int], inference: Sequence[int] | None, base_url: object, tensor_parallel: int = 1
) -> None:
    """Raise ValueError if the transport `kind` does not support the GPUs of trainer and inference.

    `inference` is None if `rl` starts no server, else the server has `tensor_parallel` GPUs for each copy of the model;
    `base_url` are servers for evaluation only.
    """
    if kind == "filesystem":
        return
    if base_url is not None:
        raise ValueError(
            f"orchestrator.eval.base_url: its servers load versions from files, and trainer.weight_broadcast.type = "
            f"{kind!r} writes none but the last; use 'filesystem', or leave base_url out"
        )
    shared = sorted(set(trainer) & set(inference)) if inference is not None else []
    if kind == "nccl" and shared:
        raise ValueError(
            f"trainer.weight_broadcast.type = 'nccl' cannot join two processes on one GPU, and trainer_gpu_ids and "
            f"inference_gpu_ids share {shared}; use 'ipc' (one GPU for both) or 'filesystem'"
        )
    if kind == "nccl" and tensor_parallel > 1:
        raise ValueError(
            f"trainer.weight_broadcast.type = 'nccl' is not supported with inference.parallel.tp = {tensor_parallel}: "
            "receiving a version beside the collectives of sampling may deadlock; use 'filesystem' with "
            "trainer.weight_broadcast.directory = /dev/shm/weights"
        )
    if kind == "ipc" and inference is not None and not (list(trainer) == list(inference) and len(trainer) == 1):
        raise ValueError(
            f"trainer.weight_broadcast.type = 'ipc' needs one GPU shared by both, and trainer_gpu_ids = "
            f"{list(trainer)}, inference_gpu_ids = {list(inference)}; use 'nccl' or 'filesystem'"
        )
