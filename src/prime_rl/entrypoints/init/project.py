"""`rl init NAME`: writes a small project to the working directory and prints the commands that run it."""

import argparse
import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from prime_rl.core.entry_point import ArgumentParser, exit_with_reader, uv_run
from prime_rl.core.errors import ConfigError, translate_error, unwritable
from prime_rl.entrypoints.init.byte_model import write_byte_model
from prime_rl.entrypoints.init.data_columns import (
    GRADERS,
    MAX_LABELS,
    READINGS,
    Choice,
    Prompt,
    choose_columns,
    choose_grader,
    flatten,
)
from prime_rl.entrypoints.init.data_files import Row, Table, read_data_set, read_file

_TEMPLATES = Path(__file__).parent / "templates"
_MODEL = "byte_model"
_MAX_ROWS = 20_000
_MARKERS = 120
"""Bytes that the chat template and a system message add to a prompt, at most."""


@dataclass(frozen=True)
class _Examples:
    """Prompts, right answers, how they are compared, and lines that say why."""

    pairs: list[tuple[Prompt, str]]
    grader: str
    system_message: str
    story: list[str]


def main(arguments: Sequence[str]) -> None:
    """Write the project. Raises ConfigError for bad input, or if a file exists."""
    options = _parse(arguments)
    name: str = options.name
    if not re.fullmatch(r"[A-Za-z]\w{0,63}", name, re.ASCII):
        raise ConfigError(f"NAME {name!r}: use a letter, then letters, digits and _, such as my_task")
    hardware = _find_hardware()
    is_cpu, template = hardware.preset == "cpu", options.template
    sources = {"dataset": [], "environment": ["my_environment.py"], "agent": ["my_agent.py"], "sft": []}[template]
    sources += [] if template == "sft" else ["my_reward.py"]
    # A second project in a directory has its own files, and the model of the first.
    code = {file: file.replace("my_", f"{name}_") if os.path.lexists(file) else file for file in sources}
    has_model = all(Path(_MODEL, file).is_file() for file in ("config.json", "model.safetensors"))
    model = [_MODEL] if is_cpu and not has_model else []
    names = [f"{name}.toml", f"{name}_rows.jsonl", *code.values(), *model]
    if existing := [each for each in names if os.path.lexists(each)]:
        raise ConfigError(f"{existing[0]} exists already, and nothing was written; change to another directory")
    examples = _read(options, is_cpu)
    is_sft = template == "sft"
    toml = _sft_toml(name, examples, hardware) if is_sft else _rl_toml(name, code, template, examples, hardware)
    pairs = examples.pairs
    if template in ("environment", "agent") and examples.grader == "number":  # these compare texts
        pairs = [(prompt, re.sub(r"[,$€£%]", "", answer.rpartition("####")[2]).strip()) for prompt, answer in pairs]
    rows = [_row(prompt, answer, is_chat=is_sft) for prompt, answer in pairs]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    files = {f"{name}.toml": toml, f"{name}_rows.jsonl": "".join(lines)}
    whole = "correct_answer" if template == "dataset" else "correct"
    for file, own in code.items():
        files[own] = _template(file).replace("NAME", name).replace("WHOLE", f"`{whole}`")
    with translate_error(OSError, unwritable(f"{Path.cwd()} cannot be written", "change to a writable directory")):
        for file, text in files.items():
            with Path(file).open("x", encoding="utf-8") as opened:
                opened.write(text)
        if model:
            Path(_MODEL).mkdir()
            write_byte_model(Path(_MODEL), _template("tools.jinja"))
    with exit_with_reader():
        print("\n".join(examples.story))
        print(f"wrote {', '.join([*files, *(f'{folder}/' for folder in model)])} for {hardware.description}")
        print("next:")
        print(f"  {uv_run('--extra', 'cpu' if is_cpu else 'gpu')}{_command(template, hardware)} @ {name}.toml")
        print(f"  {uv_run()}page outputs")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = ArgumentParser("rl init", description="Write a small project to this directory.", allow_abbrev=False)
    parser.add_argument("name", metavar="NAME", help="name of the project: NAME.toml, NAME_rows.jsonl")
    parser.add_argument("--data", help="a csv, tsv, jsonl, json or parquet file, a folder, or a data set of the hub")
    parser.add_argument("--template", choices=("dataset", "environment", "agent", "sft"), default="dataset")
    parser.add_argument("--prompt", help="column with the prompts (default: chosen by name and content)")
    parser.add_argument("--answer", help="column with the right answers (default: chosen by name and content)")
    parser.add_argument(
        "--choices-by", choices=READINGS, help="what right answers are of choices (default: what fits most rows)"
    )
    parser.add_argument("--grader", choices=GRADERS, help="how replies are compared (default: chosen by the answers)")
    parser.add_argument("--rows", type=int, default=_MAX_ROWS, help="rows to copy at most (default: %(default)s)")
    parser.add_argument("--encoding", help="encoding of a text file (default: detected)")
    options = parser.parse_args(arguments)
    if options.rows < 1:
        parser.error(f"--rows {options.rows}: use at least 1")
    if options.data is None and (options.prompt or options.answer or options.encoding or options.choices_by):
        parser.error("--prompt, --answer, --choices-by and --encoding are for --data")
    if options.grader and options.template != "dataset":
        parser.error(f"--grader is for --template dataset; {options.template} has no grader of that kind: remove it")
    return options


