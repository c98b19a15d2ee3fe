"""Names of published guides to prime-rl, as thin wrappers of `Run`, `sft` and `PolicyClient` (docs/python_api.md)."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prime_rl.api.commands import load_environment, sft
from prime_rl.api.policy_client import Messages, PolicyClient
from prime_rl.api.run import Run
from prime_rl.api.run_arguments import Environment
from prime_rl.api.steps import Step
from prime_rl.core.errors import ConfigError


class FSDP2Trainer:
    """The trainer of an `Orchestrator`.

    Args:
        model: Hugging Face id or directory.
        optimizer: `trainer.optim.type`.
        num_gpus: `trainer_gpus`; ranks on a machine without GPUs.
        config: further keys of `rl`, for example `{"trainer.optim.lr": 1e-6}` as `**`.
    """

    def __init__(
        self, model: str | os.PathLike[str], optimizer: str = "adamw", num_gpus: int | None = None, **config: Any
    ) -> None:
        self.model = os.fspath(model)
        self.environments: list[Environment] = []
        self.config = {"trainer.optim.type": optimizer, "trainer_gpus": num_gpus, **config}

    def get_weights(self) -> str:
        """The model, from which inference starts; a run updates inference itself."""
        return self.model

    def add_environments(self, environments: Sequence[Environment]) -> None:
        """Add environments to those of the `Orchestrator`."""
        self.environments += environments


class vLLMInference:
    """The inference server of an `Orchestrator`.

    Args:
        model_weights: the model of the trainer.
        num_nodes: `inference_nodes`, the first of the `nodes` that `Orchestrator` gets.
        num_gpus: `inference_gpus`, of each node.
        config: further keys of `rl`.
    """

    def __init__(
        self, model_weights: str | os.PathLike[str], num_nodes: int = 1, num_gpus: int | None = None, **config: Any
    ) -> None:
        self.model_weights, self.num_nodes = os.fspath(model_weights), num_nodes
        self.config = {"inference_gpus": num_gpus, **config}


class Orchestrator:
    """A whole run from a trainer, a server and environments.

    Args:
        trainer: the trainer; its model is trained.
        inference: the server.
        environments: as `env` of `Run`.
        batch_size: rollouts per step.
        async_mode: whether sampling and training overlap (`async_level` 2); else each batch is on-policy (0).
        config: further keys of `rl`.

    Raises:
        ConfigError: the server has another model than the trainer, or several nodes that are not named.
    """

    def __init__(
        self,
        trainer: FSDP2Trainer,
        inference: vLLMInference,
        environments: Sequence[Environment] = (),
        batch_size: int = 128,
        async_mode: bool = True,
        **config: Any,
    ) -> None:
        if inference.model_weights != trainer.model:
            raise ConfigError(
                f"vLLMInference has {inference.model_weights}, FSDP2Trainer has {trainer.model}; pass "
                "model_weights=trainer.get_weights()"
            )
        self._model, self._environments = trainer.model, [*trainer.environments, *environments]
        own = {"orchestrator.batch_size": batch_size, "async_level": 2 if async_mode else 0}
        given = {**trainer.config, **inference.config, **own, **config}
        if "nodes" in given:
            given.setdefault("inference_nodes", inference.num_nodes)
        elif inference.num_nodes > 1:
            raise ConfigError(
                f"vLLMInference(num_nodes={inference.num_nodes}): name the nodes of inference and trainer, as in "
                "Orchestrator(..., nodes=['node1', 'node2'])"
            )
        self._config = {key: value for key, value in given.items() if value is not None}

    def train(self, total_steps: int, checkpoint_every: int | None = None, log_every: int = 1) -> Step | None:
        """Run `total_steps` steps, print a line after every `log_every`, and return the last step.

        Raises:
            ConfigError, RunError: as `rl`.
        """
        config = {**self._config, "max_steps": total_steps}
        if checkpoint_every is not None:
            config["ckpt.interval"] = checkpoint_every
        last = None
        with Run(self._model, env=self._environments or None, config=config) as run:
            for last in run:
                if (last.number + 1) % log_every == 0:
                    print(f"step {last.number}: reward {last.reward:.3f}, staleness {last.staleness}", flush=True)
        return last


class SimpleSFTTrainer:
    """Supervised fine-tuning on the right answers of an environment's training examples.

    Args:
        model: Hugging Face id or directory.
        environment: id of an environment, or a loaded one, whose examples have answers.
        num_gpus: GPUs to train on, or ranks on a CPU.
        config: further keys of `sft`.
    """

    def __init__(
        self, model: str | os.PathLike[str], environment: Environment, num_gpus: int = 1, **config: Any
    ) -> None:
        self._environment: Any = load_environment(environment) if isinstance(environment, str) else environment
        self._model, self._num_gpus, self._config = model, num_gpus, config

    def train(self, steps: int) -> Path:
        """Train `steps` steps, and return the directory of the trained model.

        Raises:
            ConfigError, RunError: as `sft`; or the environment has no answers.
        """
        file = Path(self._config.get("output_dir", "outputs")) / "sft_data.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = [_conversation(row) for row in self._environment.get_dataset()]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return sft(self._model, file, num_gpus=self._num_gpus, max_steps=steps, **self._config)


class PrimeIntellectRLAdapter:
    """A model and an environment side by side.

    Args:
        model: a model of transformers, as `load_policy` returns, or the URL of a server.
        tokenizer: of the model; unused with a URL.
        env_id: as in `load_environment`.
        env_args: arguments of its load_environment().
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, env_id: str = "", env_args: dict[str, Any] | None = None
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._env_id, self._env_args = env_id, env_args or {}

    def load_environment(self) -> Any:
        """See `prime_rl.load_environment`."""
        return load_environment(self._env_id, **self._env_args)

    def generate_response(
        self, messages: Messages, num_samples: int = 1, max_tokens: int = 256, temperature: float = 1.0
    ) -> list[str]:
        """Sample `num_samples` completions of a conversation."""
        if isinstance(self._model, str):
            client = PolicyClient(self._model)
            return client.generate(messages, num_samples, max_tokens=max_tokens, temperature=temperature)
        conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        prompt = self._tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(self._model.device)
        sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        tokens = self._model.generate(**prompt, **sampling, max_new_tokens=max_tokens, num_return_sequences=num_samples)
        completions = tokens[:, prompt["input_ids"].shape[1] :]
        return [str(text) for text in self._tokenizer.batch_decode(completions, skip_special_tokens=True)]


def _conversation(row: dict[str, Any]) -> dict[str, Any]:
    """One example of an environment as training data."""
    if not row.get("answer"):
        raise ConfigError("SimpleSFTTrainer: an example of the environment has no answer; train with Run instead")
    prompt = row["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return {"prompt": messages, "completion": [{"role": "assistant", "content": str(row["answer"])}]}
