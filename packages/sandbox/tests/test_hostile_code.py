"""Hostile programs: each is contained, the next execution is clean, and no process is left."""

import asyncio
import os
import signal
import socket
import time
from contextlib import AsyncExitStack, ExitStack, closing

import psutil
import pytest
from tests.support.isolation import needs_isolation

from prime_rl_sandbox.execution import SandboxConfigError, TestCase, Verdict
from prime_rl_sandbox.jail import jail, jail_files
from prime_rl_sandbox.sandbox import Sandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENDED = {Verdict.OK, Verdict.ERROR, Verdict.TIMEOUT, Verdict.MEMORY, Verdict.OUTPUT}

RESOURCES = {
    "fork bomb": ("import os\nfor _ in range(1000): os.fork()", {Verdict.ERROR, Verdict.TIMEOUT}),
    "exponential fork bomb": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        {Verdict.TIMEOUT},
    ),
    "shell fork bomb": ("import os\nos.execv('/bin/sh', ['sh', '-c', 'f() { f | f & }; f; f | f'])", ENDED),
    "thread bomb": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        {Verdict.ERROR},
    ),
    "memory bomb": ("x = []\nwhile True: x.append(bytearray(2**24))", {Verdict.MEMORY}),
    "memory of one object": ("x = 'x' * 2**40", {Verdict.MEMORY}),
    "endless loop": ("while True: pass", {Verdict.TIMEOUT}),
    "endless sleep": ("import time; time.sleep(10**6)", {Verdict.TIMEOUT}),
    "large power": ("x = 9 ** 9 ** 9", {Verdict.TIMEOUT, Verdict.MEMORY}),
    "output flood": ("while True: print('x' * 10**6)", {Verdict.OUTPUT}),
    "error flood": ("import sys\nwhile True: sys.stderr.write('x' * 10**6)", {Verdict.OUTPUT}),
    "ignored signals": (
        "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        {Verdict.TIMEOUT},
    ),
    "abort": ("import os; os.abort()", {Verdict.ERROR}),
    "segmentation fault": ("import ctypes; ctypes.string_at(0)", {Verdict.ERROR}),
    "deep recursion": ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", ENDED),
    "fork bomb of threads": (
        "import os, threading\ndef f():\n    while True:\n        try: os.fork()\n        except OSError: pass\n"
        "for _ in range(8): threading.Thread(target=f).start()",
        {Verdict.TIMEOUT},
    ),
    "stop itself": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP); os.kill(0, 19)\nwhile True: pass", ENDED),
    # 0 is the process group, and processes of other namespaces can be in it.
    "signal the process group": ("import os; os.kill(os.getppid(), 15); os.kill(0, 9)\nwhile True: pass", ENDED),
    "pipes full of data": (
        "import os\nwhile True:\n    r, w = os.pipe()\n    os.set_blocking(w, False)\n    os.write(w, bytes(65536))",
        {Verdict.ERROR},
    ),
    "closed streams": ("import os\nfor n in range(64):\n    try: os.close(n)\n    except OSError: pass", ENDED),
}


SLOW = {
    "fork bomb of threads", "stop itself", "exponential fork bomb", "error flood", "large power", "endless sleep",
    "deep recursion", "ignored signals",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.extended] if name in SLOW else []) for name in RESOURCES]
)
async def test_hostile_use_of_resources_ends_with_a_verdict(sandbox, name):
    code, verdicts = RESOURCES[name]
    pids = sandbox.jail_pids
    result = await sandbox.run(code, timeout=0.4 if Verdict.TIMEOUT in verdicts else 30)
    assert result.verdict in verdicts, result
    assert sandbox.jail_pids == pids
    assert len(result.stdout) + len(result.stderr) <= 2**20
    await assert_clean(sandbox)


async def assert_clean(sandbox):
    """The next execution sees nothing of the one before, and no process of it is left."""
    code = "import os; print([x for x in os.listdir('/proc') if x.isdigit()], os.listdir('.'), os.listdir('/dev/shm'))"
    result = await sandbox.run(code, timeout=20)
    assert result.stdout == "['1'] [] []\n", result
    jail = psutil.Process(sandbox.jail_pids[0])
    deadline = time.monotonic() + 20
    while (left := len(jail.children(recursive=True))) > 2 + 2 * 3 and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert left <= 2 + 2 * 3  # bubblewrap, fork server, prepared children with their supervisors


