"""I5 in a worker: a version is read, checked and made ready in a thread of its own; the pause puts it in place.

    stage ----> staging ----> staged ----> put in place
                   |  \\
                   |   `----> failed       a file is not what was published: nothing was touched
                   `--------> (gone)       dropped, or overtaken by the next stage

One version of the policy is staged at a time: the next one stops the one before it at its next tensor and takes its
memory. A named adapter is staged beside it. Where a model does not suit `standby` (quantized, with adapters ...), the
checkpoint's tensors themselves are staged and vLLM's layer-wise reload runs during the pause.
"""

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel

from prime_rl.inference.adapters import POLICY_ADAPTER
from prime_rl.inference.patches import forget_packed_experts, repack_tied_head
from prime_rl.inference.reading import Cancelled, read_verified
from prime_rl.inference.replica import Replica
from prime_rl.inference.slots import AdapterSlots
from prime_rl.inference.standby import Standby, Unsuitable, why_not
from prime_rl.inference.transfer import Receiver
from prime_rl.run.artifact import ArtifactError

logger = logging.getLogger(__name__)

State = Literal["staging", "staged", "failed", "gone"]


@dataclass
class _Version:
    """One version on its way."""

    key: str
    directory: Path
    hashes: Mapping[str, str]
    number: int = 0  # of the adapter that it is; 0 is none
    config: Mapping[str, Any] = field(default_factory=dict)  # peft's
    request: Mapping[str, Any] | None = None  # how to fetch the tensors, if they are in no file
    cancelled: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    state: State = "staging"
    error: str = ""
    seconds: float = 0.0
    bytes: int = 0
    standby: Standby | None = None
    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    adapter: LoRAModel | None = None


