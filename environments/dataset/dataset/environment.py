"""The environment: rows of a file or of the Hugging Face hub, with a reward for the right answer."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .environment_tools.letters import LETTERS
from .environment_tools.prompts import make_prompt
from .environment_tools.rows import Row, Source, pick, text_of
from .graders import Grader, MathVerifyGrader, make_grader

if TYPE_CHECKING:
    from datasets import Dataset
    from verifiers import SingleTurnEnv


def load_environment(
    data_path: str | None = None,
    eval_data_path: str | None = None,
    dataset_name: str | None = None,
    dataset_subset: str | None = None,
    train_split: str = "train",
    eval_split: str | None = None,
    question_column: str = "question",
    answer_column: str = "answer",
    choices_column: str | None = None,
    info_columns: Sequence[str] = (),
    grader: str = "exact",
    system_prompt: str = "",
    num_train_examples: int = -1,
    num_eval_examples: int = -1,
    dataset_shuffle: bool = False,
    seed: int = 0,
) -> "SingleTurnEnv":
    """Make the environment: one question of a row; the reward is 1 for its answer, or what your function returns.

    Args:
        data_path: a `.csv`, `.parquet`, `.json` or `.jsonl` file.
        eval_data_path: another one for evaluation.
        dataset_name: data set of the hub, if there is no `data_path`.
        dataset_subset: its configuration.
        train_split: its split for training.
        eval_split: its split for evaluation, read when it is needed. Without one, the training examples are used.
        question_column: column with the user's message, or a list of messages.
        answer_column: column with the right answer.
        choices_column: column with a list of at most five choices, which are added to the question as `A) ...`; the
            answer is then a letter, or the index of the right choice.
        info_columns: columns to keep in `info`.
        grader: `exact`, `contains`, `number`, `math`, `letter`, `package.module:function` with the parameters `text`
            and `answer`, or `none`: then the reward is only that of `env.rewards`, and rows need no answer.
        system_prompt: the system message; "" for none.
        num_train_examples: number of examples; -1 uses all.
        num_eval_examples: the same for evaluation.
        dataset_shuffle: shuffle the training examples before `num_train_examples` are selected.
        seed: seed of the shuffle.

    Raises:
        ValueError: a missing or malformed file (the message names file and row), or invalid arguments.
    """
    import verifiers as vf

    if bool(data_path) == bool(dataset_name):
        raise ValueError("set one of data_path (a file) and dataset_name (a data set of the hub)")
    judge = make_grader(grader)
    columns = {"question": question_column, "answer": answer_column, "choices": choices_column}

    def read(source: Source, count: int, shuffle_seed: int | None = None) -> "Dataset":
        from datasets import Dataset

        examples = source.examples(lambda row: example_of(row, columns, info_columns, judge, system_prompt))
        try:
            return Dataset.from_list(pick(examples, count, shuffle_seed))
        except (ValueError, OverflowError) as error:  # pyarrow's
            raise ValueError(
                f"info_columns: a column needs values of one type that a table can have: {error}"
            ) from None

    evaluation: Any = None
    if eval_data_path:
        evaluation = read(Source(eval_data_path), num_eval_examples)
    elif dataset_name and eval_split:

        def evaluation() -> "Dataset":
            return read(Source(None, dataset_name, dataset_subset, eval_split), num_eval_examples)

    train = Source(data_path, dataset_name or "", dataset_subset, train_split)
    return vf.SingleTurnEnv(
        dataset=read(train, num_train_examples, seed if dataset_shuffle else None),
        eval_dataset=evaluation,
        rubric=_rubric(judge),
    )


def _rubric(grader: Grader | None) -> Any:
    import verifiers as vf

    if grader is None:
        return vf.Rubric()
    if isinstance(grader, MathVerifyGrader):
        from .environment_tools.math_environment import MathRubric

        return MathRubric(grader.processes)

    async def correct_answer(completion: Any, answer: str, parser: Any) -> float:
        return await grader.grade(parser.parse_answer(completion) or "", answer)

    class _Rubric(vf.Rubric):
        async def teardown(self) -> None:
            await super().teardown()
            grader.close()

    return _Rubric(funcs=[correct_answer])


def example_of(
    row: Row, columns: dict[str, Any], info_columns: Sequence[str], grader: Grader | None, system_prompt: str
) -> dict[str, Any]:
    """Return the prompt, the answer and the info of a row. Raises ValueError if it is malformed."""
    given = row.get(columns["question"])
    has_answer = grader is not None or row.get(columns["answer"]) not in (None, "")
    answer = text_of(row, columns["answer"]) if has_answer else ""
    question = "" if isinstance(given, list) else text_of(row, columns["question"])
    if columns["choices"]:
        if isinstance(given, list):
            raise ValueError(f"{columns['question']!r} is a list of messages, to which no choices can be added")
        question, answer = _with_choices(question, answer, row.get(columns["choices"]), columns["choices"])
    if missing := [column for column in info_columns if column not in row]:
        raise ValueError(f"no {missing[0]!r}; it has {', '.join(map(repr, row))}")
    if binary := [column for column in info_columns if _has_bytes(row[column])]:
        raise ValueError(f"{binary[0]!r} contains bytes, such as an image; leave it out of info_columns")
    prompt = make_prompt(question, system_prompt)
    if isinstance(given, list):
        prompt[-1:] = _messages(given, columns["question"])
    example = {"prompt": prompt, "answer": answer if grader is None else grader.gold(answer)}
    if grader is not None and grader.source is not None:
        example["grader_source"] = grader.source
    info = {"info": {column: row[column] for column in info_columns}} if info_columns else {}
    return {**example, **info}


_ROLES = ("system", "developer", "user", "assistant")


def _has_bytes(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_bytes, value.values()))
    return isinstance(value, bytes) or (isinstance(value, list | tuple) and any(map(_has_bytes, value)))


def _messages(value: list[Any], column: str) -> list[dict[str, str]]:
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(f"{column!r} is a list, but not of messages with `role` and `content`")
        if message.get("tool_calls"):
            raise ValueError(f"{column!r} has a message with tool calls")
        if message["role"] not in _ROLES:
            raise ValueError(f"{column!r} has the role {message['role']!r}; the roles are {', '.join(_ROLES)}")
        try:
            message["content"].encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{column!r} has half of a character (a surrogate) at position {error.start}") from error
    if not value:
        raise ValueError(f"{column!r} is empty")
    return [{"role": message["role"], "content": message["content"]} for message in value]


def _with_choices(question: str, answer: str, choices: Any, column: str) -> tuple[str, str]:
    if not isinstance(choices, Sequence) or isinstance(choices, str) or not 1 <= len(choices) <= len(LETTERS):
        raise ValueError(f"{column!r} is not a list of at most {len(LETTERS)} choices")
    if answer.isdecimal():
        if int(answer) >= len(choices):
            raise ValueError(f"the answer is choice {answer}, counted from 0, of {len(choices)}")
        answer = LETTERS[int(answer)]
    if (letter := answer.strip("() .").upper()) in tuple(LETTERS[len(choices) :]):
        raise ValueError(f"the answer is {letter}, but there are only {len(choices)} choices")
    texts = [text_of({column: choice}, column) for choice in choices]
    lines = [f"{letter}) {text}" for letter, text in zip(LETTERS, texts, strict=False)]
    return "\n".join([question, *lines]), answer
