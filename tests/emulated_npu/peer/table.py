"""docs/peer-on-emulated-npu.md from the figures of yardstick.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: spec/peer-on-emulated-npu.md section 3: prefill rms, decode rms by (set, grid, prompt, variant).
EARLIER = {
    ("a", "bf16"): {"17": (0.0051, 0.0084), "40": (0.0238, 0.0165), "130": (0.0115, 0.0149), "300": (0.0265, 0.0105)},
    ("a", "w8a8"): {"17": (0.0138, 0.0151), "40": (0.0261, 0.0215), "130": (0.0278, 0.0439), "300": (0.0287, 0.0342)},
    ("c", "bf16"): {"17": (0.0579, 0.0286), "40": (0.0149, 0.0187), "130": (0.0261, 0.0137)},
}

HEAD, TAIL = ((Path(__file__).with_name(name)).read_text() for name in ("head.md", "tail.md"))


def _cell(figures: list[float]) -> str:
    return f"{figures[0]:.4f} / {figures[1]:.5f} / {figures[2]:.4f} / {figures[3]:.3f}"


def _grid(results: dict[str, Any], preset: str, weights: str) -> Iterator[str]:
    base = results.get(f"{preset}-{weights}-v1")
    if base is None:
        return
    names = {"bf16": "BF16", "w8a8": "W8A8_DYNAMIC, INT8 Engram"}
    yield f"\n### Set {preset}, {names[weights]}\n"
    yield "| prompt | against | prefill | decode | earlier prototype, rms |"
    yield "|---|---|---|---|---|"
    for length in (k for k in base if k.isdigit()):
        for variant, figures in base[length].items():
            before = EARLIER.get((preset, weights), {}).get(length) if variant == "exact-fp32" else None
            shown = f"{before[0]:.4f} / {before[1]:.4f}" if before else ""
            yield f"| {length} | {variant} | {_cell(figures['prefill'])} | {_cell(figures['decode'])} | {shown} |"
    lengths = [k for k in base if k.endswith(".digest")]
    same = {
        other: [results[f"{preset}-{weights}-{other}"][k] == base[k] for k in lengths]
        for other in ("v2", "v1-graph", "v2-graph")
        if f"{preset}-{weights}-{other}" in results
    }
    if same:
        verdicts = (
            f"{name}: {'bit-equal' if all(s) else f'{sum(s)} of {len(s)} prompts bit-equal'}"
            for name, s in same.items()
        )
        yield f"\nDecode logits of the other runners and modes against V1 eager: {'; '.join(verdicts)}."


def _drafts(results: dict[str, Any]) -> Iterator[str]:
    yield "\n## DSpark, five drafts\n"
    yield "First draft equal / all drafts equal to golden `spec_output_ids` at the same anchors; set c.\n"
    yield "| run | taps inputs of | prompt | exact-fp32 | exact-weights | official | decode rms, exact-weights |"
    yield "|---|---|---|---|---|---|---|"
    for name, result in results.items():
        if not name.startswith("dspark-") or "tap" not in result:
            continue
        for length in (k for k in result if k.isdigit()):
            cells = []
            for variant in ("exact-fp32", "exact-weights", "official"):
                first, steps, every, total = result[length][variant]["drafts"]
                cells.append(f"{first}/{steps}; {every}/{total}")
            rms = result[length]["exact-weights"]["decode"][0]
            yield f"| {name} | {', '.join(map(str, result['tap']))} | {length} | {' | '.join(cells)} | {rms:.4f} |"
    if "dspark-accepted" in results:
        r = results["dspark-accepted"]
        yield (
            f"\nForced acceptance (0, 3, 5, 1, 2, 5, 4, 0, 1 of 5 in turn, {r['verify_steps']} verify steps): the "
            f"{r['rows']} rows that count, against"
            f" a plain prefill of the resulting text: {_cell(r['plain_prefill'])}."
        )
    v1, v2, fixed = (results.get(n, {}).get("17.drafts") for n in ("dspark-v1", "dspark-v2", "dspark-v2-corrected"))
    if v1 and v2 and fixed:
        yield (
            f"\n**Why V1 and V2 draft differently.** rc2's model taps the *input* of a layer when the layer's id "
            f"plus one is asked for. Its V1 runner adds"
            f" that one; its V2 runner takes upstream's ids as they are, so it taps one layer too low. Drafts of "
            f"V2 equal those of V1 in"
            f" {sum(a == b for a, b in zip(v1, v2, strict=True))} of {len(v1)} steps; with the ids that V1 uses "
            f"(`dspark-v2-corrected`) in"
            f" {sum(a == b for a, b in zip(v1, fixed, strict=True))} of {len(v1)}. Served tokens are right either "
            f"way, only acceptance suffers."
        )


def _rest(results: dict[str, Any]) -> Iterator[str]:
    yield "\n## Everything else\n"
    yield "| scenario | result |"
    yield "|---|---|"
    for name in ("selections-bf16", "selections-w8a8"):
        for what, r in results.get(name, {}).items():
            if isinstance(r, dict):
                rows = f"{r['equal']} of {r['rows']} rows as exact-fp32"
                if "of" in r:
                    apart = f"scores at most {100 * r['worst_gap']:.1f} % of the row's maximum apart"
                    rows += f"; {r['missing']} of {r['of']} positions exchanged, {apart}"
                yield f"| {name}, {what} | {rows} |"
    for name in ("chunks", "blocks-64", "a-w8a8-quarot", "c-w8a8-quarot"):
        for length in (k for k in results.get(name, {}) if k.isdigit()):
            figures = results[name][length]["exact-fp32"]
            cells = f"{_cell(figures['prefill'])}; decode {_cell(figures['decode'])}"
            yield f"| {name}, {length} tokens, against exact-fp32 | {cells} |"
    for name in ("together", "together-v2", "preemption"):
        if name in results:
            r = results[name]
            alone = f"{sum(r['equal'])} of {len(r['equal'])} requests give the tokens that they give alone"
            yield f"| {name} | {alone}; {r['preempted']} preemptions |"
    if "prefix-hits" in results:
        r = results["prefix-hits"]
        rows = f"{r['equal']} of {r['rows']} recomputed rows bit-equal"
        yield f"| prefix-hits | {r['cached']} tokens from the cache; {rows} |"
    for name in ("sampling-v1", "sampling-v2"):
        if name in results:
            r = results[name]
            yield (
                f"| {name} | {r['draws']} seeded draws at temperature 1: total variation {r['total_variation']} "
                f"from softmax (such a sample is expected to"
                f" show {r['expected']}); a seed repeats in another batch: {'yes' if r['seed_repeats'] else 'no'} |"
            )
    for name in ("image-1", "image-2", "image-1-w8a8"):
        if name in results:
            r = results[name]
            cells = f"prefill {_cell(r['prefill'])}; decode {_cell(r['decode'])}"
            yield f"| {name}: {r['pictures']} picture(s), against exact-fp32 | {cells} |"
    for name, single in (("tp2", "tp1"), ("ep2", "tp1"), ("ep2-w8a8-a3", "tp1-w8a8")):
        if name in results and single in results:
            yield f"| {name} | {_against(results[name], results[single])} |"
    if "dp2" in results and "tp1" in results:
        r = results["dp2"]
        equal = sum(a == b == c for a, b, c in zip(r["tokens"], r["together"], results["tp1"]["tokens"], strict=True))
        verdict = f"{equal} of {len(r['tokens'])} requests give the tokens of one device"
        yield f"| dp2, each rank idle in turn, then both working | {verdict} |"
    if "dspark-set-a" in results:
        yield f"| DSpark on set a (two KV sources, three draft stages) | {results['dspark-set-a']['error']} |"
    if "nested-tables" in results:
        yield f"| nested-tables | decode rms {results['nested-tables']['decode_rms']} |"


def _against(many: dict[str, Any], one: dict[str, Any]) -> str:
    parts = []
    for ours, theirs, gaps in zip(many["tokens"], one["tokens"], one["gaps"], strict=True):
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if at is None:
            parts.append(f"{len(ours)} of {len(ours)} tokens equal")
        else:
            parts.append(
                f"equal up to token {at + 1}, where one device's best two lie {gaps[at]} apart in log-probability"
            )
    return "; ".join(parts)


def render(results: dict[str, Any]) -> str:
    minutes = round(sum(r.get("seconds", 0) + 8 for r in results.values()) / 60)
    lines = [HEAD.format(minutes=minutes), "## Logits"]
    for preset in ("a", "c"):
        for weights in ("bf16", "w8a8"):
            lines += _grid(results, preset, weights)
    lines += _drafts(results)
    lines += _rest(results)
    return "\n".join(lines) + "\n" + TAIL
