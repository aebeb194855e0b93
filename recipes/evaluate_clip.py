"""Command line of clip-benchmark for a model that is described by a JSON file.

python -m recipes.evaluate_clip recipes/clip/tiny.json eval --model tiny --pretrained runs/clip/epoch_2.pt \
    --dataset wds/zeroshot --dataset_root runs/glyphs/benchmark/zeroshot --output runs/clip/zeroshot.json

Models that open_clip knows by name need no such file: call clip_benchmark directly.
"""

import sys

import open_clip
from clip_benchmark.cli import main

if __name__ == "__main__":
    if len(sys.argv) < 2 or not sys.argv[1].endswith(".json"):
        sys.exit(f"the first argument is the model's JSON file, got {sys.argv[1:2]}\n\n{__doc__}")
    open_clip.add_model_config(sys.argv.pop(1))
    main()
