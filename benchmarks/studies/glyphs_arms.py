"""The arms of the glyph study: methods, regimes and the grids that settings are chosen from."""

from __future__ import annotations

from typing import Any

from benchmarks.studies.jobs import Arm, Grid

TAUS = (0.05, 0.08, 0.12)  # common to all; a method whose best lay at an edge got one value more beyond it
REGIME_TAUS = (0.05, 0.08)


def main_arms() -> list[Arm]:
    """Batch 64, two epochs, and InfoNCE with four times the batch for comparison."""
    gammas = (0.5, 0.8, 0.95)
    rho = {"rho": (1.0, 2.5)}
    dual = {"tau": TAUS, **rho, "tau_lr": (0.002, 0.01)}
    return [
        Arm("main", "infonce", {"tau": (*TAUS, 0.18)}),
        Arm("main", "infonce-no-positive", {"tau": (0.03, *TAUS)}),
        Arm("main", "clip", {"tau": (*TAUS, 0.18)}),
        Arm("main", "sogclr", {"tau": TAUS, "gamma": gammas, "reference": ("none",)}),
        Arm("main", "sogclr", {"tau": TAUS, "gamma": gammas, "reference": ("positive",)}, variant="reference positive"),
        Arm("main", "isogclr", {**dual, "reference": ("positive",)}, variant="reference positive"),
        Arm("main", "isogclr", {**dual, "reference": ("none",)}, variant="reference none"),
        Arm("main", "fastclip-v3", {"tau": TAUS, **rho, "tau_lr": (1e-4, 1e-3)}),
        Arm("main", "neuclip", {"tau": TAUS, "through_alpha": (0, 1)}),
        Arm("main", "residual", {"tau": TAUS, "gamma": (0.3, 0.5, 0.8)}),
        Arm("main", "emc2", {"tau": (0.03, *TAUS), "burn_in": (0.5, 0.9), "encode": (0,)}),
        Arm("main", "emc2", {"tau": TAUS, "burn_in": (0.5,), "encode": (1,)}, variant="encode"),
        Arm("main", "infonce", {"tau": (*TAUS, 0.18)}, batch_size=256),
    ]


def caption_arms() -> list[Arm]:
    """The estimator knows pairs with the same caption, false negatives that an exact softmax finds first."""
    taus, group = {"tau": REGIME_TAUS}, {"group": (1,)}
    arms = {
        "infonce": {"tau": (0.08, 0.12)},
        "infonce-no-positive": taus,
        "sogclr": {**taus, "gamma": (0.5,), "reference": ("none",)},
        "residual": {**taus, "gamma": (0.8,)},
        "emc2": {**taus, "burn_in": (0.5,), "encode": (0,)},
    }
    encode = {"tau": (*REGIME_TAUS, 0.12), "burn_in": (0.5,), "encode": (1,), "rescore": (1,), **group}
    regime = "captions as groups"
    return [
        *(Arm(regime, method, {**grid, **group}) for method, grid in arms.items()),
        Arm(regime, "emc2", encode, variant="encode, rescored"),
    ]


def regime_arms() -> list[Arm]:
    """Regimes where state should pay: few negatives per batch, a sharp softmax, rows visited more often."""
    regimes: dict[str, tuple[dict[str, int], tuple[float, ...]]] = {
        "batch 8, 8k pairs, 4 epochs": ({"batch_size": 8, "limit": 8192, "epochs": 4}, REGIME_TAUS),
        "batch 32": ({"batch_size": 32}, TAUS),
        "batch 16": ({"batch_size": 16}, REGIME_TAUS),
        "batch 16, 8k pairs, 12 epochs": ({"batch_size": 16, "limit": 8192, "epochs": 12}, REGIME_TAUS),
        "tau 0.02": ({}, (0.02,)),
    }
    arms = []
    for regime, (setting, taus) in regimes.items():
        arms += [Arm(regime, method, {"tau": taus}, **setting) for method in ("infonce", "infonce-no-positive")]
        arms += [Arm(regime, "sogclr", {"tau": taus, "gamma": (0.3, 0.8), "reference": ("none",)}, **setting)]
        arms += [Arm(regime, "neuclip", {"tau": taus, "through_alpha": (0, 1)}, **setting)]
        arms += [Arm(regime, "residual", {"tau": taus, "gamma": (0.5, 0.8)}, **setting)]
        if regime == "batch 32":
            arms += [Arm(regime, "emc2", {"tau": taus, "burn_in": (0.5, 0.9), "encode": (0,)}, **setting)]
            encode = {"tau": taus, "burn_in": (0.5,), "encode": (1,)}
            arms += [Arm(regime, "emc2", encode, **setting, variant="encode")]
            rescore = {**encode, "tau": taus[1:2], "rescore": (1,)}
            arms += [Arm(regime, "emc2", rescore, **setting, variant="encode, rescored")]
        dual = {"tau": taus[-1:], "rho": (1.0, 2.5), "tau_lr": (0.002,), "reference": ("none",)}
        arms += [Arm(regime, "isogclr", dual, **setting, variant="reference none")] if regime != "tau 0.02" else []
    return arms


def batch_arms() -> list[Arm]:
    """Which samples share a batch, with and without state per sample; chosen batches begin with the second epoch."""
    settings: dict[str, dict[str, int]] = {
        "chosen batches of 32, 8k pairs, 12 epochs": {"batch_size": 32, "limit": 8192, "epochs": 12},
        "chosen batches of 32, 3 epochs": {"batch_size": 32, "epochs": 3},
    }
    arms = []
    for regime, setting in settings.items():
        known = {"group": (1,)}  # else pairs with the same caption are chosen for being hard
        small = "limit" in setting  # the large one takes its temperatures from what was best without chosen batches
        infonce: Grid = {"tau": (*TAUS, 0.18) if small else TAUS[1:], **known}
        sogclr: Grid = {"tau": REGIME_TAUS if small else (0.08,), "gamma": (0.5,), "reference": ("none",), **known}
        for kind in ("random", "ordered", "spectral"):
            options: dict[str, Any] = {"variant": kind, "batches": {} if kind == "random" else {"kind": kind}}
            arms += [Arm(regime, "infonce", infonce, **setting, **options)]
            arms += [Arm(regime, "sogclr", sogclr, **setting, **options)]
        control: Grid = {"tau": REGIME_TAUS if small else (0.08,), **known}
        arms += [Arm(regime, "infonce-no-positive", control, **setting, variant="random")]
        soft: dict[str, Any] = {"variant": "spectral 0.25", "batches": {"kind": "spectral", "sharpness": 0.25}}
        arms += [Arm(regime, "infonce", infonce, **setting, **soft)]
        options = {"variant": "spectral", "batches": {"kind": "spectral"}}
        arms += [Arm(regime, "infonce-no-positive", {**control, "tau": TAUS[1:]}, **setting, **options)]
        if small:
            unknown: Grid = {"tau": (0.12,), "group": (0,)}
            spectral = {"kind": "spectral"}
            arms += [Arm(regime, "infonce", unknown, **setting, variant="random, captions unknown")]
            arms += [Arm(regime, "infonce", unknown, **setting, variant="spectral, captions unknown", batches=spectral)]
    return arms
