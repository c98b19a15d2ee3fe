"""`evaluate` runs the command `eval` against a real server."""

import asyncio

import pytest

import prime_rl
from tests.support.fake_chat import fake_chat, says


@pytest.mark.extended
async def test_evaluate_function_with_split_against_a_chat_server(tmp_path):
    def load_environment(split="train"):
        import verifiers as vf
        from datasets import Dataset

        def right(completion, answer, **_):
            return float(completion[-1]["content"] == answer)

        rows = [{"question": f"{split} {number}", "answer": "42" if number else "7"} for number in range(2)]
        return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]))

    async with fake_chat() as chat:
        chat.reply = lambda body: says("42")
        summary = await asyncio.to_thread(
            prime_rl.evaluate, load_environment, chat.url, "policy", split="test", k=2, output_dir=tmp_path
        )
    assert (summary["examples"], summary["rollouts"], summary["pass@2"]) == (2, 4, 0.5)
    assert {body["messages"][-1]["content"] for body in chat.requests} == {"test 0", "test 1"}


def test_evaluate_bad_input_is_the_error_of_the_command(tmp_path):
    with pytest.raises(prime_rl.ConfigError, match="no environment to run"):
        prime_rl.evaluate(base_url="http://127.0.0.1:1", output_dir=tmp_path)
    with pytest.raises(prime_rl.ConfigError, match="set env too"):
        prime_rl.evaluate(split="test", output_dir=tmp_path)


def test_sft_unknown_key_is_a_config_error(tmp_path):
    with pytest.raises(prime_rl.ConfigError, match=r"unknown key optim\.rl .*given in Python"):
        prime_rl.sft("some/model", "data.jsonl", config={"optim.rl": 1}, output_dir=tmp_path)


@pytest.mark.parametrize(
    ("text", "args", "message"),
    [
        (
            "import verifiers.v1\n__all__ = []",
            {},
            r"no load_environment\(\); if it is a v1 taskset, pass its id to Run",
        ),
        ("raise KeyError('data')", {}, "cannot be imported: KeyError: 'data'"),
        ("def load_environment(size): return size", {}, "env.args.size is not set"),
        ("def load_environment(size): return 1 / size", {"size": 0}, "{'size': 0} does not load: ZeroDivisionError"),
    ],
)
def test_load_environment_refuses_in_one_line(tmp_path, text, args, message):
    file = tmp_path / f"loaded_{abs(hash(text))}.py"
    file.write_text(text)
    with pytest.raises(prime_rl.ConfigError, match=message) as error:
        prime_rl.load_environment(str(file), **args)
    assert "\n" not in str(error.value)


def test_load_environment_of_a_file_gets_the_arguments(tmp_path):
    (tmp_path / "mine.py").write_text("def load_environment(size=1):\n    return size\n")
    assert prime_rl.load_environment(str(tmp_path / "mine.py"), size=4) == 4
