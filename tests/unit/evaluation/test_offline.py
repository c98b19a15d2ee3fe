"""`eval` as a whole: real workers, a server without a model; what it asks, writes, resumes and refuses."""

import asyncio
import json

import pytest
from aiohttp import web

from prime_rl.core.errors import ConfigError, RunError
from prime_rl.evaluation import eval_session
from prime_rl.storage.paths import RunPaths
from prime_rl.storage.weights.weight_retention import remove_old_versions
from tests.support.fake_chat import fake_chat, says
from tests.support.fake_engine import fake_engine, publish_version
from tests.unit.evaluation.conftest import REVERSE

pytestmark = pytest.mark.slow


def rows_in(folder):
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]


@pytest.mark.extended
async def test_evaluation_logs_rollouts_and_distributions_to_wandb(evaluate, tmp_path):
    async with fake_engine() as engine:
        extras = {"offline": True, "log_extras": {}}
        await evaluate(engine.url, rollouts_per_example=2, num_examples=3, wandb=extras)
    tables = {path.name.split("_")[0]: json.loads(path.read_text()) for path in tmp_path.rglob("*.table.json")}
    columns = ["step", "env", "example", "reward", "is_truncated", "completion_len", "messages"]
    assert tables["samples"]["columns"] == columns
    assert len(tables["samples"]["data"]) == 6
    counts = {row[1]: row[2] for row in tables["distributions"]["data"]}
    assert counts == {"reverse_text/reward": 6, "reverse_text/completion_len": 6}


@pytest.mark.extended
async def test_interrupted_evaluation_resumes(evaluate, tmp_path, monkeypatch):
    monkeypatch.setattr(eval_session, "_RECONNECT_SECONDS", 0.0)
    async with fake_engine() as engine:
        seen = asyncio.Event()

        async def gate(body):
            if len(engine.requests) > 6:
                seen.set()
                await asyncio.Event().wait()  # until the evaluation is cancelled

        engine.gate = gate
        keys = {"rollouts_per_example": 2, "max_concurrent": 2}
        first = asyncio.create_task(evaluate(engine.url, **keys))
        await seen.wait()
        engine.fault = lambda body: web.Response(status=500)  # what is in flight never counts
        engine.gate = None
        await engine.die()
        with pytest.raises(RunError):
            await first
        (folder,) = (tmp_path / "out/evals/reverse_text").iterdir()
        before = (folder / "rollouts.jsonl").read_bytes()
        finished = [row["example"] for row in rows_in(folder) if "rollouts" in row]
        assert 1 <= len(finished) <= 3

        engine.fault, engine.requests = None, []
        await engine.start()
        (result,) = await evaluate(engine.url, **keys)
        assert len(engine.requests) == 2 * (6 - len(finished)), "what was finished is not played again"
        assert (folder / "rollouts.jsonl").read_bytes().startswith(before)
        assert result["folder"] == str(folder)
        assert (result["examples"], result["rollouts"], result["errors"]) == (6, 12, 0)
        assert json.loads((folder / "summary.json").read_text())["reward/mean"] == result["reward/mean"]

        engine.requests = []
        assert await evaluate(engine.url, **keys) == [result]
        assert engine.requests == []
        (other,) = await evaluate(engine.url, **keys, sampling={"max_tokens": 3})
        assert other["folder"] != str(folder), "another configuration, another folder"


@pytest.mark.extended
@pytest.mark.parametrize("ours", [False, True])
async def test_chat_server_gets_messages_and_our_server_pins(evaluate, monkeypatch, ours):
    monkeypatch.setenv("SOME_KEY", "secret")
    async with fake_chat() as server:
        server.pins = [] if ours else None
        server.reply = lambda body: says(body["messages"][-1]["content"][::-1])
        (result,) = await evaluate(
            f"{server.url}/v1",
            client={"base_url": [f"{server.url}/v1"], "api_key_var": "SOME_KEY"},
            num_examples=3,
            rollouts_per_example=4,
        )
    assert (result["reward/mean"], result["pass@4"], result["completion_len/mean"]) == (1.0, 1.0, 3.0)
    assert set(server.keys) == {"Bearer secret"}
    if ours:
        assert (set(server.named), server.pins) == ({"pin 0", "pin 1", "pin 2"}, []), "one a group, given back"
    else:
        assert set(server.named) == {None}
    assert "version/min" not in result


@pytest.mark.extended
async def test_published_versions_are_evaluated_in_turn_and_the_base_model_is_restored(evaluate, tmp_path):
    run = RunPaths(tmp_path / "run")
    for step in (2, 5, 6):
        publish_version(run, step)
    async with fake_engine() as engine:
        deleted = []

        async def delete_what_may_go(step):
            deleted.append(remove_old_versions(run.weights_dir, 6, set()))

        engine.switching = delete_what_may_go
        results = await evaluate(engine.url, weights_dir=run.weights_dir, steps=[2, 5], num_examples=1)
        engine.switching = None
        assert deleted == [[], []], "the run that is still publishing there leaves what is to be evaluated"
        assert [result["version"] for result in results] == [0, 2, 5]
        assert [(result["version/min"], result["version/max"]) for result in results] == [(0, 0), (2, 2), (5, 5)]
        assert (engine.step, engine.holder) == (0, None)
        lines = [json.loads(line) for line in RunPaths(tmp_path / "out").metrics("eval").read_text().splitlines()]
        assert [line["step"] for line in lines] == [0, 2, 5]
        assert all("eval/reverse_text/pass@1" in line for line in lines)

        (only,) = await evaluate(
            engine.url, weights_dir=run.weights_dir, steps=[5], eval_base_model=False, num_examples=1
        )
        assert only["version"] == 5
        engine.holder = "a run"
        with pytest.raises(RunError, match="leased by a run"):
            await evaluate(engine.url, weights_dir=run.weights_dir, num_examples=1)
    assert remove_old_versions(run.weights_dir, 6, set()) == [2, 5], "nothing is held any more"


