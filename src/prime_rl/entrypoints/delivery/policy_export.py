"""Writes a version of a policy as a Hugging Face model or a peft adapter: the one way out of a run, also of Tinker's.

The folder appears whole, by one rename, or not at all (I4). The tensors of a copied or rebuilt version have the hashes
that the trainer published (I5).
"""

import json
import os
import shutil
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from prime_rl.configs.base_model import TokenizerConfig
from prime_rl.configs.logging import LogConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import ConfigError, RunError, translate_error, unwritable
from prime_rl.core.logs import set_up_logging
from prime_rl.core.types import PolicyVersion
from prime_rl.entrypoints.delivery.model_card import CARD, write_card
from prime_rl.storage.artifact import MANIFEST, WEIGHTS_FORMAT, ArtifactError, fsync, read_manifest
from prime_rl.storage.checkpoint_artifacts import (
    COMMITTED,
    PART_FORMAT,
    TRAINER,
    check_hashes,
    find_checkpoints,
    read_commit,
)
from prime_rl.storage.delta.chain import chain_of, rebuild
from prime_rl.storage.file_locks import check_run_format
from prime_rl.storage.model_files import find_model
from prime_rl.storage.paths import RUN_FOLDER, RunPaths, step_of, steps_in
from prime_rl.storage.tensor_hashes import content_hash, hash_tensors
from prime_rl.storage.weights.weight_retention import hold_version

ADAPTER_CONFIG = "adapter_config.json"
_DOWNLOAD_SECONDS = 3600.0
# The settings that define the model. Others (ranks, kernels, memory) stay at their defaults, since many of them are not
# supported by one process on a CPU.
_MODEL_KEYS = ("name", "revision", "trust_remote_code", "dtype", "lora", "debug")


