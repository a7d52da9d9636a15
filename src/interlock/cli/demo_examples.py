"""What the demo plays with: files of `examples/`."""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def example(name: str) -> Path:
    """Of the installed package, or of the repository that it runs from."""
    installed = Path(str(resources.files("interlock"))) / "examples" / name
    return installed if installed.exists() else Path(__file__).parents[3] / "examples" / name


def drawn(text: str) -> str:
    """A DAG's file, as a drawing."""
    from interlock.dags import text as drawing
    from interlock.dags.reading import Vocabulary, read
    from interlock.settings import load

    return drawing.draw(read(text.encode(), "demo.yaml", Vocabulary.of(load())))
