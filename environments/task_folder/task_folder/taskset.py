"""Tasks in the layout of Harbor and Terminal-Bench 2: task.toml, instruction.md, environment/, tests/test.sh.

The tests run after the agent has ended, in another box, with a copy of the agent's working directory: nothing that the
agent has started or changed elsewhere can reach them.
"""

import contextlib
import hashlib
import inspect
import io
import json
import secrets
import tarfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.runtimes import Runtime, make_runtime

_MAX_WORK_BYTES = 128 * 2**20
_DEFAULT_TESTS_SECONDS = 600.0
_MAX_REWARD = 1e300
_REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
_OF_IMAGES = {"Dockerfile", "docker-compose.yaml", "docker-compose.yml", ".dockerignore"}


class FolderData(vf.TaskData):
    """A task.

    Attributes:
        folder: absolute path.
        files_hash: of all its files: a resumed run notices that they have changed.
        tests_seconds: time limit of the tests.
        agent_env: variables of the agent's programs.
        tests_env: variables of the tests.
    """

    folder: str
    files_hash: str
    tests_seconds: float
    agent_env: dict[str, str]
    tests_env: dict[str, str]


class FolderTask(vf.Task[FolderData, vf.State, vf.TaskConfig]):
    """One task; its reward is what its tests write."""

    NEEDS_CONTAINER = True

    def runtime_env(self) -> dict[str, str]:
        """Return the variables of the agent's programs; called by verifiers."""
        return dict(self.data.agent_env)

    async def setup(self, trace: vf.Trace, runtime: Runtime) -> None:
        """Copy the files of environment/ to the working directory; called by verifiers."""
        folder = Path(self.data.folder, "environment")
        await _unpack(runtime, _pack(folder, _OF_IMAGES) if folder.is_dir() else _pack(None), ".")

    @vf.reward
    async def tests(self, trace: vf.Trace, runtime: Runtime) -> float:
        """Run the tests on the agent's files; called by verifiers. Tests that write no reward give 0."""
        archive = f"/tmp/{secrets.token_hex(8)}.tar"  # a name that the agent has not taken
        packed = await runtime.run(["tar", "-cf", archive, "."], {})
        size = await runtime.run(["stat", "-c", "%s", archive], {})
        is_large = size.stdout.strip().isdigit() and int(size.stdout) > _MAX_WORK_BYTES
        trace.record_metric("files_too_large", float(is_large))
        trace.record_metric("files_incomplete", float(packed.exit_code != 0))  # unreadable, or no space for a copy
        if is_large or size.exit_code:
            return 0.0
        work = await runtime.read(archive)
        box = make_runtime(runtime.config)
        try:
            await box.start()
            expected = (RuntimeError,) if packed.exit_code else ()
            with contextlib.suppress(*expected):  # the tests see what there is
                await _unpack(box, work, ".")
            await box.run(["rm", "-rf", "/logs/verifier"], {})
            await box.run(["mkdir", "-p", "/logs/verifier", "/tests"], {})
            await _unpack(box, _pack(Path(self.data.folder, "tests")), "/tests")
            # Only the sandbox of prime-rl has a limit for each command.
            has_limit = "timeout_seconds" in inspect.signature(box.run).parameters
            limit = {"timeout_seconds": self.data.tests_seconds} if has_limit else {}
            done = await box.run(["bash", "/tests/test.sh"], self.data.tests_env, **limit)
            trace.record_metric("tests_exit_code", float(done.exit_code))
            values = await _read_rewards(box)
        finally:
            await box.stop()
        reward = values.pop("reward", None)
        trace.record_metrics(values)
        trace.record_metric("no_reward_file", float(reward is None))
        return reward or 0.0


class FolderConfig(vf.TasksetConfig):
    """Arguments of the taskset.

    Attributes:
        path: folder with the tasks, at any depth, or one task.
        tasks: folders to use, as paths in `path`; None uses all.
        ignore_dockerfile: use tasks with a Dockerfile as if they had none, and so without what it installs.
    """

    path: str = ""
    tasks: list[str] | None = None
    ignore_dockerfile: bool = False


