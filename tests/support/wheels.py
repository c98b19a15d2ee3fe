"""Wheels that need no package index."""

import zipfile


def make_wheel(folder, version="1.0", name="tiny_environment"):
    """Write a wheel that needs nothing; uv installs it without an index."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(wheel := folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", f"def load_environment():\n    return {version!r}\n")
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    return wheel
