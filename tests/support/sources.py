"""The source files and the commands of prime-rl and of packages/."""

import tomllib
from pathlib import Path

_ROOT = Path(__file__).parents[2]
SOURCES = {
    f"{file.relative_to(folder)}": file
    for folder in (_ROOT / "src", *_ROOT.glob("packages/*/src"))
    for file in folder.rglob("*.py")
}
"""By their paths in the wheels, such as `prime_rl/core/errors.py`."""
PROJECTS = [
    tomllib.loads(file.read_text())["project"]
    for file in (_ROOT / "pyproject.toml", *_ROOT.glob("packages/*/pyproject.toml"))
]
SCRIPTS = {name: target for project in PROJECTS for name, target in project.get("scripts", {}).items()}
"""Commands, and the function that each calls."""
