"""A chat with a version of a run and with its base model, and rollouts of the run's environment with their rewards.

The run's own server answers while it samples from the version. Otherwise an `inference` server is started on this
machine, which switches between the version and the base model, and ends with the chat.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from prime_rl.configs.environment import EvalEnvConfig
from prime_rl.configs.eval import EvalConfig
from prime_rl.core.entry_point import ERROR_FILE, read_error_file
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.core.http_requests import answers
from prime_rl.core.ports import find_free_port
from prime_rl.entrypoints.delivery.policy_export import (
    ADAPTER_CONFIG,
    ExportForm,
    PolicySource,
    find_policy,
    hold_policy,
    write_policy,
)
from prime_rl.entrypoints.delivery.served_policy import ServedPolicy
from prime_rl.evaluation.eval_plan import plan_tasks
from prime_rl.evaluation.eval_results import ExampleRow
from prime_rl.evaluation.eval_session import open_session, run_examples
from prime_rl.storage.artifact import WEIGHTS_FORMAT, read_manifest
from prime_rl.storage.paths import RunPaths

BASE = "base"
"""Name of the base model, next to `step N` of the version."""
_RUN_ID = "chat"
_START_SECONDS = 1800.0
_STOP_SECONDS = 60.0
_POLL_SECONDS = 0.2


class ChatSession:
    """Use as a context manager; the end stops the server that it has started."""

    def __init__(self, place: Path, step: int | None, model: str | None, sampling: Mapping[str, Any]) -> None:
        """Find the version.

        Args:
            place: a run directory.
            step: the version; None is the one that the run samples from, or else the newest.
            model: path of the base model, if it has moved.
            sampling: fields of the requests, which override the run's.

        Raises:
            ConfigError: the run has no such version, or its configuration is missing.
        """
        self._paths, self._step, self._model, self._given = RunPaths(place), step, model, sampling
        self._served = ServedPolicy(self._paths, sampling)
        self._settings = self._served.settings
        self._source: PolicySource | None = None
        self._server: LocalServer | None = None
        if self._served.step(step) is None:
            self._source = find_policy(place, step)

    def __enter__(self) -> "ChatSession":
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.stop()

    def ask(self, policy: str, messages: list[dict[str, Any]]) -> Iterator[str]:
        """Yield the name of the policy that answers, and then the parts of its reply. `policy` is BASE or anything.

        Raises:
            RunError: the server does not answer, or refuses the request.
        """
        name, url = self.serve(policy)
        yield name
        yield from self._served.reply(url, messages)

    def serve(self, policy: str) -> tuple[str, str]:
        """Have a server sample from a policy; return the policy's name and the URL. Raises as `ask`, or ConfigError."""
        if policy != BASE and (live := self._served.step(self._step)) is not None:
            return f"step {live}", self._served.url
        if self._source is None:  # the run has moved on or ended, or the base model is wanted
            self._source = find_policy(self._paths.root, self._step)
        if self._server is None:
            print("starting an inference server for this chat ...", file=sys.stderr, flush=True)
            self._server = LocalServer(self._arguments(self._source), self._served.key_var, self._model)
        if policy == BASE:
            self._server.load(self._served, None)
            return BASE, self._server.url
        self._server.load(self._served, self._source)
        return f"step {self._source.version.step}", self._server.url

    def run_example(self, policy: str, example: int, env: str | None) -> tuple[str, ExampleRow]:
        """Run one example of the training data in its environment; return the policy's name and the rollout.

        Raises:
            ConfigError: the run has no environment, or not this one, or no such example.
            RunError: the server or the environment failed.
        """
        if self._settings is None:
            raise ConfigError(f"{self._paths.root} has no environment: it was fine-tuned on data")
        labels = [one.label for one in self._settings.env]
        if env not in (None, *labels):
            raise ConfigError(f"there is no environment {env}; the run has {', '.join(labels)}")
        name, url = self.serve(policy)
        chosen = self._settings.env[0 if env is None else labels.index(env)]
        with tempfile.TemporaryDirectory(prefix="prime_rl_chat_") as folder:
            values = {
                "output_dir": folder,
                "client": {"base_url": [url], "api_key_var": self._served.key_var},
                "model": {"name": self._model} if self._model else self._settings.model.model_dump(exclude={"lora"}),
                "sampling": {**self._settings.sampling.model_dump(), **self._given},
                "env": [EvalEnvConfig.from_training(chosen)],
                **{key: getattr(self._settings, key) for key in ("tokenizer", "rendering", "seq_len", "sandbox")},
            }
            config = EvalConfig.model_validate(values)
            return name, asyncio.run(_run_example(config, example))

    def _arguments(self, source: PolicySource) -> list[str]:
        """Return the arguments of a server of the run's base model that can load `source`."""
        shared = RunPaths(self._paths.root.absolute().parent)  # of several runs
        files = [paths.config("inference") for paths in (self._paths, shared)]
        arguments = next((["@", str(file)] for file in files if file.is_file()), [])
        base = {"name": self._model, "revision": None} if self._model else {} if arguments else self._base(source)
        arguments += [text for key, value in base.items() for text in (f"--model.{key}", str(value))]
        template = self._settings.rendering.chat_template if self._settings is not None else None
        arguments += ["--vllm.chat_template", str(template)] if template is not None else []
        adapter = source.directory / ADAPTER_CONFIG
        if not adapter.is_file():
            return [*arguments, "--enable-lora", "false"]
        return [*arguments, "--enable-lora", "true", "--max-lora-rank", str(json.loads(adapter.read_text())["r"])]

    def _base(self, source: PolicySource) -> dict[str, Any]:
        file = self._paths.config("sft")
        settings = tomllib.loads(file.read_text()) if file.is_file() else source.settings
        if settings:
            return {key: settings["model"][key] for key in ("name", "revision") if key in settings["model"]}
        raise ConfigError(f"{self._paths.root} does not say which model it started from; set --model")


