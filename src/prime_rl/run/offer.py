"""I5: how the tensors of a version are fetched that was published without files of weights.

`weights/step_n` then holds manifest, configuration and tokenizer alone; the tensors wait in the trainer's memory. The
manifest has their hashes, as always, and in `transfer` where to ask for them (docs/publication.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from prime_rl.run.tensors import ITEM_BYTES

Transport = Literal["nccl", "ipc"]


@dataclass(frozen=True, slots=True)
class Offer:
    """`transfer` of a weights manifest.

    Attributes:
        type: how the bytes travel.
        host: where the trainer listens.
        port: likewise.
        session: which trainer process it is; also the password.
        timeout_s: longest wait for it.
        tensors: by name, dtype as safetensors spells it, and shape.
    """

    type: Transport
    host: str
    port: int
    session: str = field(repr=False)
    timeout_s: float
    tensors: Mapping[str, tuple[str, tuple[int, ...]]] = field(repr=False)

    @classmethod
    def parse(cls, entry: Mapping[str, Any]) -> Self:
        """Read what `fields` gives, after JSON.

        Raises:
            ValueError: it is malformed; says how.
        """
        try:
            tensors = {
                str(name): (str(dtype), tuple(int(extent) for extent in shape))
                for name, (dtype, shape) in entry["tensors"].items()
            }
            offer = cls(
                entry["type"], str(entry["host"]), int(entry["port"]), str(entry["session"]),
                float(entry["timeout_s"]), tensors,
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"transfer: {type(error).__name__}: {error}") from None
        if offer.type not in get_args(Transport):
            raise ValueError(f"transfer: type {offer.type!r}")
        if unknown := {dtype for dtype, _ in tensors.values()} - ITEM_BYTES.keys():
            raise ValueError(f"transfer: dtype {min(unknown)!r}")
        return offer

    def fields(self) -> dict[str, Any]:
        """Give what JSON can hold."""
        tensors = {name: [dtype, list(shape)] for name, (dtype, shape) in self.tensors.items()}
        return {
            "type": self.type, "host": self.host, "port": self.port, "session": self.session,
            "timeout_s": self.timeout_s, "tensors": tensors,
        }  # fmt: skip
