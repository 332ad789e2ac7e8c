"""`corogen batch`, and `corogen chat` against a running server."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from corogen.adapters.batch_file import answer_file, requests_in, take_answered
from corogen.adapters.cli import batch as batch_module
from corogen.adapters.server import ServerSettings, make_app
from corogen.errors import ConfigError
from tests.adapters.cli_helpers import corogen
from tests.adapters.scripted_main import said, script_every_engine
from tests.server.helpers import CHAT, answering, endless, pipe_with_template, served

ROOT = Path(__file__).resolve().parents[2]


def line(number, text="hello", **more):
    body = {"messages": [{"role": "user", "content": text}], **more}
    return json.dumps({"custom_id": f"q{number}", "method": "POST", "url": CHAT, "body": body})


def answers(path):
    found = [json.loads(text) for text in path.read_text().splitlines()]
    return {answer["custom_id"]: answer["response"] for answer in found}


def text_of(response):
    return response["body"]["choices"][0]["message"]["content"]


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


class TestBatch:
    def test_every_request_is_answered(self, monkeypatch, files):
        script_every_engine(monkeypatch)
        source, target = files
        source.write_text("\n".join([*(line(i, f"number {i}") for i in range(9)), "", line(9, "x", temperature=5)]))
        done = corogen("batch", source, target, "--at-once", "4")
        assert done.exit_code == 1  # one was refused
        assert "9 answered, 1 failed, 0 were answered before" in done.stderr
        found = answers(target)
        assert {name: text_of(found[name]) for name in found if name != "q9"} == {
            f"q{i}": said(f"number {i}") for i in range(9)
        }
        assert found["q9"]["status_code"] == 400
        assert found["q9"]["body"]["error"]["param"] == "temperature"

    @pytest.mark.parametrize("odd", ['{"prompt": "\\ud800"}', '{"prompt": "x", "temperature": NaN}'])
    def test_an_odd_line_fails_alone(self, monkeypatch, files, odd):
        script_every_engine(monkeypatch)
        source, target = files
        lines = [line(0), f'{{"custom_id": "odd \\ud800", "url": "/v1/completions", "body": {odd}}}', line(2)]
        source.write_text("\n".join(lines))
        assert corogen("batch", source, target).exit_code == 1
        assert [r["status_code"] for r in answers(target).values()].count(400) == 1
        done = corogen("batch", source, target)
        assert "0 answered, 0 failed, 3 were answered before" in done.stderr

    def test_an_output_that_ends_within_a_character_is_gone_on_with(self, monkeypatch, files):
        script_every_engine(monkeypatch)
        source, target = files
        source.write_text(line(0))
        target.write_bytes(b'{"custom_id": "q0", "response": {"text": "\xc3')
        assert corogen("batch", source, target).exit_code == 0
        assert set(answers(target)) == {"q0"}

    def test_a_link_and_the_mode_of_an_output_stay(self, monkeypatch, files, tmp_path):
        script_every_engine(monkeypatch)
        source, target = files
        source.write_text(line(0))
        real = tmp_path / "real"
        real.write_text("cut")
        real.chmod(0o600)
        target.symlink_to(real)
        corogen("batch", source, target)
        assert target.is_symlink()
        assert set(answers(real)) == {"q0"}
        assert real.stat().st_mode & 0o777 == 0o600

    def test_what_is_no_regular_file_is_no_output(self, monkeypatch, files):
        script_every_engine(monkeypatch)
        source, target = files
        source.write_text(line(0))
        os.mkfifo(target)
        done = corogen("batch", source, target)
        assert done.exit_code == 1
        assert "no regular file" in done.stderr
        assert target.is_fifo()

    def test_goes_on_where_it_stopped(self, monkeypatch, files):
        script_every_engine(monkeypatch)
        source, target = files
        source.write_text("\n".join(line(i) for i in range(4)))
        corogen("batch", source, target, "-q")
        whole = target.read_text().splitlines(keepends=True)
        full = json.loads(whole[2])
        full["response"]["status_code"] = 429
        target.write_text("".join([whole[0], json.dumps(full) + "\n", whole[1][:40]]))
        done = corogen("batch", source, target)
        assert "3 answered, 0 failed, 1 were answered before" in done.stderr
        assert len(target.read_text().splitlines()) == 4
        assert set(answers(target)) == {"q0", "q1", "q2", "q3"}
        assert whole[0] in target.read_text()

    @pytest.mark.parametrize(
        "bad",
        [
            "{",
            "[]",
            '{"custom_id": "a"}',
            '{"custom_id": "a", "url": "/v1/embeddings", "body": {}}',
            '{"custom_id": "a", "url": "/v1/completions"}',
            '{"custom_id": "a", "url": "/v1/completions", "body": {"stream": true}}',
            line(0),
        ],
    )
    def test_a_bad_line_is_named_before_a_model_is_loaded(self, monkeypatch, files, bad):
        monkeypatch.setattr(batch_module, "open_pipeline", lambda *a, **k: pytest.fail("loaded"))
        files[0].write_text(f"{line(0)}\n{bad}\n")
        done = corogen("batch", *files)
        assert done.exit_code == 1
        assert "in.jsonl:2" in done.stderr

    def test_files_that_are_not_there_or_hold_something_else(self, files):
        assert corogen("batch", *files).exit_code == 1
        files[1].write_text("my diary\n")
        with pytest.raises(ConfigError, match="no file of answers"):
            take_answered(files[1])
        assert files[1].read_text() == "my diary\n"

    def test_only_so_many_are_under_way_and_lines_are_read_as_they_are_needed(self, files):
        files[0].write_text("\n".join(line(i, "abcde", max_tokens=20) for i in range(40)))
        with endless() as pipe:
            app = make_app(pipe, ServerSettings())
            counted = asyncio.run(answer_file(app, *files, at_once=5, on_answer=lambda ok: None))
            assert max(record.running for record in pipe.step_log(4096)) == 5
        assert counted == (40, 0)

    def test_the_requests_of_a_file_are_read_lazily(self, files):
        files[0].write_text(f"{line(0)}\nbroken\n")
        requests = requests_in(files[0], set())
        assert next(requests)["custom_id"] == "q0"


class TestChat:
    def chat(self, url, *options, stdin):
        return corogen("chat", "--url", url, *options, stdin=stdin)

    def test_turns_carry_the_conversation(self):
        template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}.{% endfor %}"
        with pipe_with_template(template=template, check=False) as pipe, served(pipe, api_keys=("k",)) as url:
            done = self.chat(url + "/v1", "-n", "12", "--api-key", "k", stdin="a\nb\n")
        first, second = done.stdout.splitlines()
        assert first == "ua.ua.ua.ua."
        assert second == f"ua.a{first}."[:4] + "ua.ua.ua"

    def test_refusals_are_told_and_the_conversation_goes_on(self):
        with answering("Fine.", check=False) as pipe, served(pipe) as url:
            done = self.chat(url, stdin="x" * 5000 + "\nhello\n")
        assert "the server says 400" in done.stderr
        assert done.stdout == "Fine.\n"

    def test_a_server_that_is_not_there(self):
        done = self.chat("http://127.0.0.1:9", stdin="hello\n")
        assert done.exit_code == 1
        assert "127.0.0.1:9" in done.stderr


def test_the_command_line_needs_no_web_packages_for_what_is_local():
    names = "('fastapi', 'httpx', 'uvicorn', 'prometheus_client')"
    source = f"import sys; import corogen.adapters.cli.app; print(*(m for m in {names} if m in sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert (done.stdout.strip(), done.returncode) == ("", 0)
