"""The gradient cache with inputs that are not columns of samples: images of several sizes, texts without padding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import compopt
from compopt.gradient_cache.inputs import by_sample, micro_batches, without_padding

transformers = pytest.importorskip("transformers")

IMAGE, START, END, PATCH = 110, 112, 113, 3 * 2 * 4 * 4  # tokens; values of a patch of two frames
SIZES = [[(2, 4)], [(4, 4)], [], [(2, 2), (4, 2)], [(6, 4)], [(4, 4)]]  # of the images of a sample, in patches
WORDS = [3, 7, 2, 5, 1, 4]
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def qwen2_vl():
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4}
    tokens = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
    text = {**TEXT, "vocab_size": 120, "num_key_value_heads": 2, "rope_parameters": rope, "bos_token_id": 1}
    config = transformers.Qwen2VLConfig(
        text_config={**text, "eos_token_id": 2}, vision_config=vision, video_token_id=111, **tokens
    )
    return transformers.Qwen2VLModel(config).double()


def pages(sizes=SIZES):
    """Return a batch in the form of Qwen2-VL's processor: padded texts, the patches of all images."""
    rows, types = [], []
    for images, words in zip(sizes, WORDS, strict=True):
        row, kind = [5], [0]
        for height, width in images:
            tokens = height * width // 4
            row += [START, *[IMAGE] * tokens, END]
            kind += [0, *[1] * tokens, 0]
        rows.append(row + torch.randint(6, 100, (words,)).tolist())
        types.append(kind + [0] * words)
    grid = torch.tensor([(1, *size) for images in sizes for size in images])
    return {
        **padded(rows),
        "mm_token_type_ids": padded(types)["input_ids"],
        "image_grid_thw": grid,
        "pixel_values": torch.randn(int(grid.prod(1).sum()), PATCH, dtype=torch.float64),
    }


def padded(rows, side="right"):
    longest = max(map(len, rows))
    pads = [[0] * (longest - len(row)) for row in rows]
    ids = [pad + row if side == "left" else row + pad for row, pad in zip(rows, pads, strict=True)]
    masks = [[0] * len(pad) + [1] * len(row) for row, pad in zip(rows, pads, strict=True)]
    masks = masks if side == "left" else [mask[::-1] for mask in masks]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(masks)}


def last_token(model, part):
    hidden = model(**part).last_hidden_state
    columns = torch.arange(hidden.shape[1]) * part["attention_mask"]
    return hidden[torch.arange(len(hidden)), columns.argmax(1)]


def assert_same_gradients(towers, batch, encode, est=None, **options):
    """Assert that loss and gradients are those of one pass; return the shapes of ``input_ids`` in the first pass."""
    est, index = est or compopt.InfoNCEEstimator(0.1), torch.arange(len(WORDS))
    module, shapes, found = nn.ModuleList({id(tower): tower for tower in towers}.values()), [], []

    def watched(tower, part):
        shapes.append(tuple(part["input_ids"].shape) if "input_ids" in part else None)
        return encode(tower, part)

    for run in (whole, compopt.gradient_cache):
        module.zero_grad()
        shapes.clear()
        loss = run(est, towers if len(towers) > 1 else towers[0], batch, index, encode=watched, **options)
        found.append([loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)])
    assert len(found[0]) > 3
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)
    return shapes[: len(shapes) // 2]


def whole(est, towers, batch, index, encode, **_):
    if isinstance(towers, nn.Module):
        outputs = encode(towers, batch)
    else:
        outputs = [encode(tower, part) for tower, part in zip(towers, batch, strict=True)]
    loss = est(*outputs, index)
    loss.backward()
    return loss


@pytest.mark.parametrize("size", [1, 2, 4, compopt.TokenBudget(40), compopt.TokenBudget(pixels=400)], ids=str)
def test_images_of_several_sizes_and_numbers(size):
    """Samples have no image, one, or two; all patches are rows of one tensor."""
    model, queries = qwen2_vl(), padded([[7] * words for words in WORDS])
    assert_same_gradients((model, model), (pages(), queries), last_token, micro_batch_size=size)


def test_one_image_per_sample_needs_no_marks():
    batch = pages([[(2, 4)], [(4, 4)], [(2, 2)], [(2, 4)], [(6, 4)], [(4, 4)]])
    del batch["mm_token_type_ids"]
    parts, counts, order = micro_batches(batch, 4, None)
    assert counts == [4, 2] and order is None
    assert [len(part["pixel_values"]) for part in parts] == [8 + 16 + 4 + 8, 24 + 16]
    assert parts[1]["image_grid_thw"].tolist() == [[1, 6, 4], [1, 4, 4]]
    assert parts[0]["pixel_values"].data_ptr() == batch["pixel_values"].data_ptr()  # a view


def test_marks_that_do_not_match_the_images():
    batch = pages()
    batch["mm_token_type_ids"][0, 2] = 0
    with pytest.raises(ValueError, match="mm_token_type_ids marks"):
        micro_batches(batch, 2, None)


@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_models_of_images_and_texts(kind):
    vision = {**TEXT, "image_size": 8, "patch_size": 4}
    text = {**TEXT, "vocab_size": 120, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1}
    options = {"projection_dim": 16} if kind == "CLIP" else {}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, **options)
    model = getattr(transformers, f"{kind}Model")(config).double().eval()  # dropout of one pass is not that of two
    batch = padded([[*[7 + words] * words, 2] for words in WORDS])
    batch["pixel_values"] = torch.randn(len(WORDS), 3, 8, 8, dtype=torch.float64)

    def encode(model, part):
        made = model(**part)
        return made.image_embeds, made.text_embeds

    budget = compopt.TokenBudget(pixels=2 * 8 * 8)
    assert len(assert_same_gradients((model,), batch, encode, micro_batch_size=budget)) == 3
    assert_same_gradients((model,), batch, encode, micro_batch_size=4)


