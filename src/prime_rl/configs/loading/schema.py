"""The keys of the models, and the resolution of a given path such as `--trainer.optim.lr`."""

import ast
import difflib
import inspect
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from pydantic.fields import FieldInfo

from prime_rl.configs.loading.base_config import NO_EFFECT, BaseConfig
from prime_rl.core.errors import ConfigError

Path = tuple[str | int, ...]
_OTHER_NAMES = {
    "async_level": "staleness max_staleness",
    "optim.lr": "learning_rate actor_learning_rate",
    "optim.max_norm": "max_grad_norm grad_clip clip_grad",
    "batch_size": "bs train_batch_size rollout_batch_size",
    "model.seq_len": "micro_batch_size micro_train_batch_size per_device_train_batch_size data.seq_len",
    "rollouts_per_example": "group_size num_generations n_samples_per_prompt rollout.n rollout_n k",
    "num_minibatches": "mini_batch_size ppo_mini_batch_size ppo_epochs num_iterations",
    "sampling.max_tokens": "max_new_tokens max_completion_length max_completion_tokens max_response_length",
    "seq_len": "max_length max_seq_length max_prompt_length",
    "loss.kl.coef": "beta kl_beta kl_coef init_kl_coef kl_loss_coef",
    "loss.entropy_coef": "entropy_coeff ent_coef entropy_bonus entropy_loss_coef",
    "loss.eps_low": "epsilon clip_ratio clip_ratio_low eps_clip eps_clip_low",
    "loss.eps_high": "epsilon_high clip_ratio_high eps_clip_high",
    "advantage.type": "adv_estimator advantage_estimator",
    "env.rewards": "reward_funcs reward_fn reward_function custom_reward_function reward",
    "env": "environment train.env",
    "model.name": "model.path model_name_or_path pretrain",
    "model.dtype": "bf16 fp16 dtype",
    "model.ac": "gradient_checkpointing enable_gradient_checkpointing activation_checkpointing",
    "model.lora": "use_peft use_lora peft_config",
    "model.lora.rank": "lora_rank lora_r",
    "max_steps": "steps num_steps total_steps total_training_steps",
    "ckpt.interval": "save_steps save_freq save_interval",
    "ckpt.resume_step": "resume resume_from resume_from_checkpoint resume_mode",
    "eval.interval": "eval_steps eval_interval test_freq",
    "exp_id": "run_name experiment_name",
    "wandb": "report_to logger",
    "wandb.name": "wandb.run_name",
    "log.level": "verbose",
    "data.name": "dataset dataset_name data.path train_files",
    "orchestrator": "orchestrator.train",
    "trainer_gpus": "gpus num_gpus num_train_gpus n_gpus_per_node deployment",
    "inference_gpus": "num_infer_gpus",
    "parallel.tp": "tensor_parallel_size tensor_model_parallel_size",
    "server.port": "port",
}
_OUR_NAMES = {other: key for key, others in _OTHER_NAMES.items() for other in others.split()}
"""Names in TRL, verl, OpenRLHF and prime-rl upstream, and the end of our key, for the hint about an unknown key."""
_MIN_SIMILARITY = 0.7
"""Of the last part of an unknown key to the last part of a known one."""


class Kind(Enum):
    """Kind of value that a key takes on the command line."""

    BLOCK = auto()  # a model, or a union of models with different `type`
    BLOCKS = auto()  # a list of models
    MAPPING = auto()  # a dict with free keys
    LIST = auto()
    FLAG = auto()
    VALUE = auto()


@dataclass(frozen=True, slots=True)
class Node:
    """A key of the schema.

    Attributes:
        kind: type of its value.
        optional: the value can be None.
        variants: models of a block, the default one first.
        metavar: the type, as shown in `--help`.
        field: the pydantic field; None inside a mapping.
    """

    kind: Kind
    optional: bool
    variants: tuple[type[BaseConfig], ...] = ()
    metavar: str = "any"
    field: FieldInfo | None = None

    @property
    def is_union(self) -> bool:
        """Whether the block has variants, selected by its `type`."""
        return len(self.variants) > 1

    @property
    def marks(self) -> dict[str, Any]:
        """Marks that `base_config.common` and `base_config.unused` have set on the field."""
        extra = self.field.json_schema_extra if self.field else None
        return extra if isinstance(extra, dict) else {}

    @property
    def description(self) -> str:
        """The docstring of the key, after `add_descriptions`."""
        text = self.field.description if self.field else None
        return (text or "") + (" (no effect)" if NO_EFFECT in self.marks else "")


