"""Writes BENCH.md's text from rows of JSON.

usage: bench_table.py ROWS.jsonl THREADS

Rows of the two sides have "section", "engine", "row", "value", "unit" and "peak_mib".
Rows of one side alone have "section", "row", "value", "unit" and optionally "target", or
"what", "p50", "p95", "p99", "unit" for distributions.
"""

import datetime
import json
import os
import platform
import sys

# The ratio that is aimed at, by row; from the project's targets.
TARGETS = {
    "prefill:512": 1.5,
    "prefill:4096": 1.5,
    "decode:64:1": 1.0,
    "decode:4032:1": 1.0,
    "decode:64:4": 1.2,
    "train:1:512": 1.5,
    "train:4:256": 1.5,
}


def words(case):
    kind, *n = case.split(":")
    return {
        "prefill": lambda: f"prefill of {n[0]} tokens",
        "decode": lambda: f"decode behind {n[0]} tokens, {n[1]} at once",
        "train": lambda: f"LoRA r16 training, {n[0]} × {n[1]} tokens",
    }[kind]()


def processor():
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.machine()


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip().startswith("{")]
    load = os.getloadavg()[2]
    print("# Measurements\n")
    print("Written by `make bench`. Medians of five repetitions; both sides of a row were measured")
    print("one after the other on the same machine, each case in a process of its own.\n")
    print(f"{datetime.date.today()} · {processor()} · {sys.argv[2]} threads each side · load of the")
    print(f"machine over the last 15 minutes {load:.1f} (the benchmark itself included) · SmolLM2-135M-Instruct, Q4_1.\n")

    sides = {}
    for row in rows:
        if "engine" in row:
            sides.setdefault((row["section"], row["row"]), {})[row["engine"]] = row
    print("## Against llama.cpp and PyTorch + PEFT\n")
    print("| case | Spotter | other side | ratio | target | peak memory |")
    print("| --- | --- | --- | --- | --- | --- |")
    for (_, case), engines in sides.items():
        own = engines.get("Spotter")
        other = next((e for name, e in engines.items() if name != "Spotter"), None)
        if own is None or other is None:
            continue
        print(
            f"| {words(case)} | {own['value']:.0f} {own['unit']} | {other['value']:.0f} ({other['engine']}) "
            f"| {own['value'] / other['value']:.2f} × | ≥ {TARGETS[case]} × "
            f"| {own['peak_mib']:.0f} MiB, {other['peak_mib']:.0f} MiB |"
        )

    spread = [row for row in rows if "p50" in row]
    if spread:
        print("\n## Gateway\n")
        print("| what | median | 95th | 99th |\n| --- | --- | --- | --- |")
        for row in spread:
            unit = row["unit"]
            print(f"| {row['what']} | {row['p50']:.2f} {unit} | {row['p95']:.2f} {unit} | {row['p99']:.2f} {unit} |")
    alone = {}
    for row in rows:
        if "engine" not in row and "value" in row:
            alone.setdefault(row.get("section", "other"), []).append(row)
    for section, members in alone.items():
        print(f"\n## {section.capitalize()}\n")
        print("| what | measured | target |\n| --- | --- | --- |")
        for row in members:
            value = row["value"]
            shown = f"{value:.4g}" if isinstance(value, float) else value
            print(f"| {row['row']} | {shown} {row.get('unit', '')} | {row.get('target', '–')} |")


if __name__ == "__main__":
    main()
