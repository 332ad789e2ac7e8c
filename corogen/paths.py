"""Where corogen keeps files of its own."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_root() -> Path:
    """The folder of downloaded and converted models: `COROGEN_CACHE`, else the user's cache folder for corogen."""
    chosen = os.environ.get("COROGEN_CACHE")
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("corogen")
