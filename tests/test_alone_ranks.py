"""The four objects alone in several processes: accelerate, DDP, FSDP2, checkpoints, placements, loader workers."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import compopt
from tests.four import KINDS, PLACES, assert_alike, call, loss, reference, state
from tests.pool import the_pool
from tests.test_integrations import Samples, accelerator, counting, full_weights
from tests.training import DIM, MICRO, WINDOW, Encoders, N, micro_batches, needs_fsdp2, weights

pytestmark = [pytest.mark.distributed, pytest.mark.launch]
COUNT, SAVED = 7, 4  # micro-batches in total (the last window is incomplete), and before the save


# accelerate ---------------------------------------------------------------------------------------


def run_accelerate(group, kind, ranks, folder):
    from compopt.integrations import accelerate as integration

    def prepared(acc):
        model = Encoders()
        optimizer = torch.optim.AdamW(model.groups(), lr=1e-2)
        loader = torch.utils.data.DataLoader(Samples(COUNT, torch.float64), batch_size=MICRO // ranks)
        model, optimizer, loader = acc.prepare(model, optimizer, loader)
        obj = KINDS[kind](dtype=torch.float64, shard=ranks > 1)
        integration.attach(obj, optimizer, acc)
        integration.register_for_checkpointing(obj, acc)
        return model, optimizer, loader, obj

    def train(acc, parts, steps, save=False):
        model, optimizer, loader, obj = parts
        trace = []
        for step, (x1, x2, index) in enumerate(obj.prefetch(loader)):
            if step not in steps:
                continue
            with acc.accumulate(model):
                acc.backward(loss(obj, *model(x1, x2), index))
                optimizer.step()
                optimizer.zero_grad()
            if acc.sync_gradients:
                trace.append((weights(model), state(obj)))
            if save and step == SAVED - 1:
                acc.save_state(folder)
        return trace

    with accelerator(gradient_accumulation_steps=WINDOW) as acc:
        parts = prepared(acc)
        commits = counting(parts[3])
        trace = train(acc, parts, range(COUNT), save=True)
        counts = len(commits), parts[3].t, parts[3].pending
    with accelerator(gradient_accumulation_steps=WINDOW) as acc:
        parts = prepared(acc)
        train(acc, parts, range(SAVED - 1))  # other steps; the last proposals are pending
        assert parts[3].pending == 1
        acc.load_state(folder)
        parts[0].zero_grad()
        return trace, counts, (parts[3].t, parts[3].pending), train(acc, parts, range(SAVED, COUNT))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_accelerate(kind, ranks, tmp_path):
    """One commit per update, the results of plain torch on one process, and a resume that is bit-identical."""
    arguments = kind, ranks, str(tmp_path / "state")
    run = the_pool(2, timeout=120).run
    results = run(run_accelerate, 2, *arguments) if ranks > 1 else [run_accelerate(None, *arguments)]
    expected = reference(kind, COUNT)
    for trace, counts, loaded, resumed in results:
        assert counts == (len(expected), len(expected), 0) and loaded == (SAVED // WINDOW, 0)
        assert_alike(trace, expected, 1e-10)
        assert_alike(resumed, trace[SAVED // WINDOW :], 0)


# plain torch --------------------------------------------------------------------------------------


def run_wrapped(group, kind, wrapper):
    model = Encoders()
    if wrapper == "ddp":
        wrapped, find = DistributedDataParallel(model), weights
    else:
        from torch.distributed.fsdp import fully_shard

        wrapped, find = fully_shard(model), full_weights
    obj = KINDS[kind](dtype=torch.float64, shard=True)
    optimizer = torch.optim.AdamW(model.groups(), lr=1e-2)
    obj.attach(optimizer)
    trace = []
    for step, (x1, x2, index) in enumerate(micro_batches(2 * WINDOW, dist.get_rank(), 2)):
        (loss(obj, *wrapped(x1, x2), index) / WINDOW).backward()
        if step % WINDOW == WINDOW - 1:
            optimizer.step()
            optimizer.zero_grad()
            trace.append((find(model), state(obj)))
    return trace


@pytest.mark.parametrize("wrapper", ["ddp", pytest.param("fsdp2", marks=needs_fsdp2)])
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_equal_one(kind, wrapper):
    for trace in the_pool(2, timeout=120).run(run_wrapped, 2, kind, wrapper):
        assert_alike(trace, reference(kind, 2 * WINDOW), 1e-10)


def run_orders(group):
    obj = KINDS["network"]()
    for x1, x2, index in micro_batches(3, dist.get_rank(), 2):
        loss(obj, x1, x2, index)
        obj.step()
    saved = obj.state_dict()
    entries = saved["extra"]["normalizer"]
    order = sorted(entries, reverse=bool(dist.get_rank()))
    obj.load_state_dict({**saved, "extra": {"normalizer": {name: entries[name] for name in order}}})
    again = obj.state_dict()["extra"]["normalizer"]
    return all(torch.equal(again[name], entries[name]) for name in entries)


def test_ranks_may_load_entries_in_other_orders():
    """Split tensors are joined by name, since safetensors gives each process its own order."""
    assert the_pool(2, timeout=120).run(run_orders, 2) == [True, True]


# workers ------------------------------------------------------------------------------------------


class Seen(torch.utils.data.Dataset):
    """Data set that returns the rows which a worker reads of the object that the data set holds."""

    def __init__(self, obj):
        self.obj = obj

    def __len__(self):
        return N

    def __getitem__(self, at):
        if isinstance(self.obj, compopt.NeuralNormalizer):
            return self.obj.predict(torch.full((1, DIM), at + 1.0), 0.5)
        if isinstance(self.obj, compopt.TemperatureDual):
            return self.obj.value(torch.tensor([at])).reshape(1)
        return torch.cat([column.double().flatten() for column in self.obj.read(torch.tensor([at])).values()])


@pytest.mark.parametrize(("kind", "offload"), PLACES)
def test_forked_workers_read_what_was_committed_before_them(kind, offload, tmp_path):
    place = {"offload": offload} if offload else {}
    obj = KINDS[kind](**place, **({"offload_dir": tmp_path} if offload == "disk" else {}))

    def train():
        for x, _, index in micro_batches(3, dtype=torch.float32):
            call(obj, x, index)
            obj.step()

    train()
    expected = torch.stack([Seen(obj)[at] for at in range(N)])
    options = {"num_workers": 1, "multiprocessing_context": "fork", "timeout": 60}
    batches = iter(torch.utils.data.DataLoader(Seen(obj), batch_size=N // 4, **options))
    found = [next(batches)]
    train()  # the main process continues to train
    assert torch.equal(torch.cat([*found, *batches])[: N // 4], expected[: N // 4]) and obj.t == 6
