"""What the pages say is there, and their programs run."""

import dataclasses
import re

import pytest
import typer

import corogen
from corogen import adapters, errors
from corogen.adapters.pipeline import _FOREIGN as _FOREIGN_ARGUMENTS
from corogen.config import _FOREIGN, EngineConfig
from corogen.outputs import EngineStats, Response, StepRecord
from corogen.params import _NOT_YET, ENGINE_DEFAULTS, GenerationConfig
from tests.docs.conftest import ANSWER
from tests.docs.pages import PAGES, ROOT, anchors, blocks, commands, links, prose, run_page

DOCS = ROOT / "docs"
#: pages whose programs ask a running server
OVER_HTTP = {"serving.md"}
WITH_CODE = [page for page in PAGES if blocks(page, "python") and page.name not in OVER_HTTP]

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def text(name):
    return (DOCS / name).read_text(encoding="utf-8")


def field_names(cls):
    return [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else list(cls._fields)


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_the_programs_of_a_page_run(page, scripted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(page)


def test_the_readme_prints_what_the_model_says(scripted, capsys):
    run_page(ROOT / "README.md")
    assert capsys.readouterr().out.splitlines() == [ANSWER] * 4


def test_the_programs_of_the_serving_page_run_against_a_server(scripted, capsys):
    pytest.importorskip("openai")
    from corogen import pipeline
    from tests.server.helpers import served

    with pipeline("demo") as pipe, served(pipe, served_model_names=("demo",)) as url:
        for block in blocks(DOCS / "serving.md", "python"):
            exec(block.text.replace("http://127.0.0.1:8000", url), names := {})
            if "client" in names:
                names["client"].close()
    assert capsys.readouterr().out == f"{ANSWER}\n{ANSWER}"


async def test_the_service_of_the_threads_page_answers_over_http(scripted):
    import httpx

    names = {}
    exec(
        next(block.text for block in blocks(DOCS / "threads-and-loops.md", "python") if "FastAPI" in block.text), names
    )
    app = names["app"]
    async with (
        names["lifespan"](app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http,
    ):
        reply = await http.post("/ask", params={"question": "What is the capital of France?"})
    assert reply.json() == {"text": ANSWER}


@pytest.mark.real_model
@pytest.mark.timeout(300)
def test_the_readme_runs_with_the_real_model(capsys, monkeypatch):
    monkeypatch.setitem(ENGINE_DEFAULTS, "max_new_tokens", 8)
    run_page(ROOT / "README.md")
    first, second, *others = capsys.readouterr().out.splitlines()
    assert "Paris" in first
    assert "Tokyo" in second
    assert others


@every_page
def test_every_link_leads_somewhere(page):
    for link in links(page):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert ROOT in target.parents, f"{link} leaves the repository"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {link}; there are {sorted(anchors(target))}"


def test_the_index_links_to_every_page():
    linked = {link.partition("#")[0] for link in links(DOCS / "index.md")}
    assert {page.name for page in DOCS.glob("*.md")} - {"index.md"} <= linked


@every_page
def test_every_fenced_block_is_closed_and_lines_are_short(page):
    source = page.read_text(encoding="utf-8")
    assert source.count("\n```") % 2 == 0
    for number, line in enumerate(source.splitlines(), 1):
        assert len(line) <= 120 or line.startswith("|"), f"{page.name}:{number} is too long"


@every_page
def test_a_page_has_one_title(page):
    assert len(re.findall(r"^# ", prose(page), re.MULTILINE)) == 1


@every_page
def test_every_command_is_one_that_the_command_line_knows(page):
    from corogen.adapters.cli.app import app

    for words in commands(page):
        command, context, rest = typer.main.get_command(app), None, words
        while hasattr(command, "resolve_command"):
            context = command.make_context("corogen", rest, parent=context)
            assert context.args or context._protected_args, words
            name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        command.make_context(name, rest, parent=context)


def test_every_public_name_is_on_some_page():
    everything = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    missing = [name for name in [*corogen.__all__, *adapters.__all__] if not re.search(rf"\b{name}\b", everything)]
    assert not missing


def test_every_error_is_on_the_failures_page_with_its_code():
    page = text("failures.md")
    for name, cls in vars(errors).items():
        if isinstance(cls, type) and issubclass(cls, errors.CorogenError):
            assert f"`{name}`" in page, name
            assert f"`{cls.code}`" in page, (name, cls.code)


def test_the_error_tree_is_the_one_in_the_code():
    drawn = re.findall(r"^([│├└─ ]*\w+)", blocks(DOCS / "failures.md", "")[0].text, re.MULTILINE)
    assert drawn == re.findall(r"^    ([│├└─ ]*\w+)", errors.__doc__.partition("::")[2], re.MULTILINE)


def test_every_path_on_the_architecture_page_exists():
    paths = re.findall(r"`((?:corogen|adapters)/[\w./]*)`", text("architecture.md"))
    assert len(paths) > 10
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_every_refused_argument_of_pipeline_is_on_the_migrating_page():
    missing = [name for name in _FOREIGN_ARGUMENTS if f"`{name}" not in text("migrating.md")]
    assert not missing


def test_every_setting_that_is_not_there_yet_is_on_the_limits_page_or_the_tuning_page():
    missing = [name for name in _NOT_YET if f"`{name}`" not in text("limits.md") + text("tuning.md")]
    assert not missing


@pytest.mark.parametrize(
    ("cls", "page"),
    [
        (EngineConfig, "tuning.md"),
        (GenerationConfig, "tuning.md"),
        (Response, "quickstart.md"),
        (EngineStats, "tuning.md"),
        (StepRecord, "tuning.md"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_every_field_is_listed(cls, page):
    missing = [name for name in field_names(cls) if f"`{name}`" not in text(page)]
    assert not missing


def test_the_defaults_on_the_tuning_page_are_the_real_ones():
    defaults = {f.name: f.default for f in dataclasses.fields(EngineConfig)} | ENGINE_DEFAULTS
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", text("tuning.md"), re.M))
    assert set(defaults) <= set(rows)
    for name, shown in rows.items():
        if name in defaults:
            assert repr(defaults[name]).replace("'", '"') == shown, name


def test_every_refused_setting_of_lmdeploy_is_on_the_migrating_page():
    page = text("migrating.md")
    missing = [name for name in (*_FOREIGN, *_NOT_YET, "thread_safe") if f"`{name}`" not in page]
    assert not missing
