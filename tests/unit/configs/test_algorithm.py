"""The preset `algorithm`: the values that it sets, and the sources that override it."""

import typing

import pytest

from prime_rl.configs.algorithm import Algorithm
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


def load_over(file, text, *arguments):
    file.write_text(text)
    return load("@", file, *arguments)


@pytest.mark.parametrize("name", typing.get_args(Algorithm))
def test_algorithm_preset_sets_advantage_and_loss(name):
    advantage, loss = load("--algorithm", name)
    assert (advantage.type, loss.type, loss.normalization, getattr(advantage, "std", None)) == EXPECTED[name]
    if name == "aipo":
        assert (advantage, loss) == load(), "the default"
    if name == "dapo":
        assert (loss.eps_low, loss.eps_high) == (0.2, 0.28)


def test_algorithm_preset_keeps_values_of_the_same_source(tmp_path):
    advantage, loss = load("--algorithm", "gspo", "--trainer.loss.type", "cispo")
    assert (advantage.type, advantage.std, loss.type) == ("grpo", True, "cispo")
    advantage, loss = load_over(tmp_path / "a.toml", 'algorithm = "gspo"\norchestrator.advantage.type = "rloo"')
    assert (advantage.type, loss.type) == ("rloo", "gspo")
    _, loss = load_over(tmp_path / "a.toml", 'algorithm = "gspo"', "--trainer.loss.type", "aipo")
    assert loss.type == "aipo"
    assert load("--algorithm", "grpo", "--trainer.loss.eps-high", 0.28)[1].eps_high == 0.28


def test_algorithm_flag_overrides_the_types_of_a_file_and_keeps_its_keys(tmp_path):
    text = 'trainer.loss = {type = "cispo", eps_high = 5.0, kl.coef = 0.2}\norchestrator.advantage.type = "opo"'
    advantage, loss = load_over(tmp_path / "a.toml", text, "--algorithm", "gspo")
    assert (advantage.type, loss.type) == ("grpo", "gspo")
    assert loss.eps_high == 4e-4  # not CISPO's
    assert loss.kl.coef == 0.2  # of every loss
    text = 'trainer.loss = {type = "gspo", eps_high = 0.1}'
    assert load_over(tmp_path / "a.toml", text, "--algorithm", "gspo")[1].eps_high == 0.1


@pytest.mark.parametrize("earlier", ["dapo", "gspo", "aipo"])
@pytest.mark.parametrize("later", ["dr_grpo", "reinforce++", "gspo"])
def test_algorithm_flag_over_a_resolved_file_switches_the_preset(tmp_path, earlier, later):
    write_config(RLConfig.load(["--algorithm", earlier]), tmp_path / "run.toml")  # names all keys
    assert load("@", tmp_path / "run.toml") == load("--algorithm", earlier)
    assert load("@", tmp_path / "run.toml", "--algorithm", later) == load("--algorithm", later)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--algorithm", "gspo", "--trainer.loss.ratio-clip", 3],
         r"trainer.loss.ratio_clip = 3 .* is not a key of trainer.loss.type = gspo, which"),
        (["--algorithm", "gpso"], "algorithm = 'gpso'"),
    ],
)  # fmt: skip
def test_algorithm_that_does_not_exist_or_lacks_the_key_raises(arguments, message):
    with pytest.raises(ConfigError, match=message):
        load(*arguments)


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
    several = ("--trainer.max-concurrent-runs", 2, "--trainer.model.lora.rank", 4)
    assert load("--algorithm", "dr_grpo", *several, *lengths)[1].fixed_length is None, "each run has its own"
