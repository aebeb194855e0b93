"""Compile the kernels of compopt.kernel.triton ahead of time, without a device, and report their resource usage.

    python -m benchmarks.compiled sm_90            # facts of every kernel for one target, as JSON; needs triton
    python -m benchmarks.compiled gfx942 --daily   # of the kernels that the tests ask for

Each kernel is compiled in every precision and in these variants: ``shared`` (one temperature, no maximum), ``anchors``
(a temperature per anchor, with moments and counts) and ``keys`` (additionally three keys). Triton's interpreter must be
off (TRITON_INTERPRET).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

from compopt.kernel.triton.sweep import tile_of

KERNELS = ("sums", "coefficients")
PRECISIONS = ("bf16", "tf32", "tf32x3")
TARGETS: dict[str, tuple[str, Any, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "gfx942": ("hip", "gfx942", 64),
}
PLAIN = {"KEYS": 1, "UPCAST": False, "EVEN": True}
PLAIN |= {"ROWS": True, "COLUMNS": True, "SHIFTED": True, "MOMENTS": True, "COUNTED": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "shared": {"SHIFTED": False, "MOMENTS": False, "COUNTED": False},
    "anchors": {},
    "keys": {"KEYS": 3},
}
# Tensor-core (AMD: matrix-core) instruction of each target.
INSTRUCTIONS = {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "gfx942": "v_mfma"}


def cases(target: str, daily: bool) -> Iterator[tuple[str, str, str]]:
    """Yield kernel, precision and variant of every compilation for a target."""
    for precision in PRECISIONS:
        if precision == "tf32x3" and (daily or target == "gfx942"):  # not supported by gfx942
            continue
        for kernel in KERNELS:
            for variant in VARIANTS:
                if not daily or variant != "keys" or precision == "tf32":
                    yield kernel, precision, variant


def compile_one(kernel: str, precision: str, variant: str, target: str) -> dict[str, Any]:
    """Compile a kernel and return registers, bytes of stack and of shared memory, and tensor-core instructions."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from compopt.kernel.triton import language

    function = getattr(language, kernel)
    tile = tile_of(precision, maxima=kernel == "sums" and variant != "shared")
    constants = {**PLAIN, **VARIANTS[variant], "PRECISION": "ieee" if precision == "bf16" else precision, **tile}
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    signature = {name: _type(name, precision, constants) for name in function.arg_names}
    # the same alignment as at run time, where P and Q are arbitrary
    multiples = ("d", "out_stride")
    aligned = [n for n, (name, kind) in enumerate(signature.items()) if kind[0] == "*" or name in multiples]
    source = ASTSource(
        function,
        signature,
        constexprs={name: value for name, value in constants.items() if name in signature},
        attrs={(n,): [["tt.divisibility", 16]] for n in aligned},
    )
    made = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    read = _of_amd if target.startswith("gfx") else _of_nvidia
    facts = {"kernel": kernel, "precision": precision, "variant": variant, "target": target}
    facts |= {"tile": list(tile.values()), "shared": made.metadata.shared}
    return {**facts, **read(made, INSTRUCTIONS[target])}


def _type(name: str, precision: str, constants: dict[str, Any]) -> str:
    """Return the type of an argument in Triton's signature."""
    if name in constants:
        return "constexpr"
    if name in ("x", "y", "out"):
        return "*bf16" if precision == "bf16" else "*fp32"
    if name.endswith("_keys"):
        return "*i32"
    if name == "shared":
        return "fp32"
    pointer = name.startswith(("row_", "column_")) and not name.endswith(("_stride", "_plane"))
    return "*fp32" if pointer else "i32"


def _of_nvidia(made: Any, instruction: str) -> dict[str, int]:
    """Return registers and stack (with spills) as reported by Triton's cuobjdump, and the instruction count in PTX."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"\b{name}:(\d+)", text)[1]) for name in ("REG", "STACK", "LOCAL"))
    return {"registers": registers, "stack": stack + local, "instructions": made.asm["ptx"].count(instruction)}


def _of_amd(made: Any, instruction: str) -> dict[str, int]:
    """Return the same values, read from the metadata and the text of the assembly."""
    text = made.asm["amdgcn"]
    names = ("vgpr_count", "private_segment_fixed_size", "vgpr_spill_count")
    registers, stack, spills = (int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in names)
    return {"registers": registers, "stack": stack + 4 * spills, "instructions": text.count(instruction)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--daily", action="store_true", help="compile only the kernels that the tests need")
    args = parser.parse_args()
    for case in cases(args.target, args.daily):
        print(json.dumps(compile_one(*case, args.target)), flush=True)


if __name__ == "__main__":
    main()
