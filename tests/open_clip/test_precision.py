"""Mixed precision, skipped updates, clipped gradients."""

import pytest
import torch

from tests.open_clip import tiny


@pytest.mark.parametrize("precision", ["amp_bf16", "pure_bf16", "amp"])
@pytest.mark.parametrize("ours", ["sogclr", "clip"])
@pytest.mark.parametrize("batches", [1, 2])
def test_precisions_train(tmp_path, data, precision, ours, batches):
    options = {"precision": precision, "accum_freq": batches, "batch_size": 8 // batches, "epochs": 2}
    watch = tiny.train(["--estimator", ours], tiny.arguments(tmp_path, train_data=data, **options))
    assert watch.updates >= 1 and watch.est.t == (watch.updates if ours == "sogclr" else 0)
    assert all(torch.isfinite(value).all() for value in watch.weights.values())


@pytest.mark.parametrize("batches", [1, 2])
def test_a_skipped_update_commits_nothing(tmp_path, data, batches):
    """The second backward pass of the run overflows; GradScaler then skips the optimizer step."""
    passes = []

    def overflow(gradient):
        passes.append(1)
        return gradient * float("inf") if len(passes) == batches + 1 else gradient

    def prepare(call, watch):
        call["scaler"]._init_scale = 1.0
        watch.model.visual.proj.register_hook(overflow)

    options = {"precision": "amp", "accum_freq": batches, "batch_size": 4 // batches}
    watch = tiny.train(["--estimator", "sogclr"], tiny.arguments(tmp_path, train_data=data, **options), prepare=prepare)
    assert watch.updates == watch.est.t == 3
    skipped = torch.cat([index for _, index in watch.seen[batches : 2 * batches]])
    expected = torch.ones(tiny.N, dtype=torch.int32).index_fill(0, skipped, 0)
    assert watch.rows()["count"].tolist() == expected.tolist()


@pytest.mark.parametrize("batches", [1, 2])
def test_a_locked_tower(tmp_path, data, batches):
    """Train with gradients of one tower only, also with accumulation."""
    options = {"lock_image": True, "accum_freq": batches, "batch_size": 8 // batches}
    watch = tiny.train(["--estimator", "sogclr"], tiny.arguments(tmp_path, train_data=data, **options))
    assert watch.updates == 2 and all(not name.startswith("visual") for name in watch.gradients[0])
