"""I5: what is done to every request on its way to the engine, whatever route it came by.

It is given the salt of what it will be sampled from (`salt`), and where adapters are served the number of its adapter:
the policy's own, unless its `model` is the name of another.
"""

from typing import TYPE_CHECKING, Any

from prime_rl.inference.adapters import POLICY_ADAPTER
from prime_rl.inference.named_adapters import Named
from prime_rl.inference.pins import unpin_request
from prime_rl.inference.policy import PolicyServer
from prime_rl.inference.salt import CANARY, mix
from prime_rl.inference.version_header import answered_by

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM


class NamesInVllm:
    """`named_adapters.Registry` over vLLM's own list of adapters, in which it looks for a request's `model`.

    Args:
        adapters: vLLM's `lora_requests`, by name.
    """

    def __init__(self, adapters: "dict[str, LoRARequest]") -> None:
        from prime_rl.inference import patches

        self._adapters = adapters
        self._named: dict[int, Named] = {}  # also of past ones: their last answers may still be under way
        self._served = set[int]()
        patches.tag_named_adapters(self._tag)

    def give(self, named: Named) -> None:
        """Let requests find it."""
        self._named[named.number] = named
        self._served.add(named.number)
        self._adapters[named.name] = lora_request(named.number, named.name)

    def take(self, named: Named) -> None:
        """Let no further request find it."""
        self._served.discard(named.number)
        del self._adapters[named.name]

    def find(self, request: "LoRARequest") -> Named:
        """Find the adapter that a request asked for.

        Raises:
            ValueError: it was unloaded since the request came.
        """
        if request.lora_int_id not in self._served:
            raise ValueError(f"adapter {request.lora_name!r} was unloaded")
        return self._named[request.lora_int_id]

    def _tag(self, number: int) -> str | None:
        named = self._named.get(number)
        return str(named.policy.version) if named is not None else None


def lora_request(number: int, name: str | None = None) -> "LoRARequest":
    """Make vLLM's reference to an adapter. No path: `slots` gives it what was verified."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name or f"adapter {number}", number, "in memory")


def prepare_requests(client: "AsyncLLM", policies: PolicyServer, names: NamesInVllm | None) -> None:
    """Let every request be salted, and adapted, as it is handed to the engine.

    All of them, each child of n > 1 too, pass `add_request_async` last. A switch may still overtake the request on
    its way to prefill; `scheduler` says why the salt is right nevertheless.

    Args:
        client: vLLM's.
        policies: tells the policy.
        names: of the adapters beside the policy; None where none are served.
    """
    core: Any = client.engine_core
    add_request = core.add_request_async

    async def add_prepared(request: "EngineCoreRequest") -> None:
        salt = policies.policy.salt
        if names is not None and request.lora_request is not None:
            if not request.request_id.startswith(CANARY):
                named = names.find(request.lora_request)
                salt = named.policy.salt
                answered_by(named.policy.version)
                unpin_request()
        elif names is not None:
            request.lora_request = lora_request(POLICY_ADAPTER)
        request.cache_salt = mix(salt, request.cache_salt)
        await add_request(request)

    core.add_request_async = add_prepared
