"""One question, one answer in XML, two synchronous rewards, a system prompt."""

import verifiers as vf
from datasets import Dataset


def correct(parser, completion, answer):
    return 1.0 if parser.parse_answer(completion) == answer else 0.0


def short(completion):
    return len(completion[-1]["content"]) < 5


def load_environment(word="abc"):
    parser = vf.XMLParser(["answer"])
    rubric = vf.Rubric(funcs=[correct, short], weights=[1.0, 0.5], parser=parser)
    data = Dataset.from_list([{"question": f"Reverse {word}.", "answer": word[::-1]}])
    return vf.SingleTurnEnv(dataset=data, system_prompt="Be brief.", parser=parser, rubric=rubric)
