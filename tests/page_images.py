"""Stand-ins for a published visual retriever and pages as images, for docs/guides/gradient_cache.md."""

import torch
import transformers
from PIL import Image

import compopt

__all__ = ["COLOURS", "Pages", "StandIn", "small", "trains"]

COLOURS = {"red": (200, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 200), "grey": (90, 90, 90)}
WORDS = ["<pad>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "page", *COLOURS]


class StandIn:
    """Processor with a vocabulary of words, and the image processor of Qwen2-VL."""

    images = transformers.Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=4096)

    def __call__(self, text, images=None, padding=True, return_tensors="pt"):
        made = dict(self.images(images, return_tensors="pt")) if images else {}
        tokens = [size.prod().item() // 4 for size in made.get("image_grid_thw", [])]
        rows = [[WORDS.index(word) for word in line.replace("|><|", "|> <|").split()] for line in text]
        if images:
            rows = [row[:1] + [3] * count + row[2:] for row, count in zip(rows, tokens, strict=True)]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        marks = {"mm_token_type_ids": (ids == 3).long()} if images else {}
        return {"input_ids": ids, "attention_mask": mask, **marks, **made}


def small(*args, **kwargs):
    """Return a model of the kind of Qwen2-VL that trains in seconds."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": len(WORDS), "rope_parameters": rope, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4}
    marks = {"image_token_id": 3, "vision_start_token_id": 1, "vision_end_token_id": 2, "video_token_id": 0}
    return transformers.Qwen2VLModel(transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **marks))


class Pages(torch.utils.data.Dataset):
    """Pages of one colour and of different sizes, with the query that finds them."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        colour = list(COLOURS)[i % 4]
        return f"page {colour}", Image.new("RGB", (16 + 8 * (i % 5), 16 + 8 * (i % 3)), COLOURS[colour]), i


def trains(call, model, loader, optimizer, encode):
    """Assert that the model of the page finds the pages, and that a batch is cut by its tokens."""
    seen, colours = [], torch.arange(64) % len(COLOURS)

    def counted(model, part):
        seen.append(len(part["input_ids"]))
        return encode(model, part)

    for _ in range(8):
        for texts, documents, index in loader:
            sizes = 32, compopt.TokenBudget(200)
            given = {"micro_batch_size": sizes, "encode": counted, "labels": colours[index]}
            loss = call((model, model), (texts, documents), index, **given)
            optimizer.step()
            optimizer.zero_grad()
    assert len(seen) > 8 * 2 * 2 and loss < 0.3, (len(seen), loss)
