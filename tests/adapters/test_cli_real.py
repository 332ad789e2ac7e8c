"""The command line as a process, with the demo model: an answer, and Ctrl-C at several moments."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real_model

COMMAND = [sys.executable, "-m", "corogen"]


def start(*arguments):
    return subprocess.Popen(
        [*COMMAND, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip


def descendants(pid):
    """Process ids of the children of `pid`."""
    listed = Path("/proc").glob(f"{pid}/task/*/children")
    return [int(child) for file in listed for child in file.read_text().split()]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def test_a_question_is_answered_on_stdout_and_figures_go_to_stderr():
    done = subprocess.run(
        [*COMMAND, "run", "What is the capital of France?"], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")
    assert "Paris" in done.stdout
    first, last = done.stderr.splitlines()
    assert first.startswith("loading demo")
    assert "tok/s" in last


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for child processes in /proc")
def test_ctrl_c_during_an_answer_leaves_no_process_behind():
    process = start("run", "Write a very long story about a river.", "-n", "1500")
    assert process.stdout.read(5)
    workers = descendants(process.pid)
    assert workers
    process.send_signal(signal.SIGINT)
    _, words = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in words
    assert not any(map(alive, workers))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for child processes in /proc")
def test_ctrl_c_while_the_model_is_loaded_is_as_clean():
    process = start("run", "Hello", "--log-level", "debug")
    for line in process.stderr:
        if "start-up: import" in line:  # the worker's first word
            break
    workers = descendants(process.pid)
    assert workers
    process.send_signal(signal.SIGINT)
    out, words = process.communicate()
    assert not any(map(alive, workers))
    assert (process.returncode, out) == (130, "")
    own = [line for line in words.splitlines() if not line.startswith("DEBUG")]  # those are the worker's last words
    assert not any("Traceback" in line for line in own)


@pytest.mark.slow
def test_ctrl_c_in_a_chat_stops_the_answer_and_the_chat_goes_on():
    process = start("chat", "-n", "400")
    process.stdin.write("Write a very long story about a river.\n")
    process.stdin.flush()
    assert process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    out, words = process.communicate("What is the capital of France?\n/exit\n")
    assert process.returncode == 0, words
    assert "(stopped)" in words
    assert "Traceback" not in words
    assert out.strip()


def test_a_wrong_model_is_one_line():
    done = subprocess.run([*COMMAND, "run", "-q", "-m", "./no-such-model", "x"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert "no-such-model" in done.stderr
