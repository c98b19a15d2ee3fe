"""The command line: `@ file.toml`, `--trainer @ file.toml`, `--key value`, `--flag`, `--no-flag`, `--block`.

Flags are parsed with the schema instead of argparse (docs/design/configuration_library.md): a switch can be a whole
block (`--ckpt`, `--no-ckpt`), a file can follow any block, and an unknown flag is reported with the closest known one.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from prime_rl.core.errors import ConfigError
from prime_rl.loading.base_config import BaseConfig
from prime_rl.loading.provenance import Assignment, Origin, Rank
from prime_rl.loading.schema import FREE, Kind, Node, find, flag, hint
from prime_rl.loading.sources import flatten, read_file, read_text

_WORDS = {"true": True, "false": False, "1": True, "0": False, "none": None}


class CommandLine:
    """The parsed arguments after the program's name. Raises ConfigError for bad input.

    Attributes:
        files: the assignments of each TOML file, in order.
        flags: the assignments of the flags.
        actions: which of `--help`, `--help-all` and `--dry-run` were given.
    """

    def __init__(self, root: type[BaseConfig], argv: Sequence[str]) -> None:
        self.files: list[list[Assignment]] = []
        self.flags: list[Assignment] = []
        self.actions = set[str]()
        self._root, self._rest = root, list(argv)
        while self._rest:
            if self._rest[0].startswith("@"):
                self._read_files(())
                continue
            token = self._rest.pop(0)
            if token in ("--help", "-h", "--help-all", "--dry-run"):
                self.actions.add("--help" if token == "-h" else token)
            elif token.startswith("--") and len(token) > 2:
                self._read_flag(token)
            else:
                raise ConfigError(f'unexpected argument "{token}"; keys are given as --key value, files as @ file.toml')

    def _read_files(self, section: Sequence[str]) -> None:
        """Parse consecutive `@ file.toml`."""
        while self._rest and self._rest[0].startswith("@"):
            token = self._rest.pop(0)
            file = token[1:]
            if not file:
                if not self._rest or self._rest[0].startswith("--"):
                    raise ConfigError("@ is not followed by a configuration file")
                file = self._rest.pop(0)
            elif not Path(file).is_file():
                raise ConfigError(f"{token}: there is no file {file}; configuration files are given as @ file.toml")
            self.files.append(read_file(self._root, file, section))

    def _read_flag(self, token: str) -> None:
        name, equals, text = token.partition("=")
        parts, node, negated = self._find(name)
        if not equals and not negated and self._rest and self._rest[0].startswith("@"):
            if node.kind is not Kind.BLOCK:
                raise ConfigError(f"{name} is not a block of keys; a file can only follow a block")
            self._read_files(parts)
            return
        if negated and equals:
            raise ConfigError(f"{name} takes no value")
        if negated:
            value: object = False if node.kind is Kind.FLAG else None
        else:
            value = read_text(node, text) if equals else self._read_value(name, node)
        if isinstance(value, str) and node.kind is Kind.FLAG:
            value = _WORDS.get(value.lower(), value)
        given = flatten(self._root, parts, value, Origin(Rank.COMMAND_LINE, name))
        self.flags += [replace(assignment, negates=negated) for assignment in given]

    def _find(self, name: str) -> tuple[list[str], Node, bool]:
        """Return the parts of a flag, its node, and whether it starts with `--no-`."""
        parts, bare = name[2:].split("."), name[5:].split(".")
        if not all(parts):
            raise ConfigError(f"{name} is not a key; keys look like --trainer.optim.lr")
        if found := find(self._root, parts):
            return parts, found[1], False
        if name.startswith(("--no-", "--no_")) and all(bare) and (found := find(self._root, bare)):
            if (found[1].kind is not Kind.FLAG and not found[1].optional) or found[1] is FREE:
                raise ConfigError(f"{name}: {flag(bare)} is neither a switch nor optional; set a value instead")
            return bare, found[1], True
        advice = hint(self._root, parts).replace("did you mean ", "did you mean --").replace("_", "-")
        raise ConfigError(f"unknown key {name}{advice or f'; see `{self._root.command} --help`'}")

    def _read_value(self, name: str, node: Node) -> object:
        """Parse the value after a flag; a switch and an optional block need none."""
        following = self._rest[0] if self._rest and not self._rest[0].startswith("--") else None
        is_word = following is not None and following.lower() in _WORDS
        if node.kind is Kind.FLAG:
            return _WORDS[self._rest.pop(0).lower()] if is_word else True
        if node.kind is Kind.BLOCK:
            if following is None and node.optional:
                return {}
            if following is None:
                raise ConfigError(f"{name} is a block of keys: follow it with @ file.toml, or set {name}.KEY")
            if not (is_word or following[:1] == "{" or node.variants[0].shorthand):
                advice = f"set {name}.KEY, or follow it with @ file.toml"
                raise ConfigError(f'{name} is a block of keys and cannot be "{following}"; {advice}')
        if following is None:
            raise ConfigError(f"{name} needs a value ({node.metavar})")
        text = self._rest.pop(0)
        if node.kind is Kind.LIST and text[:1] not in "[{":
            while self._rest and not self._rest[0].startswith(("--", "@")):
                text += "," + self._rest.pop(0)
        return read_text(node, text)
