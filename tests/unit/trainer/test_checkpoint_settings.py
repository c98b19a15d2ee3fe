"""Which settings make a resumed run another one."""

import threading

import pytest

from prime_rl.configs.shared import CkptConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.run.threads import start
from prime_rl.run.wait import DeadlineError
from prime_rl.trainer.checkpoints import Checkpointer
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


def test_a_save_in_the_background_that_a_hanging_disk_does_not_end_is_told_at_its_deadline(tmp_path):
    saver = Checkpointer.__new__(Checkpointer)
    stuck = threading.Event()
    saver._options, saver._directory = CkptConfig(timeout=0.2), tmp_path
    saver._pending = start(stuck.wait, "checkpoint", stay_s=0.2)
    with pytest.raises(DeadlineError, match=r"waited 0 s for a checkpoint to be written to .*\(ckpt\.timeout\)"):
        saver.close()
    for thread in threading.enumerate():
        if thread.name == "checkpoint-end":  # this alone would keep the process from its end
            thread.join(10)
            assert not thread.is_alive()
    stuck.set()
    saver._pending.result(10)
    saver.close()