def text_model():
    config = transformers.Qwen2Config(**TEXT, vocab_size=120, num_key_value_heads=2, bos_token_id=1, eos_token_id=2)
    return transformers.Qwen2Model(config).double()


def flattened(rows, lengths_in):
    lengths = torch.tensor([len(row) for row in rows])
    batch = {
        "input_ids": torch.tensor([[token for row in rows for token in row]]),
        "position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None],
    }
    if lengths_in == "cu_seq_lens_q":
        ends = nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": int(lengths.max())}
        batch["seq_idx"] = torch.repeat_interleave(torch.arange(len(rows)), lengths)[None].int()
    return batch


def last_of_each(model, part):
    """Encode texts without padding, whose attention is divided by ``position_ids``."""
    hidden = model(part["input_ids"], position_ids=part["position_ids"], use_cache=False).last_hidden_state[0]
    ends = (part["position_ids"][0] == 0).nonzero()[1:, 0] - 1
    return hidden[torch.cat([ends, torch.tensor([len(hidden) - 1])])]


@pytest.mark.parametrize("lengths_in", ["position_ids", "cu_seq_lens_q"])
@pytest.mark.parametrize("size", [2, compopt.TokenBudget(8)], ids=str)
def test_texts_without_padding(size, lengths_in):
    model, rows = text_model(), [torch.randint(6, 100, (words,)).tolist() for words in WORDS]
    queries = flattened([[7, words] for words in WORDS], lengths_in)
    shapes = assert_same_gradients(
        (model, model), (flattened(rows, lengths_in), queries), last_of_each, micro_batch_size=size
    )
    first = [(1, 10), (1, 7), (1, 5)] if size == 2 else [(1, 7), (1, 5), (1, 7), (1, 3)]
    assert shapes[: len(first)] == first


