"""What runs inside vLLM's workers (`worker_extension_cls`): the doors to `switch`, called by collective RPC."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prime_rl.inference.patches import die_with_parent
from prime_rl.inference.standby import Unsuitable
from prime_rl.inference.switch import WeightSwitch


class WeightUpdateExtension:
    """Methods that vLLM mixes into its worker class."""

    def prepare_switches(self: Any, base: str) -> None:
        """Remember where the weights came from that were loaded at the start. To be called once, first."""
        self.weight_switch = WeightSwitch(self, Path(base))

    def stage_policy(self: Any, key: str, directory: str, hashes: Mapping[str, str]) -> None:
        """See `WeightSwitch.stage`."""
        self.weight_switch.stage(key, Path(directory), hashes)

    def staged_policy(self: Any, key: str) -> dict[str, Any]:
        """See `WeightSwitch.state`."""
        state: dict[str, Any] = self.weight_switch.state(key)
        return state

    def drop_policy(self: Any) -> None:
        """See `WeightSwitch.drop`."""
        self.weight_switch.drop()

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
