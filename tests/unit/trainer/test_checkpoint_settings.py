"""Settings that change a resumed run, the timeout of a save, and the wait for the other part of a checkpoint."""

import threading
from types import SimpleNamespace

import pytest

from prime_rl.configs.shared.blocks import CkptConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.core.daemon_futures import start_daemon_future
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.progress import Progress
from prime_rl.storage.wait_for import DeadlineError
from prime_rl.trainer.checkpoints.checkpointer import Checkpointer
from prime_rl.trainer.checkpoints.resume_settings import changed_settings

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
def test_changed_settings_include_blocks_that_were_none(before, now, lines):
    assert changed_settings(dump(**before), dump(**now)) == lines


def test_changed_settings_ignore_unknown_keys():
    older = dump()
    del older["optim"]["weight_decay"]
    assert changed_settings(older, dump(optim={"type": "adamw", "weight_decay": 0.5})) == []


def test_close_with_hanging_disk_raises_at_deadline(tmp_path):
    saver = Checkpointer.__new__(Checkpointer)
    stuck = threading.Event()
    saver._options, saver._directory = CkptConfig(timeout_seconds=0.2), tmp_path
    saver._pending = start_daemon_future(stuck.wait, "checkpoint", exit_wait_seconds=0.2)
    with pytest.raises(
        DeadlineError, match=r"waited 0 s for a checkpoint to be written to .*\(ckpt\.timeout_seconds\)"
    ):
        saver.close()
    for thread in threading.enumerate():
        if thread.name == "checkpoint-end":  # this alone would keep the process from its end
            thread.join(60)
            assert not thread.is_alive()
    stuck.set()
    saver._pending.result(60)
    saver.close()


@pytest.mark.parametrize("trace", ["ledger/branch_0.jsonl", "heartbeats/orchestrator.json", None])
def test_save_at_stop_waits_for_the_part_of_an_orchestrator_that_has_run(tmp_path, monkeypatch, trace):
    """Its ledger may be on another machine: a relay copies the heartbeat only."""
    saver = Checkpointer.__new__(Checkpointer)
    saver._options, saver._paths, saver._saved, saver._pending = CkptConfig(), RunPaths(tmp_path), 0, None
    saver._publishes_versions, saver._waits_for_orchestrator = True, False
    saver.stop_request = SimpleNamespace(is_agreed=True)
    if trace is not None:
        (tmp_path / trace).parent.mkdir()
        (tmp_path / trace).touch()
    waits = []
    monkeypatch.setattr(saver, "_start_save", lambda progress: waits.append(saver._waits_for_orchestrator))
    saver.save_at_stop(Progress(5))
    assert waits == [trace is not None]