async def test_invalid_input_raises_config_error(evaluate, tmp_path):
    async with fake_engine() as engine:
        for keys, message in (
            ({"weights_dir": "nowhere"}, "holds no step_N folder"),
            ({"weights_dir": "nowhere", "steps": [3]}, "does not hold step 3"),
            ({"env": [{"id": "no_such_environment"}]}, r"env\.0\.id = no_such_environment is not installed"),
        ):
            with pytest.raises(ConfigError, match=message):
                await evaluate(engine.url, **keys)
    with pytest.raises(RunError, match="cannot be reached"):
        await evaluate(engine.url, env=[REVERSE])
    run = RunPaths(tmp_path / "run")
    publish_version(run, 2)
    async with fake_chat() as server:
        with pytest.raises(ConfigError, match="does not answer GET /policy"):
            await evaluate(server.url, weights_dir=run.weights_dir)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("models", "message"),
    [
        (["a b"], r"model\.name is not set: .*Qwen3-0.6B, and http://\S+ serves a b; add --model.name 'a b'$"),
        (["a", "b", "c", "d"], "serves a, b, c and 1 more; add --model.name NAME$"),
        (["a", "Qwen/Qwen3-0.6B"], None),
        ([], None),
    ],
)
async def test_default_model_that_the_server_does_not_serve_raises_config_error(evaluate, monkeypatch, models, message):
    monkeypatch.setenv("SOME_KEY", "secret")
    async with fake_chat() as server:
        server.models = models
        keys = {"client": {"base_url": [f"{server.url}/v1"], "api_key_var": "SOME_KEY"}, "num_examples": 1, "model": {}}
        if message is None:
            await evaluate(server.url, **keys)
        else:
            with pytest.raises(ConfigError, match=message):
                await evaluate(server.url, **keys)
            assert server.requests == []
    assert {*server.keys} == {"Bearer secret"}


async def test_too_long_prompts_are_counted_and_no_finished_example_raises(evaluate, tmp_path, said):
    """The warning names a server with a shorter context."""
    async with fake_engine() as engine:
        engine.settings = {"model.max_model_len": 3}
        with pytest.raises(RunError, match="all examples of reverse_text failed"):
            await evaluate(engine.url, seq_len=4)
    (summary,) = json.loads((tmp_path / "out/evals/summary.json").read_text())
    assert (summary["errors"], summary["errors/overlong"], summary["reward/mean"]) == (6, 6, None)
    (line,) = [line for line in said() if "truncates" in line]
    expected = f"{engine.url} truncates rollouts at 3 tokens, before seq_len = 4; raise model.max_model_len there, "
    assert line == expected + "or lower seq_len"


async def test_evaluation_breaks_down_by_a_column_and_records_the_environment(evaluate, tmp_path, said):
    async with fake_engine() as engine:
        engine.settings = {"model.max_model_len": 64}  # as seq_len: no warning
        env = {**REVERSE, "breakdown": ["answer"]}
        (result,) = await evaluate(engine.url, env=[env], num_examples=3)
        parts = {key: value for key, value in result.items() if key.startswith("by/answer/")}
        assert sum(value for key, value in parts.items() if key.endswith("/examples")) == 3
        (folder,) = (tmp_path / "out/evals/reverse_text").iterdir()
        assert all(row["columns"].keys() == {"answer"} for row in rows_in(folder))
        identity = json.loads((folder / "settings.json").read_text())["identity"]
        assert identity == result["identity"] and identity.startswith("reverse_text 0.1.0 ")
        with pytest.raises(ConfigError, match=r"env\.breakdown: example 0 of .* has no column 'info\.level'"):
            await evaluate(engine.url, env=[{**REVERSE, "breakdown": ["info.level"]}])
    assert not any("truncates" in line for line in said())


GRADER = """
import verifiers as vf
from datasets import Dataset


def load_environment(data_path):
    rows = [{"question": line, "answer": line} for line in open(data_path).read().split()]

    def grade(answer):
        if answer in "ace":
            raise KeyError(answer)
        return 1.0

    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[grade]))
"""


@pytest.mark.extended
async def test_evaluation_with_other_keys_or_data_starts_again(evaluate, tmp_path):
    (tmp_path / "grader_of_this_test.py").write_text(GRADER)
    data = tmp_path / "data.txt"
    data.write_text("a b c d e f")
    env = {"id": str(tmp_path / "grader_of_this_test.py"), "args": {"data_path": str(data)}}
    async with fake_engine() as engine:

        async def run(**keys):
            engine.requests = []
            (result,) = await evaluate(engine.url, env=[env | keys])
            return result, len(engine.requests)

        zero, _ = await run(reward_errors="zero")
        assert (zero["reward/mean"], zero["errors"]) == (0.5, 0)
        assert await run(reward_errors="zero") == (zero, 0), "the same command asks nothing"
        drop, asked = await run(reward_errors="drop")
        assert (drop["reward/mean"], drop["errors"], asked) == (1.0, 3, 6)
        assert drop["reward/mean_if_failed_is_0"] == 0.5
        data.write_text("a b c d e x")
        other, asked = await run(reward_errors="zero")
        assert asked == 6 and other["folder"] not in (zero["folder"], drop["folder"])
