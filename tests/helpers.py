"""Shared helpers of the generic tests: batches, comparisons, gradients."""

from __future__ import annotations

import io
import json
import pickle
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from compopt import PairPolicy


def carried_out(study, run_one) -> dict[str, dict]:
    """Return the results of all tuning and final runs of a study by the keys of their jobs."""
    told = {"machine": "m", "threads": 1, "python": "3", "torch": "2", "commit": "c", "date": "d"}
    results: dict[str, dict] = {}
    for arm in study.arms:
        while jobs := study.next_jobs(arm, results, final=True):
            results |= {job.key: {"job": json.loads(job.key), **run_one(job, None), **told} for job in jobs}
    return results


def generator(seed: int) -> torch.Generator:
    """Return a seeded generator."""
    return torch.Generator().manual_seed(seed)


def features(batch: int, dim: int, seed: int, spread: float = 0.8, dtype=torch.float64) -> tuple[Tensor, Tensor]:
    """Return two matrices of unnormalised features; row i of the second is near row i of the first."""
    g = generator(seed)
    z1 = torch.randn(batch, dim, generator=g, dtype=torch.float64)
    z2 = z1 + spread * torch.randn(batch, dim, generator=g, dtype=torch.float64)
    scale = 0.5 + torch.rand(batch, 1, generator=g, dtype=torch.float64)
    return (z1 * scale).to(dtype), z2.to(dtype)


def batches(n, steps, batch=6, dim=4, seed=0, repeats=True, dtype=torch.float64):
    """Return a list of (z1, z2, index); with ``repeats`` every second batch contains an index twice or more."""
    g = generator(1000 + seed)
    result = []
    for t in range(steps):
        index = torch.randperm(n, generator=g)[:batch]
        if repeats and t % 2:
            index[-1] = index[0]
            if t % 4 == 3:
                index[2] = index[0]
        result.append((*features(batch, dim, 100 * seed + t, dtype=dtype), index))
    return result


def asked(est, extra=None, extra_index=None, guide=None, within=None, **given):
    """Return the arguments of a call from their parts: of ``negatives``, and of the policy, that of the call or of est.

    ``encode`` becomes that of the sampler. Not for references, which take the parts.
    """
    if "encode" in given:
        est.normalizer.encode = given.pop("encode")
    if extra is not None or extra_index is not None:
        given["negatives"] = extra if extra_index is None else (extra, extra_index)
    if guide is not None or within is not None:
        given["pairs"] = (given.get("pairs") or est.pairs or PairPolicy()).bind(guide=guide, within=within)
    return given


def call(est, z1, z2, index=None, **parts) -> Tensor:
    """Return the loss of a call with its arguments from their parts, see :func:`asked`."""
    return est(z1, z2, index, **asked(est, **parts))


def run(est, z1, z2, index, grad_output=None, **parts) -> tuple[Tensor, ...]:
    """Run one forward and backward; return (loss, g1, g2), and the gradient of extra if given. See :func:`asked`."""
    leaves = [z.detach().clone().requires_grad_() for z in (z1, z2)]
    if "extra" in parts:
        leaves.append(parts["extra"].detach().clone().requires_grad_())
        parts = {**parts, "extra": leaves[2]}
    loss = call(est, *leaves[:2], index, **parts)
    loss.backward(grad_output)
    return loss.detach(), *(z.grad for z in leaves)


def train(est, data):
    """Train; return the bytes of all losses and gradients."""
    trace = []
    for z1, z2, index in data:
        trace += [bits(x) for x in run(est, z1, z2, index)]
        est.step()
    return trace


def warmed(info, mode, n, seed, **options):
    """Return an estimator after two committed steps."""
    est, _ = make(info, mode, n, gamma=0.6, **options)
    train(est, batches(n, 2, seed=seed))
    return est


