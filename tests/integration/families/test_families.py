"""The rows of docs/reference/models.md are true: each family is tried again, with fewer switches."""

import json
from importlib.util import find_spec

import pytest

from tests.integration.families.trial import ROWS, try_family

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]
ROW_OF = json.loads(ROWS.read_text())
without_torchvision = pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's class imports torchvision")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[without_torchvision] if "qwen3_5" in name else []) for name in ROW_OF]
)
def test_family_does_what_its_row_says(family, tmp_path):
    assert try_family(family, tmp_path, switches=3) == ROW_OF[family]
