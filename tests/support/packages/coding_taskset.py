"""A v1 taskset whose tasks put a file into the runtime of the agent, and whose reward reads one from it."""

import verifiers.v1 as vf

__all__ = ["CodingTaskset"]


class CalculatorTools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Return the sum."""
        return a + b


class CodingConfig(vf.TaskConfig):
    image: str | None = None
    tools: vf.ToolsetConfig | None = None


class CodingTask(vf.Task[vf.TaskData, vf.State, CodingConfig]):
    @classmethod
    def toolsets(cls, config: CodingConfig) -> list[vf.Toolset]:
        return [] if config.tools is None else [CalculatorTools(config.tools)]

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        await runtime.write("src/numbers.txt", b"19\n23\n")

    @vf.reward
    async def right(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        try:
            return float((await runtime.read("sum.txt")).strip() == b"42")
        except FileNotFoundError:
            return 0.0


class CodingTasksetConfig(vf.TasksetConfig):
    task: CodingConfig = CodingConfig()


class CodingTaskset(vf.Taskset[CodingTask, CodingTasksetConfig]):
    def load(self):
        prompt = "Write the sum of src/numbers.txt to sum.txt."
        data = vf.TaskData(idx=0, prompt=prompt, image=self.config.task.image)
        return [CodingTask(data, self.config.task)]
