"""Describes how to fetch the tensors of a version that was published without weight files.

`weights/step_n` then contains only manifest, configuration and tokenizer, and the tensors stay in the trainer's memory.
The manifest contains their hashes (I5) and, in `transfer`, the address of the trainer (docs/design/weight_sync.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from prime_rl.storage.tensor_hashes import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class TransferDescriptor:
    """The entry `transfer` of a weights manifest.

    Attributes:
        type: transport of the tensors.
        host: host of the trainer.
        port: port on which the trainer listens.
        session: secret identifier of the trainer process.
        timeout_s: longest wait for the trainer.
        tensors: tensor name -> safetensors dtype and shape.
    """

    type: Literal["nccl", "ipc"]
    host: str
    port: int
    session: str = field(repr=False)
    timeout_s: float
    tensors: Mapping[str, tuple[str, tuple[int, ...]]] = field(repr=False)

    @classmethod
    def parse(cls, entry: Mapping[str, Any]) -> "TransferDescriptor":
        """Parse the output of `fields` after a JSON round trip; raises ValueError if it is malformed."""
        descriptor = msgspec.convert({"transfer": entry}, _TransferField).transfer
        if unknown := {dtype for dtype, _ in descriptor.tensors.values()} - ITEM_BYTES.keys():
            raise ValueError(f"transfer: unknown dtype {min(unknown)!r}")
        return descriptor

    def fields(self) -> dict[str, Any]:
        """Return the descriptor as JSON-serializable values."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields


class _TransferField(msgspec.Struct):
    transfer: TransferDescriptor