def _read(options: argparse.Namespace, is_cpu: bool) -> _Examples:
    if options.data is None:
        pairs: list[tuple[Prompt, str]] = [(f"What is {a} + {b}?", str(a + b)) for a in (1, 3) for b in range(2, 7)]
        return _Examples(pairs, _grader(options, pairs)[0], "", [f"{len(pairs)} example rows"])
    if not options.data:  # an unset variable, not the working directory
        raise ConfigError("--data is empty; pass a file, a folder or a data set of the hub")
    try:
        path = Path(options.data).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"--data {options.data}: {error}; write the path") from None
    if path.is_file():
        table = read_file(path, options.rows, options.encoding)
    else:
        table = read_data_set(options.data, options.rows)
    rows = [flatten(row) for row in table.rows]
    is_sft = options.template == "sft"
    choice = choose_columns(rows[:1000], options.prompt, options.answer, options.choices_by, is_sft)
    if options.choices_by and not choice.has_choices:
        raise ConfigError(f"--choices-by {options.choices_by}: the rows have no choices beside the prompt; remove it")
    pairs, skipped = _convert(rows, choice, table)
    if is_cpu:
        pairs = _short_enough(pairs, skipped)
    pairs, comma = _decimal_points(pairs)
    grader, reason = _grader(options, pairs)
    system = _system_message(grader, [answer for _, answer in pairs])
    columns = ", ".join(dict.fromkeys(name for row in rows[:50] for name in row))
    more = f"the first {len(rows)} rows are used; --rows changes that" if table.has_more else ""
    story = [f"{options.data}: {len(rows)} rows with columns {columns}"]
    story += [f"  note: {note}" for note in (*table.notes, more, comma) if note]
    story += [f"  prompt: {choice.prompt}", f"  answer: {choice.answer}"]
    if options.template == "dataset":
        story.append(f"  grader: {grader}, {reason}" + (f"; system message: {system}" if system else ""))
    for reason, count in Counter(reason for reason, _ in skipped).most_common(3):
        first = next(place for other, place in skipped if other == reason)
        story.append(f"  skipped: {count} of {len(rows) + len(table.bad)} rows, {reason} (first: {first})")
    return _Examples(pairs, grader, system, story)


