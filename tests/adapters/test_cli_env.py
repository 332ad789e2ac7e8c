"""`corogen check-env`: bounded in time, without torch in this process, and honest about what is missing."""

import json

import pytest

from corogen.adapters.bench import machine
from corogen.adapters.cli import env
from tests.adapters.cli_helpers import corogen

NO_GPU = 'print(\'{"cuda": null, "gpus": []}\')'


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("COROGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(env, "_ASK_GPUS", NO_GPU)
    return tmp_path / "cache"


def test_the_table_names_versions_machine_and_cache(own_cache):
    done = corogen("check-env")
    assert done.exit_code == 0
    for words in ("python", "torch", "usable", "memory", "demo model", str(own_cache)):
        assert words in done.stdout


def test_json_holds_the_same(own_cache):
    found = json.loads(corogen("check-env", "--json").stdout)
    assert found["versions"]["torch"]
    assert found["cpus_usable"] >= 1
    assert (found["gpus"], found["cache"], found["cache_entries"]) == ([], str(own_cache), {})


def test_a_missing_package_is_none():
    assert machine.versions(("there-is-no-such-package",))["there-is-no-such-package"] is None


def test_what_is_not_there_and_need_not_be_says_so(monkeypatch, capsys):
    absent = {"torch": None, "ray": None}
    monkeypatch.setattr(env.machine, "versions", lambda packages: absent)
    env.show(env.facts())
    shown = capsys.readouterr().out
    assert "torch             missing\n" in shown
    assert "ray               not installed (optional: corogen[ray])\n" in shown


def test_cache_entries_have_sizes(own_cache):
    (own_cache / "models").mkdir(parents=True)
    (own_cache / "models" / "a.gguf").write_bytes(b"12345")
    (own_cache / "models" / "a.gguf.sha256").write_bytes(b"0" * 64)
    (own_cache / "converted" / "a-1").mkdir(parents=True)
    (own_cache / "converted" / "a-1" / "config.json").write_bytes(b"{}")
    assert env.cache_entries(own_cache) == {"converted/a-1": 2, "models/a.gguf": 5}


def test_the_demo_is_looked_for_in_the_cache_then_among_packages(own_cache, monkeypatch):
    monkeypatch.setattr(env.importlib.util, "find_spec", lambda name: None)
    assert env.demo_source(own_cache) == "download"
    monkeypatch.setattr(env.importlib.util, "find_spec", lambda name: object())
    assert env.demo_source(own_cache) == "package"
    (own_cache / "models").mkdir(parents=True)
    (own_cache / "models" / env.DEMO_FILE).touch()
    assert env.demo_source(own_cache) == "cache"


def test_gpus_are_listed(monkeypatch, capsys):
    gpu = {"name": "Big GPU", "memory": 2**37, "free": 2**36, "capability": "9.0"}
    monkeypatch.setattr(env, "_ASK_GPUS", f"print({json.dumps(json.dumps({'cuda': '13.0', 'gpus': [gpu]}))})")
    env.show(env.facts())
    assert "Big GPU, compute capability 9.0, 64.0 of 128.0 GiB free" in capsys.readouterr().out


def test_a_torch_that_hangs_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(env, "_ASK_GPUS", "import signal; signal.pause()")
    assert "did not answer" in env.gpus(timeout_s=0.2)["gpu_error"]


def test_a_torch_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(env, "_ASK_GPUS", "import there_is_no_torch")
    assert "there_is_no_torch" in env.gpus()["gpu_error"]
