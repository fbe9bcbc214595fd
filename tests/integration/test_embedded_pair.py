"""The pair that comes with the package, end to end on its held-out prompts."""

from __future__ import annotations

import pytest
import torch

from dspark_hf.embedded import DRAFTER, FOLDER, TARGET, load_embedded_pair, load_prompts

PROMPTS = 50
NEW_TOKENS = 128


@pytest.fixture(scope="module")
def pair():
    return load_embedded_pair()


def interleaved_prompts() -> list:
    """Prompts with the three kinds in turn."""
    by_kind: dict[str, list] = {}
    for prompt in load_prompts():
        by_kind.setdefault(prompt.kind, []).append(prompt)
    return [prompt for group in zip(*by_kind.values(), strict=True) for prompt in group]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 10])
def test_greedy_equals_plain_generate(pair, batch):
    """128 tokens of 50 prompts in batches, and of 10 prompts one by one.

    The smallest gap between the best two logits tells near-ties from faults.
    """
    target, tokenizer, drafter = pair
    smallest, lengths = float("inf"), []
    texts = [prompt.text for prompt in interleaved_prompts()[: PROMPTS if batch > 1 else 10]]
    for start in range(0, len(texts), batch):
        inputs = tokenizer(texts[start : start + batch], padding=True, padding_side="left", return_tensors="pt")
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        plain = target.generate(**inputs, **options, return_dict_in_generate=True, output_logits=True)
        top = torch.stack(plain.logits).topk(2).values
        gap = (top[..., 0] - top[..., 1]).min().item()
        smallest = min(smallest, gap)
        output = target.generate(**inputs, **options, assistant_model=drafter)
        assert output.tolist() == plain.sequences.tolist(), f"prompts from {start}: smallest top-2 gap {gap:.2e}"
        lengths.append(drafter.last_stats.mean_accepted_length)
    print(f"smallest top-2 gap {smallest:.2e}, mean accepted length {sum(lengths) / len(lengths):.2f}")
    assert sum(lengths) / len(lengths) > 2


def test_sampled_text_is_drafted_well(pair):
    """A drafter that is fed wrongly still gives the right text, but its accepted length collapses to about 1."""
    target, tokenizer, drafter = pair
    lengths = []
    for prompt in interleaved_prompts()[:6]:
        torch.manual_seed(0)
        prompt_ids = tokenizer(prompt.text, return_tensors="pt").input_ids
        target.generate(
            input_ids=prompt_ids, assistant_model=drafter, max_new_tokens=64, do_sample=True, temperature=1.0, top_k=0
        )
        lengths.append(drafter.last_stats.mean_accepted_length)
    assert sum(lengths) / len(lengths) > 1.5


def test_size_and_dtype(pair):
    target, _, drafter = pair
    assert target.dtype == drafter.dtype == torch.float32
    assert 2e6 <= target.num_parameters() <= 6e6
    size = sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file())
    assert size < 13e6
    for folder in (TARGET, DRAFTER):
        assert (folder / "README.md").read_text(encoding="utf-8").startswith("---\n")


def test_drafter_fits_its_target(pair):
    target, tokenizer, drafter = pair
    assert drafter.config.mask_token_id == tokenizer.convert_tokens_to_ids("<|mask|>")
    assert drafter.config.share_target_embeddings
    assert max(drafter.config.target_layer_ids) < target.config.num_hidden_layers - 1


def test_prompts_are_held_out_by_source():
    prompts = load_prompts()
    assert {prompt.kind for prompt in prompts} == {"code", "prose", "structured"}
    assert len({prompt.id for prompt in prompts}) == len(prompts) >= PROMPTS