def _grader(options: argparse.Namespace, pairs: list[tuple[Prompt, str]]) -> tuple[str, str]:
    """Return the grader, and the reason. Raises ConfigError if the given one does not fit the answers."""
    grader, reason = choose_grader([answer for _, answer in pairs])
    if options.grader in ("number", "letter") and grader != options.grader:
        raise ConfigError(f"--grader {options.grader} does not fit the answers, such as {pairs[0][1][:40]!r}; {reason}")
    return (options.grader, "as given") if options.grader else (grader, reason)


def _convert(rows: list[Row], choice: Choice, table: Table) -> tuple[list[tuple[Prompt, str]], list[tuple[str, str]]]:
    """Return the examples, and why the other rows are none, with their places."""
    pairs, skipped = [], list(table.bad)
    for number, row in enumerate(rows, 1):
        try:
            pairs.append(choice.convert(row))
        except ValueError as error:
            skipped.append((str(error), f"row {number}"))
    if not pairs:
        why = f"{skipped[-1][0]} in the first {len(rows)} rows"
        raise ConfigError(f"--data: no row has a prompt and an answer: {why}; pass --prompt and --answer")
    return pairs, skipped


def _short_enough(pairs: list[tuple[Prompt, str]], skipped: list[tuple[str, str]]) -> list[tuple[Prompt, str]]:
    """Leave out the rows that are too long for a CPU, unless all are; `skipped` gets the reasons."""
    limit = max(2048, min(_size(prompt) for prompt, _ in pairs))
    kept = []
    for number, (prompt, answer) in enumerate(pairs, 1):
        if _size(prompt) <= limit:
            kept.append((prompt, answer))
        else:
            skipped.append((f"prompts above {limit} bytes, too long for a run on a CPU", f"example {number}"))
    return kept


def _decimal_points(pairs: list[tuple[Prompt, str]]) -> tuple[list[tuple[Prompt, str]], str]:
    """Write decimal points if all answers are numbers with decimal commas; say so."""
    answers = [answer for _, answer in pairs]
    is_decimal = any(re.fullmatch(r"[-+]?\d+,(\d{1,2}|\d{4,})", answer) for answer in answers)
    if not is_decimal or not all(re.fullmatch(r"[-+]?\d+(,\d+)?", answer) for answer in answers):
        return pairs, ""
    points = [(prompt, answer.replace(",", ".")) for prompt, answer in pairs]
    return points, "the decimal commas of the answers are points now"


def _size(prompt: Prompt) -> int:
    return len(json.dumps(prompt, ensure_ascii=False).encode()) + _MARKERS


def _row(prompt: Prompt, answer: str, is_chat: bool) -> dict[str, Any]:
    if not is_chat:
        return {"question": prompt, "answer": answer}
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {"messages": [*messages, {"role": "assistant", "content": answer}]}


@dataclass(frozen=True)
class _Hardware:
    """A preset of configs/presets, the machine that it was chosen for, and GPUs for more than the preset names."""

    preset: str
    description: str
    num_gpus: int = 0


