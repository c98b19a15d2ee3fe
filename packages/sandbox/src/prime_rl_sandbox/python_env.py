"""A multi-turn environment of verifiers' classic API whose model has a Python tool, in the sandbox of this machine."""

from typing import Any

import verifiers as vf

from prime_rl_sandbox.execution import ExecutionResult, SandboxConfigError, SandboxError, Verdict
from prime_rl_sandbox.session import Session
from prime_rl_sandbox.shared_sandbox import SharedSandbox

_SESSION = "python_session"
_ENDINGS = {
    Verdict.TIMEOUT: "error: the code took longer than {seconds:g} s",
    Verdict.MEMORY: "error: the code used more memory than the sandbox allows",
    Verdict.OUTPUT: "error: the code wrote more output than the sandbox allows",
}


class PythonEnv(vf.StatefulToolEnv):
    """A `ToolEnv` with the tool `python(code)`, whose variables last for the rollout.

    Takes the place of verifiers' own `PythonEnv`, which needs a remote sandbox. Further tools, the data set and the
    rubric are arguments of `ToolEnv`. An environment with its own tools that take a state overrides
    `update_tool_args`.

    Args:
        sandbox: runs the code; None for one with the run's configuration.
        timeout_seconds: time of each call, None for that of the sandbox.
        max_output_characters: longer results are cut in the middle.

    Raises:
        SandboxConfigError: this machine cannot isolate code. The message contains the fix.
    """

    def __init__(
        self,
        *,
        sandbox: SharedSandbox | None = None,
        timeout_seconds: float | None = None,
        max_output_characters: int = 8000,
        **options: Any,
    ) -> None:
        stop_errors = [*options.pop("stop_errors", ()), SandboxError, SandboxConfigError]
        super().__init__(stop_errors=stop_errors, **options)
        self.sandbox = sandbox or SharedSandbox()
        self.sandbox.check()
        self._timeout_seconds = timeout_seconds
        self._max_output_characters = max_output_characters
        self.add_tool(self.python, args_to_skip=["state"])

    async def python(self, code: str, state: Any) -> str:
        """Run Python code and return what it prints, and the value of its last line. Variables and files are kept.

        Args:
            code: the code.
        """
        if not isinstance(code, str):
            return "error: `code` must be text"
        session = await self.session(state)
        result = await session.run(code, timeout=self._timeout_seconds)
        if result.verdict is Verdict.INFRA:
            raise SandboxError(f"the session failed: {result.stderr}")
        if not session.alive:
            await self.close_session(state)
        return self._describe(result, restarted=not session.alive)

    async def session(self, state: Any) -> Session:
        """Return the session of a rollout, in which its tools and reward functions can run code too.

        Raises:
            SandboxError: the sandbox failed.
        """
        if (session := state.get(_SESSION)) is None:
            sandbox = await self.sandbox.open()
            session = state[_SESSION] = await sandbox.session().__aenter__()
        return session

    def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: Any, state: Any, **_: Any
    ) -> dict[str, Any]:
        """Give the tool `python` its rollout; called by verifiers."""
        return {**tool_args, "state": state} if tool_name == "python" else tool_args

    @vf.cleanup
    async def close_session(self, state: Any) -> None:
        """End the session of a rollout and all processes in it; called by verifiers at the end of the rollout."""
        if (session := state.pop(_SESSION, None)) is not None:
            await session.__aexit__(None, None, None)

    def _describe(self, result: ExecutionResult, *, restarted: bool) -> str:
        """Return the result as the text that the model sees."""
        seconds = self._timeout_seconds or self.sandbox.limits.timeout_seconds
        result = result.printable
        parts = [result.stdout.rstrip(), result.stderr.rstrip(), result.value or ""]
        parts.append(_ENDINGS.get(result.verdict, "").format(seconds=seconds))
        if restarted:
            parts.append("error: the session has ended; variables and files are lost")
        text = "\n".join(filter(None, parts)) or "(no output)"
        if len(text) <= self._max_output_characters:
            return text
        half = self._max_output_characters // 2
        return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
