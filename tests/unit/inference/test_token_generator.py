"""The generator of token streams on vLLM's own output processor; the engine and its validation are simulated."""

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from prime_rl.rollouts.clients.generation_messages import Completion, SampleRequest, encode
from tests.support.vllm_modules import LazyModule, needs_vllm

pytestmark = needs_vllm

exceptions, engine = LazyModule("vllm.exceptions"), LazyModule("vllm.v1.engine")
engine_exceptions = LazyModule("vllm.v1.engine.exceptions")


class FakeSample:
    """Takes the place of `generation_stream.StreamedSample`."""

    def __init__(self, number: int) -> None:
        self.id, self.name, self.is_cancelled = number, "", False
        self.outputs: list[Completion | Exception] = []

    def put(self, output: Completion | Exception) -> None:
        self.outputs.append(output)

    @property
    def output(self) -> Any:
        [output] = self.outputs
        return output


class FakeClient:
    """vLLM's engine client, as far as the generator uses it."""

    def __init__(self) -> None:
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.output_processor import OutputProcessor

        from prime_rl.inference.vllm.token_generator import TokenGenerator

        self.output_processor = OutputProcessor(None, log_stats=True)
        self.model_config = SimpleNamespace(max_model_len=100)
        self.input_processor = SimpleNamespace(
            process_inputs=self._process,
            _validate_model_inputs=self._validate,
            _validate_prompt_len=self._validate_length,
        )
        self.sent: list[Any] = []
        self.processed = 0
        self.checked: list[int] = []
        self.adapter = LoRARequest("named", 2, "in memory")
        self.admission: list[int] = []
        self.serving = SimpleNamespace(
            models=SimpleNamespace(lora_requests={"named": self.adapter}, base_model_paths=[SimpleNamespace(name="m")]),
            _is_model_supported=lambda name: name == "m",
            _preflight=self.admission.append,
            default_sampling_params={},
            override_max_tokens=None,
        )
        self.state = SimpleNamespace(
            serving_tokens=self.serving, enable_server_load_tracking=False, server_load_metrics=0
        )
        self.generator = TokenGenerator(self, self.state, self._prepare, self._send)

    def _process(self, name: str, prompt: Any, parameters: Any, tasks: Any, lora_request: Any) -> Any:
        self.processed += 1
        self._validate(None, prompt)
        return SimpleNamespace(sampling_params=parameters.clone())

    def _validate(self, _: None, prompt: Any) -> None:
        self.checked.append(len(prompt["prompt_token_ids"]))
        if not prompt["prompt_token_ids"]:
            raise exceptions.VLLMValidationError("The decoder prompt cannot be empty")

    def _validate_length(self, length: int, kind: str) -> None:
        if length > self.model_config.max_model_len:
            raise exceptions.VLLMValidationError(
                f"The {kind} prompt (length {length}) is longer than the maximum model length"
            )

    def _prepare(self, request: Any) -> None:
        request.cache_salt = f"hash:{request.cache_salt}"

    async def _send(self, request: Any) -> None:
        self.sent.append(msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=engine.EngineCoreRequest))

    async def get_supported_tasks(self) -> tuple[str]:
        return ("generate",)

    async def abort(self, names: list[str], internal: bool) -> None:
        assert internal
        self.output_processor.abort_requests(names, internal)

    def receive(self, name: str, tokens: list[int], reason: Any | None, version: str, logprob: float) -> Any:
        """An output of the engine for one request."""
        from vllm.v1.metrics.stats import IterationStats
        from vllm.v1.outputs import LogprobsLists

        shape = len(tokens), 1
        logprobs = LogprobsLists(
            np.array(tokens).reshape(shape), np.full(shape, logprob, np.float32), np.ones(len(tokens))
        )
        output = engine.EngineCoreOutput(name, tokens, logprobs, finish_reason=reason)
        return self.output_processor.process_outputs([output], 0.0, IterationStats(), weight_version=version)


def request(
    sampling: dict[str, Any], seeds: list[int | None], prompt: tuple[int, ...] = (1, 2, 3), **fields: Any
) -> Any:
    ids = np.array(prompt, "<i4").tobytes()
    return SampleRequest(
        [*range(len(seeds))], seeds, fields.pop("model", "m"), ids, msgspec.Raw(encode(sampling)), **fields
    )


async def start(client: FakeClient, sampling: dict[str, Any], seeds: list[int | None], **fields: Any) -> list[Any]:
    samples = [FakeSample(number) for number in range(len(seeds))]
    await client.generator.start(request(sampling, seeds, **fields), samples)
    return samples


async def test_completion_has_all_tokens_logprobs_and_versions():
    client = FakeClient()
    one, two = await start(client, {"max_tokens": 5}, [3, None], cache_salt="mine")
    client.receive(one.name, [7], None, "0.1", -0.5)
    client.receive(two.name, [9, 8], engine.FinishReason.STOP, "0.1", -0.125)
    client.receive(one.name, [6, 5], None, "0.1", -0.25)
    client.receive(one.name, [4], engine.FinishReason.LENGTH, "0.2", -2.0)
    assert np.frombuffer(one.output.token_ids, "<i4").tolist() == [7, 6, 5, 4]
    assert np.frombuffer(one.output.logprobs, "<f4").tolist() == [-0.5, -0.25, -0.25, -2.0]
    assert (one.output.versions, one.output.finish_reason) == ([("0.1", 0, 3), ("0.2", 3, 4)], "length")
    assert np.frombuffer(two.output.token_ids, "<i4").tolist() == [9, 8]
    assert (two.output.id, two.output.finish_reason) == (1, "stop")
    assert not client.output_processor.request_states and not client.output_processor.external_req_ids
    first, second = client.sent
    assert [each.sampling_params.seed for each in client.sent] == [3, None]
    assert first.request_id != second.request_id
    for each in client.sent:
        assert (each.prompt_token_ids, each.cache_salt) == ([1, 2, 3], "hash:mine")
        assert each.external_req_id == each.request_id
        assert each.sampling_params is not None and each.sampling_params.logprobs == 0
    assert client.admission == [2]