REFUSED = {
    "write to /usr": "open('/usr/x', 'w')",
    "write to /": "open('/x', 'w')",
    "write to /dev": "open('/dev/x', 'w')",
    "write to /jail": "open('/jail/jail_child.py', 'w')",
    "write to /etc": "open('/etc/x', 'w')",
    "write to a setting of the kernel": "open('/proc/sys/kernel/core_pattern', 'wb', 0).write(b'x')",
    "read shadow": "open('/etc/shadow').read()",
    "read passwd": "open('/etc/passwd').read()",
    "list home": "os.listdir('/root'), os.listdir('/home')",
    "signal everything": "os.kill(-1, 9)",
    "signal other processes": "[os.kill(n, 9) for n in range(2, 400)]",
    "ptrace": "check(libc.ptrace(16, 1, 0, 0))",
    "read the memory of another process": "check(libc.process_vm_readv(1, 0, 0, 0, 0, 0))",
    "unshare a user namespace": "check(libc.unshare(0x10000000))",
    "clone a user namespace": "check(libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0))",
    "clone3": "check(libc.syscall(435, 0, 0))",
    "mount": "check(libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None))",
    "umount": "check(libc.umount2(b'/tmp', 2))",
    "setns": "check(libc.setns(os.open('/proc/self/ns/net', 0), 0))",
    "chroot": "os.chroot('/tmp')",
    "bpf": "check(libc.syscall(321, 0, 0, 0))",
    "io_uring": "check(libc.syscall(425, 8, 0))",
    "perf": "check(libc.syscall(298, 0, 0, 0, 0, 0))",
    "keyring": "check(libc.syscall(250, 0, 0))",
    "userfaultfd": "check(libc.syscall(323, 0))",
    "SysV shared memory": "check(libc.shmget(0, 2**29, 0o1600))",
    "SysV messages": "check(libc.msgget(0, 0o1600))",
    "SysV semaphores": "check(libc.semget(0, 1, 0o1600))",
    "memory file": "os.memfd_create('x')",
    "vsock socket": "socket.socket(40, socket.SOCK_STREAM)",
    "netlink socket": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "packet socket": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "raw socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "connect outside": "socket.create_connection(('1.1.1.1', 53), 1)",
    "resolve a name": "socket.create_connection(('example.com', 80), 1)",
    "become root": "os.setuid(0)",
    "lower the nice value": "os.setpriority(os.PRIO_PROCESS, 0, -10)",
    "raise a limit": "raise_limit()",
    "device node": "os.mknod('/tmp/sda', 0o60600, os.makedev(8, 0))",
    "type into a terminal": "fcntl.ioctl(0, 0x5412, b'x')",
    "personality": "check(libc.personality(0x0040000))",
    "change the clock": "time.clock_settime(time.CLOCK_REALTIME, 0)",
    "change the clock of the processor": "check(libc.adjtimex(bytes(512)))",
    "restart the machine": "open('/proc/sysrq-trigger', 'wb', 0).write(b'b')",
    "files of the host through a process": "os.listdir('/proc/1/root/root')",
    "memory of process 1 of the host": "open('/proc/2/mem', 'rb').read(1)",
    "protect itself from the lack of memory": "open('/proc/self/oom_score_adj', 'wb', 0).write(b'-1000')",
    "have the kernel end its neighbours first": "open('/proc/self/oom_score_adj', 'wb', 0).write(b'0')",
    "take the pseudo terminals of the machine": "os.open('/dev/ptmx', os.O_RDWR)",
    "open a pseudo terminal": "os.openpty()",
    "write to /dev/pts": "open('/dev/pts/x', 'w')",
    "take the inotify instances of the user": "check(libc.inotify_init1(0))",
    "map another user": "open('/proc/self/uid_map', 'wb', 0).write(b'0 0 1')",
    "replace a program": "os.rename('/usr/bin/env', '/usr/bin/env2')",
    "real-time priority": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))",
    "argument of many bytes": "os.execv('/bin/true', ['x' * 2**22])",
    "sparse file": "open('sparse', 'wb').truncate(2**40)",
    "disk quota": "open('big', 'wb').write(bytes(2**20) * 40)",
    "number of files": "[open(f'f{n}', 'w').close() for n in range(6000)]",
    "shared memory quota": "open('/dev/shm/x', 'wb').write(bytes(2**22))",
    "number of open files": "files = [open('/dev/null') for _ in range(2000)]",
}
PRELUDE = """
import ctypes, fcntl, os, resource, socket, time
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result == -1:
        raise OSError(ctypes.get_errno(), 'refused')
def raise_limit():
    try: resource.setrlimit(resource.RLIMIT_NPROC, (1000, 1000))
    except ValueError as error: raise OSError(1, str(error))
"""


