"""I5 for adapters in a worker: what is in a slot was built from verified bytes.

vLLM computes every layer with a few adapters at once, each in a slot of its own; each request has the number of one.
The policy's adapter keeps its number from version to version, so that requests in flight go on under the new one; at
the base model it is an adapter that adds nothing. vLLM would load an adapter that it does not hold from the path in a
request, unverified: here it gets what was built before, from memory, also after it has emptied its slots by itself (a
reload of weights, a trial run).

What is specific to vLLM 0.32.0: its manager of adapters and their parsing. Without this module
tests/integration/inference/test_adapters.py fails.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from prime_rl.inference.adapters import POLICY_ADAPTER


class AdapterSlots:
    """The adapters of one worker.

    Args:
        runner: vLLM's model runner, with LoRA enabled.
    """

    def __init__(self, runner: Any) -> None:
        self._loader = runner.lora_manager
        self._manager = self._loader._adapter_manager
        self._held: dict[int, LoRAModel] = {}
        self._loader._load_adapter = lambda request: self._held[request.lora_int_id]
        self.empty_policy()

    def build(self, number: int, config: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]) -> LoRAModel:
        """Make an adapter of its factors, as its slot wants them; touches nothing that is sampled from.

        Args:
            number: which one it will be.
            config: peft's.
            tensors: factors by peft's names; they become the adapter's.

        Raises:
            ValueError: vLLM cannot apply such an adapter, or not to a layer that it names.
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
        # Fuses what the model computes fused (query, key, value ...) and multiplies by the scale.
        self._manager._create_merged_loras_inplace(lora)
        if unknown := sorted(lora.loras.keys() - self._manager.modules.keys()):
            raise ValueError(f"vLLM applies no adapter to layer {unknown[0]} of this model")
        return lora

    def put_in_place(self, lora: LoRAModel) -> None:
        """Let requests of its number sample from it. Nothing may be sampled meanwhile."""
        self._held[lora.id] = lora
        self._manager.remove_adapter(lora.id)
        self._loader.add_adapter(LoRARequest(f"adapter {lora.id}", lora.id, "in memory"))

    def empty_policy(self) -> None:
        """Let the policy be the weights that are in place, and nothing added. Nothing may be sampled meanwhile."""
        nothing = self._manager.create_dummy_lora(POLICY_ADAPTER, 1, self._loader.embedding_modules)
        self.put_in_place(nothing)

    def remove(self, number: int) -> None:
        """Forget an adapter that no request uses."""
        self._manager.remove_adapter(number)
        self._held.pop(number, None)
