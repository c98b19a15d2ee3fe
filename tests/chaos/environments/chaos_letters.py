"""An environment whose reward is the share of the letter `a` in the answer; installed by its folder on the path."""

import verifiers as vf
from datasets import Dataset


def load_environment(examples: int = 40) -> vf.SingleTurnEnv:
    def reward(completion, **kwargs):
        text = completion[-1].content
        return text.count("a") / max(1, len(text))

    rows = [{"question": f"letters {index}", "answer": ""} for index in range(examples)]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[reward]))
