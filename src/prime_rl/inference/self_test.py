"""The first request of a server, before it reports that it is ready.

Some models load and then crash the engine in their first forward pass; the self-test turns that into one error at the
start. The log-probabilities of the base model are kept for a comparison with the trainer's (`GET /base_canary`).
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence

from prime_rl.core.errors import RunError, summarize_exception
from prime_rl.storage.weights.canary import PolicyCanary, canary_tokens


async def run_self_test(
    ask: Callable[[tuple[int, ...]], Awaitable[list[list[float]]]],
    vocabulary: int,
    dtype: str,
    model: str,
    timeout_s: float,
    places: Sequence[str] = (),
) -> PolicyCanary:
    """Compute log-probabilities of the canary's tokens on each copy of the model, by `ask`: [T - 1] on each.

    `vocabulary` is its size, `dtype` the engine's precision; `model` and `places` name the model and its copies in
    messages. Returns the log-probabilities of the first copy. Raises RunError if an engine died or did not answer, a
    log-probability is not finite, or copies disagree.
    """
    tokens = tuple(canary_tokens(vocabulary).tolist())
    request = f"self-test of the engine ({len(tokens)} tokens to {model})"
    try:
        async with asyncio.timeout(timeout_s):
            answers = await ask(tokens)
    except Exception as error:
        if isinstance(error, TimeoutError):
            raise RunError(f"{request}: no answer within {timeout_s:.0f} s (engine_timeout_seconds)") from None
        raise RunError(
            f"{request} failed: vLLM loaded the model, but cannot run it with these settings; the engine's "
            f"error is above ({summarize_exception(error)})"
        ) from error
    canary = PolicyCanary(tokens, tuple(answers[0]), dtype)
    for rank, answer in enumerate(answers):
        place = f" ({places[rank]})" if len(answers) > 1 else ""
        if not all(map(math.isfinite, answer)):
            raise RunError(
                f"{request} gave log-probabilities that are not finite in {dtype}{place}; try model.dtype = bfloat16 "
                "or float32, and check the model's files"
            )
        if not (compared := canary.compare(answer, dtype)).passes:
            raise RunError(
                f"{request} gave another result on a copy of the model{place}: the {compared.which} difference between "
                f"log-probabilities is {compared.difference:.3g}"
            )
    return canary
