"""The fork server of the backend `wasm`: that of a jail, whose children run an interpreter in WebAssembly.

Runs with the packages of wasmtime and the standard library alone.
"""

import json
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_CONFIG = json.loads(sys.argv[1])
sys.path[:0] = [_FOLDER, os.path.join(os.path.dirname(_FOLDER), "jail")]
sys.path.append(_CONFIG["wasmtime_folder"])

import jail_server
import wasm_child

if __name__ == "__main__":
    jail_server.main(wasm_child.Loader(_CONFIG["component"]).run_child)
