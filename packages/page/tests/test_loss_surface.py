"""The file of the loss surface, and the command that writes it."""

import pytest

from prime_rl.core.errors import ConfigError
from prime_rl.storage.paths import RunPaths
from prime_rl_page import loss_measurement
from prime_rl_page.loss_surface import LossSurface, read_loss_surface, write_loss_surface
from prime_rl_page.loss_surface_command import _main


def test_loss_surface_is_kept_and_shows_the_path_of_the_versions(tmp_path):
    paths = RunPaths(tmp_path)
    assert read_loss_surface(paths) is None
    surface = LossSurface([0, 1], [0, 1], [[1.0, 2.0], [3.0, 4.0]], [(1, 0.5, 0.5), (2, 1.0, 0.0)])
    write_loss_surface(paths, surface)
    contour, path = read_loss_surface(paths).figure()["data"]
    assert (contour["type"], contour["z"]) == ("contour", [[1.0, 2.0], [3.0, 4.0]])
    assert (path["x"], path["y"], path["text"]) == ([0.5, 1.0], [0.5, 0.0], ["v1", "v2"])
    for damaged in ('{"x": [0]', '{"x": [0, 1], "y": [0], "losses": [[1]], "path": []}'):
        paths.loss_surface.write_text(damaged)
        assert read_loss_surface(paths) is None


def test_loss_surface_command_writes_the_file_of_the_page(tmp_path, monkeypatch, capsys):
    asked = []
    surface = LossSurface([0, 1], [0, 1], [[1.0, 2.0], [3.0, 4.0]], [(1, 0.5, 0.5)])
    monkeypatch.setattr(loss_measurement, "measure_loss_surface", lambda paths, batch: asked.append(batch) or surface)
    _main([str(tmp_path), "--batch", "3"])
    assert asked == [3] and read_loss_surface(RunPaths(tmp_path)) == surface
    assert f"`uv run page {tmp_path}` shows it" in capsys.readouterr().out


def test_loss_surface_command_without_a_run_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer.toml does not exist; the loss surface needs"):
        _main([str(tmp_path)])
