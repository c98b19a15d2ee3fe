"""Runs the training commands of nanochatAquaRat's guide with flags of `rl` (configs/aqua_rat).

    python -m scripts.prime_rl_train --config configs/prime_rl/small_scale.toml --run=first --num_samples=8

`--print` shows the command without running it. Flags that the guide does not have are passed on to `rl`.
"""

import os
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path

from prime_rl.core.entry_point import command
from prime_rl.core.errors import ConfigError

DEFAULT_CONFIG = "configs/prime_rl/default.toml"
WANDB_PROJECT = "nanochat-prime-rl"

KEYS: dict[str, tuple[str, ...]] = {
    "run": ("exp_id",),
    "dtype": ("trainer.model.dtype",),
    "max_new_tokens": ("orchestrator.sampling.max_tokens",),
    "temperature": ("orchestrator.sampling.temperature",),
    "top_k": ("orchestrator.sampling.top_k",),
    "unembedding_lr": ("trainer.optim.unembedding_lr",),
    "embedding_lr": ("trainer.optim.embedding_lr",),
    "matrix_lr": ("trainer.optim.matrix_lr",),
    "weight_decay": ("trainer.optim.weight_decay",),
    "init_lr_frac": ("trainer.scheduler.factor",),
    "num_epochs": ("max_epochs",),
    "save_every": ("ckpt.interval",),
    "eval_every": ("orchestrator.val.interval",),
    "eval_examples": ("orchestrator.val.num_examples",),
    "num_train_examples": ("orchestrator.env.0.args.num_train_examples",),
    "num_eval_examples": ("orchestrator.env.0.args.num_eval_examples", "orchestrator.val.num_examples"),
    "wandb_project": ("wandb.project",),
    "wandb_entity": ("wandb.entity",),
}
"""Keys of `rl` for the flags that only change names."""

COMPUTED = ("config", "source", "learning_rate", "device_batch_size", "examples_per_step", "num_samples")
_ONE_RATE = {
    "optim.type": "adamw",
    "optim.embedding_lr": "None",
    "optim.unembedding_lr": "None",
    "optim.matrix_lr": "None",
    "scheduler.factor": "1",
}
_TRAINER_SHARE = 4  # of the GPUs one in four trains; sampling takes longer


@command
def main() -> None:
    """Translate the command line and run `rl`; of torchrun's processes only the first one does."""
    if {"--help", "-h"} & set(sys.argv):
        print(_help())
        return
    gpus = leave_torchrun(os.environ)
    if gpus == 0:
        return
    arguments = translate(sys.argv[1:], os.environ | _dotenv(), gpus)
    if "--print" in arguments:
        print(shlex.join(["rl", *(word for word in arguments if word != "--print")]))
        return
    from prime_rl.entrypoints.rl import main as run

    sys.argv = ["rl", *arguments]
    run()


def _help() -> str:
    """Return the flags of the guide and the keys of `rl` that they set."""
    keys = KEYS | {"learning_rate": ("trainer.optim.lr",), "device_batch_size": ("trainer.model.seq_len",)}
    keys |= {"num_samples": ("orchestrator.rollouts_per_example",), "examples_per_step": ("orchestrator.batch_size",)}
    keys |= {"config": (f"@ FILE (default {DEFAULT_CONFIG})",), "source": ("only sft",)}
    rows = [f"  --{flag:20} {', '.join(keys[flag])}" for flag in (*COMPUTED, *KEYS)]
    return "\n".join([__doc__ or "", *rows, "", "Other flags are those of `rl`: see `rl --help` and configs/aqua_rat."])


