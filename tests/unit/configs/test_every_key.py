"""Every key of every command is read by the code, or reported as a key without effect.

The readers are found with mypy: class and field of each read outside configs/ and loading/.
"""

import ast
import functools
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from mypy import build
from mypy.modulefinder import BuildSource
from mypy.options import Options
from mypy.plugin import AttributeContext, Plugin
from mypy.types import Instance, Type, TypeVarType, UnionType, get_proper_type

from prime_rl.configs.eval import EvalConfig
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.loading.base_config import BaseConfig
from prime_rl.configs.loading.provenance import ConfigState, keys_without_effect
from prime_rl.configs.loading.root_config import RootConfig
from prime_rl.configs.loading.schema import Kind, Node, dotted, flag, nodes_of, tag_of
from prime_rl.configs.loading.sources import CommandLine
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.synthesize import SynthesizeConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.core.errors import ConfigError

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
    r"--buffer\.type curriculum": "--@buffer.import-path a:b",
    r"--scheduler\.type (linear|cosine)": "--@max-steps 9",
    r"--data\.loss-mask\.assistant": "--data.loss-mask.user",
    r"--(steps|eval-base-model)$": "--weights-dir a",
    r"--ckpt\.keep-interval": "--@ckpt.keep-last 1",
    r"--ckpt\.skip-": "--@ckpt.resume-step 1",
    r"--oversampling": "--@max-off-policy-steps 4",
    r"--bench-steps": "--bench",
    r"--max-concurrent-runs": "--@model.lora.rank 8 --@model.lora.publish adapter",
    r"--env\.name": "--@env.id a",
    r"--join": "--exp-id a",
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
    r"--runs|orchestrator\.(optim|scheduler|loss|num-minibatches|model\.lora\.(rank|alpha))$": (
        "--trainer.model.lora.rank 8 --trainer.max-concurrent-runs 2"
    ),
    r"inference\.parallel\.tp": "--inference-gpus 2 --inference.parallel.dp None",
}
REFUSED = {
    "sampling.repetition_penalty": "not supported",
    "ckpt.skip_dataloader": "is for sft",
    "sampling.min_tokens": "not supported",
    "env.weight": "env.num_examples sets",
    "env.type": "needs url",
    "env.url": "needs type",
    "model.seq_len": "data.seq_len",
    "model.router_replay": "is for the RL trainer",
    "orchestrator.clean": "`rl` has the key clean",
    "inference.parallel.start_rank": "docs/deployment.md",
    "inference.parallel.headless": "docs/deployment.md",
}
"""Keys that accept only their default, or need another key beside them, by suffix, with a part of the error."""


SOURCE = Path(__file__).parents[3] / "src"
ANY = "*"
"""Owner of a read by name, if its class is unknown."""
_CONFIGS = "prime_rl.configs."
_BY_KEYWORD = "prime_rl.trainer.losses"
"""Functions that get all keys of their block as keyword arguments."""
_NOT_READERS = ("prepare", "without_effect", "without_effect_alone", "load")


@dataclass(frozen=True)
class Read:
    """`<instance of owner>.field` in a module."""

    owner: str
    field: str
    module: str
    line: int


class Readers:
    """Reads of configuration keys in a source tree."""

    def __init__(self, source: Path = SOURCE) -> None:
        self.files = {_module(source, file): file for file in sorted((source / "prime_rl").rglob("*.py"))}
        self.trees = {module: ast.parse(file.read_text()) for module, file in self.files.items()}
        reads = _reads_by_mypy(source, self.files) | {read for module in self.files for read in self._by_name(module)}
        self._outside = {read for read in reads if not read.module.startswith(_CONFIGS)}
        attributes = {name for module in self.trees if not module.startswith(_CONFIGS) for name in self._names(module)}
        self._through = {read for read in reads - self._outside if self._function_of(read) in attributes}
        self._imports = {module: set(self._imported(module)) for module in self.files}

    @functools.cache  # noqa: B019  one instance per test module
    def reachable(self, start: str) -> set[str]:
        """Return the modules that `start` imports, directly or indirectly, or starts as processes."""
        found, left = set[str](), [start]
        while left:
            module = left.pop()
            if module not in found and module in self.files:
                found.add(module)
                left += self._imports[module]
        return found

    def has(self, owner: type, field: str, modules: set[str]) -> bool:
        """Return whether a module reads `field` of an instance of `owner`, directly or through a method."""
        names = {ANY, *(f"{base.__module__}.{base.__qualname__}" for base in owner.__mro__)}
        return any(
            read.field == field and read.owner in names and (read.module in modules or read in self._through)
            for read in self._outside | self._through
        )

    def _by_name(self, module: str) -> Iterator[Read]:
        """Yield reads by name: `getattr(config, "x")` and `config.model_dump(include={"x"})`."""
        for node in ast.walk(self.trees[module]):
            match node:
                case ast.FunctionDef(args=ast.arguments(kwonlyargs=names)) if module.startswith(_BY_KEYWORD):
                    yield from (Read(ANY, name.arg, module, node.lineno) for name in names)
                case ast.Call(func=ast.Name("getattr"), args=[_, ast.Constant(str(name)), *_]):
                    yield Read(ANY, name, module, node.lineno)
                case ast.Call(func=ast.Attribute(attr="model_dump"), keywords=[ast.keyword("include", ast.Set(names))]):
                    for name in names:
                        if isinstance(name, ast.Constant):
                            yield Read(ANY, name.value, module, node.lineno)

    def _names(self, module: str) -> Iterator[str]:
        for node in ast.walk(self.trees[module]):
            if isinstance(node, ast.Attribute):
                yield node.attr

    def _function_of(self, read: Read) -> str | None:
        """Return the method of a configuration class that contains a read; None for a validator."""
        for node in self._functions(read.module):
            if node.lineno <= read.line <= (node.end_lineno or 0):
                checks = any("validator" in ast.unparse(decorator) for decorator in node.decorator_list)
                return None if checks or node.name in _NOT_READERS else node.name
        return None

    @functools.cache  # noqa: B019
    def _functions(self, module: str) -> list[ast.FunctionDef]:
        return [node for node in ast.walk(self.trees[module]) if isinstance(node, ast.FunctionDef)]

    def _imported(self, module: str) -> Iterator[str]:
        for node in ast.walk(self.trees[module]):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value.split(":")[0]  # the name of a module that is started as a process


