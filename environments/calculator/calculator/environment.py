"""The environment: arithmetic questions, a calculator tool, and a reward for the right final answer."""

from fractions import Fraction
from itertools import islice
from typing import TYPE_CHECKING, Any

from calculator.arithmetic import evaluate, show
from calculator.questions import LEVELS, Level, make_questions

from .environment_tools.answers import last_tagged
from .environment_tools.numbers import number_of
from .environment_tools.prompts import ERROR, describe_error, final_reply, make_dataset, tool_results

if TYPE_CHECKING:
    from verifiers import ToolEnv

SYSTEM_PROMPT = (
    "Answer the question. Use the tool `calculate` for the arithmetic. When you know the result, reply with the number "
    "between <answer> and </answer>."
)


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

    The reward is 1 if the last <answer> of the last message is the right number, and that message calls no tool.
    `has_answer` and `tool_errors` (calls that failed) are metrics with weight 0, in addition to verifiers' counts of
    turns and calls.

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
        error_formatter=describe_error,
        dataset=_dataset(train, system_prompt),
        eval_dataset=_dataset(evaluation, system_prompt, len(train)) if evaluation else None,
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
    """Return the number in the last <answer> of the last message, if that is the model's and calls no tool.

    A calculation is no number: it would be the question again.
    """
    return number_of(last_tagged(final_reply(completion)) or "", evaluate=False)


def has_answer(completion: Any) -> float:
    """1 if there is a final answer, right or wrong."""
    return float(final_answer(completion) is not None)


def tool_errors(completion: Any) -> float:
    """Count the calls that failed: no expression, no such tool, a value too big."""
    return float(sum(text.startswith(ERROR) for text in tool_results(completion)))


def _successful_calls(completion: Any) -> int:
    return sum(not text.startswith(ERROR) for text in tool_results(completion))


def _others(train: list[tuple[str, int]], seed: int, level: Level, count: int) -> list[tuple[str, int]]:
    """Make `count` questions that are not in `train`."""
    known = {text for text, _ in train}
    # A level with few small numbers has few questions; limit the search.
    tries = islice(make_questions(seed, "eval", level), 100 * count)
    fresh = [question for question in tries if question[0] not in known][:count]
    if len(fresh) < count:
        raise ValueError(f"there are too few questions for {count} that are not for training; raise max_number")
    return fresh


def _dataset(questions: list[tuple[str, int]], system_prompt: str, first: int = 0) -> Any:
    return make_dataset(((f"What is {text}?", str(value)) for text, value in questions), system_prompt, first)
