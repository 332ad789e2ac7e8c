"""`corogen run`: what it asks, what it prints where, and how it ends."""

import json
import subprocess
import sys

import pytest
import typer

from corogen.adapters.cli import run as run_module
from corogen.errors import EngineClosed, ModelNotFound
from tests.adapters.cli_helpers import ScriptedPipeline, corogen, pieces, use


@pytest.fixture
def pipe(monkeypatch):
    return use(monkeypatch, ScriptedPipeline())


def test_only_the_answer_goes_to_stdout(pipe):
    done = corogen("run", "What is the capital of France?")
    assert (done.exit_code, done.stdout) == (0, "Paris\n")
    assert "2 tokens" in done.stderr
    assert "tok/s" in done.stderr
    assert pipe.asked[0][0] == "What is the capital of France?"
    assert (pipe.closed, pipe.streams[0].left) == (1, True)


def test_quiet_leaves_stderr_empty(pipe):
    done = corogen("run", "-q", "Hello")
    assert (done.stdout, done.stderr) == ("Paris\n", "")


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_the_question_comes_from_stdin(pipe, arguments):
    corogen("run", *arguments, stdin="two\nlines\n")
    assert pipe.asked[0][0] == "two\nlines"


@pytest.mark.parametrize(("stdin", "words"), [("", "no question"), ("\n \n", "no question"), (b"\xff\xfe", "utf-8")])
def test_a_stdin_without_a_question_is_a_usage_error(pipe, stdin, words):
    done = corogen("run", stdin=stdin)
    assert (done.exit_code, pipe.asked) == (2, [])
    assert words in done.stderr


@pytest.mark.parametrize("question", ["", " ", "\n\t"])
def test_an_empty_question_is_a_usage_error_before_anything_is_loaded(pipe, question):
    done = corogen("run", question)
    assert (done.exit_code, pipe.opened_with) == (2, None)
    assert "empty" in done.stderr


def test_no_question_on_a_terminal_is_a_usage_error(monkeypatch):
    monkeypatch.setattr(run_module.sys.stdin, "isatty", lambda: True, raising=False)
    with pytest.raises(typer.BadParameter, match="give a question"):
        run_module.question_from(None)


def test_without_sampling_options_nothing_is_set(pipe):
    corogen("run", "x")
    assert pipe.asked[0][1].explicit() == {}


@pytest.mark.parametrize(
    ("option", "value", "field", "expected"),
    [
        ("--temperature", "0.5", "temperature", 0.5),
        ("--top-p", "0.9", "top_p", 0.9),
        ("--top-k", "5", "top_k", 5),
        ("--seed", "7", "random_seed", 7),
    ],
)
def test_a_sampling_option_implies_sampling(pipe, option, value, field, expected):
    corogen("run", "x", option, value)
    assert pipe.asked[0][1].explicit() == {"do_sample": True, field: expected}


def test_length_and_stop_strings_do_not_imply_sampling(pipe):
    corogen("run", "x", "-n", "9", "--stop", "a", "--stop", "b")
    assert pipe.asked[0][1].explicit() == {"max_new_tokens": 9, "stop_words": ["a", "b"]}


def test_engine_options_reach_the_config(pipe):
    corogen(
        "run", "x", "-m", "some/model", "--session-len", "64", "--num-threads", "1", "--device-type", "cpu",
        "--max-batch-size", "3", "--revision", "main", "--dtype", "float32",
    )  # fmt: skip
    model, config = pipe.opened_with
    assert (model, config.session_len, config.num_threads, config.device_type) == ("some/model", 64, 1, "cpu")
    assert (config.max_batch_size, config.revision, config.dtype) == (3, "main", "float32")


def test_a_system_message_makes_a_chat(pipe):
    corogen("run", "x", "--system", "Be brief.")
    assert pipe.asked[0][0] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}]


def test_raw_text_goes_without_a_template(pipe):
    corogen("run", "Once upon", "--raw")
    assert (pipe.asked[0][0], pipe.asked[0][2]) == ("Once upon", False)


def test_raw_and_system_exclude_each_other(pipe):
    done = corogen("run", "x", "--raw", "--system", "y")
    assert done.exit_code == 2
    assert "--system" in done.stderr
    assert not pipe.asked


def test_json_is_one_object(pipe):
    done = corogen("run", "x", "--json")
    found = json.loads(done.stdout)
    assert (found["text"], found["token_ids"], found["finish_reason"]) == ("Paris", [101, 102], "stop")
    assert found["startup_s"] == {"load": 0.5}
    assert found["timing"]["first_token_s"] <= found["timing"]["total_s"]


