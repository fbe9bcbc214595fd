"""The tables and the list of findings as Markdown, put into the README between two lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from drafters import BLOCK, BLOCK_FAMILIES, BLOCK_SIZES, DEPTH, EAGLE3, LABELS, LAYERS, MTP, SERVED, STUDY, recipe
from findings import PLAIN, Acceptance, Estimate, Finding, show_ratio

BEGIN, END = "<!-- results: written by run.py -->", "<!-- end of results -->"


def insert(readme: str, results: str) -> str:
    """The README with `results` in place of what stood between the two lines.

    Raises:
        ValueError: if they are not there once each, in this order.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"The README needs the lines {BEGIN!r} and {END!r}, once each and in this order.")
    return f"{before}{BEGIN}\n\n{results.strip()}\n\n{END}{after}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show_findings(findings: Sequence[Finding]) -> str:
    return "\n".join(
        f"{number}. **{each.claim}** Paper: {each.paper}. Here: {each.here}. **{each.verdict.capitalize()}.**"
        for number, each in enumerate(findings, start=1)
    )


def lengths_table(acceptance: Acceptance, trainings: Mapping[str, Mapping[str, Any]], rows: Sequence[Any]) -> str:
    """Accepted length by kind of prompt, and what each drafter took."""
    names = [kind.removeprefix("embedded-") for kind in acceptance.kinds]
    header = ["drafter", "layers", "γ", "parameters", "training", *names, "all [95%]", "greedy, all [95%]", "speed"]
    lines = []
    for each in STUDY:
        training = trainings[each.name]
        kinds = [acceptance.length(each.name, 1.0, kind) for kind in acceptance.kinds]
        cells = [row for row in rows if row["drafter"] == each.name and row["temperature"] == 1.0]
        speed = sum(row["speedup"] for row in cells) / len(cells)
        lines.append(
            [
                each.label,
                str(each.layers),
                str(each.block_size),
                f"{training['parameters'] / 1e6:.2f} M",
                f"{training['train_seconds']:.0f} s",
                *(f"{_bare(kind):.2f}" for kind in kinds),
                f"{acceptance.length(each.name, 1.0):.2f}",
                f"{acceptance.length(each.name, 0.0):.2f}",
                f"{speed:.2f}x",
            ]
        )
    return table(header, lines)


def _bare(estimate: Estimate) -> Estimate:
    return Estimate(estimate.value, None)


def gains_table(acceptance: Acceptance) -> str:
    """Gain of DSpark over DFlash, by layers and by draft length."""
    shapes = [{"layers": layers} for layers in LAYERS]
    shapes += [{"block_size": size} for size in BLOCK_SIZES if size != BLOCK]
    lines = []
    for shape in shapes:
        dflash = recipe("dflash", **shape)
        heads = [recipe(family, **shape).name for family in BLOCK_FAMILIES if family != "dflash"]
        gains = [acceptance.gain(head, dflash.name, at) for at in (1.0, 0.0) for head in heads]
        lines.append([f"{dflash.layers} layers, γ = {dflash.block_size}", *(f"{gain:+.1%}" for gain in gains)])
    heads = [LABELS[family].removeprefix("DSpark, ") for family in BLOCK_FAMILIES if family != "dflash"]
    return table(["against the same DFlash", *heads, *(f"{head}, greedy" for head in heads)], lines)


def positions_table(acceptance: Acceptance) -> str:
    """Acceptance by position at temperature 1."""
    shown = [recipe(family) for family in BLOCK_FAMILIES] + [EAGLE3]
    lines = [
        [each.label, *(f"{_bare(share):.1%}" for share in acceptance.by_position(each.name, 1.0, BLOCK))]
        for each in shown
    ]
    return table(["position", *map(str, range(1, BLOCK + 1))], lines)