def leave_torchrun(environment: MutableMapping[str, str]) -> int:
    """Return how many processes torchrun starts, 0 in all but the first one, and remove its variables.

    `rl` starts torchrun itself, for the trainer alone. Without torchrun, which sets LOCAL_WORLD_SIZE, its other
    variables have no effect. Raises ConfigError in the first process on several nodes.
    """
    by_torchrun = "LOCAL_WORLD_SIZE" in environment
    ranks = int(environment.get("WORLD_SIZE", "1")) if by_torchrun else 1
    first = not by_torchrun or environment.get("RANK", "0") == "0"
    if first and (nodes := ranks // int(environment.get("LOCAL_WORLD_SIZE", "1"))) > 1:
        hosts, trained = ",".join(f"HOST{node + 1}" for node in range(nodes)), max(1, nodes // _TRAINER_SHARE)
        gpus = ranks // nodes
        raise ConfigError(
            f"torchrun starts {ranks} processes on {nodes} nodes; `rl` starts them itself, on one of the nodes: "
            f"uv run rl @ FILE --nodes {hosts} --inference-nodes {nodes - trained} --inference-gpus {gpus} "
            f"--trainer-gpus {gpus} (docs/deployment.md)"
        )
    if not by_torchrun and (ignored := [name for name in ("RANK", "WORLD_SIZE") if name in environment]):
        print(f"warning: {' and '.join(ignored)} have no effect: torchrun did not start this process", file=sys.stderr)
    for name in list(environment):
        if name.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_", "MASTER_")) or name in (
            "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
        ):  # fmt: skip
            del environment[name]
    return ranks if first else 0


def translate(argv: Sequence[str], environment: Mapping[str, str], gpus: int = 1) -> list[str]:
    """Translate the guide's command line to arguments of `rl`.

    Args:
        argv: the arguments, `--key=value` or `--key value`.
        environment: its WANDB_API_KEY switches W&B on, unless the run is called `dummy` as in nanochat.
        gpus: number of GPUs; with one, those of the configuration are used.

    Raises:
        ConfigError: a flag without a value, an unreadable configuration, a number that is none.
    """
    given, others = _split(argv)
    config = given.get("config", DEFAULT_CONFIG)
    arguments = ["@", config]
    for flag, value in {"run": "prime_rl_default", **given}.items():
        arguments += [word for key in KEYS.get(flag, ()) for word in (f"--{key}", value)]
    if given.get("source", "sft") != "sft":
        raise ConfigError(f"--source={given['source']}: the configuration names a tuned model; set --model.name DIR")
    if "learning_rate" in given:
        rates = {**_ONE_RATE, "optim.lr": given["learning_rate"]}
        arguments += [word for key, value in rates.items() for word in (f"--trainer.{key}", value)]
    arguments += _sizes(given, config)
    if gpus > 1:
        split = gpus - max(1, gpus // _TRAINER_SHARE)
        for role, ids in (("inference", range(split)), ("trainer", range(split, gpus))):
            arguments += [f"--{role}-gpu-ids", ",".join(map(str, ids))]
    if environment.get("WANDB_API_KEY") and given.get("run") != "dummy":
        arguments += ["--wandb", "--wandb.names", "prime"]
        if "wandb_project" not in given and not environment.get("WANDB_PROJECT"):
            arguments += ["--wandb.project", WANDB_PROJECT]
    return [*arguments, *others]


def _split(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Separate the guide's flags from those of `rl`."""
    given: dict[str, str] = {}
    others: list[str] = []
    words = iter(argv[1:] if argv[:1] == ["--"] else argv)
    for word in words:
        flag, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and flag in (*KEYS, *COMPUTED):
            given[flag] = value if equals else _next(words, flag)
        else:
            others.append(word)
    return given, others


def _next(words: Iterator[str], flag: str) -> str:
    value = next(words, None)
    if value is None or value.startswith("--"):
        raise ConfigError(f"--{flag} needs a value, as in --{flag}=VALUE")
    return value


def _sizes(given: Mapping[str, str], config: str) -> list[str]:
    """Compute batch size and tokens per forward pass, of the flags and the configuration."""
    if not given.keys() & {"examples_per_step", "num_samples", "device_batch_size"}:
        return []
    try:
        file = tomllib.loads(Path(config).read_text())
        orchestrator = file["orchestrator"]
        samples = int(given.get("num_samples", orchestrator["rollouts_per_example"]))
        examples = int(
            given.get("examples_per_step", orchestrator["batch_size"] // orchestrator["rollouts_per_example"])
        )
        rows, seq_len = int(given.get("device_batch_size", 0)), int(file["seq_len"])
    except OSError as error:
        raise ConfigError(f"--config {config} cannot be read: {error.strerror}") from None
    except KeyError as error:
        raise ConfigError(f"--config {config} has no {error}, which the sizes of batches need") from None
    except ValueError as error:
        raise ConfigError(f"the sizes of batches are whole numbers: {error}") from None
    sizes = {"orchestrator.batch_size": examples * samples, "orchestrator.rollouts_per_example": samples}
    if rows:
        sizes["trainer.model.seq_len"] = rows * seq_len
    return [word for key, size in sizes.items() for word in (f"--{key}", str(size))]


def _dotenv() -> dict[str, str]:
    from dotenv import dotenv_values

    return {name: value for name, value in dotenv_values(".env").items() if value}


if __name__ == "__main__":
    main()
