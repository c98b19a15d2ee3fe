"""Two judges: another model, behind a client of its own, and the policy, whose verdict is not trained on."""

from types import SimpleNamespace

import verifiers as vf
from datasets import Dataset


class OtherModel:
    """Says yes if the answer occurs in what it is asked, in OpenAI's interface."""

    def __init__(self):
        self.chat = SimpleNamespace(completions=self)

    async def create(self, model, messages, **sampling):
        verdict = "yes" if "Response:\n```\ncba" in messages[0]["content"] else "no"
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=verdict))])


async def other(judge, prompt, completion, answer, state):
    return float(await judge(prompt, completion, answer, state) == "yes")


async def policy(completion, state):
    question = [{"role": "user", "content": f"Good? {completion[-1]['content']}"}]
    response = await state["client"].get_response(question, state["model"], {})
    return float(response.message.content)


def load_environment():
    rubric = vf.JudgeRubric(judge_client=OtherModel())
    rubric.add_reward_func(other)
    rubric.add_reward_func(policy, weight=0.1)
    data = Dataset.from_list([{"question": "Reverse abc.", "answer": "cba"}])
    return vf.SingleTurnEnv(dataset=data, rubric=rubric)
