"""The trainer's values of each token on disk, aligned with the rows of the batch."""

import dataclasses
import errno
import os
import threading

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

from prime_rl.configs.trainer import TokenExportConfig
from prime_rl.storage.batch import ROWS_FILE, TRAIN_FILE, read_batch
from prime_rl.storage.paths import RunPaths
from prime_rl.trainer.losses.loss_inputs import LossInputs, LossOutput
from prime_rl.trainer.micro_batch import make_micro_batch
from prime_rl.trainer.rl.token_export import FORMAT, NAMES, TokenExporter
from prime_rl.trainer.train_step import Counts, ScoredRow
from tests.support.command import until
from tests.unit.trainer.test_rl_train import STEPS, base_arguments, metrics_of, run, ship


@pytest.fixture(scope="module")
def roots(tiny, tmp_path_factory):
    """Train the same batches on one rank and on two."""
    found, keep = {}, ("--token-export.keep-last", "1", "--ckpt.interval", "1", "--ckpt.keep-last", "1")
    for ranks, more in ((1, ()), (2, keep)):
        found[ranks] = tmp_path_factory.mktemp(f"ranks{ranks}")
        ship(found[ranks])
        code, error = run(base_arguments(tiny, found[ranks], "--token-export.interval", "2", *more), ranks)
        assert code == 0, error
    return found


def test_export_is_aligned_with_the_rows_and_gives_the_metrics(roots):
    paths = RunPaths(roots[1])
    for step in (0, 2):
        batch, _ = read_batch(paths.rollouts(step), step)
        values, metrics = load_file(paths.rollouts(step) / TRAIN_FILE), metrics_of(roots[1])[step]
        mask = batch.loss_mask != 0
        assert {name: (str(value.dtype), len(value)) for name, value in values.items()} == {
            name: ("uint8" if name in ("clipped", "masked") else "float32", len(batch.tokens)) for name in NAMES
        }
        assert not any(value[~mask].any() for value in values.values())
        assert (values["logprobs"][mask] < 0).all()
        np.testing.assert_allclose(values["ratio"][mask], np.exp(values["logprobs"] - batch.logprobs)[mask], rtol=1e-4)
        means = {"logprob/mean": "logprobs", "entropy": "entropy", "importance_ratio/mean": "ratio"}
        means |= {"importance_ratio/clipped": "clipped", "importance_ratio/masked": "masked"}
        for metric, name in means.items():
            assert values[name][mask].mean(dtype=np.float64) == pytest.approx(metrics[metric], rel=1e-4, abs=1e-7)
        with safe_open(paths.rollouts(step) / TRAIN_FILE, "numpy") as file:
            assert file.metadata() == {"format": FORMAT, "step": str(step)}


def test_export_does_not_depend_on_the_ranks(roots):
    one, two = (load_file(RunPaths(root).rollouts(2) / TRAIN_FILE) for root in roots.values())
    for name in NAMES:
        np.testing.assert_allclose(two[name], one[name], rtol=1e-3, atol=1e-4)
    for ranks, kept in ((1, [True, False, True]), (2, [False, False, True])):  # the newest exports keep their rows
        folders = [RunPaths(roots[ranks]).rollouts(step) for step in range(STEPS)]
        assert [(folder / TRAIN_FILE).exists() for folder in folders] == kept
        assert [(folder / ROWS_FILE).exists() for folder in folders] == kept
        assert all((folder / "manifest.json").exists() for folder in folders)


def score(positions, logprob, rl_weight=1.0):
    count = len(positions)
    mask = np.arange(count) > 0
    row = make_micro_batch(np.zeros(count), mask, [count], positions=np.array(positions))
    row = dataclasses.replace(row, rl_weights=torch.full((count,), rl_weight))
    logprobs, off = torch.full((count,), logprob), torch.zeros(count, dtype=torch.bool)
    scored = ScoredRow(row, logprobs, torch.ones(count), True, Counts(1))
    used = row.loss_mask & (rl_weight != 0)
    inputs = LossInputs(logprobs, row.sampler_logprobs, row.advantages, used, row.segment_ids)
    return scored, inputs, LossOutput(torch.zeros(count), off, ~off, off)


def export(exporter, steps):
    for step in steps:
        exporter.start_step(step)
        exporter.add(*score([3, 4], -1.0))
        exporter.add(*score([0, 1, 2], -2.0))
        exporter.finish_step(step, 5)


