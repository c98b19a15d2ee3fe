"""Paths of the run directory."""

from prime_rl.storage.paths import RunPaths


def test_log_hint_names_a_log_that_exists_only(tmp_path):
    paths = RunPaths(tmp_path)
    assert paths.log_hint("trainer") == "", "started alone, a process has no log file"
    paths.log("trainer").parent.mkdir()
    paths.log("trainer").touch()
    assert paths.log_hint("trainer") == f" (log {tmp_path / 'logs/trainer.log'})"
