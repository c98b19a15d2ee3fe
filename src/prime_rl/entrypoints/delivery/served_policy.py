"""The policy that a run's own server samples from, and streamed replies of any server; imports no torch."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.core.api_key import API_KEY_VAR, read_api_key
from prime_rl.core.errors import RunError
from prime_rl.core.http_requests import request_json, send_request
from prime_rl.rollouts.clients.inference_client import sampling_parameters
from prime_rl.storage.artifact import WEIGHTS_FORMAT, ArtifactError, read_manifest
from prime_rl.storage.paths import RUN_FOLDER, RunPaths

_REQUEST_SECONDS = 1200.0
_PROBE_SECONDS = 5.0


class ServedPolicy:
    """What a run says about its server, and requests to that server or to another one with the same key.

    Attributes:
        settings: of the run's orchestrator; None for a run without one.
        sampling: fields of the requests.
    """

    def __init__(self, paths: RunPaths, sampling: Mapping[str, Any] = {}) -> None:
        """Read the run's settings. `sampling` overrides them. Raises ConfigError if they are invalid."""
        self._paths = paths
        file = paths.config("orchestrator")
        self.settings = OrchestratorConfig.load(["@", str(file)]) if file.is_file() else None
        self.sampling = {**(sampling_parameters(self.settings.sampling) if self.settings else {}), **sampling}
        self.key_var = self.settings.client.api_key_var if self.settings else API_KEY_VAR

    @cached_property
    def url(self) -> str:
        """The run's first server."""
        assert self.settings is not None
        return self.settings.client.urls[0]

    def step(self, wanted: int | None = None) -> int | None:
        """Return the version that the run's server samples from; None if it is not the wanted one, or unknown.

        Its hash must be that of the run's published version: another run may use the address by now.
        """
        if self.settings is None or RUN_FOLDER.fullmatch(self._paths.root.name):  # such runs share a server
            return None
        if self.settings.rendering.chat_template is not None:  # the server has the model's own
            return None
        with suppress(ConnectionError, ArtifactError, OSError, ValueError, KeyError, TypeError):
            found = send_request("GET", f"{self.url}/policy", _PROBE_SECONDS, headers=self._headers()).json()
            published = read_manifest(self._paths.weights(int(found["step"])), WEIGHTS_FORMAT)
            if published["hash"] == found["hash"] and wanted in (None, found["step"]):
                return int(found["step"])
        return None

    def request(self, method: str, url: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request with the key and return its answer. Raises RunError."""
        return request_json(method, url, _REQUEST_SECONDS, read_api_key(self.key_var), body)

    def reply(self, url: str, messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Yield the parts of a reply of the server at `url`, as they are sampled: untrusted text. Raises RunError."""
        import httpx

        model = self.request("GET", f"{url}/v1/models")["data"][0]["id"]
        body = {"model": model, "messages": list(messages), "stream": True, **self.sampling}
        if self.settings is not None and (arguments := self.settings.rendering.chat_template_args):
            body["chat_template_kwargs"] = arguments
        try:
            with (
                httpx.Client(trust_env=False, timeout=_REQUEST_SECONDS) as client,
                client.stream("POST", f"{url}/v1/chat/completions", json=body, headers=self._headers()) as response,
            ):
                if not response.is_success:
                    raise RunError(f"{url} answered {response.status_code}: {_line(response.read().decode())}")
                for line in _lines(response.iter_bytes()):
                    if line.startswith(b"data: {"):
                        part = json.loads(line.removeprefix(b"data: "))
                        if "error" in part:
                            raise RunError(f"{url} failed: {_line(json.dumps(part['error']))}")
                        yield from (choice["delta"].get("content") or "" for choice in part["choices"])
        except httpx.HTTPError as error:
            raise RunError(f"{url} cannot be reached: {_line(str(error))}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(f"{url} sent a malformed event: {_line(str(error))}") from None

    def _headers(self) -> dict[str, str]:
        key = read_api_key(self.key_var)
        return {"Authorization": f"Bearer {key}"} if key else {}


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Split at newlines alone: httpx also does at characters of the reply such as U+2028."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    yield rest


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
