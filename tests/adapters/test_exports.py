"""What can be imported, and at what price."""

import importlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

import corogen
import corogen.adapters

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("module", [corogen, corogen.adapters])
def test_public_names_are_sorted_unique_and_there(module):
    names = module.__all__
    assert len(set(names)) == len(names)
    assert list(names) == sorted(names, key=lambda name: (name.isupper(), name)) or list(names) == sorted(names)
    for name in names:
        assert getattr(module, name) is not None
        assert name in dir(module)


@pytest.mark.parametrize("module", [corogen, corogen.adapters])
def test_an_unknown_name_is_an_attribute_error(module):
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018
    assert not hasattr(module, "no_such_name")


def test_every_error_is_public():
    errors = importlib.import_module("corogen.errors")
    tree = {n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, errors.CorogenError)}
    assert tree <= set(corogen.__all__)


def run(source):
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), time.perf_counter() - start


def test_import_is_quick_and_pulls_in_nothing_heavy():
    code = "import sys, time; t = time.perf_counter(); import corogen; d = time.perf_counter() - t; "
    out, _ = run(
        code + "print(d, *(m for m in ('torch', 'transformers', 'tokenizers', 'asyncio') if m in sys.modules))"
    )
    seconds, *heavy = out.split()
    assert float(seconds) < 0.2
    assert not heavy


def test_a_folder_of_that_name_beside_a_script_is_not_taken_for_the_package(tmp_path):
    """The clone itself is such a folder, for scripts beside it."""
    (tmp_path / "corogen").mkdir()
    (tmp_path / "script.py").write_text("import corogen; from corogen import pipeline; print(corogen.__file__)")
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == corogen.__file__, done.stderr


def test_a_pipeline_needs_no_torch_in_this_process():
    out, _ = run(
        "import sys; from tests.adapters.helpers import make_pipe; pipe = make_pipe(); pipe.infer('x'); pipe.close(); "
        "print(*(m for m in ('torch', 'transformers') if m in sys.modules))"
    )
    assert out == ""


def test_adapters_live_in_one_place():
    from corogen.adapters.pipeline import Pipeline

    assert Pipeline is corogen.Pipeline is corogen.adapters.Pipeline
    assert (ROOT / "corogen" / "adapters").resolve() == ROOT / "adapters"
