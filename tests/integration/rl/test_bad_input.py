"""Bad input to the real commands: one line of error, exit code 2, and no changed files."""

import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from prime_rl.storage.paths import RunPaths
from tests.integration.rl.conftest import MODEL
from tests.support.command import PROGRESS_TIMEOUT_SECONDS, clean_environment, executable

pytestmark = [pytest.mark.extended, pytest.mark.slow]

FEW_WORDS = ["--orchestrator.env.id", "reverse_text", "--orchestrator.env.args", "{'words': 10}"]


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """An earlier run in `outputs/` of the working directory, where `rl` would put the next."""
    monkeypatch.chdir(tmp_path)
    paths = RunPaths(tmp_path / "outputs")
    files = [paths.rollouts(3) / "manifest.json", paths.weights(4) / "model.safetensors", paths.checkpoint(4) / "x"]
    files += [paths.metrics("trainer"), paths.samples(3), paths.log("trainer"), paths.run_toml]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("earlier")
    (tmp_path / "a_file").write_text("mine")
    return paths


def contents(directory: Path, but: tuple[Path, ...] = ()) -> dict[Path, str]:
    """Every file below `directory`."""
    return {path: path.read_text() for path in directory.rglob("*") if path.is_file() and path not in but}


def refusal(command: str, *arguments: str) -> str:
    """Run a command that must exit with code 2 and one line of error, which is returned."""
    done = subprocess.run(
        [executable(command), *arguments],
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=PROGRESS_TIMEOUT_SECONDS,
    )
    assert done.returncode == 2, done.stderr[-2000:]
    [line] = [line for line in done.stderr.splitlines() if " INFO " not in line and " WARNING " not in line]
    assert line.startswith("error: ")
    return line


def also(*case: list[str] | str) -> ParameterSet:
    """A further case of a test, which starts the same command again."""
    return pytest.param(*case, marks=pytest.mark.extended)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--trainer.optm.lr", "1"], ["--trainer.optm.lr", "--trainer.optim.lr"]),
        also(["--max-steps", "many"], ["max_steps = 'many'", "integer"]),
        also(["@", "nowhere.toml"], ["nowhere.toml does not exist"]),
        also(["--model.name", "configs/no/model"], ["model.name = configs/no/model does not exist"]),
        (["--orchestrator.env.id", "no-such-env"], ["orchestrator.env.0.id = no-such-env", "is not installed"]),
        also(
            ["--orchestrator.batch-size", "10", "--orchestrator.rollouts-per-example", "4"],
            ["batch_size = 10", "rollouts_per_example = 4"],
        ),
        also(["--output-dir", "a_file/run"], ["output_dir = a_file/run cannot be written"]),
        also(
            ["--trainer.async-level", "1", "--orchestrator.async-level", "2"],
            ["trainer.async_level = 1", "orchestrator.async_level = 2", "--async-level"],
        ),
    ],
)
def test_rl_refuses_bad_input_without_changing_files(paths: RunPaths, arguments: list[str], parts: list[str]) -> None:
    before = contents(paths.root.parent)
    line = refusal("rl", *arguments)
    for part in parts:
        assert part in line
    assert contents(paths.root.parent, but=(paths.lock,)) == before


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that is in use."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


LOSS = ["--trainer.loss.type", "custom", "--trainer.loss.import-path"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([*LOSS, "mine.py:los"], ["trainer.loss.import_path", "mine.py has no function 'los'; did you mean loss?"]),
        (["--orchestrator.env.args.word", "1"], ["env.args.word", "did you mean words?"]),
        also(["--orchestrator.env.id", "broken.py"], ["broken.py", "cannot be imported: SyntaxError"]),
        also(["--orchestrator.env.id", "mine.py"], ["mine.py", "defines no load_environment()"]),
        also(["--model.name", "outputs/weights/step_4"], ["is not a model"]),
    ],
)
def test_rl_loads_the_input_before_it_moves_the_earlier_run(
    paths: RunPaths, arguments: list[str], parts: list[str]
) -> None:
    (paths.root.parent / "mine.py").write_text("def loss(inputs):\n    return -inputs.logprobs\n")
    (paths.root.parent / "broken.py").write_text("def load_environment(:\n")
    before = contents(paths.root.parent)
    line = refusal("rl", "--model.name", str(MODEL), *FEW_WORDS, *arguments)
    for part in parts:
        assert part in line
    compiled = paths.root.parent.rglob("*.pyc")
    assert contents(paths.root.parent, but=(paths.lock, *compiled)) == before


def test_rl_refuses_a_port_in_use(paths: RunPaths, taken_port: int) -> None:
    before = contents(paths.root.parent)
    arguments = ["--model.name", str(MODEL), *FEW_WORDS, "--inference.server.port", str(taken_port)]
    assert f"port {taken_port} on 127.0.0.1 is in use" in refusal("rl", *arguments)
    assert contents(paths.root.parent, but=(paths.lock,)) == before


@pytest.mark.extended
def test_rl_reports_a_prompt_that_does_not_fit(tmp_path: Path) -> None:
    """The prompts are rendered before anything starts."""
    arguments = ["--model.name", str(MODEL), *FEW_WORDS, "--seq-len", "8", "--output-dir", str(tmp_path / "run")]
    line = refusal("rl", *arguments)
    assert line.startswith("error: the prompt of example 0 of environment 'reverse_text' has ")
    assert "seq_len = 8" in line


@pytest.mark.extended
def test_rl_on_a_machine_that_cannot_isolate_code_names_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = ["--orchestrator.env.id", "code_tests", "--orchestrator.client.base-url", "http://127.0.0.1:9"]
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to the user of the jail
        bubblewrap = Path(folder, "bwrap")
        bubblewrap.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
        for path in (bubblewrap, bubblewrap.parent):
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        line = refusal("rl", "--model.name", str(MODEL), *environment, "--output-dir", str(tmp_path / "run"))
    assert line.startswith("error: environment 'code_tests' with env.args = {} does not load: the sandbox ")
    assert "No permissions to create new namespace; " in line


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--model.name", "configs/no/model"], "model.name"),
        also(["--output-dir", "a_file/run"], "output_dir = a_file/run cannot be written"),
        also(["--output-dir", "outputs"], "of an earlier run"),
    ],
)
def test_standalone_orchestrator_refuses_bad_input(paths: RunPaths, arguments: list[str], part: str) -> None:
    before = contents(paths.root.parent)
    fixed = ["--model.name", str(MODEL), "--output-dir", "new", "--env.id", "reverse_text", "--env.args.words", "10"]
    assert part in refusal("orchestrator", *fixed, *arguments)
    assert contents(paths.root.parent).items() >= before.items(), "nothing is lost; a log may have been written"