def test_boundaries_of_texts_are_those_of_the_micro_batch():
    batch = flattened([[1] * words for words in WORDS], "cu_seq_lens_q") | {"max_seqlen": torch.tensor(7)}
    count, take = by_sample(batch, None)
    part = take([3, 0])
    assert count == 6
    assert part["cu_seq_lens_q"].tolist() == [0, 5, 8] and part["cu_seq_lens_q"].dtype == torch.int32
    assert part["max_length_q"] == 5 and part["max_seqlen"].item() == 5
    assert part["seq_idx"].tolist() == [[0] * 5 + [1] * 3]
    assert part["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]


def test_a_rank_without_samples_has_one_empty_micro_batch():
    batch = {"input_ids": torch.zeros(1, 0).long(), "cu_seq_lens_q": torch.tensor([0])}
    (part,), counts, order = micro_batches(batch, compopt.TokenBudget(8), None)
    assert part["input_ids"].shape == (1, 0) and counts == [0] and order == []


def test_padding_is_cut_from_tokens_only():
    """Sizes of images may be those of the texts by chance."""
    mask = torch.ones(4, 8).long()
    mask[:, 6:] = 0
    images = {"pixel_values": (4, 3, 4, 8), "image_embeds": (4, 8), "pixel_values_videos": (4, 8, 2)}
    tokens = {"input_ids": (4, 8), "position_ids": (3, 4, 8), "bbox": (4, 8, 4)}
    batch = {name: torch.ones(shape) for name, shape in images.items()} | {"attention_mask": mask}
    batch |= {name: torch.ones(shape).long() for name, shape in tokens.items()} | {"embeds": torch.ones(4, 8, 2)}
    found = {name: tuple(value.shape) for name, value in without_padding(batch).items()}
    assert found == images | {
        "attention_mask": (4, 6), "input_ids": (4, 6), "position_ids": (3, 4, 6), "bbox": (4, 6, 4), "embeds": (4, 6, 2)
    }  # fmt: skip


def test_inputs_of_another_form_are_split_by_a_function():
    """Bags of words in one tensor with offsets, beside a list of extras that only some samples have."""
    table = nn.EmbeddingBag(100, 16, mode="sum").double()
    words, lengths = torch.randint(100, (sum(WORDS),)), torch.tensor(WORDS)

    def split(inputs):
        return [
            {"words": part, "lengths": length[None], "names": ["x"], "scale": 2.0}
            for part, length in zip(inputs["words"].split(WORDS), inputs["lengths"], strict=True)
        ]

    def encode(table, part):
        assert len(part["lengths"]) == len(part.get("names", WORDS)) and part["scale"] == 2.0
        return table(part["words"], part["lengths"].cumsum(0) - part["lengths"]) * part["scale"]

    second, columns = nn.Linear(3, 16).double(), {"x": torch.randn(6, 3, dtype=torch.float64)}
    batch = ({"words": words, "lengths": lengths, "scale": 2.0}, columns)

    def both(tower, part):
        return tower(part["x"]) if tower is second else encode(tower, part)

    sizes = (compopt.TokenBudget(8, lengths=lambda inputs: WORDS), 4)
    assert_same_gradients((table, second), batch, both, micro_batch_size=sizes, split=(split, None))
    with pytest.raises(ValueError, match="give split="):
        compopt.gradient_cache(compopt.DCLEstimator(), (table, second), batch, micro_batch_size=2)


# budgets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["sogclr", "infonce"])
def test_a_budget_of_tokens_sorts_samples_and_cuts_padding(kind, side):
    model = text_model()
    est = compopt.SogCLREstimator(6, tau=0.1) if kind == "sogclr" else None
    texts, queries = (padded([[token] * words for words in WORDS], side) for token in (7, 9))
    shapes = assert_same_gradients(
        (model, model), (texts, queries), last_token, est, micro_batch_size=compopt.TokenBudget(10)
    )
    assert shapes == [(1, 7), (2, 5), (3, 3)] * 2


def test_several_features_per_sample_keep_their_order():
    """The third tower returns two further candidates for each sample."""
    first, second, index = nn.Linear(3, 8).double(), nn.Linear(5, 8).double(), torch.arange(6)
    x, y = torch.randn(6, 3).double(), {"input_ids": torch.randn(6, 2, 5).double()}
    est, found = compopt.InfoNCEEstimator(0.1), []
    positions = index.repeat_interleave(2) + 100

    def encode(tower, part):
        return tower(part["input_ids"]).flatten(0, 1) if isinstance(part, dict) else tower(part)

    for cached in (False, True):
        first.zero_grad(), second.zero_grad()
        if cached:
            budget = compopt.TokenBudget(3, lengths=lambda part: WORDS[: len(part["input_ids"])])
            towers, batch = (first, first, second), (x, x * 2, y)
            options = {"micro_batch_size": (2, 3, budget), "encode": encode, "negatives": (None, positions)}
            loss = compopt.gradient_cache(est, towers, batch, index, **options)
        else:
            loss = est(first(x), first(x * 2), index, negatives=(encode(second, y), positions))
            loss.backward()
        found.append([loss.detach(), first.weight.grad, second.weight.grad])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [
        (lambda: compopt.TokenBudget(), ValueError, "needs tokens, pixels, or both"),
        (lambda: compopt.TokenBudget(0), ValueError, "tokens must be"),
        (lambda: compopt.TokenBudget(pixels=1.5), TypeError, "pixels must be"),
        (lambda: compopt.TokenBudget(8), ValueError, "give TokenBudget"),
        (lambda: compopt.TokenBudget(8, lengths=lambda x: [1, 2]), ValueError, "one number per sample, 6, got 2"),
        (lambda: compopt.TokenBudget(8, lengths=lambda x: [1, 2, 3, 4, 5, 6]), ValueError, "same number of features"),
    ],
)
def test_mistakes(budget, error, message):
    tower, x = nn.Linear(3, 8), torch.randn(6, 3)

    def encode(tower, part):
        return tower(part)[:1]

    with pytest.raises(error, match=message):
        compopt.gradient_cache(
            compopt.DCLEstimator(), (tower, tower), (x, x), micro_batch_size=(budget(), 6), encode=encode
        )
