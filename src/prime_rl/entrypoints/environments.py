"""`environments`: list, add, test, remove and describe environments."""

import argparse
import ast
import asyncio
import json
import re
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from prime_rl.configs.environment import EnvConfig, environment_path
from prime_rl.configs.known_harnesses import KNOWN_HARNESSES
from prime_rl.core.entry_point import ArgumentParser, command, exit_with_reader
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.rollouts.environment_id import (
    find_environment,
    identify,
    identify_environments,
    installed_environments,
)
from prime_rl.rollouts.group_attempts import (
    EnvironmentFailed,
    SampleTooLong,
    UnsupportedEnvironment,
    config_errors,
)
from prime_rl.rollouts.separate.added_environments import (
    added_environments,
    api_of,
    find_modules,
    store_environments,
)
from prime_rl.rollouts.separate.crash_record import WorkerUnusable
from prime_rl.rollouts.separate.interpreters import (
    absolute_requirement,
    delete_interpreter,
    describe_interpreter,
    prepare_interpreter,
)
from prime_rl.rollouts.separate.values import arguments_of

_FILE_COLUMNS = 160
_SHOWN_CHARACTERS = 300
_TABLES = (("arguments", "argument", "default"), ("rewards", "reward", "weight"), ("harnesses", "harness", "install"))
_SEQ_LEN = 1_000_000
"""The server has its own limit."""


