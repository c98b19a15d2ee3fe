"""Samples the requests of token streams by vLLM's engine, without the layers that an HTTP request needs.

Differs from `/inference/v1/generate` in the cost only:

- Sampling parameters are validated by vLLM once, and then by their encoded form.
- The samples of a prompt share its validation. Each is a request of its own, with its own seed, adapter and salt.
- vLLM's output processor gets a `TokenState` per sample. It decodes text only to find stop strings, keeps
  log-probabilities as an array, and returns a completion that can be sent.
"""

import copy
import itertools
import time
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from pydantic import TypeAdapter
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
from vllm.exceptions import GenerationError, VLLMNotFoundError, VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.output_processor import RequestState

from prime_rl.core.types import Routes
from prime_rl.rollouts.clients.generation_messages import Completion, SampleRequest

if TYPE_CHECKING:
    from starlette.datastructures import State
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    from prime_rl.inference.generation_stream import StreamedSample

_OTHER_ANSWERS = {
    "n", "prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids",
    "routed_experts_prompt_start", "trace_decode_token_ids",
}  # fmt: skip
"""Sampling parameters whose results a completion cannot contain."""
_MAX_KNOWN_PARAMETERS = 1024
_MAX_KNOWN_BYTES = 4096
"""Longer parameters are validated again for each request, so that they take no memory after it."""
_LEAST_LOGPROB = -9999.0
"""vLLM's HTTP routes return it for smaller ones and for NaN."""

_validate = TypeAdapter(SamplingParams).validate_python


class _SampledLogprobs:
    """Collects the log-probabilities of the sampled tokens, for `RequestState.logprobs_processor`."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values = array("f")

    def update_from_output(self, output: EngineCoreOutput) -> None:
        if output.new_logprobs is not None:
            self.values.extend(output.new_logprobs.logprobs[:, 0].tolist())


class TokenState(RequestState):
    """vLLM's state of one sample; `queue` is the `StreamedSample`."""

    def make_request_output(
        self, new_token_ids: list[int], pooling_output: Any, finish_reason: FinishReason | None, *_: Any, **__: Any
    ) -> Completion | Exception | None:
        """Return the completion at the end of the sample, and nothing before."""
        if finish_reason is None:
            return None
        if finish_reason == FinishReason.ERROR:
            return GenerationError()
        token_ids = np.array(self.detokenizer.output_token_ids, "<i4")
        logprobs = np.fmax(np.array(self.logprobs_processor.values, "<f4"), np.float32(_LEAST_LOGPROB))
        spans = [(span.version, span.start, span.end) for span in self._weight_version_spans() or ()]
        chunks = self.routed_experts_chunks
        routes = Routes.of(np.concatenate(chunks)) if chunks else None
        return Completion(self.queue.id, token_ids.tobytes(), logprobs.tobytes(), spans, str(finish_reason), routes)