class FolderTaskset(vf.Taskset[FolderTask, FolderConfig]):
    """All tasks in a folder, by name."""

    def load(self) -> Iterator[FolderTask]:
        """Yield the tasks; called by verifiers.

        Raises:
            ValueError: there is none, or one is malformed or needs what is not supported.
        """
        if not self.config.path:
            raise ValueError("args.path is missing: the folder with the tasks")
        root = Path(self.config.path).expanduser().resolve()
        every = {file.parent for file in root.rglob("task.toml")}
        folders = sorted(folder for folder in every if every.isdisjoint(folder.parents))  # not those inside a task
        found = {folder.name if folder == root else str(folder.relative_to(root)): folder for folder in folders}
        wanted = sorted(found) if self.config.tasks is None else self.config.tasks
        if not found or not set(wanted) <= found.keys():
            missing = f"there is no task {min(set(wanted) - found.keys())!r}" if found else "there is no task.toml"
            raise ValueError(f"args.path = {self.config.path!r}: {missing} in this folder")
        for index, name in enumerate(wanted):
            try:
                data = _read_task(found[name], name, index, self.config.ignore_dockerfile)
            except (OSError, ValueError, TypeError, AttributeError) as error:
                raise ValueError(f"task {found[name]}: {error}") from error
            yield FolderTask(data, self.config.task)


def _read_task(folder: Path, name: str, index: int, ignore_dockerfile: bool) -> FolderData:
    settings = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    if settings.get("steps"):
        raise ValueError("tasks of several steps are not supported")
    if not (folder / "tests" / "test.sh").is_file():
        raise ValueError("it has no tests/test.sh")
    if b"\r\n" in (folder / "tests" / "test.sh").read_bytes():
        raise ValueError(
            "its tests/test.sh has line ends of Windows, which bash does not read; convert it with dos2unix"
        )
    environment, verifier = settings.get("environment", {}), settings.get("verifier", {})
    image = environment.get("docker_image")
    dockerfiles = sorted(name for name in _OF_IMAGES if (folder / "environment" / name).is_file() and "cker" in name)
    if image is None and dockerfiles and not ignore_dockerfile:
        raise ValueError(
            f"its {dockerfiles[0]} is not built; set docker_image in task.toml, or args.ignore_dockerfile = true if "
            "the sandbox has what the task needs"
        )
    return FolderData(
        idx=index,
        name=name,
        prompt=(folder / "instruction.md").read_text(encoding="utf-8").strip(),
        image=image,
        workdir=environment.get("workdir") or "/app",
        folder=str(folder),
        files_hash=hashlib.sha256(_pack(folder)).hexdigest()[:16],
        tests_seconds=float(verifier.get("timeout_sec", _DEFAULT_TESTS_SECONDS)),
        agent_env=_variables(environment.get("env", {})),
        tests_env=_variables(verifier.get("env", {})),
    )


def _variables(given: Mapping[str, Any]) -> dict[str, str]:
    for name, value in given.items():
        if "${" in str(value):
            raise ValueError(f"the variable {name} = {value!r} takes a value of this machine, which is not passed on")
    return {name: str(value) for name, value in given.items()}


def _pack(folder: Path | None, left_out: set[str] = frozenset()) -> bytes:  # type: ignore[assignment]
    """Return an archive of the contents of a folder, the same for the same files; an empty one for None."""

    def without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mtime = 0
        return entry

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(folder.iterdir()) if folder is not None else ():
            if path.name not in left_out:
                archive.add(path, arcname=path.name, filter=without_owner)
    return buffer.getvalue()


async def _unpack(runtime: Runtime, archive: bytes, target: str) -> None:
    await runtime.write("/tmp/files.tar", archive)
    done = await runtime.run(["tar", "--no-same-owner", "-xf", "/tmp/files.tar", "-C", target], {})
    if done.exit_code:
        raise RuntimeError(f"the files of a task cannot be copied: {done.stderr.strip()[-300:]}")
    await runtime.run(["rm", "-f", "/tmp/files.tar"], {})


async def _read_rewards(box: Runtime) -> dict[str, float]:
    """Return the numbers that the tests have written, `reward` among them; {} without a valid file."""
    for path in _REWARDS:
        try:
            text = (await box.read(path)).decode("utf-8-sig").strip()
            given = json.loads(text) if path.endswith(".json") else float(text)
        except (OSError, ValueError, RecursionError, vf.SandboxError):
            continue
        values = given if isinstance(given, dict) else {"reward": given}
        numbers = {str(name): float(value) for name, value in values.items() if _is_number(value)}
        if "reward" in numbers:
            return numbers
    return {}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MAX_REWARD
