"""An examination for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evrun.launch.doctor.examine import Examination

GIB = 1 << 30
VERDICTS = {
    "fits": ("green", "fits: every routed expert stays in memory"),
    "streams": ("yellow", "streams: the routed experts do not all fit memory, the rest comes from disk"),
    "no": ("bold red", "does not fit"),
}


def print_examination(found: Examination) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    _section(console, "machine", machine_rows(found.machine))
    _section(console, "checkpoint", checkpoint_rows(found.checkpoint))
    _section(console, "plan", plan_rows(found.plan))
    if found.inputs is not None:
        _section(console, "measured", rate_rows(found.inputs.to_json()["rates"]))
    colour, words = VERDICTS[found.fit.verdict]
    console.print(Text(f"{words} ({found.fit.reason})", colour))
    if found.prediction is not None:
        p = found.prediction
        console.print(Text(f"decode   {p.decode_ms:.4g} ms per token, {1e3 / p.decode_ms:.3g} tokens/s: {_parts(p.decode_parts_ms)}"))
        console.print(Text(f"prefill  {p.prefill_ms:.4g} ms per token, {1e3 / p.prefill_ms:.3g} tokens/s: {_parts(p.prefill_parts_ms)}"))
    if found.cold_start and found.cold_start["bytes"]:
        cold = found.cold_start
        size = _gib(int(cold["bytes"]))
        console.print(Text(f"not in memory yet: {size} of rows, {cold['seconds']:.1f} s to read; until then tokens take longer"))
    for help_ in found.helps[:3]:
        console.print(Text(f"would help: {help_['change']}: {help_['decode_ms']:.4g} ms, {help_['saves_percent']:.0f} % less"))


def _section(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    console.print(table)


def machine_rows(m: dict[str, Any]) -> list[tuple[str, str]]:
    cpu, memory = m["cpu"], m["memory"]
    rows = [("cpu", f"{cpu['model']}; {len(cpu['cores'])} cores to use; {cpu['note']}")]
    rows.append(("kernels", ", ".join(k["name"] if k["supported"] else f"{k['name']} (not here: {k['reason']})" for k in cpu["kernels"])))
    for node in m["numa_nodes"]:
        size = f"{_gib(node['free_bytes'])} of {_gib(node['memory_bytes'])} free"
        rows.append(("numa", f"node {node['node']}: {len(node['cpus'])} CPUs, {size}"))
    limit = memory["locked_limit_bytes"]
    locked = "no limit" if limit is None else _gib(limit) + (", which does not hold root" if memory["root_ignores_limit"] else "")
    size = f"{_gib(memory['available_bytes'])} available of {_gib(memory['total_bytes'])}"
    group = memory["cgroup_limit_bytes"]
    limited = f", control group limits it to {_gib(group)}, page cache included" if group else ""
    rows.append(("memory", f"{size}, page cache {_gib(memory['page_cache_bytes'])}{limited}"))
    rows.append(("ulimit -l", locked))
    for card in m["cards"]:
        link = f"PCIe {card['link_generation']} x{card['link_width']} (now {card['link_generation_now']} x{card['link_width_now']})"
        capability = ".".join(map(str, card["capability"] or ["?"]))
        size = f"{_gib(card['free_bytes'])} of {_gib(card['memory_bytes'])} free"
        why = m["unfit_cards"].get(card["uuid"])
        words = f"{card['name']} {card['uuid']}, {capability}, {size}, {link}"
        rows.append((f"card {card['index']}", f"{words}; cannot serve: {why}" if why else words))
    if m["no_card"]:
        rows.append(("cards", f"none: {m['no_card']}"))
    else:
        rows.append(("MPS", "runs" if m["mps"]["running"] else "does not run; two processes on one card would take turns"))
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in m["versions"].items() if version)))
    return rows


def checkpoint_rows(c: dict[str, Any]) -> list[tuple[str, str]]:
    size = f"{c['layers']} layers x {c['experts']} experts, {_gib(c['expert_bytes'])} of rows"
    rows = [("of", c["directory"] or "none given: the release's geometry"), ("size", size)]
    share = c["resident_expert_percent"]
    if c["directory"]:
        rows.append(("in the page cache", "the system does not tell" if share is None else f"{share:g} % of the experts' bytes"))
    return rows


def plan_rows(p: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("coordinator", f"{p['coordinator']['device']}, {p['coordinator']['threads']} thread(s) on cores {p['coordinator']['cores']}")]
    if p["cpu_kernel"]:
        rows.append(("CPU kernel", p["cpu_kernel"]))
    for rank, rung in zip(p["ranks"], p["rung"], strict=True):
        cause = f"; no card: {rank['why_no_card']}" if rank["why_no_card"] else ""
        rows.append((f"rank {rank['rank']}", f"{rank['device']}, rung {rung}, {rank['threads']} thread(s) on cores {rank['cores']}{cause}"))
    return rows


def rate_rows(r: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    if r["experts"]:
        rate = _rate(r["experts"]["single_bytes_per_s"])
        rows.append(("routed experts, CPU", f"{rate} for one token, {r['expert_cores']} core(s) together"))
    for name, part in (("attention etc.", "attention"), ("shared expert", "shared"), ("head", "head")):
        rows.append((name, f"{_rate(r[part]['single_bytes_per_s'])} for one token"))
    rows.append(("empty layer call", f"{r['call_s'] * 1e6:.0f} us"))
    if r["cold_bytes_per_s"]:
        rows.append(("rows from disk", f"{_rate(r['cold_bytes_per_s'])} ({r['cold_source']})"))
    for uuid, card in r["cards"].items():
        fast, slow = card["registered_bytes_per_s"], card["arena_bytes_per_s"]
        registered = f"registered {_rate(fast)} ({card['registered_how']})" if fast else f"no registered rung: {card['registered_how']}"
        kernel = f"kernels {_rate(card['experts']['single_bytes_per_s'])}"
        rows.append((f"card {uuid[:12]}", f"{registered}, arena {_rate(slow)}, {kernel}, {_gib(card['cache_bytes'])} for rows"))
    rows += [(f"card {uuid[:12]}", f"not measured: {why}") for uuid, why in r["failed_cards"].items()]
    return rows


def _parts(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {ms:.3g}" for name, ms in parts.items() if ms)


def _gib(count: int | None) -> str:
    return "?" if count is None else f"{count / GIB:.2f} GiB"


def _rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{bytes_per_s / 1e9:.3g} GB/s"