async def test_parameters_are_validated_once_and_every_prompt_is():
    client = FakeClient()
    for seed in (1, 2, -1):
        await start(client, {"max_tokens": 5, "top_k": 3}, [seed])
    await start(client, {"max_tokens": 6, "top_k": 3}, [None])
    assert client.processed == 2
    assert client.checked == [3] * 4
    parameters = [each.sampling_params for each in client.sent]
    assert [(each.seed, each.max_tokens, each.top_k) for each in parameters if each] == [
        (1, 5, 3), (2, 5, 3), (None, 5, 3), (None, 6, 3)
    ]  # fmt: skip
    with pytest.raises(exceptions.VLLMValidationError, match="prompt cannot be empty"):
        await start(client, {"max_tokens": 6, "top_k": 3}, [None], prompt=())
    for _ in range(2):  # long parameters take no memory after their request
        await start(client, {"max_tokens": 5, "stop_token_ids": list(range(5000))}, [None])
    assert client.processed == 4


async def test_omitted_max_tokens_is_the_rest_of_the_context():
    client = FakeClient()
    for length in (3, 60):
        await start(client, {"temperature": 0.0}, [None], prompt=(5,) * length)
    assert [each.sampling_params.max_tokens for each in client.sent] == [97, 40]
    assert client.processed == 1


async def test_logprobs_that_are_no_numbers_are_those_of_the_http_route():
    client = FakeClient()
    samples = await start(client, {}, [None, None])
    for sample, value in zip(samples, (float("nan"), float("-inf")), strict=True):
        client.receive(sample.name, [1], engine.FinishReason.STOP, "0.1", value)
        assert np.frombuffer(sample.output.logprobs, "<f4").tolist() == [-9999.0]


async def test_cancelled_sample_is_not_started_and_an_aborted_one_ends():
    client = FakeClient()
    samples: list[Any] = [FakeSample(0), FakeSample(1)]
    samples[0].is_cancelled = True
    await client.generator.start(request({}, [1, 2]), samples)
    [sent] = client.sent
    assert (samples[0].name, samples[1].name) == ("", sent.request_id)
    await client.generator.abort([samples[1].name])
    assert samples[1].output.finish_reason == "abort"
    assert not client.output_processor.request_states


async def test_death_of_the_engine_and_its_errors_are_sent_to_every_sample():
    client = FakeClient()
    one, two = await start(client, {}, [None, None])
    client.receive(one.name, [1], engine.FinishReason.ERROR, "0.1", -1.0)
    client.output_processor.propagate_error(engine_exceptions.EngineDeadError())
    assert client.generator.status_of(one.output) == (500, "Internal server error")
    assert client.generator.status_of(two.output)[0] == 500
    assert isinstance(two.output, engine_exceptions.EngineDeadError)


async def test_named_adapter_is_found_and_an_unknown_model_is_refused():
    client = FakeClient()
    [sample] = await start(client, {}, [None], model="named")
    assert client.sent[0].lora_request is not None and client.sent[0].lora_request.lora_name == "named"
    assert client.output_processor.request_states[sample.name].lora_name == "named"
    with pytest.raises(Exception, match="The model `other` does not exist") as caught:
        await start(client, {}, [None], model="other")
    assert client.generator.status_of(caught.value)[0] == 404


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": -1.0},
        {"temperature": "hot"},
        {"max_tokens": 0},
        {"n": 2},
        {"prompt_logprobs": 0},
        {"stop": [""]},
    ],
)
async def test_invalid_sampling_parameters_are_refused(sampling):
    client = FakeClient()
    with pytest.raises(Exception, match=f"{next(iter(sampling))}") as caught:
        await start(client, sampling, [None])
    assert client.generator.status_of(caught.value)[0] == 400
    assert not client.sent and not client.output_processor.request_states


@pytest.mark.parametrize("tracked", [True, False])
def test_load_counts_samples_if_vllm_tracks_it(tracked):
    client = FakeClient()
    client.state.enable_server_load_tracking = tracked
    client.generator.add_load(3)
    client.generator.add_load(-1)
    assert client.state.server_load_metrics == (2 if tracked else 0)


async def test_prompt_that_is_no_array_or_above_the_model_length_is_refused():
    client = FakeClient()
    broken = msgspec.structs.replace(request({}, [None]), token_ids=b"12345")
    with pytest.raises(ValueError, match="buffer size") as caught:
        await client.generator.start(broken, [FakeSample(0)])
    assert client.generator.status_of(caught.value)[0] == 400
    with pytest.raises(exceptions.VLLMValidationError, match=r"length 1000\) is longer"):
        await start(client, {"max_tokens": 5}, [None], prompt=(1,) * 1000)
    assert not client.checked, "its tokens are not decoded"
