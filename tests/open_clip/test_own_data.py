"""The recipe for users' own data with encoders of timm and open_clip, and loading trained models from a folder."""

import json
import re

import open_clip
import pytest
import timm
import torch
from safetensors.torch import save_file

from recipes import own_data
from tests.launching import ROOT
from tests.open_clip import tiny


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for at in range(60):
        tiny.picture(at).save(folder / f"{at}.png")
        (folder / f"{at}.txt").write_text(f"number {at}")
    return folder


def test_a_model_of_open_clip_is_trained_and_loaded_from_a_folder(pictures, tmp_path, capsys):
    tiny.add_model()
    run = [str(pictures), "--model", "open_clip:ViT-tiny", "--batch-size", "16", "--output", str(tmp_path / "run")]
    own_data.main([*run, "--stop-after", "1"])
    own_data.main([*run, "--resume"])
    assert "epoch 2: loss" in capsys.readouterr().out
    model, tokenizer = own_data.build("open_clip:ViT-tiny", [], 32)
    model.load_state_dict(torch.load(tmp_path / "run" / "last.pt")["model"])
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file(model.model.state_dict(), folder / "open_clip_model.safetensors")
    config = {"model_cfg": open_clip.get_model_config("ViT-tiny"), "preprocess_cfg": {}}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    loaded = open_clip.create_model(f"local-dir:{folder}").eval()
    texts = open_clip.get_tokenizer(f"local-dir:{folder}")(["number 3"])
    torch.testing.assert_close(loaded.encode_text(texts), model.eval().text(tokenizer(["number 3"])))


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "fastvit_t8"])
def test_encoders_of_timm_take_pictures_of_the_given_size(name, tmp_path):
    """The encoders are the same after an export by the lines of docs/guides/own_data.md."""
    model, _ = own_data.build(f"timm:{name}", ["a text"], 64)
    pictures = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    features = model.eval().image(pictures)
    assert features.shape == (2, own_data.DIM)
    scaled, encoder = model.image
    timm.models.save_for_hf(encoder, str(tmp_path))
    folder, page = str(tmp_path), (ROOT / "docs" / "guides" / "own_data.md").read_text()
    read = re.search(r'`(timm.create_model\("local-dir:".*?\))`', page)[1]
    loaded = eval(read, {"timm": timm, "folder": folder}).eval()
    torch.testing.assert_close(loaded(scaled(pictures)), features)


def test_what_a_model_has_for_a_loss_of_its_own_is_not_trained(tmp_path):
    """DistributedDataParallel rejects parameters that no output depends on, such as the bias of SigLIP's loss."""
    tiny.add_model()
    config = open_clip.get_model_config("ViT-tiny") | {"init_logit_bias": -10}
    (tmp_path / "ViT-tiny-bias.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path)
    model, tokenizer = own_data.build("open_clip:ViT-tiny-bias", [], 32)
    z1, z2 = model(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), tokenizer(["one", "two"]))
    (z1.sum() + z2.sum()).backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
