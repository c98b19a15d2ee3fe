"""The commands `sft` and `eval`, and environments, as functions."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prime_rl.api.child_command import ChildCommand
from prime_rl.api.run_arguments import (
    Environment,
    Values,
    code_directory,
    environment_list,
    merge_arguments,
    plain_values,
)
from prime_rl.configs.environment import EvalEnvConfig
from prime_rl.configs.eval import EvalConfig
from prime_rl.configs.loading.base_config import write_config
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.evaluation.eval_results import SUMMARY
from prime_rl.rollouts.environment_id import find_environment
from prime_rl.rollouts.group_attempts import check_arguments, config_errors
from prime_rl.storage.paths import RunPaths, steps_in

_IDENTITY = ("env", "model", "version", "folder", "first_error")
"""Entries of a result of `eval` that are not numbers."""


def sft(
    model: str | os.PathLike[str] | None = None,
    data: str | os.PathLike[str] | Sequence[str] | None = None,
    *,
    config: Values | str | os.PathLike[str] | None = None,
    num_gpus: int = 1,
    **overrides: Any,
) -> Path:
    """Fine-tune a model on data, as the command `sft`, and wait for the end.

    Args:
        model: Hugging Face id or directory; None leaves it to `config`.
        data: `data.name`: a dataset, a file or a folder, or several.
        config: keys of `sft` (nested, or with dots), or a TOML file of them.
        num_gpus: GPUs to train on, or ranks on a CPU.
        overrides: further keys of `sft`, which override those of `config`.

    Returns:
        The directory of the trained model, in Hugging Face format.

    Raises:
        ConfigError, RunError: as `sft`.
    """
    argv, values = merge_arguments(config, {"model.name": model, "data.name": data}, overrides)
    loaded = SFTConfig.load(argv, plain_values(values, code_directory(SFTConfig, argv, values)))
    paths = loaded.run_paths
    file = paths.config("sft")
    write_config(loaded, file)
    if num_gpus == 1:
        ChildCommand("sft", ["@", str(file)], paths).wait()
    else:
        ranks = ["--standalone", f"--nproc-per-node={num_gpus}", "-m", "prime_rl.trainer.sft.train", "@", str(file)]
        ChildCommand("prime_rl.trainer.torchrun", ranks, paths).wait()
    if not (steps := steps_in(paths.weights_dir)):
        raise RunError(f"sft has published no weights in {paths.weights_dir}; log {paths.log('sft')}")
    return paths.weights(steps[-1])


def evaluate(
    env: Environment | Sequence[Environment] | None = None,
    base_url: str | None = None,
    model: str | os.PathLike[str] | None = None,
    *,
    split: str | None = None,
    k: int = 1,
    config: Values | str | os.PathLike[str] | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Evaluate a served model, as the command `eval`, and wait for the end.

    Args:
        env: an environment or a list: id, dict of keys, function that loads one, or a loaded one.
        base_url: the server, `inference` or one with an OpenAI-compatible API.
        model: name of the served model.
        split: passed to load_environment(split=...); None evaluates the environment's evaluation examples.
        k: rollouts of each example, for pass@1 to pass@k.
        config: keys of `eval` (nested, or with dots), or a TOML file of them.
        overrides: further keys of `eval`, which override those of `config`.

    Returns:
        The summary: `reward/mean`, `pass@k`, and others. With several environments or versions the names start with
        `ENVIRONMENT/` or `ENVIRONMENT/VERSION/`.

    Raises:
        ConfigError, RunError: as `eval`.
    """
    given = {"client.base_url": base_url, "model.name": model, "rollouts_per_example": k if k != 1 else None}
    argv, values = merge_arguments(config, given, overrides)
    directory = code_directory(EvalConfig, argv, values)
    if env is not None:
        values["env"] = [_of_split(one, split) for one in environment_list(env, directory)]
    elif split is not None:
        raise ConfigError("evaluate(split=...) selects examples of evaluate(env=...); set env too")
    return _run(EvalConfig.load(argv, plain_values(values, directory)))


def run_evaluation(
    run: RLConfig,
    base_url: str,
    paths: RunPaths,
    env: Environment | Sequence[Environment] | None,
    split: str | None,
    k: int,
    overrides: Values,
) -> dict[str, Any]:
    """Evaluate the policy of a run with its settings; see `evaluate`. The results are written to `paths`."""
    settings = run.orchestrator
    directory = run.run_paths.root / "code"
    if env is None:
        trained = [EvalEnvConfig.from_training(one) for one in settings.env]
        environments = [one.model_dump(mode="json", exclude_defaults=True) for one in trained]
    else:
        environments = environment_list(env, directory)
    values = {
        "output_dir": paths.root,
        "client.base_url": base_url,
        "client.api_key_var": settings.client.api_key_var,
        "model.name": settings.model.name,
        "tokenizer": settings.tokenizer.model_dump(mode="json"),
        "rendering": settings.rendering.model_dump(mode="json"),
        "sampling": settings.sampling.model_dump(mode="json"),
        "seq_len": settings.seq_len,
        "rollouts_per_example": k,
        "env": [_of_split(one, split) for one in environments],
        **overrides,
    }
    return _run(EvalConfig.load([], plain_values(values, directory)))


def load_environment(env_id: str, **args: Any) -> Any:
    """Load an environment as the processes of a run do, and return the verifiers object.

    It can be changed (`env.rubric.add_reward_func(...)`) and passed to `Run(env=...)`.

    Args:
        env_id: `name`, `owner/name@version`, or the path of a Python file.
        args: arguments of its load_environment().

    Raises:
        ConfigError: it is not installed, cannot be imported, rejects its arguments, or is a v1 taskset.
    """
    found = find_environment(env_id)
    with config_errors(f"environment {env_id!r} cannot be imported"):
        module = found.load()
    if not hasattr(module, "load_environment"):
        raise ConfigError(
            f"environment {env_id!r} has no load_environment(); if it is a v1 taskset, pass its id to Run(env=...) or "
            "evaluate(...) instead of loading it"
        )
    with config_errors(f"environment {env_id!r} with arguments {args} does not load"):
        check_arguments(module.load_environment, args, env_id)
        environment = module.load_environment(**args)
    if not getattr(environment, "env_id", True):
        environment.env_id = found.module  # its name in metrics
    return environment


def _run(config: EvalConfig) -> dict[str, Any]:
    paths = config.run_paths
    write_config(config, paths.config("eval"))
    ChildCommand("eval", ["@", str(paths.config("eval"))], paths).wait()
    results = json.loads((paths.evals_dir / SUMMARY).read_text())
    summaries = [{key: value for key, value in result.items() if key not in _IDENTITY} for result in results]
    if len(results) == 1:
        return summaries[0]
    names = [result["env"] + (f"/{v}" if (v := result["version"]) is not None else "") for result in results]
    return {f"{name}/{key}": value for name, one in zip(names, summaries, strict=True) for key, value in one.items()}


def _of_split(env: dict[str, Any], split: str | None) -> dict[str, Any]:
    return env if split is None else {**env, "args": {**env.get("args", {}), "split": split}}
