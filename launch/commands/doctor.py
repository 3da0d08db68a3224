"""`evrun doctor`."""

from __future__ import annotations

import json

import click

from evrun.expert_worker.wire.errors import DeviceError
from evrun.launch.options import json_option

PROMPT_TOKENS = 512


@click.command("doctor")
@click.option("--checkpoint", metavar="DIR", default=None, help="Default: the release's geometry, without its files.")
@click.option("--world", metavar="N", type=click.IntRange(1, 1024), default=None, help="Workers. [default: the cards found, else 4]")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--dense-dtype", type=click.Choice(["fp8", "bfloat16"]), default="fp8", show_default=True)
@click.option("--prompt-tokens", metavar="N", type=click.IntRange(2, 1 << 20), default=PROMPT_TOKENS, show_default=True)
@json_option
def command(checkpoint: str | None, world: int | None, device: str, dense_dtype: str, prompt_tokens: int, as_json: bool) -> int:
    """What this machine has, whether the plan fits, and how fast it will run, before anything is started.

    Rates are measured in some seconds; the prediction is arithmetic over them, and all its inputs are in the JSON.
    Exit code 4 when the plan does not fit.
    """
    from evrun.launch.config import RunConfig
    from evrun.launch.doctor.examine import examine
    from evrun.launch.doctor.table import print_examination
    from evrun.launch.screen import Loading, Terminal

    config = RunConfig(checkpoint=checkpoint or "", world=world, device=device, dense_dtype=dense_dtype)
    terminal = Terminal()
    try:
        found = examine(config, prompt_tokens, lambda what: terminal.loading(Loading(what, 0, 0, [])))
    finally:
        terminal.close()
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=1))
    else:
        print_examination(found)
    if found.fit.verdict == "no":
        raise DeviceError(f"the plan does not fit: {found.fit.reason}; lower --world, use a smaller --prefill-chunk, or add memory")
    return 0
