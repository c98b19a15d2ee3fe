"""What the environments of both verifiers APIs have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prime_rl.configs.shared.blocks import EnvConfig
from prime_rl.core.errors import ConfigError
from prime_rl.core.types import EvalSplit, Rollout, Split
from prime_rl.rollouts.clients.inference_client import InferenceClient
from prime_rl.rollouts.clients.openai_chat_client import ChatServer
from prime_rl.rollouts.group_attempts import Attempt, GroupAttempts
from prime_rl.rollouts.recorder import Recorder
from prime_rl.rollouts.rendering.renderer import Renderer
from prime_rl.rollouts.token_accounting import GroupAccount

LAST_CLASSIC = "0.3.2.dev22"
"""The last verifiers release with the classic API; pyproject.toml pins it."""


class EnvironmentBackend(ABC):
    """One split of an environment inside a worker.

    Attributes:
        config: the environment.
        module: name of its imported module.
        split: which examples.
        trains: the rollouts are trained on.
        eval_split: source of its evaluation examples.
    """

    eval_split: EvalSplit = "none"

    def __init__(
        self,
        config: EnvConfig,
        module: str,
        renderer: Renderer | None,
        split: Split,
        keep_messages: bool = False,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """Load the environment; see `environment_loader.load`."""
        self.config = config
        self.module = module
        self.split = split
        self.trains = split == "train" and not keep_messages
        self._renderer = renderer
        self._keep_messages = keep_messages
        self._send_warning = warn
        self._warned_topics = set[str]()
        self._load()

    @abstractmethod
    def _load(self) -> None:
        """Load the environment; ConfigError if it rejects its arguments or has no examples."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of examples of the split."""

    @abstractmethod
    def prompt_tokens(self, example: int) -> int:
        """Return the length of the first prompt of an example, in tokens; 0 if the server renders it."""

    @abstractmethod
    def _row(self, example: int) -> Any:
        """Return the columns of an example: a mapping, or an object with attributes."""

    def columns(self, example: int) -> dict[str, str]:
        """Return the values of the columns `env.breakdown` of an example; ConfigError if it lacks one."""
        values: dict[str, str] = {}
        for path in self.config.breakdown:
            value = self._row(example)
            for name in path.split("."):
                value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
            if value is None:
                raise ConfigError(
                    f"env.breakdown: example {example} of environment {self.config.id!r} has no column {path!r}"
                )
            values[path] = str(value)
        return values

    async def run_group(
        self,
        example: int,
        count: int,
        server: InferenceClient | ChatServer,
        sampling: Mapping[str, Any],
        seq_len: int,
        seed: Sequence[int] | None = None,
        account: GroupAccount | None = None,
    ) -> list[Rollout]:
        """Run and score `count` rollouts of one example; see `EnvironmentPool.run_group`. `account` counts the tokens.

        Returns:
            The rollouts: `count`, or at least `env.min_rollouts` of them if others failed.

        Raises:
            EnvironmentFailed: the environment raised, or a reward or metric is not a finite number.
            SampleTooLong: a prompt leaves no space for a completion.
            UnsupportedEnvironment: the environment uses an unsupported feature.
            InferenceServerLost, InferenceError: the server failed.
        """
        account, is_train = account or GroupAccount(), self.split == "train"
        group = GroupAttempts(self.config, example, count, server, seed, account, is_train)
        return await self._run(group, example, sampling, seq_len)

    @abstractmethod
    async def _run(
        self, group: GroupAttempts, example: int, sampling: Mapping[str, Any], seq_len: int
    ) -> list[Rollout]: ...

    def warn(self, topic: str, message: str) -> None:
        """Warn about the environment, once per topic."""
        if topic not in self._warned_topics and self._send_warning is not None:
            self._warned_topics.add(topic)
            self._send_warning(message)

    def _count_tokens(self, messages: Sequence[Any], tools: list[dict[str, Any]] | None = None) -> int:
        return len(self._renderer.render(messages, tools or None)) if self._renderer is not None else 0

    def _recorder(self, attempt: Attempt, seq_len: int, *seed: int) -> Recorder:
        """Return the recorder of one attempt; `seed` extends the attempt's."""
        seeds = None if attempt.seed is None else [*attempt.seed, *seed]
        return Recorder(attempt.server, self._renderer, seq_len, seeds, self._keep_messages)
