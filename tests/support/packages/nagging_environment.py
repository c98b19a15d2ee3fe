"""A classic environment that answers everything with "again", and may tamper with what it is shown of the tokens."""

import verifiers as vf
from datasets import Dataset


def load_environment(turns=1, scribble=False):
    class Nagging(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            if scribble:
                step = state["trajectory"][-1]
                step["tokens"] = None
                for name in ("prompt_ids", "completion_ids", "completion_mask", "completion_logprobs"):
                    setattr(step["response"].message.tokens, name, [])
            return [vf.UserMessage(content="again")]

    rows = [{"question": f"say it {i}", "answer": str(i)} for i in range(4)]
    return Nagging(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[lambda: 1.0]), max_turns=turns)
