"""`env` and `env.rewards`: environments, in training and in evaluations."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from prime_rl.configs.known_harnesses import KNOWN_HARNESSES
from prime_rl.configs.loading.base_config import BaseConfig, ImportPath, common
from prime_rl.configs.sampling import SamplingConfig


def environment_path(env_id: str) -> Path | None:
    """Return the path of the file or directory that an `env.id` names; None if it names a module."""
    is_path = env_id.endswith((".py", "/")) or env_id.startswith((".", "/", "~"))
    return Path(env_id).expanduser() if is_path else None


def _check_example_count(count: int) -> int:
    if count == 0 or count < -1:
        raise ValueError("a number of examples is at least 1, or -1 for all")
    return count


ExampleCount = Annotated[int, AfterValidator(_check_example_count)]


class RewardConfig(BaseConfig):
    """A reward function to add to an environment."""

    shorthand: ClassVar[str | None] = "import_path"

    import_path: ImportPath
    """Your function, from an installed package or the working directory."""

    weight: float = 1.0
    """Factor of its value in the reward; with 0 it is only a metric."""

    name: str | None = Field(None, min_length=1)
    """Name of its metric; None uses the name of the function."""

    kwargs: dict[str, object] = Field({})
    """Keyword arguments of the function."""

    @property
    def label(self) -> str:
        """Name of its metric."""
        return self.name or self.import_path.replace(":", ".").rpartition(".")[2]


class EnvConfig(BaseConfig):
    """A verifiers environment."""

    shorthand: ClassVar[str | None] = "id"
    deprecated: ClassVar[dict[str, str]] = {
        "timeout": "timeout_seconds",
        "start_timeout": "start_timeout_seconds",
        "silence_timeout": "silence_timeout_seconds",
    }

    id: str = Field("reverse_text", json_schema_extra=common("Rollouts"))
    """Name of the installed environment package (`-` and `_` are equivalent), or of a file: `my_env` finds my_env.py in
    the working directory, `path/my_env.py` any file."""

    type: Literal["openenv"] | None = None
    """Kind of a server that is the environment, in place of an `id`; `url` is its address."""

    url: str | None = None
    """Address of the server of a `type`, such as http://localhost:8000."""

    args: dict[str, object] = Field({}, json_schema_extra=common("Rollouts"))
    """Arguments of the environment's load_environment()."""

    name: str | None = None
    """Name in metrics; None uses the id."""

    rewards: list[RewardConfig] = Field([])
    """Reward functions to add to those of the environment."""

    install: bool = False
    """Install an environment of the hub (`owner/name`) with `prime env install` if it, or its version, is missing."""

    package: str | None = Field(None, min_length=1)
    """Distribution that has the environment, such as `staros-stardata==0.1.1`, a folder, wheel or git address. If this
    interpreter lacks it, the environment runs in an interpreter of its own, which uv makes once and stores."""

    requirements: list[str] = Field([])
    """Further packages of the environment, such as `verifiers==0.1.10`."""

    python: str | None = Field(None, min_length=1)
    """Python of the environment: a version, such as 3.12, or the path of an interpreter. None uses the version of this
    one."""

    interpreter: str | None = None
    """Interpreter that has these packages; set when a run starts."""

    identity: str | None = None
    """Module, version and content hash; set when a run starts. Another given value logs a warning."""

    weight: float = Field(1.0, gt=0)
    """Share of the started groups, relative to the other environments."""

    breakdown: list[str] = Field([])
    """Columns of the examples, such as `answer` or `info.level`, by whose values an evaluation is broken down."""

    rollouts_per_example: int | None = Field(None, ge=1)
    """Rollouts of each example of this environment; None uses the value for all environments."""

    max_concurrent: int | None = Field(None, ge=1)
    """Maximum rollouts of this environment in flight, in training; at least one group is. None sets no limit."""

    max_rollouts_per_minute: float | None = Field(None, gt=0)
    """Maximum rollouts of this environment that start per minute, in training; None sets no limit."""

    sampling: dict[str, object] = Field({})
    """Keys of `sampling` to override for this environment."""

    timeout_seconds: float | None = Field(1200, gt=0)
    """Time limit of the environment for one rollout, without the time in which the model samples, and for the scoring
    of a group. A slower rollout is truncated and scored. None sets no limit."""

    scoring_timeout_seconds: float | None = Field(None, gt=0)
    """Time limit for the scoring of a group of a classic environment, whose graders rarely need as long as agents; None
    is timeout_seconds. v1 environments score within the rollout."""

    num_retries: int = Field(1, ge=0)
    """Number of retries of a rollout or of a group's scoring after an infrastructure error: connection, sandbox
    (vf.InfraError), overloaded server."""

    min_rollouts: int | None = Field(None, ge=1)
    """Train on groups with at least this many successful rollouts; the baseline uses these alone, and the batch gets
    smaller. None requires all rollouts."""

    reward_errors: Literal["drop", "zero"] = "drop"
    """If a reward function raises or returns a non-finite number: drop the rollout, or set this reward to 0.
    Infrastructure errors are never 0, and functions of weight 0 only log a warning."""

    long_prompts: Literal["error", "skip"] = "error"
    """If the prompt of a training example leaves no space in seq_len: refuse to start, or skip these examples."""

    step_rewards: Literal["ignore", "add", "included"] = "ignore"
    """Rewards that a classic environment sets in single steps: `add` adds them to the rubric's reward, `included` means
    that the rubric adds them up itself; both credit each turn only with the reward that comes after it."""

    start_timeout_seconds: float = Field(600, gt=0)
    """Timeout for a worker process to load the environment."""

    silence_timeout_seconds: float = Field(600, gt=0)
    """Replace a worker process whose event loop the environment blocks for longer, or for longer than timeout_seconds +
    cleanup_seconds."""

    max_memory_gib: float | None = Field(None, gt=0)
    """Replace a worker process, after its groups, that has more in memory, without its child processes. None sets no
    limit."""

    cleanup_seconds: float = Field(30, ge=0)
    """Time limit for cleanup, such as the deletion of sandboxes, after cancelled or timed-out rollouts; then the worker
    process is killed. grace_timeout_seconds of `rl` limits it too when the run ends."""

    runtime: Literal["sandbox", "subprocess"] = "sandbox"
    """Where agents of a v1 environment run programs such as a shell, unless `args.env.<agent>.runtime` names a
    container or cloud: in the `sandbox` of this machine, or as a `subprocess` with your permissions and without
    isolation."""

    command: list[str] = Field([])
    """Program, with its arguments, that is the agent of a v1 taskset, such as `["mini", "--task", "{prompt}"]`. It runs
    in `runtime`, once per rollout, and finds the model by OPENAI_BASE_URL and OPENAI_API_KEY, or ANTHROPIC_BASE_URL and
    ANTHROPIC_API_KEY. `{prompt}`, `{model}`, `{base_url}` and `{api_key}` in it are replaced. [] uses the harness of
    the taskset."""

    harness: Literal["claude_code", "codex", "mini_swe_agent", "opencode", "qwen_code"] | None = None
    """Agent of a v1 taskset by its name, in place of a `command`; it is installed in /opt/agents, and `uv run
    environments info` of a v1 taskset shows how. Harnesses of verifiers are `args.env.<agent>.harness.id`."""

    agent: ImportPath | None = None
    """Your coroutine function that is the agent of a v1 taskset, as `module:function` or `file.py:function`. It runs in
    the worker, with your permissions, once per rollout, takes `messages`, `base_url`, `api_key` and other values by
    their names, and may return a reward."""

    gateway: str | None = Field(None, pattern="^https?://[^/]+/?$")
    """Address of a `gateway`, such as http://127.0.0.1:8700, from which agents that run elsewhere take the rollouts of
    a v1 taskset. Its key is in GATEWAY_API_KEY."""

    @model_validator(mode="before")
    @classmethod
    def _resolve_type(cls, values: Any) -> Any:
        """Replace `type` and `url`, which are another spelling of `id`, `package` and `args`."""
        if not isinstance(values, dict) or values.get("type") not in (None, "openenv"):
            return values
        kept = {key: value for key, value in values.items() if key not in ("type", "url")}
        kind, url, args = values.get("type"), values.get("url"), values.get("args", {})
        if kind is None and url is not None:
            raise ValueError(f'url = {url!r} needs type = "openenv"; the address that an id takes is one of its args')
        if kind is None or not isinstance(args, dict):
            return kept
        if not re.fullmatch(r"(?i:https?)://[^\s/]\S*", str(url)):
            raise ValueError(f"type = {kind!r} needs url, such as http://localhost:8000, not {url!r}")
        if kept.get("id", "openenv") != "openenv":
            raise ValueError(f"id = {kept['id']!r} and type = {kind!r} are two environments; set one")
        if args.get("base_url", url) != url:
            raise ValueError(f"url = {url!r} and args.base_url = {args['base_url']!r} are two servers; set url")
        chosen = {"id": "openenv", "args": {**args, "base_url": url}}
        return {"package": "verifiers[openenv]>=0.4"} | kept | chosen

    @field_validator("name")
    @classmethod
    def _is_file_name(cls, name: str | None) -> str | None:
        if name is not None and not (name.isprintable() and name.strip(". ") and len(os.fsencode(name)) <= 200):
            raise ValueError("it is part of file names; use printable characters, at most 200 bytes, not only dots")
        return name

    @field_validator("harness", mode="before")
    @classmethod
    def _is_known(cls, harness: object) -> object:
        if harness not in (None, *KNOWN_HARNESSES):
            raise ValueError(f"the known ones are {', '.join(KNOWN_HARNESSES)}; `command` runs any other program")
        return harness

    def sampling_with(self, sampling: SamplingConfig) -> SamplingConfig:
        """Return `sampling` with the overrides of this environment.

        Raises:
            ValueError: an unknown key or an invalid value in the environment's `sampling`.
        """
        try:
            return SamplingConfig.model_validate(sampling.model_dump() | self.sampling)
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(map(str, problem["loc"]))
            message = problem["msg"].removeprefix("Value error, ")
            raise ValueError(
                f"env.sampling of environment {self.label!r}: {key}{': ' if key else ''}{message}"
            ) from None

    @model_validator(mode="after")
    def _has_id(self) -> Self:
        if self.name is not None and "id" not in self.model_fields_set:
            raise ValueError(f"name = {self.name!r} is only a label; set env.id to the environment")
        if not self.id and self.package is None:  # `environments add` does not know it yet
            raise ValueError("id is empty; name an environment")
        return self

    @model_validator(mode="after")
    def _has_one_agent(self) -> Self:
        given = [key for key in ("command", "harness", "agent", "gateway") if getattr(self, key)]
        if len(given) > 1:
            raise ValueError(f"env.{given[0]} and env.{given[1]} are two agents; set one")
        return self

    @property
    def has_agent(self) -> bool:
        """Whether an agent of the user takes the place of the environment's."""
        return bool(self.program or self.agent or self.gateway)

    @property
    def program(self) -> list[str]:
        """The program of `command` or `harness`, with its arguments; [] without both."""
        return ["sh", "-c", KNOWN_HARNESSES[self.harness].script, "{prompt}"] if self.harness else self.command

    @property
    def how_to_install(self) -> str:
        """The place of the program of `command`, or the command that installs that of `harness`, for errors."""
        return f"by `{KNOWN_HARNESSES[self.harness].install}`" if self.harness else "below /usr or sandbox.paths"

    @property
    def scoring_limit(self) -> tuple[float | None, str]:
        """Seconds for the scoring of a group, and the key that sets them."""
        if self.scoring_timeout_seconds is not None:
            return self.scoring_timeout_seconds, "scoring_timeout_seconds"
        return self.timeout_seconds, "timeout_seconds"

    @property
    def label(self) -> str:
        """Name of the environment in metrics and messages."""
        path = environment_path(self.id)
        if self.name or path is None:
            return self.name or self.id
        return (path.parent if path.name == "__init__.py" else path).resolve().stem


