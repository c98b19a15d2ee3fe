"""Write the tasks of configs/agents/cpu.toml, or train its small model again, on a CPU, in three minutes:

    uv run --extra cpu python scripts/make_agents_model.py --tasks outputs/repair
    uv run --extra cpu python scripts/make_agents_model.py

A task is a file f.py with a function that has another operator than the comment above it. The examples are
conversations with mini-swe-agent as configured in configs/agents/cpu.toml: look at the file, repair it, submit. Half of
them lack the repair, so that the recipe has something to teach. The model is made as that of
scripts/make_reverse_text_model.py.
"""

import argparse
import random
import string
import sys
from collections.abc import Iterator
from pathlib import Path

from make_reverse_text_model import ROOT, WarmStart, main

NUM_TASKS, NUM_EXAMPLES = 64, 20_000
OPERATORS = "+-*%"
SYSTEM_PROMPT = "Repair f.py."
TEST = """\
python3 -c '
names = {{}}
exec(open("f.py").read(), names)  # an import may find the bytecode of the file as it was in the same second
pairs = [(7, 3), (9, 5), (8, 6)]
print(int(all(names["f"](x, y) == x {operator} y for x, y in pairs)))
' > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""


def draw_task(source: random.Random) -> tuple[str, str, str]:
    """Return an expression, its operator, and the contents of f.py, whose function has to return the expression."""
    first, second = source.sample(string.ascii_lowercase.replace("f", ""), 2)
    operator, wrong = source.sample(OPERATORS, 2)
    expression = f"{first}{operator}{second}"
    return expression, operator, f"# {expression}\ndef f({first},{second}):\n return {first}{wrong}{second}"


def write_tasks(folder: Path) -> None:
    """Write the tasks of the recipe to `folder`, in the layout of Harbor."""
    source = random.Random("tasks")
    for number in range(NUM_TASKS):
        _, operator, code = draw_task(source)
        files = {
            "task.toml": "",
            "instruction.md": "Follow the comment.",
            "environment/f.py": code + "\n",
            "tests/test.sh": TEST.format(operator=operator),
        }
        for name, text in files.items():
            path = folder / f"repair_{number:02d}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    print(f"{folder}: {NUM_TASKS} tasks")


def make_examples() -> Iterator[tuple[str, ...]]:
    """Yield conversations of the agent, without the system prompt."""
    source = random.Random("examples")
    submit = command("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    for _ in range(NUM_EXAMPLES):
        expression, _, code = draw_task(source)
        repair = [command(f"sed -i 's/rn .*/rn {expression}/' f.py"), "."] if source.random() < 0.5 else []
        yield "Follow the comment.", command("cat f.py"), code, *repair, submit


def command(text: str) -> str:
    """Return a message of which the agent runs `text`."""
    return f"```\n{text}\n```"


if __name__ == "__main__":
    if "--tasks" in sys.argv:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--tasks", type=Path, required=True, help="folder to write them to")
        write_tasks(parser.parse_args().tasks)
    else:
        main(__doc__, WarmStart(make_examples, ROOT / "configs/agents/cpu", SYSTEM_PROMPT))
