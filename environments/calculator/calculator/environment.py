"""The environment: arithmetic questions, a calculator tool, and a reward for the right final answer."""

import re
from fractions import Fraction
from itertools import islice
from typing import TYPE_CHECKING, Any

from calculator.arithmetic import evaluate, show
from calculator.questions import LEVELS, Level, make_questions

if TYPE_CHECKING:
    from datasets import Dataset
    from verifiers import ToolEnv

SYSTEM_PROMPT = (
    "Answer the question. Use the tool `calculate` for the arithmetic. When you know the result, reply with the number "
    "between <answer> and </answer>."
)
ERROR = "error: "

_ANSWER = re.compile(r"<answer>([^<]{0,200})</answer>")
_NUMBER = re.compile(r"[-+\u2212]?[0-9,]+(?:\.[0-9]+)?", re.ASCII)


def load_environment(
    difficulty: str = "medium",
    min_operations: int | None = None,
    max_operations: int | None = None,
    max_number: int | None = None,
    num_train_examples: int = 1000,
    num_eval_examples: int = 128,
    seed: int = 0,
    max_turns: int = 5,
    require_tool: bool = False,
    system_prompt: str = SYSTEM_PROMPT,
) -> "ToolEnv":
    """Make the environment: a question such as "What is (12 + 7) * 3?" and one tool, `calculate`.

    The reward is 1 if the last message has exactly one <answer>, the right number, and calls no tool. `has_answer` and
    `tool_errors` (calls that failed) are metrics with weight 0, in addition to verifiers' counts of turns and calls.

    Args:
        difficulty: "easy" (+ -), "medium" (+ - *) or "hard" (+ - * /); sets the three arguments that follow.
        min_operations: minimum number of operations in a question.
        max_operations: maximum number of operations in a question.
        max_number: largest number in a question.
        num_train_examples: questions for training.
        num_eval_examples: questions for evaluation, disjoint from the others; with 0 those for training are used.
        seed: seed of the questions.
        max_turns: maximum number of replies of the model.
        require_tool: reward 0 without a successful tool call.
        system_prompt: the system message; "" for none.

    Raises:
        ValueError: invalid arguments.
    """
    import verifiers as vf

    if difficulty not in LEVELS:
        raise ValueError(f"difficulty is {difficulty!r}, not one of {', '.join(LEVELS)}")
    if max_turns < 1 or num_train_examples < 1 or num_eval_examples < 0:
        raise ValueError("max_turns and num_train_examples must be positive, num_eval_examples at least 0")
    base = LEVELS[difficulty]
    level = Level(
        base.operators,
        base.min_operations if min_operations is None else min_operations,
        base.max_operations if max_operations is None else max_operations,
        base.max_number if max_number is None else max_number,
    )
    train = list(islice(make_questions(seed, "train", level), num_train_examples))
    evaluation = _others(train, seed, level, num_eval_examples)

    def correct_answer(completion: Any, answer: str) -> float:
        """1 if the final answer is right."""
        right = final_answer(completion) == Fraction(answer)
        return float(right and not (require_tool and not _successful_calls(completion)))

    return vf.ToolEnv(
        tools=[calculate],
        max_turns=max_turns,
        error_formatter=_describe,
        dataset=_dataset(train, system_prompt),
        eval_dataset=_dataset(evaluation, system_prompt) if evaluation else None,
        rubric=vf.Rubric(funcs=[correct_answer, has_answer, tool_errors], weights=[1.0, 0.0, 0.0]),
    )


def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression exactly.

    Args:
        expression: numbers, + - * / // % ** and parentheses, such as "(12 + 7) * 3".
    """
    if not isinstance(expression, str):
        raise ValueError("`expression` must be text")
    return show(evaluate(expression))


def final_answer(completion: Any) -> Fraction | None:
    """Return the number in the one <answer> of the last message, if that is the model's and calls no tool."""
    last = completion[-1] if completion else {}
    if _field(last, "role") != "assistant" or _field(last, "tool_calls"):
        return None
    text = _field(last, "content")
    answers = _ANSWER.findall(text) if isinstance(text, str) and text.count("<answer>") == 1 else []
    if len(answers) != 1 or not _NUMBER.fullmatch(number := answers[0].strip()):
        return None
    return Fraction(number.replace(",", "").replace("\u2212", "-")) if number.strip(",+-\u2212") else None


def has_answer(completion: Any) -> float:
    """1 if there is a final answer, right or wrong."""
    return float(final_answer(completion) is not None)


def tool_errors(completion: Any) -> float:
    """Count the calls that failed: no expression, no such tool, a value too big."""
    return float(sum(text.startswith(ERROR) for text in _tool_results(completion)))


def _successful_calls(completion: Any) -> int:
    return sum(not text.startswith(ERROR) for text in _tool_results(completion))


def _tool_results(completion: Any) -> list[str]:
    return [str(_field(message, "content")) for message in completion if _field(message, "role") == "tool"]


def _field(message: Any, name: str) -> Any:
    return message.get(name) if isinstance(message, dict) else getattr(message, name, None)


def _describe(error: Exception) -> str:
    """Return one short line for the model that states what failed; some messages repeat its own text."""
    if isinstance(error, KeyError):
        return f"{ERROR}there is no such tool, only `calculate`"
    return ERROR + " ".join(str(error).split())[:200]


def _others(train: list[tuple[str, int]], seed: int, level: Level, count: int) -> list[tuple[str, int]]:
    """Make `count` questions that are not in `train`."""
    known = {text for text, _ in train}
    # A level with few small numbers has few questions; limit the search.
    tries = islice(make_questions(seed, "eval", level), 100 * count)
    fresh = [question for question in tries if question[0] not in known][:count]
    if len(fresh) < count:
        raise ValueError(f"there are too few questions for {count} that are not for training; raise max_number")
    return fresh


def _dataset(questions: list[tuple[str, int]], system_prompt: str) -> "Dataset":
    from datasets import Dataset

    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    prompts = [[*system, {"role": "user", "content": f"What is {text}?"}] for text, _ in questions]
    return Dataset.from_dict({"prompt": prompts, "answer": [str(value) for _, value in questions]})
