"""Writes a model card with what the files of a run say, and nothing else.

A value that the run did not record has no line. Names of models, environments and data are untrusted text: they appear
as inert code, and quoted in YAML.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from prime_rl.configs.loading.base_config import substitute
from prime_rl.core.json_lines import JsonLinesFile
from prime_rl.core.terminal_escape import escape_control_chars, replace_surrogates
from prime_rl.core.types import PolicyVersion
from prime_rl.storage.paths import RunPaths

CARD = "README.md"
_SETTINGS = (
    *("algorithm", "async_level", "seq_len", "batch_size", "rollouts_per_example", "num_minibatches", "max_steps"),
    *("seed", "loss.*", "advantage.*", "optim.*", "scheduler.*", "sampling.*", "model.lora.*", "model.dtype"),
    *("data.batch_size", "data.seq_len", "weight_broadcast.dtype", "rendering.*"),
)
"""The keys that the card lists. Others are paths, addresses or without effect on what is learned."""
_CURVES = (
    *("reward/mean", "completion_len/mean", "is_truncated/mean", "staleness/max", "pass@1", "loss", "val/loss"),
    *("entropy", "grad_norm", "mismatch_kl", "lr"),
)
_BARS = "▁▂▃▄▅▆▇█"
_MAX_BARS = 24
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_LICENCE = (
    "None was chosen when this card was written. The terms of the base model and of the data apply; state a licence in "
    "the header of this file before you publish the model."
)


@dataclass(frozen=True, slots=True)
class _RunFacts:
    """What the files of a run say.

    Attributes:
        command: rl or sft; None if unknown.
        settings: of trainer and orchestrator together, or of sft.
        rows: of metrics/*.jsonl.
        evaluations: summaries of `eval`, with the settings of each.
    """

    command: str | None
    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    evaluations: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]


def write_card(
    file: Path,
    run: RunPaths | None,
    version: PolicyVersion,
    manifest: Mapping[str, Any],
    settings: Mapping[str, Any],
    content: str,
) -> None:
    """Write the card of an exported model.

    Args:
        file: to write.
        run: the directory of the run, if known.
        version: of the policy.
        manifest: of the published version or of the checkpoint.
        settings: those of the trainer, if the checkpoint has them.
        content: content hash of the exported tensors.
    """
    facts = _read_run(run, settings, manifest.get("command"))
    directory = file.parent
    adapter = directory / "adapter_config.json"
    base = facts.settings.get("model", {}).get("name")
    if base is None and adapter.exists():
        base = json.loads(adapter.read_text()).get("base_model_name_or_path")
    is_on_hub = base is not None and _HUB_NAME.fullmatch(base) is not None and not Path(base).exists()
    header = {
        **({"base_model": base} if is_on_hub else {}),
        "library_name": "peft" if adapter.exists() else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["prime-rl", *({"rl": ["reinforcement-learning"], "sft": ["sft"]}.get(facts.command or "", []))],
    }
    kind = {"rl": "reinforcement learning", "sft": "supervised fine-tuning"}.get(facts.command or "", "training")
    origin = {
        "base model": None if base is None else f"{base if is_on_hub else Path(base).name}",
        "base model is": None if base is None or is_on_hub else "a local directory, not a model of the hub",
        "revision of the base model": facts.settings.get("model", {}).get("revision"),
        "steps": version.step,
        "branch of the run": version.branch,
        "hash of the published tensors": manifest.get("hash"),
        "hash of these tensors": content,
        **{f"{name} of the trainer": number for name, number in manifest.get("packages", {}).items()},
    }
    text = [
        "---\n" + "".join(f"{key}: {json.dumps(value)}\n" for key, value in header.items()) + "---",
        f"# Policy after {version.step} steps of {kind}\n\nTrained with "
        "[prime-rl](https://github.com/PrimeIntellect-ai/prime-rl). All values are from the files of the run.",
        "## Origin\n\n" + _table(("", "value"), origin.items()),
        _section("Data", ("", "value"), _data(facts, run)),
        _section("Settings", ("key", "value"), _chosen(facts.settings)),
        _section("Curves", ("metric", "first", "least", "greatest", "last", "over the steps"), _curves(facts, version)),
        _section(
            "Evaluation",
            ("environment", "steps of the policy", "examples", "mean reward", "95 % confidence interval"),
            _evaluations(facts, version, manifest.get("hash")),
        ),
        f"## Licence\n\n{_LICENCE}",
    ]
    file.write_text("\n\n".join(part for part in text if part) + "\n", encoding="utf-8")


def _read_run(run: RunPaths | None, settings: Mapping[str, Any], command: str | None) -> _RunFacts:
    if run is None:
        return _RunFacts(None, settings, [], [])
    configs = {role: _read_toml(run.config(role)) for role in ("trainer", "orchestrator", "sft")}
    if not configs["trainer"]:  # one of several runs
        configs["trainer"] = _read_toml(RunPaths(run.root.absolute().parent).config("trainer"))
    kind = "sft" if command == "sft" or configs["sft"] else "rl" if command or configs["orchestrator"] else None
    trainer: dict[str, Any] = {**configs["sft" if kind == "sft" else "trainer"], **settings}
    merged = trainer if kind == "sft" else _merged(trainer, configs["orchestrator"])
    rows = [row for role in ("orchestrator", "trainer") for row in _read_lines(run.metrics(role))]
    return _RunFacts(kind, merged, rows, list(_read_evaluations(run)))


def _merged(trainer: dict[str, Any], orchestrator: dict[str, Any]) -> dict[str, Any]:
    """Add the settings of the orchestrator, of which some are only what one of several runs changes of the trainer's.

    The orchestrator names the model too, without what the trainer does with it.
    """
    own: dict[str, Any] = {key: trainer[key] for key in ("model", "tokenizer") if key in trainer}
    changes = {key: value for key, value in orchestrator.items() if value is not None or key not in trainer}
    for block in ("optim", "scheduler", "loss"):
        base, new = trainer.get(block) or {}, changes.get(block) or {}
        changes[block] = new if new.get("type", base.get("type")) != base.get("type") else {**base, **new}
    lora = own.get("model", {}).get("lora")
    slot = orchestrator.get("model", {}).get("lora") or {}
    if lora:
        changed = {key: slot[key] for key in ("rank", "alpha") if slot.get(key) is not None}
        own["model"] = {**own["model"], "lora": {**lora, **changed}}
    return {**trainer, **changes, **own}


def _read_toml(file: Path) -> dict[str, Any]:
    return dict(substitute(tomllib.loads(file.read_text()), "None", None)) if file.is_file() else {}


def _read_lines(file: Path) -> Iterator[dict[str, Any]]:
    lines = JsonLinesFile(file)
    while rows := lines.read():
        yield from rows


def _read_evaluations(run: RunPaths) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    for pattern in ("evals/*/*/summary.json", "evaluations/*/evals/*/*/summary.json"):
        for file in sorted(run.root.glob(pattern)):
            if (settings := file.with_name("settings.json")).is_file():
                yield json.loads(file.read_text()), json.loads(settings.read_text())