class WeightSwitch:
    """What one worker knows of the versions it is given.

    Args:
        worker: vLLM's worker.
        base: directory of the weights that it has loaded at its start.
        replica: rebuilds versions that are published as deltas.
    """

    def __init__(self, worker: Any, base: Path, replica: Replica) -> None:
        self._worker = worker
        self._base = base
        self._replica = replica
        self._receiver = Receiver(worker)
        self._version: _Version | None = None
        self._named: _Version | None = None
        self._slots = AdapterSlots(worker.model_runner) if worker.vllm_config.lora_config is not None else None
        self._kept: frozenset[str] | None = None
        self._unsuitable = why_not(worker.vllm_config, worker.device)
        if self._unsuitable:
            logger.warning("weights are switched by vLLM's own reload, with a longer pause: %s", self._unsuitable)
        self._pinned: dict[tuple[str, ...], Tensor] | None = {} if worker.device.type == "cuda" else None

    def stage(
        self, key: str, directory: Path, hashes: Mapping[str, str], request: Mapping[str, Any] | None = None
    ) -> None:
        """Start to read, or by `request` to fetch, and check a version; returns at once.

        What was staged before is dropped.
        """
        before = self.drop()
        self._version = _Version(key, directory, hashes, request=request)
        self._start(self._version, before)

    def stage_adapter(
        self, key: str, directory: Path, hashes: Mapping[str, str], number: int, config: Mapping[str, Any]
    ) -> None:
        """Start to read and check an adapter, the policy's next version or, by its number, a named one."""
        version = _Version(key, directory, hashes, number, config)
        before = None
        if number == POLICY_ADAPTER:
            before = self.drop()
            self._version = version
        else:
            self._named = version
        self._start(version, before)

    def unadapt(self) -> None:
        """Take the policy's adapter away. Nothing may be sampled meanwhile."""
        if self._slots is not None:
            self._slots.empty_policy()

    def remove_adapter(self, number: int) -> None:
        """Forget a named adapter that no request uses."""
        if self._slots is not None:
            self._slots.remove(number)

    def _start(self, version: _Version, before: threading.Thread | None) -> None:
        version.thread = threading.Thread(target=self._stage, args=(version, before), name="stage", daemon=True)
        version.thread.start()

    def state(self, key: str) -> dict[str, Any]:
        """Tell how far the version is, and how long and how large it was."""
        version = self._find(key)
        if version is None:
            return {"state": "gone", "error": "", "stage_s": 0.0, "bytes": 0}
        return {
            "state": version.state,
            "error": version.error,
            "stage_s": version.seconds,
            "bytes": version.bytes,
        }

    def drop(self, key: str | None = None) -> threading.Thread | None:
        """Forget what is staged under `key`, or for the policy; return the thread that still has to notice."""
        version = self._version if key is None else self._find(key)
        if version is None:
            return None
        self._forget(version)
        version.cancelled.set()
        return version.thread

    def put_in_place(self, key: str) -> None:
        """Load the version that was staged under `key`. Nothing may be sampled meanwhile.

        Raises:
            RuntimeError: it is not staged.
        """
        version = self._find(key)
        if version is None or version.state != "staged":
            raise RuntimeError(f"{key} is not staged")
        self._forget(version)
        if version.adapter is not None and self._slots is not None:
            self._slots.put_in_place(version.adapter)
            return
        if version.standby is None:
            self._reload(version.tensors)
            return
        version.standby.put_in_place(self._kept or frozenset())
        runner = self._worker.model_runner
        runner.reset_encoder_cache()
        runner.reset_mm_cache()
        threading.Thread(target=version.standby.retire, name="retire", daemon=True).start()

    def measure(self) -> dict[str, float]:
        """Time what a switch cannot avoid, in this very process: copying the bytes, and vLLM's own processing.

        Returns:
            Size in `bytes`; seconds `copy_s` to copy the parameters once into memory that is already there, and
            `process_s` for `process_weights_after_loading` of all plain layers (not of experts; 0 on a GPU).

        Raises:
            Unsuitable: of such a model vLLM's reload does both at once.
        """
        self._check_suitable()
        standby = self._standby()
        parameters = list(standby.mirror.parameters())
        for parameter in parameters:
            parameter.data.normal_()
        targets = [torch.zeros_like(parameter.data, device=self._worker.device) for parameter in parameters]
        start = time.perf_counter()
        for target, source in zip(targets, [parameter.data for parameter in parameters], strict=True):
            target.copy_(source, non_blocking=True)
        self._synchronize()
        copy_s = time.perf_counter() - start
        del targets, target, parameters, parameter, source  # processing lets go of what it packs, and so do we
        start = time.perf_counter()
        standby.pack()
        self._synchronize()
        return {"bytes": standby.bytes, "copy_s": copy_s, "process_s": time.perf_counter() - start}

    def _forget(self, version: _Version) -> None:
        self._version = None if version is self._version else self._version
        self._named = None if version is self._named else self._named

    def _find(self, key: str) -> _Version | None:
        return next((one for one in (self._version, self._named) if one is not None and one.key == key), None)

    def _stage(self, version: _Version, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()  # without a deadline: both would use the same memory; whoever asked has one (client.timeout)
        start = time.perf_counter()
        try:
            if self._worker.device.type == "cuda":
                torch.cuda.set_device(self._worker.device)  # a thread begins with the first one
            with torch.inference_mode(False), torch.no_grad():
                if not version.number:
                    self._prove(version)
                weights = self._weights(version)
                if version.number:
                    factors = list(weights)
                    version.bytes = sum(tensor.nbytes for _, tensor in factors)
                    version.adapter = self._build(version, factors)
                elif self._unsuitable:
                    version.tensors = list(weights)
                    version.bytes = sum(tensor.nbytes for _, tensor in version.tensors)
                else:
                    version.standby = self._standby()
                    version.standby.load(weights)
                    version.bytes = version.standby.bytes
                    version.standby.pack()
            version.seconds = time.perf_counter() - start
            version.state = "staged"
        except Cancelled:
            version.state = "gone"
        except Exception as error:
            version.error = str(error) or type(error).__name__
            if version.request is not None:
                version.error = f"{version.directory} could not be fetched: {version.error}"
            version.state = "failed"
            logger.warning("staging %s failed", version.directory, exc_info=error)

    def _weights(self, version: _Version) -> Iterator[tuple[str, Tensor]]:
        if version.request is not None:
            return self._receiver.receive(version.request, version.hashes, version.cancelled.is_set)
        return read_verified(version.directory, version.hashes, version.cancelled.is_set, self._replica)

    def _build(self, version: _Version, factors: list[tuple[str, Tensor]]) -> LoRAModel:
        if self._slots is None:
            raise ArtifactError("this server takes no adapters; start it with enable_lora = true")
        try:
            return self._slots.build(version.number, version.config, factors)
        except (ValueError, KeyError, TypeError) as error:  # whatever vLLM's parser makes of it
            raise ArtifactError(f"{version.directory} holds an adapter that cannot be applied: {error}") from error

    def _prove(self, version: _Version) -> None:
        """Once for each model: see that a mirror gets everything a checkpoint holds."""
        if self._unsuitable or self._kept is not None:
            return
        try:
            self._kept = self._standby().prove(read_verified(self._base, None, version.cancelled.is_set))
        except (Cancelled, ArtifactError, OSError):
            raise
        except Exception as reason:  # noqa: BLE001  whatever a model's loader stumbles over in a mirror
            self._unsuitable = f"{type(reason).__name__}: {reason}"
            logger.warning("weights are switched by vLLM's own reload, with a longer pause: %s", self._unsuitable)

    def _check_suitable(self) -> None:
        if self._unsuitable:
            raise Unsuitable(self._unsuitable)

    def _standby(self) -> Standby:
        model = self._worker.model_runner.get_model()
        return Standby(model, self._worker.model_config.dtype, self._pinned)

    def _synchronize(self) -> None:
        if self._worker.device.type == "cuda":
            torch.cuda.synchronize()

    def _reload(self, tensors: list[tuple[str, Tensor]]) -> None:
        # It warns of every layer without a tensor of its own (rotary tables, a tied head); names were checked before.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        model = self._worker.model_runner.get_model()
        if self._worker.device.type == "cpu":
            forget_packed_experts(model)
        self._worker.reload_weights(weights_iterator=_drain(tensors))
        if self._worker.model_config.hf_text_config.tie_word_embeddings:
            repack_tied_head(model)
        self.unadapt()  # vLLM has emptied all slots


def _drain(tensors: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors and let each go."""
    tensors.reverse()
    while tensors:
        yield tensors.pop()
