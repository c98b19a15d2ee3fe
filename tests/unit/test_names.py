"""Names of durations end in `_seconds` (CONTRIBUTING.md)."""

import ast
from collections.abc import Iterator

from tests.support.sources import SOURCES

WIRE_KEYS = {
    ("prime_rl/liveness/heartbeat_monitor.py", "phase_deadline_s"),  # heartbeat files
    ("prime_rl/rollouts/clients/inference_client.py", "stage_s"),  # the inference server's answers
    ("prime_rl/rollouts/clients/inference_client.py", "pause_s"),
    ("prime_rl/rollouts/clients/inference_client.py", "load_s"),
    ("prime_rl/storage/weights/transfer_channel.py", "timeout_s"),  # manifests of versions
}
"""Fields whose names are keys of a file or of a reply, by module."""


def defined_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def test_names_of_durations_end_in_seconds():
    found = {
        (path, name)
        for path, file in SOURCES.items()
        for name in defined_names(ast.parse(file.read_text()))
        if name.lower().endswith("_s")
    }
    assert found == WIRE_KEYS