def rounds_table(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> str:
    lines = [
        [
            names[row["drafter"]],
            str(row["rows"]),
            *(f"{row['ms'][part]:.2f}" for part in ("parallel", "head", "verify", "rest")),
            f"{row['head_share']:.1%} [{', '.join(f'{end:.1%}' for end in row['head_share_range'])}]",
        ]
        for row in rows
    ]
    return table(["drafter", "rows", "parallel", "head", "verify", "rest", "head's share [range]"], lines)


def confidence_table(scores: Mapping[str, Any]) -> str:
    lines = []
    for name, found in scores.items():
        shown = (
            Estimate(found[key], found.get(f"{key}_interval")) for key in ("ece_before", "ece_after", "chance_ece")
        )
        auroc = Estimate(found["auroc"], found["auroc_interval"])
        lines.append([name, *(f"{each:.1%}" for each in shown), f"{auroc:.3f}"])
    return table(["drafter", "ECE before", "after", "by chance", "AUROC"], lines)


def serving_table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = {PLAIN: "plain", MTP.name: "MTP-1", SERVED.name: "DSpark, scheduled"}
    header = ["requests", *(f"{name}, all" for name in names.values())]
    header += [*(f"{name}, each" for name in names.values()), "accepted", "verified"]
    lines = []
    for load in dict.fromkeys(row["load"] for row in rows):
        mine = {row["policy"]: row for row in rows if row["load"] == load}
        lines.append(
            [
                str(load),
                *(f"{mine[name]['tokens_per_second']:.0f}" for name in names),
                *(f"{mine[name]['speed_per_request']:.1f}" for name in names),
                f"{mine[SERVED.name]['accepted_length']:.2f}",
                f"{mine[SERVED.name]['budget']:.2f}",
            ]
        )
    return table(header, lines)


def ratios_table(ratios: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> str:
    """Ratios of DSpark, a line per load of the one whose operating point is matched."""
    columns = [(name, view) for view in ("matched_throughput", "matched_speed") for name in ratios]
    labels = {"matched_throughput": "speed at the throughput of", "matched_speed": "throughput at DSpark's speed, to"}
    header = ["requests", *(f"{labels[view]} {'plain' if name == PLAIN else 'MTP-1'}" for name, view in columns)]
    loads = [entry["load"] for entry in ratios[PLAIN]["matched_speed"]]
    lines = [
        [str(load), *(show_ratio(ratios[name][view][place]) for name, view in columns)]
        for place, load in enumerate(loads)
    ]
    return table(header, lines)


def describe_budget(budget: Mapping[str, Any]) -> str:
    """What is equal."""
    return (
        f"Every drafter had {budget['steps']} steps of {budget['batch_size']} sequences, {budget['sequences']} in all, "
        f"of {budget['sequence_length']} tokens ({budget['tokens'] / 1e6:.2f} million, from {budget['rows']} different "
        f"rows), the same rows in the same order, with AdamW at a peak of {budget['learning_rate']:g}, "
        f"{budget['num_anchors']} blocks a sequence for drafters of blocks. {budget['questions']} questions of each "
        f"kind, {budget['new_tokens']} new tokens each, {budget['eval_batch']} at once."
    )


def show_results(
    findings: Sequence[Finding],
    acceptance: Acceptance,
    study: Mapping[str, Any],
    evaluation: Mapping[str, Any],
    rounds: Sequence[Mapping[str, Any]],
    scores: Mapping[str, Any],
    serving: Mapping[str, Any],
) -> str:
    """All that goes into the README."""
    labels = study["labels"]
    machine, versions = study["machine"], study["versions"]
    return f"""### Findings

{show_findings(findings)}

### Measured

{machine["device_name"]}, {machine["threads"]} threads, float32, torch {versions["torch"]}, Transformers \
{versions["transformers"]}; {study["minutes"]:.0f} minutes in all. {describe_budget(study["budget"])}

Accepted length at temperature 1 by kind of prompt (tokens per round, bonus token included), over all with its interval,
and greedily; training time alone; speed against plain `generate` in the same run, temperature 1, in batches:

{lengths_table(acceptance, study["trainings"], evaluation["rows"])}

![accepted length](results/lengths.png)

Gain in accepted length:

{gains_table(acceptance)}

![draft lengths](results/draft-lengths.png)

Accepted at each position, where all before it were ({DEPTH} layers, γ = {BLOCK}, temperature 1):

{positions_table(acceptance)}

![positions](results/positions.png)

Milliseconds of a round, by the rows of the batch; the head by a clock around its calls, `parallel` is what drafting
takes without them:

{rounds_table(rounds, labels)}

![rounds](results/rounds.png)

Confidences at temperature 1 on held-out prompts, before and after calibration on others:

{confidence_table({labels[name]: found for name, found in scores.items()})}

![reliability](results/reliability.png)

Tokens per second of all requests and of each, temperature 1; of DSpark also accepted length, and drafted tokens verified
per request and round:

{serving_table(serving["rows"])}

DSpark's ratios at matched operating points: of the speed of a request, at the throughput that the other has with so many
requests; of throughput, at the speed that DSpark has with so many. "Collapsed" is where the other is saturated, or
hardly serves more than one request at that speed: there the ratio says little about DSpark.

{ratios_table(serving["ratios"])}

![serving](results/serving.png)"""
