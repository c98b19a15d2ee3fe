import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prime_rl.storage import batch as batch_files
from prime_rl.storage.artifact import ArtifactError
from prime_rl.storage.batch import ROWS_FILE, SHOWN_FILE, TRAIN_FILE, Batch, delete_rows, read_batch, write_batch
from prime_rl.storage.paths import RunPaths


def make_batch(seq_lens=((3, 2), (4,))) -> Batch:
    """Rows of samples of the given lengths; all but the first token of each sample is trained on."""
    lengths = [n for row in seq_lens for n in row]
    tokens = sum(lengths)
    mask = np.ones(tokens, np.uint8)
    mask[np.cumsum(lengths) - lengths] = 0
    return Batch(
        tokens=np.arange(tokens, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.full(tokens, -0.5, np.float32),
        advantages=np.ones(tokens, np.float32),
        versions=np.where(mask == 1, 4, -1).astype(np.int32),
        temperature=np.ones(tokens, np.float32),
        segment_ids=np.concatenate([np.repeat(np.arange(len(r)), r) for r in seq_lens]).astype(np.int32),
        row_offsets=np.cumsum([0, *(sum(r) for r in seq_lens)]).astype(np.int64),
        row_cost=np.array([sum(r) for r in seq_lens], np.float32),
        seq_lens=np.array(lengths, np.int32),
        sample_group=np.arange(len(lengths), dtype=np.int64),
        sample_rollout=np.zeros(len(lengths), np.int32),
    )


def test_batch_round_trip_keeps_every_array(tmp_path):
    batch = replace(make_batch(), sources={"env/a": [0, 2], "env/b": [1]})
    write_batch(tmp_path / "step_5", batch, {"branch": 0, "step": 5, "async_level": 2, "sources": batch.sources})
    save_file({"logprobs": np.zeros(5, np.float32)}, tmp_path / "step_5" / TRAIN_FILE)  # what the trainer adds
    read, manifest = read_batch(tmp_path / "step_5", step=5)
    for field in Batch.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(read, field), getattr(batch, field))
    assert (manifest["min_version"], manifest["loss_tokens"], manifest["sequences"]) == (4, 6, 3)
    assert manifest["group_ids"] == [0, 1, 2]
    with pytest.raises(ArtifactError, match="holds step 5, not 6"):
        read_batch(tmp_path / "step_5", step=6)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("loss_mask", np.ones(9, np.uint8), "first token"),
        ("logprobs", np.zeros(9, np.float64), "logprobs is float64"),
        ("advantages", np.zeros(8, np.float32), "advantages has shape"),
        ("row_offsets", np.array([0, 4, 9], np.int64), "seq_lens do not divide"),
        ("segment_ids", np.zeros(9, np.int32), "segment_ids are not the indices"),
        ("segment_ids", np.arange(9, dtype=np.int32), "segment_ids are not the indices"),
        ("segment_ids", make_batch().segment_ids + np.int32(1), "segment_ids are not the indices"),
    ],
)
def test_validate_names_the_invalid_array(field, value, message):
    batch = make_batch()
    object.__setattr__(batch, field, value)
    with pytest.raises(ValueError, match=message):
        batch.validate()


def test_validate_refuses_an_empty_row():
    batch = make_batch()
    object.__setattr__(batch, "row_offsets", np.insert(batch.row_offsets, 1, batch.row_offsets[1]))
    object.__setattr__(batch, "row_cost", np.append(batch.row_cost, np.float32(0)))
    with pytest.raises(ValueError, match="row_offsets do not divide the tokens into non-empty rows"):
        batch.validate()


@pytest.mark.parametrize(
    ("max_gap", "rewards", "groups", "place"),
    [
        (1, None, [0, 1], [3, 4, 9, 10]),  # the second and the fourth sample
        (4096, None, [0, 1], [3, 4, 9, 10]),
        (1, [0.5, 0.5, 0.0, 0.5, 1.0], [2, 4], [0, 1, 2, 11, 12]),
    ],
)
def test_deleted_rows_leave_the_tokens_of_groups_of_extreme_reward(
    tmp_path, monkeypatch, max_gap, rewards, groups, place
):
    """They are read at once, or in a part for each sample where these are far from each other."""
    monkeypatch.setattr(batch_files, "MAX_SHOWN_TOKENS", len(place))
    monkeypatch.setattr(batch_files, "_MAX_GAP", max_gap)
    batch = replace(make_batch(((3, 2), (4,), (2, 2))), sample_group=np.array([2, 0, 3, 1, 4], np.int64))
    paths = RunPaths(tmp_path)
    if rewards is not None:
        rows = [{"group_id": group, "reward": reward, "messages": []} for group, reward in enumerate(rewards)]
        paths.samples_dir.mkdir()
        paths.samples(0).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    folder = paths.rollouts(0)
    write_batch(folder, batch, {"branch": 0, "step": 0, "async_level": 2})
    values = np.arange(len(batch.tokens), dtype=np.float32)
    save_file({"entropy": values}, folder / TRAIN_FILE)
    delete_rows(paths, below=1)
    shown = load_file(folder / SHOWN_FILE)
    assert sorted(shown["sample_group"].tolist()) == groups
    np.testing.assert_array_equal(shown["tokens"], batch.tokens[place])
    np.testing.assert_array_equal(shown["train.entropy"], values[place])
    (folder / ROWS_FILE).write_bytes(b"damaged")
    (folder / SHOWN_FILE).unlink()
    delete_rows(paths, below=1)
    assert sorted(file.name for file in folder.iterdir()) == ["manifest.json", TRAIN_FILE]


def test_delete_rows_keeps_manifests_and_wanted_rows_and_skips_deleted_steps(tmp_path, monkeypatch):
    """A long run deletes rows at every checkpoint and must not visit deleted steps again."""
    paths, asked = RunPaths(tmp_path), []
    for step in range(6):
        write_batch(paths.rollouts(step), make_batch(), {"branch": 0, "step": step, "async_level": 2})
    delete_rows(paths, below=2)
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda file, **options: (asked.append(file), unlink(file, **options)))
    delete_rows(paths, below=5, first=2, keeps=lambda step: step == 3)
    assert asked == [paths.rollouts(step) / ROWS_FILE for step in (2, 4)]
    left = [(paths.rollouts(step) / ROWS_FILE).exists() for step in range(6)]
    assert left == [False, False, False, True, False, True]
    assert all((paths.rollouts(step) / "manifest.json").exists() for step in range(6))
