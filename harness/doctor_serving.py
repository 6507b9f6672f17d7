"""Whether SGLang would find the plug-in, and what the settings say."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from typing import Any

from sglang_glue.settings import Settings, SettingsError

GROUP = "sglang.srt.plugins"
OURS = "sglang_glue"


@dataclass(frozen=True)
class Serving:
    """`entry` is our entry point as `name = target`, None where no installed package offers it."""

    entry: str | None
    others: list[str]
    mode: str | None
    settings_error: str | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        seen = f"visible ({self.entry})" if self.entry else f"not visible: no entry point in {GROUP} is ours"
        if self.settings_error:
            setting = f"settings: {self.settings_error}"
        else:
            setting = f"mode: {self.mode}" + (" (nothing is patched)" if self.mode == "off" else "")
        return [f"plug-in: {seen}", setting, *(f"other plug-in: {other}" for other in self.others)]


def look_at_serving() -> Serving:
    """Read entry points and the environment; imports no SGLang."""
    entries = {f"{e.name} = {e.value}" for e in entry_points(group=GROUP)}
    ours = sorted(entry for entry in entries if entry.split(" = ")[1].startswith(OURS))
    others = sorted(entries - set(ours))
    try:
        return Serving(ours[0] if ours else None, others, Settings.from_env().mode.value, None)
    except SettingsError as error:
        return Serving(ours[0] if ours else None, others, None, str(error))
