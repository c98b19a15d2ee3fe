"""The adapters of a worker, always built from verified tensors.

vLLM computes every layer with a few adapters, each in a slot with a number; each request has the number of its adapter.
The policy's adapter keeps its number from version to version, so requests in flight continue with the new one. At the
base model it is an adapter that adds nothing. vLLM would read a missing adapter, unverified, from the path in a
request; here it gets the adapter from memory, also after vLLM has emptied its slots (a reload, a profile run).

Specific to vLLM 0.32.0: its adapter manager and parser. Without this module
tests/integration/inference/test_adapters.py fails.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from prime_rl.inference.policy.adapter_checks import POLICY_ADAPTER


class AdapterSlots:
    """The adapters of one worker, whose model runner has LoRA enabled."""

    def __init__(self, runner: Any) -> None:
        self._loader = runner.lora_manager
        self._manager = self._loader._adapter_manager
        self._adapters: dict[int, LoRAModel] = {}
        self._loader._load_adapter = lambda request: self._adapters[request.lora_int_id]
        self.empty_policy()

    def build(self, number: int, config: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]) -> LoRAModel:
        """Build an adapter from peft's configuration and factors, in the form of a slot. Does not change the model.

        Raises:
            ValueError: vLLM does not support the adapter, or one of its layers.
        """
        helper = PEFTHelper.from_dict({**config, "vllm_max_position_embeddings": self._loader.max_position_embeddings})
        helper.validate_legal(self._loader.lora_config)
        model = self._manager.model
        renames = getattr(model, "hf_to_vllm_mapper", None)
        lora = LoRAModel.from_lora_tensors(
            lora_model_id=number,
            tensors=dict(tensors),
            peft_helper=helper,
            device="cpu",
            dtype=self._loader.lora_config.lora_dtype,
            model_vocab_size=self._loader.vocab_size,
            weights_mapper=renames and renames.get_rename_mapper(),
            skip_prefixes=getattr(model, "lora_skip_prefixes", None),
        )
        # Fuses the factors of fused layers (query, key, value ...) and multiplies by the scale.
        self._manager._create_merged_loras_inplace(lora)
        if unknown := sorted(lora.loras.keys() - self._manager.modules.keys()):
            raise ValueError(f"vLLM does not support adapters for layer {unknown[0]} of this model")
        return lora

    def load(self, lora: LoRAModel) -> None:
        """Use the adapter for requests with its number. Must be called during a pause."""
        self._adapters[lora.id] = lora
        self._manager.remove_adapter(lora.id)
        self._loader.add_adapter(LoRARequest(f"adapter {lora.id}", lora.id, "in memory"))

    def empty_policy(self) -> None:
        """Replace the policy's adapter by one that adds nothing. Must be called during a pause."""
        self.load(self._manager.create_dummy_lora(POLICY_ADAPTER, 1, self._loader.embedding_modules))

    def remove(self, number: int) -> None:
        """Remove an adapter that no request uses."""
        self._manager.remove_adapter(number)
        self._adapters.pop(number, None)
