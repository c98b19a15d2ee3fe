"""A coding agent in the sandbox: verifiers' `bash` harness, with the loop in the worker and only its tools in the box.

The program of verifiers' harness installs packages and calls the model over the network, and the sandbox has none.
"""

import json
import sys
from typing import Any

from verifiers.v1.harnesses.bash.harness import BASH_SYSTEM_PROMPT, EDIT_SYSTEM_PROMPT, BashHarnessConfig
from verifiers.v1.runtimes import Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.types import Messages

from prime_rl.rollouts.verifiers.v1_chat_harness import ChatHarness, Message

__all__ = ["ShellHarness"]

SHELL_HARNESS_ID = "prime_rl_shell"
"""Verifiers finds a harness by the name of a top-level module. This module is registered under this name."""


def _tool(name: str, description: str, parameters: dict[str, str]) -> Message:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


_BASH = _tool(
    "bash", "Run a bash command and return its combined stdout and stderr.", {"command": "The bash command to run."}
)
_EDIT = _tool(
    "edit",
    "Replace a unique string in a file. old_str must appear exactly once in the file.",
    {
        "path": "File path (relative to cwd or absolute).",
        "old_str": "Exact string to find (must appear exactly once).",
        "new_str": "Replacement string.",
    },
)


class ShellHarnessConfig(BashHarnessConfig):
    """The options of verifiers' `bash` harness."""


class ShellHarness(ChatHarness):
    """A chat whose model has the tools `bash` and `edit`, which act in the runtime of the rollout."""

    EXECUTES_CODE = True

    config: ShellHarnessConfig

    def resolve_prompt(self, task: TaskData) -> tuple[str | None, str | Messages | None]:
        """Return the system prompt of verifiers' harness with that of the task, and the prompt; called by verifiers."""
        system, prompt = super().resolve_prompt(task)
        own = f"{BASH_SYSTEM_PROMPT} {EDIT_SYSTEM_PROMPT}" if self.config.edit else BASH_SYSTEM_PROMPT
        return "\n\n".join(filter(None, (own, system))), prompt

    def local_tools(self) -> list[Message]:
        """Return the definitions of the tools."""
        return [_BASH, _EDIT] if self.config.edit else [_BASH]

    async def call_local(self, name: str, arguments: str, runtime: Runtime) -> str:
        """Return the result of a tool. Whatever the model does wrong is a result too; the sandbox's errors raise."""
        try:
            values = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
        names = ("command",) if name == "bash" else ("path", "old_str", "new_str")
        if not isinstance(values, dict) or not all(isinstance(values.get(key), str) for key in names):
            return f"error: the arguments of {name} are {', '.join(names)}, all of them text"
        if any("\0" in values[key] for key in names):
            return "error: an argument contains a null character"
        if name == "bash":
            result = await runtime.run(["bash", "-c", values["command"]], self.config.resolved_env)
            return result.stdout + result.stderr
        return await _edit(runtime, **{key: values[key] for key in names})


async def _edit(runtime: Runtime, path: str, old_str: str, new_str: str) -> str:
    if not path or not old_str:
        return "error: 'path' and 'old_str' must not be empty"
    try:
        content = (await runtime.read(path)).decode()
        if (count := content.count(old_str)) != 1:
            return f"error: old_str must appear exactly once in {path} (found {count})"
        await runtime.write(path, content.replace(old_str, new_str, 1).encode())
    except (OSError, UnicodeError) as error:
        return f"error: {error}"
    return f"Edited {path}"


def shell_config(config: Any) -> ShellHarnessConfig:
    """Return the configuration of this harness from that of verifiers' `bash` harness."""
    return ShellHarnessConfig(**{**config.model_dump(exclude_unset=True), "id": SHELL_HARNESS_ID})


sys.modules.setdefault(SHELL_HARNESS_ID, sys.modules[__name__])
