"""What cannot be trained on, by argument `does`."""

import verifiers as vf
from datasets import Dataset

PICTURE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]


class OwnAdvantages(vf.Rubric):
    has_advantages = True


class Pictures(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": PICTURE}]


class Streams(vf.Environment):
    async def rollout(self, input, client, model, sampling_args=None):
        state = await self.init_state(input, client, model, sampling_args)
        question = [{"role": "user", "content": "say it"}]
        await state["client"].client.chat.completions.create(model=model, messages=question, stream=True)
        return state


def load_environment(does):
    def one(completion):
        return 1.0

    rows = [{"prompt": [{"role": "user", "content": "say it"}], "answer": ""}]
    data, rubric = Dataset.from_list(rows), vf.Rubric(funcs=[one])
    if does == "picture":
        environment = vf.SingleTurnEnv(dataset=data, rubric=rubric)
        environment.get_dataset = lambda *args, **kwargs: [{"prompt": [{"role": "user", "content": PICTURE}]}]
        return environment
    if does == "picture later":
        return Pictures(dataset=data, rubric=rubric, max_turns=2)
    if does == "advantages":
        return vf.SingleTurnEnv(dataset=data, rubric=OwnAdvantages(funcs=[one]))
    if does == "stream":
        return Streams(dataset=data, rubric=rubric)
    if does == "text":
        return vf.SingleTurnEnv(
            dataset=Dataset.from_list([{"prompt": "say it", "answer": ""}]), rubric=rubric, message_type="completion"
        )
    raise ValueError(does)