def through_a_file(state):
    """Save a state to a file and load it, as a user does."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def make(info, mode, n, dtype=torch.float64, tau=0.07, gamma=0.9, **options):
    """Return the estimator of one database entry and its twin."""
    tau = max(tau, info.min_tau)
    kind = {"mode": "bimodal", "directions": "forward"} if mode == "forward" else {"mode": mode}
    est = info.build(kind.pop("mode"), n, dtype, tau, gamma, **kind, **options)
    ref = info.twin(mode, n, tau, gamma)
    if info.tau_leaf and info.tau_chain(tau) < 0:  # log(1/tau) is stored: use the exact stored value
        ref.temperature.tau = float(torch.exp(-info.tau_leaf(est).detach().double()))
    return est, ref


def near(actual, expected, rtol=1e-10, atol=None, what=""):
    """assert_close with an absolute tolerance relative to the largest entry."""
    actual, expected = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (actual, expected))
    if atol is None:
        atol = rtol * max(1e-30, float(expected.abs().max())) if expected.numel() else 0.0
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=atol, msg=lambda m: f"{what}: {m}\ngot {actual}\nwant {expected}"
    )


def compare_state(est, ref, n, info, rtol=1e-10):
    """Assert that committed rows and the global temperature equal the reference's."""
    if info.global_tau:
        near(est.temperature.tau, ref.temperature.tau, rtol, what="global tau")
    if not info.has_rows:
        return
    columns = est.read(torch.arange(n))
    counts = [ref.visits(i, 0) for i in range(n)]
    assert columns["count"].tolist() == counts
    assert set(info.columns) <= set(columns), f"read() lacks {set(info.columns) - set(columns)}"
    seen = [i for i in range(n) if counts[i]]
    if not seen:
        return
    for name in info.columns:
        want = torch.tensor([ref.read(i)[name] for i in seen], dtype=torch.float64)
        assert columns[name].shape == (n, ref.columns), (name, columns[name].shape)
        near(columns[name][seen], want, rtol, atol=max(rtol * float(want.abs().max()), rtol), what=name)


def snapshot(est, n) -> dict[str, Tensor]:
    """Return a copy of everything that a user can read: rows, global tau."""
    state = {}
    with suppress(RuntimeError, ValueError, IndexError, TypeError):  # estimators without rows may refuse to read
        state = {k: v.clone() for k, v in est.read(torch.arange(n)).items()}
    tau = getattr(getattr(est, "temperature", None), "tau", None)
    if isinstance(tau, Tensor):
        state["global_tau"] = tau.detach().clone()
    for name, own in leaves(est.state_dict()).items():
        state.update({f"{name}.{key}": value for key, value in own["state"].items()})
    return state


def leaves(state: dict) -> dict[str, dict]:
    """Return the states of the objects in a state, by name; ``""`` for an object that is used alone."""
    return state.get("parts") or {"": state}


def rows_of(state: dict) -> dict[str, Tensor]:
    """Return the columns of all objects in a state, with the visits of the first object that has rows."""
    found: dict[str, Tensor] = {}
    for own in leaves(state).values():
        found = {**own["rows"], **found}
    return found


def of_0_3(state: dict, name: str = "normalizer") -> dict:
    """Return a state in the form of 0.3, in which all objects had one table; ``name``: of an object that is alone."""
    objects = state.get("parts") or {name: state}
    configs = {name: own["config"] for name, own in objects.items()}
    options = {name: config["options"] for name, config in configs.items() if config["options"]}
    keys = [key for own in objects.values() for key in own["sample_groups"][0]]
    groups = [
        {
            f"{name}.{key}" if keys.count(key) > 1 and key != "n" else key: value
            for name, own in objects.items()
            for key, value in own["sample_groups"][number].items()
        }
        for number in range(len(next(iter(objects.values()))["sample_groups"]))
    ]
    first = next(iter(configs.values()))
    columns = {key: value for config in configs.values() for key, value in config["columns"].items()}
    config = {
        "mode": first["mode"],
        "method": {name: config["method"] for name, config in configs.items()},
        "dtype": first["dtype"],
        "n": first["n"],
        "options": {**(state["config"]["options"] if "parts" in state else {}), **options},
        "columns": columns,
    }
    extra = {name: own["state"] for name, own in objects.items()}
    about = {"version": 1, "config": config, "sample_groups": groups, "t": state["t"]}
    return {**about, "rows": rows_of(state), "extra": extra}


def tensors_of(state: dict) -> dict[str, Tensor]:
    """Return all tensors of a state by name."""
    found = {}
    for name, own in leaves(state).items():
        found |= {f"{name}.{key}": value for kind in ("rows", "state") for key, value in own[kind].items()}
    return found


def bits(x: Tensor) -> bytes:
    """Return the bytes of a tensor; their equality is bitwise equality (NaN included)."""
    return x.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes() if x.dim() else bits(x.reshape(1))


class ByValue(pickle.Pickler):
    """Pickler that writes tensors by value, for comparisons; torch writes their addresses."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return tuple, ((str(value.dtype), tuple(value.shape), content),)


def whole(made: Any) -> bytes:
    """Return everything that belongs to an object, as bytes."""
    file = io.BytesIO()
    ByValue(file).dump(made)
    return file.getvalue()


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]):
    """Assert that two snapshots are bit-identical."""
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype and a[key].shape == b[key].shape, key
        assert bits(a[key]) == bits(b[key]), f"{key}: {a[key]} != {b[key]}"


def group_key(sample_group: dict, name: str) -> str:
    """Return the key of a hyper-parameter, which may be prefixed by its component."""
    if name in sample_group:
        return name
    found = [key for key in sample_group if key.endswith("." + name)]
    assert len(found) == 1, f"no unique key for {name!r} in {sorted(map(str, sample_group))}"
    return found[0]
