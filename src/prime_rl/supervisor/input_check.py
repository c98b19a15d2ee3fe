"""Loads what a run gets from its user before anything starts: environments, data, tokenizer, and functions.

A child process does it, because foreign code may raise, print or exit, and because importing verifiers takes seconds.
The first part of that does not depend on the configuration, so the process is started before the configuration is read.
Another process imports a loss, which needs torch.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from prime_rl.core.api_key import withheld_from_environments
from prime_rl.core.entry_point import ERROR_FILE, command, read_error_file
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.core.import_utils import packages_unlike_the_lock
from prime_rl.liveness.parent_process import die_with_parent

if TYPE_CHECKING:
    from prime_rl.configs.eval import EvalConfig
    from prime_rl.configs.orchestrator import OrchestratorConfig
    from prime_rl.configs.rl import RLConfig
    from prime_rl.configs.synthesize import SynthesizeConfig
    from prime_rl.configs.training.loss import LossConfig

_EARLY_IMPORTS = ("pydantic", "numpy", "openai.types", "anthropic.types")
"""Slow modules that verifiers imports, and that read neither the environment variables nor files of the user."""


class InputCheck:
    """The process that loads the input. Use as a context manager, which starts and ends it."""

    def __init__(self, what: Literal["everything", "imports"] = "everything") -> None:
        self._what = what

    def __enter__(self) -> Self:
        self._child = _Child(self._what)
        return self

    def __exit__(self, *_: object) -> None:
        self._child.end()

    def run(self, config: "RLConfig") -> int:
        """Load the input of the orchestrators and the loss of the trainer.

        Returns the number of training examples of the last orchestrator; 0 if only imports are checked.

        Raises:
            ConfigError: an environment, its data or a function is refused by the process that will use it.
            RunError: a check did not end in time.
        """
        first, *others = config.orchestrators.values()
        count = self.check(first, config.trainer.loss)
        for orchestrator in others:
            self._child.end()
            self._child = _Child(self._what)
            count = self.check(orchestrator)
        return count

    def check(
        self, config: "OrchestratorConfig | EvalConfig | SynthesizeConfig", loss: "LossConfig | None" = None
    ) -> int:
        """Load the input of one command. Returns and raises as `run`."""
        withheld = withheld_from_environments([config.client.api_key_var], config.model_dump())
        limit_seconds = sum(env.start_timeout_seconds for env in config.env)
        self._child.send(config.model_dump(mode="json"), withheld)
        if loss is not None and loss.type == "custom":
            child = _Child("loss")
            try:
                child.send(loss.model_dump(mode="json"), withheld)
                child.result(limit_seconds)
            finally:
                child.end()
        return self._child.result(limit_seconds)


def check_dry_run(config: "RLConfig | OrchestratorConfig | EvalConfig | SynthesizeConfig") -> None:
    """Check what a command gets from its user, without data and models, and not for Slurm, whose nodes have it.

    For a run, says on stderr what works with models of this family. Raises as `InputCheck.run`.
    """
    from prime_rl.configs.eval import EvalConfig
    from prime_rl.configs.rl import RLConfig
    from prime_rl.configs.synthesize import SynthesizeConfig
    from prime_rl.evaluation import offline, synthesis
    from prime_rl.rollouts.environment_id import check_environments
    from prime_rl.supervisor.planning.model_shape import describe_family

    if isinstance(config, RLConfig):
        if (text := packages_unlike_the_lock()) is not None:
            print(f"warning: {text}", file=sys.stderr)
        if (family := describe_family(config.model.name, config.model.revision)) is not None:
            print(f"model {family}", file=sys.stderr)
        if config.slurm is not None:
            return
    with InputCheck("imports") as check:
        match config:
            case EvalConfig():
                offline.check_input(config)
            case SynthesizeConfig():
                synthesis.plan(config)
            case RLConfig():
                for run in config.orchestrators.values():
                    check_environments(run, "orchestrator.")
                check.run(config)
                return
            case _:
                check_environments(config, "")
        if config.env:  # not only benchmarks
            check.check(config)


class _Child:
    """A process that reads values from stdin, and writes a count or an error to a file."""

    def __init__(self, what: str) -> None:
        self._values: dict[str, Any] = {}
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        withheld = withheld_from_environments([], {})
        with (folder / "output").open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "prime_rl.supervisor.input_check", what, str(folder / "result")],
                env={name: value for name, value in os.environ.items() if name not in withheld},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def send(self, values: dict[str, Any], withheld: frozenset[str]) -> None:
        """Start the check of `values`, without the `withheld` environment variables."""
        self._values = values
        environment = {name: value for name, value in os.environ.items() if name not in withheld}
        environment |= {ERROR_FILE: f"{self._folder.name}/error", "CUDA_VISIBLE_DEVICES": ""}
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:  # it has died, which `result` reports
            json.dump({"environment": environment, "values": values}, stdin)

    def result(self, limit_seconds: float) -> int:
        """Wait for the end; return the count. Raises as `InputCheck.run`."""
        folder = Path(self._folder.name)
        try:
            code = self._process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            limit = f"{limit_seconds:g} s (env.start_timeout_seconds)"
            raise RunError(f"the environments did not load within {limit}") from None
        if code == 0 and (result := folder / "result").exists():
            return int(result.read_text())
        if (error := read_error_file(folder / "error")) is not None:
            raise ConfigError(error.message) if error.code == 2 else RunError(error.message)
        lines = [line for line in (folder / "output").read_text(errors="replace").splitlines() if line.strip()]
        said = f": {lines[-1].strip()}" if lines else ""
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        names = ", ".join(env["id"] for env in self._values.get("env", [])) or self._values.get("import_path")
        raise ConfigError(f"{names}: the process that loaded it {how}{said}")

    def end(self) -> None:
        """Kill the process if it has not ended."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._folder.cleanup()


@command
def main() -> None:
    """Check the values on stdin; write a count to the file in the second argument."""
    die_with_parent()
    what, result = sys.argv[1:]
    for module in _EARLY_IMPORTS if what == "everything" else ():
        importlib.import_module(module)
    message = json.load(sys.stdin)
    os.environ.clear()
    os.environ.update(message["environment"])
    values, count = message["values"], 0
    if what == "loss":
        from prime_rl.core.import_utils import check_call, load_function

        key = "trainer.loss.import_path"
        function = load_function(values["import_path"], key)
        check_call(function, 1, values["kwargs"], f"{key} = {values['import_path']!r}")
    elif what == "imports":
        from prime_rl.configs.environment import EnvConfig
        from prime_rl.rollouts.workers.worker_main import check_import

        for env in [*values["env"], *(values.get("eval") or {}).get("env", [])]:
            check_import(EnvConfig.model_validate({key: env[key] for key in EnvConfig.model_fields}))
        chosen = {values.get(block, {}).get("type") for block in ("advantage", "buffer")}
        if chosen & {"custom", "curriculum"}:
            from prime_rl.configs.orchestrator import OrchestratorConfig
            from prime_rl.orchestrator.orchestrator_setup import check_functions

            check_functions(OrchestratorConfig.model_validate(values))
    else:
        from prime_rl.configs.orchestrator import OrchestratorConfig
        from prime_rl.orchestrator.orchestrator_setup import load_input

        count = load_input(OrchestratorConfig.model_validate(values))
    Path(result).write_text(str(count))
    os._exit(0)  # an environment may have left threads


if __name__ == "__main__":
    main()