class TokenGenerator:
    """See `generation_stream.Generator`."""

    def __init__(
        self, client: "AsyncLLM", state: "State", prepare: Callable[[EngineCoreRequest], None], send: Any
    ) -> None:
        """Use vLLM's engine client.

        Args:
            client: vLLM's.
            state: of vLLM's application, with its handler of `/inference/v1/generate` and the load.
            prepare: sets adapter and salt of a request (`request_layer.prepare_requests`).
            send: the client's coroutine function that sends a prepared request to the engine.
        """
        self._client = client
        self._serving: ServingTokens = state.serving_tokens
        self._state = state
        self._prepare = prepare
        self._send = send
        self._outputs = client.output_processor
        self._numbers = itertools.count()
        self._known_parameters: dict[bytes, tuple[SamplingParams, bool]] = {}

    async def start(self, request: SampleRequest, samples: "Sequence[StreamedSample]") -> None:
        """Start the samples of a request that are not cancelled.

        Raises the exceptions of the HTTP route; `status_of` converts them.
        """
        adapter = self._find_adapter(request.model)
        self._serving._preflight(len(samples))
        self._client.input_processor._validate_prompt_len(len(request.token_ids) // 4, "decoder")
        token_ids: list[int] = np.frombuffer(request.token_ids, "<i4").tolist()
        parameters = await self._find_parameters(request, token_ids, adapter)
        template = EngineCoreRequest(
            request_id="",
            prompt_token_ids=token_ids,
            mm_features=None,
            sampling_params=parameters,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=adapter,
            cache_salt=request.cache_salt,
            data_parallel_rank=None,
        )
        if request.routes_start > 0:
            template.sampling_params = copy.copy(parameters)
            template.sampling_params.routed_experts_prompt_start = min(request.routes_start, len(token_ids))
        for sample, seed in zip(samples, request.seeds, strict=True):
            if not sample.is_cancelled:
                await self._start_one(template, adapter, sample, seed)

    def add_load(self, samples: int) -> None:
        """Add to the requests in progress that `/load` reports, if vLLM counts them."""
        if self._state.enable_server_load_tracking:
            self._state.server_load_metrics += samples

    async def abort(self, names: Sequence[str]) -> None:
        """Abort the unfinished samples with these names in the engine."""
        await self._client.abort(names, internal=True)

    def status_of(self, error: Exception) -> tuple[int, str]:
        """Return the HTTP status and the message of an error, as the HTTP route does."""
        answer = create_error_response(error).error
        return answer.code, answer.message

    def _name(self) -> str:
        return f"generate-stream-{next(self._numbers)}"

    def _find_adapter(self, model: str) -> "LoRARequest | None":
        models = self._serving.models
        if (adapter := models.lora_requests.get(model)) is not None or self._serving._is_model_supported(model):
            return adapter
        names = ", ".join(served.name for served in models.base_model_paths)
        raise VLLMNotFoundError(f"The model `{model}` does not exist. Valid aliases: {names}.")

    async def _find_parameters(
        self, request: SampleRequest, token_ids: list[int], adapter: "LoRARequest | None"
    ) -> SamplingParams:
        """Validate the prompt and the sampling parameters, and complete these as vLLM does."""
        key, processor = bytes(request.sampling), self._client.input_processor
        prompt = tokens_input(token_ids)
        if (known := self._known_parameters.get(key)) is not None:
            processor._validate_model_inputs(None, prompt)
        else:
            given = msgspec.msgpack.decode(key, type=dict[str, Any])
            if others := given.keys() & _OTHER_ANSWERS:
                raise VLLMValidationError(f"{min(others)} needs the route /inference/v1/generate")
            parameters = _validate({**given, "logprobs": 0})
            parameters.output_kind = RequestOutputKind.FINAL_ONLY
            tasks = await self._client.get_supported_tasks()
            made = processor.process_inputs(self._name(), prompt, parameters, tasks, lora_request=adapter)
            known = made.sampling_params, "max_tokens" not in given
            if len(key) <= _MAX_KNOWN_BYTES:
                if len(self._known_parameters) >= _MAX_KNOWN_PARAMETERS:
                    self._known_parameters.clear()
                self._known_parameters[key] = known
        parameters, is_open_ended = known
        if is_open_ended:
            parameters = copy.copy(parameters)
            serving = self._serving
            parameters.max_tokens = get_max_tokens(
                max_model_len=self._client.model_config.max_model_len,
                max_tokens=None,
                input_length=len(token_ids),
                default_sampling_params=serving.default_sampling_params,
                override_max_tokens=serving.override_max_tokens,
            )
        return parameters

    async def _start_one(
        self, template: EngineCoreRequest, adapter: "LoRARequest | None", sample: "StreamedSample", seed: int | None
    ) -> None:
        request = copy.copy(template)
        request.request_id = request.external_req_id = sample.name = self._name()
        if seed is not None and seed != -1:  # vLLM's spelling of an unseeded request
            request.sampling_params = copy.copy(template.sampling_params)
            request.sampling_params.seed = seed
        self._prepare(request)
        self._register(request, adapter, sample)
        await self._send(request)

    def _register(self, request: EngineCoreRequest, adapter: "LoRARequest | None", sample: "StreamedSample") -> None:
        """Add the sample to vLLM's output processor, as its own `add_request` does."""
        parameters, outputs = request.sampling_params, self._outputs
        tokenizer = outputs.tokenizer if parameters.stop else None
        outputs.request_states[request.request_id] = TokenState(
            request_id=request.request_id,
            external_req_id=request.request_id,
            parent_req=None,
            request_index=0,
            lora_request=adapter,
            output_kind=RequestOutputKind.FINAL_ONLY,
            prompt=None,
            prompt_token_ids=request.prompt_token_ids,
            prompt_embeds=None,
            logprobs_processor=_SampledLogprobs(),
            detokenizer=IncrementalDetokenizer.from_new_request(tokenizer, request),
            max_tokens_param=parameters.max_tokens,
            arrival_time=request.arrival_time,
            queue=sample,
            log_stats=outputs.log_stats,
            stream_interval=1,
            top_p=parameters.top_p,
            n=1,
            temperature=parameters.temperature,
        )
        outputs.external_req_ids[request.request_id].append(request.request_id)
        outputs._update_admission_stats()