@pytest.mark.parametrize("name", REFUSED)
async def test_hostile_access_is_refused(sandbox, name):
    if sandbox.backend == "prime" and name in ("read passwd", "list home"):
        pytest.skip("a remote machine has its own users")
    attempt = f"try:\n    {REFUSED[name]}\n    print('ALLOWED')\nexcept OSError as error:\n    print('refused', error)"
    result = await sandbox.run(f"{PRELUDE}\n{attempt}", timeout=10)
    assert result.stdout.startswith("refused") or "No space left on device" in result.stderr, result


FILL = "    for _ in range(16): file.write(bytes(2**16))\nimport time; time.sleep(0.5); print('ALLOWED')"
HIDDEN = {
    "deleted files": "files = []\nfor _ in range(40):\n    file = open('x', 'wb', 0)\n"
    "    files.append(file); os.remove('x')\n",
    "deep folders": "for _ in range(2): os.makedirs('d/' * 900); os.chdir('d/' * 900)\n"
    "for n in range(40):\n    file = open(f'x{n}', 'wb', 0)\n",
}


@pytest.mark.parametrize("name", HIDDEN)
async def test_hostile_files_that_are_hard_to_find_count(sandbox, name):
    result = await sandbox.run(f"import os\n{HIDDEN[name]}{FILL}", timeout=20)
    assert "No space left on device" in result.stderr and not result.stdout, result
    await assert_clean(sandbox)


async def test_remove_folder_deletes_any_depth_and_follows_no_link(tmp_path):
    kept, home = tmp_path / "kept", tmp_path / "home"
    for folder in (kept, home):
        folder.mkdir()
        (folder / "file").touch()
    (home / "link").symlink_to(kept)
    (home / "closed").mkdir(mode=0)
    fd = os.open(home, os.O_RDONLY)
    for _ in range(2100):  # deeper than a path can be long
        os.mkdir("d", dir_fd=fd)
        fd, parent = os.open("d", os.O_RDONLY, dir_fd=fd), fd
        os.close(parent)
    os.close(fd)
    jail_files.remove_folder(str(home))
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and (kept / "file").exists()


LIST_DESCRIPTORS = """
import os
found = set()
for fd in range(10_000):
    try: found.add((fd, os.fstat(fd).st_mode & 0o170000 == 0o010000))
    except OSError: pass
print(sorted(found))
"""


def open_descriptors(stack, count):
    for _ in range(count):
        stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))


@needs_isolation
@pytest.mark.extended(after=2)
@pytest.mark.parametrize("num_open", [300, 0, 60, 4000])
async def test_hostile_code_has_no_descriptors_of_the_host(num_open):
    """The control socket of a jail has the number that is free in the host, in each jail another one."""
    async with AsyncExitStack() as stack:
        open_descriptors(stack, num_open)
        first = await stack.enter_async_context(Sandbox(num_jails=2, num_warm=1))
        second = await stack.enter_async_context(Sandbox(num_jails=1, num_warm=1))
        os.kill(first.jail_pids[0], signal.SIGKILL)  # the one in its place starts later
        for sandbox in (first, first, first, second):
            result = await sandbox.run(LIST_DESCRIPTORS, timeout=20)
            assert result.stdout == "[(0, True), (1, True), (2, True)]\n", result
            async with sandbox.session() as session:  # 3 and 4 are the pipes of its cells
                result = await session.run(LIST_DESCRIPTORS, timeout=20)
                assert result.stdout == f"{[(fd, True) for fd in range(5)]}\n", result


@needs_isolation
async def test_check_isolation_finds_a_descriptor_of_the_host(monkeypatch, tmp_path):
    for name in jail.JAIL_FILES:
        text = (jail.JAIL_FOLDER / name).read_text()
        leaking = text.replace('map(int, os.listdir("/proc/self/fd"))', "range(70)")
        (tmp_path / name).write_text(leaking)
        assert (leaking != text) == (name == "jail_supervisor.py")
    monkeypatch.setattr(jail, "JAIL_FOLDER", tmp_path)
    with ExitStack() as stack:
        open_descriptors(stack, 300)
        with pytest.raises(SandboxConfigError, match="use descriptors of the host"):
            await Sandbox(num_jails=1, num_warm=1).__aenter__()


