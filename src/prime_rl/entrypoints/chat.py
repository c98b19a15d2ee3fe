"""`chat`: talk with a version of a run on the terminal, next to its base model."""

import argparse
import json
import os
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from prime_rl.core.entry_point import ArgumentParser, command
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.core.terminal_escape import escape_control_chars, replace_surrogates

if TYPE_CHECKING:
    from prime_rl.entrypoints.delivery.chat_session import ChatSession

_HELP = """\
/policy, /base, /both   who answers: the trained version, the base model, or both
/example [ENV] N        run training example N in the run's environment, and show the reward
/reset                  start a new conversation
/quit                   end; so does the end of the input"""
_POLICY = "policy"


@command
def main() -> None:
    """Read messages and commands, one a line, from a terminal or a pipe."""
    parser = ArgumentParser(
        "chat",
        description="Talk with a version of a run next to its base model. One message or command a line:",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--step", type=int, help="version (default: what the run samples from, or the newest)")
    parser.add_argument("--model", help="path of the base model, if it has moved")
    parser.add_argument("--temperature", type=float, help="default: that of the run")
    parser.add_argument("--max-tokens", type=int, help="default: that of the run")
    arguments = parser.parse_args(sys.argv[1:])
    if not arguments.run.is_dir():
        raise ConfigError(f"{arguments.run} is no directory; pass a run directory")
    sampling = {key: getattr(arguments, key) for key in ("temperature", "max_tokens")}
    for option, least in (("temperature", 0), ("max_tokens", 1)):
        if sampling[option] is not None and not sampling[option] >= least:
            raise ConfigError(f"--{option.replace('_', '-')} {sampling[option]}: must be at least {least}")
    from prime_rl.core.logs import set_up_logging
    from prime_rl.entrypoints.delivery.chat_session import ChatSession

    set_up_logging("warning", False, None)
    for stream in (sys.stdin, sys.stdout):
        cast("TextIOWrapper", stream).reconfigure(errors="replace")
    given = {key: value for key, value in sampling.items() if value is not None}
    with ChatSession(arguments.run, arguments.step, arguments.model, given) as session:
        if sys.stdin.isatty():
            print(_HELP)
        try:
            _Conversation(session).run()
        except BrokenPipeError:  # the reader has exited, as in `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Conversation:
    """The messages with each policy, and who answers next."""

    def __init__(self, session: "ChatSession") -> None:
        self._session = session
        self._policies = [_POLICY]
        self._histories: dict[str, list[dict[str, Any]]] = {}

    def run(self) -> None:
        """Answer the lines of stdin until its end."""
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return
            if line == "/quit":
                return
            try:
                self._answer(line)
            except (ConfigError, RunError) as error:  # a refused request; a pipe ends with the error
                if not sys.stdin.isatty():
                    raise
                print(f"error: {escape_control_chars(str(error))}", flush=True)

    def _answer(self, line: str) -> None:
        match line.split():
            case []:
                pass
            case ["/policy" | "/base" | "/both" as choice]:
                choices = {"/both": [_POLICY, "base"], "/base": ["base"], "/policy": [_POLICY]}
                self._policies = choices[choice]
            case ["/reset"]:
                self._histories.clear()
            case ["/help"]:
                print(_HELP, flush=True)
            case ["/example", *env, number] if len(env) <= 1 and number.isdecimal():
                for policy in self._policies:
                    self._show_example(policy, int(number), env[0] if env else None)
            case [word, *_] if word.startswith("/"):
                raise ConfigError(f"there is no command {line}; /help lists them")
            case _:
                for policy in self._policies:
                    self._say(policy, line)

    def _say(self, policy: str, text: str) -> None:
        history = self._histories.setdefault(policy, [])
        messages = [*history, {"role": "user", "content": text}]
        parts = self._session.ask(policy, messages)
        print(f"{next(parts)}: ", end="", flush=True)
        reply = []
        for part in parts:
            reply.append(part)
            print(_inert(part), end="", flush=True)
        print(flush=True)
        self._histories[policy] = [*messages, {"role": "assistant", "content": "".join(reply)}]

    def _show_example(self, policy: str, example: int, env: str | None) -> None:
        name, row = self._session.run_example(policy, example, env)
        if row.failure is not None:
            print(f"{name}: example {example} failed: {_inert(row.failure.message)}", flush=True)
            return
        rollout = row.rollouts[0]
        for message in rollout.messages:
            speaker = name if message["role"] == "assistant" else message["role"]
            content = message.get("content")
            print(f"{speaker}: {_inert(content if isinstance(content, str) else json.dumps(content))}")
        if rollout.answer is not None:
            print(f"reference answer: {_inert(rollout.answer)}")
        metrics = "".join(f", {_inert(key)} {value:.4g}" for key, value in rollout.metrics.items())
        print(f"reward {rollout.reward:.4g}{metrics}", flush=True)
        self._histories[policy] = list(rollout.messages)


def _inert(text: str) -> str:
    return escape_control_chars(replace_surrogates(text))


if __name__ == "__main__":
    main()
