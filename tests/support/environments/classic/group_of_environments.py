"""Two environments with different rewards as one."""

import verifiers as vf
from datasets import Dataset


def load_environment():
    def longer(completion):
        return float(len(completion[-1]["content"]))

    def constant(completion):
        return -1.0

    return vf.EnvGroup(
        envs=[
            vf.SingleTurnEnv(
                dataset=Dataset.from_list([{"question": question, "answer": ""}]), rubric=vf.Rubric(funcs=[func])
            )
            for question, func in (("Go on.", longer), ("Stop.", constant))
        ],
        env_names=["long", "constant"],
    )
