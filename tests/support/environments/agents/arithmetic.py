"""A v1 taskset: one agent, one question."""

import verifiers.v1 as vf

__all__ = ["ArithmeticTaskset"]


class Sum(vf.TaskData):
    answer: str


class SumTask(vf.Task[Sum, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class ArithmeticTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        return [SumTask(Sum(idx=0, prompt="1 + 1?", answer="2"), self.config.task)]
