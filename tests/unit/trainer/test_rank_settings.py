"""Ranks that torchrun starts on several nodes, with the command of each node."""

import os

import pytest

from prime_rl.configs.trainer import TrainerConfig
from prime_rl.core.errors import ConfigError
from prime_rl.trainer.parallel.rank_settings import check_rank_settings
from tests.unit.trainer.world import run_world

CASES = {
    "same": ([], [], None),
    "paths": (["--output-dir", "a", "--log.level", "debug"], ["--output-dir", "b", "--wandb"], None),
    "rate": (["--optim.lr", "1e-3"], ["--optim.lr", "1e-5"], "optim.lr = 0.001 at rank 0 on "),
    "block": (["--model.lora.rank", "4"], [], "model.lora = set at rank 0 on "),
    "kind": ([], ["--loss.type", "ppo"], "loss.type = aipo at rank 0 on "),
}


def _refusals(world, cases):
    """The error of each case on this rank, which is alone on its node."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    found = {}
    for name, arguments in cases.items():
        config = TrainerConfig.load(["--model.name", "m", *arguments[world.rank % 2]])
        try:
            check_rank_settings(config, world)
        except ConfigError as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    ranks = run_world(2, _refusals, {name: case[:2] for name, case in CASES.items()}, tmp_path_factory.mktemp("world"))
    assert ranks[0] == ranks[1], "all ranks raise the same error"
    return ranks[0]


@pytest.mark.parametrize("name", CASES)
def test_check_rank_settings_refuses_what_decides_the_result(refusals, name):
    expected = CASES[name][2]
    assert (name in refusals) is (expected is not None)
    if expected is not None:
        assert refusals[name].startswith(expected) and "at rank 1 on " in refusals[name]
        assert refusals[name].endswith("; give all ranks the same")