_OF_TRAINING = {"weight", "rollouts_per_example", "max_concurrent", "max_rollouts_per_minute", "long_prompts"}


class EvalEnvConfig(EnvConfig):
    """An environment, and how much of it to run."""

    weight: float = Field(1.0, gt=0)
    """Only for training, as the share of an environment; other values are rejected here."""

    num_examples: ExampleCount | None = None
    """Examples of this environment; -1 is all, None uses the value for all environments."""

    rollouts_per_example: int | None = Field(None, ge=1)
    """Rollouts of each example; None uses the value for all environments."""

    @field_validator("weight")
    @classmethod
    def _is_default(cls, weight: float) -> float:
        if weight != cls.model_fields["weight"].default:
            raise ValueError("weight is a share in training; env.num_examples sets how many examples run")
        return weight

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Report limits of training."""
        for key in ("max_concurrent", "max_rollouts_per_minute"):
            yield key, "limits training only; max_concurrent without env limits an evaluation"
        yield "long_prompts", "is for training; an evaluation drops examples whose prompt is too long"

    @classmethod
    def from_training(cls, env: EnvConfig) -> Self:
        """Return the keys of a training environment, without those of its groups."""
        return cls.model_validate(env.model_dump(exclude=_OF_TRAINING))

    def as_env_config(self) -> EnvConfig:
        """Return the keys of the environment itself."""
        return EnvConfig.model_validate(self.model_dump(include=set(EnvConfig.model_fields)))
