"""Run by the interpreter of the installed environment at its start, from .pth files next to the package."""
