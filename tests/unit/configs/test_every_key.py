"""Every key of every command is read by the code, or reported as a key without effect."""

import functools
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from prime_rl.configs.eval import EvalConfig
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.synthesize import SynthesizeConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.core.errors import ConfigError
from prime_rl.loading.base_config import BaseConfig
from prime_rl.loading.command_line import CommandLine
from prime_rl.loading.diagnostics import keys_without_effect
from prime_rl.loading.provenance import ConfigState
from prime_rl.loading.root_config import RootConfig
from prime_rl.loading.schema import Kind, Node, dotted, flag, nodes_of, tag_of
from tests.support.config_readers import Readers

ROOTS = (EvalConfig, InferenceConfig, OrchestratorConfig, RLConfig, SFTConfig, SynthesizeConfig, TrainerConfig)
ROLES = ("trainer", "orchestrator", "inference")
NEEDS = {"eval": "--env.id a", "rl": "--inference", "sft": "--max-steps 9"}
"""Arguments without which a command is invalid."""
NODES = "--@parallel.dp 4 --@parallel.dp-local 1 --@parallel.address a"
BESIDE = {
    r"--eval\.": "--@eval.env.id a",
    r"--eval\.(base-url|hold-timeout-seconds)": "--@eval.mode pinned",
    r"--eval\.rollouts-per-prompt": "--@eval.benchmarks gsm8k",
    r"--advantage\.type custom": "--@advantage.import-path a:b",
    r"--loss\.type custom": "--@loss.import-path a:b",
    r"--scheduler\.type (linear|cosine)": "--@max-steps 9",
    r"--data\.loss-mask\.assistant": "--data.loss-mask.user",
    r"--(steps|eval-base-model)$": "--weights-dir a",
    r"--ckpt\.keep-interval": "--@ckpt.keep-last 1",
    r"--oversampling": "--@max-off-policy-steps 4",
    r"--bench-steps": "--bench",
    r"--relay\.(api-key-var|timeout-seconds)": "--@relay.urls http://a:1",
    r"--env\.rewards\.(weight|name|kwargs)": "--@env.rewards.import-path a:b",
    r"--eval\.env\.rewards\.(weight|name|kwargs)": "--@eval.env.rewards.import-path a:b",
}
"""Arguments that a key needs to be valid or to have an effect; @ is the prefix of the process under `rl`."""
TOGETHER = {
    r"--parallel\.start-rank": f"{NODES} --@parallel.headless",
    r"--parallel\.headless": f"{NODES} --@parallel.start-rank 1",
    r"--data\.prompt-column": "--data.completion-column a",
    r"--data\.completion-column": "--data.prompt-column a",
}
"""Arguments that are only valid together with the key."""
BESIDE_IN_RL = {
    r"weight-broadcast\.type ipc": "--trainer-gpu-ids 0",
    r"trainer\.model\.(dp-replicate|tp|ep|reshard-ranks)": "--trainer-ranks 2",
    r"inference\.parallel\.tp": "--inference-gpus 2 --inference.parallel.dp None",
}
REFUSED = {
    "sampling.repetition_penalty": "not supported",
    "env.weight": "env.num_examples sets",
    "model.seq_len": "data.seq_len",
    "orchestrator.clean": "`rl` has the key clean",
    "inference.parallel.start_rank": "docs/several_nodes.md",
    "inference.parallel.headless": "docs/several_nodes.md",
}
"""Keys that accept only their default, by suffix, with a part of the error."""


@dataclass(frozen=True)
class Leaf:
    """A key that holds a value, and the arguments that switch on the variants of blocks that it lies in."""

    path: tuple[str, ...]
    node: Node
    context: tuple[str, ...]


def leaves(models: Sequence[type[BaseConfig]], path: tuple[str, ...] = (), context: tuple[str, ...] = ()):
    for model in models:
        here = (*context, flag((*path, "type")), tag_of(model)) if len(models) > 1 else context
        for name, node in nodes_of(model).items():
            if node.variants:
                yield from leaves(node.variants, (*path, name), here)
            elif name != "type":
                yield Leaf((*path, name), node, here)


def load(root: type[RootConfig], argv: Sequence[str]) -> RootConfig:
    state = ConfigState(root)
    state.apply(CommandLine(root, argv).flags)
    return root.build(state)


