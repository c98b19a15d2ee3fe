"""`rl` prepares its server for what its trainer publishes."""

import pytest

from prime_rl.configs.rl import RLConfig
from prime_rl.errors import ConfigError

ADAPTER = ["--inference", "--trainer.model.lora.publish", "adapter", "--trainer.model.lora.rank", "24"]


def _served(*arguments: str) -> tuple[bool, int]:
    inference = RLConfig.load([*ADAPTER, *arguments]).inference
    assert inference is not None
    return inference.enable_lora, inference.max_lora_rank


def test_the_server_takes_what_the_trainer_publishes() -> None:
    assert _served() == (True, 24)
    assert _served("--inference.max-lora-rank", "64") == (True, 64), "room for others beside it"
    assert _served("--trainer.model.lora.publish", "merged") == (False, 16)


def test_a_server_that_does_not_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"lora\.publish = 'adapter' needs inference\.enable_lora = true"):
        _served("--no-inference.enable-lora")
    with pytest.raises(ConfigError, match=r"lora\.rank = 24 is more than inference\.max_lora_rank = 8"):
        _served("--inference.max-lora-rank", "8")


def test_a_server_that_runs_already_is_left_alone() -> None:
    assert RLConfig.load(ADAPTER[1:]).inference is None
