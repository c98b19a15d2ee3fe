"""The README's table and pictures come from the committed results."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme_figures", ROOT / "benchmarks/readme_figures.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_table_equals_the_results(figures):
    table = figures.make_table(json.loads(figures.SIMULATION.read_text()))
    page = figures.README.read_text()
    assert figures.insert_table(page, table) == page, "run benchmarks/readme_figures.py"


def test_table_of_other_results_differs(figures):
    rows = json.loads(figures.SIMULATION.read_text())
    for row in rows:
        row["efficiency"] = 0.5
    assert figures.insert_table(figures.README.read_text(), figures.make_table(rows)) != figures.README.read_text()


def test_page_without_markers_raises(figures):
    with pytest.raises(ValueError, match="no markers"):
        figures.insert_table("# title", "| a |")


def test_pictures_are_drawn_the_same_each_time(figures, tmp_path):
    results = json.loads(figures.REVERSE_TEXT.read_text())
    for name in ("a", "b"):
        figures.draw_reward(results, tmp_path / f"{name}.svg")
        figures.draw_architecture(tmp_path / f"{name}-architecture.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    drawn = (tmp_path / "a-architecture.svg").read_text()
    assert drawn == (tmp_path / "b-architecture.svg").read_text() and "<svg" in drawn
