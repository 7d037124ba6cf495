"""Prompts with images: equal to stock transformers, and reused as text is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost import ImageError, KVBoost, PromptError
from kvboost.cache.lookup.hits import KnownRows
from kvboost.results import GenerationResult, SpanKind
from kvboost.runtime import idle_work, planner, prefill
from kvboost.tokens.images import PlacedImages
from support.adapters import write_adapter
from support.requests import begin
from support.tiny import in_slices, make_engine, tiny_model
from support.vision_models import (
    about,
    file_of,
    forget_images,
    make_vision_model,
    picture,
    stock_inputs,
    vision_engine,
    vision_model,
)

MOVING = ("smolvlm", "internvl", "gemma3")
SPATIAL = ("qwen2_5_vl", "qwen3_vl")
FAMILIES = (*MOVING, *SPATIAL)
"""Those of which each does something else. Idefics 3 does what SmolVLM does."""
IMAGE = picture(1, 50, 30)
QUESTION = about(IMAGE, "What is this?", "Look: ")
MOVED = about(IMAGE, "What is this?", "Before you look, think of something else entirely: ")
FOLLOW = [65, 66, 67]


def logits_of(engine: KVBoost, messages: Any, mode: str = "baseline", **options: Any) -> Any:
    return engine.score(messages, FOLLOW, mode, **options).logits


def towers(engine: KVBoost) -> int:
    """How many images have gone through the tower."""
    vision = engine.model.vision
    assert not isinstance(vision, str)
    return vision.num_images


def image_rows(engine: KVBoost, messages: Any, number: int = 0) -> range:
    images = engine.read(messages).images
    assert images is not None
    return range(images.placed[number].start, images.placed[number].end)


def end_of_exact(result: GenerationResult) -> int:
    return max((span.end for span in result.reuse.spans if span.kind is SpanKind.EXACT), default=0)


@pytest.mark.parametrize("name", (*FAMILIES, "idefics3"))
def test_logits_and_greedy_tokens_are_those_of_stock_transformers(name: str) -> None:
    two = about(picture(2), "Which is larger?", "One: ")[0]["content"] + QUESTION[0]["content"]
    for messages in (QUESTION, [{"role": "user", "content": two}]):
        with vision_engine(name) as engine:
            inputs = stock_inputs(name, engine, messages)
            found = logits_of(engine, messages)
            ours = engine.generate(messages, 6, "baseline", repetition_penalty=1.2).token_ids
            reused = engine.generate(messages, 6, repetition_penalty=1.2).token_ids
        more = torch.tensor([FOLLOW[:-1]])
        longer = {**inputs, "input_ids": torch.cat([inputs["input_ids"], more], 1)}
        for key in {"token_type_ids", "mm_token_type_ids"} & set(inputs):
            longer[key] = torch.cat([inputs[key], torch.zeros_like(more)], 1)
        model = vision_model(name)
        with torch.inference_mode():
            expected = model(**longer).logits[0, -3:]
            stock = model.generate(
                **inputs, max_new_tokens=6, do_sample=False, repetition_penalty=1.2
            )
        assert (found - expected).abs().max() < 1e-3
        assert ours == reused == stock[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_exact_reuse_may_end_anywhere_also_inside_an_image(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = 0

    def until_split(known: KnownRows, images: PlacedImages) -> KnownRows:
        return KnownRows(planner._until(known.exact, split))

    with vision_engine(name) as engine:
        expected = logits_of(engine, QUESTION)
        engine.warm(QUESTION)
        rows = image_rows(engine, QUESTION)
        monkeypatch.setattr(planner, "_within", until_split)
        for split in {rows.start, rows.start + 1, rows.start + 7, rows.stop - 1, rows.stop + 3}:
            if split < 16:  # a shorter prefix is computed
                continue
            found = engine.score(QUESTION, FOLLOW, "prefix_cache")
            assert found.reuse.spans[-2].end == split
            assert (found.logits - expected).abs().max() < 1e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_slices_do_not_change_the_logits(name: str) -> None:
    with in_slices(vision_engine(name), 8) as engine:
        sliced = engine.score(QUESTION, FOLLOW, "prefix_cache").logits
        assert (sliced - logits_of(engine, QUESTION)).abs().max() < 1e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_a_second_question_about_an_image_does_not_run_the_tower(name: str) -> None:
    with vision_engine(name) as engine:
        engine.generate(QUESTION, 1)
        assert towers(engine) == 1
        other = about(IMAGE, "Is it red?", "Look: ")
        forget_images(engine.model.vision)
        answer = engine.generate(other, 4)
        assert towers(engine) == 1
        assert end_of_exact(answer) >= image_rows(engine, other).stop
        assert answer.token_ids == engine.generate(other, 4, "baseline").token_ids


@pytest.mark.parametrize("name", FAMILIES)
def test_images_that_differ_in_one_pixel_share_no_rows(name: str) -> None:
    other = picture(1, 50, 30)
    red, green, blue = other.getpixel((7, 9))  # type: ignore[misc]
    other.putpixel((7, 9), (red ^ 64, green, blue))
    changed = about(other, "What is this?", "Look: ")
    with vision_engine(name) as engine:
        engine.generate(QUESTION, 1)
        rows = image_rows(engine, changed)
        plan = engine.plan(changed, reuse_moved="always")
        known = [span for span in plan.spans if span.kind is not SpanKind.COMPUTE]
        assert all(span.end <= rows.start or span.start >= rows.stop for span in known)
        found = engine.generate(changed, 4).token_ids
        assert found == engine.generate(changed, 4, "baseline").token_ids


@pytest.mark.parametrize("name", FAMILIES)
def test_a_moved_image_that_is_recomputed_equals_a_full_prefill(name: str) -> None:
    how: Any = {"reuse_moved": "always"}
    with vision_engine(name) as engine:
        engine.generate(QUESTION, 1)
        expected = logits_of(engine, MOVED)
        rows = image_rows(engine, MOVED)
        for ratio in (1.0, 0.3):
            score = engine.score(MOVED, FOLLOW, recompute_ratio=ratio, **how)
            moved = {row for span in score.reuse.spans for row in range(span.start, span.end)
                     if span.kind is SpanKind.MOVED}  # fmt: skip
            if len(image_rows(engine, QUESTION)) >= 32:
                assert moved >= set(rows)
            if ratio == 1.0:
                assert (score.logits - expected).abs().max() < 1e-3
        assert towers(engine) == 1, "features are kept for a while"


@pytest.mark.parametrize("bits", (16, 8))
@pytest.mark.parametrize("name", ("smolvlm", *SPATIAL))
def test_keys_are_rotated_to_the_place_of_their_row(name: str, bits: int, tmp_path: Path) -> None:
    """In a model of one layer, keys and values depend on a row and its place alone: moved rows are
    right as they are. An image, and text after it, move behind another image and before it."""
    model = make_vision_model(name, num_hidden_layers=1)
    long = "The colours are those of autumn, as painters like them best."
    source = about(IMAGE, long, "Look at this picture: ")
    other = about(picture(4, 30, 80), "And a second picture, which is taller: ", "First: ")
    targets: list[Any] = [
        [{"role": "user", "content": [*other[0]["content"], *source[0]["content"][1:]]}],
        about(IMAGE, long, "Something else before: "),
        [{"role": "user", "content": f"Without any picture: {long}"}],
        [{"role": "user", "content": [*source[0]["content"][2:], *other[0]["content"]]}],
    ]
    how: Any = {"reuse_moved": "always", "recompute_strategy": "none"}
    with vision_engine(name, model, kv_cache_bits=bits, disk_cache_dir=tmp_path) as engine:
        expected = [logits_of(engine, one) for one in targets]
        engine.warm(source)
    with vision_engine(name, model, kv_cache_bits=bits, disk_cache_dir=tmp_path) as engine:
        for target, logits in zip(targets, expected, strict=True):
            score = engine.score(target, FOLLOW, **how)
            moved = [span for span in score.reuse.spans if span.kind is SpanKind.MOVED]
            assert sum(span.num_tokens for span in moved) >= len(long) - 16
            assert (score.logits - logits).abs().max() < (1e-3 if bits == 16 else 0.05)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_repair_in_slices_equals_a_full_prefill(name: str) -> None:
    text = about(IMAGE, "Now tell me what can be seen on this picture, and what not.")
    later = about(IMAGE, text[0]["content"][1]["text"], "Please: ")
    options: Any = {"reuse_moved": "always", "recompute_ratio": 1.0}
    with in_slices(vision_engine(name), 8) as engine:
        engine.generate(text, 1)
        score = engine.score(later, FOLLOW, **options)
        assert any(span.kind is SpanKind.MOVED for span in score.reuse.spans)
        assert (score.logits - logits_of(engine, later)).abs().max() < 1e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_gives_what_each_request_gives_alone(name: str) -> None:
    prompts: list[Any] = [
        QUESTION,
        MOVED,
        about(picture(3), "And this?"),
        [{"role": "user", "content": "No image at all."}],
        about(IMAGE, "Anything else?", "Look: "),
    ]
    with vision_engine(name) as engine:
        alone = [engine.generate(prompt, 5, "baseline").token_ids for prompt in prompts]
        batch = engine.generate_batch(prompts, 5, "prefix_cache")
        assert [answer.token_ids for answer in batch] == alone


def test_the_disk_keeps_images_for_the_next_process(tmp_path: Path) -> None:
    with vision_engine("smolvlm", disk_cache_dir=tmp_path) as engine:
        expected = engine.generate(QUESTION, 4).token_ids
    with vision_engine("smolvlm", disk_cache_dir=tmp_path) as engine:
        answer = engine.generate(QUESTION, 4)
        assert answer.token_ids == expected
        assert end_of_exact(answer) >= image_rows(engine, QUESTION).stop and towers(engine) == 0


def test_described_prompts_do_not_cut_images_that_see_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with vision_engine("gemma3") as engine:
        expected = engine.generate(QUESTION, 4, prompt_logprobs=0)
        rows = image_rows(engine, QUESTION)
    monkeypatch.setattr(prefill, "DESCRIBED_ROWS", rows.start + 3)
    with vision_engine("gemma3") as engine:  # with a KV that holds no earlier rows
        found = engine.generate(QUESTION, 4, prompt_logprobs=0)
    assert found.token_ids == expected.token_ids
    assert found.prompt_logprobs is not None and expected.prompt_logprobs is not None
    for one, other in zip(found.prompt_logprobs, expected.prompt_logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize("name", ("smolvlm", *SPATIAL))
def test_another_machine_finds_images_in_a_remote_store(name: str, tmp_path: Path) -> None:
    """A folder has no index: chunks are asked for by keys, so they must be cut alike."""
    how: Any = {"remote_cache_url": f"file://{tmp_path}", "remote_cache_bytes": "1GiB"}
    with vision_engine(name, **how) as engine:
        engine.warm(QUESTION)
    with vision_engine(name, **how) as engine:
        answer = engine.generate(QUESTION, 4)
        assert end_of_exact(answer) >= image_rows(engine, QUESTION).stop and towers(engine) == 0
        assert answer.token_ids == engine.generate(QUESTION, 4, "baseline").token_ids


def test_images_cannot_be_embedded_or_scored() -> None:
    with vision_engine("smolvlm") as engine:
        row = engine.encode(QUESTION)[image_rows(engine, QUESTION).start]
        given: Any = [QUESTION]
        with pytest.raises(ImageError, match="in what has to be text"):
            engine.embed(given)
        with pytest.raises(ImageError, match="in what has to be text"):
            engine.score("Hello.", [65, row])


@pytest.mark.parametrize("name", ("smolvlm", "gemma3", "qwen3_vl"))
def test_moved_images_are_healed(name: str) -> None:
    parts = about(IMAGE, "What can be seen on this picture, please?", "A question of mine: ")
    later = about(IMAGE, "What can be seen on this picture, please?", "First, something else: ")
    with vision_engine(name, recompute_ratio=0.1, reuse_moved="always") as engine:
        engine.generate(parts, 1)
        answer = engine.generate(later, 3)
        assert any(span.kind is SpanKind.MOVED for span in answer.reuse.spans)
        assert engine.heal().tokens > 0
        again = engine.generate(later, 3)
        assert again.token_ids == engine.generate(later, 3, "baseline").token_ids
        assert end_of_exact(again) > 0 and not any(
            span.kind in (SpanKind.MOVED, SpanKind.APPROXIMATE) for span in again.reuse.spans
        )


def test_a_part_of_an_image_is_not_healed() -> None:
    """As after a request that was cancelled when only approximate rows were in place."""
    with vision_engine("gemma3") as engine:
        state = begin(engine, QUESTION, mode="chunk_kv_reuse")
        state.exact_rows = 1
        rows, queue = image_rows(engine, QUESTION), engine.runtime.idle_work
        queue.add_unhealed(state, state.request.token_ids[: rows.start + 3], takes_likeliest=False)
        waiting = queue.take()
        assert waiting is not None and waiting.num_rows == rows.start


def test_files_of_images_that_wait_to_be_healed_have_a_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = [
        (IMAGE, "What can be seen on this picture, please?"),
        (picture(2), "Tell me how many boxes there are, and how large they look to you."),
    ]
    with vision_engine("smolvlm", recompute_ratio=0.1, reuse_moved="always") as engine:
        for pair in pairs:
            engine.generate(about(*pair, "A question of mine: "), 1)
        monkeypatch.setattr(idle_work, "MOST_IMAGE_BYTES", 1)
        first, second = (
            engine.generate(about(*pair, f"{number}, something else: "), 1)
            for number, pair in enumerate(pairs)
        )
        assert first.healing is not None and second.healing is not None
        assert [first.healing.status, second.healing.status] == ["dropped", "waiting"]
        assert engine.runtime.idle_work.conversations.num_bytes > 0
        engine.heal()
        assert engine.runtime.idle_work.conversations.num_bytes == 0


@pytest.mark.parametrize("chunking", ("semantic", "document"))
def test_images_go_with_every_chunking_and_with_drafts(chunking: str) -> None:
    with vision_engine("smolvlm", chunking=chunking, speculate=4) as engine:
        expected = engine.generate(QUESTION, 12, "baseline").token_ids
        assert [engine.generate(QUESTION, 12).token_ids for _ in range(3)] == [expected] * 3


def test_images_are_warmed_pinned_and_forgotten() -> None:
    with vision_engine("smolvlm") as engine:
        assert engine.warm(QUESTION) > 0 and towers(engine) == 1
        pin = engine.pin(QUESTION)
        assert pin.tokens == len(engine.encode(QUESTION))
        rows = image_rows(engine, QUESTION)
        assert engine.plan(QUESTION).spans[-2].end > rows.stop
        assert engine.forget(engine.encode(QUESTION)[rows.start : rows.stop]) > 0
        assert engine.plan(MOVED, reuse_moved="always").cached_tokens < rows.start
        assert not engine.check_integrity()


def test_an_answer_of_a_conversation_goes_on_from_its_image() -> None:
    with vision_engine("smolvlm") as engine:
        first = engine.chat(QUESTION, 6)
        said = {"role": "assistant", "content": first.output_text}
        turns = [*QUESTION, said, {"role": "user", "content": "And now?"}]
        second = engine.chat(turns, 6)
        assert towers(engine) == 1 and end_of_exact(second) >= image_rows(engine, turns).stop


def test_the_same_image_may_come_in_any_form(tmp_path: Path) -> None:
    import base64

    png = file_of(IMAGE)
    path = tmp_path / "image.png"
    path.write_bytes(png)
    url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    parts = [
        {"type": "image", "image": IMAGE},
        {"type": "image", "image": png},
        {"type": "image", "image": str(path)},
        {"type": "image", "image": path},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
    ]
    with vision_engine("smolvlm") as engine:
        read = [engine.encode([{"role": "user", "content": [part]}]) for part in parts]
        assert all(ids == read[0] for ids in read)


def test_an_image_that_cannot_be_used_is_refused() -> None:
    with vision_engine("smolvlm", max_images=1) as engine:
        two = [{"role": "user", "content": [QUESTION[0]["content"][1]] * 2}]
        with pytest.raises(ImageError, match="has 2 images; at most 1 are allowed"):
            engine.generate(two, 1)
        with pytest.raises(PromptError, match="a row of an image that was not given"):
            engine.generate(engine.encode(QUESTION), 1)
        with pytest.raises(PromptError, match="wrote '<image>' 2 times for 1 images"):
            engine.generate(about(IMAGE, "What does <image> mean?"), 1)
        with pytest.raises(ImageError, match="KVBoost fetches none"):
            engine.generate(about("https://example.com/cat.png", "?"), 1)
        with pytest.raises(ImageError, match="not as int"):
            engine.generate(about(7, "?"), 1)
        with pytest.raises(ImageError, match="has its image under 'image'"):
            engine.generate([{"role": "user", "content": [{"type": "image"}]}], 1)
    with (
        make_engine(tiny_model("llama")) as engine,
        pytest.raises(ImageError, match=r"it is a llama model, and it reads text only; choose"),
    ):
        engine.generate(QUESTION, 1)


def test_adapters_of_the_text_go_with_images_and_those_of_the_tower_do_not(tmp_path: Path) -> None:
    model = vision_model("smolvlm")
    whole = write_adapter(tmp_path / "whole", model, targets=("q_proj",))
    text = write_adapter(tmp_path / "text", model, targets=("gate_proj", "down_proj"))
    with vision_engine("smolvlm") as engine:
        engine.load_adapter("whole", whole)
        with pytest.raises(ImageError, match="the adapter 'whole' changes how the model sees"):
            engine.generate(QUESTION, 1, adapter="whole")
        assert engine.generate("No image.", 1, adapter="whole").token_ids
        engine.load_adapter("text", text)
        plain = engine.generate(QUESTION, 8).token_ids
        changed = engine.generate(QUESTION, 8, adapter="text").token_ids
        assert changed == engine.generate(QUESTION, 8, "baseline", adapter="text").token_ids
        assert changed != plain and towers(engine) == 1, "the adapter does not change features"


def test_the_engines_own_token_of_images_is_refused_in_text() -> None:
    with (
        vision_engine("gemma3") as engine,
        pytest.raises(PromptError, match="leave the model's own tokens for images out"),
    ):
        engine.generate(about(IMAGE, "What is <image_soft_token>?"), 1)
