"""Backend `wasm`: CPython compiled to WebAssembly, without any feature of the kernel. Chosen by name only."""