BUSY = (
    "import os, signal\n{}while True:\n    try:\n        if os.fork() == 0:\n            {}\n    except OSError: pass"
)


@pytest.mark.extended
@pytest.mark.parametrize(
    "code",
    [
        BUSY.format("", "while True: pass"),
        BUSY.format("signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n", "sum(range(10**5)); os._exit(0)"),
        "import threading\nfor _ in range(8): threading.Thread(target=lambda: sum(iter(int, 1))).start()",
    ],
    ids=["processes", "processes that nothing waits for", "threads"],
)
async def test_hostile_load_does_not_extend_its_own_timeout(sandbox, code):
    begin = time.monotonic()
    result = await sandbox.run(code, timeout=1.5)
    assert result.verdict is Verdict.TIMEOUT
    assert result.milliseconds < 1000 * (2 * 1.5 + 1.5), time.monotonic() - begin  # not eight times


async def test_hostile_network_reaches_no_server_of_the_host(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        address = server.getsockname()
        result = await sandbox.run(f"{PRELUDE}\nsocket.create_connection({address!r}, 1)", timeout=10)
        assert result.verdict is Verdict.ERROR
        with pytest.raises(BlockingIOError):
            server.accept()


@needs_isolation
async def test_hostile_code_sees_neither_files_nor_keys_of_the_host(tmp_path, monkeypatch):
    secret = tmp_path / "key"
    secret.write_text("secret-1234")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    monkeypatch.setenv("INFERENCE_SERVER_API_KEY", "secret-1234")
    find = "find / \\( -path /proc -o -path /usr \\) -prune -o -name key -print 2>/dev/null"
    command = f"env; cat /proc/*/environ /proc/*/cmdline {secret}; ls -a / /tmp ~; whoami; {find}"
    async with Sandbox(num_jails=1, num_warm=1) as own:
        result = await own.run(argv=["/bin/sh", "-c", command], timeout=20)
    everything = result.stdout + result.stderr
    assert "secret" not in everything.replace(str(secret), "")
    assert "No such file" in result.stderr
    assert "INFERENCE" not in everything
    assert f"\n{secret}\n" not in result.stdout


async def test_hostile_daemon_ends_with_the_execution_and_does_not_delay_it(sandbox):
    daemon = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(600)\n"
        "    os._exit(0)\nprint('done')"
    )
    result = await sandbox.run(daemon, timeout=300)
    assert (result.stdout, result.verdict) == ("done\n", Verdict.OK)
    await assert_clean(sandbox)


async def test_hostile_suid_program_gains_nothing(sandbox):
    status = "grep -E 'CapEff|NoNewPrivs|Seccomp:' /proc/self/status"
    script = f"cp /bin/sh s; chmod u+s s; ./s -c 'id -u'; su -c id; {status}"
    result = await sandbox.run(argv=["/bin/sh", "-c", script], timeout=10)
    lines = result.stdout.splitlines()
    assert lines[0] == "1000"
    assert {"CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"} <= set(lines)


async def test_hostile_executions_at_once_do_not_see_each_other(sandbox):
    writer = (
        "import socket\nopen('/tmp/shared', 'w').write('x')\nserver = socket.socket(socket.AF_UNIX)\n"
        "server.bind('\\0shared')\nserver.listen()"
    )
    reader = (
        "import os, socket\nprint(os.path.exists('/tmp/shared'), [x for x in os.listdir('/proc') if x.isdigit()])\n"
        "socket.socket(socket.AF_UNIX).connect('\\0shared')"
    )
    async with sandbox.session() as session:
        assert (await session.run(writer, timeout=20)).ok
        result = await sandbox.run(reader, timeout=20)
        assert (await session.run("open('/tmp/shared').read()")).value == "'x'"
    assert result.stdout == "False ['1']\n"
    assert "ConnectionRefusedError" in result.stderr


