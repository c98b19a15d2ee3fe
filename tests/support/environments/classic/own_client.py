"""Its own loop with an OpenAI client that it builds itself; one call plays the user and is not part of the rollout."""

import openai
import verifiers as vf
from datasets import Dataset


class Loop(vf.Environment):
    async def rollout(self, input, client, model, sampling_args=None):
        state = await self.init_state(input, client, model, sampling_args)
        endpoint = state["client"].client
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as mine:
            messages = [message.model_dump(include={"role", "content"}) for message in state["prompt"]]
            for _ in range(2):
                reply = await mine.chat.completions.create(model=model, messages=messages)
                user = await mine.chat.completions.create(model=model, messages=[{"role": "user", "content": "Ask."}])
                messages.append({"role": "assistant", "content": reply.choices[0].message.content})
                messages.append({"role": "user", "content": user.choices[0].message.content})
        state["completion"] = messages[1:-1]
        state["is_completed"] = True
        return state


def load_environment():
    def letters(completion):
        return float(sum(len(message["content"]) for message in completion if message["role"] == "assistant"))

    data = Dataset.from_list([{"question": "Talk.", "answer": ""}])
    return Loop(dataset=data, rubric=vf.Rubric(funcs=[letters]))
