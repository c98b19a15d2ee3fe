"""Makes four runs with one problem each, for a reader who must find it: `python -m tests.support.problem_runs DIR`.

The names of their directories do not contain the problem. Each run takes about two minutes on two cores.
"""

import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from prime_rl.core.ports import find_free_port

_ENVIRONMENT = str(Path(__file__).absolute())
PROBLEMS = {
    "a": ("reward hacked", {"problem": "hacked"}, ["--trainer.optim.lr", "2e-3"]),
    "b": ("grader broken", {"problem": "raises"}, []),
    "c": ("inference too slow", {}, ["--orchestrator.max-concurrent", "8"]),
    "d": ("learning rate too high", {}, ["--trainer.optim.lr", "0.02", "--trainer.optim.max-norm", "1e6"]),
}
"""Name of the directory -> problem, arguments of the environment, and arguments of `rl`."""


def load_environment(problem: str = "", **arguments: Any) -> Any:
    """Make reverse_text with a reward function that is easy to cheat (`hacked`), or that fails often (`raises`)."""
    import verifiers as vf
    from reverse_text import load_environment

    environment = load_environment(**arguments)

    def share_of_vowels(completion: list[dict[str, Any]], **_: Any) -> float:
        text = completion[-1]["content"] or " "
        return sum(letter in "aeiou" for letter in text) / len(text)

    def flaky(completion: list[dict[str, Any]], **_: Any) -> float:
        if random.random() < 0.1:
            raise KeyError("score")
        return share_of_vowels(completion)

    if problem:
        rubric = vf.Rubric(
            funcs=[flaky if problem == "raises" else share_of_vowels], weights=[1.0], parser=environment.parser
        )
        for function in environment.rubric.rubrics[0].funcs if problem == "hacked" else ():
            rubric.add_reward_func(function, weight=0.0)
        environment.rubric = rubric
    return environment


def make_run(directory: Path, name: str, steps: int = 20) -> int:
    """Make one run in `directory`; return its exit code."""
    _, problem, options = PROBLEMS[name]
    arguments = {"words": 20000, "min_letters": 3, "max_letters": 4, **problem}
    table = ", ".join(f"{key} = {value!r}" for key, value in arguments.items())
    config = directory / f"{name}.toml"
    text = Path("configs/reverse_text/cpu.toml").read_text().replace("max_steps = 60", f"max_steps = {steps}")
    text = text.replace("batch_size = 1024", "batch_size = 128").replace(
        'id = "reverse_text"', f"id = {_ENVIRONMENT!r}"
    )
    config.write_text(re.sub(r"args = .*", f"args = {{ {table} }}", text))
    command = [sys.executable, "-m", "prime_rl.entrypoints.rl", "@", str(config), "--output-dir", str(directory / name)]
    port = ["--inference.server.port", str(find_free_port())]
    return subprocess.run([*command, *port, *options]).returncode


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    for chosen in sys.argv[2:] or PROBLEMS:
        make_run(place, chosen)
