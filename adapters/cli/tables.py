"""Results of measurements as tables on stdout. Each says first what was measured, and last on what."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def show(name: str, result: dict[str, Any]) -> None:
    """Print the result of the measurement `name`."""
    console = Console(highlight=False, soft_wrap=True)
    for part in _LAYOUTS[name](result):
        console.print(part)
    console.print(setting_line(result["setting"]), style="dim")


def _table(title: str, columns: Sequence[str], rows: Iterable[Iterable[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=any(columns))
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table


def number(value: float | None, digits: int = 1) -> str:
    """A figure for a table; "-" where there is none."""
    return "-" if value is None or math.isnan(value) else f"{value:,.{digits}f}"


def spread_words(figures: dict[str, Any], digits: int = 1) -> list[str]:
    """Median, extremes and interval as cells."""
    low, high = figures["interval_90"]
    return [
        number(figures["median"], digits),
        f"{number(figures['min'], digits)} .. {number(figures['max'], digits)}",
        f"{number(low, digits)} .. {number(high, digits)}",
    ]


def _generation(result: dict[str, Any]) -> list[Any]:
    requests = "one request alone" if result["requests"] == 1 else f"{result['requests']} requests at once"
    title = (
        f"{result['model']}: {requests}, {result['input']}, {result['output_len']} new tokens, "
        f"{result['rounds']} rounds after a warm-up"
    )
    rows = [["corogen tok/s", *spread_words(result["tok_per_s"])]]
    peer = result.get("peer")
    if peer is not None:
        rows.append([f"transformers ({peer['kind']}) tok/s", *spread_words(peer["tok_per_s"])])
        rows.append(["ratio within a pair", *spread_words(result["ratio"], 3)])
    parts: list[Any] = [_table(title, ["", "median", "min .. max", "90 % interval of the median"], rows)]
    if peer is not None:
        parts.append(_peer_line(result))
    times = [("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms")]
    rows = [[name, *(number(v) for v in result[key].values())] for name, key in times]
    parts.append(_table("milliseconds", ["", "p50", "p90", "p99"], rows))
    parts.append(f"tokens a piece: {number(result['tokens_per_piece'], 2)}")
    if "floor" in result:
        parts.append(_floor_line(result["floor"]))
    return parts


def _floor_line(floor: dict[str, Any]) -> str:
    return (
        f"{floor['share']:.0%} of what {floor['bytes_per_s'] / 1e12:.2f} TB/s and {floor['flops_per_s'] / 1e12:.0f} "
        f"TFLOP/s allow over all; between tokens {floor['step_share']:.0%} of {floor['step_ms']:.2f} ms"
    )


def _peer_line(result: dict[str, Any]) -> str:
    peer = result["peer"]
    cores = (", ".join(f"{used:.2f}" for used in side["cores_used"]) for side in (result, peer))
    lines = [
        "ratios in order: " + ", ".join(f"{ratio:.3f}" for ratio in result["ratio"]["values"]),
        "cores used in order: ours {}; theirs {}".format(*cores),
        f"CPU seconds of the side that waited, at most: ours {peer['our_cpu_s_while_peer_ran']:.3f}, "
        f"theirs {peer['peer_cpu_s_while_ours_ran']:.3f}",
        f"{peer['same_token_share']:.1%} of the tokens come before a first difference between the two",
    ]
    return "\n".join(lines)


def _callers(result: dict[str, Any]) -> list[Any]:
    title = (
        f"{result['model']}: {result['requests']} requests of {result['output_len']} new tokens by each kind of "
        f"caller, medians of {result['rounds']} rounds; bridges with {result['pairs']} queue pairs"
    )
    columns = ["", "seconds", "tok/s", "ITL p99 ms", "answers within s", "CPU s here", "CPU s workers"]
    names = dict.fromkeys(one["caller"] for one in result["callers"])
    rows = [_caller_row([one for one in result["callers"] if one["caller"] == name]) for name in names]
    parts: list[Any] = [_table(title, columns, rows)]
    if result["idle"]:
        columns = ["idle, open:", "seconds", "CPU s here", "CPU s workers", "wake-ups of the engine thread"]
        parts.append(_table("nothing to do", columns, [_idle_row(one) for one in result["idle"]]))
    return parts


def _caller_row(rounds: list[dict[str, Any]]) -> list[str]:
    """Medians over the rounds of one caller."""

    def middle(*path: str, digits: int = 2) -> str:
        return number(statistics.median(_at(one, path) for one in rounds), digits)

    spread = statistics.median(one["completion_s"]["last"] - one["completion_s"]["first"] for one in rounds)
    return [
        rounds[0]["caller"],
        middle("wall_s"),
        middle("tok_per_s", digits=1),
        middle("itl_ms", "p99", digits=1) if rounds[0]["itl_ms"] else "-",
        number(spread, 2),
        middle("process_cpu_s"),
        middle("worker_cpu_s"),
    ]


def _at(value: Any, path: Iterable[str]) -> float:
    for name in path:
        value = value[name]
    return float(value)


def _idle_row(one: dict[str, Any]) -> list[str]:
    switches = one["engine_thread_switches"]
    workers = sum(one["worker_cpu_s"].values())
    return [
        one["open"],
        number(one["seconds"]),
        number(one["process_cpu_s"], 4),
        number(workers, 4),
        "-" if switches is None else str(switches),
    ]


def _steps(result: dict[str, Any]) -> list[Any]:
    rows = [
        ["engine thread, CPU ms a step", number(result["engine_ms_per_step"], 3)],
        ["the scripted device itself, not counted above, ms", number(result["device_ms_per_step"], 3)],
        ["share of the scripted step rate", f"{result['rate_share']:.2%}"],
        ["consumers, CPU ms a step", number(result["consumer_ms_per_step"], 3)],
        ["tokens a piece", number(result["tokens_per_piece"], 2)],
    ]
    title = f"{result['streams']} streams, {result['steps']} full steps of {number(result['step_time_ms'])} ms"
    return [_table(title, ["", ""], rows)]


def _serve(result: dict[str, Any]) -> list[Any]:
    rate = "all at once" if result["rate"] is None else f"{result['rate']:g} requests a second"
    limit = "" if result["concurrency"] is None else f", {result['concurrency']} at a time"
    title = f"{result['model']} at {result['url']}: {result['requests']} requests, {rate}{limit}"
    rows = [
        ["failed", str(result["failed"])],
        ["seconds", number(result["seconds"], 2)],
        ["requests/s", number(result["requests_per_s"], 2)],
        ["output tok/s", number(result["output_tok_per_s"])],
        ["total tok/s", number(result["total_tok_per_s"])],
        ["tokens a piece", number(result["tokens_per_piece"], 2)],
        ["CPU share of this client", f"{result['client_cpu_share']:.0%}"],
    ]
    if "goodput_per_s" in result:
        bounds = ", ".join(f"{name} {bound:g} ms" for name, bound in result["objectives_ms"].items())
        rows.append([f"good requests/s ({bounds})", number(result["goodput_per_s"], 2)])
    parts: list[Any] = [_table(title, ["", ""], rows)]
    names = [("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms"), ("whole", "e2e_ms")]
    rows = [[name, *(number(value) for value in result[key].values())] for name, key in names]
    parts.append(_table("milliseconds", ["", "mean", "p50", "p90", "p99"], rows))
    if result["first_failure"]:
        parts.append(f"the first failure: {result['first_failure']}")
    return parts


def _http(result: dict[str, Any]) -> list[Any]:
    title = f"{result['model']}: HTTP against the pipeline in the same process, {result['pairs']} alternating pairs"
    many = f"{result['requests']} requests of {result['output_len']} new tokens at once"
    rows = [
        ["one request alone, TTFT ms: in process", *spread_words(result["ttft_ms"]["in_process"])],
        ["over HTTP", *spread_words(result["ttft_ms"]["http"])],
        ["added within a pair, ms", *spread_words(result["ttft_added_ms"], 2)],
        [f"{many}, seconds: in process", *spread_words(result["seconds"]["in_process"], 2)],
        ["over HTTP", *spread_words(result["seconds"]["http"], 2)],
        ["ratio within a pair", *spread_words(result["seconds_ratio"], 3)],
    ]
    return [_table(title, ["", "median", "min .. max", "90 % interval of the median"], rows)]


def _spin(result: dict[str, Any]) -> list[Any]:
    title = (
        f"{result['streams']} streams beside a spinning Python thread, {result['rounds']} pairs of rounds, "
        f"switch interval {number(result['switch_interval_ms'])} ms"
    )
    columns = ["scripted step, ms", "share of the rate alone", "beside the thread", "left", "min .. max"]
    rows = [
        [
            number(row["step_ms"]),
            *(number(row[name]["median"], 3) for name in ("quiet", "beside", "kept")),
            f"{number(row['kept']['min'], 3)} .. {number(row['kept']['max'], 3)}",
        ]
        for row in result["rows"]
    ]
    return [_table(title, columns, rows)]


def _tasks(result: dict[str, Any]) -> list[Any]:
    rows, columns = " x ".join(map(str, result["shape"])), ["tp x pp", "wait p50, ms", "p99", "get p50", "batches/s"]
    title = (
        f"a model that adds one to {rows} floats: {result['requests']} requests one by one, {result['batches']} at once"
    )
    cells = [
        [
            f"{row['tp']} x {row['pp']}",
            *(number(row["wait_ms"][key], 2) for key in ("p50", "p99")),
            number(row["get_ms"]["p50"], 2),
            number(row["batches_per_s"], 0),
            ", ".join(f"{share:.2%}" for share in row["idle_cpu"]),
        ]
        for row in result["layouts"]
    ]
    return [_table(title, [*columns, f"CPU of each process over {result['idle_s']:g} idle s"], cells)]


def _chaos(result: dict[str, Any]) -> list[Any]:
    asked = result["settings"]
    title = (
        f"{result['model']}: {asked['requests']} requests, {asked['at_once']} at a time, workers killed "
        f"{asked['kill_every_s']:g} s after they were ready, {number(result['seconds'])} s"
    )
    resumed = result["resume_s"]
    rows = [[name, *(number(resumed[name][key], 2) for key in ("p50", "max"))] for name in _PARTS]
    return [
        _table(title, ["", ""], [*_ends(result), *_faults(result)]),
        _table(f"seconds from a kill to the first new token, {resumed['measured']} kills", ["", "p50", "max"], rows),
        *_held(result),
        *_problems(result),
    ]


_PARTS = ("total", "restart", "prefill")


def _ends(result: dict[str, Any]) -> list[list[str]]:
    return [[name, f"{result[name]:,}"] for name in ("answered", "cancelled", "failed", "different", "stuck")]


def _faults(result: dict[str, Any]) -> list[list[str]]:
    names = {"kills": "kills", "step_errors": "exceptions in steps", "restarts": "restarts"}
    return [[words, f"{result[name]:,}"] for name, words in names.items() if name in result]


def _held(result: dict[str, Any]) -> list[Any]:
    """What the process holds, before and after; what the engine has in use."""
    sides = {"open": result["open"], **({"closed": result["closed"]} if "closed" in result else {})}
    rows = [
        [f"{side}: {name}", number(found["before"][name], 0), number(found["after"][name], 0)]
        for side, found in sides.items()
        for name in ("threads", "children", "files", "rss_mb")
    ]
    in_use = ", ".join(f"{name} {result['open'][name]}" for name in ("running", "waiting", "blocks_used"))
    return [_table("held before and after", ["", "before", "after"], rows), f"in use at the end: {in_use}"]


def _problems(result: dict[str, Any]) -> list[Any]:
    """What must not be, and the requests that it concerns."""
    if not result["problems"]:
        return ["nothing is lost, stuck, different or left"]
    lines = [*result["problems"], *result["failures"], *result["stuck_requests"]]
    lines += [
        f"{one['request']} differs at token {one['place']}: {one['got']} instead of {one['expected']}"
        + (f"; asked again: {one['asked_again']}" if "asked_again" in one else "")
        for one in result["differences"]
    ]
    return ["\n".join(f"PROBLEM: {line}" for line in lines)]


def _memory(result: dict[str, Any]) -> Table:
    rows = [
        [who, *(number(value) for value in one["rss_mb"]), number(one["bytes_per_request"], 0)]
        for who, one in result["memory"].items()
    ]
    return _table("memory, MB", ["", "at a quarter", "at half", "at the end", "bytes a request, second half"], rows)


def _cancel(result: dict[str, Any]) -> list[Any]:
    asked = result["settings"]
    freed = result["break_to_free_blocks"]
    names = {
        "steps_under_way": "steps under way at a break, the one that computes included",
        "results_until_free": "results until its blocks are free",
        "steps_planned_after": "steps planned for it after the break",
    }
    rows = [[words, *(number(freed[name][key], 1) for key in ("median", "max"))] for name, words in names.items()]
    title = (
        f"{result['model']}: {asked['requests']:,} requests cancelled at random points, {asked['at_once']} at a time"
    )
    parts = [_table(title, ["", ""], _ends(result)), _memory(result)]
    return [*parts, _table("one request alone", ["", "median", "max"], rows), *_held(result), *_problems(result)]


def _soak(result: dict[str, Any]) -> list[Any]:
    columns = ("minute", "answered", "cancelled", "kills", "blocks_used", "rss_mb", "files")
    rows = [[number(line[name], 2 if name == "minute" else 0) for name in columns] for line in result["lines"]]
    title = f"{result['model']}: {result['settings']['minutes']:g} minutes"
    over = _table("in all", ["", ""], [*_ends(result), *_faults(result)])
    return [_table(title, columns, rows), over, _memory(result), *_held(result), *_problems(result)]


def _cycles(result: dict[str, Any]) -> list[Any]:
    columns = list(result["cycles"][0])
    rows = [[number(row[name], 0 if name in _COUNTS else 2) for name in columns] for row in result["cycles"]]
    by = result["bytes_per_cycle"]
    lines = [f"PROBLEM: {line}" for line in result["problems"]] or ["nothing is left"]
    grown = "" if by is None else f"memory, second half: {by / 1e6:+.2f} MB a cycle"
    return [_table(f"{result['model']}: opened, asked once and closed", columns, rows), grown, *lines]


_COUNTS = ("cycle", "threads", "children", "files")

_LAYOUTS = {
    "throughput": _generation,
    "latency": _generation,
    "callers": _callers,
    "steps": _steps,
    "serve": _serve,
    "http": _http,
    "spin": _spin,
    "tasks": _tasks,
    "chaos": _chaos,
    "cancel": _cancel,
    "soak": _soak,
    "cycles": _cycles,
}


def setting_line(setting: dict[str, Any]) -> str:
    """Where it was measured, in one line."""
    versions = setting["versions"]
    names = ("corogen", "python", "torch", "transformers", "uvloop")
    listed = ", ".join(f"{name} {versions[name]}" for name in names if versions.get(name))
    threads = f", {setting['threads']} threads" if "threads" in setting else ""
    load = "" if setting.get("load_average") is None else f", load average {setting['load_average']:.1f} at the end"
    return f"{setting['cpu']}, {setting['cpus_usable']} CPUs{threads}{load}; {listed}"
