"""The corpus of attack statements and honest statements, stored as data."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

_FOLDER: Final = Path(__file__).parent


class Attack(Struct, frozen=True):
    """A statement. The test replaces `{canary}`, `{other}`, `{granted}`, `{out}`, `{folder}`, `{port}` in its text."""

    name: str
    kind: str
    why: str
    sql: str

    def text(self, places: dict[str, object]) -> str:
        text = self.sql
        for name, value in places.items():
            text = text.replace(f"{{{name}}}", str(value))
        return text


class Honest(Struct, frozen=True):
    sql: str


ATTACKS: Final = [
    msgspec.json.decode(line, type=Attack) for line in (_FOLDER / "attacks.jsonl").read_bytes().splitlines()
]
HONEST: Final = [
    msgspec.json.decode(line, type=Honest).sql for line in (_FOLDER / "honest.jsonl").read_bytes().splitlines()
]
