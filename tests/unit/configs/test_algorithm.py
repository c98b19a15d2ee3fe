"""The preset `algorithm`: the values that it sets, and the sources that override it."""

import typing

import pytest

from prime_rl.configs.algorithm import ALGORITHMS, Algorithm
from prime_rl.configs.loading.base_config import write_config
from prime_rl.configs.rl import RLConfig
from prime_rl.core.errors import ConfigError

# Name -> kinds of advantage and loss, the weights of tokens, and whether advantages are divided by the deviation.
EXPECTED = {
    "grpo": ("grpo", "grpo", "sequence", True),
    "dr_grpo": ("dr_grpo", "dr_grpo", "fixed", None),
    "dapo": ("grpo", "ppo", "token", True),
    "gspo": ("grpo", "gspo", "sequence", True),
    "cispo": ("grpo", "cispo", "token", True),
    "opo": ("opo", "aipo", "token", None),
    "rloo": ("rloo", "aipo", "token", None),
    "max_rl": ("max_rl", "aipo", "token", None),
    "reinforce": ("none", "reinforce", "token", None),
    "reinforce++": ("reinforce_pp", "ppo", "token", None),
    "reinforce++_baseline": ("reinforce_pp_baseline", "ppo", "token", None),
    "aipo": ("grpo", "aipo", "token", False),
    "dppo": ("grpo", "dppo", "token", False),
    "icepop": ("grpo", "icepop", "token", False),
    "tis": ("grpo", "tis", "token", False),
    "decoupled_ppo": ("grpo", "decoupled_ppo", "token", False),
}


def load(*arguments):
    config = RLConfig.load(list(map(str, arguments)))
    return config.orchestrator.advantage, config.trainer.loss


@pytest.fixture
def write(tmp_path):
    def file(text, name="file.toml"):
        path = tmp_path / name
        path.write_text(text)
        return "@", path

    return file


@pytest.mark.parametrize("name", EXPECTED)
def test_algorithm_preset_sets_advantage_and_loss(name):
    advantage, loss = load("--algorithm", name)
    kinds = (advantage.type, loss.type, loss.normalization, getattr(advantage, "std", None))
    assert kinds == EXPECTED[name]


def test_algorithm_presets_cover_all_names():
    assert set(typing.get_args(Algorithm)) == set(ALGORITHMS) == set(EXPECTED)


def test_algorithm_unset_is_aipo():
    assert load() == load("--algorithm", "aipo")


def test_algorithm_dapo_uses_clip_higher():
    assert (load("--algorithm", "dapo")[1].eps_low, load("--algorithm", "dapo")[1].eps_high) == (0.2, 0.28)


def test_algorithm_preset_keeps_values_of_the_same_source(write):
    advantage, loss = load("--algorithm", "gspo", "--trainer.loss.type", "cispo")
    assert (advantage.type, advantage.std, loss.type) == ("grpo", True, "cispo")
    advantage, loss = load(*write('algorithm = "gspo"\norchestrator.advantage.type = "rloo"'))
    assert (advantage.type, loss.type) == ("rloo", "gspo")
    _, loss = load(*write('algorithm = "gspo"'), "--trainer.loss.type", "aipo")
    assert loss.type == "aipo"
    assert load("--algorithm", "grpo", "--trainer.loss.eps-high", 0.28)[1].eps_high == 0.28


def test_algorithm_flag_overrides_values_of_a_file(write):
    text = 'trainer.loss = {type = "cispo", eps_high = 5.0, kl.coef = 0.2}\norchestrator.advantage.type = "opo"'
    advantage, loss = load(*write(text), "--algorithm", "gspo")
    assert (advantage.type, loss.type) == ("grpo", "gspo")
    assert loss.eps_high == 4e-4  # not CISPO's
    assert loss.kl.coef == 0.2  # of every loss


def test_algorithm_in_a_file_keeps_the_type_and_keys_of_the_file(write):
    _, loss = load(*write('trainer.loss = {type = "gspo", eps_high = 0.1}'), "--algorithm", "gspo")
    assert loss.eps_high == 0.1


@pytest.fixture(scope="module", params=["dapo", "gspo", "aipo"])
def resolved(request, tmp_path_factory):
    """Arguments of the resolved file of an algorithm, which names all keys."""
    root = tmp_path_factory.mktemp(request.param)
    write_config(RLConfig.load(["--algorithm", request.param]), root / "run.toml")
    assert load("@", root / "run.toml") == load("--algorithm", request.param)
    return "@", root / "run.toml"


@pytest.fixture(scope="module")
def presets():
    return {name: load("--algorithm", name) for name in EXPECTED}


@pytest.mark.parametrize("later", EXPECTED)
def test_algorithm_flag_over_a_resolved_file_switches_the_preset(resolved, presets, later):
    assert load(*resolved, "--algorithm", later) == presets[later]


def test_algorithm_with_a_key_of_another_loss_raises():
    with pytest.raises(
        ConfigError, match=r"trainer.loss.ratio_clip = 3 .* is not a key of trainer.loss.type = gspo, which"
    ):
        load("--algorithm", "gspo", "--trainer.loss.ratio-clip", 3)


def test_algorithm_unknown_name_raises():
    with pytest.raises(ConfigError, match="algorithm = 'gpso'"):
        load("--algorithm", "gpso")


def test_fixed_normalization_uses_the_seq_len_of_the_orchestrator():
    assert load("--algorithm", "dr_grpo")[1].fixed_length == 2048
    assert load("--algorithm", "dr_grpo", "--seq-len", 512)[1].fixed_length == 512
    lengths = ("--orchestrator.seq-len", 512, "--trainer.model.seq-len", 4096)
    assert load("--algorithm", "dr_grpo", *lengths)[1].fixed_length == 512
    assert load("--trainer.loss.normalization", "fixed", *lengths)[1].fixed_length == 512
    assert load("--algorithm", "dr_grpo", "--trainer.loss.fixed-length", 77, *lengths)[1].fixed_length == 77
    assert load("--algorithm", "gspo", *lengths)[1].fixed_length is None
    by_token = ("--trainer.loss.normalization", "token")
    assert load("--algorithm", "dr_grpo", *by_token, *lengths)[1].fixed_length is None