@pytest.fixture
def folders(tmp_path):
    paths = RunPaths(tmp_path)
    for step in range(8):
        paths.rollouts(step).mkdir(parents=True)
        (paths.rollouts(step) / ROWS_FILE).touch()
    return paths


def files(paths, name):
    return [step for step in range(8) if (paths.rollouts(step) / name).exists()]


def test_values_are_at_the_positions_of_their_tokens(folders, world):
    for config in (None, TokenExportConfig()):
        assert files(folders, TRAIN_FILE) == [], "nothing without a configuration"
        exporter = TokenExporter(config, folders, world)
        export(exporter, [0])
        exporter.close()
    values = load_file(folders.rollouts(0) / TRAIN_FILE)
    np.testing.assert_array_equal(values["logprobs"], [0, -2, -2, 0, -1])
    np.testing.assert_array_equal(values["clipped"], [0, 1, 1, 0, 1])
    np.testing.assert_allclose(values["ratio"], [0, np.exp(-2), np.exp(-2), 0, np.exp(-1)], rtol=1e-6)


def test_tokens_that_only_distillation_trains_have_values(folders, world):
    exporter = TokenExporter(TokenExportConfig(), folders, world)
    exporter.start_step(0)
    exporter.add(*score([0, 1, 2], -2.0, rl_weight=0.0))
    exporter.finish_step(0, 3)
    exporter.close()
    values = load_file(folders.rollouts(0) / TRAIN_FILE)
    np.testing.assert_array_equal(values["logprobs"], [0, -2, -2])
    np.testing.assert_allclose(values["ratio"], [0, np.exp(-2), np.exp(-2)], rtol=1e-6)


@pytest.mark.parametrize(
    ("first_needed", "rows"), [(None, [0, 1, 2, 3, 4, 5, 6, 7]), (3, [1, 3, 4, 5, 6, 7]), (99, [1, 3, 4, 5, 6, 7])]
)
def test_rows_of_old_exports_are_deleted_unless_they_are_needed(folders, world, first_needed, rows):
    needed = None if first_needed is None else lambda: first_needed
    exporter = TokenExporter(TokenExportConfig(interval=2, keep_last=2), folders, world, needed)
    for step in range(8):
        export(exporter, [step])  # a slow disk drops exports
        until(lambda newest=step - step % 2: newest in files(folders, TRAIN_FILE), f"the export of step {step}")
    exporter.close()
    assert files(folders, TRAIN_FILE) == [4, 6]
    assert files(folders, ROWS_FILE) == rows
    assert [exporter.keeps_rows(step) for step in (3, 4)] == [False, True]


def test_slow_disk_drops_exports_and_does_not_block(folders, world, monkeypatch):
    write, entered, release = TokenExporter._write, threading.Event(), threading.Event()

    def slow(self, step, table):
        entered.set()
        release.wait()
        write(self, step, table)

    monkeypatch.setattr(TokenExporter, "_write", slow)
    exporter = TokenExporter(TokenExportConfig(interval=1), folders, world)
    export(exporter, [0])
    entered.wait()
    export(exporter, range(1, 8))
    assert exporter.num_dropped == 5
    assert [exporter.keeps_rows(step) for step in range(4)] == [True, True, True, False]
    release.set()
    exporter.close()
    assert files(folders, TRAIN_FILE) == [0, 1, 2]


def test_full_disk_drops_the_export_and_its_rows(folders, world, monkeypatch, said):
    failing = iter([OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])
    original = type(folders.rollouts(0)).write_bytes

    def write_bytes(path, data):
        if (error := next(failing, None)) is not None:
            original(path, data[:10])
            raise error
        return original(path, data)

    monkeypatch.setattr(type(folders.rollouts(0)), "write_bytes", write_bytes)
    exporter = TokenExporter(TokenExportConfig(interval=1), folders, world, lambda: 99)
    export(exporter, [0, 1])
    exporter.close()
    assert (files(folders, TRAIN_FILE), exporter.num_dropped) == ([1], 1)
    assert files(folders, ROWS_FILE) == [1, 2, 3, 4, 5, 6, 7]
    assert list(folders.rollouts(0).iterdir()) == []
    assert any("step 0 is not exported (1 so far): No space left on device" in line for line in said())
