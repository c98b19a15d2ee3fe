"""The repair environment: tools that read, edit and run a small repository."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import verifiers as vf

from agentic.repositories import MAX_FILES, RepairTask, check_file
from prime_rl_sandbox.comparison import is_equal_value
from prime_rl_sandbox.execution import (
    ExecutionRequest,
    ExecutionResult,
    SandboxError,
    TestCase,
    Verdict,
    build_call,
    read_call_result,
)
from prime_rl_sandbox.shared_sandbox import SharedSandbox

from .environment_tools.prompts import ERROR, describe_error, make_dataset

RUN_TESTS = 'import unittest; unittest.main(module=None, argv=["tests", "discover"])'
MAX_RESULT_CHARS = 8000
_FILES = "agentic_files"
_PASSED = "agentic_hidden_tests_passed"


class RepairEnv(vf.StatefulToolEnv):
    """Tools `list_files`, `read_file`, `write_file`, `run_tests` and `run`.

    The files of a rollout are on the host; each run gets a copy in a fresh sandbox. So code that the model runs can
    change neither them nor the hidden tests.

    Args:
        train: tasks for training.
        evaluation: tasks for evaluation.
        system_prompt: the system message; "" for none.
        max_turns: maximum number of replies.
        timeout_seconds: time of each run and of each hidden test.
    """

    def __init__(
        self,
        train: Sequence[RepairTask],
        evaluation: Sequence[RepairTask],
        system_prompt: str,
        max_turns: int,
        timeout_seconds: float,
    ) -> None:
        self.tasks = [*train, *evaluation]
        self.sandbox = SharedSandbox()
        self.sandbox.check()
        self._timeout_seconds = timeout_seconds
        super().__init__(
            max_turns=max_turns,
            error_formatter=describe_error,
            stop_errors=[SandboxError],
            dataset=make_dataset(((task.question, "", task) for task in train), system_prompt),
            eval_dataset=make_dataset(((task.question, "", task) for task in evaluation), system_prompt, len(train)),
            rubric=vf.Rubric(funcs=[self.repaired, self.hidden_tests_passed, self.edits], weights=[1.0, 0.0, 0.0]),
        )
        for tool in (self.list_files, self.read_file, self.write_file, self.run_tests, self.run):
            self.add_tool(tool, args_to_skip=["state"])

    async def list_files(self, state: Any) -> str:
        """List the files of the repository."""
        return "\n".join(sorted(self._files(state)))

    async def read_file(self, name: str, state: Any) -> str:
        """Read a file.

        Args:
            name: its name.
        """
        files = self._files(state)
        return files[name] if isinstance(name, str) and name in files else f"{ERROR}there is no such file"

    async def write_file(self, name: str, content: str, state: Any) -> str:
        """Write a whole file.

        Args:
            name: its name.
            content: its new content.
        """
        if not isinstance(name, str) or not isinstance(content, str):
            raise ValueError("`name` and `content` must be text")
        check_file(name, content)
        files = self._files(state)
        if name not in files and len(files) >= MAX_FILES:
            raise ValueError(f"a repository has at most {MAX_FILES} files")
        state[_FILES] = {**files, name: content}
        return f"wrote {len(content)} characters to {name}"

    async def run_tests(self, state: Any) -> str:
        """Run the tests of the repository."""
        return await self._run(RUN_TESTS, state)

    async def run(self, code: str, state: Any) -> str:
        """Run Python code in a copy of the repository.

        Args:
            code: the code.
        """
        if not isinstance(code, str):
            raise ValueError("`code` must be text")
        return await self._run(code, state)

    def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: Any, state: Any, **_: Any
    ) -> dict[str, Any]:
        """Give a tool its rollout; called by verifiers."""
        return {**tool_args, "state": state}

    async def repaired(self, state: Any) -> float:
        """1 if all hidden tests pass."""
        return float(await self.hidden_tests_passed(state) == 1)

    async def hidden_tests_passed(self, state: Any) -> float:
        """The share of the hidden tests that pass.

        Raises:
            SandboxError: the sandbox failed. Nothing is known about the repository.
        """
        if _PASSED not in state:
            tests = self._task(state).tests
            passed = await asyncio.gather(*(self._passes(test, self._files(state)) for test in tests))
            state[_PASSED] = sum(passed) / len(tests)
        return float(state[_PASSED])

    def edits(self, state: Any) -> float:
        """Number of files that differ from the broken repository."""
        before = self._task(state).files
        return float(sum(before.get(name) != text for name, text in self._files(state).items()))

    def _task(self, state: Any) -> RepairTask:
        return self.tasks[state["info"]["number"]]

    def _files(self, state: Any) -> dict[str, str]:
        return dict(state.get(_FILES) or self._task(state).files)

    async def _run(self, code: str, state: Any) -> str:
        result = await self._execute(ExecutionRequest(code, files=self._files(state)))
        text = "\n".join(filter(None, (result.stdout.rstrip(), result.stderr.rstrip())))
        if not result.ok:
            text += f"\n{ERROR}{result.verdict}"
        return text[-MAX_RESULT_CHARS:].strip() or "(no output)"

    async def _passes(self, test: Any, files: dict[str, str]) -> bool:
        call = build_call(
            f"from {test.module} import {test.function}", TestCase(function=test.function, args=test.args)
        )
        result = await self._execute(replace(call, files=files))
        try:
            return result.ok and is_equal_value(read_call_result(result), test.expected)
        except ValueError:
            return False

    async def _execute(self, request: ExecutionRequest) -> ExecutionResult:
        sandbox = await self.sandbox.open()
        result = await sandbox.run_request(replace(request, timeout_seconds=self._timeout_seconds))
        if result.verdict is Verdict.INFRA:
            raise SandboxError(f"the sandbox failed: {result.stderr}")
        return result