def _data(facts: _RunFacts, run: RunPaths | None) -> Iterator[tuple[str, Any]]:
    """Yield the environments with their hashes, or the data sets of sft."""
    for env in facts.settings.get("env", []) if facts.command == "rl" else []:
        yield f"environment {env['id']}", env.get("identity")
        yield (
            f"arguments of {env['id']}",
            json.dumps(_without_folders(env["args"])) if env.get("args") else None,
        )
    ledgers = run.ledger_dir.glob("branch_*.jsonl") if run is not None else []
    if newest := max(ledgers, key=lambda file: int(file.stem.removeprefix("branch_")), default=None):
        with newest.open() as lines:
            identity = json.loads(lines.readline() or "{}").get("identity", {})
        for key, value in identity.items():
            if key.startswith(("content of ", "examples of ")):
                yield f"hash of the examples of {key[11:]}" if key[0] == "c" else f"number of {key}", value
    for file in sorted(run.evals_dir.glob("*/content_hash")) if run is not None else []:
        yield f"hash of the evaluated examples of {file.parent.name}", file.read_text().strip() or None
    names = facts.settings.get("data", {}).get("name") if facts.command == "sft" else None
    for name in [names] if isinstance(names, str) else names or []:
        yield "data set", _without_folders(name)


def _without_folders(value: Any) -> Any:
    """Replace paths in arguments by their last parts, so that the card does not publish folders of this machine."""
    match value:
        case str() if value.startswith(("/", "~", ".")) or value.count("/") > 1:
            return Path(value).name
        case dict():
            return {key: _without_folders(inner) for key, inner in value.items()}
        case list():
            return [_without_folders(inner) for inner in value]
        case _:
            return value


