"""A started run: blocking calls, for `with Run(...) as run` and as the base of the asynchronous form."""

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from prime_rl.api.child_command import ChildCommand
from prime_rl.api.commands import run_evaluation
from prime_rl.api.policy_client import Messages, PolicyClient
from prime_rl.api.policy_files import export_policy
from prime_rl.api.run_arguments import Environment
from prime_rl.api.steps import Step, StepReader
from prime_rl.configs.loading.base_config import write_config
from prime_rl.configs.rl import RLConfig
from prime_rl.core.errors import RunError, translate_error, unwritable
from prime_rl.core.http_requests import answers
from prime_rl.core.ports import check_port, find_free_port
from prime_rl.storage.paths import RunPaths

POLL_SECONDS = 0.2
"""Time between two looks at the run directory."""
_PAGE_HOST = "127.0.0.1"
_PAGE_START_SECONDS = 60.0


class ActiveRun:
    """The run of a `with` block: `rl` in a child process. Iterating yields the trained steps.

    Attributes:
        config: the resolved configuration.
        paths: the run directory.
    """

    def __init__(self, config: RLConfig) -> None:
        """Start `rl` with `config`. Raises ConfigError if the run directory cannot be written."""
        self.config, self.paths = config, config.run_paths
        resumes = config.ckpt is not None and config.ckpt.resume_step is not None
        self._reader = StepReader(self.paths, resumes)
        self._pages: list[ChildCommand] = []
        self._steps: list[Step] = []
        self._is_read = self._is_stopped = False
        write_config(config, self.paths.config("rl"))
        self._rl = ChildCommand("rl", ["@", str(self.paths.config("rl"))], self.paths)

    @property
    def base_url(self) -> str:
        """The OpenAI-compatible API of the run's first inference server. It answers once the server has started."""
        return f"{self.config.orchestrator.client.urls[0]}/v1"

    @property
    def pid(self) -> int:
        """Process id of `rl`."""
        return self._rl.pid

    def __iter__(self) -> Iterator[Step]:
        """Yield the trained steps in order, from where the last loop ended; wait for each.

        Raises:
            ConfigError, RunError: the run failed; the message is that of `rl`.
        """
        while (step := self.poll()) is not None or not self.is_over:
            if step is not None:
                yield step
            else:
                time.sleep(POLL_SECONDS)

    def wait(self) -> Step | None:
        """Wait until the run is over, and return the last step; None if there was none. Raises as iterating does."""
        last = None
        for step in self:
            last = step
        return last

    @property
    def is_over(self) -> bool:
        """Whether all steps were returned and the run has ended."""
        return self._is_read and not self._steps

    def poll(self) -> Step | None:
        """Return the next trained step if there is one already. Raises as iterating does."""
        if not self._steps and not self._is_read:
            has_exited = self._rl.exit_code is not None  # before the last look at the files
            self._steps += self._reader.read(self._rl.pid)
            self._is_read = not self._steps and (has_exited or self._reader.is_finished)
            if self._is_read:
                self.check()
        return self._steps.pop(0) if self._steps else None

    def evaluate(
        self,
        split: str | None = None,
        k: int = 1,
        env: Environment | Sequence[Environment] | None = None,
        **overrides: Any,
    ) -> dict[str, Any]:
        """Evaluate the policy that inference serves; while the run trains, its version may change meanwhile.

        Args:
            split: passed to the environment's load_environment(split=...); None evaluates its evaluation examples.
            k: rollouts of each example, for pass@1 to pass@k.
            env: the environments; None are those of the training.
            overrides: further keys of `eval`.

        Returns:
            The summary of `eval`: `reward/mean`, `pass@k`, and others. With several environments the names start with
            `ENVIRONMENT/`.

        Raises:
            ConfigError, RunError: as `eval`; or the run has failed.
        """
        self.wait_until_serving()
        return run_evaluation(self.config, self.base_url, self._evaluation_paths(), env, split, k, overrides)

    def chat(self, messages: Messages, **sampling: Any) -> str:
        """Return one reply of the served policy; arguments as those of `PolicyClient.generate`. Raises RunError."""
        self.wait_until_serving()
        settings = self.config.orchestrator.client
        client = PolicyClient(self.base_url, None, settings.api_key_var, settings.timeout_seconds)
        return client.generate(messages, **sampling)[0]

    def export(self, path: str | Path, step: int = -1) -> Path:
        """Write a version of the policy as a Hugging Face model directory; see `policy_files.export_policy`."""
        return export_policy(self.paths, Path(path), step)

    def page(self, port: int = 0) -> str:
        """Serve the page of this run until the run ends, and return its address; port 0 is any free one."""
        page, url = _start_page(self.paths, port)
        self._pages.append(page)
        return url

    def wait_until_serving(self) -> None:
        """Wait until inference answers requests.

        Raises:
            ConfigError, RunError: the run failed before or has ended, or the server does not answer in
                `wait_timeout_seconds`.
        """
        deadline = time.monotonic() + self.config.orchestrator.wait_timeout_seconds
        while True:
            self.check()
            # A server that is not the run's own may sample from another policy by now.
            if self._is_stopped or self._rl.exit_code is not None:
                raise RunError("the run has ended, and its server with it; ask within the `with` block")
            if answers(f"{self.base_url.removesuffix('/v1')}/health"):
                return
            if time.monotonic() > deadline:
                raise RunError(f"{self.base_url} does not answer; log {self.paths.log('inference')}")
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """End the run in an orderly way and wait until all its processes have ended. Does nothing if it has ended."""
        self._is_stopped = True
        self._rl.stop()
        for page in self._pages:
            page.stop()

    def check(self) -> None:
        """Raise the error of a run that has failed."""
        if not self._is_stopped:
            self._rl.check()

    def _evaluation_paths(self) -> RunPaths:
        """Create the next folder, so that evaluations at the same time have one each."""
        for number in itertools.count():
            folder = self.paths.root / "evaluations" / str(number)
            with translate_error(OSError, unwritable(f"cannot write {folder}")), suppress(FileExistsError):
                folder.mkdir(parents=True)
                return RunPaths(folder)
        raise AssertionError


def _start_page(paths: RunPaths, port: int) -> tuple[ChildCommand, str]:
    """Start `page` for a run directory, on any free port if `port` is 0; return the process and its address.

    Raises:
        ConfigError: the port is in use.
        RunError: it does not start.
    """
    port = port or find_free_port()
    check_port(_PAGE_HOST, port, "page(port)")
    url = f"http://{_PAGE_HOST}:{port}"
    page = ChildCommand("page", [str(paths.root), "--port", str(port)], paths)
    deadline = time.monotonic() + _PAGE_START_SECONDS
    while time.monotonic() < deadline and page.exit_code is None:
        if answers(url):
            return page, url
        time.sleep(0.1)
    page.check()
    page.stop()
    raise RunError(f"the page did not start; log {page.log}")
