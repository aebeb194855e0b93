"""``torch.compile`` around an estimator and next to it: the same results, without recompilation in each step."""

import pytest
import torch

import compopt
from tests.training import Encoders, N, micro_batches, rows, weights

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("error:Dynamo does not know")]

STEPS, WARM = 5, 2
BACKENDS = ("eager", "aot_eager")


class Owner(torch.nn.Module):
    """Encoders with the loss as a submodule."""

    def __init__(self, encoders, est):
        super().__init__()
        self.encoders, self.loss = encoders, compopt.as_module(est)

    def forward(self, x1, x2, index):
        return self.loss(*self.encoders(x1, x2), index)


ESTIMATORS = {
    "SogCLR": lambda **options: compopt.SogCLREstimator(N, gamma=0.8, tau=0.2, **options),
    "iSogCLR": lambda **options: compopt.ISogCLREstimator(N, rho=0.5, **options),
    "InfoNCE, learned tau": lambda **options: compopt.InfoNCEEstimator(tau=0.2, learn_tau=True),
    "EMC2": lambda **options: compopt.EMC2Estimator(N, tau=0.2, **options),
    "NeuCLIP": lambda **options: compopt.NeuCLIPEstimator(6, prototypes=6, updates=2, **options),
}


def beside(model, est, make):
    model = make(model)
    return lambda x1, x2, index: est(*model(x1, x2), index)


# Compiled part -> function of the batch that returns the loss
PLACES = {
    "beside": beside,
    "around": lambda model, est, make: make(lambda x1, x2, index: est(*model(x1, x2), index)),
    "inside": lambda model, est, make: make(Owner(model, est)),
}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def train(kind, place, make, whole=False):
    """Train a few steps, with an error on recompilation after the first ones. -> losses, weights, rows"""
    torch.manual_seed(0)
    model, est = Encoders(), ESTIMATORS[kind](**({} if "learned" in kind else {"dtype": torch.float64}))
    kind_of = torch.optim.SGD if whole else torch.optim.AdamW  # a compiled AdamW has its scalars in float32
    optimizer = kind_of([*model.parameters(), *est.parameters()], lr=1e-2)
    est.attach(optimizer)
    loss_of = PLACES[place](model, est, (lambda each: each) if whole else make)

    def step(*batch):
        loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = make(step) if whole else step
    losses = []
    for number, batch in enumerate(micro_batches(STEPS)):
        with torch._dynamo.config.patch(error_on_recompile=number >= WARM):
            losses.append(step(*batch))
    assert est.t == (0 if kind.startswith("InfoNCE") else STEPS)
    return torch.stack(losses), weights(model), rows(est) if est.n else torch.zeros(1)


def compiled(backend):
    return lambda function: torch.compile(function, backend=backend)


@pytest.mark.covering()
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_the_same_results_without_recompilation(kind, place, backend):
    expected = train(kind, place, lambda function: function)
    torch.testing.assert_close(train(kind, place, compiled(backend)), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_cache(backend):
    """Test ``feature_gradients`` in a compiled function."""
    results = []
    for make in (lambda function: function, compiled(backend)):
        torch.manual_seed(0)
        model, est = Encoders(), ESTIMATORS["SogCLR"](dtype=torch.float64)
        gradients = make(lambda z1, z2, index, est=est: est.feature_gradients(z1 * 1, z2 * 1, index))
        for number, (x1, x2, index) in enumerate(micro_batches(STEPS)):
            with torch._dynamo.config.patch(error_on_recompile=number >= WARM):
                found = gradients(*(z.detach() for z in model(x1, x2)), index)
            est.step()
        results.append(found)
    torch.testing.assert_close(*results)
