"""Rules of the source files: names of durations, clocks, dangerous functions, markup, and quoted messages."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sources import SOURCES

TROUBLESHOOTING = (Path(__file__).parents[2] / "docs/troubleshooting.md").read_text()
WIRE_KEYS = {
    ("prime_rl/liveness/heartbeat_monitor.py", "phase_deadline_s"),  # heartbeat files
    ("prime_rl/rollouts/clients/inference_client.py", "stage_s"),  # the inference server's answers
    ("prime_rl/rollouts/clients/inference_client.py", "pause_s"),
    ("prime_rl/storage/weights/transfer_channel.py", "timeout_s"),  # manifests of versions
}
"""Fields whose names are keys of a file or of a reply, by module."""
DANGEROUS = {
    ("pickle",), ("cloudpickle",), ("dill",), ("marshal",), ("shelve",), ("joblib",), ("eval",), ("exec",),
    ("torch", "load"), ("torch", "jit", "load"), ("yaml", "load"), ("yaml", "unsafe_load"),
}  # fmt: skip


@pytest.fixture(scope="module")
def nodes() -> dict[str, list[ast.AST]]:
    """All nodes of each file's syntax tree."""
    return {name: list(ast.walk(ast.parse(file.read_text()))) for name, file in SOURCES.items()}


def dotted(node: ast.AST) -> str:
    """`torch.load` for the function of that call; empty if it is not a name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def defined_names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            yield name


def test_names_of_durations_end_in_seconds(nodes):
    names = {(path, name) for path, of_file in nodes.items() for node in of_file for name in defined_names(node)}
    assert {(path, name) for path, name in names if name.lower().endswith("_s")} == WIRE_KEYS


def test_wall_clock_is_never_used_for_decisions(nodes):
    """It may jump (NTP, a suspended machine): what it says is written down, never compared or subtracted to decide."""
    found = [
        f"{path}:{node.lineno}"
        for path, of_file in nodes.items()
        if "/doctor/" not in path  # shows people how long ago something was written
        for node in of_file
        if isinstance(node, ast.BinOp | ast.Compare | ast.AugAssign)
        for part in ast.iter_child_nodes(node)
        if isinstance(part, ast.Call) and dotted(part.func) in ("time.time", "datetime.now")
    ]
    assert found == []


def imported_or_called(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=module, names=names):
            return [f"{module}.{alias.name}" for alias in names]
        case ast.Call(func=function):
            return [dotted(function)]
        case ast.keyword(arg="allow_pickle", value=value) if ast.unparse(value) != "False":
            return ["pickle"]
    return []


def test_source_uses_neither_pickle_nor_eval(nodes):
    used = {
        (path, tuple(n.split("."))) for path, of_file in nodes.items() for x in of_file for n in imported_or_called(x)
    }
    found = {path for path, parts in used for bad in DANGEROUS if parts[: len(bad)] == bad}
    assert found == {
        "prime_rl/trainer/checkpoints/trainer_state.py",  # torch's checkpoint metadata, read with an allowlist
        "prime_rl_sandbox/jail/jail_child.py",  # runs the model's code in the sandbox
        "prime_rl/api/run_arguments.py",  # functions that a Python program hands to its own run
    }


def test_wandb_tables_of_rollouts_are_plain_text():
    """`wandb.Html` would run a script that a model writes. The page's login form is a constant."""
    for name in SOURCES.keys() - {"prime_rl_page/page_access.py"}:
        assert not re.search(r"\b(Html|Markdown|from_markup|HTMLResponse)\b", SOURCES[name].read_text()), name


def literals(nodes: list[ast.AST]) -> Iterator[str]:
    """The string literals of a file, with "..." for each inserted value."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)


def test_messages_quoted_by_the_troubleshooting_page_exist(nodes):
    """A message may be composed of several literals of one file."""
    texts = ["\n".join(literals(of_file)) for of_file in nodes.values()]
    messages = re.findall(r"^### `(.+)`$", TROUBLESHOOTING, re.MULTILINE)
    parts = {message: [part.strip(" :;,") for part in message.split("...")] for message in messages}
    assert len(messages) > 20
    assert [one for one in messages if not any(all(part in text for part in parts[one]) for text in texts)] == []
