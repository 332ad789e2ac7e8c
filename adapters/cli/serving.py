"""The one place where commands make a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from corogen.adapters.cli.console import StartupView
from corogen.config import EngineConfig

if TYPE_CHECKING:
    from corogen.adapters.pipeline import Pipeline


def open_pipeline(model: str, config: EngineConfig, *, quiet: bool = False) -> tuple[Pipeline, dict[str, float]]:
    """Start a pipeline while its start-up phases are shown. Returns it with the seconds of each phase."""
    from corogen.adapters.pipeline import Pipeline

    with StartupView(model, quiet=quiet) as view:
        pipe = Pipeline(model, backend_config=config, progress=view)
    return pipe, view.seconds