def _module(source: Path, file: Path) -> str:
    return ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__")


def _reads_by_mypy(source: Path, files: dict[str, Path]) -> set[Read]:
    options = Options()
    options.incremental, options.cache_dir = False, "/dev/null"
    options.follow_imports, options.ignore_missing_imports = "skip", True  # other packages have none of our classes
    options.mypy_path = [str(source)]
    recorder = _Recorder(options)
    build.build([BuildSource(str(file), module) for module, file in files.items()], options, extra_plugins=[recorder])
    modules = {str(file): module for module, file in files.items()}
    return {Read(owner, field, modules[path], line) for owner, field, path, line in recorder.reads}


def _classes(given: Type) -> list[str]:
    """Return the configuration classes in a type."""
    given = get_proper_type(given)
    if isinstance(given, UnionType):
        return [name for item in given.items for name in _classes(item)]
    if isinstance(given, TypeVarType):
        return _classes(given.upper_bound)
    return [given.type.fullname] if isinstance(given, Instance) and given.type.fullname.startswith(_CONFIGS) else []


class _Recorder(Plugin):
    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.reads = set[tuple[str, str, str, int]]()

    def get_attribute_hook(self, fullname: str) -> Any:
        if not fullname.startswith(_CONFIGS):
            return None

        def record(context: AttributeContext) -> Any:
            declared, _, field = fullname.rpartition(".")
            for owner in _classes(context.type) or [declared]:
                self.reads.add((owner, field, context.api.path, context.context.line))
            return context.default_attr_type

        return record


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
            elif name != "type" or node.optional:
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
        yield from ("{'top_k': 3}", "{'max_num_seqs': 3}", "{'a': 'b'}", "{'a': {}}")
    elif choices:
        yield from (str(choice) for choice in choices if choice != value)
    elif isinstance(value, int | float):
        yield from (
            str(other) for other in (value + 1, value + 2, value * 2, value / 2, value - 1, 1e-7) if other != value
        )
    else:
        yield from ("2", "1", "0.5", "package.module:name", "x", "['x']", "x,y", "http://a:1", "/opt/x", str(2**30))


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
    command = path[0] if config.command_name == "rl" and path[0] in ROLES else config.command_name
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

    always = NEEDS.get(root.command_name, "").split()
    in_rl = [text for pattern, text in BESIDE_IN_RL.items() if root is RLConfig and re.search(pattern, typed)]
    return [*always, *needed(BESIDE), *" ".join(in_rl).split(), *leaf.context], needed(TOGETHER)


def _covers(found: str, path: tuple[str, ...]) -> bool:
    """Whether a warning is about a key, or about a block around it."""
    named = [part for part in found.split(".") if not part.isdigit()]
    return named == list(path[: len(named)])


@pytest.fixture(scope="module")
def readers() -> Readers:
    return Readers()


@pytest.mark.extended
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
@pytest.mark.extended
def test_readers_find_a_key_without_a_reader(readers):
    problems = {dotted(leaf.path): problem(_WithUnreadKeys, leaf, readers) for leaf in leaves((_WithUnreadKeys,))}
    assert {key for key, why in problems.items() if why} == {"num_never_read", "inner.timeout"}
