"""The process that runs one interpreter in WebAssembly: the counterpart of `jail_child`.

The code can reach what this process gives to the component: its three streams, its working directory, a clock, random
numbers, and the host of a session. The process ends if its files exceed their limits, which no file system enforces.
"""

import json
import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import jail_child
from wasmtime import Engine, ExitTrap, Store, WasiConfig, WasmtimeError
from wasmtime.component import Component, Linker

_GUEST_HOME = "/tmp"
_WATCH_SECONDS = 0.02
_BLOCK_BYTES = 512
_EXIT_ERROR = 1
_FIRST_KEPT_DESCRIPTOR = 128


class Loader:
    """Loads a compiled component, once for all children.

    Args:
        path: of the compiled component.
    """

    def __init__(self, path: str) -> None:
        self._engine = Engine()
        with _low_descriptors_taken():
            self._component = Component.deserialize_file(self._engine, path)
        self._linker = Linker(self._engine)
        self._linker.add_wasip2()
        with self._linker.root() as root:
            root.add_func("call-host", _call_host)

    def run_child(self, config: dict[str, Any], home: str) -> NoReturn:
        """Start the interpreter, report that it is prepared, and run the command that follows."""
        try:
            os.chdir(home)
            os.setsid()
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # it cannot stop the component; the supervisor kills it then
            jail_child.set_limits(config)
            jail_child.end_with_parent()  # nothing else ends this process if its supervisor is killed
            interpreter = _Interpreter(self._engine, self._component, self._linker, config["memory_bytes"], home)
        except BaseException as error:  # reported to the supervisor, which reports it to the host
            jail_child.write_report({"failed": f"{type(error).__name__}: {error}"})
            os._exit(_EXIT_ERROR)
        jail_child.write_report({"prepared": True})
        command = jail_child.read_command()
        if command is None:
            os._exit(_EXIT_ERROR)
        threading.Thread(target=_watch_files, args=(home, config), daemon=True).start()
        if command["kind"] == "argv":
            _fail("WebAssembly runs Python code only, and no other programs")
        report = interpreter.execute(command)
        if command["kind"] == "code":
            os._exit(report["exit_code"])
        while (cell := jail_child.read_command()) is not None:
            jail_child.write_report(interpreter.execute({"kind": "cell", **cell}))
        os._exit(0)


@contextmanager
def _low_descriptors_taken() -> Iterator[None]:
    """Let a file be opened with a descriptor that a child keeps: it closes the low ones."""
    taken = [os.dup(0)]
    while taken[-1] < _FIRST_KEPT_DESCRIPTOR:
        taken.append(os.dup(0))
    try:
        yield
    finally:
        for fd in taken:
            os.close(fd)


class _Interpreter:
    def __init__(self, engine: Engine, component: Component, linker: Linker, memory_bytes: int, home: str) -> None:
        wasi = WasiConfig()
        wasi.inherit_stdin()
        wasi.inherit_stdout()
        wasi.inherit_stderr()
        wasi.preopen_dir(home, _GUEST_HOME)
        self._store = Store(engine)
        self._store.set_limits(memory_size=memory_bytes)
        self._store.set_wasi(wasi)
        instance = linker.instantiate(self._store, component)
        function = instance.get_func(self._store, "execute")
        if function is None:
            raise WasmtimeError("the component has no function `execute`")
        self._execute = function

    def execute(self, command: dict[str, Any]) -> dict[str, Any]:
        """Run a command; ends this process if the code ends the component."""
        try:
            report = self._execute(self._store, json.dumps(command))
            self._execute.post_return(self._store)
        except ExitTrap as end:
            os._exit(end.code)
        except WasmtimeError as error:  # such as a full stack, which only ends the component
            _fail(str(error).strip().rpartition("\n")[2].strip())
        return dict(json.loads(report))


def _call_host(_: Any, text: str) -> str:
    jail_child.write_report({"call": text})
    answer = jail_child.read_command()
    if answer is None:
        os._exit(_EXIT_ERROR)
    return str(answer["answer"])


def _fail(message: str) -> NoReturn:
    os.write(2, f"{message}\n".encode())
    os._exit(_EXIT_ERROR)


def _watch_files(home: str, config: dict[str, Any]) -> None:
    """End this process when its files exceed a limit, deleted ones that are still open included."""
    inherited = {fd for fd in range(config["num_open_files"]) if _is_open(fd)}
    while True:
        try:
            num_files, num_blocks = _measure(home)
        except OSError:  # a path that is too long to be looked at
            _fail("OSError: File name too long: the folders are too deep")
        for fd in set(range(config["num_open_files"])) - inherited:
            num_blocks += _blocks_of_deleted(fd)
        if num_blocks * _BLOCK_BYTES > config["disk_bytes"] or num_files > config["num_files"]:
            _fail("OSError: No space left on device: the files exceed disk_bytes or num_files")
        time.sleep(_WATCH_SECONDS)


def _measure(home: str) -> tuple[int, int]:
    """Return the number of files and folders below `home`, and their size in blocks; raises OSError if it cannot."""
    num_files, num_blocks, folders = 0, 0, [home]
    while folders:  # without recursion, which the depth of the folders could end
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    num_files += 1
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        num_blocks += entry.stat(follow_symlinks=False).st_blocks
        except (FileNotFoundError, NotADirectoryError):  # deleted meanwhile
            continue
    return num_files, num_blocks


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _blocks_of_deleted(fd: int) -> int:
    """Return the size of a deleted file that is open as `fd`, in blocks; 0 if it is something else."""
    try:
        facts = os.fstat(fd)
    except OSError:
        return 0
    return facts.st_blocks if stat.S_ISREG(facts.st_mode) and facts.st_nlink == 0 else 0
