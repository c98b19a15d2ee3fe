"""What runs inside vLLM's workers (`worker_extension_cls`): the doors to `switch`, called by collective RPC."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prime_rl.inference.patches import die_with_parent, score_prompts_by_their_own_adapter
from prime_rl.inference.replica import Replica
from prime_rl.inference.standby import Unsuitable
from prime_rl.inference.switch import WeightSwitch


class WeightUpdateExtension:
    """Methods that vLLM mixes into its worker class."""

    def prepare_switches(self: Any, base: str, cache: str) -> None:
        """Remember where the weights came from that were loaded at the start, and where on this node versions may be
        rebuilt. To be called once, first."""
        self.weight_switch = WeightSwitch(self, Path(base), Replica(Path(cache)))
        score_prompts_by_their_own_adapter(self.model_runner)

    def stage_policy(
        self: Any, key: str, directory: str, hashes: Mapping[str, str], request: Mapping[str, Any] | None = None
    ) -> None:
        """See `WeightSwitch.stage`."""
        self.weight_switch.stage(key, Path(directory), hashes, request)

    def stage_adapter(
        self: Any, key: str, directory: str, hashes: Mapping[str, str], number: int, config: Mapping[str, Any]
    ) -> None:
        """See `WeightSwitch.stage_adapter`."""
        self.weight_switch.stage_adapter(key, Path(directory), hashes, number, config)

    def unadapt_policy(self: Any) -> None:
        """See `WeightSwitch.unadapt`."""
        self.weight_switch.unadapt()

    def forget_adapter(self: Any, number: int) -> None:
        """See `WeightSwitch.remove_adapter`."""
        self.weight_switch.remove_adapter(number)

    def staged_policy(self: Any, key: str) -> dict[str, Any]:
        """See `WeightSwitch.state`."""
        state: dict[str, Any] = self.weight_switch.state(key)
        return state

    def drop_policy(self: Any, key: str) -> None:
        """See `WeightSwitch.drop`."""
        self.weight_switch.drop(key)

    def load_policy(self: Any, key: str) -> None:
        """See `WeightSwitch.put_in_place`."""
        self.weight_switch.put_in_place(key)

    def measure_switch_limit(self: Any) -> dict[str, Any]:
        """See `WeightSwitch.measure`; {"error": why} where that cannot be told."""
        try:
            seconds: dict[str, Any] = self.weight_switch.measure()
        except Unsuitable as reason:
            return {"error": f"copying and processing cannot be told apart: {reason}"}
        return seconds

    def follow_engine(self: Any) -> None:
        """Die with the engine that started this worker, which may be this very process."""
        die_with_parent()
