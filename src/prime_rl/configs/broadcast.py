"""`weight_broadcast.type` nccl and ipc: weights that go from GPU to GPU, through no file (docs/publication.md)."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from prime_rl.configs.base import BaseConfig

DEFAULT_TRANSFER_PORT = 29501
Precision = Literal["auto", "bfloat16", "float16", "float32"]


class NCCLBroadcastConfig(BaseConfig):
    """Weights travel over NCCL, from the GPU of the trainer's rank 0 to those of inference."""

    type: Literal["nccl"] = "nccl"
    """Way from trainer to inference."""

    dtype: Precision = "auto"
    """Precision of the published weights; auto is bfloat16."""

    host: str = "localhost"
    """Where the trainer's rank 0 listens for inference: an address of its machine that the servers can reach."""

    port: int = Field(DEFAULT_TRANSFER_PORT, ge=0, le=65535)
    """Where the trainer's rank 0 listens; NCCL takes further ports by itself. 0 takes a free one."""

    timeout: float = Field(1200, gt=0)
    """Longest wait of one side for the other, seconds."""

    canary: bool = True
    """Publish the trainer's log-probabilities of 64 fixed tokens with each version, for inference to compare with."""


class IPCBroadcastConfig(BaseConfig):
    """Weights travel through the memory of one GPU that the trainer's only rank and inference share (CUDA IPC)."""

    type: Literal["ipc"] = "ipc"
    """Way from trainer to inference."""

    dtype: Precision = "auto"
    """Precision of the published weights; auto is bfloat16."""

    port: int = Field(DEFAULT_TRANSFER_PORT, ge=0, le=65535)
    """Where the trainer listens on this machine; 0 takes a free one."""

    timeout: float = Field(1200, gt=0)
    """Longest wait of one side for the other, seconds."""

    canary: bool = True
    """Publish the trainer's log-probabilities of 64 fixed tokens with each version, for inference to compare with."""

    @property
    def host(self) -> str:
        """This machine."""
        return "localhost"


TransferConfig = NCCLBroadcastConfig | IPCBroadcastConfig


def check_transfer(kind: str, device: str, adapters: bool) -> None:
    """Refuse weights that cannot travel this way.

    Args:
        kind: `weight_broadcast.type`.
        device: where the trainer computes.
        adapters: these are published, and not the whole model.

    Raises:
        ValueError: names keys, reason and way out.
    """
    if kind == "filesystem":
        return
    if device == "cpu":
        raise ValueError(f"weight_broadcast.type = {kind!r} needs a GPU, and device = 'cpu'; use 'filesystem'")
    if adapters:
        raise ValueError(
            f"weight_broadcast.type = {kind!r} sends whole models, and model.lora.publish = 'adapter'; adapters are "
            "small: use 'filesystem', or publish 'merged'"
        )


def check_placement(kind: str, trainer: Sequence[int], inference: Sequence[int] | None, base_url: object) -> None:
    """Refuse GPUs between which weights cannot travel this way.

    Args:
        kind: `trainer.weight_broadcast.type`.
        trainer: its GPUs.
        inference: its GPUs; None where `rl` starts none.
        base_url: servers for evaluation alone, if there are any.

    Raises:
        ValueError: names keys, reason and way out.
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
    if kind == "ipc" and inference is not None and not (list(trainer) == list(inference) and len(trainer) == 1):
        raise ValueError(
            f"trainer.weight_broadcast.type = 'ipc' is for one GPU that both share, and trainer_gpu_ids = "
            f"{list(trainer)}, inference_gpu_ids = {list(inference)}; use 'nccl' or 'filesystem'"
        )
