"""Jails in remote machines: created, lost, refused and deleted. A local service has the interface of the real one."""

import asyncio
import contextlib

import pytest
import pytest_asyncio
from prime_service import running_service
from test_sandbox import find_process
from tests.support.isolation import needs_isolation

from prime_rl_sandbox.execution import SandboxConfigError, SandboxError, SandboxSettings, Verdict, use_settings
from prime_rl_sandbox.sandbox import Sandbox
from prime_rl_sandbox.shared_sandbox import SharedSandbox

pytestmark = needs_isolation  # the machines of the service have namespaces, too


@pytest_asyncio.fixture
async def service(monkeypatch, tmp_path):
    async with running_service(monkeypatch, tmp_path) as service:
        yield service


async def test_prime_creates_machines_without_network_and_deletes_them(service):
    use_settings(SandboxSettings(remote_image="python:3.13", jail_memory_bytes=2**31, num_jails=1))
    async with Sandbox("prime", num_warm=2) as sandbox:
        results = await asyncio.gather(*(sandbox.run(f"print({number})") for number in range(20)))
        assert [result.stdout for result in results] == [f"{number}\n" for number in range(20)]
        large = "x" * 700_000
        echo = await sandbox.run("print(input(), end='')", stdin=large)
        assert echo.stdout == large
    (body,) = service.created
    assert (body["docker_image"], body["memory_gb"], body["network_allowlist"]) == ("python:3.13", 2, [])
    assert len(service.deleted) == 1


async def test_prime_check_of_a_shared_sandbox_starts_no_machine(service):
    await asyncio.to_thread(SharedSandbox(backend="prime").check)
    assert service.created == []


@pytest.mark.extended
async def test_prime_lost_machine_is_replaced_and_its_execution_repeated(service):
    async with Sandbox("prime", num_warm=1) as sandbox:
        (machine,) = sandbox.jail_pids
        task = asyncio.create_task(sandbox.run(argv=["/bin/sh", "-c", "sleep 987; echo done"], timeout=1000))
        await find_process(sandbox, "987")
        service.end_processes()
        (await find_process(sandbox, "987", after=machine)).kill()
        result = await task
        assert (result.stdout, result.verdict) == ("done\n", Verdict.OK)
    assert len(service.created) == len(service.deleted) == 2


async def test_prime_service_that_refuses_during_a_run_is_infra_and_later_works_again(service):
    async with Sandbox("prime", num_warm=1) as sandbox:
        service.refuse_with = 400
        service.end_processes()
        result = await sandbox.run("print(1)")
        assert result.verdict is Verdict.INFRA
        assert "no capacity" in result.stderr
        service.refuse_with = None
        assert (await sandbox.run("print(1)")).stdout == "1\n"


async def test_prime_start_that_is_cancelled_leaves_no_machine(service):
    start = asyncio.create_task(Sandbox("prime").__aenter__())
    while not service.created:
        await asyncio.sleep(0)
    start.cancel()
    await asyncio.wait([start])
    assert start.cancelled() and len(service.deleted) == 1


async def test_prime_sandbox_that_is_closed_while_a_machine_starts_leaves_none(service):
    async with Sandbox("prime", num_warm=1) as sandbox:
        service.end_processes()
        async with asyncio.timeout(30):
            while sandbox._pool._jails[0].alive:
                await asyncio.sleep(0.01)
        execution = asyncio.create_task(sandbox.run("print(1)"))
        while len(service.created) < 2:
            await asyncio.sleep(0)
    with pytest.raises(SandboxError, match="the sandbox is closed"):
        await execution
    assert len(service.deleted) == 2


async def test_prime_sandbox_goes_on_with_the_machines_that_are_left(service):
    async with Sandbox("prime", num_warm=1, num_jails=2) as sandbox:
        service.refuse_with = 400
        lost, _ = (process for process in service.processes.values() if process.returncode is None)
        lost.kill()
        await lost.wait()
        for number in range(5):
            assert (await sandbox.run(f"print({number})")).stdout == f"{number}\n"
        async with asyncio.timeout(60):  # the pool learns of the end with the last output of the machine's processes
            while len(sandbox.jail_pids) > 1:
                assert (await sandbox.run("print(5)")).stdout == "5\n"
    assert len(service.created) == len(service.deleted) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"refuse_with": 401}, "Check PRIME_API_KEY"),
        ({"refuse_with": 402}, "Payment required"),
        ({"refuse_with": 400}, "no capacity"),
        ({"search_path": "/nowhere"}, r"python3: (command )?not found"),
    ],
)
async def test_prime_machine_that_does_not_start_is_one_line_and_deleted(service, change, message):
    for name, value in change.items():
        setattr(service, name, value)
    with pytest.raises(SandboxConfigError, match=message) as caught:
        await Sandbox("prime").__aenter__()
    assert "\n" not in str(caught.value)
    assert "backend prime did not start" in str(caught.value)
    assert len(service.deleted) == len(service.created)


async def test_prime_machine_is_deleted_although_a_cancellation_is_lost(service):
    """`asyncio.wait_for` of Python 3.11 returns normally if the answer arrives when it is cancelled."""
    writing = asyncio.Event()

    async def write(data):
        if not writing.is_set():
            writing.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    sandbox = await Sandbox("prime", num_warm=1).__aenter__()
    (jail,) = sandbox._pool._jails
    jail._process.write_stdin = write
    execution = asyncio.create_task(sandbox.run("print(1)"))
    await writing.wait()
    closing = asyncio.create_task(sandbox.__aexit__(None, None, None))
    await asyncio.wait({closing}, timeout=60)
    deleted = len(service.deleted)
    await jail.close()  # cancels the task once more
    await asyncio.gather(closing, execution, return_exceptions=True)
    assert len(service.created) == deleted == 1