def _chosen(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of `_SETTINGS` that are set, by dotted key."""
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _chosen(value, f"{name}.")
        elif value not in (None, [], "") and any(
            name == one or (one.endswith("*") and name.startswith(one[:-1])) for one in _SETTINGS
        ):
            yield name, _without_folders(value)


def _curves(facts: _RunFacts, version: PolicyVersion) -> Iterator[tuple[Any, ...]]:
    """Yield first, least, greatest and last value of each metric until the version, and its course."""
    for name in _CURVES:
        by_step = {row["step"]: row[name] for row in facts.rows if row.get(name) is not None and "step" in row}
        end = version.step + name.startswith("val/")  # a validation is logged under the version that it measures
        values = [value for step, value in sorted(by_step.items()) if step < end]
        if values:
            yield name, *(_number(value) for value in (values[0], min(values), max(values), values[-1])), _bars(values)


def _bars(values: Sequence[float]) -> str:
    """Draw a curve in one line of text, of means if there are many values."""
    count = min(len(values), _MAX_BARS)
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join(_BARS[int((value - low) / span * (len(_BARS) - 1)) if span else 0] for value in means)


def _evaluations(facts: _RunFacts, version: PolicyVersion, published: str | None) -> Iterator[tuple[Any, ...]]:
    """Yield the evaluations of this version, and those of the base model by the run."""
    for row in facts.rows:
        for key in row:
            match = re.fullmatch(r"(?:eval|val)/(.+)/reward/mean", key)
            if match and row.get("step") in (0, version.step):
                summary = {name.removeprefix(key.removesuffix("reward/mean")): value for name, value in row.items()}
                yield from _evaluation(match[1], row["step"], summary)
    for offline, settings in facts.evaluations:
        if published is not None and settings.get("weights") == published:
            yield from _evaluation(str(offline.get("env")), version.step, offline)


def _evaluation(env: str, step: int, summary: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    if (mean := summary.get("reward/mean")) is not None:
        bounds = [summary.get(f"reward/ci95_{end}") for end in ("low", "high")]
        interval = "not known" if None in bounds else " to ".join(map(_number, bounds))
        yield env, step, summary.get("examples"), _number(mean), interval


def _number(value: Any) -> str:
    return f"{value:.6g}"


def _section(title: str, columns: Sequence[str], rows: Iterator[tuple[Any, ...]]) -> str:
    found = [row for row in rows if None not in row]
    return f"## {title}\n\n{_table(columns, found)}" if found else ""


def _table(columns: Sequence[str], rows: Any) -> str:
    lines = [columns, ["---"] * len(columns)]
    lines += [[inert(cell) for cell in row] for row in rows if None not in row]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def inert(value: Any) -> str:
    """Return a value as code in a cell of a table: no markup, link or second line can come of it."""
    text = escape_control_chars(" ".join(str(replace_surrogates(value)).split()))
    return f"`{text.replace('`', chr(39)).replace('|', '/')}`" if text else ""
