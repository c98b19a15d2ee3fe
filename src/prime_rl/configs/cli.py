"""The command line: `@ file.toml`, `--trainer @ file.toml`, `--key value`, `--flag`, `--no-flag`, `--block`.

Flags are read against the schema, not by argparse: a switch may name a whole block (`--ckpt`, `--no-ckpt`), a file may
follow any block, values may be dicts, and a wrong flag is answered in one line that names the right one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prime_rl.configs.base import RootConfig
from prime_rl.configs.schema import FREE, Kind, Node, UnknownKeyError, flag, parse_flag, resolve
from prime_rl.configs.sources import flatten, read_file, read_text
from prime_rl.configs.state import Assignment, Origin, Rank
from prime_rl.errors import ConfigError

_WORDS = {"true": True, "false": False, "1": True, "0": False, "none": None}


@dataclass
class CommandLine:
    """What was typed.

    Attributes:
        files: assignments of the TOML files, in the order of the files.
        flags: assignments of the flags.
        help: `--help` was given.
        dry_run: `--dry-run` was given.
    """

    files: list[list[Assignment]] = field(default_factory=list)
    flags: list[Assignment] = field(default_factory=list)
    help: bool = False
    dry_run: bool = False


def parse(root: type[RootConfig], argv: Sequence[str]) -> CommandLine:
    """Read the arguments after the program's name.

    Raises:
        ConfigError: an unknown flag, a missing value, a file that cannot be read ...
    """
    return _Parser(root, list(argv)).run()


class _Parser:
    """Consumes `self.rest` from the front."""

    def __init__(self, root: type[RootConfig], argv: list[str]) -> None:
        self.root, self.rest, self.line = root, argv, CommandLine()

    def run(self) -> CommandLine:
        while self.rest:
            if _starts_file(self.rest[0]):
                self._files(())
                continue
            token = self.rest.pop(0)
            if token in ("--help", "-h"):
                self.line.help = True
            elif token == "--dry-run":
                self.line.dry_run = True
            elif token.startswith("--") and len(token) > 2:
                self._flag(token)
            else:
                raise ConfigError(f'unexpected argument "{token}"; keys are typed --key value, files @ file.toml')
        return self.line

    def _files(self, section: Sequence[str]) -> None:
        """Read one or more `@ file.toml` in a row."""
        while self.rest and _starts_file(self.rest[0]):
            token = self.rest.pop(0)
            if token == "@":
                if not self.rest or self.rest[0].startswith("--"):
                    raise ConfigError("@ is not followed by a configuration file")
                file = self.rest.pop(0)
            else:
                file = token[1:]
                if not Path(file).is_file():
                    raise ConfigError(f"{token}: there is no file {file}; configuration files are given as @ file.toml")
            self.line.files.append(read_file(self.root, file, section))

    def _flag(self, token: str) -> None:
        name, equals, text = token.partition("=")
        parts, node, negated = self._lookup(name)
        if not equals and not negated and self.rest and _starts_file(self.rest[0]):
            if node.kind is not Kind.BLOCK:
                raise ConfigError(f"{name} is not a block of keys, so no file can be given for it")
            self._files(parts)
            return
        if negated:
            if equals:
                raise ConfigError(f"{name} takes no value")
            value: object = False if node.kind is Kind.FLAG else None
        elif equals:
            value = read_text(node, text)
        else:
            value = self._value(name, node)
        origin = Origin(Rank.COMMAND_LINE, name)
        if isinstance(value, str) and node.kind is Kind.FLAG:
            value = _WORDS.get(value.lower(), value)
        self.line.flags += flatten(self.root, parts, value, origin)

    def _lookup(self, name: str) -> tuple[list[str], Node, bool]:
        """The parts of a flag, what it names, and whether it was spelled `--no-`."""
        parts = parse_flag(name)
        try:
            return parts, resolve(self.root, parts)[1], False
        except UnknownKeyError as error:
            unknown = error
        if name.startswith(("--no-", "--no_")):
            bare = parse_flag("--" + name[5:])
            try:
                node = resolve(self.root, bare)[1]
            except UnknownKeyError as error:
                raise self._unknown(name, error) from None
            if (node.kind is not Kind.FLAG and not node.optional) or node is FREE:
                raise ConfigError(f"{name}: {flag(bare)} is neither a switch nor optional; give it a value instead")
            return bare, node, True
        raise self._unknown(name, unknown)

    def _unknown(self, name: str, error: UnknownKeyError) -> ConfigError:
        hint = error.hint.replace("did you mean ", "did you mean --").replace("_", "-")
        return ConfigError(f"unknown key {name}{hint or f'; see `{self.root.command} --help`'}")

    def _value(self, name: str, node: Node) -> object:
        """Take the value that follows a flag, or decide that none does."""
        following = self.rest[0] if self.rest and not self.rest[0].startswith("--") else None
        if node.kind is Kind.FLAG:
            if following is not None and following.lower() in _WORDS:
                return _WORDS[self.rest.pop(0).lower()]
            return True
        if node.kind is Kind.BLOCK:
            return self._block_value(name, node, following)
        if following is None:
            raise ConfigError(f"{name} needs a value ({node.metavar})")
        text = self.rest.pop(0)
        if node.kind is Kind.LIST and text[:1] not in "[{":
            while self.rest and not self.rest[0].startswith("--") and not _starts_file(self.rest[0]):
                text += "," + self.rest.pop(0)
        return read_text(node, text)

    def _block_value(self, name: str, node: Node, following: str | None) -> object:
        if following is not None and (node.shorthand or following[:1] == "{" or following.lower() in _WORDS):
            return read_text(node, self.rest.pop(0))
        if following is not None:
            raise ConfigError(f'{name} is a block of keys and cannot be "{following}"; set {name}.KEY, or give a file')
        if not node.optional:
            raise ConfigError(f"{name} is a block of keys: follow it with @ file.toml, or set {name}.KEY")
        return {}


def _starts_file(token: str) -> bool:
    return token.startswith("@")
