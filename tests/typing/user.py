"""User code, checked by `make lint` with `mypy --strict`; never run. assert_type checks the expected types."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.hooks import RemovableHandle
from typing_extensions import assert_type

import compopt

Batch = tuple[Tensor, Tensor, Tensor]


class Engine:
    """A wrapper around an optimizer, like DeepSpeed's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def losses(model: nn.Module, batches: Iterable[Batch], est: compopt.ContrastiveEstimator) -> list[float]:
    """The loop of the README, over batches of a known type."""
    values = []
    for image, text, index in est.prefetch(batches):
        assert_type(image, Tensor)
        assert_type(index, Tensor)
        loss = est(model(image), model(text), index)
        assert_type(loss, Tensor)
        torch.autograd.backward(loss)
        values.append(loss.item())
    return values


def train(path: str) -> dict[str, float]:
    """Use construction, groups, schedules, samplers, checkpoints and reading."""
    dataset = compopt.data.Indexed(TensorDataset(torch.randn(100, 8), torch.randn(100, 8)))
    sampler = compopt.samplers.SpectralBatchSampler(len(dataset), batch_size=10)
    loader = DataLoader(dataset, batch_sampler=sampler)
    est = compopt.SogCLREstimator([{"n": 60, "gamma": 0.8}, {"n": 40}], gamma=0.9, tau=0.07, offload="cpu")
    assert_type(est.train(), compopt.SogCLREstimator)
    assert_type(est.eval(), compopt.SogCLREstimator)
    assert_type(est.to("cpu"), compopt.SogCLREstimator)
    compopt.FastCLIPEstimator(100, **compopt.presets.settings("fastclip-v3", scale="laion"))
    dual = compopt.TemperatureDual(100, rho=1.0, lr=2e-3)
    whole = compopt.ContrastiveEstimator(compopt.MovingAverageEstimator(100), dual, mode="unimodal")
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW([*model.parameters(), *est.parameters()])
    assert_type(est.attach(optimizer), RemovableHandle)
    assert_type(est.attach(optimizer, checkpoint=True), RemovableHandle)
    model.add_module("loss", compopt.as_module(est).train())
    est.register_step_post_hook(lambda *_: None).remove()
    schedule = compopt.schedules.CosineGamma(est, decay_steps=100)
    ahead = est.prefetch(loader)
    print(len(ahead), ahead.batch_size)
    for image, text, index in ahead:
        z1, z2 = model(image), model(text)
        loss, g1, g2 = est.feature_gradients(z1, z2, index)
        assert_type(g1, Tensor)
        torch.autograd.backward((z1, z2), (g1, g2))
        assert_type(compopt.gradient_cache(est, model, image, index, micro_batch_size=4, reduce=False), Tensor)
        optimizer.step()
        schedule.step()
        sampler.observe(index, z1, z2)
        whole.prefetch(index)
        assert_type(whole(z1, z2, index), Tensor)
    est.sample_groups[0]["gamma"] = 0.5
    est.add_sample_group({"n": 10, "gamma": 0.7})
    columns = est.read(torch.arange(4))
    assert_type(columns["log_u"], Tensor)
    torch.save({"est": est.state_dict(), "sampler": sampler.state_dict()}, path)
    est.load_state_dict(torch.load(path)["est"])
    compopt.load(est, compopt.save(est, path + ".compopt"))
    error = compopt.diagnostics.normalizer_error(est, torch.randn(100, 4), torch.randn(100, 4))
    print(error)
    u = compopt.MovingAverageEstimator(100, gamma=0.5)
    risk = compopt.compositional_loss(torch.rand(4), torch.arange(4), u, torch.log)
    assert_type(risk, Tensor)
    precision = compopt.losses.AveragePrecisionLoss(100, offload="cpu")
    precision.attach(optimizer)
    assert_type(precision(torch.rand(4), torch.arange(4) > 2, torch.arange(4)), Tensor)
    return {name: value.item() for name, value in est.metrics.items()}


def alone(path: str, optimizer: torch.optim.Optimizer, index: Tensor, x: Tensor) -> None:
    """Use each of the four objects on its own, one as a part, and the methods that all of them have."""
    u = compopt.MovingAverageEstimator(100)
    tau = compopt.TemperatureDual(100, offload="cpu")
    network = compopt.NeuralNormalizer(8, dtype=torch.float64)
    chains = compopt.MCMCNegativeSampler([{"n": 60, "burn_in": 2}, {"n": 40}])
    assert_type(u.update(x, index), Tensor)
    assert_type(tau.update(x, index), Tensor)
    assert_type(tau.value(index), Tensor)
    assert_type(network.update(x, x[:, 0], 0.1, candidates=x), Tensor)
    assert_type(network.predict(x, tau.value(index)), Tensor)
    assert_type(chains.sample(x, index, index), Tensor)
    each: compopt.Estimator
    for each in (u, tau, network, chains):
        assert_type(each.attach(optimizer), RemovableHandle)
        each.step()
        each.discard()
        each.load_state_dict(each.state_dict())
        compopt.load(each, compopt.save(each, path))
        assert_type(each.sample_groups[0]["n"], Any)
    assert_type(u.train().eval(), compopt.MovingAverageEstimator)
    assert_type(u.to("cpu").read(index)["log_u"], Tensor)
    u.prefetch(index)
    u.add_sample_group({"n": 10, "gamma": 0.5})
    u.register_step_post_hook(lambda *_: None).remove()
    est = compopt.ContrastiveEstimator(compopt.MovingAverageEstimator(100), compopt.FixedTemperature(0.1))
    est.normalizer.load_state_dict(est.normalizer.state_dict())
    assert_type(est.temperature.read(index), dict[str, Tensor])


def wrong(model: nn.Module, engine: Engine, est: compopt.Estimator) -> None:
    """Make calls that type checkers report: `--strict` rejects an unnecessary ignore comment."""
    u, tau = compopt.MovingAverageEstimator(100), compopt.FixedTemperature(0.1)
    compopt.ContrastiveEstimator(u, tau, mode="bimodl")  # type: ignore[arg-type]
    compopt.ContrastiveEstimator(u, tau, directions="back")  # type: ignore[arg-type]
    compopt.ContrastiveEstimator(u, tau, offload="gpu")  # type: ignore[arg-type]
    compopt.MovingAverageEstimator(100, reference="nothing")  # type: ignore[arg-type]
    compopt.SogCLREstimator(100, mode="bimodl")  # type: ignore[arg-type]
    compopt.FastCLIPEstimator(100, parametrization="exp")  # type: ignore[arg-type]
    compopt.SogCLREstimator(100, directions="back")  # type: ignore[arg-type]
    compopt.SogCLREstimator(100, offload="gpu")  # type: ignore[arg-type]
    compopt.SogCLREstimator(100, reference="nothing")  # type: ignore[arg-type]
    compopt.TemperatureDual(100, offload="gpu")  # type: ignore[arg-type]
    est.attach(model)  # type: ignore[arg-type]
    est.attach(engine)
