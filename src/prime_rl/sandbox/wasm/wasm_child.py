"""The process that runs one interpreter in WebAssembly: the counterpart of `jail_child`.

The code can reach what this process gives to the component: its three streams, its working directory, a clock, random
numbers, and the host of a session. The process ends if its files exceed their limits, which no file system enforces.
"""

import json
import os
import signal
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
            interpreter = _Interpreter(self._engine, self._component, self._linker, config["memory_bytes"], home)
        except BaseException as error:  # reported to the supervisor, which reports it to the host
            jail_child.write_report({"failed": f"{type(error).__name__}: {error}"})
            os._exit(_EXIT_ERROR)
        jail_child.write_report({"prepared": True})
        watch = threading.Thread(target=_watch_files, args=(home, config["disk_bytes"], config["num_files"]))
        command = jail_child.read_command()
        if command is None:
            os._exit(_EXIT_ERROR)
        watch.daemon = True
        watch.start()
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


def _watch_files(home: str, max_bytes: int, max_files: int) -> None:
    """End this process when the files in its working directory exceed a limit."""
    while True:
        num_files, size = 0, 0
        for folder, folders, files in os.walk(home):
            num_files += len(folders) + len(files)
            for name in files:
                try:
                    size += os.lstat(os.path.join(folder, name)).st_blocks * 512
                except OSError:  # deleted meanwhile
                    continue
        if size > max_bytes or num_files > max_files:
            _fail("OSError: No space left on device: the files exceed disk_bytes or num_files")
        time.sleep(_WATCH_SECONDS)
