"""The code of the Lambda function as a zip: the few modules that it needs, and nothing that has to be installed."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Final

import interlock
from interlock.archives import pack
from interlock.runner.confinement import copy_programs

HANDLER: Final = "interlock.runner.lambda_function.handler"
_OURS: Final = ("archives.py", "errors.py", "runner/lambda_function.py")


def write(out: Path) -> int:
    """How many files. The same bytes each time, so that a deploy of what is there changes nothing."""
    source = Path(interlock.__file__).parent
    with tempfile.TemporaryDirectory(prefix="interlock-package-") as folder:
        copy_programs(source, Path(folder))
        for name in _OURS:
            shutil.copyfile(source / name, Path(folder) / "interlock" / name)
        return pack(Path(folder), out)
