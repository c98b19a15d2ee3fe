"""The default runtime of v1 agents: a sandbox of the worker, in the worker or in an interpreter of its own."""

import base64
import builtins
import posixpath
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, ClassVar, Literal, Protocol, cast
from urllib.parse import urlsplit

from pydantic import BaseModel
from verifiers.v1 import runtimes
from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes import BaseRuntimeInfo, ProgramResult, Runtime

from .values import BoxError, Refused, Request, RequestFailed

_AGENT_SECONDS = 7 * 24 * 3600.0


class Box(Protocol):
    """The sandbox of one agent: an empty working directory, programs of this machine, no network but given ports.

    Its methods raise BoxError if it has ended or failed, and OSError for files.
    """

    async def run(self, argv: list[str], env: dict[str, str], timeout_seconds: float | None) -> tuple[int, str, str]:
        """Run a program; return its exit code, stdout and stderr."""
        ...

    async def read(self, path: str) -> bytes:
        """Return a file."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Write a file."""
        ...

    async def forward(self, ports: Collection[int]) -> None:
        """Let its programs connect to these TCP ports of 127.0.0.1 on this machine."""
        ...

    async def close(self) -> None:
        """End it, with all its programs."""
        ...


class SandboxRuntimeConfig(BaseModel):
    """Selects `SandboxRuntime`. Of `workdir` verifiers sets what a task asks for."""

    type: Literal["sandbox"] = "sandbox"
    workdir: str = "/tmp"


class SandboxRuntimeInfo(SandboxRuntimeConfig, BaseRuntimeInfo):
    """The runtime in a trace."""


class SandboxRuntime(Runtime):
    """The default runtime of agents, a `Box` per rollout. It starts with the first command or file."""

    open_box: ClassVar[Callable[[], Box]]

    def __init__(self, config: SandboxRuntimeConfig, name: str | None = None) -> None:
        super().__init__(name)
        if getattr(config, "image", None) is not None:  # verifiers sets what a task asks for
            raise SandboxError("the task needs a container image; name one in args.env.<agent>.runtime.type")
        self.config = config
        self.info = SandboxRuntimeInfo(**config.model_dump())
        # Views with another environment share this dictionary, and so the box.
        self._box: dict[str, Box] = {}

    async def start(self) -> None:
        """Do nothing."""

    async def run(self, argv: list[str], env: dict[str, str], timeout_seconds: float | None = None) -> ProgramResult:
        """Run a program in the box; called by verifiers. Raises SandboxError."""
        with self._opened() as box:
            return ProgramResult(*await box.run(self._in_workdir(argv), self.process_env(env), timeout_seconds))

    async def run_agent(self, argv: list[str], env: dict[str, str], urls: Collection[str]) -> ProgramResult:
        """Run a program that may use these addresses of this machine, without a limit of its time. Raises SandboxError.

        The limits of the rollout end it.
        """
        with self._opened() as box:
            await box.forward([port for url in urls if (port := urlsplit(url).port) is not None])
            return ProgramResult(*await box.run(self._in_workdir(argv), self.process_env(env), _AGENT_SECONDS))

    async def prepare_uv_script(
        self, script: str | bytes, env: dict[str, str] | None = None, *, activate: bool = True
    ) -> list[str]:
        """Raise SandboxError: the box has no network to install the packages of a script."""
        raise SandboxError(
            "the sandbox has no network, so it cannot install the packages of a script; name a container or cloud in "
            "args.env.<agent>.runtime.type"
        )

    async def _read(self, path: str) -> bytes:
        """Return a file of the box. Raises OSError or SandboxError."""
        with self._opened() as box:
            return await box.read(posixpath.join(self.config.workdir, path))

    async def write(self, path: str, data: bytes) -> None:
        """Write a file in the box; called by verifiers. Raises OSError or SandboxError."""
        with self._opened() as box:
            await box.write(posixpath.join(self.config.workdir, path), data)

    async def teardown(self) -> None:
        """End the box and all programs in it; called by verifiers."""
        if (box := self._box.pop("box", None)) is not None:
            await box.close()

    def _in_workdir(self, argv: list[str]) -> list[str]:
        if self.config.workdir == SandboxRuntimeConfig.model_fields["workdir"].default:
            return list(argv)
        return ["sh", "-c", 'mkdir -p "$1" && cd "$1" && shift && exec "$@"', "sh", self.config.workdir, *argv]

    @contextmanager
    def _opened(self) -> Iterator[Box]:
        if "box" not in self._box:
            self._box["box"] = SandboxRuntime.open_box()
        try:
            yield self._box["box"]
        except BoxError as error:
            raise SandboxError(str(error)) from None


def add_sandbox(open_box: Callable[[], Box]) -> None:
    """Let verifiers construct a `SandboxRuntime` with this sandbox for a `SandboxRuntimeConfig`.

    Verifiers has a closed list of runtimes. This replaces the function that selects their class, and checks the result,
    so that a release without this function never runs a shell on the host.

    Raises:
        Refused: the installed verifiers selects runtimes in another way.
    """
    SandboxRuntime.open_box = staticmethod(open_box)
    select = getattr(runtimes, "_runtime_cls", None)
    if select is not None and not hasattr(select, "has_sandbox"):

        def select_added(config: object) -> type[Runtime]:
            is_ours = isinstance(config, SandboxRuntimeConfig)
            return SandboxRuntime if is_ours else cast(type[Runtime], select(config))

        select_added.has_sandbox = True  # type: ignore[attr-defined]
        runtimes._runtime_cls = select_added
    if not isinstance(runtimes.make_runtime(SandboxRuntimeConfig()), SandboxRuntime):
        raise Refused(
            f"verifiers {version('verifiers')} selects runtimes in another way than expected, so its agents would not "
            "run in the sandbox; use another release"
        )


class RemoteBox:
    """A `Box` of the worker."""

    def __init__(self, request: Request, number: int) -> None:
        """Let `request` ask the worker for the box with this number."""
        self._request, self._number = request, number

    async def run(self, argv: list[str], env: dict[str, str], timeout_seconds: float | None) -> tuple[int, str, str]:
        """See `Box`."""
        code, stdout, stderr = await self._call("run", argv=argv, env=env, timeout_seconds=timeout_seconds)
        return code, stdout, stderr

    async def read(self, path: str) -> bytes:
        """See `Box`."""
        return base64.b64decode(await self._call("read", path=path))

    async def write(self, path: str, data: bytes) -> None:
        """See `Box`."""
        await self._call("write", path=path, data=base64.b64encode(data).decode())

    async def forward(self, ports: Collection[int]) -> None:
        """See `Box`."""
        await self._call("forward", ports=list(ports))

    async def close(self) -> None:
        """See `Box`."""
        await self._call("close")

    async def _call(self, op: str, **arguments: Any) -> Any:
        try:
            return await self._request("box", box=self._number, op=op, arguments=arguments)
        except RequestFailed as error:
            name, message = error.args
            kind = getattr(builtins, name, BoxError)
            raise (kind if issubclass(kind, OSError) else BoxError)(message) from None
