"""The routes: who may call, what is refused, and that a repeated request runs once. One test has a real trainer."""

import asyncio
import random
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from tests.support.tiny_model import make_tiny_model
from tinker.proto import tinker_public_pb2 as pb

from prime_rl.configs.training.model import ALL_LINEAR, LoRAConfig, TrainerModelConfig
from prime_rl.core.errors import ConfigError
from prime_rl.storage.artifact import publish_artifact
from prime_rl.trainer.parallel.process_group import join_world
from prime_rl.trainer.weights.adapter_files import ADAPTER_WEIGHTS
from prime_rl_tinker import app as routes
from prime_rl_tinker.api_main import read_key
from prime_rl_tinker.app import make_app
from prime_rl_tinker.checkpoint_store import CheckpointPath, CheckpointStore
from prime_rl_tinker.config import TinkerConfig
from prime_rl_tinker.messages import Answer, ForwardBackward, SaveWeights
from prime_rl_tinker.model_trainer import OPTIMIZER_STATE, ModelTrainer
from prime_rl_tinker.sequencer import Sequencer
from prime_rl_tinker.service import ServedModel, Service

KEY = "tml-secret"
MODEL = "Qwen/Qwen3-8B"


class Server:
    """A client of the application, with what its double of a trainer executed."""

    def __init__(self, tmp_path):
        self.executed, self.completions, self.gate, self.now = [], [], asyncio.Event(), 0.0
        self.gate.set()
        self.sequencer = Sequencer(self.execute, gap_seconds=60)
        self.store = CheckpointStore(tmp_path)
        served = ServedModel((MODEL, "path"), "qwen3", vocabulary=50, max_tokens=32)
        self.service = Service(served, self.store, self.sequencer, self, 120, clock=lambda: self.now)
        transport = httpx.ASGITransport(make_app(self.service, KEY))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://server/api/v1/", headers={"X-API-Key": KEY})

    async def execute(self, operations):
        await self.gate.wait()
        self.executed += operations
        answers = []
        for one in operations:
            if isinstance(one, SaveWeights):
                publish_artifact(Path(one.directory), lambda folder, one=one: {"format": "test", **one.fields})
            logprobs = []
            if isinstance(one, ForwardBackward):
                logprobs = [np.full(len(sample.targets) // 8, -1, np.float32).tobytes() for sample in one.samples]
            answers.append(Answer(logprobs=logprobs, metrics={"loss:sum": 1.0}))
        return answers

    async def sample(self, folder, body):
        """Stand in for `Samplers`."""
        self.completions.append((folder, body))
        choice = {"token_ids": [1, 2], "logprobs": {"token_logprobs": [-0.5, -1.5]}, "finish_reason": "stop"}
        top = {str(token): {"logprob": -2.0, "rank": 3} for token in body["prompt"]}
        return {"choices": [{**choice, "prompt_logprobs": [None, *[top] * (len(body["prompt"]) - 1)]}] * body["n"]}

    async def post(self, route, status=200, /, **body):
        response = await self.http.post(route, json=body)
        assert response.status_code == status, response.text
        return response.json() if response.content else None

    async def result(self, future):
        response = await self.http.post("retrieve_future", json={"request_id": future["request_id"]})
        assert response.status_code == 200, response.text
        is_json = response.headers["content-type"] == "application/json"
        return response.json() if is_json else response.content

    async def model(self, number=0, rank=4, seed=0):
        """Create a session with a model; returns its id."""
        session = (await self.post("create_session", tags=[], user_metadata=None, sdk_version="0.38"))["session_id"]
        lora = {"rank": rank, "seed": seed}
        body = {"session_id": session, "model_seq_id": number, "base_model": MODEL, "lora_config": lora}
        answer = await self.result(await self.post("create_model", **body, user_metadata={"renderer": "x"}))
        assert answer["model_id"] == f"{session}:train:{number}"
        return answer["model_id"]


@pytest.fixture
async def server(tmp_path):
    async with running(Server(tmp_path)) as one:
        yield one


@asynccontextmanager
async def running(server):
    task = asyncio.ensure_future(server.sequencer.run())
    async with server.http:
        yield server
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def chunk(model_id, seq_id, samples=((1, 2),), forward_only=False):
    """Return a request that scores samples; the targets are the tokens in reverse order."""
    request = pb.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy", forward_only=forward_only
    )
    for tokens in samples:
        datum, targets = request.data.add(), np.array(tokens[::-1], np.int64)
        datum.model_input.add().encoded_text.tokens = np.array(tokens, np.int32).tobytes()
        tensor = pb.Tensor(dense=targets.tobytes(), dtype=pb.DTYPE_INT64, shape=[len(tokens)])
        datum.loss_fn_inputs["target_tokens"].CopyFrom(tensor)
    return request.SerializeToString()


async def test_key_is_the_servers_or_any_of_the_sdk(tmp_path):
    server = Server(tmp_path)
    for given, status in ((KEY, 200), ("tml-other", 401), ("", 401)):
        response = await server.http.get("get_server_capabilities", headers={"X-API-Key": given})
        assert response.status_code == status
    open_app = httpx.ASGITransport(make_app(server.service, None))
    async with httpx.AsyncClient(transport=open_app, base_url="http://server/api/v1/") as http:
        for given, status in (("tml-any", 200), ("sk-1", 401)):
            response = await http.get("get_server_capabilities", headers={"X-API-Key": given})
            assert response.status_code == status
    await server.http.aclose()


def test_key_for_another_address_is_required_and_of_the_sdk(monkeypatch):
    config = TinkerConfig(model={"name": "m"}, server={"host": "0.0.0.0"})
    for key, message in (("", "server.host = 0.0.0.0 needs an API key in TINKER_SERVER_API_KEY"), ("sk-1", "tml-")):
        monkeypatch.setenv("TINKER_SERVER_API_KEY", key)
        with pytest.raises(ConfigError, match=message):
            read_key(config)
    monkeypatch.setenv("TINKER_SERVER_API_KEY", KEY)
    assert read_key(config) == KEY


async def test_chunks_in_any_order_and_twice_run_once_in_their_order(server):
    model = await server.model()
    futures = {}
    for number in (3, 2, 3, 1, 2, 1):
        response = await server.http.post("forward_backward", content=chunk(model, number, [(number, 2)]))
        assert response.status_code == 200
        futures.setdefault(number, set()).add(response.json()["request_id"])
    assert all(len(ids) == 1 for ids in futures.values())
    for number in (1, 2, 3):
        output = pb.ForwardBackwardOutput()
        output.ParseFromString(await server.result({"request_id": futures[number].pop()}))
        assert dict(output.metrics) == {"loss:sum": 1.0}
    passes = [one for one in server.executed if isinstance(one, ForwardBackward)]
    assert [np.frombuffer(one.samples[0].tokens, np.int64)[0] for one in passes] == [1, 2, 3]


class TrainingServer(Server):
    """A server with a real trainer."""

    def __init__(self, tmp_path, trainer):
        super().__init__(tmp_path)
        self.trainer = trainer

    async def execute(self, operations):
        return await asyncio.to_thread(self.trainer.execute, operations)  # requests arrive meanwhile

    async def submit(self, model_id, number, seed):
        """Submit operation `number` of a model, one of those of `seed`; returns its future."""
        random = np.random.default_rng([seed, number])
        if number % 40 == 0:
            body = {"model_id": model_id, "seq_id": number, "path": str(number), "overwrite": True}
            return await self.post("save_weights", **body)
        if number % 4 == 0:
            adam = {"learning_rate": 10 ** random.uniform(-3, -2), "weight_decay": 0.01, "grad_clip_norm": 1.0}
            return await self.post("optim_step", model_id=model_id, seq_id=number, adam_params=adam)
        samples = [random.integers(0, 50, random.integers(2, 9)).tolist() for _ in range(random.integers(1, 4))]
        content = chunk(model_id, number, samples, forward_only=number % 9 == 0)
        response = await self.http.post("forward_backward", content=content)
        assert response.status_code == 200, response.text
        return response.json()

    async def fetch(self, future):
        """Return a result, without the path of a checkpoint, which names its model."""
        while isinstance(answer := await self.result(future), dict) and answer.get("type") == "try_again":
            pass
        return answer if isinstance(answer, bytes) else {**answer, "path": None}

    async def files(self, model_id, number):
        """Return the bytes of the weights and of the optimizer's state."""
        saved = await self.post("save_weights", model_id=model_id, path="last", seq_id=number)
        await self.fetch(saved)
        folder = self.store.folder(CheckpointPath(model_id, "weights", "last"))
        return {name: (folder / name).read_bytes() for name in (ADAPTER_WEIGHTS, OPTIMIZER_STATE)}


@pytest.mark.parametrize("count", [120, pytest.param(2000, marks=pytest.mark.extended)])
async def test_shuffled_and_repeated_operations_have_the_sequential_result_bit_for_bit(count, tmp_path):
    """Three models in company, requests in any order and 5 % of them twice; then each model alone, in order."""
    path, ranks, found = make_tiny_model(tmp_path / "model"), (2, 4, 8), []
    config = TrainerModelConfig(name=str(path), seq_len=16, lora=LoRAConfig(rank=8, target_modules=[ALL_LINEAR]))
    last, shuffler = count // len(ranks), random.Random(count)
    with join_world("cpu", 60) as world:
        trainer = ModelTrainer(config, world)
        async with running(TrainingServer(tmp_path, trainer)) as server:
            models = [await server.model(rank=rank, seed=rank) for rank in ranks]
            arrivals = [(model, number) for number in range(1, last + 1) for model in range(len(ranks))]
            for begin in range(0, len(arrivals), 60):  # the requests that are in flight together
                part = arrivals[begin : begin + 60]
                shuffler.shuffle(part)
                arrivals[begin : begin + 60] = part
            futures = {}
            for arrival in arrivals:
                futures[arrival] = await server.submit(models[arrival[0]], arrival[1], seed=arrival[0])
                if shuffler.random() < 0.05:
                    model, number = shuffler.choice(list(futures)[-120:])
                    assert await server.submit(models[model], number, seed=model) == futures[model, number]
            answers = {arrival: await server.fetch(future) for arrival, future in futures.items()}
            found = [await server.files(model, last + 1) for model in models]
        for index, rank in enumerate(ranks):
            async with running(TrainingServer(tmp_path, trainer)) as server:
                model = await server.model(rank=rank, seed=rank)
                for number in range(1, last + 1):
                    future = await server.submit(model, number, seed=index)
                    assert await server.fetch(future) == answers[index, number]
                assert await server.files(model, last + 1) == found[index]


async def test_result_that_is_not_there_yet_is_asked_for_again(server, monkeypatch):
    monkeypatch.setattr(routes, "_POLL_SECONDS", 0.01)
    model = await server.model()
    server.gate.clear()
    future = await server.post("optim_step", model_id=model, seq_id=1, adam_params={"learning_rate": 0.1})
    assert (await server.result(future))["type"] == "try_again"
    server.gate.set()
    while (answer := await server.result(future)).get("type") == "try_again":
        pass
    assert answer == {"metrics": {"loss:sum": 1.0}}
    assert await server.result(future) == answer  # a lost answer is fetched again


async def test_checkpoints_are_saved_listed_expired_and_deleted(server):
    model = await server.model()
    saved = await server.result(await server.post("save_weights", model_id=model, path="a", seq_id=1))
    assert saved["path"] == f"tinker://{model}/weights/a"
    body = {"model_id": model, "path": "b", "seq_id": 2, "ttl_seconds": 3600, "user_metadata": {"k": "v"}}
    await server.result(await server.post("save_weights_for_sampler", **body))
    refused = await server.post("save_weights", 400, model_id=model, path="a", seq_id=3)
    assert "exists already" in refused["detail"]
    listed = (await server.http.get(f"training_runs/{model}/checkpoints")).json()["checkpoints"]
    assert [one["checkpoint_id"] for one in listed] == ["weights/a", "sampler_weights/b"]
    assert listed[1]["user_metadata"] == {"k": "v"}
    assert listed[1]["expires_at"] is not None
    info = await server.post("weights_info", tinker_path=saved["path"])
    assert (info["base_model"], info["lora_rank"], info["train_unembed"]) == (MODEL, 4, True)
    run = (await server.http.get(f"training_runs/{model}")).json()
    assert run["last_checkpoint"]["tinker_path"] == saved["path"]
    assert run["user_metadata"] == {"renderer": "x"}
    place = f"training_runs/{model}/checkpoints/weights/a"
    assert (await server.http.put(f"{place}/ttl", json={"ttl_seconds": 1e-9})).status_code == 204
    assert "expired" in (await server.post("weights_info", 400, tinker_path=saved["path"]))["detail"]
    other = f"training_runs/{model}/checkpoints/sampler_weights/b"
    assert (await server.http.delete(other)).status_code == 204
    assert (await server.http.delete(other)).status_code == 400


async def test_names_and_paths_of_checkpoints_that_lead_elsewhere_are_refused(server):
    model = await server.model()
    for name in ("../x", "..", "a/b", "", ".hidden", "a" * 200, "a\n"):
        assert "name" in (await server.post("save_weights", 400, model_id=model, path=name, seq_id=1))["detail"]
    for path in ("tinker://a:train:0/weights/none", "tinker://../weights/a", "file:///etc",
                 "tinker://a:train:0/other/a", ""):  # fmt: skip
        await server.post("weights_info", 400, tinker_path=path)


async def test_model_from_a_checkpoint(server):
    model = await server.model(rank=6)
    await server.result(await server.post("save_weights", model_id=model, path="a", seq_id=1))
    await server.result(await server.post("save_weights_for_sampler", model_id=model, path="s", seq_id=2))
    session = model.partition(":")[0]
    body = {"session_id": session, "model_seq_id": 5, "path": f"tinker://{model}/weights/a", "optimizer": True}
    answer = await server.result(await server.post("load_weights", **body))
    assert answer["model_id"] == f"{session}:train:5"
    created = server.executed[-1]
    assert (created.rank, created.load.with_optimizer) == (6, True)
    body |= {"path": f"tinker://{model}/sampler_weights/s", "model_seq_id": 6}
    assert "no state of an optimizer" in (await server.post("load_weights", 400, **body))["detail"]


async def test_silent_session_ends_and_frees_its_models(server):
    model, other = await server.model(), await server.model()
    server.now = 100
    await server.post("session_heartbeat", session_id=other.partition(":")[0])
    server.now = 130
    server.service.tidy()
    await server.post("session_heartbeat", 410, session_id=model.partition(":")[0])
    await server.post("session_heartbeat", session_id=other.partition(":")[0])
    await server.post("optim_step", 410, model_id=model, seq_id=1, adam_params={})
    step = await server.post("optim_step", model_id=other, seq_id=1, adam_params={})
    await server.result(step)
    assert [one.model_id for one in server.executed if type(one).__name__ == "RemoveModel"] == [model]


async def test_request_that_waits_ends_with_its_session(server):
    model = await server.model()
    server.gate.clear()
    step = await server.post("optim_step", model_id=model, seq_id=1, adam_params={})
    waiting = asyncio.ensure_future(server.http.post("retrieve_future", json={"request_id": step["request_id"]}))
    for _ in range(50):  # it waits now
        await asyncio.sleep(0)
    assert (await server.http.post(f"sessions/{model.partition(':')[0]}/finish", json={})).status_code == 204
    assert (await waiting).status_code == 410
    server.gate.set()


async def test_sessions_are_described_and_models_unloaded(server):
    model, other = await server.model(), await server.model()
    session = model.partition(":")[0]
    assert (await server.http.get("sessions?limit=1")).json() == {"sessions": [other.partition(":")[0]]}
    described = (await server.http.get(f"sessions/{session}")).json()
    assert described["training_run_ids"] == [model]
    for _ in range(2):
        gone = await server.post("unload_model", model_id=model)
        assert (await server.result(gone))["model_id"] == model
    assert type(server.executed[-1]).__name__ == "RemoveModel"
    refused = await server.post("optim_step", 400, model_id=model, seq_id=1, adam_params={})
    assert "does not exist" in refused["detail"]
    await server.post("unload_model", 400, model_id=f"{session}:train:7")


def test_replacement_of_a_checkpoint_that_was_interrupted_is_finished(tmp_path):
    store = CheckpointStore(tmp_path)
    for name in (".old-a", ".new-a", ".new-b", "b"):
        publish_artifact(tmp_path / "models/x:train:0/weights" / name, lambda folder: {"format": "test"})
    (tmp_path / "models/x:train:0/snapshots/3").mkdir(parents=True)
    store.recover()
    found = {folder.name for folder in (tmp_path / "models/x:train:0/weights").iterdir()}
    assert found == {".old-a", "a", ".new-b", "b"}
    assert not (tmp_path / "models/x:train:0/snapshots").exists()


async def test_old_results_and_expired_checkpoints_are_dropped(server):
    model = await server.model()
    step = await server.post("optim_step", model_id=model, seq_id=1, adam_params={})
    await server.result(step)
    body = {"model_id": model, "path": "a", "seq_id": 2, "ttl_seconds": 1e-9}
    await server.result(await server.post("save_weights", **body))
    folder = server.store.folder(CheckpointPath(model, "weights", "a"))
    assert folder.exists()
    for server.now in range(0, 2000, 100):
        await server.post("session_heartbeat", session_id=model.partition(":")[0])
        server.service.tidy()
    assert not folder.exists()
    await server.post("retrieve_future", 410, request_id=step["request_id"])
    again = await server.post("optim_step", model_id=model, seq_id=1, adam_params={})
    assert "arrived after" in (await server.result(again))["error"]  # it does not run twice


async def test_samplers_keep_their_weights(server):
    model = await server.model()
    session, folders = model.partition(":")[0], []
    for number, kind in enumerate(("snapshot", "inflight", "inflight")):
        body = {"model_id": model, "seq_id": number + 1, "sampling_session_seq_id": number, "kind": kind}
        await server.result(await server.post("save_weights_for_sampler", **body))
    await server.post("create_sampling_session", session_id=session, sampling_session_seq_id=3, base_model=MODEL)
    for number in range(4):
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
        body = {"sampling_session_id": f"{session}:sample:{number}", "seq_id": 0, "prompt": prompt, "num_samples": 2}
        future = await server.post("asample", **body, sampling_params={"max_tokens": 4}, prompt_logprobs=True)
        assert len(future["sample_sequence_ids"]) == 2
        response = pb.SampleResponse()
        response.ParseFromString(await server.result(future))
        assert [np.frombuffer(one.tokens, np.int32).tolist() for one in response.sequences] == [[1, 2]] * 2
        np.testing.assert_array_equal(np.frombuffer(response.prompt_logprobs, np.float32), [np.nan, -2, -2])
        folders.append(server.completions[-1][0])
    snapshot, earlier, later, base = folders
    assert earlier == later  # both follow the model's latest weights
    assert snapshot not in (None, later)
    assert base is None


async def sampling(server):
    """Create a sampling session of the base model; return the body of a request to it."""
    session = (await server.model()).partition(":")[0]
    await server.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=MODEL)
    prompt = {"chunks": [{"tokens": [5]}]}
    return {"sampling_session_id": f"{session}:sample:0", "seq_id": 1, "prompt": prompt, "sampling_params": {}}


