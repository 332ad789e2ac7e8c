"""`corogen` with a scripted model behind every name: `python -m tests.server.serve_main serve demo ...`."""

import pytest

from corogen.adapters.cli import main
from tests.adapters.scripted_main import script_every_engine

if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as monkeypatch:
        script_every_engine(monkeypatch, step_time_s=0.002)
        main()
