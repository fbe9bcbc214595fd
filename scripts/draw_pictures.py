#!/usr/bin/env python3
"""Draw the README's pictures into docs/: rounds of real decoding, and the speeds of benchmarks/results."""

import json
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from transformers import LogitsProcessor

import dspark_hf  # noqa: F401  (makes `generate` accept a drafter)
from dspark_hf.embedded import load_embedded_pair, load_prompts

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
ROUNDS = 4
# Okabe and Ito's, which all kinds of sight tell apart; what was rejected is struck through besides.
KEPT, OWN, REJECTED, CONTEXT = "#9fdcc6", "#a9d5f2", "#f6c9a6", "#eeeeee"


class Recorder(LogitsProcessor):
    """Remembers every text that the target was asked to go on from, drafts included; changes nothing."""

    seen: list = []

    def __call__(self, input_ids, scores):
        Recorder.seen.append(input_ids[0].tolist())
        return scores


def decode_rounds(prompt):
    """A few rounds in a row that keep as much as all do on average: what each one shows."""
    target, tokenizer, drafter = load_embedded_pair()
    inputs = tokenizer(prompt, return_tensors="pt")
    Recorder.seen = []
    torch.manual_seed(1)
    output = target.generate(
        **inputs,
        assistant_model=drafter,
        max_new_tokens=64,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        logits_processor=[Recorder()],
    )[0].tolist()
    place, rounds, seen = inputs.input_ids.shape[1], [], iter(Recorder.seen)
    for entry in drafter.last_stats.rounds:
        before = output[: place + 1]
        # The first text of that length: later rounds go on from other ones.
        whole = next(ids for ids in seen if ids[: place + 1] == before and len(ids) == place + 1 + entry.verified)
        drafted = whole[place + 1 :]
        own = output[place + 1 + entry.accepted]
        words = ([tokenizer.decode(token) for token in group] for group in (before[-1:], drafted, [own]))
        rounds.append((*words, entry.accepted))
        place += entry.emitted
    mean = drafter.last_stats.mean_accepted_length - 1
    start = min(
        range(len(rounds) - ROUNDS),
        key=lambda first: abs(sum(kept for *_, kept in rounds[first:][:ROUNDS]) / ROUNDS - mean),
    )
    return rounds[start:][:ROUNDS]


def draw_rounds(path):
    prompt = next(prompt.text for prompt in load_prompts() if prompt.id == "code-05")
    rounds = decode_rounds(prompt)
    figure = Figure(figsize=(9, 3.1))
    axis = figure.add_axes((0.01, 0.02, 0.98, 0.96))
    axis.set_axis_off()
    ends = []
    for number, (anchor, drafted, own, kept) in enumerate(rounds):
        text(axis, 0, -number, f"round {number + 1}")
        left = box(axis, 9, -number, anchor[0], CONTEXT)
        for index, token in enumerate(drafted):
            if index == kept:
                left = box(axis, left, -number, own[0], OWN)
            left = box(axis, left, -number, token, KEPT if index < kept else REJECTED, struck=index >= kept)
        if kept == len(drafted):
            left = box(axis, left, -number, own[0], OWN)
        text(axis, left + 0.6, -number, f"{kept + 1} token{'s' if kept else ''}")
        ends.append(left + 8)
    legend = [
        ("text so far", CONTEXT),
        ("drafted, kept", KEPT),
        ("target's own", OWN),
        ("drafted, rejected", REJECTED),
    ]
    left = 9
    for label, colour in legend:
        left = box(axis, left, -ROUNDS - 0.25, label, colour, struck=colour == REJECTED, raw=True) + 2
    axis.set(xlim=(0, max(*ends, left)), ylim=(-ROUNDS - 0.75, 0.4))
    figure.savefig(path, dpi=130)


def box(axis, left, y, token, colour, struck=False, raw=False):
    shown = token if raw else repr(token)[1:-1].replace(" ", "·").replace("$", r"\$")
    width = max(2.2, 0.98 * len(shown.replace("\\$", "$")) + 0.8)
    patch = FancyBboxPatch(
        (left, y - 0.31), width, 0.62, boxstyle="round,pad=0,rounding_size=0.25", lw=0.6, ec="#666666"
    )
    patch.set_facecolor(colour)
    axis.add_patch(patch)
    axis.text(left + width / 2, y - 0.02, shown, ha="center", va="center", family="monospace", fontsize=8.5)
    if struck:
        axis.plot([left + 0.3, left + width - 0.3], [y, y], color="#aa3300", lw=0.9)
    return left + width + 0.35


def text(axis, left, y, words):
    axis.text(left, y - 0.02, words, va="center", fontsize=8.5, color="#333333")


def draw_speed(path):
    report = json.loads((ROOT / "benchmarks" / "results" / "embedded_pair.json").read_text(encoding="utf-8"))
    figure = Figure(figsize=(6.4, 2.9), layout="constrained")
    axis = figure.subplots()
    kinds = ["code", "prose", "structured"]
    for offset, (name, colour, hatch) in enumerate((("temperature 1", "#0072B2", ""), ("greedy", "#E69F00", "//"))):
        rows = {row["kind"]: row for row in report["rows"] if row["decoding"] == name}
        places = [index + 0.38 * (offset - 0.5) for index in range(len(kinds))]
        heights = [rows[kind]["speedup_median"] for kind in kinds]
        bars = axis.bar(places, heights, 0.36, label=name, color=colour, hatch=hatch, edgecolor="white")
        axis.bar_label(bars, [f"{height:.2f}×" for height in heights], fontsize=8)
    axis.axhline(1, color="#333333", lw=1.2, ls="--", label="plain generate")
    axis.set_xticks(range(len(kinds)), kinds)
    axis.set(ylabel="speed, times plain generate", xlim=(-0.6, 2.6), ylim=(0, 3.4))
    axis.legend(fontsize=8, loc="upper left", ncols=3)
    figure.savefig(path, dpi=130)


def main():
    DOCS.mkdir(exist_ok=True)
    draw_rounds(DOCS / "rounds.png")
    draw_speed(DOCS / "speed.png")
    print(f"The pictures are in {DOCS}.")


if __name__ == "__main__":
    main()
