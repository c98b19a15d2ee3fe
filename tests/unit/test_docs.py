"""The documentation names only what exists: pages, headings, commands, recipes, files."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.sources import SCRIPTS

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md")]
    + [
        page
        for folder in ("benchmarks", "configs", "deploy", "docker", "docs", "environments", "examples", "packages")
        for page in (ROOT / folder).rglob("*.md")
    ]
)
TOOLS = {
    "codespell", "hf", "lint-imports", "mypy", "pre-commit", "pytest", "python", "ruff", "torchrun", "tensorboard",
    "trackio", "wandb",
}  # fmt: skip

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
RUN = re.compile(r"\buv run\b([^`\n|#]*)")
RECIPE = re.compile(r"\bconfigs/[\w./{},-]+\.toml\b")
FILE = re.compile(r"(?:`|\s)((?:benchmarks|deploy|docker|docs|environments|packages|scripts|src|tests)/[\w./-]*\w)")

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
            words = words[2:] if words[0] in ("--extra", "--project") else words[1:]
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
    unknown = set(commands(page.read_text())) - SCRIPTS.keys() - TOOLS
    assert not unknown, f"neither scripts of pyproject.toml nor known tools: {unknown}"


@each_page
def test_recipes_and_files_exist(page):
    text = page.read_text()
    named = set(RECIPE.findall(text)) | set(FILE.findall(text))
    missing = {path for path in named if not (ROOT / path).exists() and not (page.parent / path).exists()}
    assert not missing, f"named and not there: {missing}"


ENVIRONMENTS = sorted(
    path.parent for path in (ROOT / "environments").glob("*/pyproject.toml") if not path.parent.is_symlink()
)


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda path: path.name)
def test_environment_readme_has_all_sections_and_arguments(environment):
    text = (environment / "README.md").read_text()
    assert re.findall(r"^#+ (.+)$", text, re.MULTILINE) == [environment.name, "Install", "Reward", "Data", "Arguments"]
    assert "uv run" in text.partition("## Install")[0], "the page starts with a command"
    classic = environment / environment.name / "environment.py"
    if not classic.exists():
        taskset = ast.parse((environment / environment.name / "taskset.py").read_text())
        kinds = [node for node in taskset.body if isinstance(node, ast.ClassDef)]
        (config,) = [kind for kind in kinds if kind.name.endswith("Config")]
        arguments = [node.target.id for node in config.body if isinstance(node, ast.AnnAssign)]
    else:
        module = ast.parse(classic.read_text())
        (load,) = [node for node in module.body if getattr(node, "name", None) == "load_environment"]
        arguments = [argument.arg for argument in [*load.args.args, *load.args.kwonlyargs]]
    rows = re.findall(r"^\| ([^|]+) \|", text.partition("## Arguments")[2], re.MULTILINE)
    documented = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(documented) == sorted(arguments)


def definitions(file):
    """Functions and classes of a module, and methods as `Class.method`."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    outer = [node for node in ast.parse(file.read_text()).body if isinstance(node, kinds)]
    inner = [(node, child) for node in outer for child in node.body if isinstance(child, kinds)]
    return {node.name for node in outer} | {f"{node.name}.{child.name}" for node, child in inner}


def test_life_of_a_rollout_names_existing_code():
    page = ROOT / "docs/life_of_a_rollout.md"
    text = page.read_text()
    links = re.findall(r"\[`([\w.]+)`\]\(([^)#]+\.py)\)", text)
    defined = {path: definitions((page.parent / path).resolve()) for _, path in links}
    assert re.findall(r"^## (\d+)\.", text, re.MULTILINE) == [str(number) for number in range(1, 13)]
    missing = [(name, path) for name, path in links if name not in defined[path]]
    assert not missing, f"not defined in the linked file: {missing}"
    mentioned = set(re.findall(r"`([a-z_]\w*)`", text.partition("## 1.")[2])) - {"seq_len"}
    known = {part for names in defined.values() for name in names for part in name.split(".")}
    assert mentioned <= known, f"defined in no linked file: {mentioned - known}"


def test_docs_index_links_every_page():
    linked = {link.partition("#")[0] for link in LINK.findall((ROOT / "docs/README.md").read_text())}
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages - {"README.md"} <= linked


def test_pages_for_users_stay_few_and_short():
    pages = list((ROOT / "docs").glob("*.md"))
    words = sum(len(page.read_text().split()) for page in pages)
    assert len(pages) <= 26 and words <= 20_000, f"{len(pages)} pages, {words} words: merge or shorten one"


def test_every_script_is_in_the_readme():
    elsewhere = {"trainer", "vf-rl"}  # the README shows it under torchrun; another name of `rl`, in configs/aqua_rat
    assert set(commands((ROOT / "README.md").read_text())) >= SCRIPTS.keys() - elsewhere


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


def test_duration_of_the_quickstart_is_the_same_on_every_page():
    pages = ("README.md", "docs/quickstart.md", "configs/reverse_text/README.md")
    lines = [
        line
        for page in pages
        for line in (ROOT / page).read_text().splitlines()
        if "cores" in line and "tests" not in line
    ]
    found = [minutes for line in lines for minutes in re.findall(r"(\w+) minutes", line)]
    assert len(found) >= 4 and set(found) == {found[0]}, found
