"""docs/troubleshooting.md quotes messages that the source contains, and commands that resolve."""

import ast
import re
from pathlib import Path

import pytest

from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from tests.support.sources import SOURCES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
MESSAGES = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)
LADDER = [re.findall(r"`(--[^`]+)`", row) for row in re.findall(r"^\| \d \|.*$", PAGE, re.MULTILINE)]


def literals(path):
    """The string literals of a file, with "..." for each inserted value."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)


@pytest.fixture(scope="module")
def source():
    return ["\n".join(literals(path)) for path in SOURCES.values()]


@pytest.mark.parametrize("message", MESSAGES)
def test_quoted_message_exists_in_the_source(message, source):
    """A message may be composed of several literals of one file."""
    parts = [part.strip(" :;,") for part in message.split("...")]
    assert any(all(part in text for part in parts) for text in source), f"no message of src/: {message}"


def test_page_has_messages_and_a_ladder():
    assert len(MESSAGES) > 20 and len(LADDER) == 8


@pytest.mark.parametrize("flags", LADDER, ids=lambda flags: flags[0])
def test_flags_of_the_memory_ladder_resolve(flags):
    for flag in flags:
        if not flag.startswith(("--trainer.", "--data.", "--model.")):
            continue
        if flag.startswith("--trainer."):
            value = ["1024"] if flag == "--trainer.model.seq-len" else []
            RLConfig.load(["--trainer-gpus", "2", "--orchestrator.env.id", "reverse_text", *flag.split(), *value])
        else:
            SFTConfig.load(["--device", "cuda", *flag.split()])