def other_values(leaf: Leaf, value: Any) -> Iterator[str]:
    """Values that differ from `value`, as they are typed; not all of them are valid."""
    choices = [choice for option in _options(leaf.node.field.annotation) for choice in option]
    if leaf.node.kind is Kind.FLAG:
        yield "false" if value else "true"
    elif leaf.node.kind is Kind.MAPPING:
        yield "{'top_k': 3}"
    elif choices:
        yield from (str(choice) for choice in choices if choice != value)
    elif isinstance(value, int | float):
        yield from (str(other) for other in (value + 1, value * 2, value / 2, value - 1, 1e-7) if other != value)
    else:
        yield from ("2", "1", "0.5", "package.module:name", "x", "['x']", "x,y", str(2**30))


def _options(annotation: Any) -> Iterator[tuple[Any, ...]]:
    if typing.get_origin(annotation) is Literal:
        yield typing.get_args(annotation)
    else:
        for part in typing.get_args(annotation):
            yield from _options(part)


def flat(value: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Values by path; of a list of blocks the first."""
    if isinstance(value, list) and value and isinstance(value[0], BaseConfig):
        value = value[0]
    if isinstance(value, BaseConfig):
        return {k: v for name in type(value).model_fields for k, v in flat(getattr(value, name), (*path, name)).items()}
    return {path: value}


@functools.cache
def values(root: type[RootConfig], argv: tuple[str, ...]) -> dict[tuple[str, ...], Any]:
    """Values by path of the command with these arguments, which most keys share."""
    return flat(load(root, argv))


def is_read(config: RootConfig, path: tuple[str, ...], readers: Readers) -> bool:
    block: Any = config
    for part in path[:-1]:
        block = getattr(block, part)
        block = block[0] if isinstance(block, list) else block
    command = path[0] if config.command == "rl" and path[0] in ROLES else config.command
    return readers.has(type(block), path[-1], readers.reachable(f"prime_rl.entrypoints.{command}"))


def problem(root: type[RootConfig], leaf: Leaf, readers: Readers) -> str | None:
    """Set one key to another valid value and return what is wrong with it, or None."""
    argv, together = _arguments(root, leaf)
    before = values(root, tuple(argv))
    refusals = []
    for text in other_values(leaf, before.get(leaf.path)):
        try:
            config = load(root, [*argv, *together, flag(leaf.path), text])
        except ConfigError as error:
            refusals.append(str(error))
            continue
        if any(_covers(found, leaf.path) for found, _ in keys_without_effect(config)):
            return None
        changed = [path for path, value in flat(config).items() if before.get(path, ()) != value]
        if together:
            changed = [leaf.path]
        return None if any(is_read(config, path, readers) for path in changed) else f"= {text} has no reader"
    expected = [part for key, part in REFUSED.items() if dotted(leaf.path).endswith(key)]
    if expected and expected[0] in refusals[0]:
        return None
    return f"takes no other value: {refusals[0]}"


def _arguments(root: type[RootConfig], leaf: Leaf) -> tuple[list[str], list[str]]:
    """What is typed before the key itself, and what only together with it."""
    role = f"{leaf.path[0]}." if root is RLConfig and leaf.path[0] in ROLES else ""
    typed = " ".join((*leaf.context, flag(leaf.path)))

    def needed(by_pattern: dict[str, str]) -> list[str]:
        inside = typed.replace(role, "") if role else typed
        texts = [text for pattern, text in by_pattern.items() if re.search(pattern, inside)]
        return " ".join(texts).replace("@", role).split()

    always = NEEDS.get(root.command, "").split()
    in_rl = [text for pattern, text in BESIDE_IN_RL.items() if root is RLConfig and re.search(pattern, typed)]
    return [*always, *needed(BESIDE), *" ".join(in_rl).split(), *leaf.context], needed(TOGETHER)


def _covers(found: str, path: tuple[str, ...]) -> bool:
    """Whether a warning is about a key, or about a block around it."""
    named = [part for part in found.split(".") if not part.isdigit()]
    return named == list(path[: len(named)])


@pytest.fixture(scope="module")
def readers() -> Readers:
    return Readers()


@pytest.mark.slow
@pytest.mark.parametrize("root", ROOTS)
def test_every_key_has_a_reader_or_is_reported(root, readers):
    problems = {dotted(leaf.path): problem(root, leaf, readers) for leaf in leaves((root,))}
    assert {key: why for key, why in problems.items() if why} == {}


class _Inner(BaseConfig):
    timeout: float = 1.0
    """As keys of many other blocks are called, which are read."""


class _WithUnreadKeys(TrainerConfig):
    num_never_read: int = 1
    inner: _Inner = _Inner()


@pytest.mark.slow
def test_readers_find_a_key_without_a_reader(readers):
    problems = {dotted(leaf.path): problem(_WithUnreadKeys, leaf, readers) for leaf in leaves((_WithUnreadKeys,))}
    assert {key for key, why in problems.items() if why} == {"num_never_read", "inner.timeout"}