WITHOUT_END = {"ignore_eos": True, "include_stop_str_in_output": True}


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (None, {}),
        ([], {**WITHOUT_END, "stop": []}),
        ("x", {**WITHOUT_END, "stop": ["x"]}),
        ([7], {**WITHOUT_END, "stop_token_ids": [7]}),
    ],
)
async def test_sampling_ends_at_the_stops_of_the_request_only(server, stop, expected):
    body = await sampling(server)
    await server.result(await server.post("asample", **{**body, "sampling_params": {"stop": stop}}))
    sent = server.completions[-1][1]
    assert sent["max_tokens"] == 31  # up to the context
    assert {key: sent[key] for key in expected} == expected
    assert ("ignore_eos" in sent) == bool(expected)


async def test_sampling_that_is_cancelled_ends(server):
    body = await sampling(server)
    future = await server.post("asample", **body)
    model = f"{body['sampling_session_id'].partition(':')[0]}:train:0"
    for request_id, status in ((future["request_id"], 410), (f"{model}:0", 200)):
        response = await server.http.post("cancel_future", json={"request_id": request_id})
        assert response.status_code == 204
        response = await server.http.post("retrieve_future", json={"request_id": request_id})
        assert response.status_code == status


async def test_sampling_refuses_what_it_does_not_support_by_name(server):
    body = await sampling(server)
    for change, field in (
        ({"topk_sample_logprobs": 3}, "topk_sample_logprobs"),
        ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k"),
        ({"record_stability_info": True}, "record_stability_info"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n"),
        ({"prompt": {"chunks": [{"type": "image", "data": "x"}]}}, "prompt"),
        ({"prompt": {"chunks": [{"tokens": [50]}]}}, "vocabulary"),
        ({"prompt": {"chunks": []}}, "prompt"),
        ({"sampling_params": {"max_tokens": 33}}, "context"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"surprise": 1}, "surprise"),
    ):
        assert field in (await server.post("asample", 400, **{**body, **change}))["detail"]
    assert not server.completions


