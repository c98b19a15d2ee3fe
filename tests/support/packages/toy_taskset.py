"""A v1 taskset for tests; installed by putting this folder on the path. The answer of task i is i."""

import verifiers.v1 as vf

__all__ = ["ToyTaskset"]


class ToyData(vf.TaskData):
    answer: str


class ToyTaskConfig(vf.TaskConfig):
    fail: str | None = None
    stop_after: int | None = None
    per_letter: float = 0.0


class ToyTask(vf.Task[ToyData, vf.State, ToyTaskConfig]):
    async def setup(self, trace: vf.Trace) -> None:
        if self.config.fail == "setup":
            raise KeyError("broken task")

    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return self.config.stop_after is not None and trace.num_turns >= self.config.stop_after

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.config.fail == "reward":
            raise KeyError("broken reward")
        if self.config.fail == "nan":
            return float("nan")
        if self.config.fail == "connection":
            raise ConnectionError("no judge")
        return float(self.data.answer in trace.last_reply)

    @vf.reward
    async def letters(self, trace: vf.Trace) -> float:
        return self.config.per_letter * len(trace.last_reply)

    @vf.reward(weight=0.0)
    async def unweighted(self, trace: vf.Trace) -> dict[str, float]:
        if self.config.fail == "unweighted":
            raise KeyError("broken metric")
        return {}

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class ToyConfig(vf.TasksetConfig):
    task: ToyTaskConfig = ToyTaskConfig()
    examples: int = 5
    question: str = "What is it?"
    endless: bool = False


class ToyTaskset(vf.Taskset[ToyTask, ToyConfig]):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.endless

    def load(self):
        index = 0
        while self.config.endless or index < self.config.examples:
            data = ToyData(idx=index, prompt=self.config.question, system_prompt="Be brief.", answer=str(index))
            yield ToyTask(data, self.config.task)
            index += 1