@pytest.mark.parametrize("kind", ["dict", "set"])
async def test_hostile_result_with_equal_hashes_is_refused(sandbox, kind):
    """A table of a million bytes of them would keep the event loop of the host busy for seconds."""
    items = f"[{'[k * (2**61 - 1), 0]' if kind == 'dict' else 'k * (2**61 - 1)'} for k in range(1000)]"
    code = (
        f"import json, os\nresult = {{'type': {kind!r}, 'items': {items}}}\n"
        "with open('.function_result', 'w') as file: file.write(json.dumps(result))\nos._exit(0)"
    )
    (result,) = await sandbox.execute_code(code, [TestCase(function="f", expected=1)], timeout_ms=10_000)
    assert (result.verdict, result.output) == (Verdict.ERROR, None)


async def test_hostile_flood_of_calls_ends_the_session(sandbox):
    """The host answers one call at a time; neither side may wait for the other to read."""
    flood = "import os, struct\nwhile True: os.write(4, (struct.pack('>I', 13) + b'{\"call\": \"x\"}') * 10000)"

    async def answer(text):
        return "y" * 10_000

    for session in (sandbox.session(), sandbox.session(answer)):
        async with session:
            result = await session.run(flood, timeout=5)
            assert result.verdict is Verdict.ERROR, result
    await assert_clean(sandbox)


async def test_hostile_frames_to_the_supervisor_do_not_stop_the_jail(sandbox):
    attacks = (
        "os.write(4, b'\\xff' * 8)",
        "os.write(4, struct.pack('>I', 9) + b'not json!')",
        "os.write(4, struct.pack('>I', 40000) + b'[' * 40000)",
        "os.write(4, struct.pack('>I', 12) + b'{\"call\": [1]')",
        "[os.close(n) for n in range(5)]",
        "os.write(4, (struct.pack('>I', 2) + b'{}') * 10000)",
    )
    (jail,) = sandbox.jail_pids
    for attack in attacks:
        async with sandbox.session() as session:
            result = await session.run(f"import os, struct\n{attack}", timeout=1)
            assert result.verdict in ENDED, attack
    assert sandbox.jail_pids == [jail]
    await assert_clean(sandbox)


@pytest.mark.parametrize(
    ("received", "message"), [(b"\xff" * 4, "is too large"), (b"\0\0\0\5ab", "was lost"), (b"\0\0\0\2[]", "is damaged")]
)
async def test_answer_that_is_no_object_or_announces_too_much_loses_the_jail(received, message):
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.sendall(received)
    theirs.close()
    with closing(jail.JailConnection(ours)) as connection, pytest.raises(jail.JailLostError, match=message):
        await connection.receive()


async def test_hostile_links_are_not_followed_and_special_files_not_read(sandbox):
    special = "import os; os.symlink('/usr/bin/env', 'link'); os.mkfifo('fifo'); os.mkdir('dir')"
    result = await sandbox.run(special, outputs=["link", "fifo", "dir"], timeout=10)
    assert (dict(result.files), result.verdict) == ({}, Verdict.OK)
    depth = "../" * 20
    links = f"import os\nfor n, t in (('a', '{depth}etc'), ('b', '/etc'), ('c', '/proc/self'), ('d', '{depth}usr')):\n"
    code = f"{links}    try: os.symlink(t, n)\n    except OSError: pass"
    names = ["a/hostname", "b/hostname", "b/alternatives/README", "c/environ", "c/exe", "d/bin/env"]
    result = await sandbox.run(code, outputs=names, timeout=10)
    assert (dict(result.files), result.verdict) == ({}, Verdict.OK)
    target = f"/tmp/written-{os.getpid()}"
    for name in ("a", "b"):
        async with sandbox.session() as session:
            await session.run(code.replace("etc", "tmp"))
            await session.run("1", files={f"{name}/{os.path.basename(target)}": "x"})
    assert not os.path.exists(target)


async def test_hostile_sparse_file_is_read_back_only_within_the_limit(sandbox):
    code = "open('a', 'wb').truncate(2**24)\nopen('b', 'wb').truncate(2**20)"
    result = await sandbox.run(code, outputs=["a", "b"], timeout=10)
    assert {name: len(content) for name, content in result.files.items()} == {"b": 2**20}


async def test_hostile_output_is_data(sandbox):
    code = r"import os, sys; os.write(1, b'\xff\x1b]0;x\x07\x00 \xed\xa0\x80\n'); print('\u202e', file=sys.stderr)"
    result = await sandbox.run(code, timeout=10)
    assert result.stdout.encode(errors="surrogateescape") == b"\xff\x1b]0;x\x07\x00 \xed\xa0\x80\n"
    assert result.printable.stdout.encode().count(b"?") == 4
    assert result.stderr == "\u202e\n"


