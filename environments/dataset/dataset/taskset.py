"""The same rows as a v1 taskset, for agents of the user (`env.command`, `env.agent`)."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

from .environment import example_of
from .environment_tools.rows import Row, Source, pick
from .graders import Grader, MathVerifyGrader, make_grader


class DatasetData(vf.TaskData):
    """A row.

    Attributes:
        answer: the right answer; "" without a grader.
        info: the columns of `info_columns`.
        grader_source: hash of the file of the user's grader.
    """

    answer: str
    info: dict[str, Any]
    grader_source: str | None = None


class DatasetConfig(vf.TasksetConfig):
    """Arguments of the taskset: those of `load_environment` without the ones for evaluation, whose entry has its own.

    `system_prompt` is the path of a file, as in each taskset.
    """

    data_path: str | None = None
    dataset_name: str | None = None
    dataset_subset: str | None = None
    train_split: str = "train"
    question_column: str = "question"
    answer_column: str = "answer"
    choices_column: str | None = None
    info_columns: tuple[str, ...] = ()
    grader: str = "exact"
    num_train_examples: int = -1
    dataset_shuffle: bool = False
    seed: int = 0


class DatasetTask(vf.Task[DatasetData, vf.State, vf.TaskConfig]):
    """One row without a grader: the agent, or a reward function of the configuration, gives the reward."""


class GradedTask(DatasetTask):
    """One row; the reward is 1 if the last reply states the answer, or what the user's grader returns."""

    grader: Grader  # one for all rows, set when they are loaded

    @vf.reward
    async def correct_answer(self, trace: vf.Trace) -> float:
        """Grade the last reply, and record `grading_failed` of math-verify; called by verifiers."""
        reply = trace.last_reply or ""
        if not isinstance(self.grader, MathVerifyGrader):
            return await self.grader.grade(reply, self.data.answer)
        verdict = await self.grader.verdict(reply, self.data.answer)
        trace.record_metric("grading_failed", float(verdict.failure is not None))
        return float(verdict.correct)


class DatasetTaskset(vf.Taskset[DatasetTask, DatasetConfig]):
    """All rows, or the first ones."""

    def load(self) -> Iterator[DatasetTask]:
        """Yield the tasks; called by verifiers. Raises ValueError as `load_environment`."""
        config = self.config
        if bool(config.data_path) == bool(config.dataset_name):
            raise ValueError("set one of data_path (a file) and dataset_name (a data set of the hub)")
        grader = make_grader(config.grader)
        columns = {
            "question": config.question_column,
            "answer": config.answer_column,
            "choices": config.choices_column,
        }

        def convert(row: Row) -> dict[str, Any]:
            return example_of(row, columns, config.info_columns, grader, "")

        source = Source(config.data_path, config.dataset_name or "", config.dataset_subset, config.train_split)
        examples = pick(
            source.examples(convert), config.num_train_examples, config.seed if config.dataset_shuffle else None
        )
        for index, example in enumerate(examples):
            data = DatasetData(idx=index, **{"info": {}, **example})
            if grader is None:
                yield DatasetTask(data, config.task)
                continue
            task = GradedTask(data, config.task)
            task.grader = grader
            yield task
