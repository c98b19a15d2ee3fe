"""A client of a served policy: messages in, texts out."""

from collections.abc import Mapping, Sequence
from typing import Any

from prime_rl.configs.client import server_root
from prime_rl.core.api_key import API_KEY_VAR, read_api_key
from prime_rl.core.http_requests import request_json

Messages = str | Sequence[Mapping[str, Any]]
"""A conversation in the form of chat templates, or the text of a single message of the user."""


class PolicyClient:
    """Samples completions from an `inference` server, or from any server with an OpenAI-compatible API.

    Args:
        url: the server, with or without `/v1`.
        model: name of the served model; None asks the server.
        api_key_var: environment variable with the server's API key; no key is sent if it is unset.
        timeout_seconds: of one request.
    """

    def __init__(
        self, url: str, model: str | None = None, api_key_var: str = API_KEY_VAR, timeout_seconds: float = 1200
    ) -> None:
        self.base_url = f"{server_root(url)}/v1"
        self._model, self._key_var, self._timeout = model, api_key_var, timeout_seconds

    def generate(self, messages: Messages, num_samples: int = 1, **sampling: Any) -> list[str]:
        """Sample `num_samples` completions of a conversation.

        Args:
            messages: the conversation.
            num_samples: number of independent completions.
            sampling: fields of the request: `max_tokens`, `temperature`, `top_p`, ...

        Raises:
            RunError: the server cannot be reached or refuses the request.
        """
        conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        body = {"model": self.model, "messages": conversation, "n": num_samples, **sampling}
        choices = self._request("/chat/completions", body)["choices"]
        return [choice["message"]["content"] or "" for choice in choices]

    @property
    def model(self) -> str:
        """Name of the served model."""
        if self._model is None:
            self._model = str(self._request("/models", None)["data"][0]["id"])
        return self._model

    def _request(self, route: str, body: Mapping[str, Any] | None) -> Any:
        method, key = "GET" if body is None else "POST", read_api_key(self._key_var)
        return request_json(method, self.base_url + route, self._timeout, key, body)