@dataclass(frozen=True, slots=True)
class ExportForm:
    """What to write.

    Attributes:
        adapter: only the adapter of a LoRA run, in peft's format; otherwise a whole model, with the adapter merged.
        dtype: of a checkpoint's weights; None is that of the published versions.
        model: path of the base model, if it has moved.
    """

    adapter: bool = False
    dtype: str | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class PolicySource:
    """Where a version is: a published version, or a checkpoint, and the run that wrote it, if known."""

    directory: Path
    is_checkpoint: bool
    version: PolicyVersion
    manifest: Mapping[str, Any]
    run: RunPaths | None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the trainer in a checkpoint."""
        return dict(self.manifest["config"]) if self.is_checkpoint else {}


def export_policy(place: Path, target: Path, step: int | None = None, form: ExportForm = ExportForm()) -> PolicySource:
    """Write a version to the new folder `target`, with its model card, and return what was exported.

    Args:
        place: a run directory, or a `weights/step_N` or `checkpoints/step_N`.
        target: must not exist.
        step: the version of a run, which is the number of steps done; None is the newest.
        form: what to write.

    Raises:
        ConfigError: `target` exists, or there is no such version in this form.
        RunError: what should be exported is damaged.
    """
    target = target.resolve()  # also of "new/.."
    if target.exists():
        raise ConfigError(f"{target} exists already; choose another folder")
    source = find_policy(place, step, form)
    with translate_error(OSError, unwritable(f"cannot write {target}", "choose another folder")):
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix=f".tmp-{target.name}-", dir=target.parent)
    with scratch as folder:
        model = Path(folder) / "model"
        with translate_error(ArtifactError, lambda error: RunError(f"cannot export {source.directory}: {error}")):
            write_policy(source, model, form)
            written = content_hash(hash_tensors(model))
            if (manifest := model / MANIFEST).exists():  # none if an adapter was merged
                if read_manifest(model, WEIGHTS_FORMAT)["hash"] != written:
                    raise ArtifactError("its tensors differ from those that were published")
                manifest.unlink()
        _write_template(source, model)
        write_card(model / CARD, source.run, source.version, source.manifest, source.settings, written)
        for file in model.iterdir():
            file.chmod(0o644)
            fsync(file)
        with translate_error(OSError, unwritable(f"cannot write {target}", "choose another folder")):
            model.rename(target)
    fsync(target.parent)
    return source


def _write_template(source: PolicySource, model: Path) -> None:
    """Give the model the chat template of the run, if it had one of its own. Raises ConfigError if it is gone."""
    if source.run is not None and (file := source.run.config("orchestrator")).is_file():
        template = tomllib.loads(file.read_text()).get("rendering", {}).get("chat_template", "None")
        if template != "None":
            problem = f"rendering.chat_template = {template} of the run cannot be read"
            with translate_error(OSError, lambda error: ConfigError(f"{problem}: {error.strerror}; restore it")):
                (model / "chat_template.jinja").write_text(Path(template).read_text())


def find_policy(place: Path, step: int | None = None, form: ExportForm = ExportForm()) -> PolicySource:
    """Return the version that `place` names; see `export_policy`. A published one is preferred to a checkpoint."""
    if not place.is_dir():
        raise ConfigError(f"{place} is no directory; pass a run directory, weights/step_N or checkpoints/step_N")
    is_one = (place / COMMITTED).exists() or (place / MANIFEST).exists() or step_of(place) is not None
    if is_one and step is not None:
        raise ConfigError(f"--step selects a version of a run, and {place} is one version; omit it")
    if (place / MANIFEST).exists():
        return _version(place, form)
    if is_one:
        with translate_error(
            ArtifactError, lambda error: ConfigError(f"{place} is not a complete checkpoint: {error}")
        ):
            return _checkpoint(place, form)
    paths, reasons = RunPaths(place), list[tuple[bool, int, str]]()
    check_run_format(paths)
    published, saved = steps_in(paths.weights_dir), find_checkpoints(paths.checkpoints_dir).steps
    for candidate in sorted({*published, *saved} if step is None else {step}, reverse=True):
        for steps, find, folder in (
            (published, _version, paths.weights(candidate)),
            (saved, _checkpoint, paths.checkpoint(candidate)),
        ):
            if candidate in steps:
                try:
                    return find(folder, form)
                except (ConfigError, ArtifactError) as error:  # the other place may have it in this form
                    reasons.append((isinstance(error, ConfigError), candidate, str(error)))
    raise ConfigError(_absence(paths, step, sorted({*published, *saved}), reasons))


def write_policy(source: PolicySource, directory: Path, form: ExportForm = ExportForm()) -> None:
    """Write a version to the new `directory`, with a manifest unless an adapter was merged. Raises ArtifactError."""
    if source.is_checkpoint:
        _export_checkpoint(source, directory, form)
        return
    with hold_policy(source.directory) as (full, *deltas):
        if not (full / ADAPTER_CONFIG).is_file():
            directory.mkdir()
            rebuild(full, deltas, directory, threads=max(1, (os.cpu_count() or 1) // 2))
        elif form.adapter:
            shutil.copytree(full, directory)
        else:
            from prime_rl.trainer.weights.adapter_files import merge_adapter  # imports torch

            adapter = json.loads((full / ADAPTER_CONFIG).read_text())
            name = form.model or adapter["base_model_name_or_path"]
            revision = None if form.model else adapter.get("revision")
            merge_adapter(full, find_model(name, revision, _DOWNLOAD_SECONDS), directory)


@contextmanager
def hold_policy(version: Path) -> Iterator[list[Path]]:
    """Keep a version and those that it is rebuilt from; yield them, the full one first."""
    with ExitStack() as held:
        chain = chain_of(version)
        for directory in chain:
            held.enter_context(hold_version(directory))
        yield chain[::-1]


def _version(folder: Path, form: ExportForm) -> PolicySource:
    """Raises ConfigError if a published version does not have this form, ArtifactError if it is incomplete."""
    manifest = read_manifest(folder, WEIGHTS_FORMAT)
    full = chain_of(folder)[-1]
    if not (full / ADAPTER_CONFIG).is_file():
        if not (full / "config.json").is_file() or next(full.glob("model*.safetensors"), None) is None:
            raise ConfigError(f"{folder} has no files of weights: they were sent through memory")
        if form.adapter:
            raise ConfigError(f"--adapter: {folder} is a whole model; omit the flag, or export a checkpoint")
        if form.model is not None:
            raise ConfigError(f"--model: {folder} is a whole model, which needs no base model; omit the option")
        published = json.loads((full / "config.json").read_text())
        stored = published.get("dtype", published.get("torch_dtype"))
        if form.dtype not in (None, stored):
            raise ConfigError(f"--dtype: {folder} is in {stored}; only a checkpoint is written in another precision")
    elif form.dtype is not None:
        raise ConfigError(f"--dtype: {folder} is an adapter; only a checkpoint is written in another precision")
    version = PolicyVersion(manifest["branch"], manifest["step"])
    return PolicySource(folder, False, version, manifest, _run_of(folder))


def _checkpoint(folder: Path, form: ExportForm) -> PolicySource:
    """Raises as `_version`."""
    commit = read_commit(folder, only=TRAINER)
    manifest = read_manifest(folder / TRAINER, PART_FORMAT)
    if form.adapter and not manifest["config"]["model"].get("lora"):
        raise ConfigError(f"--adapter: {folder} has no adapters, all weights were trained; omit the flag")
    return PolicySource(folder, True, PolicyVersion(commit.branch, commit.step), manifest, _run_of(folder))


def _run_of(folder: Path) -> RunPaths | None:
    """Return the run of `weights/step_N` or `checkpoints/step_N`, if it is in its run directory."""
    root = folder.absolute().parent.parent
    return RunPaths(root) if (root / "metrics").is_dir() else None


def _absence(paths: RunPaths, step: int | None, steps: list[int], reasons: list[tuple[bool, int, str]]) -> str:
    """Say why a run has no such version."""
    if reasons:
        return max(reasons)[2]  # of the newest version that is complete
    if runs := sorted(one.name for one in paths.root.iterdir() if RUN_FOLDER.fullmatch(one.name)):
        return f"{paths.root} is a trainer of several runs; pass one of them: {', '.join(runs)}"
    wanted = "no trained weights" if step is None else f"no weights of step {step}"
    return (
        f"{paths.root} has {wanted}: a run keeps its newest weights/, and what --ckpt saves; available steps: "
        f"{', '.join(map(str, steps)) or 'none'}"
    )


def _export_checkpoint(source: PolicySource, target: Path, form: ExportForm) -> None:
    """Load the weights of a checkpoint and publish them as files, in one process on the CPU.

    Writes model, tokenizer and manifest to the new `target`. The hashes of the checkpoint's files are checked. The
    weights of the base model are read only for adapters.

    Raises:
        ConfigError: another version of the program wrote the checkpoint.
        RunError: the checkpoint is damaged, or the disk is full.
    """
    import torch  # takes seconds

    from prime_rl.trainer.checkpoints.trainer_state import load_model_and_optimizer
    from prime_rl.trainer.fsdp import compute_dtype
    from prime_rl.trainer.model.policy_model import load_tokenizer
    from prime_rl.trainer.parallel.process_group import join_world
    from prime_rl.trainer.process_setup import limit_process
    from prime_rl.trainer.weight_sync.publisher import Publisher
    from prime_rl.trainer.weights.policy_loading import make_policy

    set_up_logging("warning", LogConfig().utc)
    limit_process()
    part = source.directory / TRAINER
    check_hashes(part)
    config = model_config(source.manifest, form.model, form.adapter)
    settings = source.settings
    published = settings.get("weights_dtype", settings.get("weight_broadcast", {}).get("dtype", "auto"))
    written = compute_dtype(form.dtype or published, torch.device(source.manifest["device"]))
    with join_world("cpu", 60) as world:
        policy = make_policy(config, settings["seed"], world)
        load_model_and_optimizer(part, policy, None)
        tokenizer = load_tokenizer(TokenizerConfig(**settings["tokenizer"]), config)
        Publisher(policy, tokenizer, written, world).publish(target, source.version)


def model_config(manifest: Mapping[str, Any], model: str | None, adapter: bool) -> TrainerModelConfig:
    """Return the configuration of a checkpoint's model, for one process on a CPU.

    Raises:
        ConfigError: another version of the program wrote the checkpoint.
    """
    settings = manifest["config"]["model"]
    saved: dict[str, Any] = {key: settings[key] for key in _MODEL_KEYS if key in settings}
    if model is not None:
        saved |= {"name": model, "revision": None}
    saved |= {"seq_len": 1, "max_model_len": 1}  # no forward pass runs, so lengths do not matter
    if saved.get("lora"):
        on_cuda = manifest["device"] == "cuda" and saved["dtype"] == "auto"
        kept = "bfloat16" if on_cuda and saved["lora"]["base_dtype"] == "auto" else saved["lora"]["base_dtype"]
        saved["lora"] = {**saved["lora"], "base_dtype": kept, "publish": "adapter" if adapter else "merged"}
    problem = "the checkpoint's model settings were written by another version"
    with translate_error(ValidationError, lambda error: ConfigError(f"{problem}: {error.errors()[0]}")):
        return TrainerModelConfig(**saved)
