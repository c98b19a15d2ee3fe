"""The documentation names only what exists: pages, headings, commands, recipes, files."""

import ast
import re
from pathlib import Path

import pytest

from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from tests.support.sources import SCRIPTS

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "configs", "deploy", "docker", "docs", "environments", "examples", "packages")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
TOOLS = {
    "codespell", "hf", "lint-imports", "mypy", "pre-commit", "pytest", "python", "ruff", "torchrun", "tensorboard",
    "trackio", "wandb",
}  # fmt: skip

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
RUN = re.compile(r"\buv run\b([^`\n|#]*)")
RECIPE = re.compile(r"\bconfigs/[\w./{},-]+\.toml\b")
FILE = re.compile(r"(?:`|\s)((?:benchmarks|deploy|docker|docs|environments|packages|scripts|src|tests)/[\w./-]*\w)")


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


def broken_links(page):
    for link in LINK.findall(page.read_text()):
        path, _, fragment = link.partition("#")
        if re.match(r"[a-z]+://", link):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"{link} leads nowhere"
        elif fragment and fragment not in anchors(target):
            yield f"{link}: {target.name} has no such heading"


def unknown_commands(page):
    """Those that are neither scripts of pyproject.toml nor known tools."""
    return set(commands(page.read_text())) - SCRIPTS.keys() - TOOLS


def missing_files(page):
    text = page.read_text()
    named = set(RECIPE.findall(text)) | set(FILE.findall(text))
    return {path for path in named if not (ROOT / path).exists() and not (page.parent / path).exists()}


CHECKS = (broken_links, unknown_commands, missing_files)


@pytest.mark.parametrize("check", CHECKS)
def test_pages_name_only_what_exists(check):
    found = {str(page.relative_to(ROOT)): [*check(page)] for page in PAGES}
    assert {page: problems for page, problems in found.items() if problems} == {}


ENVIRONMENTS = sorted(
    path.parent for path in (ROOT / "environments").glob("*/pyproject.toml") if not path.parent.is_symlink()
)


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda path: path.name)
def test_environment_readme_has_all_sections_and_arguments(environment):
    text = (environment / "README.md").read_text()
    assert re.findall(r"^#+ (.+)$", text, re.MULTILINE) == [environment.name, "Install", "Reward", "Data", "Arguments"]
    assert "uv run" in text.partition("## Install")[0], "the page starts with a command"
    classic = environment / environment.name / "environment.py"
    if classic.exists():
        (load,) = [
            node for node in ast.parse(classic.read_text()).body if getattr(node, "name", "") == "load_environment"
        ]
        arguments = [argument.arg for argument in [*load.args.args, *load.args.kwonlyargs]]
    else:
        taskset = ast.parse((environment / environment.name / "taskset.py").read_text())
        kinds = [node for node in taskset.body if isinstance(node, ast.ClassDef)]
        (config,) = [kind for kind in kinds if kind.name.endswith("Config")]
        arguments = [node.target.id for node in config.body if isinstance(node, ast.AnnAssign)]
    rows = re.findall(r"^\| ([^|]+) \|", text.partition("## Arguments")[2], re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(arguments)


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


def test_duration_of_the_quickstart_is_the_same_on_every_page():
    pages = ("README.md", "docs/quickstart.md", "configs/reverse_text/README.md")
    lines = [line for page in pages for line in (ROOT / page).read_text().splitlines()]
    about = [line for line in lines if "cores" in line and "tests" not in line]
    found = re.findall(r"(\w+) minutes", "\n".join(about))
    assert len(found) >= 4 and len(set(found)) == 1, found


def test_pages_for_users_stay_few_and_short():
    pages = list((ROOT / "docs").glob("*.md"))
    words = sum(len(page.read_text().split()) for page in pages)
    assert len(pages) <= 26 and words <= 20_000, f"{len(pages)} pages, {words} words: merge or shorten one"


def test_a_rollout_executes_few_files():
    """An extended test compares the page with what a run executes."""
    parts = (ROOT / "docs/life_of_a_rollout.md").read_text().split("## What else runs")
    path, others = (set(re.findall(r"\(\.\./src/prime_rl/(\S+?\.py)", part)) for part in parts)
    assert len(path) <= 50 and len(path | others) <= 115, "a reader of one rollout opens too many files"


def test_every_script_is_in_the_readme():
    elsewhere = {"trainer", "vf-rl"}  # the README shows it under torchrun; another name of `rl`, in configs/aqua_rat
    assert set(commands((ROOT / "README.md").read_text())) >= SCRIPTS.keys() - elsewhere


def test_a_gap_in_a_page_is_seen(tmp_path):
    page = tmp_path / "page.md"
    text = (
        "# Title\n[a](gone.md) [b](#title) [c](#gone) `uv run --extra cpu nothing @ configs/none.toml` `src/gone.py`\n"
    )
    page.write_text(text)
    assert [*broken_links(page)] == ["gone.md leads nowhere", "#gone: page.md has no such heading"]
    assert (unknown_commands(page), missing_files(page)) == ({"nothing"}, {"configs/none.toml", "src/gone.py"})


def test_flags_of_the_memory_ladder_resolve():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    rows = [re.findall(r"`(--[^`]+)`", row) for row in re.findall(r"^\| \d \|.*$", page, re.MULTILINE)]
    assert len(rows) == 8
    for flag in (flag for row in rows for flag in row):
        if flag.startswith("--trainer."):
            value = ["1024"] if flag == "--trainer.model.seq-len" else []
            RLConfig.load(["--trainer-gpus", "2", "--orchestrator.env.id", "reverse_text", *flag.split(), *value])
        elif flag.startswith(("--data.", "--model.")):
            SFTConfig.load(["--device", "cuda", *flag.split()])
