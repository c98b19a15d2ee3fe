import json
from pathlib import Path

import pytest
from tests.support.relays import publish_bytes, save_part, ship_bytes

from prime_rl.storage.batch import ROWS_FILE
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.relay.run_files import ArtifactName, RunFiles, listed_files

NOT_OFFERED = [
    "weights/step_3/orchestrator", "checkpoints/step_20", "checkpoints/step_20/trainer", "logs/step_1", "weights/step_",
    "weights/../weights/step_3", "weights/step_3/..", "/weights/step_3", "weights/step_3\n", "weights/step_٣",
]  # fmt: skip


def test_artifact_name_parses_what_it_prints_and_refuses_anything_else():
    for name in ("weights/step_3", "rollouts/step_0", "checkpoints/step_20/orchestrator"):
        assert str(ArtifactName.parse(name)) == name
    for name in NOT_OFFERED:
        with pytest.raises(ValueError, match="not an artifact that a relay offers"):
            ArtifactName.parse(name)


def test_index_lists_complete_artifacts_and_small_files(tmp_path):
    paths, files = RunPaths(tmp_path), RunFiles(RunPaths(tmp_path))
    publish_bytes(tmp_path, 3)
    ship_bytes(tmp_path, 0)
    (ship_bytes(tmp_path, 1) / ROWS_FILE).unlink()
    save_part(tmp_path, 20)
    (paths.weights_dir / ".tmp-step_4-1").mkdir()
    paths.heartbeats_dir.mkdir()
    for name in ("trainer_0", "orchestrator", "inference_node1_8000", "secret"):
        paths.heartbeat(name).write_text(name)
    for name in ("RESUME.json", "STOP.json", "step_20/COMMITTED", "other.json"):
        (paths.checkpoints_dir / name).write_text("{}")
    paths.run_toml.write_text("a = 1")
    index = files.index()
    assert sorted(index.artifacts) == ["checkpoints/step_20/orchestrator", "rollouts/step_0", "weights/step_3"]
    assert index.artifacts["weights/step_3"] == files.listing(ArtifactName("weights", 3)).digest
    assert index.files == {
        "heartbeats/trainer_0.json": "trainer_0",
        "heartbeats/orchestrator.json": "orchestrator",
        "checkpoints/step_20/COMMITTED": "{}",
        "checkpoints/STOP.json": "{}",
        "checkpoints/RESUME.json": "{}",
    }
    assert list(index.files)[-1] == "checkpoints/RESUME.json", "a resume is announced after its checkpoint"


def test_listing_of_a_replaced_artifact_has_its_new_hashes(tmp_path):
    files, name = RunFiles(RunPaths(tmp_path)), ArtifactName("weights", 1)
    publish_bytes(tmp_path, 1, b"old")
    old = files.listing(name)
    (files.path(name) / "model.safetensors").unlink()
    (files.path(name) / "model.safetensors").write_bytes(b"new")
    assert files.listing(name).files["model.safetensors"].hash != old.files["model.safetensors"].hash


def test_hashes_are_forgotten_while_another_thread_adds_some(tmp_path, monkeypatch):
    files = RunFiles(RunPaths(tmp_path))
    for step in (1, 2):
        publish_bytes(tmp_path, step)
    files.listing(ArtifactName("weights", 1))
    exists = Path.exists

    def add_and_look(path):
        files.listing(ArtifactName("weights", 2))
        return exists(path)

    monkeypatch.setattr(Path, "exists", add_and_look)
    files.forget()


FILES = ("../../run.toml", "a/b", ".hidden", "", "manifest.json", "a\x00")


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        *((json.dumps({"files": {file: 1}}), "not the name of a file") for file in FILES),
        *((text, None) for text in ("[]", "{}", '{"files": 3}', '{"files": {"a": null}}', "x")),
    ],
)
def test_manifest_that_is_malformed_or_lists_another_path_is_refused(manifest, message):
    with pytest.raises(ValueError, match=message):
        listed_files(manifest)