@command
def main() -> None:
    """Run the subcommand; `environments ID` is `environments info ID`."""
    parser = ArgumentParser(prog="environments", description="List, add, test, remove, describe environments.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    commands = parser.add_subparsers(dest="command", metavar="{list,add,test,remove,info}")
    commands.add_parser("list", help="installed and added ones, and the files of the working directory (default)")
    add = commands.add_parser("add", help="install an environment for runs that name it by its id")
    add.add_argument("source", help="a requirement such as staros-stardata[env]==0.1.1, a folder, wheel or git address")
    add.add_argument("--as", dest="id", help="name it so, if the package has one environment or --module names it")
    add.add_argument("--module", help="the module of the environment in the package; default: all that are found")
    add.add_argument("--with", dest="requirements", action="append", default=[], help="a further requirement")
    add.add_argument("--python", help="its Python version")
    test = commands.add_parser("test", help="run a few rollouts and show prompts, rewards, errors, seconds")
    test.add_argument("-n", type=int, default=5, help="number of examples (default 5)")
    test.add_argument("--reply", default="{answer}", help="what a scripted model says; {answer} is that of the example")
    test.add_argument("--server", help="address of a model with OpenAI's API instead, such as http://localhost:8000/v1")
    test.add_argument("--model", default="policy", help="its name")
    remove = commands.add_parser("remove", help="forget an added environment, and delete its packages")
    info = commands.add_parser("info", help="show arguments with defaults, columns and rewards")
    for each in (test, info):
        each.add_argument("--args", type=_table, default={}, help="env.args, as JSON")
    for each in (test, remove, info):
        each.add_argument("id")
    known = {*commands.choices, "-h", "--help", "--json"}
    words = sys.argv[1:] if not sys.argv[1:] or sys.argv[1] in known else ["info", *sys.argv[1:]]
    words.sort(key=lambda word: word != "--json")  # it belongs to all
    arguments = parser.parse_args(words)
    with exit_with_reader():
        match arguments.command:
            case "add":
                _add(arguments)
            case "test":
                _test(arguments)
            case "remove":
                _remove(arguments.id)
            case "info":
                _describe(arguments)
            case _:
                _list(as_json=arguments.json)


def _table(text: str) -> dict[str, object]:
    with suppress(ValueError):
        if isinstance(value := json.loads(text), dict):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")


def _list(*, as_json: bool) -> None:
    rows = [*_installed(), *_files(Path.cwd()), *_added()]
    if as_json:
        print(json.dumps(rows))
    else:
        _print_table(("id", "version", "api", "interpreter", "size", "source", "summary"), rows)


def _add(arguments: argparse.Namespace) -> None:
    source = absolute_requirement(arguments.source.strip())
    if not source:
        raise ConfigError("SOURCE is empty")
    if environment_path(source) is not None and source.endswith(".py"):
        raise ConfigError(f"{arguments.source} is a file: name it in env.id; its packages are env.requirements")
    if arguments.id is not None:
        _check_name(arguments.id)
    requirements = list(map(absolute_requirement, arguments.requirements))
    stored, lines = added_environments(), list[str]()

    def inform(line: str) -> None:
        lines.append(line)
        _inform(line)

    def prepare(module: str, refresh: bool) -> Path:
        config = EnvConfig(
            id=module, name=source[:100], package=source, requirements=requirements, python=arguments.python
        )
        return prepare_interpreter(config, "add", None, None, inform, refresh=refresh).path

    interpreter = prepare(arguments.module or "", True)
    try:
        found = find_modules(interpreter, source, arguments.module)
        if arguments.id is not None and len(found) > 1:
            raise ConfigError(f"--as: {source} has several environments; name one by --module: {', '.join(found)}")
        for module in found if arguments.id is None else ():
            _check_name(module)
        if classic := [module for module, api in found.items() if api == "classic"]:
            interpreter = prepare(classic[0], False)  # perhaps with an older verifiers, which has this API
        versions, _ = describe_interpreter(interpreter)
        if "verifiers ?" in versions:
            raise ConfigError(f"{source} does not ask for verifiers; add --with 'verifiers>=0.1.8'")
    except ConfigError:
        if any(": installing " in line for line in lines):  # for this command
            delete_interpreter(interpreter)
        raise
    names = {arguments.id or module: module for module in found}
    for name, module in names.items():
        keys = {"id": module, "package": source, "requirements": requirements, "python": arguments.python}
        stored[name] = {**keys, "interpreter": str(interpreter), "api": found[module]}
    store_environments(stored)
    for name, module in names.items():
        print(f'added {name} ({found[module]}, {versions}): env.id = "{name}"')


def _check_name(name: str) -> None:
    """Raise ConfigError if a new environment cannot be named so."""
    if re.fullmatch(r"\w[\w.-]*", name) is None:
        raise ConfigError(f"--as {name!r}: use letters, digits, _, - and .")
    if (other := _origin(name)) is not None:
        raise ConfigError(f"{name} is already {other}; choose another name with --as")


def _origin(name: str) -> Path | None:
    """Return the file of the environment that an id already names."""
    with suppress(ConfigError):
        return find_environment(name).origin
    return None


def _remove(name: str) -> None:
    stored = added_environments()
    if (removed := stored.pop(name, None)) is None:
        raise ConfigError(f"{name} was not added; added are {', '.join(stored) or 'none'}")
    store_environments(stored)
    if all(each["interpreter"] != removed["interpreter"] for each in stored.values()):
        delete_interpreter(Path(removed["interpreter"]))
    print(f"removed {name}")


def _describe(arguments: argparse.Namespace) -> None:
    try:
        env, backend = _load(arguments)
    except ConfigError as error:
        if _origin(arguments.id) is None:  # it has packages of its own, or is not there
            raise
        described, head = _describe_unloaded(arguments.id), str(find_environment(arguments.id, "id").origin)
        _inform(f"rewards and columns are not shown: {error}")
    else:
        row = backend._row(0)
        columns = [*(row if isinstance(row, Mapping) else dict(row))]
        described = {**backend.describe(), "columns": columns, "examples": len(backend)}
        head = f"{env.identity}, {described['api']}, {len(backend)} examples, columns {', '.join(columns)}"
    if described["api"] == "v1":
        described["harnesses"] = {name: known.install for name, known in KNOWN_HARNESSES.items()}
    if arguments.json:
        print(json.dumps({"id": arguments.id, **described}))
        return
    print(head)
    for kind, key, other in _TABLES:
        if kind in described:
            _print_table((key, other), [{key: name, other: value} for name, value in described[kind].items()])


def _describe_unloaded(env_id: str) -> dict[str, Any]:
    """Return the arguments of a classic environment whose data cannot be loaded, of this interpreter."""
    with config_errors(f"environment {env_id!r} cannot be imported"):
        module = find_environment(env_id, "id").load()
    load = getattr(module, "load_environment", None)
    arguments = {} if load is None else arguments_of(load)
    return {"api": "v1" if load is None else "classic", "arguments": arguments, "rewards": {}}


def _load(arguments: argparse.Namespace) -> tuple[EnvConfig, Any]:
    """Return an environment's configuration and backend."""
    from prime_rl.rollouts.workers import worker_main  # slow to import

    (env,) = identify_environments([EnvConfig(id=arguments.id, args=arguments.args)], "env", _inform, _inform)
    return env, worker_main.load(env, None, "train", True, _inform)


def _inform(line: str) -> None:
    print(line, file=sys.stderr)


def _test(arguments: argparse.Namespace) -> None:
    from prime_rl.rollouts.clients.openai_chat_client import ChatServer

    if arguments.n < 1:
        raise ConfigError(f"-n {arguments.n}: use at least 1")
    _, backend = _load(arguments)
    answers = [backend.answer(example) or "" for example in range(min(arguments.n, len(backend)))]

    async def run() -> None:
        async with (
            _scripted_model() as scripted,
            ChatServer(arguments.server or scripted.url, arguments.model) as server,
        ):
            for example, answer in enumerate(answers):
                scripted.reply = arguments.reply.replace("{answer}", answer)
                start = time.monotonic()
                result = await _rollout(backend, example, server)
                rows.append({"example": example, **result, "seconds": round(time.monotonic() - start, 2)})

    rows: list[dict[str, Any]] = []
    asyncio.run(run())
    if arguments.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            for role, text in row.pop("messages"):
                Console(markup=False).print(f"{role}: {_shorten(text)}", highlight=False, style="dim")
            metrics = ", ".join(f"{name} {value:g}" for name, value in row["metrics"].items())
            outcome = row["error"] or f"reward {row['reward']:g} ({metrics})"
            print(f"example {row['example']}, {row['seconds']} s: {outcome}\n")
    if failed := sum(row["error"] is not None for row in rows):
        raise RunError(f"{failed} of {len(rows)} rollouts failed")


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}… ({len(text):,} characters)"