def _find_hardware() -> _Hardware:
    """Choose a preset by the GPUs that are visible to this process."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    sizes: list[int] = []
    if shutil.which(query[0]) is not None:
        with suppress(OSError, subprocess.SubprocessError, ValueError):  # a driver without a device
            output = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
            sizes = [round(int(line) / 1024) for line in output.split()]
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        sizes = sizes[: len([gpu for gpu in visible.split(",") if gpu.strip() not in ("", "-1")])]
    if not sizes:
        return _Hardware("cpu", "a CPU, as no GPU was found")
    count, size = len(sizes), min(sizes)
    preset = "1x24gb" if size < 70 else "1x80gb" if count == 1 else "2x80gb" if count < 8 else "8x80gb"
    return _Hardware(preset, f"{count} GPU(s) of {size} GB (configs/presets/{preset}.toml)", count)


def _rl_toml(name: str, code: dict[str, str], template: str, examples: _Examples, hardware: _Hardware) -> str:
    is_cpu = hardware.preset == "cpu"
    weight = 1.0 if is_cpu else 0.0
    env_id = "dataset" if template == "dataset" else f"./{code[f'my_{template}.py']}"
    reward = code["my_reward.py"].removesuffix(".py")
    args = {"data_path": f"{name}_rows.jsonl"}
    if template == "dataset":
        args |= {"grader": examples.grader}
        args |= {"system_prompt": examples.system_message} if examples.system_message else {}
    shown = ", ".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in args.items())
    env = f'id = "{env_id}"\nargs = {{ {shown} }}'
    env += f'\nrewards = [{{ import_path = "{reward}:my_reward", weight = {weight} }}]  # weight 0: only a metric'
    values = {}
    if is_cpu:
        replies = sorted(len(answer.encode()) for _, answer in examples.pairs)
        max_tokens = min(64, max(8, 2 * replies[len(replies) * 9 // 10]))
        longest = max(_size(prompt) for prompt, _ in examples.pairs) + max_tokens + 3
        if template == "agent":
            longest += 600  # the definition of the tool
        seq_len = 64 * ceil(longest / 64)
        values = {
            "model.name": f'"{_MODEL}"',
            "trainer.optim.lr": "3e-3",
            "trainer.model.seq_len": str(max(4096, seq_len)),
            "seq_len": str(seq_len),
            "orchestrator.sampling.max_tokens": str(max_tokens),
        }
    elif hardware.preset == "2x80gb":
        trainers = max(1, hardware.num_gpus // 4)
        values = {"trainer_gpus": str(trainers), "inference_gpus": str(hardware.num_gpus - trainers)}
    text = _fill(_template(f"presets/{hardware.preset}.toml"), values)
    text = re.sub(r'id = "reverse_text"', lambda _: env, text)
    return re.sub(r"#   uv run .*\n", lambda _: f"#   {uv_run('--extra', _extra(hardware))}rl @ {name}.toml\n", text)


def _system_message(grader: str, answers: list[str]) -> str:
    """Return what asks for one of few labels, or for the bare answer that the grader compares; "" for none."""
    labels = sorted({*answers})
    if grader != "exact":
        return ""
    if len(labels) <= MAX_LABELS and len(answers) >= 2 * len(labels) and sum(map(len, labels)) < 60:
        return f"Reply with one of: {', '.join(labels)}"
    return "Reply with the answer alone."


def _sft_toml(name: str, examples: _Examples, hardware: _Hardware) -> str:
    text = _template("sft.toml")
    longest = max(_size(prompt) for prompt, _ in examples.pairs)
    whole = max(_size(prompt) + len(answer.encode()) for prompt, answer in examples.pairs)
    text = _fill(text, {"data.seq_len": str(max(512, 64 * ceil(min(whole, longest + 1024) / 64)))})
    if len(examples.pairs) < 10:
        text = re.sub("^val.*\n", "", text, flags=re.MULTILINE)
    if hardware.preset != "cpu":
        model = re.search(r'^model\.name = ("[^"]*")', _template(f"presets/{hardware.preset}.toml"), re.MULTILINE)
        values = {"data.seq_len": "2048", "data.micro_batch_size": "1", "optim.lr": "1e-5"}
        text = _fill(text, values | ({"model.name": model[1]} if model else {}))
    return f"#   {uv_run('--extra', _extra(hardware))}{_command('sft', hardware)} @ {name}.toml\n" + text.replace(
        "NAME", name
    )


def _fill(text: str, values: dict[str, str]) -> str:
    """Replace values of lines `key = value  # comment`."""
    for key, value in values.items():
        text = re.sub(rf"^{re.escape(key)} = \S+", f"{key} = {value}", text, flags=re.MULTILINE)
    return text


def _command(template: str, hardware: _Hardware) -> str:
    if template != "sft":
        return "rl"
    return (
        f"torchrun --nproc-per-node {hardware.num_gpus} -m prime_rl.trainer.sft.train"
        if hardware.num_gpus > 1
        else "sft"
    )


def _extra(hardware: _Hardware) -> str:
    return "cpu" if hardware.preset == "cpu" else "gpu"


def _template(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")
