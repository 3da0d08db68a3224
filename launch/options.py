"""Click options made from the config dataclasses, so that each option, its help and its default stand once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from evrun.launch import settings
from evrun.launch.config import DEFAULT_NAME
from evrun.launch.settings import Choice, Switch, Texts

F = Callable[..., Any]


def options_of(cls: type[Any]) -> Callable[[F], F]:
    """One option for each setting of the dataclass, in its order; values stay as written (`launch.settings` parses them)."""

    def decorate(function: F) -> F:
        for name, (declared, default) in reversed(settings.settings_of(cls).items()):
            kind = declared.kind
            shown = f" [default: {default}]" if not isinstance(default, bool) and default not in (None, (), "") else ""
            given: dict[str, Any] = {"help": declared.help + shown, "hidden": declared.hidden}
            if isinstance(kind, Switch):
                given.update(is_flag=True, default=False)
            elif isinstance(kind, Texts):
                given.update(multiple=True, metavar=kind.metavar)
            else:
                metavar = f"[{'|'.join(kind.options)}]" if isinstance(kind, Choice) else kind.metavar
                given.update(default=None, metavar=metavar)
            function = click.option(settings.flag(name), name, **given)(function)
        return function

    return decorate


config_option = click.option("--config", metavar="FILE.toml", default=None, help="Settings of a file; flags and EVRUN_* go before it.")
name_option = click.option("--name", metavar="NAME", default=None, help=f"Name of the run. [default: {DEFAULT_NAME}]")
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object.")