ONLY = -1
"""Index of the only entry of a list of blocks, if no index was given."""

FREE = Node(Kind.VALUE, optional=True)
"""A key inside a mapping."""


@cache
def nodes_of(model: type[BaseConfig]) -> dict[str, Node]:
    """Return the keys of a model."""
    return {name: _node_of(field) for name, field in model.model_fields.items()}


def _node_of(field: FieldInfo) -> Node:
    options = _options(field.annotation)
    optional = type(None) in options
    options = tuple(option for option in options if option is not type(None))
    if models := tuple(option for option in options if _is_block(option)):
        default = default_of(field)
        first = default if isinstance(default, type) else type(default)
        return Node(Kind.BLOCK, optional, tuple(sorted(models, key=lambda m: m is not first)), "block", field)
    if set(options) == {bool, int}:
        return Node(Kind.FLAG, optional, (), "true|false|int", field)
    (option,) = options
    origin, args = typing.get_origin(option), typing.get_args(option)
    if origin is list:
        item = _bare(args[0])
        if _is_block(item):
            return Node(Kind.BLOCKS, optional, (item,), "list of blocks", field)
        return Node(Kind.LIST, optional, (), f"{item.__name__},...", field)
    if origin is dict:
        return Node(Kind.MAPPING, optional, (), "{...}", field)
    if origin is Literal:
        return Node(Kind.VALUE, optional, (), "|".join(map(str, args)), field)
    if option is bool:
        return Node(Kind.FLAG, optional, (), "true|false", field)
    return Node(Kind.VALUE, optional, (), option.__name__.replace("Path", "path"), field)


def default_of(field: FieldInfo) -> Any:
    """Return the default of a key; for a block with the defaults of its model, the model itself.

    pydantic compiles the validator of a model when the first instance is constructed, which `--help` does not need.
    """
    factory = field.default_factory
    return factory if _is_block(factory) else field.get_default(call_default_factory=True)


def tag_of(model: type[BaseConfig]) -> str:
    """Return the `type` of a variant of a union."""
    return str(model.model_fields["type"].default)


def normalise(key: str) -> str:
    """Return the snake case spelling of a key."""
    return key.replace("-", "_")


def find(root: type[BaseConfig], parts: Sequence[str | int]) -> tuple[Path, Node] | None:
    """Return the canonical path of a given path, and its node; None if there is no such key.

    An entry of a list of blocks is addressed by its index; without one, the path contains `ONLY`.
    """
    models: tuple[type[BaseConfig], ...] = (root,)
    done: list[str | int] = []
    rest = [normalise(part) if isinstance(part, str) else part for part in parts]
    node = _block(root)
    while rest:
        rest = _unalias(models, rest)
        key = rest.pop(0)
        found = next((nodes_of(model)[str(key)] for model in models if key in model.model_fields), None)
        if found is None:
            return None
        done.append(key)
        node, models = found, found.variants
        if node.kind is Kind.BLOCKS and rest:
            has_index = isinstance(rest[0], int) or rest[0].isdigit()
            done.append(int(rest.pop(0)) if has_index else ONLY)
            node = _block(*models)
        elif node.kind is Kind.MAPPING and rest:
            return (*done, *rest), FREE
    return tuple(done), node


def resolve(root: type[BaseConfig], parts: Sequence[str | int], source: str = "") -> tuple[Path, Node]:
    """Return `find`'s result. Raises ConfigError, which names the source, if there is no such key."""
    found = find(root, parts)
    if found is None:
        is_quoted = any("." in str(part) for part in parts)
        advice = "; remove the quotes around keys with dots" if is_quoted else hint(root, parts)
        raise ConfigError(f"unknown key {dotted(parts)} ({source}){advice}")
    return found


def replace_deprecated(root: type[BaseConfig], parts: Sequence[str | int], value: Any) -> tuple[Any, str]:
    """Return the current spelling of a value, and what to use instead if its key or the value is deprecated."""
    *block, key = (normalise(part) if isinstance(part, str) else part for part in parts)
    for model in resolve(root, block)[1].variants:
        current = model.deprecated.get(str(key), str(key))
        new = model.deprecated_values.get(current, {}).get(value, value) if isinstance(value, str) else value
        if current != key or new != value:
            return new, f"use {current}" + (f" = {new}" if new != value else "")
    return value, ""