async def test_hostile_folder_in_the_place_of_a_file_ends_only_the_session(sandbox):
    (jail,) = sandbox.jail_pids
    async with sandbox.session() as session:
        assert (await session.run("import os; os.mkdir('a')")).ok
        result = await session.run("1", files={"a": "x"}, outputs=["a", "b/c"])
        assert (result.verdict, dict(result.files)) == (Verdict.ERROR, {})
    assert sandbox.jail_pids == [jail]


async def test_hostile_programs_do_not_delay_the_event_loop(sandbox):
    lags = []

    async def measure() -> None:
        while True:
            begin = time.process_time()
            await asyncio.sleep(0)
            lags.append(time.process_time() - begin)

    task = asyncio.create_task(measure())
    codes = [RESOURCES[name][0] for name in ("fork bomb", "output flood", "error flood", "memory of one object")]
    await asyncio.gather(*(sandbox.run(code, timeout=1) for code in codes * 2))
    task.cancel()
    # Processor time of this process, which a busy machine does not change.
    assert sorted(lags)[int(len(lags) * 0.99)] < 0.05


FAKES = {
    "exit with 0": "import os\ndef f(x): os._exit(0)",
    "exit when loaded": "import os; os._exit(0)",
    "system exit": "def f(x): raise SystemExit(0)",
    "equal to everything": "class A(int):\n    def __eq__(self, other): return True\ndef f(x): return A(1)",
    "patched builtins": "import builtins\nbuiltins.AssertionError = Exception\ndef f(x): return 1",
    "read frames": "import sys\ndef f(x): return [v for v in sys._getframe(1).f_locals.values()]",
    "print the marker": "def f(x):\n    print('ok passed')\n    return 1",
    "read test files": "import os\ndef f(x): return ''.join(open(n).read() for n in os.listdir('.'))",
    "read the memory": "def f(x): return open('/proc/self/mem', 'rb').read(10)",
    "answer the host": "import json\ndef f(x): return host_call(json.dumps({'value': 1, 'args': []}))",
    "forge the report": (
        "import json, os, struct\nb = json.dumps({'failed': False, 'value': 'ok'}).encode()\n"
        "def f(x): os.write(4, struct.pack('>I', len(b)) + b)"
    ),
    "raise an assertion error": "def f(x): raise AssertionError",
    "unencodable": "def f(x): return object()",
    "endless": "def f(x):\n    while True: pass",
}


@pytest.mark.parametrize("name", FAKES)
async def test_hostile_solution_that_fakes_a_pass_fails(sandbox, name):
    tests = "assert f(20) == 441, 'square of x + 1'\nassert f(30) == 961"
    result = await sandbox.run_asserts(FAKES[name], tests, ["f"], timeout_ms=300)
    assert not result.passed
    cases = [TestCase(function="f", args=[20], expected=441), TestCase(input="20", expected="441")]
    assert not any(result.passed for result in await sandbox.execute_code(FAKES[name], cases, timeout_ms=300))


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("def f(x): return (x + 1) ** 2", "assert f(20) == 441\nassert f(x=1) == 4"),
        ("def f(x): return sorted(x), {1: (2, 3)}", "assert f([2, 1]) == ([1, 2], {1: (2, 3)})"),
        ("def f(x): x.append(1)", "a = []\nf(a)\nassert a == [1]"),
        ("def f(x): raise ValueError('no')", "try:\n    f(1)\n    assert False\nexcept ValueError: pass"),
        ("from __future__ import annotations\ndef f(x: int) -> int: return x", "assert abs(f(0.1) - 0.1) < 1e-9"),
        ("def f(x): return x\nif __name__ == '__main__':\n    raise SystemExit(f(1))", "assert f('a') == 'a'"),
        ("def f(x):\n    print('noise' * 1000)\n    return x", "assert f(None) is None"),
    ],
)
async def test_run_asserts_correct_solution_passes(sandbox, code, tests):
    result = await sandbox.run_asserts(code, tests, ["f"], timeout_ms=20_000)
    assert result.passed, result
    wrong = await sandbox.run_asserts(code, tests + "\nassert f([1, 2, 3]) == 'never'", ["f"], timeout_ms=20_000)
    assert not wrong.passed
    early = await sandbox.run_asserts(code, "import os; os._exit(0)", ["f"], timeout_ms=20_000)
    assert not early.passed
