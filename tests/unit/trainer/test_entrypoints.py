"""The commands start without torch, and say in one line how to get it."""

import subprocess
import sys

import pytest

from prime_rl.entrypoints import needs
from prime_rl.errors import ConfigError


def test_missing_torch_is_one_line_that_names_the_command(monkeypatch):
    monkeypatch.setattr(needs, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="uv sync --extra cpu") as caught:
        needs.need_torch()
    assert "\n" not in str(caught.value)


def test_bad_keys_are_told_before_torch_is_loaded():
    code = (
        "import sys; sys.argv = ['trainer', '--no-such-key', '1']\n"
        "from prime_rl.entrypoints import sft, trainer\n"
        "try:\n    trainer.main()\nexcept SystemExit as end:\n    print(end.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["2", "False"]
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