async def _rollout(backend: Any, example: int, server: Any) -> dict[str, Any]:
    """Return the messages, reward, metrics and error of one rollout."""
    try:
        (rollout,) = await backend.run_group(example, 1, server, {}, _SEQ_LEN)
    except (EnvironmentFailed, SampleTooLong, UnsupportedEnvironment, WorkerUnusable) as error:
        return {"messages": [], "reward": None, "metrics": {}, "error": str(error)}
    return {"messages": rollout.text, "reward": rollout.reward, "metrics": dict(rollout.metrics), "error": None}


class _Scripted:
    """A model that always says the same.

    Attributes:
        url: its address.
        reply: what it says.
    """

    def __init__(self, url: str) -> None:
        self.url, self.reply = url, ""


@asynccontextmanager
async def _scripted_model() -> AsyncIterator[_Scripted]:
    from aiohttp import web

    listening = socket.create_server(("127.0.0.1", 0))
    scripted = _Scripted(f"http://127.0.0.1:{listening.getsockname()[1]}/v1")

    async def answer(_: web.Request) -> web.Response:
        message = {"role": "assistant", "content": scripted.reply}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({"id": "scripted", "choices": [choice], "usage": {}})

    application = web.Application()
    application.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.SockSite(runner, listening).start()
        yield scripted
    finally:
        await runner.cleanup()


def _installed() -> Iterator[dict[str, Any]]:
    """Yield the installed environments by name: packages that require verifiers and have a module of their name."""
    for distribution in installed_environments():
        with suppress(ConfigError):  # it only uses verifiers, or a file has the same name
            found = find_environment(distribution.name)
            if api_of(found.origin) is None:  # it only uses verifiers
                continue
            identity = identify(found)
            yield {
                "id": found.module,
                "version": distribution.version,
                "api": api_of(found.origin),
                "interpreter": "",
                "size": "",
                "hash": identity.content_hash,
                "source": identity.source or "package index",
                "summary": distribution.metadata["Summary"] or "",
            }


def _files(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the files of a directory that have an environment, without importing them."""
    for path in sorted(directory.glob("*.py")):
        with suppress(SyntaxError, UnicodeDecodeError, ConfigError):
            if (api := api_of(path)) is not None:
                identity = identify(find_environment(str(path), "id"))
                summary = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
                row = {"id": path.stem, "version": None, "api": api, "interpreter": "", "size": ""}
                yield {**row, "hash": identity.content_hash, "source": str(path), "summary": summary}


def _added() -> Iterator[dict[str, Any]]:
    for name, keys in added_environments().items():
        interpreter = Path(keys["interpreter"])
        row = {"id": name, "version": None, "api": keys["api"], "source": keys["package"], "summary": "", "hash": None}
        if not interpreter.exists():
            yield {**row, "interpreter": "made at the next start", "size": ""}
            continue
        versions, size = describe_interpreter(interpreter)
        yield {**row, "interpreter": versions, "size": f"{size / 1e6:.0f} MB"}


def _print_table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    table = Table(*columns)
    for row in rows:
        table.add_row(*("" if row[column] is None else str(row[column]) for column in columns))
    Console(markup=False, width=None if sys.stdout.isatty() else _FILE_COLUMNS).print(table)


if __name__ == "__main__":
    main()