def is_alias_prefix(root: type[BaseConfig], parts: Sequence[str | int]) -> bool:
    """Whether `parts` is a prefix of an alias, such as `monitor` of `monitor.wandb`."""
    found, last = find(root, parts[:-1]), normalise(str(parts[-1]))
    variants = found[1].variants if found else ()
    return any(alias.startswith(f"{last}.") for model in variants for alias in model.aliases)


def walk(models: Sequence[type[BaseConfig]], prefix: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield every key with its node, depth first."""
    keys = {name: node for model in reversed(models) for name, node in nodes_of(model).items()}
    for name, node in keys.items():
        yield (*prefix, name), node
        yield from walk(node.variants, (*prefix, name))


@cache
def add_descriptions(model: type[BaseConfig]) -> None:
    """Set the descriptions of all fields to their docstrings.

    pydantic could do it (`use_attribute_docstrings`), but parsing every class adds 0.3 s to the start of each process.
    """
    for name, node in nodes_of(model).items():
        docs = (_docstrings(inspect.getfile(base)).get((base.__name__, name)) for base in model.__mro__[:-3])
        model.model_fields[name].description = next((doc for doc in docs if doc), None)
        for variant in node.variants:
            add_descriptions(variant)


@cache
def _docstrings(file: str) -> dict[tuple[str, str], str]:
    """Return the docstrings of the fields in a source file, by class and field."""
    found = {}
    for block in ast.parse(FilePath(file).read_text()).body:
        if isinstance(block, ast.ClassDef):
            for field, doc in zip(block.body, block.body[1:], strict=False):
                match field, doc:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        found[block.name, name] = inspect.cleandoc(text)
    return found


def dotted(path: Sequence[str | int]) -> str:
    """Return a path as text: `trainer.optim.lr`."""
    return ".".join(str(part) for part in path if part != ONLY)


def flag(path: Sequence[str | int]) -> str:
    """Return a path as a flag: `--trainer.optim.lr`."""
    return "--" + dotted(path).replace("_", "-")


def hint(root: type[BaseConfig], parts: Sequence[str | int]) -> str:
    """Return `; did you mean KEY?` with the known key that is closest to an unknown one, or an empty text.

    Names of other programs come first, then keys that are the whole path in some block (`env.0.id`), with its last
    part, with the same words (`ckpt_interval`), and with a similar last part. Whole paths only choose among these,
    because two keys of one block have similar paths. A key in a block that takes any key (`env.sampling.max_tokns`) is
    proposed only if no block of that name has a similar key (`sampling.max_tokens`).
    """
    names = [normalise(str(part)).lower() for part in parts]
    other = _OUR_NAMES.get(dotted(names[-2:]), _OUR_NAMES.get(names[-1], ""))
    wanted = dotted((*names[:-1], other.rpartition(".")[2] or names[-1]))
    known = list(walk((root,)))
    keys = [dotted(path) for path, _ in known]
    inside = [found for path, node in known if node.variants and (found := find(root, (*path, *names)))]
    similar = [key for key in keys if _similarity(key.rpartition(".")[2], names[-1]) >= _MIN_SIMILARITY]
    candidates = (
        [key for key in keys if other and f".{key}".endswith(f".{other}")],
        [dotted(path) for path, node in inside if node is not FREE],
        [key for key in similar if len(names) > 1 and key.split(".")[-2:-1] == names[-2:-1]],
        [dotted(path) for path, _ in inside],
        [key for key in keys if f".{key}".endswith(f".{names[-1]}")],
        [key for key in keys if f".{key}".replace(".", "_").endswith("_".join(("", *names)))],
        similar,
    )

    def distance(key: str) -> tuple[int, float]:
        return len(set(key.split(".")) - set(wanted.split("."))), -_similarity(key, wanted)

    best = min(next(filter(None, candidates), []), key=distance, default=None)
    return f"; did you mean {best}?" if best else ""


def _similarity(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _block(*variants: type[BaseConfig]) -> Node:
    return Node(Kind.BLOCK, optional=False, variants=variants, metavar="block")


def _is_block(option: Any) -> bool:
    return isinstance(option, type) and issubclass(option, BaseConfig)


def _options(annotation: Any) -> tuple[Any, ...]:
    annotation = _bare(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(option for argument in typing.get_args(annotation) for option in _options(argument))
    return (annotation,)


def _bare(annotation: Any) -> Any:
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation


def _unalias(models: Sequence[type[BaseConfig]], rest: list[str | int]) -> list[str | int]:
    for model in models:
        for alias, target in {**model.deprecated, **model.aliases}.items():
            old = alias.split(".")
            if rest[: len(old)] == old:
                return [*target.split("."), *rest[len(old) :]]
    return rest
