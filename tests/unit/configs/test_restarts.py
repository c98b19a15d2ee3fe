"""The orchestrator waits for a server that `rl` restarts."""

from prime_rl.configs.rl import RLConfig


def _reconnect_s(*arguments: str) -> float:
    return RLConfig.load([*arguments]).orchestrator.client.reconnect_seconds


def test_orchestrator_with_restarts_waits_as_long_as_at_the_start() -> None:
    assert _reconnect_s("--inference", "--max-restarts", "3") == 1800
    timeout = ("--orchestrator.wait-timeout-seconds", "90")
    assert _reconnect_s("--inference", "--max-restarts", "3", *timeout) == 90
    assert _reconnect_s("--inference", "--max-restarts", "3", "--orchestrator.client.reconnect-seconds", "7") == 7


def test_orchestrator_without_restarts_keeps_its_reconnect_time() -> None:
    assert _reconnect_s("--inference") == 4
    assert _reconnect_s("--max-restarts", "3") == 4, "somebody else's server"
