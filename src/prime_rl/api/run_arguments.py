"""From the arguments of `prime_rl.Run` to the configuration of `rl`, and to files that its processes can import.

A function of an installed package, or of a module in the working directory, is named by its import path. Any other one
is written to `code/NAME_HASH.py` of the run directory by cloudpickle: functions of `__main__`, of a notebook, lambdas
and closures by value, with the global variables that they use; functions of other modules by reference. So
the file needs the same Python and the same packages, and a later change of the function does not reach a resumed run.
"""

import base64
import hashlib
import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from keyword import iskeyword
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from prime_rl.configs.loading.provenance import DEFAULT, ConfigState, find_secret
from prime_rl.configs.loading.root_config import RootConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.core.errors import ConfigError, summarize_exception, translate_error, unwritable

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
    agent: Callable[..., Awaitable[Any]] | None,
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
            if agent is not None:
                one.setdefault("agent", agent)
    elif rewards:
        raise ConfigError("Run(reward=...) adds a reward to the environments of Run(env=...); set env too")
    elif agent is not None:
        raise ConfigError("Run(agent=...) is the agent of the environments of Run(env=...); set env too")
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
        name, function = getattr(env, "env_id", None) or type(env).__name__, partial(_same, env)
    return {"id": str(write_code("load_environment", function, directory)), "name": name}


def _same(value: object) -> object:
    return value


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


_TEMPLATE = '''"""{name}, written by prime_rl.Run.

{source}
"""

import base64
import pickle
import sys

sys.path += [folder for folder in {folders!r} if folder not in sys.path]
{name} = pickle.loads(base64.b85decode({payload!r}))
'''


def name_function(function: Callable[..., Any], directory: Path) -> str:
    """Return an import path by which other processes load `function`; writes a file to `directory` if needed.

    Raises:
        ConfigError: the function cannot be pickled, or the file cannot be written.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module and name.isidentifier() and _is_importable(module, name, function):
        return f"{module}:{name}"
    name = re.sub(r"\W", "", getattr(function, "__name__", type(function).__name__))
    name = name if name.isidentifier() and not iskeyword(name) else f"{name}_function"
    return f"{write_code(name, function, directory)}:{name}"


def write_code(name: str, value: Any, directory: Path) -> Path:
    """Write a Python file that defines `name` as `value`, and return its absolute path.

    Raises:
        ConfigError: the value cannot be pickled, it contains a secret, or the file cannot be written.
    """
    try:
        payload = cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - objects may raise anything when they are pickled
        summary = summarize_exception(error, full=True)
        raise ConfigError(
            f"{name} cannot be sent to the processes of the run ({summary}); pass a function that makes it"
        ) from None
    if (variable := find_secret(payload + _source(value).encode())) is not None:
        raise ConfigError(
            f"{name} contains the value of the environment variable {variable}, and code/ is written to disk; read "
            f"os.environ[{variable!r}] inside the function"
        )
    text = _TEMPLATE.format(
        name=name, source=_source(value), folders=_own_folders(), payload=base64.b85encode(payload).decode()
    )
    path = directory.resolve() / f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:8]}.py"
    with translate_error(OSError, unwritable(f"cannot write {path}", "set output_dir to a writable folder")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return path


def program_name() -> str:
    """The name of the calling program: the stem of its script, or `notebook`."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return Path(file).stem if file else "notebook"


def _is_importable(module: str, name: str, function: object) -> bool:
    """Whether the processes of the run find the function in this module: installed, or in the working directory."""
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    if module == "__main__" or file is None or getattr(loaded, name, None) is not function:
        return False
    depth = module.count(".") + (Path(file).name == "__init__.py")
    return Path(file).resolve().parents[depth] in {Path.cwd(), *_installed()}


def _installed() -> set[Path]:
    return {Path(sysconfig.get_path(scheme)).resolve() for scheme in ("stdlib", "purelib", "platlib")}


def _own_folders() -> list[str]:
    """The folders of `sys.path` that other processes may not have, such as that of the script."""
    installed = _installed()
    folders = dict.fromkeys(Path(folder).resolve() for folder in sys.path)
    return [str(folder) for folder in folders if folder.is_dir() and not installed & {folder, *folder.parents}]


def _source(value: Any) -> str:
    """The source of a function, for readers of the file; "" for other values."""
    try:
        source = inspect.getsource(value)
    except (OSError, TypeError):
        return ""
    return source.replace("\\", "\\\\").replace('"""', "'''").rstrip()
