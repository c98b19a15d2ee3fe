"""A server over several nodes, and the environment variables with addresses and paths."""

import pytest

from prime_rl.configs.eval import EvalConfig
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.synthesize import SynthesizeConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.core.errors import ConfigError

ROOTS = (EvalConfig, InferenceConfig, OrchestratorConfig, RLConfig, SFTConfig, SynthesizeConfig, TrainerConfig)


@pytest.fixture(autouse=True)
def _in_workdir(workdir):
    """Every test runs in an empty folder, without the variables."""


@pytest.mark.parametrize("root", ROOTS)
def test_output_dir_is_read_by_all_and_is_the_weakest_source(root, monkeypatch):
    monkeypatch.setenv("OUTPUT_DIR", "/shared/run")
    config = root.load([])
    parts = (config, config.trainer, config.orchestrator) if root is RLConfig else (config,)
    assert {str(part.output_dir) for part in parts} == {"/shared/run"}
    assert str(root.load(["--exp-id", "a"]).output_dir) == "/shared/run/a"
    monkeypatch.setenv("PRIME_OUTPUT_DIR", "/other")
    assert str(root.load([]).output_dir) == "/other"
    assert str(root.load(["--output-dir", "third"]).output_dir) == "third"


def test_server_address_variable_sets_server_and_clients(monkeypatch):
    monkeypatch.setenv("INFERENCE_SERVER_IP", "10.0.0.7")
    assert InferenceConfig.load([]).server.host == "10.0.0.7"
    assert InferenceConfig.load(["--server.host", "0.0.0.0"]).server.host == "0.0.0.0"
    for root in (OrchestratorConfig, EvalConfig, SynthesizeConfig):
        assert root.load([]).client.urls == ["http://10.0.0.7:8000"]
    assert OrchestratorConfig.load(["--client.port", "8001"]).client.urls == ["http://10.0.0.7:8001"]
    url = "http://n1:8000/v1"
    assert OrchestratorConfig.load(["--client.base-url", url]).client.urls == ["http://n1:8000"]
    assert RLConfig.load([]).orchestrator.client.urls == ["http://10.0.0.7:8000"]
    config = RLConfig.load(["--inference"])  # starts a server of its own
    assert (config.inference.server.host, config.orchestrator.client.host) == ("127.0.0.1", "127.0.0.1")
    monkeypatch.setenv("INFERENCE_SERVER_IP", "fd00::7")
    assert OrchestratorConfig.load([]).client.urls == ["http://[fd00::7]:8000"]


def test_address_of_the_head_is_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("DATA_PARALLEL_ADDRESS", "10.0.0.1")
    monkeypatch.setenv("DATA_PARALLEL_RPC_PORT", "13345")
    parallel = InferenceConfig.load(["--parallel.dp", "4", "--parallel.dp-local", "2"]).parallel
    assert (parallel.address, parallel.rpc_port, parallel.spans_nodes) == ("10.0.0.1", 13345, True)
    assert InferenceConfig.load([]).parallel.spans_nodes is False
    assert InferenceConfig.load(["--data-parallel-rpc-port", "1"]).parallel.rpc_port == 1


def test_empty_variable_is_ignored(monkeypatch):
    for name in ("OUTPUT_DIR", "INFERENCE_SERVER_IP", "DATA_PARALLEL_RPC_PORT"):
        monkeypatch.setenv(name, "")
    config = InferenceConfig.load([])
    assert (str(config.output_dir), config.server.host, config.parallel.rpc_port) == ("outputs", "127.0.0.1", 29550)


@pytest.mark.parametrize(
    ("root", "arguments", "error"),
    [
        (InferenceConfig, "--parallel.dp 2 --parallel.dp-local 1", "address is missing"),
        (InferenceConfig, "--headless --parallel.address a --parallel.dp 2", "headless needs start_rank and dp_local"),
        (
            InferenceConfig,
            "--headless --parallel.address a --parallel.dp 2 --parallel.dp-local 2 --parallel.start-rank 1",
            "dp_local = 2 copies from 1 on are more than dp = 2",
        ),
        (
            RLConfig,
            "--inference.parallel.dp 2 --inference.parallel.dp-local 1 --inference.parallel.address a",
            "needs their names in `nodes`",
        ),
    ],
)
def test_invalid_multi_node_server_raises_in_one_line(root, arguments, error):
    with pytest.raises(ConfigError, match=error) as caught:
        root.load(arguments.split())
    assert "\n" not in str(caught.value)