def test_an_error_is_one_message_and_exit_code_1(monkeypatch):
    use(monkeypatch, ScriptedPipeline(ModelNotFound("there is no folder 'x'")))
    done = corogen("run", "x")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "corogen: there is no folder 'x'\n"


def test_an_error_on_the_way_keeps_what_was_shown(monkeypatch):
    pipe = use(monkeypatch, ScriptedPipeline([*pieces("Pa", "ri")[:1], EngineClosed("the engine is closed")]))
    done = corogen("run", "x")
    assert (done.exit_code, done.stdout) == (1, "Pa")
    assert (done.stderr, pipe.closed) == ("corogen: the engine is closed\n", 1)


def test_debug_shows_the_traceback(monkeypatch):
    use(monkeypatch, ScriptedPipeline(EngineClosed("closed")))
    assert "Traceback" in corogen("run", "x", "--debug").stderr


def test_ctrl_c_ends_with_130_and_closes_everything(monkeypatch):
    pipe = use(monkeypatch, ScriptedPipeline([*pieces("Pa", "ris")[:1], KeyboardInterrupt()]))
    done = corogen("run", "x")
    assert (done.exit_code, done.stdout) == (130, "Pa")
    assert done.stderr == "stopped\n"
    assert (pipe.closed, pipe.streams[0].left) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rnu", "x"], "run"),
        (["run", "x", "--temprature", "1"], "--temperature"),
        (["run", "x", "--temperature", "hot"], "--temperature"),
        (["run", "x", "--top-p", "1.5"], "--top-p"),
        (["run", "x", "--dtype", "int8"], "float16"),
        (["run", "x", "--device-type", "tpu"], "cuda"),
        (["run", "x", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["run", "x", "y"], "y"),
        (["bench", "throughput", "--peer", "vllm"], "continuous"),
        (["bench", "throughput", "--compare", "transformers"], "--ignore-eos"),
    ],
)
def test_usage_errors_name_what_is_wrong(pipe, arguments, words):
    done = corogen(*arguments)
    assert done.exit_code == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 5
    assert not pipe.asked


def test_help_and_version_are_readable():
    assert corogen("--version").stdout.startswith("corogen ")
    for command in ([], ["run"], ["chat"], ["check-env"], ["bench"], ["bench", "throughput"]):
        done = corogen(*command, "--help")
        assert (done.exit_code, done.stderr) == (0, "")
        assert "Usage: corogen" in done.stdout


@pytest.mark.parametrize("command", [["run"], ["bench", "throughput"], ["bench", "callers"]])
def test_every_option_has_a_help_text(command):
    import typer.main

    from corogen.adapters.cli.app import app

    found = typer.main.get_command(app)
    for name in command:
        found = found.commands[name]
    assert not [option.name for option in found.params if not option.help]


def test_help_names_nothing_that_is_not_there():
    assert "corogen bench -h" not in corogen("bench", "--help").stdout
    assert "--compare" not in corogen("bench", "callers", "--help").stdout


def test_a_reader_that_leaves_ends_the_command_quietly():
    code = (
        "from corogen.adapters.cli.console import guarded\n"
        "from corogen.adapters.cli.options import OutputOptions\n"
        "with guarded(OutputOptions()):\n"
        "    while True: print('x' * 1000, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    words = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), words) == (141, b"")


def test_the_command_line_imports_neither_torch_nor_transformers():
    code = (
        "import sys\n"
        "import corogen.adapters.cli.app, corogen.adapters.cli.run, corogen.adapters.cli.chat\n"
        "import corogen.adapters.bench.throughput, corogen.adapters.bench.callers, corogen.adapters.cli.env\n"
        "print([m for m in ('torch', 'transformers', 'rich') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_a_terminal_sees_bars_and_a_pipe_one_line(monkeypatch, capsys):
    from corogen.adapters.cli.console import StartupView
    from corogen.wire.messages import StartPhase

    def start():
        with StartupView("demo") as view:
            for phase in (StartPhase("download", 1, 200_000), StartPhase("download", 200_000, 200_000)):
                view(phase)
            view(StartPhase("load", 3, 30))
        return view

    assert list(start().seconds) == ["download", "load"]
    assert capsys.readouterr() == ("", "loading demo ...\n")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    start()
    out, err = capsys.readouterr()
    assert out == ""
    assert "reading the weights" in err
