"""Packages the Lambda function's code as a zip: the few modules it needs, without dependencies."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Final

import interlock
from interlock.archives import pack
from interlock.untrusted.runner.confinement import copy_programs

HANDLER: Final = "interlock.untrusted.runner.lambda_function.handler"
_OURS: Final = ("archives.py", "errors.py", "http/fetch.py", "untrusted/runner/lambda_function.py")


def write(out: Path) -> int:
    """Writes the zip and returns the number of files. Reproducible, so that deploying the same code changes nothing."""
    source = Path(interlock.__file__).parent
    with tempfile.TemporaryDirectory(prefix="interlock-package-") as folder:
        copy_programs(source, Path(folder))
        for name in _OURS:
            target = Path(folder) / "interlock" / name
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, target)
        return pack(Path(folder), out)
