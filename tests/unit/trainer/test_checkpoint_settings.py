"""Which settings make a resumed run another one."""

import pytest

from prime_rl.configs.trainer import TrainerConfig
from prime_rl.trainer.checkpoints.settings import changes

KL = {"loss": {"type": "grpo", "kl": {"coef": 0.1}}}


def dump(**keys):
    return TrainerConfig(**keys).model_dump(mode="json")


@pytest.mark.parametrize(
    ("before", "now", "lines"),
    [
        ({}, {}, []),
        ({"loss": {"type": "grpo"}}, KL, ["loss.kl was None when the checkpoint was written and is set"]),
        (KL, {"loss": {"type": "grpo"}}, ["loss.kl was set when the checkpoint was written and is None"]),
        ({}, {"model": {"lora": {}}}, ["model.lora was None when the checkpoint was written and is set"]),
        ({}, {"seed": 7}, ["seed was 42 when the checkpoint was written and is 7"]),
        ({}, {"tokenizer": {"name": "t"}}, ["tokenizer.name was None when the checkpoint was written and is 't'"]),
        ({"max_steps": 3}, {"max_steps": 9}, []),
        ({}, {"model": {"ac": {}, "compile": {}, "tp": 2}, "wandb": {}, "ckpt": {}}, []),
    ],
)
def test_what_decides_is_named_blocks_that_are_switched_on_too(before, now, lines):
    assert changes(dump(**before), dump(**now)) == lines


def test_keys_that_one_version_does_not_know_are_equal():
    older = dump()
    del older["optim"]["weight_decay"]
    assert changes(older, dump(optim={"type": "adamw", "weight_decay": 0.5})) == []
