"""The demo model's real weights are here too."""

from tests.real.conftest import demo_folder, demo_gguf  # noqa: F401