class LocalServer:
    """An `inference` server on a loopback address, which ends with this process."""

    def __init__(self, arguments: list[str], key_var: str, model: str | None) -> None:
        """Start it and wait until it answers. Raises ConfigError, RunError with its reason if it does not start."""
        self._folder = tempfile.TemporaryDirectory(prefix="prime_rl_chat_")
        self.folder = Path(self._folder.name)
        port, error, log = find_free_port(), self.folder / "error.json", self.folder / "inference.log"
        self.url = f"http://127.0.0.1:{port}"
        self._loaded: Path | None = None
        self._form = ExportForm(model=model)
        own = {"server.host": "127.0.0.1", "server.port": port, "server.api_key_var": key_var}
        # The lease is not renewed while the user types, and the server has no other user.
        own |= {"output_dir": self.folder, "lease_seconds": 10**6}
        options = [text for key, value in own.items() for text in (f"--{key}", str(value))]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "prime_rl.api.child_main", str(os.getpid()), "inference", *arguments, *options],
                env={**os.environ, ERROR_FILE: str(error), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not answers(f"{self.url}/health"):
                if self._process.poll() is not None:
                    reported = read_error_file(error)
                    kind = ConfigError if reported is not None and reported.code == 2 else RunError
                    last = " ".join(log.read_text(errors="replace").splitlines()[-1:])
                    raise kind(f"the server did not start: {reported.message if reported else last}")
                if time.monotonic() > deadline:
                    raise RunError(f"the server did not start within {_START_SECONDS:.0f} s")
                time.sleep(_POLL_SECONDS)
        except BaseException:
            self.stop()
            raise

    def load(self, client: ServedPolicy, source: PolicySource | None) -> None:
        """Switch to a version; None is the base model. Raises RunError."""
        if (source.directory if source is not None else None) == self._loaded:
            return
        if self._loaded is None:  # take the lease
            client.request("POST", f"{self.url}/reload_weights", {"run_id": _RUN_ID})
        if source is None:
            client.request("POST", f"{self.url}/reload_weights", {"run_id": _RUN_ID})
        else:
            self._load_version(client, source)
        self._loaded = source.directory if source is not None else None

    def _load_version(self, client: ServedPolicy, source: PolicySource) -> None:
        directory = source.directory
        if source.is_checkpoint:
            directory = self.folder / directory.name
            if not directory.exists():
                write_policy(source, directory, self._form)
        with hold_policy(directory):
            version = {"branch": source.version.branch, "step": source.version.step}
            body = {"run_id": _RUN_ID, "weight_dir": str(directory.resolve()), **version}
            loaded = client.request("POST", f"{self.url}/update_weights", body)
            if loaded["hash"] != read_manifest(directory, WEIGHTS_FORMAT)["hash"]:
                raise RunError(f"the server loaded {loaded['hash']} instead of {directory}")

    def stop(self) -> None:
        """End the server and wait until all its processes have ended."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._folder.cleanup()


async def _run_example(config: EvalConfig, example: int) -> ExampleRow:
    tasks = plan_tasks(config.env, [], config.sampling, 1, 1)
    rows: list[ExampleRow] = []
    async with open_session(config, tasks, "train") as session:
        task, pool = session.pools[0]
        if not 0 <= example < len(pool):
            raise ConfigError(f"{task.name} has the examples 0 to {len(pool) - 1}, not {example}")
        await run_examples(task, pool, [example], config.seq_len, 1, session.servers, rows.append)
    return rows[0]
