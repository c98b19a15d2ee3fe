"""The generator of run directories for tests; it lives in benchmarks/synthetic_run.py."""

import importlib.util
from pathlib import Path

_SPEC = importlib.util.spec_from_file_location(
    "synthetic_run", Path(__file__).parents[2] / "benchmarks/synthetic_run.py"
)
synthetic_run = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(synthetic_run)
write_run = synthetic_run.write_run
