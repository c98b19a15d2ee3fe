"""The commands start without torch, and explain in one line how to install it."""

import subprocess
import sys

import pytest

from prime_rl.core import import_utils
from prime_rl.core.errors import ConfigError


def test_missing_torch_exits_with_one_line_that_names_the_command(monkeypatch):
    monkeypatch.setattr(import_utils, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="uv sync --extra cpu") as caught:
        import_utils.require_packages("torch")
    assert "\n" not in str(caught.value)


def test_invalid_keys_exit_before_torch_is_imported():
    code = (
        "import sys; sys.argv = ['trainer', '--no-such-key', '1']\n"
        "from prime_rl.entrypoints import sft, trainer\n"
        "try:\n    trainer.main()\nexcept SystemExit as end:\n    print(end.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["2", "False"]
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
