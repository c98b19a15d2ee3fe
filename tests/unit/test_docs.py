"""The documentation names only what exists: pages, headings, commands, recipes, files."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docker").glob("*.md")]
    + [page for folder in ("benchmarks", "configs", "environments") for page in (ROOT / folder).rglob("*.md")]
)
SCRIPTS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"])
TOOLS = {"mypy", "pre-commit", "pytest", "python", "ruff", "torchrun", "wandb"}

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
RUN = re.compile(r"\buv run\b([^`\n|#]*)")
RECIPE = re.compile(r"\bconfigs/[\w./{},-]+\.toml\b")
FILE = re.compile(r"(?:`|\s)((?:benchmarks|deploy|docker|docs|environments|scripts|src|tests)/[\w./-]*\w)")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page):
    """The fragments that headings of a page are reached by."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands(text):
    """What `uv run` starts, on each line that says so; options of uv itself are skipped."""
    found = []
    for rest in RUN.findall(text):
        words = rest.split()
        while words and words[0].startswith("-"):
            words = words[2:] if words[0] == "--extra" else words[1:]
        found += words[0].split("|")[:1] if words else []
    return found


@each_page
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+://", link):
            continue
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        if fragment:
            assert fragment in anchors(target), f"{link}: {target.name} has no such heading"


@each_page
def test_commands_exist(page):
    unknown = set(commands(page.read_text())) - SCRIPTS - TOOLS
    assert not unknown, f"neither scripts of pyproject.toml nor known tools: {unknown}"


@each_page
def test_recipes_and_files_exist(page):
    text = page.read_text()
    named = set(RECIPE.findall(text)) | set(FILE.findall(text))
    missing = {path for path in named if not (ROOT / path).exists() and not (page.parent / path).exists()}
    assert not missing, f"named and not there: {missing}"


def test_every_page_of_docs_is_in_the_readme():
    linked = set(LINK.findall((ROOT / "README.md").read_text()))
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= linked


def test_every_script_is_in_the_readme():
    assert set(commands((ROOT / "README.md").read_text())) >= SCRIPTS - {
        "trainer"
    }  # the README shows it under torchrun


def test_metrics_of_the_training_page_are_reported():
    """Each name in the two tables of metrics is written somewhere in the source."""
    page = (ROOT / "docs/training.md").read_text()
    tables = page[page.index("## Metrics of the trainer") : page.index("## Weights & Biases")]
    cells = [line.split("|")[1] for line in tables.splitlines() if line.startswith("| `")]
    names = {re.sub(r"<.*", "", name) for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    laps = {f"time/{lap}" for lap in re.findall(r'\.lap\("(\w+)"\)', source)}
    missing = {name for name in names - laps if f'"{name}' not in source and f"'{name}" not in source}
    assert not missing


def test_a_gap_in_a_page_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n[a](gone.md) [b](#title) `uv run --extra cpu nothing @ configs/none.toml` `src/gone.py`\n"
    )
    with pytest.raises(AssertionError, match=re.escape("gone.md leads nowhere")):
        test_links_lead_somewhere(page)
    with pytest.raises(AssertionError, match="nothing"):
        test_commands_exist(page)
    with pytest.raises(AssertionError, match=re.escape("configs/none.toml")):
        test_recipes_and_files_exist(page)
