"""`rl` configures its server for the adapters that its trainer publishes."""

import pytest

from prime_rl.configs.rl import RLConfig
from prime_rl.core.errors import ConfigError

ADAPTER = ["--inference", "--trainer.model.lora.publish", "adapter", "--trainer.model.lora.rank", "24"]


def _served(*arguments: str) -> tuple[bool, int]:
    inference = RLConfig.load([*ADAPTER, *arguments]).inference
    assert inference is not None
    return inference.enable_lora, inference.max_lora_rank


def test_rl_with_published_adapters_enables_them_on_the_server() -> None:
    assert _served() == (True, 24)
    assert _served("--inference.max-lora-rank", "64") == (True, 64), "a larger rank is kept"
    assert _served("--trainer.model.lora.publish", "merged") == (False, 16)


def test_rl_with_a_server_that_rejects_the_adapters_raises() -> None:
    with pytest.raises(ConfigError, match=r"lora\.publish = 'adapter' needs inference\.enable_lora = true"):
        _served("--no-inference.enable-lora")
    with pytest.raises(ConfigError, match=r"lora\.rank = 24 is more than inference\.max_lora_rank = 8"):
        _served("--inference.max-lora-rank", "8")


def test_rl_without_its_own_server_does_not_check_adapters() -> None:
    assert RLConfig.load(ADAPTER[1:]).inference is None