async def test_pattern_of_names_stands_for_the_model_and_is_announced(server):
    names = server.service.served.names
    server.service.served = replace(server.service.served, names=("Qwen/*", "run[1]", *names))
    session = await server.post("create_session", tags=[], sdk_version="0")
    assert session["info_message"].startswith(f"each model Qwen/* is {names[-1]} here")
    body = {"session_id": session["session_id"], "sampling_session_seq_id": 1}
    assert "sampling_session_id" in await server.post("create_sampling_session", **body, base_model="Qwen/Any-1B")
    body["sampling_session_seq_id"] = 2
    assert "sampling_session_id" in await server.post("create_sampling_session", **body, base_model="run[1]")
    refused = await server.post("create_sampling_session", 400, **body, base_model="other/Any-1B")
    assert "'other/Any-1B' is not served" in refused["detail"]
    listed = (await server.http.get("get_server_capabilities")).json()["supported_models"]
    assert [model["model_name"] for model in listed] == ["run[1]", *names]


async def test_alias_of_a_loss_is_announced_and_computed(server):
    one = pb.ForwardBackwardRequest(seq_id=1, loss_fn="stable_reinforce")
    datum = one.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], np.int32).tobytes()
    for name, value in (("target_tokens", [2, 3]), ("logprobs", [-1.0, -2.0]), ("advantages", [1.0, 1.0])):
        array = np.array(value, np.int64 if name == "target_tokens" else np.float32)
        dtype = pb.DTYPE_INT64 if name == "target_tokens" else pb.DTYPE_FLOAT32
        datum.loss_fn_inputs[name].CopyFrom(pb.Tensor(dense=array.tobytes(), dtype=dtype, shape=[2]))
    one.model_id = await server.model()
    refused = await server.http.post("forward_backward", content=one.SerializeToString())
    assert refused.status_code == 400 and "[aliases_of_losses]" in refused.json()["detail"]
    server.service.served = replace(server.service.served, losses={"stable_reinforce": "importance_sampling"})
    accepted = await server.http.post("forward_backward", content=one.SerializeToString())
    await server.http.post("retrieve_future", json={"request_id": accepted.json()["request_id"]})
    assert server.executed[-1].loss_fn == "importance_sampling"
    answer = await server.post("create_session")
    assert answer["info_message"] == "stable_reinforce is computed as importance_sampling"


async def test_other_models_and_optimizers_are_refused(server):
    session = (await server.post("create_session", tags=[], user_metadata=None, sdk_version=""))["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "other", "lora_config": {"rank": 4}}
    assert (
        "'other' is not served; use Qwen/Qwen3-8B, path" in (await server.post("create_model", 400, **body))["detail"]
    )
    body |= {"base_model": MODEL, "optimizer_config": {"type": "dimuon"}}
    assert "optimizer_config.type" in (await server.post("create_model", 400, **body))["detail"]
    for path in ("copy_weights", "create_custom_loss", "save_weights_external"):
        assert "not supported" in (await server.post(path, 400))["detail"]
    assert (await server.http.post("nothing", json={})).json()["detail"] == "/api/v1/nothing: Not Found"


async def test_failed_operation_is_an_answer(server, monkeypatch):
    model = await server.model()

    async def fail(operations):
        return [Answer("no such thing", is_user_error=True)] * len(operations)

    monkeypatch.setattr(server.sequencer, "_execute", fail)
    future = await server.post("optim_step", model_id=model, seq_id=1, adam_params={})
    assert await server.result(future) == {"error": "no such thing", "category": "user"}
