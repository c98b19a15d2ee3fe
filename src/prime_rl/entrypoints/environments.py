"""`environments`: list the environments that can be used. `environments ID`: show the arguments of one."""

import argparse
import ast
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from prime_rl.core.entry_point import command, exit_with_reader
from prime_rl.core.errors import ConfigError, summarize_exception
from prime_rl.rollouts.environment_id import find_environment, identify, installed_environments

_FILE_COLUMNS = 160


@command
def main() -> None:
    """Print the installed environments and those in the working directory, or the arguments of one."""
    parser = argparse.ArgumentParser(prog="environments", description="List environments, or the arguments of one.")
    parser.add_argument("id", nargs="?", help="import this environment and show its arguments")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    with exit_with_reader():
        if arguments.id is None:
            _list(as_json=arguments.json)
        else:
            _describe(arguments.id, as_json=arguments.json)


def _list(*, as_json: bool) -> None:
    rows = [*_installed(), *_files(Path.cwd())]
    if as_json:
        print(json.dumps(rows))
    else:
        _print_table(("id", "version", "hash", "source", "summary"), rows)


def _describe(env_id: str, *, as_json: bool) -> None:
    found = find_environment(env_id, "id")
    try:
        module = found.load()
    except Exception as error:  # foreign code may raise anything
        raise ConfigError(f"environment {env_id!r} cannot be imported: {summarize_exception(error)}") from error
    load = getattr(module, "load_environment", None)
    rows = [
        {"argument": name, "default": "" if parameter.default is parameter.empty else repr(parameter.default)}
        for name, parameter in (inspect.signature(load).parameters.items() if load is not None else ())
    ]
    if as_json:
        print(json.dumps({"id": env_id, "kind": "classic" if load else "v1 taskset", "arguments": rows}))
        return
    print(f"{identify(found)}, {'classic' if load else 'v1 taskset'}, {found.origin}")
    if load is not None:
        if load.__doc__:
            print(inspect.cleandoc(load.__doc__))
        _print_table(("argument", "default"), rows)


def _installed() -> Iterator[dict[str, Any]]:
    """Yield the installed environments by name: packages that require verifiers and have a module of their name."""
    for distribution in installed_environments():
        with suppress(ConfigError):  # it only uses verifiers, or a file has the same name
            found = find_environment(distribution.name)
            identity = identify(found)
            yield {
                "id": found.module,
                "version": distribution.version,
                "hash": identity.content_hash,
                "source": identity.source or "package index",
                "summary": distribution.metadata["Summary"] or "",
            }


def _files(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the files of a directory that define `load_environment`, without importing them."""
    for path in sorted(directory.glob("*.py")):
        with suppress(SyntaxError, UnicodeDecodeError, ConfigError):
            tree = ast.parse(path.read_text())
            if any(isinstance(node, ast.FunctionDef) and node.name == "load_environment" for node in tree.body):
                identity = identify(find_environment(str(path), "id"))
                summary = (ast.get_docstring(tree) or "").partition("\n")[0]
                row = {"id": path.stem, "version": None, "hash": identity.content_hash, "source": str(path)}
                yield {**row, "summary": summary}


def _print_table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    table = Table(*columns)
    for row in rows:
        table.add_row(*(str(row[column] or "") for column in columns))
    Console(markup=False, width=None if sys.stdout.isatty() else _FILE_COLUMNS).print(table)


if __name__ == "__main__":
    main()
