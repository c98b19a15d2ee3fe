"""`client`: the connection of the orchestrator and of evaluations to inference servers."""

from collections.abc import Iterator
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field

from prime_rl.configs.lists import UrlList
from prime_rl.configs.loading.base_config import BaseConfig, common
from prime_rl.core.api_key import API_KEY_VAR
from prime_rl.core.ports import join_host_port

DEFAULT_PORT = 8000
SERVER_ADDRESS_VAR = "INFERENCE_SERVER_IP"
"""Environment variable with the address on which the server listens and to which its clients connect."""
Api = Literal["generate", "chat"]


def server_root(url: str) -> str:
    """Return the root URL of a server, without a trailing `/` or `/v1`."""
    return url.rstrip("/").removesuffix("/v1")


class ClientConfig(BaseConfig):
    """The connection to the inference server."""

    deprecated: ClassVar[dict[str, str]] = {"timeout": "timeout_seconds", "probe_timeout": "probe_timeout_seconds"}

    host: str = "127.0.0.1"
    """Host name or address of the server; unused with base_url."""

    port: int = Field(DEFAULT_PORT, ge=1, le=65535)
    """Port of the server; unused with base_url."""

    base_url: UrlList | None = Field(None, json_schema_extra=common("Inference"))
    """URLs such as http://localhost:8000/v1, separated by commas; None uses host and port."""

    api_key_var: str = API_KEY_VAR
    """Environment variable with the server's API key; no key is sent if it is unset."""

    timeout_seconds: float = Field(1200, gt=0)
    """Timeout of one request."""

    probe_timeout_seconds: float = Field(30, gt=0)
    """Timeout for a server to report its policy version. After it the server is removed, and its rollouts are restarted
    on other servers."""

    reconnect_seconds: float = Field(4, gt=0)
    """Time without any reachable server after which the run fails. `rl` with max_restarts, which restarts its server,
    uses wait_timeout_seconds."""

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Report `host` and `port` next to `base_url`."""
        if self.base_url is not None:
            yield from ((key, "has no effect if client.base_url is set") for key in ("host", "port"))

    @property
    def urls(self) -> list[str]:
        """Root URLs of the servers, without a trailing `/` or `/v1`."""
        given = self.base_url or [f"http://{join_host_port(self.host, self.port)}"]
        return [server_root(url) for url in given]


class AnyServerConfig(ClientConfig):
    """The server of the model: `inference`, or any server with an OpenAI-compatible API."""

    api: Literal["auto", "generate", "chat"] = "auto"
    """generate requests tokens from `inference`, chat requests messages from any OpenAI-compatible server; auto chooses
    generate if the server has the route /policy."""

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Report `reconnect_seconds`, which only the orchestrator uses."""
        yield from super().without_effect()
        yield "reconnect_seconds", "has no effect here; client.timeout_seconds limits each request"

    def chat_url(self, index: int) -> str:
        """Return the base URL of a server's OpenAI routes; `/v1` is added to a URL without a path."""
        if self.base_url is None:
            return f"{self.urls[index]}/v1"
        given = self.base_url[index].rstrip("/")
        return given if urlsplit(given).path else f"{given}/v1"
