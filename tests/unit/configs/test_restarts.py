"""Where `rl` starts its server again, the orchestrator waits for it."""

from prime_rl.configs.rl import RLConfig


def _reconnect_s(*arguments: str) -> float:
    return RLConfig.load([*arguments]).orchestrator.client.reconnect_seconds


def test_a_server_that_rl_starts_again_is_waited_for_as_at_the_start() -> None:
    assert _reconnect_s("--inference", "--max-restarts", "3") == 1800
    timeout = ("--orchestrator.wait-timeout-seconds", "90")
    assert _reconnect_s("--inference", "--max-restarts", "3", *timeout) == 90
    assert _reconnect_s("--inference", "--max-restarts", "3", "--orchestrator.client.reconnect-seconds", "7") == 7


def test_one_that_nobody_starts_again_is_not() -> None:
    assert _reconnect_s("--inference") == 4
    assert _reconnect_s("--max-restarts", "3") == 4, "somebody else's server"
