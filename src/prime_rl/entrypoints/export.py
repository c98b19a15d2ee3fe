"""`export`: write a version of a run as a Hugging Face model or a peft adapter, with a model card."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prime_rl.core.entry_point import ArgumentParser, command
from prime_rl.core.errors import ConfigError, RunError

_DESCRIPTION = "Write a version of a policy as a Hugging Face model with a model card, and push it to the hub if asked."


@command
def main() -> None:
    """Export, and push with `--push`."""
    parser = ArgumentParser("export", description=_DESCRIPTION)
    parser.add_argument("run", type=Path, help="run directory; or its weights/step_N or checkpoints/step_N")
    parser.add_argument("target", type=Path, help="folder to write; must not exist")
    parser.add_argument("--step", type=int, help="version to export (default: the newest)")
    parser.add_argument("--adapter", action="store_true", help="of a LoRA run: only the adapter, in peft's format")
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, help="of a checkpoint's weights (default: as in weights/)")
    parser.add_argument("--model", help="path of the base model, if it has moved")
    parser.add_argument("--push", metavar="REPO", help="create this repository of the hub and upload the folder")
    parser.add_argument("--public", action="store_true", help="with --push: a new repository is public")
    arguments = parser.parse_args(sys.argv[1:])
    if arguments.public and arguments.push is None:
        parser.error("--public describes the repository of --push; set it too")
    from prime_rl.entrypoints.delivery.policy_export import ExportForm, export_policy  # --help does not need it

    if arguments.push is not None:
        _check_hub(arguments.push)
    form = ExportForm(arguments.adapter, arguments.dtype, arguments.model)
    source = export_policy(arguments.run, arguments.target, arguments.step, form)
    print(f"wrote {arguments.target}: step {source.version.step} from {source.directory}", flush=True)
    if arguments.push is not None:
        print(f"pushed to {_push(arguments.target, arguments.push, private=not arguments.public)}")


def _check_hub(repository: str) -> None:
    """Check the name of a repository, and that the hub accepts the token, before anything is written."""
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(f"--push {repository}: {str(error).splitlines()[0]}") from None
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("--push needs the hub, and HF_HUB_OFFLINE is set; unset it, or omit --push")
    if get_token() is None:
        raise ConfigError("--push needs a token of the hub that may write; set HF_TOKEN, or run `hf auth login`")
    with _hub_errors(f"--push {repository}: {constants.ENDPOINT} does not accept the token", ConfigError):
        HfApi().whoami()


def _push(folder: Path, repository: str, *, private: bool) -> str:
    """Create the repository unless it exists, upload the folder in one commit, and return its address."""
    from huggingface_hub import HfApi

    again = f"{folder} is complete; to push it again: hf upload {repository} {folder}"
    with _hub_errors(f"--push {repository} failed ({again})", RunError):
        hub = HfApi()
        created = hub.create_repo(repository, private=private, exist_ok=True)
        hub.upload_folder(repo_id=created.repo_id, folder_path=folder, commit_message=f"Upload {folder.name}")
    return str(created)


@contextmanager
def _hub_errors(problem: str, kind: type[ConfigError] | type[RunError]) -> Iterator[None]:
    """Raise `kind` with one line for an error of the hub or of the connection; the token is in no message."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HfHubHTTPError

    # Its bases are OSError and the HTTPError of the HTTP library that this version of the hub's library uses.
    kinds: tuple[type[Exception], ...] = (*HfHubHTTPError.__bases__, ValueError)
    try:
        yield
    except kinds as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise kind(f"{problem}: {reason.replace(get_token() or '-' * 9, '(token)')}") from None


if __name__ == "__main__":
    main()
