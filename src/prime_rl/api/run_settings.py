"""From the arguments of `prime_rl.Run` to the configuration of `rl`."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from prime_rl.api.shipped_code import name_function, program_name, write_code
from prime_rl.configs.rl import RLConfig
from prime_rl.core.errors import ConfigError
from prime_rl.loading.provenance import DEFAULT, ConfigState
from prime_rl.loading.root_config import RootConfig

Values = Mapping[str, Any]
"""Keys of `rl`: nested dicts, or keys with dots. Where a key names a function, the value may be a function."""

Environment = str | Values | Callable[..., Any] | object
"""An environment: its id, its keys, a function that loads it, or the loaded environment."""


class PythonRunConfig(RLConfig):
    """The configuration of `rl`, with a server of its own unless `inference` or the address of a server is given."""

    @classmethod
    def prepare(cls, state: ConfigState) -> None:
        """Switch on the server, then complete the values as `rl` does."""
        has_client = any(state.is_set(f"orchestrator.client.{key}") for key in ("base_url", "host", "port"))
        if not state.is_set("inference") and not has_client:
            state.put("inference", {}, DEFAULT)
        super().prepare(state)


def load_run_config(
    model: str | os.PathLike[str] | None,
    env: Environment | Sequence[Environment] | None,
    rewards: Callable[..., float] | Sequence[Callable[..., float]],
    functions: Mapping[str, Callable[..., Any] | None],
    config: Values | str | os.PathLike[str] | None,
    overrides: Values,
) -> RLConfig:
    """Merge the arguments of `Run` over the files, environment variables and defaults of `rl`.

    Raises:
        ConfigError: bad input, as for `rl`; or a function cannot be sent to other processes.
    """
    argv, values = merge_arguments(config, {"model.name": model}, overrides)
    directory = code_directory(RLConfig, argv, values)
    if env is not None:
        values["orchestrator.env"] = environments = environment_list(env, directory)
        for one in environments:
            one["rewards"] = [*one.get("rewards", []), *([rewards] if callable(rewards) else rewards)]
    elif rewards:
        raise ConfigError("Run(reward=...) adds a reward to the environments of Run(env=...); set env too")
    for key, function in functions.items():
        if function is not None:
            values[key] = {"type": "custom", "import_path": function}
    return PythonRunConfig.load(argv, plain_values(values, directory))


def merge_arguments(
    config: Values | str | os.PathLike[str] | None, arguments: Values, overrides: Values
) -> tuple[list[str], dict[str, Any]]:
    """Return the command line and the values of `config`, of the arguments that are not None, and of `overrides`."""
    given = {key: value for key, value in arguments.items() if value is not None}
    if config is None or isinstance(config, Mapping):
        return [], {**(config or {}), **given, **overrides}
    return ["@", os.fspath(config)], {**given, **overrides}


def code_directory(command: type[RootConfig], argv: list[str], values: Values) -> Path:
    """Return the folder for functions in the run directory, which is needed before the whole configuration is loaded.

    Raises:
        ConfigError: a bad file or variable. The later load prints the warnings.
    """
    plain = {key: str(values[key]) for key in ("output_dir", "exp_id") if values.get(key) is not None}
    with redirect_stderr(StringIO()):
        return command.load(argv, plain).output_dir / "code"


def environment_list(env: Environment | Sequence[Environment], directory: Path) -> list[dict[str, Any]]:
    """Return `environment_values` of one environment or of several; functions and objects get different names."""
    values = [environment_values(one, directory) for one in (env if isinstance(env, list | tuple) else [env])]
    names = [value.get("name") for value in values]
    for index, value in enumerate(values):
        if names[index] is not None and names[index] in names[:index]:
            value["name"] = f"{names[index]}_{names[:index].count(names[index]) + 1}"
    return values


def environment_values(env: Environment, directory: Path) -> dict[str, Any]:
    """Return the keys of an environment. A function or object is written to `directory`.

    Raises:
        ConfigError: it cannot be sent to other processes.
    """
    if isinstance(env, str):
        return {"id": env}
    if isinstance(env, Mapping):
        made = environment_values(env["id"], directory) if "id" in env else {}
        return {**made, **{key: value for key, value in env.items() if key != "id"}}
    function: object = env
    if callable(env) and not hasattr(env, "get_dataset"):
        name = getattr(env, "__name__", type(env).__name__)
        name = program_name() if name in ("load_environment", "<lambda>") else name
    else:
        name, function = getattr(env, "env_id", None) or type(env).__name__, _Constant(env)
    return {"id": str(write_code("load_environment", function, directory)), "name": name}


class _Constant:
    """A picklable function that returns one object."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __call__(self) -> object:
        return self._value


def plain_values(values: Values, directory: Path) -> dict[str, Any]:
    """Replace functions by their import paths, and paths by text.

    Raises:
        ConfigError: a function cannot be sent to other processes.
    """
    return {key: _plain(value, directory) for key, value in values.items()}


def _plain(value: Any, directory: Path) -> Any:
    if isinstance(value, Mapping):
        return plain_values(value, directory)
    if isinstance(value, list | tuple):
        return [_plain(inner, directory) for inner in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return name_function(value, directory) if callable(value) else value
