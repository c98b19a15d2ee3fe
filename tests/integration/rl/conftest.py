"""Runs of the real commands on a CPU: the committed small model, batches of 16 short rollouts, steps of a second."""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from prime_rl.liveness.parent_process import become_subreaper
from tests.support.command import Command
from tests.support.server import Server, free_port

MODEL = Path(__file__).parents[3] / "configs/reverse_text/model"
PR_SET_CHILD_SUBREAPER = 36

ORCHESTRATOR: dict[str, Any] = {
    "batch_size": 16,
    "rollouts_per_example": 4,
    "sampling": {"max_tokens": 8},
    "env": [{"id": "reverse_text", "args": {"words": 200}}],
}

StartCommand = Callable[..., Command]


def write_toml(path: Path, values: dict[str, Any]) -> Path:
    """Write a configuration file."""
    path.write_text(tomli_w.dumps(values))
    return path


def rl_values(output_dir: Path, **values: Any) -> dict[str, Any]:
    """The configuration of a small run, without a server unless `inference` is given."""
    return {
        "output_dir": str(output_dir),
        "seq_len": 64,
        "model": {"name": str(MODEL)},
        "trainer": {"optim": {"lr": 1e-3}},  # high, so that versions differ
        "orchestrator": ORCHESTRATOR,
        **values,
    }


def own_server() -> dict[str, Any]:
    """The block `inference` of a run that starts its server itself, on a free port."""
    return {"server": {"port": free_port()}}


def of_server(server: Server) -> dict[str, Any]:
    """The block `client` of an orchestrator that uses `server`."""
    return {"port": int(server.url.rsplit(":", 1)[1])}


@pytest.fixture(scope="package", autouse=True)
def orphans_are_ours() -> Iterator[None]:
    """Orphans of a run become children of this process, where `Command.end` finds them."""
    become_subreaper()
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.fixture
def start() -> Iterator[StartCommand]:
    """Start commands, and kill their processes after a failed test."""
    commands: list[Command] = []

    def _start(name: str, values: dict[str, Any], output_dir: Path, *arguments: str) -> Command:
        file = write_toml(output_dir.parent / f"{output_dir.name}-{name}.toml", values)
        commands.append(Command(name, ["@", str(file), *arguments], output_dir))
        return commands[-1]

    yield _start
    for command in reversed(commands):
        command.clean_up()
